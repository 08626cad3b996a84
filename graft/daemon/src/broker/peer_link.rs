//! The connection between the worker processes `peers`, which speaks QUIC with the daemons of peers and cannot use BPF,
//! and `sessions`, which holds the BPF programs of sessions.
//!
//! Each sends records without an answer. A record that finds the socket full is lost, like a message between daemons, and
//! whoever needs it sends it again. The record of a new connection is repeated until the socket has room for it.

use std::{
    sync::{Arc, mpsc::SyncSender},
    thread,
    time::{Duration, Instant},
};

use millrace_base::control::{ControlEnd, ControlReceived};
use millrace_graft::packet::{choose::PeerPathFigures, keys::Exported};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::peer_message::{PeerEvent, PeerMessage};

/// Longest interval of the figures of each peer.
pub const FIGURES: Duration = Duration::from_millis(250);
/// Time without figures after which the worker process `peers` counts as hanging.
const HANGS: Duration = Duration::from_secs(2);

/// A record for the worker process `sessions`, about the peer of this name. It may contain a secret, so it has no text
/// form but that on the socket.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FromPeer {
    /// A new connection with the peer's daemon was made, with this secret of the TLS exporter.
    Connected(String, [u8; 32]),
    /// A message of the peer's daemon has arrived.
    Said(String, PeerMessage),
    /// Figures of the connection.
    Figures(String, PeerFigures),
}

/// A record for the worker process `peers`: a message for the daemon of the peer with this name.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToPeer {
    /// Name of the peer.
    pub peer: String,
    /// The message.
    pub say: PeerMessage,
}

/// Measurements of the connection with a peer, which the worker process `peers` makes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerFigures {
    /// Smallest recent round trip.
    pub round_trip: Option<Duration>,
    /// Share of packets that are lost in one direction.
    pub loss: Option<f64>,
    /// Present round trip, which includes the time in queues on the path.
    pub round_trip_now: Option<Duration>,
    /// Time since the latest message of the peer.
    pub silence: Duration,
    /// Reason why there is no connection, or `None` if there is one.
    pub trouble: Option<String>,
}

/// The daemons of all peers, as the worker process `sessions` knows them from the process `peers`.
pub struct KnownPeers {
    partner: Mutex<Option<Arc<ControlEnd>>>,
    names: Vec<String>,
    known: Mutex<Vec<KnownPeer>>,
    heard: SyncSender<(usize, PeerEvent)>,
}

#[derive(Clone, Default)]
struct KnownPeer {
    figures: PeerFigures,
    /// Time at which the figures have arrived.
    at: Option<Instant>,
    /// Number of sessions with the peer that applications on this host have opened.
    opened: u64,
}

impl KnownPeers {
    /// Peers' messages are sent to the channel `heard`, each with the peer's number.
    pub fn new(names: Vec<String>, heard: SyncSender<(usize, PeerEvent)>) -> Self {
        let known = Mutex::new(vec![KnownPeer::default(); names.len()]);
        Self { partner: Mutex::default(), names, known, heard }
    }

    /// Uses this connection to the process `peers` from now on.
    pub fn renew(self: &Arc<Self>, partner: ControlEnd) {
        let partner = Arc::new(partner);
        if let Some(before) = self.partner.lock().replace(partner.clone()) {
            before.end();
        }
        let known = self.clone();
        let reads = move || {
            receive(&partner, |record| known.note(record));
        };
        if let Err(error) = thread::Builder::new().name("peers".into()).spawn(reads) {
            warn!("no thread for messages of peers: {error}");
        }
    }

    fn note(&self, record: FromPeer) {
        let (FromPeer::Connected(name, _) | FromPeer::Said(name, _) | FromPeer::Figures(name, _)) = &record;
        let Some(peer) = self.names.iter().position(|known| known == name) else { return };
        match record {
            // The thread of the sessions takes events until this process ends, so this waits for room.
            FromPeer::Connected(_, exported) => {
                let _ = self.heard.send((peer, PeerEvent::Connected(Exported(exported))));
            }
            FromPeer::Said(_, say) => drop(self.heard.try_send((peer, PeerEvent::Said(say)))),
            FromPeer::Figures(_, figures) => {
                if let Some(known) = self.known.lock().get_mut(peer) {
                    (known.figures, known.at) = (figures, Some(Instant::now()));
                }
            }
        }
    }

