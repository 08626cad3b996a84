//! Common Access Tokens for MoQ (draft-ietf-moq-c4m-01, "C4M"): CWTs with the claim `moqt`.
//!
//! A token is a tagged COSE_Mac0 or COSE_Sign1 (RFC 9052), or has the compact form of the draft's test vectors. The
//! compact form is header, payload and signature in base64url, and the signature covers the text of the first two. The
//! draft leaves the keys of claims open ("TBD"), so this module uses those of the test vectors.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use bytes::Bytes;
use ciborium::Value;
use coset::{
    CborSerializable, CoseMac0, CoseSign1, Header, HeaderBuilder, RegisteredLabelWithPrivate,
    TaggedCborSerializable, iana,
};
use millrace_moq::name::MAX_FIELDS;

use super::{
    grant::{Action, Actions, Grant, GrantMatch, GrantScope, list_issuers},
    keys::{self, AccessKey, KeyError, Signer, TokenAlgorithm},
    parts::{parts, time},
    refusal::TokenError,
};

const ISS: i64 = 1;
const SUB: i64 = 2;
const AUD: i64 = 3;
const EXP: i64 = 4;
const NBF: i64 = 5;
const IAT: i64 = 6;
const CTI: i64 = 7;
const MOQT: i64 = 327;
const MOQT_REVAL: i64 = 328;

/// CBOR tag of a CWT (RFC 8392), which precedes the COSE tag.
const CWT_TAG: u64 = 61;
/// Number of the algorithm "HMAC-SHA256" in the compact form of the draft's test vectors.
const VECTORS_HMAC: i64 = -4;

const MAX_SCOPES: usize = 256;
const PREFIX: i64 = 1;
const SUFFIX: i64 = 2;

/// Reports whether a token has the compact form. Its header is a CBOR map, whereas a JWT's header is JSON.
pub fn is_compact(token: &[u8]) -> bool {
    let Some([header, ..]) = parts(token) else { return false };
    let header = URL_SAFE_NO_PAD.decode(header).unwrap_or_default();
    header.first().is_some_and(|first| first >> 5 == 5)
}

/// Reports whether a token begins with a CBOR tag of COSE_Mac0 or COSE_Sign1.
pub fn is_tagged(token: &[u8]) -> bool {
    matches!(without_cwt_tag(token).first(), Some(0xd1 | 0xd2))
}

/// Checks a token's signature, and reads its claims.
pub fn open(token: &[u8], keys: &[AccessKey]) -> Result<Grant, TokenError> {
    let (payload, signers) =
        if is_compact(token) { open_compact(token, keys)? } else { open_cose(token, keys)? };
    let value: Value =
        ciborium::from_reader(&payload[..]).map_err(|_| TokenError::Malformed("its claims"))?;
    let Value::Map(claims) = value else { return Err(TokenError::Malformed("its claims are no map")) };
    Ok(Grant { signers: list_issuers(&signers), ..grant(claims)? })
}

/// A payload, and the keys that verified its signature.
type Verified<'a> = (Vec<u8>, Vec<&'a AccessKey>);

fn open_compact<'a>(token: &[u8], keys: &'a [AccessKey]) -> Result<Verified<'a>, TokenError> {
    let [header, payload, tag] = parts(token).ok_or(TokenError::Malformed("it has not three parts"))?;
    let decode = |part: &[u8], what| URL_SAFE_NO_PAD.decode(part).map_err(|_| TokenError::Malformed(what));
    let message = &token[..header.len() + 1 + payload.len()];
    let head = Header::from_slice(&decode(header, "its header")?)
        .map_err(|_| TokenError::Malformed("its header"))?;
    let (algorithm, id) = head_of(&head)?;
    let signers = keys::signers(keys, algorithm, id.as_deref(), message, &decode(tag, "its signature")?)?;
    Ok((decode(payload, "its payload")?, signers))
}

