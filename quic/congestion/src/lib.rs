//! BBRv3 for quinn's connections: Millrace's own controller, told what quinn tells one.
//!
//! quinn paces by the window alone, and says of losses how many bytes they were and when the last of them was sent. What
//! was sent at once is therefore kept as one, and losses are taken from what was sent first.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_quic::plane::congestion::{
    Bbr as Model, Controller as _, Delivered, Delivery, LostPacket, Sending, Snapshot,
};
use quinn::congestion::{Controller, ControllerFactory};

/// Makes the controllers of an endpoint's connections.
#[derive(Debug, Default)]
pub struct Bbr {
    is_lossy: bool,
}

impl Bbr {
    /// For transfers: see [`Model::over_lossy_paths`].
    pub fn over_lossy_paths() -> Self {
        Self { is_lossy: true }
    }
}

impl ControllerFactory for Bbr {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        let model = Model::new(u64::from(current_mtu), now, fastrand::u64(..));
        let model = if self.is_lossy { model.over_lossy_paths() } else { model };
        Box::new(Path::new(now, model))
    }
}

/// What left in one transmission, less what is known of it.
#[derive(Clone, Debug)]
struct Flight {
    sent: Instant,
    bytes: u64,
    snapshot: Snapshot,
}

#[derive(Clone, Debug)]
struct Path {
    model: Model,
    delivery: Delivery,
    flights: VecDeque<Flight>,
    in_flight: u64,
    /// By the ACK that is being told.
    acked: u64,
    /// When the newest packet that it acknowledges was sent, and the shortest round trip there was.
    newest: Option<Instant>,
    min_rtt: Duration,
    initial_window: u64,
}

impl Path {
    fn new(now: Instant, model: Model) -> Self {
        Self {
            initial_window: model.window(),
            model,
            delivery: Delivery::new(now),
            flights: VecDeque::new(),
            in_flight: 0,
            acked: 0,
            newest: None,
            min_rtt: Duration::ZERO,
        }
    }

    /// Takes up to `bytes` out of the flight at `index`: what it took.
    fn take(&mut self, index: usize, bytes: u64) -> u64 {
        let Some(flight) = self.flights.get_mut(index) else { return 0 };
        let taken = bytes.min(flight.bytes);
        flight.bytes -= taken;
        self.in_flight -= taken;
        if flight.bytes == 0 {
            self.flights.remove(index);
        }
        taken
    }

    fn acked(&mut self, now: Instant, sent: Instant, bytes: u64) {
        let Some(index) = self.flights.iter().position(|flight| flight.sent == sent) else { return };
        let Some(snapshot) = self.flights.get(index).map(|flight| flight.snapshot) else { return };
        let bytes = self.take(index, bytes);
        self.delivery.on_acked(now, sent, bytes, snapshot);
        self.acked += bytes;
        self.newest = self.newest.max(Some(sent));
    }

    /// Packets that ask for no ACK are sent too, and keys of the handshake are dropped with what was sent under them: quinn
    /// does not say of which transmissions they were.
    fn forget_beyond(&mut self, in_flight: u64) {
        while self.in_flight > in_flight && !self.flights.is_empty() {
            self.take(0, self.in_flight - in_flight);
        }
    }
}

