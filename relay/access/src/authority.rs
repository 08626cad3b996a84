//! Authorities (HOST or HOST:PORT): the names under which clients address the relay.

use std::str::FromStr;

/// Port of an authority without a port, for the schemes `moqt` and `https`.
const DEFAULT_PORT: u16 = 443;

/// An authority that a rule applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleAuthority {
    /// The host name in lower case, or an IPv6 address in brackets.
    host: String,
    /// The port; `None` for any port.
    port: Option<u16>,
}

/// The error for a text that is not an authority.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is neither HOST nor HOST:PORT")]
pub struct AuthorityError;

impl RuleAuthority {
    /// Reports whether this is the authority that a client has named.
    pub fn is(&self, said: &str) -> bool {
        said.parse::<Self>().is_ok_and(|said| {
            let has_port = |port: u16| port == said.port.unwrap_or(DEFAULT_PORT);
            self.host == said.host && self.port.is_none_or(has_port)
        })
    }
}

impl FromStr for RuleAuthority {
    type Err = AuthorityError;

    fn from_str(text: &str) -> Result<Self, AuthorityError> {
        // An IPv6 address is in brackets, so its colons do not begin the port.
        let host_len = text.find(']').map_or_else(|| text.find(':').unwrap_or(text.len()), |end| end + 1);
        let (host, rest) = text.split_at(host_len);
        let is_host = !host.is_empty() && host.starts_with('[') == host.ends_with(']');
        if !is_host || host.contains(['/', '@', ' ']) {
            return Err(AuthorityError);
        }
        let port = match rest.strip_prefix(':') {
            Some(port) => Some(port.parse().map_err(|_| AuthorityError)?),
            None if rest.is_empty() => None,
            None => return Err(AuthorityError),
        };
        // Host names are compared without regard to case (RFC 3986, section 3.2.2).
        Ok(Self { host: host.to_ascii_lowercase(), port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_without_a_port_matches_any_port() {
        let table = [
            ("relay.example", "relay.example", true),
            ("relay.example", "Relay.Example:4443", true),
            ("relay.example:4443", "relay.example:4443", true),
            ("relay.example:4443", "relay.example:443", false),
            // URL parsers leave out the scheme's default port.
            ("relay.example:4443", "relay.example", false),
            ("relay.example:443", "relay.example", true),
            ("relay.example:443", "relay.example:443", true),
            ("relay.example", "other.example", false),
            ("[2001:db8::1]", "[2001:db8::1]:4443", true),
            ("[2001:db8::1]:443", "[2001:DB8::1]", true),
            ("[2001:db8::1]:443", "[2001:db8::1]:4443", false),
            ("192.0.2.1", "192.0.2.1:1", true),
            // A client may send any text, even one that is no authority.
            ("relay.example", "", false),
            ("relay.example", "relay.example:x", false),
            ("relay.example", "[relay.example", false),
        ];
        for (rule, said, wanted) in table {
            assert_eq!(rule.parse::<RuleAuthority>().unwrap().is(said), wanted, "{rule} {said}");
        }
        for wrong in ["", ":443", "a:b", "a:70000", "[::1", "::1", "[::1]x", "https://a", "a/b", "u@a"] {
            assert_eq!(wrong.parse::<RuleAuthority>(), Err(AuthorityError), "{wrong}");
        }
    }
}
