//! Defines the messages between the daemons of two hosts, and measures the path with their pings.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use millrace_graft::packet::{
    choose::PeerPathFigures,
    keys::{Exported, PeerKeyMessage},
};
use millrace_messages::SessionRefusal;
use quinn::Connection;
use serde::{Deserialize, Serialize};

/// Interval of pings.
pub const PING_EVERY: Duration = Duration::from_millis(250);
/// Number of the latest pings from which the loss is computed. With fewer than `PINGS_MIN` no loss is
/// reported.
const PINGS: usize = 100;
const PINGS_MIN: usize = 20;
/// Time after its sending at which a ping without an answer counts as lost.
const PONG_WITHIN: Duration = Duration::from_secs(1);
/// Number of the latest round trips that are evaluated. Their minimum is the path's round trip, and their median is the
/// present round trip.
const LATE: usize = 8;
/// Largest size of a message in bytes. A datagram of this size fits every QUIC path.
pub const MESSAGE_MAX: usize = 1024;

/// A message between daemons. The sender of one that needs an answer repeats it until the answer arrives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case", deny_unknown_fields)]
pub enum PeerMessage {
    /// The listening daemon has accepted the connection.
    Hello,
    Ping {
        n: u32,
    },
    Pong {
        n: u32,
    },
    /// Opens a session between two applications. `id` is a random number. The receiver answers with `Accept` or
    /// `Refuse`.
    Open {
        id: u64,
        port: u16,
        service: String,
        /// True if the applications' client library, and not the graft, puts messages in order.
        in_order: bool,
    },
    Accept {
        id: u64,
    },
    Refuse {
        id: u64,
        why: SessionRefusal,
        reason: String,
    },
    /// Both ends use the graft, and the sender's socket receives. The receiver answers with `Ready`.
    Go {
        id: u64,
    },
    Ready {
        id: u64,
    },
    /// The sender's application has sent its last message; `messages` is their number. The receiver answers with
    /// `Finished`.
    Finish {
        id: u64,
        messages: u32,
    },
    Finished {
        id: u64,
    },
    /// The session has ended at the sender, or was never opened at the sender. The receiver answers with `Closed`.
    Close {
        id: u64,
        messages: Option<u32>,
        reason: String,
    },
    Closed {
        id: u64,
    },
    /// A message that negotiates or renews the encryption keys of a session.
    Keys {
        message: PeerKeyMessage,
    },
    /// The session still exists at the sender. `delivered` is the number of datagrams that have arrived for the
    /// sender's application, if the receiver has asked for reports.
    Report {
        id: u64,
        delivered: Option<u64>,
        asks: bool,
    },
}

/// An event from a peer's daemon.
pub enum PeerEvent {
    /// A new connection with the peer's daemon was made. All later messages arrive on it.
    Connected(Exported),
    /// A message of the peer's daemon has arrived.
    Said(PeerMessage),
}

/// Sends a message, and returns whether QUIC accepted it for sending.
pub fn send(connection: &Connection, say: &PeerMessage) -> bool {
    serde_json::to_vec(say)
        .is_ok_and(|text| text.len() <= MESSAGE_MAX && connection.send_datagram(text.into()).is_ok())
}

/// Measurements of the path to the peer, which pings provide.
pub struct PeerPings {
    next: u32,
    due: Instant,
    /// Time of the latest message from the peer.
    pub heard: Instant,
    /// Number, send time and round trip of the latest pings.
    newest: VecDeque<(u32, Instant, Option<Duration>)>,
}

impl Default for PeerPings {
    fn default() -> Self {
        let now = Instant::now();
        Self { next: 0, due: now, heard: now, newest: VecDeque::new() }
    }
}

impl PeerPings {
    /// Sends a ping if one is due, and returns the time of the next one. A ping that could not be sent says nothing
    /// about the path.
    pub fn ping(&mut self, now: Instant, send: impl FnOnce(u32) -> bool) -> Instant {
        if now < self.due {
            return self.due;
        }
        self.due = now + PING_EVERY;
        if send(self.next) {
            self.newest.push_back((self.next, now, None));
            if self.newest.len() > PINGS {
                self.newest.pop_front();
            }
        }
        self.next = self.next.wrapping_add(1);
        self.due
    }

    pub fn pong(&mut self, now: Instant, n: u32) {
        let found = self.newest.iter_mut().rev().find(|(sent, ..)| *sent == n);
        // Only the first answer to a ping counts.
        if let Some((_, at, round_trip @ None)) = found {
            *round_trip = Some(now.saturating_duration_since(*at)).filter(|it| *it <= PONG_WITHIN);
        }
    }

