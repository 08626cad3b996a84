//! BBRv3 (draft-ietf-ccwg-bbr): a model of the path's bandwidth and round trip, which sets the rate and the window.
//! Losses bound the model, but single losses do not slow the sender down.
//!
//! Names and section numbers are the draft's. Quantities are in bytes where the draft counts packets. Four functions
//! differ from the draft for live media, which seldom fills a path and has few packets: [`Bbr::update_min_rtt`],
//! [`Bbr::is_too_much`], [`Bbr::update_ack_aggregation`] and [`Bbr::check_full_bw`]. A fifth difference is for bulk
//! transfers over paths with high loss: [`Bbr::over_lossy_paths`].

mod filter;
mod path_loss;
mod probe;

use std::time::{Duration, Instant};

use super::{AckEffect, Acked, Controller, LostPacket, SendingPacket, initial_window};
use filter::WindowedMax;
use path_loss::PathLoss;
use probe::{AckPhase, Phase};

/// Gains of BBR's states: factors of the bandwidth for the pacing rate, and of the bandwidth-delay product for the
/// window (sections 5.3 and 5.6).
const STARTUP_PACING_GAIN: f64 = 2.77;
const STARTUP_CWND_GAIN: f64 = 2.0;
const DRAIN_PACING_GAIN: f64 = 0.35;
const CWND_GAIN: f64 = 2.0;
const PROBE_RTT_CWND_GAIN: f64 = 0.5;
/// Fraction by which the pacing rate stays below the estimated bandwidth, so that queues drain.
const PACING_MARGIN: f64 = 0.01;
/// Fraction of lost bytes above which too many bytes are considered to be in flight.
const LOSS_THRESHOLD: f64 = 0.02;
/// The losses of one round trip lower a short-term bound (on bandwidth or bytes in flight) to no less than this
/// fraction of the bound's previous value.
const BETA: f64 = 0.7;
/// Fraction of [`Bbr::inflight_longterm`] that BBR leaves unused for other flows.
const HEADROOM: f64 = 0.15;
/// Smallest window, packets: enough for an ACK of every second packet to keep the sender sending.
const MIN_PIPE_PACKETS: u64 = 4;
/// Factor of bandwidth growth. A round trip in which bandwidth grows by less suggests that the path is full.
const FULL_BW_GROWTH: f64 = 1.25;
/// Number of round trips without enough bandwidth growth after which Startup ends.
const FULL_BW_ROUNDS: u32 = 3;
/// Startup ends if at least this number of ACKs in one round trip reveal losses.
const STARTUP_FULL_LOSSES: u32 = 6;
/// Number of probing cycles after which a bandwidth sample expires.
const MAX_BW_CYCLES: u64 = 2;
/// Time after which the shortest round-trip sample expires.
const MIN_RTT_LENGTH: Duration = Duration::from_secs(10);
/// ProbeRTT begins if no round trip close to the shortest was measured for this time.
const PROBE_RTT_INTERVAL: Duration = Duration::from_secs(5);
/// Shortest time for which ProbeRTT keeps few bytes in flight.
const PROBE_RTT_DURATION: Duration = Duration::from_millis(200);
/// A round trip that exceeds the shortest one by less than the shortest divided by this number shows no queue.
const RTT_NOISE: u32 = 8;
/// A round trip that is longer than the shortest by half and by at least this time shows a queue.
const QUEUE: Duration = Duration::from_millis(20);
/// Number of round trips after which a measurement of ACK aggregation expires.
const EXTRA_ACKED_ROUNDS: u64 = 10;
/// Round trip that is assumed before the first sample.
const NOMINAL_RTT: Duration = Duration::from_millis(1);
/// Largest send quantum (section 5.6.3): the bytes that are sent as one burst.
const MAX_QUANTUM: u64 = 64 * 1024;
/// Queueing delay that an unpaced sender may cause even if the path's round trip is shorter.
const UNPACED_QUEUE: Duration = Duration::from_millis(20);
/// Smallest window of an unpaced sender, bytes, unless the congestion window is smaller.
const UNPACED_LEAST: u64 = 64 * 1024;
/// Value of an upper bound on bandwidth or bytes in flight while that bound does not apply.
const UNBOUNDED: u64 = u64::MAX;