fn open_cose<'a>(token: &[u8], keys: &'a [AccessKey]) -> Result<Verified<'a>, TokenError> {
    let malformed = |_| TokenError::Malformed("it is neither COSE_Mac0 nor COSE_Sign1, tagged");
    let inner = without_cwt_tag(token);
    let mut signers = Vec::new();
    // The CBOR tags of COSE_Mac0 and COSE_Sign1 take one byte.
    if inner.first() == Some(&(0xc0 | iana::CborTag::CoseMac0 as u8)) {
        let mac = CoseMac0::from_tagged_slice(inner).map_err(malformed)?;
        let (algorithm, id) = head_of(&mac.protected.header)?;
        // COSE_Mac0 takes only HMACs and COSE_Sign1 only signatures, so that no key is used for the other kind.
        if !algorithm.is_mac() {
            return Err(TokenError::Signature);
        }
        let payload = mac.payload.clone().ok_or(TokenError::Malformed("it has no payload"))?;
        let check = |tag: &[u8], data: &[u8]| {
            signers = keys::signers(keys, algorithm, id.as_deref(), data, tag)?;
            Ok(())
        };
        mac.verify_payload_tag(&[], || TokenError::Signature, check)?;
        return Ok((payload, signers));
    }
    let sign = CoseSign1::from_tagged_slice(inner).map_err(malformed)?;
    let (algorithm, id) = head_of(&sign.protected.header)?;
    if algorithm.is_mac() {
        return Err(TokenError::Signature);
    }
    let payload = sign.payload.clone().ok_or(TokenError::Malformed("it has no payload"))?;
    let check = |tag: &[u8], data: &[u8]| {
        signers = keys::signers(keys, algorithm, id.as_deref(), data, tag)?;
        Ok(())
    };
    sign.verify_signature(&[], check)?;
    Ok((payload, signers))
}

fn without_cwt_tag(token: &[u8]) -> &[u8] {
    // 0xd8 begins a CBOR tag whose number is in the next byte.
    token.strip_prefix(&[0xd8, CWT_TAG as u8]).unwrap_or(token)
}

/// Returns the algorithm and the key's ID from a header.
fn head_of(header: &Header) -> Result<(TokenAlgorithm, Option<String>), TokenError> {
    if !header.crit.is_empty() {
        return Err(TokenError::Unsupported("critical header parameters"));
    }
    let number = match &header.alg {
        Some(RegisteredLabelWithPrivate::Assigned(algorithm)) => coset::iana::EnumI64::to_i64(algorithm),
        Some(RegisteredLabelWithPrivate::PrivateUse(number)) => *number,
        _ => return Err(TokenError::Algorithm),
    };
    let algorithm = match number {
        VECTORS_HMAC => Some(TokenAlgorithm::Hs256),
        number => TokenAlgorithm::from_cose(number),
    };
    let id = (!header.key_id.is_empty()).then(|| String::from_utf8_lossy(&header.key_id).into_owned());
    Ok((algorithm.ok_or(TokenError::Algorithm)?, id))
}

fn grant(claims: Vec<(Value, Value)>) -> Result<Grant, TokenError> {
    let mut grant = Grant::default();
    let mut seen = Vec::new();
    for (name, value) in claims {
        let key = integer(&name).ok_or(TokenError::Unsupported("a claim with a name"))?;
        // A map with a repeated key is not valid (RFC 8949, section 5.6), since readers may take different values from
        // it.
        if seen.contains(&key) {
            return Err(TokenError::Malformed("a claim is repeated"));
        }
        seen.push(key);
        match key {
            ISS => grant.issuer = Some(text(value)?),
            SUB => grant.subject = Some(text(value)?),
            AUD => {
                grant.audience = match value {
                    Value::Array(many) => many.into_iter().map(text).collect::<Result<_, _>>()?,
                    one => vec![text(one)?],
                };
                if grant.audience.is_empty() {
                    return Err(TokenError::Malformed("it is for nobody"));
                }
            }
            EXP => grant.expires = Some(time(number(&value)?)?),
            NBF => grant.not_before = Some(time(number(&value)?)?),
            // The time of issue restricts nothing, but must be a valid time.
            IAT => drop(time(number(&value)?)?),
            CTI => grant.id = Some(identifier(value)?),
            MOQT => grant.scopes = scopes(value)?,
            // The claim `moqt-reval` gives an interval at which the token's rights have to be checked again. The relay
            // needs no interval: it checks the rights again whenever something changes that they depend on.
            MOQT_REVAL if number(&value)? >= 0.0 => {}
            MOQT_REVAL => return Err(TokenError::Malformed("moqt-reval")),
            // Unknown claims are refused, because claims of CAT restrict the use of a token.
            _ => return Err(TokenError::Unsupported("an unknown claim")),
        }
    }
    Ok(grant)
}

fn scopes(value: Value) -> Result<Vec<GrantScope>, TokenError> {
    let malformed = TokenError::Malformed("its moqt claim");
    match value {
        Value::Array(scopes) if (1..=MAX_SCOPES).contains(&scopes.len()) => {
            scopes.into_iter().map(scope).collect()
        }
        _ => Err(malformed),
    }
}

