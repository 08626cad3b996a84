use std::time::Instant;

use super::{Acked, Controller, initial_window, minimum_window};

/// NewReno (RFC 9002, section 7.3), the simplest of the algorithms.
#[derive(Debug)]
pub struct NewReno {
    mtu: u64,
    state: NewRenoState,
    /// The state before the last reduction of the window. It is restored if the losses that caused the reduction were
    /// spurious.
    before: Option<NewRenoState>,
}

#[derive(Clone, Copy, Debug)]
struct NewRenoState {
    window: u64,
    threshold: u64,
    /// Bytes acknowledged in congestion avoidance since the window last grew.
    acked: u64,
}

impl NewReno {
    /// Creates a controller. `mtu` is the size of the largest packet, bytes.
    pub fn new(mtu: u64) -> Self {
        let state = NewRenoState { window: initial_window(mtu), threshold: u64::MAX, acked: 0 };
        Self { mtu, state, before: None }
    }
}

impl Controller for NewReno {
    fn on_ack(&mut self, _now: Instant, acked: &Acked) {
        if acked.app_limited {
            return;
        }
        let state = &mut self.state;
        if state.window < state.threshold {
            state.window = state.window.saturating_add(acked.bytes);
            return;
        }
        state.acked += acked.bytes;
        if state.acked >= state.window {
            state.acked -= state.window;
            state.window += self.mtu;
        }
    }

    fn on_congestion(&mut self, _now: Instant) {
        self.before = Some(self.state);
        let window = (self.state.window / 2).max(minimum_window(self.mtu));
        self.state = NewRenoState { window, threshold: window, acked: 0 };
    }

    fn on_spurious_congestion(&mut self) {
        if let Some(before) = self.before.take() {
            let window = self.state.window.max(before.window);
            self.state = NewRenoState { window, ..before };
        }
    }

    fn on_persistent_congestion(&mut self, _now: Instant) {
        self.before = None;
        self.state.window = minimum_window(self.mtu);
        self.state.acked = 0;
    }

    fn set_mtu(&mut self, mtu: u64) {
        self.mtu = mtu;
        self.state.window = self.state.window.max(minimum_window(mtu));
    }

    fn window(&self) -> u64 {
        self.state.window
    }
}