/// State of [`Bbr`] (draft-ietf-ccwg-bbr, section 5.3).
///
/// The order is Startup, Drain, ProbeBW. ProbeRTT interrupts any of them, and returns to ProbeBW, or to Startup if that
/// had not ended. A packet that is sent after an idle period may end ProbeRTT. A loss may end the phase Up of ProbeBW.
/// Losses that turn out to be spurious may resume Startup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BbrState {
    /// The rate doubles each round trip, until the bandwidth stops growing or too much is lost.
    Startup,
    /// Less is sent than the path delivers, until the queue that Startup has built is gone.
    Drain,
    /// The sender keeps the path full, and probes for more bandwidth from time to time.
    ProbeBw(Phase),
    /// Few bytes are in flight for a short time, so that the shortest round trip can be measured.
    ProbeRtt,
}

/// The path model before losses changed it. It is restored if the losses turn out to be spurious.
#[derive(Clone, Copy, Debug)]
struct Undo {
    state: BbrState,
    bw_shortterm: u64,
    inflight_shortterm: u64,
    inflight_longterm: u64,
}

/// BBRv3 on one path. Its state (`BbrState`) changes only when an acknowledgement arrives
/// ([`Controller::on_delivered`]), with three exceptions that `BbrState` lists.
///
/// The caller notes each packet with `on_sent`, and for each ACK frame first the losses that it shows with `on_lost`
/// and then the acknowledged bytes with `on_delivered`. After `on_delivered`, the window, the pacing rate and the gains
/// have been updated for the current state. The first loss of a round trip saves the model, so that
/// `on_spurious_congestion` can restore it.
#[derive(Clone, Debug)]
pub struct Bbr {
    mtu: u64,
    state: BbrState,
    cwnd: u64,
    /// Pacing rate in bytes per second; 0 before the first sample.
    pacing_rate: u64,
    pacing_gain: f64,
    cwnd_gain: f64,

    max_bw: WindowedMax,
    cycles: u64,
    /// Upper bound of the bandwidth after recent losses, bytes per second.
    bw_shortterm: u64,
    inflight_shortterm: u64,
    /// Bytes in flight above which probing caused too much loss.
    inflight_longterm: u64,
    bw_latest: u64,
    inflight_latest: u64,

    min_rtt: Option<Duration>,
    min_rtt_at: Instant,
    probe_rtt_min: Option<Duration>,
    probe_rtt_min_at: Instant,
    probe_rtt_expired: bool,
    probe_rtt_done_at: Option<Instant>,
    probe_rtt_round_done: bool,
    prior_cwnd: u64,
    idle_restart: bool,

    next_round_delivered: u64,
    rounds: u64,
    round_start: bool,
    loss_round_delivered: u64,
    loss_round_start: bool,
    loss_in_round: bool,
    /// Number of ACKs in the current round trip that revealed losses.
    losses_in_round: u32,
    /// True if a loss was reported since the last ACK was processed.
    lost_something: bool,

    full_bw: u64,
    full_bw_rounds: u32,
    full_bw_now: bool,
    full_bw_reached: bool,

    extra_acked: WindowedMax,
    extra_acked_since: Instant,
    extra_acked_delivered: u64,

    cycle: probe::Cycle,
    undo: Option<Undo>,
    /// Estimate of the loss that the path has without a queue; `None` if the controller does not tolerate such loss.
    path_loss: Option<PathLoss>,
}

impl Bbr {
    /// Creates a controller. Each connection needs a different `seed`, so that connections do not probe for bandwidth
    /// at the same time.
    pub fn new(mtu: u64, now: Instant, seed: u64) -> Self {
        let cwnd = initial_window(mtu);
        Self {
            mtu,
            state: BbrState::Startup,
            cwnd,
            pacing_rate: 0,
            pacing_gain: STARTUP_PACING_GAIN,
            cwnd_gain: STARTUP_CWND_GAIN,
            max_bw: WindowedMax::default(),
            cycles: 0,
            bw_shortterm: UNBOUNDED,
            inflight_shortterm: UNBOUNDED,
            inflight_longterm: UNBOUNDED,
            bw_latest: 0,
            inflight_latest: 0,
            min_rtt: None,
            min_rtt_at: now,
            probe_rtt_min: None,
            probe_rtt_min_at: now,
            probe_rtt_expired: false,
            probe_rtt_done_at: None,
            probe_rtt_round_done: false,
            prior_cwnd: 0,
            idle_restart: false,
            next_round_delivered: 0,
            rounds: 0,
            round_start: false,
            loss_round_delivered: 0,
            loss_round_start: false,
            loss_in_round: false,
            losses_in_round: 0,
            lost_something: false,
            full_bw: 0,
            full_bw_rounds: 0,
            full_bw_now: false,
            full_bw_reached: false,
            extra_acked: WindowedMax::default(),
            extra_acked_since: now,
            extra_acked_delivered: 0,
            cycle: probe::Cycle::new(now, seed),
            undo: None,
            path_loss: None,
        }
    }

