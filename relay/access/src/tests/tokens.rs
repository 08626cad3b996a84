use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde_json::json;

use super::*;
use crate::cat;

/// Returns a signed JWT with any claims, including those that [`crate::jwt::JwtClaims`] cannot express.
fn jwt(claims: &serde_json::Value) -> Credential {
    jwt_with(&json!({ "alg": "HS256" }), claims)
}

fn jwt_with(header: &serde_json::Value, claims: &serde_json::Value) -> Credential {
    let encode = |value: &serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let message = format!("{}.{}", encode(header), encode(claims));
    let tag = URL_SAFE_NO_PAD.encode(signer().sign(message.as_bytes()).unwrap());
    token::credential_from_text(&format!("{message}.{tag}"))
}

fn required() -> Requirements {
    Requirements {
        keys: keys(),
        audience: vec!["relay".into()],
        revoked: ["gone".to_owned()].into(),
        ..Requirements::default()
    }
}

#[test]
fn jwt_with_expired_or_malformed_claims_is_refused() {
    let now = at(1000);
    let fine = json!({ "root": "room", "put": "alice" });
    let with = |name: &str, value: serde_json::Value| {
        let mut claims = fine.clone();
        claims[name] = value;
        jwt(&claims)
    };
    let table: Vec<(&str, Credential, Result<(), TokenError>)> = vec![
        ("plain", jwt(&fine), Ok(())),
        ("lists", jwt(&json!({ "put": ["a", "b/c"], "get": [""] })), Ok(())),
        ("expires later", with("exp", json!(1001)), Ok(())),
        ("expires now", with("exp", json!(1000)), Err(TokenError::Expired)),
        ("expired", with("exp", json!(1)), Err(TokenError::Expired)),
        ("fraction", with("exp", json!(1000.5)), Ok(())),
        ("negative time", with("exp", json!(-1)), Err(TokenError::Malformed("a time that is none"))),
        ("endless time", with("exp", json!(1e300)), Err(TokenError::Malformed("a time that is none"))),
        ("time as text", with("exp", json!("1001")), Err(TokenError::Malformed("its claims"))),
        ("not yet", with("nbf", json!(1001)), Err(TokenError::NotYet)),
        ("already", with("nbf", json!(1000)), Ok(())),
        ("revoked", with("jti", json!("gone")), Err(TokenError::Revoked)),
        ("not revoked", with("jti", json!("here")), Ok(())),
        ("for us", with("aud", json!(["other", "relay"])), Ok(())),
        ("for others", with("aud", json!("other")), Err(TokenError::Audience)),
        ("unknown claim", with("colour", json!("red")), Ok(())),
        ("holder of a key", with("cnf", json!({})), Err(TokenError::Unsupported("proof of possession"))),
        ("nothing granted", jwt(&json!({})), Err(TokenError::Malformed("it grants nothing"))),
        (
            "too deep",
            jwt(&json!({ "put": "a/".repeat(33) })),
            Err(TokenError::Malformed("a path that is no namespace")),
        ),
        ("no claims", jwt(&json!([1])), Err(TokenError::Malformed("its claims"))),
        ("another algorithm", jwt_with(&json!({ "alg": "HS384" }), &fine), Err(TokenError::Signature)),
        ("none", jwt_with(&json!({ "alg": "none" }), &fine), Err(TokenError::Malformed("its header"))),
        (
            "critical",
            jwt_with(&json!({ "alg": "HS256", "crit": ["b64"], "b64": false }), &fine),
            Err(TokenError::Unsupported("critical header parameters")),
        ),
        ("text", token::credential_from_text("hello"), Err(TokenError::Malformed("it has not three parts"))),
        ("empty", token::credential_from_text(""), Err(TokenError::Malformed("it has not three parts"))),
        ("dots", token::credential_from_text(".."), Err(TokenError::Malformed("its header"))),
    ];
    for (what, credential, wanted) in table {
        let found = required().check(&credential, now).map(drop);
        assert_eq!(found, wanted, "{what}");
    }
}

#[test]
fn changed_jwt_is_refused() {
    let good = jwt(&json!({ "put": "a" })).value;
    for at in 0..good.len() {
        let mut bytes = good.to_vec();
        bytes[at] ^= 1;
        let changed = Credential { kind: 0, value: bytes.into() };
        assert!(required().check(&changed, super::at(0)).is_err(), "byte {at}");
    }
}