    fn late_acknowledgements(&self) -> Vec<Duration> {
        self.newest.iter().rev().filter_map(|(_, _, round_trip)| *round_trip).take(LATE).collect()
    }

    pub fn median(&self) -> Option<Duration> {
        let mut late = self.late_acknowledgements();
        late.sort_unstable();
        late.get(late.len() / 2).copied()
    }

    pub fn path(&self, now: Instant) -> PeerPathFigures {
        // A ping that is younger than the time limit for its answer is left out of the computed loss.
        let over: Vec<_> = self
            .newest
            .iter()
            .filter(|(_, at, _)| now.saturating_duration_since(*at) > PONG_WITHIN)
            .collect();
        let lost = over.iter().filter(|(_, _, round_trip)| round_trip.is_none()).count();
        // A ping is lost if either direction loses a packet. The result is the loss of one direction, assuming that
        // both directions lose the same share.
        let one_way = |lost: f64| 1.0 - (1.0 - lost).sqrt();
        let loss = (over.len() >= PINGS_MIN).then(|| one_way(lost as f64 / over.len() as f64));
        PeerPathFigures { round_trip: self.late_acknowledgements().into_iter().min(), loss }
    }
}

#[cfg(test)]
mod tests {
    use millrace_graft::packet::{
        AeadCipher,
        keys::{KeyMessage, NoncePair},
    };

    use super::*;

    #[test]
    fn pings_measure_round_trip_and_loss() {
        let mut pings = PeerPings::default();
        let start = Instant::now() + Duration::from_secs(1);
        let at = |n: u32| start + n * PING_EVERY;
        for n in 0..200 {
            assert_eq!(pings.ping(at(n), |sent| sent == n), at(n + 1));
            assert_eq!(pings.ping(at(n), |_| panic!("not yet")), at(n + 1));
            // Every fourth ping is lost, and the answer to the last ping takes 50 ms instead of 20 ms. Each answer
            // arrives twice.
            if n % 4 > 0 {
                let round_trip = Duration::from_millis(if n == 199 { 50 } else { 20 });
                pings.pong(at(n) + round_trip, n);
                pings.pong(at(n) + 2 * round_trip, n);
            }
        }
        pings.pong(at(200), 7);
        let path = pings.path(at(210));
        assert_eq!(path.round_trip, Some(Duration::from_millis(20)));
        assert_eq!(pings.median(), Some(Duration::from_millis(20)));
        assert!((path.loss.expect("enough") - (1.0 - 0.75_f64.sqrt())).abs() < 1e-9, "{path:?}");
        assert_eq!(pings.newest.len(), PINGS);
    }

    #[test]
    fn ping_that_was_not_sent_does_not_count_as_lost() {
        let mut pings = PeerPings::default();
        let start = Instant::now() + Duration::from_secs(1);
        for n in 0..100 {
            pings.ping(start + n * PING_EVERY, |_| false);
        }
        assert_eq!(pings.path(start + 200 * PING_EVERY), PeerPathFigures::default());
    }

    #[test]
    fn longest_message_fits_a_datagram_and_malformed_one_is_refused() {
        let service = "s".repeat(64);
        let reason = "r".repeat(300);
        let longest = [
            PeerMessage::Open { id: u64::MAX, port: u16::MAX, service, in_order: true },
            PeerMessage::Close { id: u64::MAX, messages: Some(u32::MAX), reason },
            PeerMessage::Keys {
                message: PeerKeyMessage {
                    local: "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535".parse().expect("an address"),
                    remote: "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff1]:65535".parse().expect("an address"),
                    cipher: Some(AeadCipher::Chacha20Poly1305),
                    phase: 1,
                    message: KeyMessage::Take(NoncePair { first: [255; 16], second: [255; 16] }, [255; 16]),
                },
            },
        ];
        for say in longest {
            let text = serde_json::to_vec(&say).expect("JSON");
            assert!(text.len() <= MESSAGE_MAX);
            assert_eq!(serde_json::from_slice::<PeerMessage>(&text).expect("a message"), say);
        }
        for text in
            ["", "{}", "[]", r#"{"say":"go"}"#, r#"{"say":"go","id":-1}"#, r#"{"say":"go","id":1,"x":1}"#]
        {
            assert!(serde_json::from_str::<PeerMessage>(text).is_err(), "{text}");
        }
    }
}