    /// Makes the controller tolerate loss that the path has even without a queue, because sending less does not avoid
    /// it. The draft treats more loss than `LOSS_THRESHOLD` as too much in flight, whatever its cause. It treats each
    /// round with a loss as a sign of less bandwidth.
    #[must_use]
    pub fn over_lossy_paths(self) -> Self {
        Self { path_loss: Some(PathLoss::default()), ..self }
    }
}

impl Controller for Bbr {
    /// Limits the rate after an idle period to the path's bandwidth (section 5.4.1).
    fn on_sent(&mut self, sending: &SendingPacket) {
        // The rate is limited only at the first packet after an idle period.
        if sending.in_flight > 0 || !sending.app_limited {
            return;
        }
        self.idle_restart = true;
        self.extra_acked_since = sending.now;
        match self.state {
            BbrState::ProbeBw(_) => self.set_pacing_rate(1.0),
            BbrState::ProbeRtt => self.check_probe_rtt_done(sending.now),
            BbrState::Startup | BbrState::Drain => {}
        }
    }

    fn on_ack(&mut self, _: Instant, _: &Acked) {}

    fn on_lost(&mut self, lost: &LostPacket) {
        if !self.loss_in_round {
            self.loss_round_delivered = lost.delivered;
            // The first loss of a round saves the model, so that a spurious loss can be undone.
            self.remember();
        }
        self.loss_in_round = true;
        self.lost_something = true;
        if let Some(path) = &mut self.path_loss {
            path.on_lost(lost.size);
        }
        self.cycle.on_lost(lost);
        if self.cycle.samples && self.is_too_much(lost.lost, lost.in_flight, lost.app_limited) {
            self.too_much_in_flight(lost.now, self.inflight_at_loss(lost), lost.app_limited, lost.delivered);
        }
    }

    fn on_delivered(&mut self, delivered: &AckEffect) {
        self.losses_in_round += u32::from(std::mem::take(&mut self.lost_something));
        self.update_latest(delivered);
        self.update_congestion(delivered);
        self.update_ack_aggregation(delivered);
        self.check_full_bw(delivered);
        self.check_startup_done();
        // Drain ends when the queue that Startup has built is gone (section 5.3.2).
        if self.state == BbrState::Drain && delivered.in_flight <= self.inflight(1.0) {
            self.enter_probe_bw(delivered);
        }
        self.update_probe_bw(delivered);
        self.update_min_rtt(delivered);
        self.check_probe_rtt(delivered);
        if self.loss_round_start {
            self.bw_latest = delivered.sample.rate.unwrap_or_default();
            self.inflight_latest = delivered.sample.delivered;
        }
        self.set_pacing_rate(self.pacing_gain);
        self.set_cwnd(delivered);
    }

    fn on_congestion(&mut self, _: Instant) {}

    fn on_spurious_congestion(&mut self) {
        let Some(undo) = self.undo.take() else { return };
        self.loss_in_round = false;
        self.reset_full_bw();
        self.bw_shortterm = self.bw_shortterm.max(undo.bw_shortterm);
        self.inflight_shortterm = self.inflight_shortterm.max(undo.inflight_shortterm);
        self.inflight_longterm = self.inflight_longterm.max(undo.inflight_longterm);
        // The losses that ended Startup were spurious, so Startup resumes.
        if undo.state == BbrState::Startup && self.state != BbrState::ProbeRtt && !self.full_bw_reached {
            self.enter_startup();
        }
    }

    /// Sets the window to its minimum, but keeps the path model. Each acknowledgement raises the window towards the
    /// model's value again.
    fn on_persistent_congestion(&mut self, _: Instant) {
        // Persistent congestion sets the minimum window (RFC 9002, section 7.6.2).
        self.cwnd = self.minimum();
    }