#[test]
fn jwt_put_and_get_paths_are_relative_to_its_root_claim() {
    let credential = jwt(&json!({ "root": "/room//1/", "put": "alice", "get": "" }));
    let grant = required().check(&credential, at(0)).unwrap();
    let table = [
        (Action::Publish, "room/1/alice", true),
        (Action::PublishNamespace, "room/1/alice/cam", true),
        (Action::Publish, "room/1/bob", false),
        (Action::Publish, "room/1", false),
        (Action::Publish, "room/1/alicex", false),
        (Action::Subscribe, "room/1", true),
        (Action::Fetch, "room/1/bob", true),
        (Action::TrackStatus, "room/1/bob", true),
        (Action::SubscribeNamespace, "room/1", true),
        (Action::SubscribeTracks, "room/1", true),
        (Action::Subscribe, "room/2", false),
        (Action::SubscribeNamespace, "room", false),
    ];
    for (action, path, wanted) in table {
        assert_eq!(grant.allows(action, &resource(path, None)), wanted, "{action:?} {path}");
    }
}

/// Tests with the keys and tokens of draft-ietf-moq-c4m-01, appendix A.
mod vectors {
    use super::*;

    const MOQT_PUBLISHER: &str = "ogEjEGNDQVQ.owF4GGh0dHBzOi8vYXV0aC5leGFtcGxlLmNvbQQaZVVCgBkBR4GDggIGgktleGFtcGxlLmNvbUVhbGljZYIBRnZpZGVvLQ.oAPD24Wu_zHnDcuM6a-ePeGvRJjbCa6U7iswdsKzFDk";
    const MOQT_SUBSCRIBER: &str = "ogEjEGNDQVQ.owF4GGh0dHBzOi8vYXV0aC5leGFtcGxlLmNvbQQaZVVCgBkBR4GCgwMEB4GCAVJjb25mZXJlbmNlLmV4YW1wbGU.pfUPZultmyCm1GF2PvPXAYXzvK6d1D-OFNBLG1AwjDg";
    const MOQT_MULTI: &str = "ogEjEGNDQVQ.pAF4GGh0dHBzOi8vYXV0aC5leGFtcGxlLmNvbQQaZVVCgBkBR4KCggIGgkxsaXZlLmV4YW1wbGVIc3R1ZGlvLWGCggQHgYIBTGxpdmUuZXhhbXBsZRkBSPlcsA.byEzQmxc28UXFyFekHtgOtaVmWyIPl-63xNMOF0Q_IU";
    const MOQT_ADMIN: &str = "ogEjEGNDQVQ.owF4GGh0dHBzOi8vYXV0aC5leGFtcGxlLmNvbQQaZVVCgBkBR4GBiQABAgMEBQYHCA.XlNItz7OGqnNEbaqZ_bQh6TL-wV6SDr8hXyOLmtQkj4";
    const MOQT_SUFFIX: &str = "ogEjEGNDQVQ.owF4GGh0dHBzOi8vYXV0aC5leGFtcGxlLmNvbQQaZVVCgBkBR4GDgQSBggJMLmV4YW1wbGUuY29tggJGLWF1ZGlv.-eGYTPe_n1PeC0sgHdWCqgnKRHGYF-T89WTk269liBg";
    const ES256: &str = "ogEmEGNDQVQ.pAF4GGh0dHBzOi8vYXV0aC5leGFtcGxlLmNvbQOBeB1odHRwczovL21vcS1yZWxheS5leGFtcGxlLmNvbQQaZVVCgAUaZVPxAA.-jMV6d4GH9d9gUOUQormHaPXoh_f-xmAKwxXXFeAmOfNS2t1oWkN7tTCuq6ZS_xGLg2KIAbz6JeA80NXOClNeg";
    const EXPIRED: &str = "ogEjEGNDQVQ.ogF4GGh0dHBzOi8vYXV0aC5leGFtcGxlLmNvbQQaX14QAA.lq8nGBiZm80yUwl1kH_Tv2prKu_nV20JvxVJW8ZGkho";
    const NOT_YET: &str = "ogEjEGNDQVQ.owF4GGh0dHBzOi8vYXV0aC5leGFtcGxlLmNvbQQaZVaUAAUaZVVCgA.fPIUugY7_oSeHlheu83_8Yyljsk3iP2zGeWRUi7NtUs";
    const ISSUER: &str = "ogEjEGNDQVQ.owF4GGh0dHBzOi8vZXZpbC5leGFtcGxlLmNvbQOBeBlodHRwczovL3JlbGF5LmV4YW1wbGUuY29tBBplVUKA.Xo7FCr_MGSyVX0C9sueeapSfboIHkrkysurn2VjC9PU";
    const AUDIENCE: &str = "ogEjEGNDQVQ.owF4GGh0dHBzOi8vYXV0aC5leGFtcGxlLmNvbQOBeB9odHRwczovL290aGVyLXJlbGF5LmV4YW1wbGUuY29tBBplVUKA.b8KxAKxJglzhELMuc9bYmsikrx3F9Y3YdvpfHLbsyk0";
    const VALID: &str = "ogEjEGNDQVQ.pAF4GGh0dHBzOi8vYXV0aC5leGFtcGxlLmNvbQOBeBlodHRwczovL3JlbGF5LmV4YW1wbGUuY29tBBplVUKABRplU_EA.9SztgnG4xgw8U9zDFnqPIuPn6hLwuilSigQcfPsArSg";
    const TAMPERED: &str = "ogEjEGNDQVQ.owF4GGh0dHBzOi8vYXV0aC5leGFtcGxlLmNvbQOBeBlodHRwczovL3JlbGF5LmV4YW1wbGUuY29tBBplVUKA.pF7GD7Gj-B0YtejX7fRwLlUmEkje-ME81oCc9oZaaYY";
    /// A token with `catnip` and `catu`, which are not enforced here.
    const FULL: &str = "ogEjEGNDQVQ.qgF4Gmh0dHBzOi8vaXNzdWVyLm1vcS5leGFtcGxlAnZ1c2VyOmFsaWNlQGV4YW1wbGUuY29tA4J4Gmh0dHBzOi8vcmVsYXkxLmV4YW1wbGUuY29teBpodHRwczovL3JlbGF5Mi5leGFtcGxlLmNvbQQaZVVCgAUaZVPxAAYaZVPxAAdKdmVjdG9yLTAwMhkBNmZDQVQtdjEZATeBbDIwMy4wLjExMy41MBkBOAo.AqpYox40q1P6s8dVtHzwj0WKNgPaTZM9fAsc5GFPRNo";

