use std::time::{Duration, Instant};

use super::{
    Acked, Controller, initial_window, minimum_window,
    slow_start::{SlowStart, SlowStartStep},
};

/// Constant C of the cubic curve, segments per second cubed (RFC 9438, section 5).
const C: f64 = 0.4;
/// Factor by which congestion reduces the window (RFC 9438, section 4.6).
const BETA: f64 = 0.7;
/// Growth in packets per round trip that gives the same average window as Reno, which halves its window (RFC 9438,
/// section 4.3).
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);

/// CUBIC (RFC 9438) with HyStart++ (RFC 9406) for slow start.
#[derive(Debug)]
pub struct Cubic {
    mtu: u64,
    state: CubicState,
    /// The state before the last reduction of the window. It is restored if the losses that caused the reduction were
    /// spurious (RFC 9438, section 4.9).
    before: Option<CubicState>,
}

/// The algorithm's variables. Windows are in bytes, with fractions, because the growth per ACK may be less than a byte.
#[derive(Clone, Debug)]
struct CubicState {
    window: f64,
    threshold: f64,
    slow_start: SlowStart,
    /// W_max: the window before the last reduction, or less if the flow yields bandwidth to newer flows (RFC 9438,
    /// section 4.7).
    max: f64,
    /// cwnd_prior: the window before the last reduction.
    prior: f64,
    epoch: Option<CubicEpoch>,
}

/// A period of congestion avoidance.
#[derive(Clone, Debug)]
struct CubicEpoch {
    /// Start of the congestion avoidance period, postponed by the time in which the sender had too little data (RFC
    /// 9438, section 5.8).
    start: Instant,
    last_ack: Instant,
    /// K: seconds from the start of congestion avoidance until the cubic curve reaches W_max again.
    k: f64,
    /// The plateau of the cubic curve: W_max, or the window at the start of congestion avoidance if that is larger.
    plateau: f64,
    /// W_est: the window that Reno would have now, bytes.
    reno: f64,
}

impl Cubic {
    /// Creates a controller. `mtu` is the size of the largest packet, bytes.
    pub fn new(mtu: u64, now: Instant) -> Self {
        let state = CubicState {
            window: initial_window(mtu) as f64,
            threshold: f64::INFINITY,
            slow_start: SlowStart::new(now),
            max: 0.0,
            prior: 0.0,
            epoch: None,
        };
        Self { mtu, state, before: None }
    }
}

impl Controller for Cubic {
    fn on_ack(&mut self, now: Instant, acked: &Acked) {
        self.state.on_ack(now, acked, self.mtu as f64);
    }

    fn on_congestion(&mut self, _now: Instant) {
        self.before = Some(self.state.clone());
        self.state.reduce(minimum_window(self.mtu) as f64);
    }

    fn on_spurious_congestion(&mut self) {
        if let Some(before) = self.before.take() {
            let window = self.state.window.max(before.window);
            self.state = CubicState { window, ..before };
        }
    }

    /// Sets the window to its minimum. The slow start threshold was already set by the loss that established persistent
    /// congestion.
    fn on_persistent_congestion(&mut self, now: Instant) {
        self.before = None;
        self.state.window = minimum_window(self.mtu) as f64;
        self.state.slow_start = SlowStart::new(now);
        self.state.epoch = None;
    }

    fn set_mtu(&mut self, mtu: u64) {
        self.mtu = mtu;
        self.state.window = self.state.window.max(minimum_window(mtu) as f64);
    }

    fn window(&self) -> u64 {
        self.state.window as u64
    }
}

impl CubicState {
    fn on_ack(&mut self, now: Instant, acked: &Acked, mtu: f64) {
        if acked.app_limited {
            if let Some(epoch) = &mut self.epoch {
                // The cubic window curve must not rise with time while the sender has too little data (RFC 9438,
                // section 5.8).
                epoch.pause(now);
            }
        } else if self.window < self.threshold {
            match self.slow_start.on_ack(now, acked) {
                SlowStartStep::Grow(bytes) => self.window += bytes as f64,
                SlowStartStep::Exit => self.threshold = self.window,
            }
        } else {
            self.avoid_congestion(now, acked, mtu);
        }
    }

    /// Grows the window in congestion avoidance (RFC 9438, sections 4.2 to 4.5).
    fn avoid_congestion(&mut self, now: Instant, acked: &Acked, mtu: f64) {
        let window = self.window;
        let max = self.max;
        let prior = self.prior;
        let epoch = self.epoch.get_or_insert_with(|| CubicEpoch::new(now, window, max, mtu));
        epoch.last_ack = now;
        let elapsed = now.saturating_duration_since(epoch.start);
        let acked_windows = acked.bytes as f64 / window;

        // If the window exceeds the window before the last reduction, Reno's growth of one packet per round trip is
        // fair (RFC 9438, section 4.3).
        let alpha = if epoch.reno >= prior { 1.0 } else { ALPHA };
        epoch.reno += alpha * acked_windows * mtu;
        if epoch.curve(elapsed, mtu) < epoch.reno {
            self.window = window.max(epoch.reno);
            return;
        }
        // The target window is the cubic curve's value one round trip from now, but at most 1.5 times the present
        // window (RFC 9438, section 4.2).
        let target = epoch.curve(elapsed + acked.smoothed_rtt, mtu).clamp(window, 1.5 * window);
        self.window += (target - window) * acked_windows;
    }

    /// Reduces the congestion window after a loss (RFC 9438, sections 4.6 and 4.7).
    fn reduce(&mut self, minimum: f64) {
        // Fast convergence (RFC 9438, section 4.7): if the window did not reach its last maximum, a newer flow
        // competes, so the new maximum is set lower.
        let gives_way = self.window < self.max;
        self.max = if gives_way { self.window * (1.0 + BETA) / 2.0 } else { self.window };
        self.prior = self.window;
        self.window = (self.window * BETA).max(minimum);
        self.threshold = self.window;
        self.epoch = None;
    }
}

impl CubicEpoch {
    fn new(now: Instant, window: f64, max: f64, mtu: f64) -> Self {
        let plateau = max.max(window);
        let k = ((plateau - window) / mtu / C).cbrt();
        Self { start: now, last_ack: now, k, plateau, reno: window }
    }

    /// Returns W_cubic (equation 1), bytes.
    fn curve(&self, elapsed: Duration, mtu: f64) -> f64 {
        C * (elapsed.as_secs_f64() - self.k).powi(3) * mtu + self.plateau
    }

    fn pause(&mut self, now: Instant) {
        self.start += now.saturating_duration_since(self.last_ack);
        self.last_ack = now;
    }
}
