//! The octet of IP headers with DSCP and ECN.

use std::{fmt, str::FromStr};

/// The ECN codepoint ECT(0) (RFC 3168).
pub(crate) const ECT0: u8 = 0b10;

/// A code point of differentiated services, 0 to 63 (RFC 2474).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dscp(u8);

impl Dscp {
    /// Creates a DSCP, or returns `None` for a value above 63.
    pub fn new(code_point: u8) -> Option<Self> {
        (code_point < 64).then_some(Self(code_point))
    }

    /// Returns the value of IPv4's TOS byte and of IPv6's traffic class.
    pub(crate) fn traffic_class(self, ect: bool) -> u8 {
        self.0 << 2 | if ect { ECT0 } else { 0 }
    }
}

/// DSCP names without a class number (RFC 2474, RFC 3246, RFC 5865, RFC 8622), in contrast to names such as `cs5` and
/// `af41`.
const NAMES: [(&str, u8); 5] = [("default", 0), ("cs0", 0), ("le", 1), ("ef", 46), ("voice-admit", 44)];

impl FromStr for Dscp {
    type Err = String;

    /// Parses a DSCP: a number, or a name such as `cs5`, `af41` or `ef`.
    fn from_str(text: &str) -> Result<Self, String> {
        let name = text.to_ascii_lowercase();
        let named = NAMES.iter().find(|(known, _)| *known == name).map(|(_, code_point)| *code_point);
        let digits = |prefix| name.strip_prefix(prefix).map(str::as_bytes);
        let classed = match (digits("cs"), digits("af")) {
            (Some([class @ b'1'..=b'7']), _) => Some((class - b'0') << 3),
            (_, Some([class @ b'1'..=b'4', drop @ b'1'..=b'3'])) => {
                Some((class - b'0') << 3 | (drop - b'0') << 1)
            }
            _ => None,
        };
        let code_point = named.or(classed).or_else(|| text.parse().ok());
        code_point.and_then(Self::new).ok_or_else(|| {
            format!("`{text}` is not a DSCP: a number up to 63, or a name such as cs5, af41, ef")
        })
    }
}

impl fmt::Display for Dscp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dscp_numbers_and_names_are_parsed() {
        for (text, expected) in [
            ("0", Some(0)),
            ("63", Some(63)),
            ("default", Some(0)),
            ("CS5", Some(40)),
            ("af41", Some(34)),
            ("af13", Some(14)),
            ("ef", Some(46)),
            ("le", Some(1)),
            ("64", None),
            ("256", None),
            ("-1", None),
            ("cs8", None),
            ("af44", None),
            ("af4", None),
            ("", None),
        ] {
            assert_eq!(text.parse::<Dscp>().ok(), expected.map(Dscp), "{text}");
        }
        assert_eq!(Dscp(46).traffic_class(true), 0xba);
        assert_eq!(Dscp(46).traffic_class(false), 0xb8);
    }
}
