//! Sends the relay's status to the web page once a second, shortened to a size that a page can show.

use std::{cmp::Reverse, sync::Arc};

use millrace_daemon::http::push::Channel;
use serde::Serialize;

use super::{
    status::{Status, StatusSource},
    text::typed,
};

/// Largest number of sessions, and of tracks, in one status event for the web page. Without the limit, thousands of
/// rows that nobody reads would be sent every second.
const MOST: usize = 200;

/// Returns the channel whose events `/events` sends.
pub fn channel(source: Arc<dyn StatusSource>) -> Arc<Channel> {
    Channel::new("status", move || serde_json::to_string(&ShownStatus::from_status(source.status())).ok())
}

/// A status with shortened lists, and the full number of sessions and tracks.
#[derive(Debug, Serialize)]
struct ShownStatus {
    #[serde(flatten)]
    status: Status,
    session_count: usize,
    track_count: usize,
}

impl ShownStatus {
    fn from_status(mut status: Status) -> Self {
        let relay = &mut status.relay;
        let session_count = relay.sessions.len();
        let track_count = relay.tracks.len();
        cut(&mut relay.sessions, |session| (session.publisher, session.queue_us), |session| session.id);
        cut(&mut relay.tracks, |track| track.subscribers, |track| track.name.clone());
        relay.tracks.iter_mut().for_each(|track| track.name = typed(&track.name));
        // The following parts can be long, and the event is sent every second: only `/status` has them.
        status.shares.sessions.clear();
        relay.access.clients.clear();
        relay.access.networks.clear();
        status.gate.tables.clear();
        status.gate.scopes.clear();
        Self { status, session_count, track_count }
    }
}

/// Keeps the [`MOST`] items with the highest `rank`, and sorts them by `order`.
fn cut<T, R: Ord, O: Ord>(list: &mut Vec<T>, rank: impl Fn(&T) -> R, order: impl Fn(&T) -> O) {
    if list.len() > MOST {
        list.sort_by_key(|item| Reverse(rank(item)));
        list.truncate(MOST);
    }
    // An order by rank would move rows whenever a counter changes, so rows keep an order that does not change.
    list.sort_by_cached_key(order);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        status::{RelaySessionStatus, RelayTrackStatus},
        text::tests::session,
    };

    #[test]
    fn status_event_truncates_session_and_track_lists_but_counts_all() {
        let sessions =
            (0..1000).map(|id| RelaySessionStatus { id, queue_us: id, publisher: id == 7, ..session() });
        let track = |number| RelayTrackStatus {
            name: format!("live--{number:03}"),
            alias: 0,
            publishers: 1,
            subscribers: number,
            groups_cached: 0,
            objects_cached: 0,
            bytes_cached: 0,
            largest: None,
            owner: None,
        };
        let status = millrace_relay::status::Status {
            sessions: sessions.collect(),
            tracks: (0..300).map(track).collect(),
            ..Default::default()
        };
        let shown = ShownStatus::from_status(status.into());
        assert_eq!((shown.session_count, shown.track_count), (1000, 300));
        let ids: Vec<_> = shown.status.sessions.iter().map(|session| session.id).collect();
        assert_eq!((ids.len(), ids[0], ids[1], ids[MOST - 1]), (MOST, 7, 801, 999), "{ids:?}");
        let names: Vec<_> = shown.status.tracks.iter().map(|track| &track.name[..]).collect();
        assert_eq!((names.len(), names[0], names[MOST - 1]), (MOST, "live/100", "live/299"));
        let json = serde_json::to_value(&shown).unwrap();
        assert_eq!((&json["session_count"], json["sessions"][0]["id"].as_u64()), (&1000.into(), Some(7)));
    }
}
