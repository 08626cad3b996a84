//! Names of arms: congestion controls in place, and carriers, which are there for a connection if its peer offers them.

use super::features::{Feature, Features};

/// In whose name an arm begins that is no arm in place.
pub const CARRIED: &str = "carried";
/// With a carrier that is warm, or that is first made.
pub const CARRIED_WARM: &str = "carried-warm";
pub const CARRIED_NEW: &str = "carried-new";
/// What a carrier may be, besides the usual one: QUIC with CUBIC, or a pool of connections.
pub const CARRIERS: [&str; 4] = ["cubic", "tcp", "mptcp", "sctp"];
/// Of an arm that is carried: `carried-warm`, or, with a name of [`CARRIERS`], `carried-tcp-warm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carrier<'a> {
    /// `None`: as it is without settings.
    pub by: Option<&'a str>,
    pub is_warm: bool,
}

impl<'a> Carrier<'a> {
    pub fn of(arm: &'a str) -> Option<Self> {
        let (by, state) = arm.strip_prefix(CARRIED)?.rsplit_once('-')?;
        let is_warm = match state {
            "warm" => true,
            "new" => false,
            _ => return None,
        };
        if by.is_empty() {
            return Some(Self { by: None, is_warm });
        }
        let by = by.strip_prefix('-').filter(|by| CARRIERS.contains(by))?;
        Some(Self { by: Some(by), is_warm })
    }
}

/// Whether an arm is there for a connection, by what the peer offers.
pub fn can_be_had(arm: &str, offered: bool, warm: bool) -> bool {
    match Carrier::of(arm) {
        Some(carrier) => offered && carrier.is_warm == warm,
        None => !arm.starts_with(CARRIED) || offered,
    }
}

/// Likewise; what is not known of the peer is not there.
pub fn can_be_had_by(arm: &str, features: &Features) -> bool {
    let is = |feature| features.get(feature) == Some(1.0);
    can_be_had(arm, is(Feature::Offer), is(Feature::Warmth))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn carriers_have_names() {
        let carrier = |by, is_warm| Some(Carrier { by, is_warm });
        let table = [
            (CARRIED_WARM, carrier(None, true)),
            (CARRIED_NEW, carrier(None, false)),
            ("carried-tcp-warm", carrier(Some("tcp"), true)),
            ("carried-cubic-new", carrier(Some("cubic"), false)),
            ("carried-dccp-new", None),
            ("carried-tcp", None),
            ("carriedtcp-warm", None),
            ("carried", None),
            ("cubic", None),
        ];
        for (arm, wanted) in table {
            assert_eq!(Carrier::of(arm), wanted, "{arm}");
        }
        assert!(can_be_had("carried-tcp-warm", true, true) && !can_be_had("carried-tcp-warm", true, false));
        assert!(!can_be_had("carried-dccp", false, false) && can_be_had("bbr", false, false));
    }
}
