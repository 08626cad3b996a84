//! The state ProbeBW: cycles of draining, cruising, and probing for more bandwidth (draft-ietf-ccwg-bbr, section
//! 5.3.3).

use std::time::{Duration, Instant};

use super::{AckEffect, BETA, Bbr, BbrState, CWND_GAIN, HEADROOM, LostPacket, UNBOUNDED};

/// Gains of ProbeBW's phases: factors of the bandwidth for pacing, and of the bandwidth-delay product for the window.
const DOWN_PACING_GAIN: f64 = 0.9;
const UP_PACING_GAIN: f64 = 1.25;
const UP_CWND_GAIN: f64 = 2.25;
/// Shortest time between two probes for bandwidth. A random time up to [`PROBE_WAIT_MORE`] is added.
const PROBE_WAIT: Duration = Duration::from_secs(2);
const PROBE_WAIT_MORE: Duration = Duration::from_secs(1);
/// Largest number of round trips between two probes for bandwidth, for fairness to competing Reno flows
/// (draft-ietf-ccwg-bbr, section 5.3.3).
const RENO_ROUNDS: u64 = 63;
/// Largest exponent of the growth of bytes in flight during a probe; the growth doubles every round trip.
const MAX_UP_ROUNDS: u32 = 30;

/// A phase of the probing cycle. Acknowledgements move it from Down to Cruise, Refill, Up, and then Down again. Cruise
/// is skipped if the time to probe comes before the queue is gone. A loss above the threshold ends Up early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Less is sent than the path delivers, so that the queue of the last probe drains.
    Down,
    /// The rate is what the path delivers.
    Cruise,
    /// The rate is what the path delivers, without the short-term bounds of past losses. This lasts one round trip.
    Refill,
    /// More is sent than the path has delivered so far, to find out whether it delivers more.
    Up,
}

/// Phase of a probe in which the packets that are acknowledged now were sent. It follows [`Phase`] by one round trip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AckPhase {
    /// The packets were not sent by a probe.
    Init,
    /// The phase Refill has begun, and the packets were still sent before the probe.
    Refilling,
    /// The phase Up has begun, and the packets were still sent before it.
    ProbeStarting,
    /// The packets were sent in the phase Up.
    ProbeFeedback,
    /// The phase Up is over, and the packets were still sent in it.
    ProbeStopping,
}

/// State of the probing cycle.
#[derive(Clone, Debug)]
pub struct Cycle {
    since: Instant,
    wait: Duration,
    pub rounds_since_probe: u64,
    pub ack_phase: AckPhase,
    /// True while losses may have been caused by a probe.
    pub samples: bool,
    up_rounds: u32,
    up_acked: u64,
    /// Number of acknowledged bytes after which a probe allows one more packet in flight.
    up_step: u64,
    random: u64,
}

impl Cycle {
    /// Creates the state before the first probing cycle.
    pub fn new(now: Instant, seed: u64) -> Self {
        Self {
            since: now,
            wait: PROBE_WAIT,
            rounds_since_probe: 0,
            ack_phase: AckPhase::Init,
            samples: false,
            up_rounds: 0,
            up_acked: 0,
            up_step: UNBOUNDED,
            random: seed | 1,
        }
    }

    /// Mixes the number of bytes delivered before a loss into the state of the random number generator.
    pub fn on_lost(&mut self, lost: &LostPacket) {
        // The number of bytes delivered before a loss differs between connections, and is random enough here.
        self.random ^= lost.delivered.rotate_left(17);
    }

    /// Returns the next number of xorshift64*, from 0 up to but not including 1.
    fn random(&mut self) -> f64 {
        self.random |= 1;
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn pick_wait(&mut self) {
        // Random start times keep competing flows from probing for bandwidth at the same time.
        self.rounds_since_probe = u64::from(self.random() < 0.5);
        self.wait = PROBE_WAIT + PROBE_WAIT_MORE.mul_f64(self.random());
    }
}

impl Bbr {
    pub(super) fn enter_probe_bw(&mut self, delivered: &AckEffect) {
        self.cwnd_gain = CWND_GAIN;
        self.start_down(delivered.now, delivered.total);
    }

    /// Continues ProbeBW after ProbeRTT, with the phase Cruise.
    pub(super) fn resume_probe_bw(&mut self, now: Instant) {
        self.cwnd_gain = CWND_GAIN;
        let round = self.next_round_delivered;
        self.start_down(now, round);
        self.start_cruise();
    }

    fn start_down(&mut self, now: Instant, delivered: u64) {
        self.reset_congestion_signals();
        self.cycle.up_step = UNBOUNDED;
        self.cycle.pick_wait();
        self.cycle.since = now;
        self.cycle.ack_phase = AckPhase::ProbeStopping;
        self.start_round(delivered);
        self.start(Phase::Down, DOWN_PACING_GAIN, CWND_GAIN);
    }

    fn start_cruise(&mut self) {
        self.start(Phase::Cruise, 1.0, CWND_GAIN);
    }

    fn start_refill(&mut self, delivered: u64) {
        self.reset_shortterm();
        self.cycle.up_rounds = 0;
        self.cycle.up_acked = 0;
        self.cycle.ack_phase = AckPhase::Refilling;
        self.start_round(delivered);
        self.start(Phase::Refill, 1.0, CWND_GAIN);
    }

    fn start_up(&mut self, delivered: &AckEffect) {
        self.cycle.samples = true;
        self.cycle.ack_phase = AckPhase::ProbeStarting;
        self.start_round(delivered.total);
        self.reset_full_bw();
        self.full_bw = delivered.sample.rate.unwrap_or_default();
        self.cycle.since = delivered.now;
        self.start(Phase::Up, UP_PACING_GAIN, UP_CWND_GAIN);
        self.raise_slope();
    }

