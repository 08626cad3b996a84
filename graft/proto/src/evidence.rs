//! Compares what the two hosts of a connection saw in its TCP options. The options are not authenticated, but the
//! hosts' reports are: if reports differ, a middlebox has changed the options.

use serde::{Deserialize, Serialize};

use super::message::{ConnectionReport, OfferSide, OptionOutcome};

/// How a middlebox changed the options of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Downgrade {
    /// The client's offer of an agreement, or the server's answer to it, was removed on the path.
    Stripped,
    /// A host received another option than the peer sent.
    Altered,
    /// A host received an option that the peer did not send.
    Forged,
}

impl Downgrade {
    /// The kinds of changes, in the order in which status and metrics list them.
    pub const ALL: [Self; 3] = [Self::Stripped, Self::Altered, Self::Forged];

    /// Returns the kind's name in reports and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stripped => "stripped",
            Self::Altered => "altered",
            Self::Forged => "forged",
        }
    }
}

/// Returns this host's connections that the peer reports, too. Each comes with the way in which a middlebox changed its
/// TCP options, if the two reports prove such a change.
pub fn compare<'a>(
    own: &'a [ConnectionReport],
    theirs: &'a [ConnectionReport],
) -> impl Iterator<Item = (&'a ConnectionReport, Option<Downgrade>)> {
    own.iter().filter_map(|mine| {
        // A host that connects to itself reports each connection twice, once as client and once as server.
        let same = |other: &&ConnectionReport| other.sequence == mine.sequence && other.side != mine.side;
        let other = theirs.iter().find(same)?;
        let (client, server) = if mine.side == OfferSide::Client { (mine, other) } else { (other, mine) };
        Some((mine, find_downgrade(client, server)))
    })
}

fn find_downgrade(client: &ConnectionReport, server: &ConnectionReport) -> Option<Downgrade> {
    use OptionOutcome::{Agreed, Malformed, NotAsked, Refused, Resent, Silent};
    match (client.outcome, server.outcome) {
        // Both hosts report an agreement. If no middlebox changed it, the client received the identity of the
        // congestion control (graft) that the server would use.
        (Agreed, Agreed) if client.heard == server.own => None,
        // Each host received an option that the peer did not send in this form.
        (Agreed, Agreed) | (Malformed, _) | (_, Malformed) => Some(Downgrade::Altered),
        // In this case the client received an answer. If the server sent an answer but did not receive the client's
        // confirmation, the options were altered. If the server did not answer, the answer was forged.
        (Agreed, Silent) if server.spoke => Some(Downgrade::Altered),
        (Agreed, _) | (Refused, _) => Some(Downgrade::Forged),
        // The server saw a confirmation that the client never sent.
        (_, Agreed) => Some(Downgrade::Forged),
        // The SYN was lost by chance, or dropped because of its option; reports cannot tell which. Neither host
        // received a forged option.
        (Resent, _) | (NotAsked, _) => None,
        // Both hosts sent an option, and neither received one.
        (Silent, Silent) if client.spoke && server.spoke => Some(Downgrade::Stripped),
        (Silent, _) => None,
    }
}

