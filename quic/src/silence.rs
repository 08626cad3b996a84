//! Decides when to probe a peer that sends nothing, and when to consider it dead.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Time between two calls of [`Silence::look`].
pub const LOOKS: Duration = Duration::from_millis(100);
/// Time without a packet after which a live peer (one that has sent packets often) is probed.
const PATIENCE: Duration = Duration::from_millis(500);
/// Time between two probes.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest time for which a silent peer is probed. After this time no more probes are sent, and only the idle timeout
/// ends the connection.
const ENOUGH: Duration = Duration::from_secs(60);
/// A peer is live if at least [`LIVE`] packets arrived during this many last calls of [`Silence::look`].
const WINDOW: usize = 20;
/// A peer is live if at least this many packets arrived during [`WINDOW`] calls of [`Silence::look`]. Keep-alives and
/// answers to probes are fewer.
const LIVE: u64 = 12;
/// Packets that this endpoint sends within this time after the peer's last packet may contain only ACK frames, which
/// the peer need not acknowledge. Packets sent later are expected to be acknowledged.
const ACKNOWLEDGED: Duration = Duration::from_millis(200);
/// Number of unacknowledged packets after which a peer that sends only few packets is probed. By then, QUIC has
/// retransmitted because of a probe timeout.
const UNANSWERED: u64 = 2;
/// A peer is considered dead if probes are unanswered for this time plus two round trips. A living peer would appear
/// dead only if three probes were lost.
const DEATH: Duration = Duration::from_millis(400);
/// Shortest time without an answer to a probe after which a peer is considered dead.
const SHORTEST_DEATH: Duration = Duration::from_millis(500);

/// Totals of a connection since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketTotals {
    /// ACK, DATAGRAM, PING and STREAM frames that arrived. Every living peer sends some. UDP datagrams would be the
    /// wrong measure, since some are no sign of life: anyone can send datagrams that no key opens, and copies of old ones.
    pub received: u64,
    /// UDP datagrams that were sent.
    pub sent: u64,
}

/// A monitor that detects a silent peer from the number of frames received. It has three states: *quiet* (few packets
/// arrive, so their absence means nothing), *live* (packets arrive often), and *silent*. A live peer becomes silent
/// after `PATIENCE` without a packet. A quiet peer becomes silent only if acknowledgements from it are missing. A
/// packet ends the silence. Only [`Silence::look`] changes the state. Time in which this process was stopped does not
/// count.
#[derive(Debug)]
pub struct Silence {
    packets: PacketTotals,
    looked: Instant,
    /// Time since the last packet from the peer.
    silent: Duration,
    /// Number of packets that were sent since the peer's last packet and that it has to acknowledge.
    unanswered: u64,
    /// Number of packets received between successive calls of `look`, for the last [`WINDOW`] calls. The list does not
    /// change while the peer is silent.
    recent: VecDeque<u64>,
    probing: Option<Probing>,
}

/// State of a silent peer. Times are measured from the peer's last packet.
#[derive(Clone, Copy, Debug)]
struct Probing {
    since: Duration,
    /// Time of the next probe.
    next: Duration,
}

impl Silence {
    /// Creates the monitor in the state *quiet*.
    pub fn new(now: Instant) -> Self {
        Self {
            packets: PacketTotals::default(),
            looked: now,
            silent: Duration::ZERO,
            unanswered: 0,
            recent: VecDeque::with_capacity(WINDOW),
            probing: None,
        }
    }

    /// Updates the state from the total numbers of packets so far, and returns whether to probe the peer now.
    pub fn look(&mut self, now: Instant, packets: PacketTotals) -> bool {
        let news = packets.received.saturating_sub(self.packets.received);
        let sent = packets.sent.saturating_sub(self.packets.sent);
        // If more than two intervals have passed since the last call, this process was stopped. The excess time tells
        // nothing about the peer, so it does not count.
        let passed = now.saturating_duration_since(self.looked).min(2 * LOOKS);
        self.packets = packets;
        self.looked = now;
        if news > 0 {
            self.silent = Duration::ZERO;
            self.unanswered = 0;
            self.probing = None;
        } else {
            self.silent += passed;
            if self.silent > ACKNOWLEDGED {
                self.unanswered += sent;
            }
        }
        if let Some(probing) = &mut self.probing {
            if self.silent < probing.next || self.silent > probing.since + ENOUGH {
                return false;
            }
            probing.next = self.silent + PAUSE;
            return true;
        }
        let is_live = self.recent.iter().sum::<u64>() >= LIVE;
        if self.silent >= PATIENCE && (is_live || self.unanswered >= UNANSWERED) {
            self.probing = Some(Probing { since: self.silent, next: self.silent + PAUSE });
            return true;
        }
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(news);
        false
    }