    fn vector_keys() -> Vec<AccessKey> {
        let secret: Vec<u8> = (0..32).collect();
        let public = json!({
            "kty": "EC", "crv": "P-256",
            "x": "YP7UuiVanTHJYet0xjVtaMBJuJI7Yfps5mliLmDyn7Y",
            "y": "eQP-EAi4vJmkGunpVii8ZPLxsgwtfp9Rd6PClNRGIpk",
        });
        [vec![keys::read_secret(&secret).unwrap()], keys::read(public.to_string().as_bytes()).unwrap()]
            .concat()
    }

    fn check(token: &str, now: u64) -> Result<Grant, TokenError> {
        let required = Requirements {
            keys: vector_keys(),
            audience: vec!["https://relay.example.com".into(), "https://moq-relay.example.com".into()],
            issuers: vec!["https://auth.example.com".into()],
            ..Requirements::default()
        };
        required.check(&token::credential_from_text(token), at(now))
    }

    #[test]
    fn tokens_are_validated_by_signature_and_time() {
        let now = 1_700_000_000;
        let within = 1_700_003_600;
        let table = [
            ("valid_basic", VALID, within, Ok(())),
            ("token_es256", ES256, within, Ok(())),
            ("invalid_expired", EXPIRED, now, Err(TokenError::Expired)),
            ("invalid_not_yet_valid", NOT_YET, now, Err(TokenError::NotYet)),
            ("invalid_wrong_issuer", ISSUER, within, Err(TokenError::Issuer)),
            ("invalid_wrong_audience", AUDIENCE, within, Err(TokenError::Audience)),
            ("invalid_tampered_signature", TAMPERED, within, Err(TokenError::Signature)),
            ("token_hmac_full", FULL, within, Err(TokenError::Unsupported("an unknown claim"))),
        ];
        for (id, token, now, wanted) in table {
            assert_eq!(check(token, now).map(drop), wanted, "{id}");
        }
        let wrong = [keys::read_secret(&[0xff; 32]).unwrap()];
        assert_eq!(token::open(&token::credential_from_text(VALID), &wrong), Err(TokenError::Signature));
        // A verifier that has only a public key cannot verify an HMAC.
        let public = vector_keys().split_off(1);
        assert_eq!(token::open(&token::credential_from_text(VALID), &public), Err(TokenError::Signature));
    }

