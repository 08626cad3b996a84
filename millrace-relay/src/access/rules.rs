//! Rules: who may publish and who may subscribe, and where.

use std::{net::IpAddr, str::FromStr, time::SystemTime};

use super::{
    authority::Authority,
    grant::Action,
    pattern::{self, Pattern},
};

/// The peer of a session, as far as its connection tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub address: IpAddr,
    pub certificate: Option<Certificate>,
    /// Of the connection's URL, without the query.
    pub path: String,
    pub authority: Option<String>,
}

/// What a client's certificate says of it, once its chain was verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Certificate {
    /// The alternative names, then the subject's common name.
    pub names: Vec<String>,
    pub not_after: Option<SystemTime>,
}

/// What is allowed to some, in some namespaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub namespace: Pattern,
    pub publish: Vec<Principal>,
    pub subscribe: Vec<Principal>,
    /// Only for connections to such a path, whose parts are like a namespace's fields.
    pub path: Option<Pattern>,
    /// Only for connections to this authority.
    pub authority: Option<Authority>,
}

/// Whom a rule is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Principal {
    Anyone,
    /// Who has a token that allows it.
    Token,
    /// Who has a certificate of this name; `*`: of any.
    Certificate(String),
    Network(Network),
}

/// Addresses that begin alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    bits: u8,
}

/// Why text names no principal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrincipalError {
    #[error("`{0}` is none of anyone, token, cert:NAME, cidr:NET")]
    Unknown(String),
    #[error("`{0}` is no network")]
    Network(String),
}

impl Rule {
    /// Whether the rule is about connections like this peer's.
    pub fn is_for(&self, peer: &Peer) -> bool {
        let path = |pattern: &Pattern| {
            let fields = pattern::path(&peer.path);
            millrace_proto::moq::Namespace::new(fields).is_ok_and(|path| pattern.matches(&path))
        };
        let authority = |wanted: &Authority| peer.authority.as_ref().is_some_and(|said| wanted.is(said));
        self.path.as_ref().is_none_or(path) && self.authority.as_ref().is_none_or(authority)
    }

    /// Whom it allows such actions.
    pub fn principals(&self, action: Action) -> &[Principal] {
        if action.publishes() { &self.publish } else { &self.subscribe }
    }
}

impl Principal {
    /// Whether the connection alone makes the peer one of these; the certificate's name, if it is by that.
    pub fn is(&self, peer: &Peer, now: SystemTime) -> Option<Option<String>> {
        match self {
            Self::Anyone => Some(None),
            Self::Token => None,
            Self::Network(network) => network.contains(peer.address).then_some(None),
            Self::Certificate(wanted) => {
                let certificate = peer.certificate.as_ref()?;
                if certificate.not_after.is_some_and(|not_after| now >= not_after) {
                    return None;
                }
                let named = certificate.names.iter().find(|name| wanted == "*" || *name == wanted);
                named.map(|name| Some(name.clone()))
            }
        }
    }
}

impl Network {
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
            Some(("cert", name)) if !name.is_empty() => Ok(Self::Certificate(name.to_owned())),
            Some(("cidr", network)) => network.parse().map(Self::Network),
            _ => Err(PrincipalError::Unknown(text.to_owned())),
        }
    }
}

impl FromStr for Network {
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
    fn networks() {
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
            let parsed: Network = network.parse().unwrap();
            assert_eq!(parsed.contains(address.parse().unwrap()), wanted, "{address} in {network}");
        }
        for text in ["", "10.0.0.0/33", "10.0.0/8", "::/129", "10.0.0.0/-1", "x"] {
            assert!(text.parse::<Network>().is_err(), "{text}");
        }
    }

    #[test]
    fn principals() {
        assert_eq!("anyone".parse(), Ok(Principal::Anyone));
        assert_eq!("token".parse(), Ok(Principal::Token));
        assert_eq!("cert:cam.example".parse(), Ok(Principal::Certificate("cam.example".into())));
        assert!(matches!("cidr:10.0.0.0/8".parse(), Ok(Principal::Network(_))));
        for text in ["", "all", "cert:", "cert", "cidr:x", "token:x", "anyone:"] {
            assert!(text.parse::<Principal>().is_err(), "{text}");
        }
    }
}