/// Returns whether TCP options pass the path, as the latest conclusive report of a connection shows. `None` if no
/// report is conclusive.
pub fn options_pass<'a>(
    judged: impl Iterator<Item = (&'a ConnectionReport, Option<Downgrade>)>,
) -> Option<bool> {
    let told = judged.filter_map(|(mine, downgrade)| match (mine.outcome, downgrade) {
        (_, Some(_)) | (OptionOutcome::Resent, None) => Some(false),
        (OptionOutcome::Agreed, None) => Some(true),
        _ => None,
    });
    // Reports are in the order of connections, so the last conclusive one is the latest.
    told.last()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(side: OfferSide, outcome: OptionOutcome, spoke: bool) -> ConnectionReport {
        let (own, heard) = if side == OfferSide::Client { (1, 2) } else { (2, 0) };
        ConnectionReport { sequence: [10, 20], side, port: 80, outcome, spoke, own, heard }
    }

    #[test]
    fn client_and_server_reports_show_a_tcp_option_removed_on_the_path() {
        use OptionOutcome::{Agreed, Malformed, NotAsked, Refused, Resent, Silent};
        let table = [
            // Columns: the client's outcome, whether the client offered an agreement, the server's outcome, whether the
            // server would have answered an offer, and the change of TCP options by a middlebox that the two reports
            // prove.
            (Agreed, true, Agreed, true, None),
            (Silent, true, Silent, true, Some(Downgrade::Stripped)),
            // The server cannot answer: it listened before the BPF program was attached at its host, or it uses SYN
            // cookies.
            (Silent, true, Silent, false, None),
            (Silent, true, NotAsked, true, None),
            (Agreed, true, Silent, true, Some(Downgrade::Altered)),
            (Agreed, true, Silent, false, Some(Downgrade::Forged)),
            (Agreed, true, NotAsked, false, Some(Downgrade::Forged)),
            (Refused, true, Silent, true, Some(Downgrade::Forged)),
            (Silent, true, Agreed, true, Some(Downgrade::Forged)),
            (NotAsked, false, Agreed, true, Some(Downgrade::Forged)),
            (NotAsked, false, Silent, true, None),
            (Resent, true, Silent, true, None),
            (Malformed, true, Silent, true, Some(Downgrade::Altered)),
            (Agreed, true, Malformed, true, Some(Downgrade::Altered)),
            (Silent, true, Malformed, true, Some(Downgrade::Altered)),
        ];
        for (client, offered, server, able, wanted) in table {
            let client = [connection(OfferSide::Client, client, offered)];
            let server = [connection(OfferSide::Server, server, able)];
            for (own, theirs) in [(&client, &server), (&server, &client)] {
                let found: Vec<_> = compare(own, theirs).collect();
                assert_eq!(found, [(&own[0], wanted)], "{client:?} {server:?}");
            }
        }
    }

    #[test]
    fn tcp_option_with_another_graft_than_sent_is_reported_as_altered() {
        let client = [connection(OfferSide::Client, OptionOutcome::Agreed, true)];
        let mut server = [connection(OfferSide::Server, OptionOutcome::Agreed, true)];
        server[0].own = 9;
        let found: Vec<_> = compare(&client, &server).map(|(_, it)| it).collect();
        assert_eq!(found, [Some(Downgrade::Altered)]);
    }

    #[test]
    fn connection_reported_by_only_one_end_is_ignored() {
        let mut client = connection(OfferSide::Client, OptionOutcome::Agreed, true);
        let server = [connection(OfferSide::Server, OptionOutcome::Silent, true)];
        client.sequence[1] += 1;
        assert_eq!(compare(&[client.clone()], &server).count(), 0);
        assert_eq!(compare(&server, &server).count(), 0, "of the same side");
    }

    #[test]
    fn latest_conclusive_report_decides_whether_tcp_options_pass() {
        let of = |outcome, downgrade| (connection(OfferSide::Client, outcome, true), downgrade);
        let told = |list: &[(ConnectionReport, Option<Downgrade>)]| {
            options_pass(list.iter().map(|(connection, downgrade)| (connection, *downgrade)))
        };
        let agreed = of(OptionOutcome::Agreed, None);
        let stripped = of(OptionOutcome::Silent, Some(Downgrade::Stripped));
        let silent = of(OptionOutcome::Silent, None);
        assert_eq!(told(&[]), None);
        assert_eq!(told(std::slice::from_ref(&silent)), None);
        assert_eq!(told(&[agreed.clone(), stripped.clone(), silent.clone()]), Some(false));
        assert_eq!(told(&[stripped, agreed, silent]), Some(true));
    }
}