    fn set_mtu(&mut self, mtu: u64) {
        self.mtu = mtu;
        self.cwnd = self.cwnd.max(self.minimum());
    }

    fn window(&self) -> u64 {
        self.cwnd
    }

    /// Returns the bandwidth-delay product. More is not allowed in flight without pacing, because a whole unpaced burst
    /// may queue at the bottleneck. The result is at least `UNPACED_LEAST`, and at least what the bottleneck sends in
    /// the time `UNPACED_QUEUE`, but never more than the congestion window.
    fn unpaced_window(&self) -> u64 {
        let burst = (self.bw() as f64 * UNPACED_QUEUE.as_secs_f64()) as u64;
        self.times_bdp(1.0, self.bw()).max(burst).max(UNPACED_LEAST).min(self.cwnd)
    }

    fn pacing_rate(&self, rtt: Duration) -> u64 {
        if self.pacing_rate > 0 {
            return self.pacing_rate;
        }
        let rate = STARTUP_PACING_GAIN * self.cwnd as f64 / rtt.max(NOMINAL_RTT).as_secs_f64();
        rate as u64
    }

    fn bandwidth(&self) -> Option<u64> {
        Some(self.max_bw.get()).filter(|bandwidth| *bandwidth > 0)
    }
}

/// Methods for the model of the path (sections 5.5.1 to 5.5.10).
impl Bbr {
    fn bw(&self) -> u64 {
        self.max_bw.get().min(self.bw_shortterm)
    }

    fn minimum(&self) -> u64 {
        MIN_PIPE_PACKETS * self.mtu
    }

    /// Returns the bandwidth-delay product times `gain` in bytes, raised to at least three bursts.
    fn inflight(&self, gain: f64) -> u64 {
        self.quantize(self.times_bdp(gain, self.bw()))
    }

    fn times_bdp(&self, gain: f64, bw: u64) -> u64 {
        match self.min_rtt {
            None => initial_window(self.mtu),
            Some(min_rtt) => (gain * bw as f64 * min_rtt.as_secs_f64()) as u64,
        }
    }

    /// Raises `inflight`, in bytes, to at least three send quanta, so that bursts fit into the window.
    fn quantize(&self, inflight: u64) -> u64 {
        // The send quantum is the number of bytes that pacing sends in a millisecond (section 5.6.3).
        let quantum = (self.pacing_rate / 1000).clamp(2 * self.mtu, MAX_QUANTUM);
        let more = if self.state == BbrState::ProbeBw(Phase::Up) { 2 * self.mtu } else { 0 };
        inflight.max(3 * quantum).max(self.minimum()) + more
    }

    /// Returns whether so many bytes were lost that the sender must keep fewer bytes in flight (section 5.5.10.2).
    ///
    /// With fewer than 50 packets in flight a single loss exceeds [`LOSS_THRESHOLD`], but may be noise of a radio link.
    /// The same holds for two losses of a sender that does not fill the path.
    fn is_too_much(&self, lost: u64, in_flight: u64, app_limited: bool) -> bool {
        let noise = if app_limited { 2 } else { 1 } * self.mtu;
        lost > ((in_flight as f64 * LOSS_THRESHOLD) as u64).max(noise) + self.path_loss(in_flight)
    }

    /// Returns how many of `in_flight` bytes the path is expected to lose even if there is no queue.
    fn path_loss(&self, in_flight: u64) -> u64 {
        self.path_loss.as_ref().map_or(0, |path| path.expected_loss(in_flight, self.mtu))
    }

    /// Returns the bytes in flight at which the lost fraction reached `LOSS_THRESHOLD` (section 5.5.10.2).
    fn inflight_at_loss(&self, lost: &LostPacket) -> u64 {
        let before = lost.in_flight.saturating_sub(lost.size) as f64;
        let lost_before = lost.lost.saturating_sub(lost.size + self.path_loss(lost.in_flight)) as f64;
        // `prefix` is how many bytes of the lost packet were needed for the lost fraction to reach the threshold.
        let prefix = (LOSS_THRESHOLD * before - lost_before) / (1.0 - LOSS_THRESHOLD);
        (before + prefix.max(0.0)) as u64
    }