    /// Sends a message, which may be lost. The sender of a message that needs an answer repeats it.
    pub fn say(&self, peer: usize, say: &PeerMessage) {
        let partner = self.partner.lock().clone();
        if let (Some(partner), Some(name)) = (partner, self.names.get(peer)) {
            let _ = partner.send(&ToPeer { peer: name.clone(), say: say.clone() }, &[]);
        }
    }

    fn get(&self, peer: usize) -> KnownPeer {
        self.known.lock().get(peer).cloned().unwrap_or_default()
    }

    /// Returns the measured round trip and loss of the path to a peer.
    pub fn path(&self, peer: usize) -> PeerPathFigures {
        let PeerFigures { round_trip, loss, .. } = self.get(peer).figures;
        PeerPathFigures { round_trip, loss }
    }

    /// Returns the present round trip, which includes the time in queues on the path.
    pub fn round_trip_now(&self, peer: usize) -> Option<Duration> {
        self.get(peer).figures.round_trip_now
    }

    /// Reports whether a message of the peer's daemon has arrived within this time.
    pub fn is_there(&self, peer: usize, within: Duration) -> bool {
        let KnownPeer { figures, at, .. } = self.get(peer);
        at.is_some_and(|at| at.elapsed() + figures.silence < within)
    }

    /// Reports whether the process `peers` runs, and has heard nothing of the peer's daemon for this time.
    pub fn is_silent(&self, peer: usize, time: Duration) -> bool {
        let KnownPeer { figures, at, .. } = self.get(peer);
        at.is_some_and(|at| at.elapsed() < HANGS) && figures.silence > time
    }

    /// Returns why there is no connection with the peer's daemon, or `None` if there is one.
    pub fn trouble(&self, peer: usize) -> Option<String> {
        let KnownPeer { figures, at, .. } = self.get(peer);
        match at.is_some_and(|at| at.elapsed() < HANGS) {
            true => figures.trouble,
            false => Some("the part of the daemon that connects to it is not answering".to_owned()),
        }
    }

    /// Counts a session with the peer that an application on this host has opened.
    pub fn note_opened(&self, peer: usize) {
        if let Some(known) = self.known.lock().get_mut(peer) {
            known.opened += 1;
        }
    }

    /// Returns the number of sessions with the peer that applications on this host have opened.
    pub fn opened(&self, peer: usize) -> u64 {
        self.get(peer).opened
    }
}

/// Passes the records that arrive on a connection to `take`, until it ends. A record that is malformed is ignored.
pub fn receive<T: serde::de::DeserializeOwned>(from: &ControlEnd, mut take: impl FnMut(T)) {
    loop {
        from.wait();
        match from.receive() {
            ControlReceived::Record(record, _) => take(record),
            ControlReceived::Malformed(_) | ControlReceived::Nothing => {}
            ControlReceived::End => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use millrace_testkit::wait_for;

    use super::*;

    #[test]
    fn records_about_known_peers_are_taken_and_others_ignored() {
        let (heard, events) = sync_channel(8);
        let known = Arc::new(KnownPeers::new(vec!["a".to_owned(), "b".to_owned()], heard));
        assert!(known.trouble(1).is_some() && !known.is_silent(1, Duration::ZERO));
        let (one, other) = ControlEnd::pair().unwrap();
        known.renew(one);
        let tell = |record: &FromPeer| other.send(record, &[]).unwrap();
        let message = PeerMessage::Accept { id: 7 };
        tell(&FromPeer::Said("c".to_owned(), message.clone()));
        tell(&FromPeer::Connected("b".to_owned(), [3; 32]));
        tell(&FromPeer::Said("b".to_owned(), message.clone()));
        let figures = PeerFigures { silence: Duration::from_secs(60), ..PeerFigures::default() };
        tell(&FromPeer::Figures("b".to_owned(), figures));
        assert!(
            matches!(events.recv().unwrap(), (1, PeerEvent::Connected(Exported(secret))) if secret == [3; 32])
        );
        assert!(matches!(events.recv().unwrap(), (1, PeerEvent::Said(said)) if said == message));
        wait_for("the figures", || known.is_silent(1, Duration::from_secs(10)));
        assert!(known.trouble(1).is_none() && !known.is_there(1, Duration::from_secs(10)));
        known.say(0, &message);
        wait_for("the message", || match other.receive::<ToPeer>() {
            ControlReceived::Record(ToPeer { peer, say }, _) => peer == "a" && say == message,
            _ => false,
        });
        assert!(events.try_recv().is_err());
    }
}
