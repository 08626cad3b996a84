//! The purposes of protocols, by nDPI's names.

use millrace_graft_proto::select::profile::Profile;

use crate::Found;

/// Returns what a connection is for by its protocol, then by the one beneath it, then by its category.
pub fn profile(found: &Found) -> Option<Profile> {
    let names = [Some(found.protocol.as_str()), found.carrier.as_deref(), Some(found.category.as_str())];
    let usual = |name: &str| USUAL_NAMES.iter().find(|(known, _)| *known == name);
    names.into_iter().flatten().find_map(usual).map(|(_, profile)| *profile)
}

/// Protocols and categories as nDPI calls them.
pub const USUAL_NAMES: [(&str, Profile); 44] = [
    ("SSH", Profile::Time),
    ("Telnet", Profile::Time),
    ("RDP", Profile::Time),
    ("VNC", Profile::Time),
    ("SIP", Profile::Time),
    ("RTSP", Profile::TimeAndLoss),
    ("RTMP", Profile::TimeAndLoss),
    ("Redis", Profile::Time),
    ("IMAPS", Profile::Loss),
    ("MQTT", Profile::Time),
    ("HTTP", Profile::TimeAndLoss),
    ("TLS", Profile::TimeAndLoss),
    ("SMTP", Profile::Insensitive),
    ("SMTPS", Profile::Loss),
    ("POP3", Profile::Loss),
    ("IMAP", Profile::Loss),
    ("FTP_CONTROL", Profile::Insensitive),
    ("FTP_DATA", Profile::Insensitive),
    ("RSYNC", Profile::Insensitive),
    ("BitTorrent", Profile::Insensitive),
    ("NFS", Profile::Loss),
    ("SMBv23", Profile::Loss),
    ("Git", Profile::Loss),
    ("RemoteAccess", Profile::Time),
    ("VoIP", Profile::Time),
    ("Game", Profile::Time),
    ("Chat", Profile::Time),
    ("Database", Profile::Time),
    ("RPC", Profile::Time),
    ("Collaborative", Profile::Time),
    ("IoT-Scada", Profile::Time),
    ("Web", Profile::TimeAndLoss),
    ("SocialNetwork", Profile::TimeAndLoss),
    ("Media", Profile::TimeAndLoss),
    ("Streaming", Profile::TimeAndLoss),
    ("Video", Profile::TimeAndLoss),
    ("Music", Profile::TimeAndLoss),
    ("Email", Profile::Loss),
    ("Cloud", Profile::Loss),
    ("DataTransfer", Profile::Loss),
    ("FileSharing", Profile::Insensitive),
    ("Download", Profile::Insensitive),
    ("SoftwareUpdate", Profile::Insensitive),
    ("POPS", Profile::Loss),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn found(protocol: &str, carrier: Option<&str>, category: &str) -> Found {
        Found {
            protocol: protocol.to_owned(),
            carrier: carrier.map(str::to_owned),
            category: category.to_owned(),
        }
    }

    #[test]
    fn special_names_count_before_general_ones() {
        assert_eq!(profile(&found("SSH", None, "Web")), Some(Profile::Time));
        assert_eq!(profile(&found("Wikipedia", Some("TLS"), "Email")), Some(Profile::TimeAndLoss));
        assert_eq!(profile(&found("Nothing", None, "Email")), Some(Profile::Loss));
        assert_eq!(profile(&found("Nothing", None, "Unspecified")), None);
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = USUAL_NAMES.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), USUAL_NAMES.len());
    }
}