fn scope(value: Value) -> Result<GrantScope, TokenError> {
    let malformed = TokenError::Malformed("a scope of its moqt claim");
    let Value::Array(items) = value else { return Err(malformed) };
    let mut items = items.into_iter();
    let (Some(Value::Array(actions)), namespace, track) = (items.next(), items.next(), items.next()) else {
        return Err(malformed);
    };
    if actions.is_empty() || items.next().is_some() {
        return Err(malformed);
    }
    let mut scope =
        GrantScope { actions: Actions::default(), namespace: Vec::new(), closed: false, track: None };
    for action in &actions {
        match integer(action).map(u64::try_from) {
            Some(Ok(number)) if number <= Actions::LAST => scope.actions.add_number(number),
            Some(_) => return Err(TokenError::Unsupported("an unknown action")),
            None => return Err(malformed),
        }
    }
    match namespace {
        None => {}
        Some(Value::Array(fields)) if (1..=MAX_FIELDS + 1).contains(&fields.len()) => {
            for field in fields {
                match (scope.closed, field) {
                    (true, _) => return Err(TokenError::Malformed("nil before the end of a namespace")),
                    (false, Value::Null) => scope.closed = true,
                    (false, field) => scope.namespace.push(bin_match(field)?),
                }
            }
        }
        Some(_) => return Err(malformed),
    }
    scope.track = track.map(bin_match).transpose()?;
    Ok(scope)
}

fn bin_match(value: Value) -> Result<GrantMatch, TokenError> {
    let malformed = TokenError::Malformed("a match of its moqt claim");
    match value {
        Value::Bytes(bytes) => Ok(GrantMatch::Exact(bytes.into())),
        Value::Array(pair) => match (pair.first().and_then(integer), pair.get(1), pair.len()) {
            (Some(kind), Some(Value::Bytes(bytes)), 2) => match kind {
                PREFIX => Ok(GrantMatch::Prefix(Bytes::copy_from_slice(bytes))),
                SUFFIX => Ok(GrantMatch::Suffix(Bytes::copy_from_slice(bytes))),
                _ => Err(TokenError::Unsupported("an unknown kind of match")),
            },
            _ => Err(malformed),
        },
        _ => Err(malformed),
    }
}

fn integer(value: &Value) -> Option<i64> {
    value.as_integer().and_then(|integer| i64::try_from(integer).ok())
}

fn number(value: &Value) -> Result<f64, TokenError> {
    let number = match value {
        Value::Integer(_) => integer(value).map(|number| number as f64),
        Value::Float(float) => Some(*float).filter(|float| float.is_finite()),
        _ => None,
    };
    number.ok_or(TokenError::Malformed("a number that is none"))
}

fn text(value: Value) -> Result<String, TokenError> {
    value.into_text().map_err(|_| TokenError::Malformed("a text that is none"))
}