    /// Returns whether losses have another cause than the sending rate: packets are sent no faster than the path
    /// delivers, or the measured bandwidth still grows.
    fn is_steady(&self) -> bool {
        match self.state {
            BbrState::Startup => self.full_bw_rounds == 0,
            BbrState::ProbeBw(phase) => phase != Phase::Up,
            BbrState::Drain | BbrState::ProbeRtt => false,
        }
    }

    fn start_round(&mut self, delivered: u64) {
        self.next_round_delivered = delivered;
    }

    fn update_latest(&mut self, delivered: &AckEffect) {
        let sample = &delivered.sample;
        self.bw_latest = self.bw_latest.max(sample.rate.unwrap_or_default());
        self.inflight_latest = self.inflight_latest.max(sample.delivered);
        // A round of losses ends when a packet is acknowledged that was sent after the round's first loss was detected.
        self.loss_round_start = sample.prior_delivered >= self.loss_round_delivered;
        if self.loss_round_start {
            self.loss_round_delivered = delivered.total;
        }
        self.round_start = sample.prior_delivered >= self.next_round_delivered;
        if let Some(path) = &mut self.path_loss {
            path.on_delivered(delivered.acked, delivered.rtt);
        }
        if self.round_start {
            let is_steady = self.is_steady();
            if let Some(path) = &mut self.path_loss {
                path.end_round(self.min_rtt, is_steady, self.mtu);
            }
            self.start_round(delivered.total);
            self.rounds += 1;
            self.cycle.rounds_since_probe += 1;
        }
        // An application-limited rate sample is a lower bound of the bandwidth, so it counts only if it raises the
        // maximum.
        if let Some(rate) = sample.rate
            && (rate >= self.max_bw.get() || !sample.app_limited)
        {
            self.max_bw.update(self.cycles, MAX_BW_CYCLES, rate);
        }
    }

    /// Lowers the model's short-term bounds for the losses of a round trip, once per round trip.
    fn update_congestion(&mut self, delivered: &AckEffect) {
        if !self.loss_round_start {
            return;
        }
        self.check_startup_losses(delivered);
        let is_probing =
            matches!(self.state, BbrState::Startup | BbrState::ProbeBw(Phase::Refill | Phase::Up));
        let sample = &delivered.sample;
        let is_path = self.path_loss(sample.in_flight) >= sample.lost.max(1);
        // Loss while probing for bandwidth is expected. It lowers `inflight_longterm` instead of the short-term bounds
        // on bandwidth and bytes in flight.
        if self.loss_in_round && !is_probing && !is_path {
            let scaled = |bound: u64, start: u64| {
                let bound = if bound == UNBOUNDED { start } else { bound };
                (BETA * bound as f64) as u64
            };
            self.bw_shortterm = scaled(self.bw_shortterm, self.max_bw.get()).max(self.bw_latest);
            self.inflight_shortterm = scaled(self.inflight_shortterm, self.cwnd).max(self.inflight_latest);
        }
        self.loss_in_round = false;
        self.losses_in_round = 0;
    }

    fn reset_congestion_signals(&mut self) {
        self.loss_in_round = false;
        self.losses_in_round = 0;
        self.bw_latest = 0;
        self.inflight_latest = 0;
    }

    fn reset_shortterm(&mut self) {
        self.bw_shortterm = UNBOUNDED;
        self.inflight_shortterm = UNBOUNDED;
    }

    fn remember(&mut self) {
        self.undo = Some(Undo {
            state: self.state,
            bw_shortterm: self.bw_shortterm,
            inflight_shortterm: self.inflight_shortterm,
            inflight_longterm: self.inflight_longterm,
        });
    }

    /// Estimates how many bytes are acknowledged beyond the bandwidth times the time, because links and receivers
    /// aggregate ACKs. Unlike the draft, this uses the bandwidth without the short-term bound of recent losses. With
    /// the bound, packets that arrive as fast as before the losses would count as aggregated, and enlarge the window.
    fn update_ack_aggregation(&mut self, delivered: &AckEffect) {
        let elapsed = delivered.now.saturating_duration_since(self.extra_acked_since);
        let mut expected = (self.max_bw.get() as f64 * elapsed.as_secs_f64()) as u64;
        // ACKs arrived no faster than at the bandwidth, so a new interval for measuring aggregation begins.
        if self.extra_acked_delivered <= expected {
            self.extra_acked_delivered = 0;
            self.extra_acked_since = delivered.now;
            expected = 0;
        }
        self.extra_acked_delivered += delivered.acked;
        let extra = (self.extra_acked_delivered - expected.min(self.extra_acked_delivered)).min(self.cwnd);
        // The bandwidth is underestimated during Startup, so only the last round trip's aggregation counts.
        let length = if self.full_bw_reached { EXTRA_ACKED_ROUNDS } else { 1 };
        self.extra_acked.update(self.rounds, length, extra);
    }