    fn start(&mut self, phase: Phase, pacing_gain: f64, cwnd_gain: f64) {
        self.state = BbrState::ProbeBw(phase);
        self.pacing_gain = pacing_gain;
        self.cwnd_gain = cwnd_gain;
    }

    pub(super) fn update_probe_bw(&mut self, delivered: &AckEffect) {
        if !self.full_bw_reached {
            return;
        }
        self.adapt_longterm(delivered);
        let BbrState::ProbeBw(phase) = self.state else { return };
        match phase {
            Phase::Down | Phase::Cruise if self.is_time_to_probe(delivered.now) => {
                self.start_refill(delivered.total);
            }
            Phase::Down if self.is_time_to_cruise(delivered.in_flight) => self.start_cruise(),
            Phase::Refill if self.round_start => self.start_up(delivered),
            Phase::Up if self.is_time_to_go_down(delivered) => {
                self.start_down(delivered.now, delivered.total);
            }
            Phase::Down | Phase::Cruise | Phase::Refill | Phase::Up => {}
        }
    }

    fn is_time_to_probe(&self, now: Instant) -> bool {
        // A Reno flow with a window of n packets probes for bandwidth about every n round trips, so this flow probes
        // after n round trips or `RENO_ROUNDS`, whichever is less.
        let packets = self.target_inflight() / self.mtu.max(1);
        now.saturating_duration_since(self.cycle.since) > self.cycle.wait
            || self.cycle.rounds_since_probe >= packets.min(RENO_ROUNDS)
    }

    fn is_time_to_cruise(&self, in_flight: u64) -> bool {
        in_flight <= self.inflight_with_headroom()
            && in_flight <= self.quantize(self.times_bdp(1.0, self.max_bw.get()))
    }

    fn is_time_to_go_down(&mut self, delivered: &AckEffect) -> bool {
        if delivered.window_limited && self.cwnd >= self.inflight_longterm {
            // While `inflight_longterm` limits the window, the measured bandwidth cannot grow. So later growth is
            // measured from the present delivery rate.
            self.reset_full_bw();
            self.full_bw = delivered.sample.rate.unwrap_or_default();
            return false;
        }
        self.full_bw_now
    }

    fn target_inflight(&self) -> u64 {
        self.times_bdp(1.0, self.bw()).min(self.cwnd)
    }

    pub(super) fn inflight_with_headroom(&self) -> u64 {
        if self.inflight_longterm == UNBOUNDED {
            return UNBOUNDED;
        }
        let headroom = ((HEADROOM * self.inflight_longterm as f64) as u64).max(self.mtu);
        self.inflight_longterm.saturating_sub(headroom).max(self.minimum())
    }

    fn adapt_longterm(&mut self, delivered: &AckEffect) {
        let sample = &delivered.sample;
        if self.round_start {
            match self.cycle.ack_phase {
                AckPhase::ProbeStarting => self.cycle.ack_phase = AckPhase::ProbeFeedback,
                AckPhase::ProbeStopping => {
                    self.cycle.samples = false;
                    self.cycle.ack_phase = AckPhase::Init;
                    // A cycle with too little data to fill the path shows no bandwidth, so it does not expire older
                    // bandwidth samples.
                    if matches!(self.state, BbrState::ProbeBw(_)) && !sample.app_limited {
                        self.cycles += 1;
                    }
                }
                AckPhase::Init | AckPhase::Refilling | AckPhase::ProbeFeedback => {}
            }
        }
        if self.is_too_much(sample.lost, sample.in_flight, sample.app_limited) {
            if self.cycle.samples {
                self.too_much_in_flight(delivered.now, sample.in_flight, sample.app_limited, delivered.total);
            }
        } else if self.inflight_longterm != UNBOUNDED {
            self.inflight_longterm = self.inflight_longterm.max(sample.in_flight);
            if self.state == BbrState::ProbeBw(Phase::Up) {
                self.probe_upward(delivered);
            }
        }
    }

    pub(super) fn too_much_in_flight(
        &mut self,
        now: Instant,
        inflight: u64,
        app_limited: bool,
        delivered: u64,
    ) {
        self.cycle.samples = false;
        if !app_limited {
            // One probe with losses lowers `inflight_longterm` to no less than `BETA` times the target for bytes in
            // flight.
            let least = (BETA * self.target_inflight() as f64) as u64;
            self.inflight_longterm = inflight.max(least);
        }
        if self.state == BbrState::ProbeBw(Phase::Up) {
            self.start_down(now, delivered);
        }
    }

    fn raise_slope(&mut self) {
        // Bytes in flight grow by 1 packet in the probe's first round trip, then by 2, 4 and so on.
        let growth = self.mtu << self.cycle.up_rounds;
        self.cycle.up_rounds = (self.cycle.up_rounds + 1).min(MAX_UP_ROUNDS);
        self.cycle.up_step = (self.cwnd * self.mtu / growth.max(1)).max(self.mtu);
    }

    fn probe_upward(&mut self, delivered: &AckEffect) {
        if !delivered.window_limited || self.cwnd < self.inflight_longterm {
            return;
        }
        self.cycle.up_acked += delivered.acked;
        let packets = self.cycle.up_acked / self.cycle.up_step.max(1);
        self.cycle.up_acked -= packets * self.cycle.up_step;
        self.inflight_longterm = self.inflight_longterm.saturating_add(packets * self.mtu);
        if self.round_start {
            self.raise_slope();
        }
    }
}
