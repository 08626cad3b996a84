//! Names of candidates for a connection: congestion controls of a direct connection, and carriers (such as QUIC
//! connections between two proxies) that tunnel it. Carriers are possible only if the peer offers one.

use super::features::{Feature, Features};

/// Prefix of the names of candidates that tunnel the connection over a carrier (such as a QUIC connection between
/// proxies).
pub const CARRIED: &str = "carried";
/// Name of the candidate that tunnels the connection over the default carrier, if that carrier is connected already.
pub const CARRIED_WARM: &str = "carried-warm";
/// Name of the candidate that tunnels the connection over the default carrier, if that carrier has to be connected
/// first.
pub const CARRIED_NEW: &str = "carried-new";
/// Names of further carriers: QUIC with CUBIC, or a pool of TCP, MPTCP or SCTP connections.
pub const CARRIERS: [&str; 4] = ["cubic", "tcp", "mptcp", "sctp"];
/// The carrier that a candidate's name stands for. Examples of such names are `carried-warm` (the default carrier) and
/// `carried-tcp-warm` (`tcp` is a name in [`CARRIERS`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CandidateCarrier<'a> {
    /// Name of the carrier; `None` for the default one.
    pub by: Option<&'a str>,
    /// True if the carrier is connected already.
    pub is_warm: bool,
}

impl<'a> CandidateCarrier<'a> {
    /// Parses the name of a candidate; `None` if the candidate does not tunnel the connection.
    pub fn from_candidate(candidate: &'a str) -> Option<Self> {
        let (by, state) = candidate.strip_prefix(CARRIED)?.rsplit_once('-')?;
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

/// Returns whether a candidate is possible for a connection. `offered` states that the peer offers a carrier (a tunnel
/// between two proxies), and `warm` that the carrier is connected.
pub fn can_be_had(candidate: &str, offered: bool, warm: bool) -> bool {
    match CandidateCarrier::from_candidate(candidate) {
        Some(carrier) => offered && carrier.is_warm == warm,
        None => !candidate.starts_with(CARRIED) || offered,
    }
}

/// Returns whether a candidate is possible for a connection with these features. If features are unknown, the peer
/// counts as offering no carrier.
pub fn can_be_had_by(candidate: &str, features: &Features) -> bool {
    let is = |feature| features.get(feature) == Some(1.0);
    can_be_had(candidate, is(Feature::Offer), is(Feature::Warmth))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn carrier_is_parsed_from_the_name_of_a_candidate() {
        let carrier = |by, is_warm| Some(CandidateCarrier { by, is_warm });
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
        for (candidate, wanted) in table {
            assert_eq!(CandidateCarrier::from_candidate(candidate), wanted, "{candidate}");
        }
        assert!(can_be_had("carried-tcp-warm", true, true) && !can_be_had("carried-tcp-warm", true, false));
        assert!(!can_be_had("carried-dccp", false, false) && can_be_had("bbr", false, false));
    }
}