impl Controller for Path {
    fn on_sent(&mut self, now: Instant, bytes: u64, _last_packet_number: u64) {
        if bytes == 0 {
            return;
        }
        let app_limited = self.delivery.is_app_limited();
        self.model.on_sent(&Sending { now, in_flight: self.in_flight, app_limited });
        let snapshot = self.delivery.on_sent(now, self.in_flight, bytes);
        self.in_flight += bytes;
        self.flights.push_back(Flight { sent: now, bytes, snapshot });
    }

    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        _app_limited: bool,
        rtt: &quinn_proto::RttEstimator,
    ) {
        self.min_rtt = rtt.min();
        self.acked(now, sent, bytes);
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, _largest: Option<u64>) {
        self.forget_beyond(in_flight);
        let acked = std::mem::take(&mut self.acked);
        let rtt = self.newest.take().map(|newest| now.saturating_duration_since(newest));
        if let Some(sample) = self.delivery.sample(self.min_rtt) {
            self.model.on_delivered(&Delivered {
                now,
                acked,
                total: self.delivery.delivered(),
                sample,
                rtt,
                in_flight: self.in_flight,
                window_limited: !app_limited,
            });
        }
        if app_limited {
            self.delivery.on_app_limited(self.in_flight);
        }
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, is_persistent: bool, lost: u64) {
        let mut left = lost;
        while left > 0 {
            let Some(flight) = self.flights.front().filter(|flight| flight.sent <= sent).cloned() else {
                break;
            };
            let size = self.take(0, left);
            left -= size;
            self.delivery.on_lost(size);
            self.model.on_lost(&LostPacket {
                now,
                size,
                in_flight: flight.snapshot.in_flight,
                lost: self.delivery.lost_since(&flight.snapshot),
                app_limited: flight.snapshot.app_limited,
                delivered: self.delivery.delivered(),
            });
        }
        if is_persistent {
            self.model.on_persistent_congestion(now);
        }
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.model.set_mtu(u64::from(new_mtu));
    }

    fn window(&self) -> u64 {
        self.model.window()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(self.clone())
    }

    fn initial_window(&self) -> u64 {
        self.initial_window
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKET: u64 = 1250;
    const RTT: Duration = Duration::from_millis(40);

    /// So many packets, one every 4 ms, of which some are lost; each is acknowledged alone. The least window on the way, from
    /// the hundredth packet on.
    fn media(path: &mut Path, start: Instant, packets: u64, is_lost: impl Fn(u64) -> bool) -> u64 {
        let sent_at = |number: u64| start + Duration::from_millis(4 * number);
        let trip = RTT.as_millis() as u64 / 4;
        let mut least = u64::MAX;
        path.min_rtt = RTT;
        for number in 0..packets + trip {
            let now = sent_at(number);
            if number < packets {
                path.on_sent(now, PACKET, number);
            }
            let Some(acked) = number.checked_sub(trip) else { continue };
            if !is_lost(acked) {
                path.acked(now, sent_at(acked), PACKET);
                path.on_end_acks(now, path.in_flight, true, Some(acked));
            }
            if let Some(lost) = acked.checked_sub(3).filter(|lost| is_lost(*lost)) {
                path.on_congestion_event(now, sent_at(lost), false, PACKET);
            }
            if number > 100 {
                least = least.min(path.window());
            }
        }
        least
    }

    #[test]
    fn losses_do_not_take_the_window_from_live_media() {
        let start = Instant::now();
        let mut path = Path::new(start, Model::new(1280, start, 1));
        let needed = 10 * PACKET;
        let least = media(&mut path, start, 3000, |number| number % 50 == 7);
        assert!(least > needed, "{least}");
        assert_eq!(path.in_flight, 0);
        assert!(path.flights.is_empty());
    }

    #[test]
    fn what_quinn_no_longer_counts_is_forgotten() {
        let start = Instant::now();
        let mut path = Path::new(start, Model::new(1280, start, 1));
        // Packets that ask for no ACK, then one that does.
        (0..100).for_each(|number| path.on_sent(start + Duration::from_millis(number), 40, number));
        let last = start + Duration::from_millis(100);
        path.on_sent(last, PACKET, 100);
        path.acked(last + RTT, last, PACKET);
        path.on_end_acks(last + RTT, 0, true, Some(100));
        assert_eq!((path.in_flight, path.flights.len()), (0, 0));
        // Losses of what is not known, and persistent congestion, do no harm.
        path.on_congestion_event(last + RTT, last, true, 5000);
        assert!(path.window() > 0);
    }

    #[test]
    fn packets_sent_at_once_are_acknowledged_one_by_one() {
        let start = Instant::now();
        let mut path = Path::new(start, Model::new(1280, start, 1));
        path.on_sent(start, 3 * PACKET, 2);
        path.acked(start + RTT, start, PACKET);
        path.acked(start + RTT, start, PACKET);
        assert_eq!((path.in_flight, path.acked), (PACKET, 2 * PACKET));
        path.on_congestion_event(start + RTT, start, false, PACKET);
        assert_eq!((path.in_flight, path.flights.len()), (0, 0));
    }
}
