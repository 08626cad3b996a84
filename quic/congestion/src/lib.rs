//! BBRv3 for quinn's connections: Millrace's BBR controller, fed with the events that quinn reports.
//!
//! quinn paces by the window alone. It reports how many bytes were lost and when the last of them was sent, but not
//! which packets. So this controller records bytes that were sent at the same time as one flight, and subtracts lost
//! bytes from the oldest flight.
#![deny(missing_docs)]

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_quic::plane::congestion::{
    AckEffect, Bbr as Model, Controller as _, Delivery, LostPacket, RateSnapshot, SendingPacket,
};
use quinn::congestion::{Controller, ControllerFactory};

/// Creates the controllers of an endpoint's connections.
#[derive(Debug, Default)]
pub struct BbrFactory {
    is_lossy: bool,
}

impl BbrFactory {
    /// Returns the configuration for bulk transfers: see [`Model::over_lossy_paths`].
    pub fn over_lossy_paths() -> Self {
        Self { is_lossy: true }
    }
}

impl ControllerFactory for BbrFactory {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        let model = Model::new(u64::from(current_mtu), now, fastrand::u64(..));
        let model = if self.is_lossy { model.over_lossy_paths() } else { model };
        Box::new(SimulatedPath::new(now, model))
    }
}

/// Bytes that were sent in one transmission and are neither acknowledged nor lost.
#[derive(Clone, Debug)]
struct Flight {
    sent: Instant,
    bytes: u64,
    snapshot: RateSnapshot,
}

#[derive(Clone, Debug)]
struct SimulatedPath {
    model: Model,
    delivery: Delivery,
    flights: VecDeque<Flight>,
    /// Sum of the bytes in all flights.
    in_flight: u64,
    /// Bytes that the current ACK has acknowledged.
    acked: u64,
    /// Send time of the newest packet that the current ACK has acknowledged.
    newest: Option<Instant>,
    /// Shortest round trip so far.
    min_rtt: Duration,
    initial_window: u64,
}

impl SimulatedPath {
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

    /// Removes up to `bytes` bytes from the flight (bytes sent in one transmission) at `index`, and returns how many it
    /// removed.
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
        // quinn identifies acknowledged bytes by their send time, which all packets of one transmission share.
        let Some(index) = self.flights.iter().position(|flight| flight.sent == sent) else { return };
        let Some(snapshot) = self.flights.get(index).map(|flight| flight.snapshot) else { return };
        let bytes = self.take(index, bytes);
        self.delivery.on_acked(now, sent, bytes, snapshot);
        self.acked += bytes;
        self.newest = self.newest.max(Some(sent));
    }

    /// Drops the oldest flights until at most `in_flight` bytes, the number that quinn reports, remain. quinn does not
    /// report when packets leave the flight because they elicit no ACK, or because handshake keys were discarded.
    fn forget_beyond(&mut self, in_flight: u64) {
        while self.in_flight > in_flight && !self.flights.is_empty() {
            self.take(0, self.in_flight - in_flight);
        }
    }
}

impl Controller for SimulatedPath {
    fn on_sent(&mut self, now: Instant, bytes: u64, _last_packet_number: u64) {
        if bytes == 0 {
            return;
        }
        let app_limited = self.delivery.is_app_limited();
        self.model.on_sent(&SendingPacket { now, in_flight: self.in_flight, app_limited });
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
        // Only the newest packet gives a round-trip sample: the peer may have delayed the ACK of older packets.
        let rtt = self.newest.take().map(|newest| now.saturating_duration_since(newest));
        if let Some(sample) = self.delivery.sample(self.min_rtt) {
            self.model.on_delivered(&AckEffect {
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
        // quinn says how many bytes were lost, and when the last of them was sent. This controller assumes that the
        // lost bytes belong to the oldest flights.
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

    /// Sends `packets` packets, one every 4 ms, and loses some of them. Each arrived packet gets its own ACK. Returns
    /// the smallest window after the hundredth packet.
    fn media(path: &mut SimulatedPath, start: Instant, packets: u64, is_lost: impl Fn(u64) -> bool) -> u64 {
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
    fn congestion_window_of_live_media_exceeds_10_packets_at_2_percent_loss() {
        let start = Instant::now();
        let mut path = SimulatedPath::new(start, Model::new(1280, start, 1));
        let needed = 10 * PACKET;
        let least = media(&mut path, start, 3000, |number| number % 50 == 7);
        assert!(least > needed, "{least}");
        assert_eq!(path.in_flight, 0);
        assert!(path.flights.is_empty());
    }

    #[test]
    fn non_ack_eliciting_packets_do_not_stay_counted_as_bytes_in_flight() {
        let start = Instant::now();
        let mut path = SimulatedPath::new(start, Model::new(1280, start, 1));
        // Sends a hundred packets that elicit no ACK, then one that does.
        (0..100).for_each(|number| path.on_sent(start + Duration::from_millis(number), 40, number));
        let last = start + Duration::from_millis(100);
        path.on_sent(last, PACKET, 100);
        path.acked(last + RTT, last, PACKET);
        path.on_end_acks(last + RTT, 0, true, Some(100));
        assert_eq!((path.in_flight, path.flights.len()), (0, 0));
        // After a loss of bytes that belong to no flight, and after persistent congestion, the window still allows
        // sending.
        path.on_congestion_event(last + RTT, last, true, 5000);
        assert!(path.window() > 0);
    }

    #[test]
    fn bytes_in_flight_acknowledged_one_by_one_are_counted_in_full() {
        let start = Instant::now();
        let mut path = SimulatedPath::new(start, Model::new(1280, start, 1));
        path.on_sent(start, 3 * PACKET, 2);
        path.acked(start + RTT, start, PACKET);
        path.acked(start + RTT, start, PACKET);
        assert_eq!((path.in_flight, path.acked), (PACKET, 2 * PACKET));
        path.on_congestion_event(start + RTT, start, false, PACKET);
        assert_eq!((path.in_flight, path.flights.len()), (0, 0));
    }
}