    #[test]
    fn cat_moqt_scopes_allow_only_their_actions_namespaces_and_tracks() {
        let table: [(&str, u8, &[&str], &str, bool); 20] = [
            (MOQT_PUBLISHER, 2, &["example.com", "alice"], "video-hd", true),
            (MOQT_PUBLISHER, 6, &["example.com", "alice"], "video-sd", true),
            (MOQT_PUBLISHER, 6, &["example.com", "alice"], "audio-main", false),
            (MOQT_PUBLISHER, 4, &["example.com", "alice"], "video-hd", false),
            (MOQT_PUBLISHER, 6, &["example.com", "bob"], "video-hd", false),
            (MOQT_SUBSCRIBER, 4, &["conference.example.room1"], "audio", true),
            (MOQT_SUBSCRIBER, 7, &["conference.example.room2"], "video", true),
            (MOQT_SUBSCRIBER, 4, &["other.domain"], "audio", false),
            (MOQT_SUBSCRIBER, 6, &["conference.example.room1"], "audio", false),
            (MOQT_MULTI, 6, &["live.example", "studio-a"], "cam1", true),
            (MOQT_MULTI, 4, &["live.example.studio-b"], "cam1", true),
            (MOQT_MULTI, 6, &["live.example", "studio-b"], "cam1", false),
            (MOQT_MULTI, 2, &["other.example", "studio-a"], "", false),
            (MOQT_ADMIN, 0, &["any.namespace"], "any-track", true),
            (MOQT_ADMIN, 6, &["any.namespace"], "any-track", true),
            (MOQT_ADMIN, 8, &["any.namespace"], "status", true),
            (MOQT_SUFFIX, 4, &["cdn.example.com"], "stream1-audio", true),
            (MOQT_SUFFIX, 4, &["cdn.example.com"], "stream1-video", false),
            (MOQT_SUFFIX, 4, &["cdn.other.org"], "stream1-audio", false),
            (MOQT_SUFFIX, 0, &["cdn.example.com"], "stream1-audio", false),
        ];
        for (token, action, fields, track, wanted) in table {
            let grant = check(token, 1_700_000_000).unwrap();
            let action = match action {
                0 => Action::ClientSetup,
                2 => Action::PublishNamespace,
                4 => Action::Subscribe,
                6 => Action::Publish,
                7 => Action::Fetch,
                _ => Action::TrackStatus,
            };
            let fields = fields.iter().map(|field| field.as_bytes().to_vec());
            let resource =
                Resource { namespace: Namespace::new(fields).unwrap(), track: Some(track.to_owned().into()) };
            assert_eq!(grant.allows(action, &resource), wanted, "{action:?} {resource:?}");
        }
    }
}

/// Returns a CAT with these claims, in COSE_Mac0.
fn cose(claims: &ciborium::Value) -> Credential {
    let mut payload = Vec::new();
    ciborium::into_writer(claims, &mut payload).unwrap();
    let header = coset::HeaderBuilder::new().algorithm(coset::iana::Algorithm::HMAC_256_256).build();
    let mac = coset::CoseMac0Builder::new().protected(header).payload(payload);
    let mac = mac.create_tag(&[], |data| signer().sign(data).unwrap()).build();
    let value = coset::TaggedCborSerializable::to_tagged_vec(mac).unwrap();
    Credential { kind: KIND_CAT, value: value.into() }
}

