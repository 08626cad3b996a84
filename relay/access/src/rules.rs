//! Rules: which clients may publish and which may subscribe, in which namespaces.

use std::{fmt, net::IpAddr, str::FromStr, time::SystemTime};

use super::{
    authority::RuleAuthority,
    grant::Action,
    pattern::{self, Pattern},
};

/// The peer of a session, as far as its connection identifies it: by address, certificate and URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionPeer {
    /// The peer's address.
    pub address: IpAddr,
    /// The peer's certificate, if it has sent one that was verified.
    pub certificate: Option<ClientCertificate>,
    /// Path of the connection's URL, without the query.
    pub path: String,
    /// Authority of the connection's URL.
    pub authority: Option<String>,
}

/// The content of a client's certificate whose chain was verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientCertificate {
    /// The alternative names, then the subject's common name.
    pub names: Vec<CertificateName>,
    /// The time at which the certificate expires.
    pub not_after: Option<SystemTime>,
}

/// A name in a certificate. Names of different kinds are never equal, even if their texts are. A certificate authority
/// may check names of one kind only, and let clients choose the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateName {
    /// The field of the certificate that has the name.
    pub kind: NameKind,
    /// The name itself, without its kind.
    pub text: String,
}

/// The field of a certificate, such as a DNS name, that identifies a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameKind {
    /// An alternative name that is a host.
    Dns,
    /// An alternative name that is a URI, such as a SPIFFE ID.
    Uri,
    /// An alternative name that is a mail address.
    Mail,
    /// The subject's common name.
    Common,
}

/// A permission to publish and subscribe in some namespaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessRule {
    /// The namespaces that the rule applies to.
    pub namespace: Pattern,
    /// Clients that may publish in these namespaces.
    pub publish: Vec<Principal>,
    /// Clients that may subscribe in these namespaces.
    pub subscribe: Vec<Principal>,
    /// Pattern for the path of the connection's URL, whose parts are matched like the fields of a namespace. `None`:
    /// any path.
    pub path: Option<Pattern>,
    /// Authority that the connection's URL must have. `None`: any authority.
    pub authority: Option<RuleAuthority>,
}

/// The clients to which a rule grants publishing or subscribing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Principal {
    /// Every client.
    Anyone,
    /// Clients with a token that allows the action.
    Token,
    /// Clients with a certificate that has this name. `None`: with any certificate that has a name.
    Certificate(Option<CertificateName>),
    /// Clients with an address in this network.
    Network(AddressPrefix),
}

/// A network: all addresses with the same first bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressPrefix {
    address: IpAddr,
    bits: u8,
}

/// The reason why a text names no clients of a rule (`Principal`).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum PrincipalError {
    #[error(
        "`{0}` is none of anyone, token, cert:NAME, cert:KIND:NAME with dns, uri, mail or cn as KIND, cidr:NET"
    )]
    Unknown(String),
    #[error("`{0}` is no network")]
    Network(String),
}

impl AccessRule {
    /// Reports whether the rule applies to this peer's connection, by its path and authority.
    pub fn is_for(&self, peer: &SessionPeer) -> bool {
        let path = |pattern: &Pattern| {
            let fields = pattern::path(&peer.path);
            millrace_moq::Namespace::new(fields).is_ok_and(|path| pattern.matches(&path))
        };
        let authority = |wanted: &RuleAuthority| peer.authority.as_ref().is_some_and(|said| wanted.is(said));
        self.path.as_ref().is_none_or(path) && self.authority.as_ref().is_none_or(authority)
    }

    /// Returns the clients to which the rule grants the action.
    pub fn principals(&self, action: Action) -> &[Principal] {
        if action.publishes() { &self.publish } else { &self.subscribe }
    }
}

impl Principal {
    /// Returns `Some` if these clients of a rule include the peer, without regard to its tokens. The inner value is the
    /// matching name in the peer's certificate. It is `None` if the rule requires no certificate.
    pub fn is(&self, peer: &SessionPeer, now: SystemTime) -> Option<Option<CertificateName>> {
        match self {
            Self::Anyone => Some(None),
            Self::Token => None,
            Self::Network(network) => network.contains(peer.address).then_some(None),
            Self::Certificate(wanted) => {
                let certificate = peer.certificate.as_ref()?;
                // The chain was verified when the session began, and the certificate may have expired since.
                if certificate.not_after.is_some_and(|not_after| now >= not_after) {
                    return None;
                }
                let named = certificate
                    .names
                    .iter()
                    .find(|name| wanted.as_ref().is_none_or(|wanted| *name == wanted));
                named.map(|name| Some(name.clone()))
            }
        }
    }
}