    /// Updates the shortest round trip, and decides whether to enter ProbeRTT to measure it without a queue (section
    /// 5.5.7).
    ///
    /// A sender that seldom fills the path measures round trips without a queue all the time, so it need not pause for
    /// ProbeRTT. For such a sender, a round trip close to the shortest one postpones the expiry of the shortest one.
    fn update_min_rtt(&mut self, delivered: &AckEffect) {
        let now = delivered.now;
        self.probe_rtt_expired = now.saturating_duration_since(self.probe_rtt_min_at) > PROBE_RTT_INTERVAL;
        if let Some(rtt) = delivered.rtt {
            let again = |min: Duration| delivered.sample.app_limited && rtt <= min + min / RTT_NOISE;
            match self.probe_rtt_min {
                Some(min) if rtt >= min && !self.probe_rtt_expired => {
                    if again(min) {
                        self.probe_rtt_min_at = now;
                    }
                }
                _ => {
                    self.probe_rtt_expired &= !self.probe_rtt_min.is_some_and(again);
                    self.probe_rtt_min = Some(rtt);
                    self.probe_rtt_min_at = now;
                }
            }
        }
        let expired = now.saturating_duration_since(self.min_rtt_at) > MIN_RTT_LENGTH;
        let shorter = self.min_rtt.is_none_or(|min| self.probe_rtt_min.is_some_and(|rtt| rtt < min));
        if shorter || expired {
            self.min_rtt = self.probe_rtt_min.or(self.min_rtt);
            self.min_rtt_at = self.probe_rtt_min_at;
        }
    }
}

/// Methods for the states Startup and Drain (sections 5.3.1 and 5.3.2).
impl Bbr {
    fn enter_startup(&mut self) {
        self.state = BbrState::Startup;
        self.pacing_gain = STARTUP_PACING_GAIN;
        self.cwnd_gain = STARTUP_CWND_GAIN;
    }

    fn reset_full_bw(&mut self) {
        self.full_bw = 0;
        self.full_bw_rounds = 0;
        self.full_bw_now = false;
    }

    /// Notes when the bandwidth has stopped growing. Unlike in the draft an application-limited sender counts too, if
    /// its data builds a queue: a video key frame fills the path for a round trip or two. Otherwise the sender would
    /// stay in Startup forever, and send each key frame at nearly three times the path's rate.
    fn check_full_bw(&mut self, delivered: &AckEffect) {
        let sample = &delivered.sample;
        if self.full_bw_now || (sample.app_limited && !self.shows_queue(delivered)) {
            return;
        }
        // The rate of an application-limited sample may be low although the path does not change. So the test for
        // growth uses the maximum bandwidth instead of this sample.
        let rate = if sample.app_limited { self.max_bw.get() } else { sample.rate.unwrap_or_default() };
        if rate as f64 >= self.full_bw as f64 * FULL_BW_GROWTH {
            self.reset_full_bw();
            self.full_bw = rate;
        } else if self.round_start {
            self.full_bw_rounds += 1;
            self.full_bw_now = self.full_bw_rounds >= FULL_BW_ROUNDS;
            self.full_bw_reached |= self.full_bw_now;
        }
    }

    fn shows_queue(&self, delivered: &AckEffect) -> bool {
        let (Some(rtt), Some(min)) = (delivered.rtt, self.min_rtt) else { return false };
        rtt > min + QUEUE.max(min / 2)
    }

