//! Maps nDPI's names of protocols and categories to traffic profiles.

use millrace_graft_proto::select::profile::TrafficProfile;

use crate::NdpiFound;

/// Returns the profile for the protocol's name, or else for the underlying protocol's, or else for the category's.
pub fn profile(found: &NdpiFound) -> Option<TrafficProfile> {
    let names = [Some(found.protocol.as_str()), found.carrier.as_deref(), Some(found.category.as_str())];
    let usual = |name: &str| USUAL_NAMES.iter().find(|(known, _)| *known == name);
    names.into_iter().flatten().find_map(usual).map(|(_, profile)| *profile)
}

/// Names of protocols and categories in nDPI, each with its traffic profile.
pub const USUAL_NAMES: [(&str, TrafficProfile); 44] = [
    ("SSH", TrafficProfile::Time),
    ("Telnet", TrafficProfile::Time),
    ("RDP", TrafficProfile::Time),
    ("VNC", TrafficProfile::Time),
    ("SIP", TrafficProfile::Time),
    ("RTSP", TrafficProfile::TimeAndLoss),
    ("RTMP", TrafficProfile::TimeAndLoss),
    ("Redis", TrafficProfile::Time),
    ("IMAPS", TrafficProfile::Loss),
    ("MQTT", TrafficProfile::Time),
    ("HTTP", TrafficProfile::TimeAndLoss),
    ("TLS", TrafficProfile::TimeAndLoss),
    ("SMTP", TrafficProfile::Insensitive),
    ("SMTPS", TrafficProfile::Loss),
    ("POP3", TrafficProfile::Loss),
    ("IMAP", TrafficProfile::Loss),
    ("FTP_CONTROL", TrafficProfile::Insensitive),
    ("FTP_DATA", TrafficProfile::Insensitive),
    ("RSYNC", TrafficProfile::Insensitive),
    ("BitTorrent", TrafficProfile::Insensitive),
    ("NFS", TrafficProfile::Loss),
    ("SMBv23", TrafficProfile::Loss),
    ("Git", TrafficProfile::Loss),
    ("RemoteAccess", TrafficProfile::Time),
    ("VoIP", TrafficProfile::Time),
    ("Game", TrafficProfile::Time),
    ("Chat", TrafficProfile::Time),
    ("Database", TrafficProfile::Time),
    ("RPC", TrafficProfile::Time),
    ("Collaborative", TrafficProfile::Time),
    ("IoT-Scada", TrafficProfile::Time),
    ("Web", TrafficProfile::TimeAndLoss),
    ("SocialNetwork", TrafficProfile::TimeAndLoss),
    ("Media", TrafficProfile::TimeAndLoss),
    ("Streaming", TrafficProfile::TimeAndLoss),
    ("Video", TrafficProfile::TimeAndLoss),
    ("Music", TrafficProfile::TimeAndLoss),
    ("Email", TrafficProfile::Loss),
    ("Cloud", TrafficProfile::Loss),
    ("DataTransfer", TrafficProfile::Loss),
    ("FileSharing", TrafficProfile::Insensitive),
    ("Download", TrafficProfile::Insensitive),
    ("SoftwareUpdate", TrafficProfile::Insensitive),
    ("POPS", TrafficProfile::Loss),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn found_names(protocol: &str, carrier: Option<&str>, category: &str) -> NdpiFound {
        NdpiFound {
            protocol: protocol.to_owned(),
            carrier: carrier.map(str::to_owned),
            category: category.to_owned(),
        }
    }

    #[test]
    fn ndpi_protocol_names_take_precedence_over_categories() {
        assert_eq!(profile(&found_names("SSH", None, "Web")), Some(TrafficProfile::Time));
        assert_eq!(
            profile(&found_names("Wikipedia", Some("TLS"), "Email")),
            Some(TrafficProfile::TimeAndLoss)
        );
        assert_eq!(profile(&found_names("Nothing", None, "Email")), Some(TrafficProfile::Loss));
        assert_eq!(profile(&found_names("Nothing", None, "Unspecified")), None);
    }

    #[test]
    fn ndpi_protocol_names_are_listed_only_once() {
        let mut names: Vec<_> = USUAL_NAMES.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), USUAL_NAMES.len());
    }
}