    /// Returns whether the peer has left probes unanswered for so long that it is likely dead. `round_trip` is the
    /// measured round-trip time.
    pub fn is_dead(&self, round_trip: Duration) -> bool {
        let patience = (DEATH + 2 * round_trip).max(SHORTEST_DEATH);
        self.probing.is_some_and(|probing| self.silent - probing.since >= patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A simulated connection. Its silence monitor is called once in each interval of length [`LOOKS`].
    struct WatchedConnection {
        silence: Silence,
        now: Instant,
        packets: PacketTotals,
        /// True if the peer acknowledges probes.
        answers: bool,
    }

    impl WatchedConnection {
        fn new(answers: bool) -> Self {
            let now = Instant::now();
            Self { silence: Silence::new(now), now, packets: PacketTotals::default(), answers }
        }

        /// Simulates the time `time` with packets at a given rate. Returns how many probes were due, and when the first
        /// one was due.
        fn pass(&mut self, time: Duration, packets_per_look: f64) -> (u32, Option<Duration>) {
            let began = self.now;
            let mut due = 0.0;
            let mut probes = 0;
            let mut first = None;
            while self.now < began + time {
                self.now += LOOKS;
                due += packets_per_look;
                self.packets.received += due as u64;
                due = due.fract();
                if self.silence.look(self.now, self.packets) {
                    probes += 1;
                    self.packets.received += u64::from(self.answers);
                    first.get_or_insert(self.now - began);
                }
            }
            (probes, first)
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn live_peer_that_falls_silent_is_probed_until_it_answers() {
        let mut watched = WatchedConnection::new(false);
        assert_eq!(watched.pass(3 * SECOND, 2.5), (0, None));
        let (probes, first) = watched.pass(2 * SECOND, 0.0);
        assert_eq!(first, Some(PATIENCE));
        assert!((5..=8).contains(&probes), "{probes}");
        // The peer sends packets again, so probing stops.
        assert_eq!(watched.pass(SECOND, 3.0), (0, None));
        let (_, again) = watched.pass(SECOND, 0.0);
        assert_eq!(again, Some(PATIENCE));
    }

    #[test]
    fn live_peer_that_answers_but_has_no_media_is_not_probed_for_ever() {
        let mut watched = WatchedConnection::new(true);
        watched.pass(3 * SECOND, 3.0);
        let (probes, _) = watched.pass(5 * SECOND, 0.0);
        assert!((1..=6).contains(&probes), "{probes}");
        assert_eq!(watched.pass(600 * SECOND, 0.0), (0, None));
    }

    #[test]
    fn keep_alives_do_not_count_as_media() {
        let mut watched = WatchedConnection::new(false);
        assert_eq!(watched.pass(60 * SECOND, 0.05), (0, None));
        assert_eq!(watched.pass(20 * SECOND, 0.0), (0, None));
    }

    #[test]
    fn peer_that_never_answers_is_no_longer_probed_after_a_minute() {
        let mut watched = WatchedConnection::new(false);
        watched.pass(3 * SECOND, 3.0);
        watched.pass(ENOUGH + SECOND, 0.0);
        assert_eq!(watched.pass(600 * SECOND, 0.0), (0, None));
    }

    const ROUND_TRIP: Duration = Duration::from_millis(20);

    #[test]
    fn live_peer_without_answers_is_dead_after_a_second_until_its_next_packet() {
        let mut watched = WatchedConnection::new(false);
        watched.pass(3 * SECOND, 2.5);
        watched.pass(9 * LOOKS, 0.0);
        assert!(!watched.silence.is_dead(ROUND_TRIP));
        watched.pass(LOOKS, 0.0);
        assert!(watched.silence.is_dead(ROUND_TRIP));
        assert!(!watched.silence.is_dead(10 * ROUND_TRIP), "on a longer path an answer may be on its way");
        watched.pass(LOOKS, 1.0);
        assert!(!watched.silence.is_dead(ROUND_TRIP));
    }

    /// At first the peer has nothing to acknowledge. Then this endpoint sends a request, which QUIC retransmits.
    #[test]
    fn quiet_peer_is_dead_when_it_answers_no_request() {
        let mut watched = WatchedConnection::new(false);
        watched.pass(20 * SECOND, 0.1);
        watched.pass(10 * SECOND, 0.0);
        assert!(!watched.silence.is_dead(ROUND_TRIP));
        for _ in 0..3 {
            watched.packets.sent += 1;
            watched.pass(LOOKS, 0.0);
        }
        watched.pass(4 * LOOKS, 0.0);
        assert!(watched.silence.is_dead(ROUND_TRIP));
    }

    #[test]
    fn sent_acknowledgements_need_no_answer() {
        let mut watched = WatchedConnection::new(false);
        for _ in 0..20 {
            watched.pass(LOOKS, 1.0);
            watched.packets.sent += 1;
            watched.pass(2 * SECOND, 0.0);
        }
        assert!(watched.silence.probing.is_none());
    }

    /// While this process is stopped (SIGSTOP), the peer's packets wait in the socket.
    #[test]
    fn time_while_the_process_was_stopped_does_not_count_as_silence() {
        let mut watched = WatchedConnection::new(false);
        watched.pass(3 * SECOND, 2.5);
        watched.now += 60 * SECOND;
        watched.pass(2 * LOOKS, 0.0);
        assert!(watched.silence.probing.is_none());
    }
}