    /// Ends Startup after many losses. A sender that does not fill the path did not cause its losses, so its losses do
    /// not end Startup. If the controller tolerates path loss, losses do not count while the bandwidth grows.
    fn check_startup_losses(&mut self, delivered: &AckEffect) {
        let sample = &delivered.sample;
        let grows = self.path_loss.is_some() && self.full_bw_rounds == 0;
        if self.state == BbrState::Startup
            && !grows
            && self.losses_in_round >= STARTUP_FULL_LOSSES
            && !sample.app_limited
            && self.is_too_much(sample.lost, sample.in_flight, sample.app_limited)
        {
            self.full_bw_reached = true;
            self.inflight_longterm = self.times_bdp(1.0, self.max_bw.get()).max(self.inflight_latest);
        }
    }

    fn check_startup_done(&mut self) {
        if self.state == BbrState::Startup && self.full_bw_reached {
            self.state = BbrState::Drain;
            self.pacing_gain = DRAIN_PACING_GAIN;
            self.cwnd_gain = CWND_GAIN;
        }
    }
}

/// Methods for the state ProbeRTT (section 5.3.4).
impl Bbr {
    fn probe_rtt_cwnd(&self) -> u64 {
        self.times_bdp(PROBE_RTT_CWND_GAIN, self.bw()).max(self.minimum())
    }

    fn check_probe_rtt(&mut self, delivered: &AckEffect) {
        if self.state != BbrState::ProbeRtt && self.probe_rtt_expired && !self.idle_restart {
            self.save_cwnd();
            self.state = BbrState::ProbeRtt;
            self.pacing_gain = 1.0;
            self.cwnd_gain = PROBE_RTT_CWND_GAIN;
            self.probe_rtt_done_at = None;
            self.cycle.ack_phase = AckPhase::ProbeStopping;
            self.start_round(delivered.total);
        }
        if self.state == BbrState::ProbeRtt {
            if self.probe_rtt_done_at.is_some() {
                self.probe_rtt_round_done |= self.round_start;
                if self.probe_rtt_round_done {
                    self.check_probe_rtt_done(delivered.now);
                }
            } else if delivered.in_flight <= self.probe_rtt_cwnd() {
                // The duration of ProbeRTT begins when bytes in flight have fallen to ProbeRTT's window.
                self.probe_rtt_done_at = Some(delivered.now + PROBE_RTT_DURATION);
                self.probe_rtt_round_done = false;
                self.start_round(delivered.total);
            }
        }
        if delivered.sample.delivered > 0 {
            self.idle_restart = false;
        }
    }

    fn check_probe_rtt_done(&mut self, now: Instant) {
        if self.probe_rtt_done_at.is_none_or(|at| now <= at) {
            return;
        }
        self.probe_rtt_min_at = now;
        self.cwnd = self.cwnd.max(self.prior_cwnd);
        self.reset_shortterm();
        match self.full_bw_reached {
            true => self.resume_probe_bw(now),
            false => self.enter_startup(),
        }
    }

    fn save_cwnd(&mut self) {
        self.prior_cwnd = match self.state {
            BbrState::ProbeRtt => self.prior_cwnd.max(self.cwnd),
            _ => self.cwnd,
        };
    }
}

/// Methods that set the congestion window and the pacing rate (section 5.6).
impl Bbr {
    fn set_pacing_rate(&mut self, gain: f64) {
        let rate = (gain * self.bw() as f64 * (1.0 - PACING_MARGIN)) as u64;
        // The pacing rate must not fall during Startup because of a single low sample.
        if rate > 0 && (self.full_bw_reached || rate > self.pacing_rate) {
            self.pacing_rate = rate;
        }
    }

    fn set_cwnd(&mut self, delivered: &AckEffect) {
        let most = self.times_bdp(self.cwnd_gain, self.bw()) + self.extra_acked.get();
        let most = self.quantize(most);
        if self.full_bw_reached {
            self.cwnd = (self.cwnd + delivered.acked).min(most);
        } else if self.cwnd < most || delivered.total < initial_window(self.mtu) {
            self.cwnd += delivered.acked;
        }
        let bound = match self.state {
            BbrState::ProbeBw(Phase::Cruise) => self.inflight_with_headroom(),
            BbrState::ProbeBw(_) => self.inflight_longterm,
            BbrState::ProbeRtt => self.inflight_with_headroom().min(self.probe_rtt_cwnd()),
            BbrState::Startup | BbrState::Drain => UNBOUNDED,
        };
        self.cwnd = self.cwnd.min(bound.min(self.inflight_shortterm)).max(self.minimum());
    }
}