/// Returns a CWT ID as text, or in hexadecimal if it is not printable text. IDs should be bytes, but the draft's test
/// vectors have text.
fn identifier(value: Value) -> Result<String, TokenError> {
    match value {
        Value::Text(text) => Ok(text),
        Value::Bytes(bytes) => Ok(match String::from_utf8(bytes) {
            Ok(text) if !text.chars().any(char::is_control) => text,
            Ok(text) => hexadecimal(text.as_bytes()),
            Err(error) => hexadecimal(error.as_bytes()),
        }),
        _ => Err(TokenError::Malformed("its ID")),
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Claims of a token to be made.
#[derive(Clone, Debug, Default)]
pub struct CatClaims {
    /// The token's ID (`cti`).
    pub id: Option<String>,
    /// The subject (`sub`).
    pub subject: Option<String>,
    /// The issuer (`iss`).
    pub issuer: Option<String>,
    /// The audiences (`aud`). If empty, the token names none.
    pub audience: Vec<String>,
    /// The time when the token expires (`exp`), in seconds since 1970.
    pub expires: Option<u64>,
    /// The time from which the token is valid (`nbf`), in seconds since 1970.
    pub not_before: Option<u64>,
    /// The time when the token was issued (`iat`), in seconds since 1970.
    pub issued: Option<u64>,
    /// The actions that the token allows, and the namespaces and tracks that they apply to (`moqt`).
    pub scopes: Vec<GrantScope>,
}

/// Makes a token: a tagged COSE_Mac0 or COSE_Sign1 with a CWT's tag, or the compact form.
///
/// # Errors
/// Fails if the key cannot sign, or if the claims cannot be expressed in C4M.
pub fn make(claims: &CatClaims, signer: &Signer, compact: bool) -> Result<Vec<u8>, KeyError> {
    if claims.scopes.iter().any(|scope| scope.namespace.is_empty() && !scope.closed && scope.track.is_some())
    {
        return Err(KeyError::Unusable("C4M has no way to name a track in every namespace"));
    }
    let payload = encode(&claims_value(claims))?;
    let number = cose_number(signer.algorithm);
    let algorithm = <iana::Algorithm as iana::EnumI64>::from_i64(number);
    let algorithm = algorithm.ok_or(KeyError::Unusable("an algorithm without a COSE number"))?;
    let mut header = HeaderBuilder::new().algorithm(algorithm);
    if let Some(id) = &signer.id {
        header = header.key_id(id.clone().into_bytes());
    }
    let header = header.build();
    let bad = |_| KeyError::Unusable("claims that cannot be encoded");
    if compact {
        let header = header.to_vec().map_err(bad)?;
        let message = format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(payload));
        let tag = URL_SAFE_NO_PAD.encode(signer.sign(message.as_bytes())?);
        return Ok(format!("{message}.{tag}").into_bytes());
    }
    let sign = |data: &[u8]| signer.sign(data);
    let cose = if signer.algorithm.is_mac() {
        let mac = coset::CoseMac0Builder::new().protected(header).payload(payload);
        mac.try_create_tag(&[], sign)?.build().to_tagged_vec()
    } else {
        let signed = coset::CoseSign1Builder::new().protected(header).payload(payload);
        signed.try_create_signature(&[], sign)?.build().to_tagged_vec()
    };
    Ok([&[0xd8, CWT_TAG as u8][..], &cose.map_err(bad)?].concat())
}

fn cose_number(algorithm: TokenAlgorithm) -> i64 {
    (-300..10).find(|number| TokenAlgorithm::from_cose(*number) == Some(algorithm)).unwrap_or_default()
}

fn claims_value(claims: &CatClaims) -> Value {
    let mut map: Vec<(Value, Value)> = Vec::new();
    let mut put = |key: i64, value: Option<Value>| {
        map.extend(value.map(|value| (Value::from(key), value)));
    };
    let text = |text: &Option<String>| text.clone().map(Value::from);
    put(ISS, text(&claims.issuer));
    put(SUB, text(&claims.subject));
    let audience = claims.audience.iter().cloned().map(Value::from).collect();
    put(AUD, (!claims.audience.is_empty()).then_some(Value::Array(audience)));
    put(EXP, claims.expires.map(Value::from));
    put(NBF, claims.not_before.map(Value::from));
    put(IAT, claims.issued.map(Value::from));
    put(CTI, claims.id.clone().map(|id| Value::Bytes(id.into_bytes())));
    let scopes = claims.scopes.iter().map(scope_value).collect();
    put(MOQT, (!claims.scopes.is_empty()).then_some(Value::Array(scopes)));
    Value::Map(map)
}

fn scope_value(scope: &GrantScope) -> Value {
    let of_match = |field: &GrantMatch| match field {
        GrantMatch::Exact(bytes) => Value::Bytes(bytes.to_vec()),
        GrantMatch::Prefix(bytes) => Value::Array(vec![PREFIX.into(), Value::Bytes(bytes.to_vec())]),
        GrantMatch::Suffix(bytes) => Value::Array(vec![SUFFIX.into(), Value::Bytes(bytes.to_vec())]),
    };
    let mut namespace: Vec<_> = scope.namespace.iter().map(of_match).collect();
    if scope.closed {
        namespace.push(Value::Null);
    }
    let mut items = vec![Value::Array(scope.actions.numbers().map(Value::from).collect())];
    if !namespace.is_empty() {
        items.push(Value::Array(namespace));
        items.extend(scope.track.as_ref().map(of_match));
    }
    Value::Array(items)
}

fn encode(value: &Value) -> Result<Vec<u8>, KeyError> {
    let mut out = Vec::new();
    ciborium::into_writer(value, &mut out)
        .map_err(|_| KeyError::Unusable("claims that cannot be encoded"))?;
    Ok(out)
}

/// Returns all actions that a publisher, a subscriber, or both need.
pub fn actions(publish: bool, subscribe: bool) -> Actions {
    let mut actions = vec![Action::ClientSetup, Action::RequestUpdate];
    if publish {
        actions.extend([Action::Publish, Action::PublishNamespace]);
    }
    if subscribe {
        actions.extend([Action::Subscribe, Action::SubscribeNamespace, Action::Fetch, Action::TrackStatus]);
    }
    Actions::from_actions(&actions)
}