#[test]
fn cat_token_with_unknown_or_malformed_claims_is_refused() {
    use ciborium::cbor;
    let bytes = |text: &str| ciborium::Value::Bytes(text.as_bytes().to_vec());
    let scope = |scope: ciborium::Value| cbor!({ 327 => [scope] }).unwrap();
    let publish = cbor!([[6]]).unwrap();
    let table = [
        ("no claim", cbor!({}).unwrap(), Ok(())),
        ("a scope of actions", scope(publish.clone()), Ok(())),
        ("a namespace", scope(cbor!([[6], [bytes("a"), null]]).unwrap()), Ok(())),
        ("a prefix", scope(cbor!([[6], [[1, bytes("a")]], [2, bytes("b")]]).unwrap()), Ok(())),
        ("a float", cbor!({ 4 => 2000.5 }).unwrap(), Ok(())),
        ("revalidation", cbor!({ 327 => [publish], 328 => 300.0 }).unwrap(), Ok(())),
        ("kind of match", scope(cbor!([[6], [[3, bytes("a")]]]).unwrap()), Err("an unknown kind of match")),
        ("action", scope(cbor!([[9]]).unwrap()), Err("an unknown action")),
        ("negative action", scope(cbor!([[-1]]).unwrap()), Err("an unknown action")),
        ("catnip", cbor!({ 311 => ["192.0.2.1"] }).unwrap(), Err("an unknown claim")),
        ("cnf", cbor!({ 8 => {} }).unwrap(), Err("an unknown claim")),
        ("named claim", cbor!({ "moqt" => [] }).unwrap(), Err("a claim with a name")),
        ("no scope", cbor!({ 327 => [] }).unwrap(), Err("its moqt claim")),
        ("no action", scope(cbor!([[]]).unwrap()), Err("a scope of its moqt claim")),
        ("empty namespace", scope(cbor!([[6], []]).unwrap()), Err("a scope of its moqt claim")),
        ("four parts", scope(cbor!([[6], [null], bytes("t"), 1]).unwrap()), Err("a scope of its moqt claim")),
        (
            "nil inside",
            scope(cbor!([[6], [null, bytes("a")]]).unwrap()),
            Err("nil before the end of a namespace"),
        ),
        ("text match", scope(cbor!([[6], ["a"]]).unwrap()), Err("a match of its moqt claim")),
        ("a claim for nobody", cbor!({ 3 => [] }).unwrap(), Err("it is for nobody")),
        ("endless", cbor!({ 4 => (f64::INFINITY) }).unwrap(), Err("a number that is none")),
        ("negative revalidation", cbor!({ 328 => -1 }).unwrap(), Err("moqt-reval")),
        ("a list", cbor!([1]).unwrap(), Err("its claims are no map")),
    ];
    for (what, claims, wanted) in table {
        let found = required().check(&cose(&claims), at(1000)).map(drop).map_err(|error| match error {
            TokenError::Malformed(what) | TokenError::Unsupported(what) => what,
            other => panic!("{what}: {other}"),
        });
        assert_eq!(found, wanted, "{what}");
    }
}

#[test]
fn cat_token_with_a_repeated_claim_is_refused() {
    let claims = ciborium::Value::Map(vec![(4.into(), 2000.into()), (4.into(), 3000.into())]);
    let found = required().check(&cose(&claims), at(1000));
    assert_eq!(found, Err(TokenError::Malformed("a claim is repeated")));
}

#[test]
fn cat_token_with_any_changed_byte_is_refused() {
    let private = rcgen::KeyPair::generate().unwrap();
    let pairs = [
        (signer(), keys()),
        (
            Signer::read(private.serialize_pem().as_bytes()).unwrap(),
            keys::read(private.public_key_pem().as_bytes()).unwrap(),
        ),
    ];
    let scope = crate::grant::GrantScope {
        actions: cat::actions(true, false),
        namespace: vec![],
        closed: false,
        track: None,
    };
    let claims = cat::CatClaims { id: Some("7".into()), scopes: vec![scope], ..cat::CatClaims::default() };
    for (signer, keys) in pairs {
        for compact in [false, true] {
            let value = cat::make(&claims, &signer, compact).unwrap();
            let of = |value: Vec<u8>| Credential { kind: KIND_CAT, value: value.into() };
            let grant = token::open(&of(value.clone()), &keys).unwrap();
            assert!(grant.allows(Action::Publish, &resource("a", Some("t"))));
            assert!(!grant.allows(Action::Subscribe, &resource("a", Some("t"))));
            assert_eq!(grant.id.as_deref(), Some("7"));
            for at in 0..value.len() {
                let mut changed = value.clone();
                changed[at] ^= 1;
                assert!(token::open(&of(changed), &keys).is_err(), "byte {at}, compact {compact}");
            }
        }
    }
}

#[test]
fn key_with_a_kid_verifies_no_jwt_of_another_kid() {
    let oct = |id: &str| json!({ "kty": "oct", "kid": id, "k": URL_SAFE_NO_PAD.encode(SECRET) }).to_string();
    let keys = keys::read(oct("one").as_bytes()).unwrap();
    let with = |header| token::open(&jwt_with(&header, &json!({ "put": "a" })), &keys).map(drop);
    assert_eq!(with(json!({ "alg": "HS256", "kid": "one" })), Ok(()));
    assert_eq!(with(json!({ "alg": "HS256" })), Ok(()));
    assert_eq!(with(json!({ "alg": "HS256", "kid": "two" })), Err(TokenError::Signature));
}
