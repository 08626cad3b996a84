//! What both ends saw in the TCP options of the same connections. Options are not authenticated, what is said here is: where the
//! two differ, something on the way has changed them.

use super::message::{Connection, Outcome, Side};

/// How a connection got less, or something else, than its ends have said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Downgrade {
    /// The offer or its answer was taken off.
    Stripped,
    /// What the one heard is not what the other said.
    Altered,
    /// The one heard what the other did not say at all.
    Forged,
}

impl Downgrade {
    pub const ALL: [Self; 3] = [Self::Stripped, Self::Altered, Self::Forged];

    pub fn name(self) -> &'static str {
        match self {
            Self::Stripped => "stripped",
            Self::Altered => "altered",
            Self::Forged => "forged",
        }
    }
}

/// One's own connections that the other has seen, too, and what the two accounts amount to.
pub fn compare<'a>(
    own: &'a [Connection],
    theirs: &'a [Connection],
) -> impl Iterator<Item = (&'a Connection, Option<Downgrade>)> {
    own.iter().filter_map(|mine| {
        let same = |other: &&Connection| other.sequence == mine.sequence && other.side != mine.side;
        let other = theirs.iter().find(same)?;
        let (client, server) = if mine.side == Side::Client { (mine, other) } else { (other, mine) };
        Some((mine, of(client, server)))
    })
}

fn of(client: &Connection, server: &Connection) -> Option<Downgrade> {
    use Outcome::{Agreed, Malformed, NotAsked, Refused, Resent, Silent};
    match (client.outcome, server.outcome) {
        (Agreed, Agreed) if client.heard == server.own => None,
        (Agreed, Agreed) | (Malformed, _) | (_, Malformed) => Some(Downgrade::Altered),
        // Nobody has answered, or nobody heard the confirmation.
        (Agreed, Silent) if server.spoke => Some(Downgrade::Altered),
        (Agreed, _) | (Refused, _) => Some(Downgrade::Forged),
        (_, Agreed) => Some(Downgrade::Forged),
        // Lost by chance, or dropped for the option: the same to see, and nothing was said that was not heard.
        (Resent, _) | (NotAsked, _) => None,
        (Silent, Silent) if client.spoke && server.spoke => Some(Downgrade::Stripped),
        (Silent, _) => None,
    }
}

/// Whether the options of these connections came through: of the latest that can tell.
pub fn options_pass<'a>(judged: impl Iterator<Item = (&'a Connection, Option<Downgrade>)>) -> Option<bool> {
    let told = judged.filter_map(|(mine, downgrade)| match (mine.outcome, downgrade) {
        (_, Some(_)) | (Outcome::Resent, None) => Some(false),
        (Outcome::Agreed, None) => Some(true),
        _ => None,
    });
    told.last()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(side: Side, outcome: Outcome, spoke: bool) -> Connection {
        let (own, heard) = if side == Side::Client { (1, 2) } else { (2, 0) };
        Connection { sequence: [10, 20], side, port: 80, outcome, spoke, own, heard }
    }

    #[test]
    fn accounts_are_compared() {
        use Outcome::{Agreed, Malformed, NotAsked, Refused, Resent, Silent};
        let table = [
            // client, whether it offered, server, whether it would have answered
            (Agreed, true, Agreed, true, None),
            (Silent, true, Silent, true, Some(Downgrade::Stripped)),
            // It began to listen before the daemon, or answers with cookies.
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
            let client = [connection(Side::Client, client, offered)];
            let server = [connection(Side::Server, server, able)];
            for (own, theirs) in [(&client, &server), (&server, &client)] {
                let found: Vec<_> = compare(own, theirs).collect();
                assert_eq!(found, [(&own[0], wanted)], "{client:?} {server:?}");
            }
        }
    }

    #[test]
    fn another_graft_than_was_said_is_altered() {
        let client = [connection(Side::Client, Outcome::Agreed, true)];
        let mut server = [connection(Side::Server, Outcome::Agreed, true)];
        server[0].own = 9;
        let found: Vec<_> = compare(&client, &server).map(|(_, it)| it).collect();
        assert_eq!(found, [Some(Downgrade::Altered)]);
    }

    #[test]
    fn what_only_one_has_seen_says_nothing() {
        let mut client = connection(Side::Client, Outcome::Agreed, true);
        let server = [connection(Side::Server, Outcome::Silent, true)];
        client.sequence[1] += 1;
        assert_eq!(compare(&[client.clone()], &server).count(), 0);
        assert_eq!(compare(&server, &server).count(), 0, "of the same side");
    }

    #[test]
    fn the_latest_that_can_tell_counts() {
        let of = |outcome, downgrade| (connection(Side::Client, outcome, true), downgrade);
        let told = |list: &[(Connection, Option<Downgrade>)]| {
            options_pass(list.iter().map(|(connection, downgrade)| (connection, *downgrade)))
        };
        let agreed = of(Outcome::Agreed, None);
        let stripped = of(Outcome::Silent, Some(Downgrade::Stripped));
        let silent = of(Outcome::Silent, None);
        assert_eq!(told(&[]), None);
        assert_eq!(told(std::slice::from_ref(&silent)), None);
        assert_eq!(told(&[agreed.clone(), stripped.clone(), silent.clone()]), Some(false));
        assert_eq!(told(&[stripped, agreed, silent]), Some(true));
    }
}