impl AddressPrefix {
    /// Reports whether the address is in the network.
    pub fn contains(&self, address: IpAddr) -> bool {
        let shift = |width: u32| width.saturating_sub(u32::from(self.bits));
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let differ = own.to_bits() ^ other.to_bits();
                differ.checked_shr(shift(32)).unwrap_or(0) == 0
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let differ = own.to_bits() ^ other.to_bits();
                differ.checked_shr(shift(128)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

impl FromStr for Principal {
    type Err = PrincipalError;

    fn from_str(text: &str) -> Result<Self, PrincipalError> {
        match text.split_once(':') {
            None if text == "anyone" => Ok(Self::Anyone),
            None if text == "token" => Ok(Self::Token),
            Some(("cert", "*")) => Ok(Self::Certificate(None)),
            Some(("cert", name)) => {
                let name = name.parse().map_err(|()| PrincipalError::Unknown(text.to_owned()))?;
                Ok(Self::Certificate(Some(name)))
            }
            Some(("cidr", network)) => network.parse().map(Self::Network),
            _ => Err(PrincipalError::Unknown(text.to_owned())),
        }
    }
}

impl NameKind {
    const ALL: [(&'static str, Self); 4] =
        [("dns", Self::Dns), ("uri", Self::Uri), ("mail", Self::Mail), ("cn", Self::Common)];

    /// Returns the kind of a name that is written without a kind in front of it: a URI, a mail address or a host. Any
    /// other text is a common name.
    fn from_text(text: &str) -> Self {
        let is_host = |text: &str| {
            let label = |label: &str| {
                !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            };
            text.trim_start_matches("*.").split('.').all(label)
        };
        match text {
            text if text.contains(':') => Self::Uri,
            text if text.contains('@') => Self::Mail,
            text if is_host(text) => Self::Dns,
            _ => Self::Common,
        }
    }
}

impl CertificateName {
    /// Makes a certificate name of this kind (host, URI, mail address or common name).
    pub fn new(kind: NameKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }
}

/// Writes `KIND:NAME`. Different names have different texts.
impl fmt::Display for CertificateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = NameKind::ALL.iter().find(|(_, kind)| *kind == self.kind).map_or("", |(word, _)| word);
        write!(f, "{kind}:{}", self.text)
    }
}

impl FromStr for CertificateName {
    type Err = ();

    /// Reads `KIND:NAME`, or a name alone, whose kind is then found by its form.
    fn from_str(text: &str) -> Result<Self, ()> {
        let kind = |word: &str| NameKind::ALL.iter().find(|(known, _)| *known == word).map(|(_, kind)| *kind);
        let said = text.split_once(':').and_then(|(word, name)| Some((kind(word)?, name)));
        let (kind, name) = said.unwrap_or_else(|| (NameKind::from_text(text), text));
        match name {
            // `*` stands for any name and is no name itself. The caller has handled `cert:*` before it parses a name.
            "" | "*" => Err(()),
            name => Ok(Self::new(kind, name)),
        }
    }
}

impl FromStr for AddressPrefix {
    type Err = PrincipalError;

    fn from_str(text: &str) -> Result<Self, PrincipalError> {
        let none = || PrincipalError::Network(text.to_owned());
        let (address, bits) =
            text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let address: IpAddr = address.parse().map_err(|_| none())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(most), str::parse).map_err(|_| none())?;
        if bits > most {
            return Err(none());
        }
        Ok(Self { address, bits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_rule_cidr_prefix_contains_exactly_its_addresses() {
        let table = [
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("10.0.0.1", "10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("0.0.0.0/0", "203.0.113.1", true),
            ("0.0.0.0/0", "2001:db8::1", false),
            ("10.0.0.0/8", "::ffff:10.1.1.1", true),
            ("2001:db8::/32", "2001:db8:1::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
            ("::/0", "2001:db9::1", true),
        ];
        for (network, address, wanted) in table {
            let parsed: AddressPrefix = network.parse().unwrap();
            assert_eq!(parsed.contains(address.parse().unwrap()), wanted, "{address} in {network}");
        }
        for text in ["", "10.0.0.0/33", "10.0.0/8", "::/129", "10.0.0.0/-1", "x"] {
            assert!(text.parse::<AddressPrefix>().is_err(), "{text}");
        }
    }

    #[test]
    fn access_rule_principals_are_parsed_and_malformed_ones_refused() {
        assert_eq!("anyone".parse(), Ok(Principal::Anyone));
        assert_eq!("token".parse(), Ok(Principal::Token));
        assert_eq!("cert:*".parse(), Ok(Principal::Certificate(None)));
        assert!(matches!("cidr:10.0.0.0/8".parse(), Ok(Principal::Network(_))));
        for text in ["", "all", "cert:", "cert", "cert:dns:", "cert:cn:*", "cidr:x", "token:x", "anyone:"] {
            assert!(text.parse::<Principal>().is_err(), "{text}");
        }
    }

    #[test]
    fn certificate_name_is_parsed_with_its_kind() {
        let table = [
            ("cam.example", NameKind::Dns, "cam.example"),
            ("*.example", NameKind::Dns, "*.example"),
            ("cam", NameKind::Dns, "cam"),
            ("spiffe://example/cam", NameKind::Uri, "spiffe://example/cam"),
            ("urn:uuid:1", NameKind::Uri, "urn:uuid:1"),
            ("cam@example", NameKind::Mail, "cam@example"),
            ("Camera 1", NameKind::Common, "Camera 1"),
            ("cn:cam.example", NameKind::Common, "cam.example"),
            ("dns:cam.example", NameKind::Dns, "cam.example"),
            ("uri:cn:cam", NameKind::Uri, "cn:cam"),
            ("mail:cam@example", NameKind::Mail, "cam@example"),
        ];
        for (text, kind, name) in table {
            let parsed: CertificateName = text.parse().unwrap();
            assert_eq!(parsed, CertificateName::new(kind, name), "{text}");
            assert_eq!(parsed.to_string().parse(), Ok(parsed), "{text}");
        }
    }
}
