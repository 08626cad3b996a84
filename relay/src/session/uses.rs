//! Uses that a session makes of the relay. They say how much one of the kernel's records is worth to it.

use std::sync::Arc;

use millrace_transport::{Connection, offload::Worth};
use parking_lot::Mutex;

/// Rights that a session has shown, and its requests that are under way.
pub struct Uses {
    connection: Arc<Connection>,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    is_upstream: bool,
    /// The session has shown a right.
    is_proven: bool,
    counts: [usize; 2],
}

/// Something that a session does with media.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The session has subscribed, or has announced a namespace of which nobody wants a track yet.
    Subscription,
    /// The session publishes a track.
    Publication,
}

/// A use, until it is dropped.
pub struct Use {
    uses: Arc<Uses>,
    kind: Kind,
}

impl Uses {
    pub fn new(connection: Arc<Connection>, is_upstream: bool) -> Arc<Self> {
        Arc::new(Self { connection, held: Mutex::new(Held { is_upstream, ..Held::default() }) })
    }

    /// The session has shown a right.
    pub fn prove(&self) {
        self.change(|held| held.is_proven = true);
    }

    pub fn begin(self: &Arc<Self>, kind: Kind) -> Use {
        self.change(|held| held.counts[kind as usize] += 1);
        Use { uses: Arc::clone(self), kind }
    }

    fn change(&self, change: impl FnOnce(&mut Held)) {
        let mut held = self.held.lock();
        let before = held.worth();
        change(&mut held);
        let worth = held.worth();
        if worth != before {
            // With the lock, so that the last is the one that stays.
            self.connection.set_worth(worth);
        }
    }
}

impl Held {
    fn worth(&self) -> Worth {
        let [subscriptions, publications] = self.counts;
        match self.is_proven {
            false => Worth::Nothing,
            true if self.is_upstream => Worth::Upstream,
            true if publications > 0 => Worth::Publisher,
            true if subscriptions > 0 => Worth::Subscriber,
            true => Worth::Idle,
        }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.uses.change(|held| held.counts[self.kind as usize] -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_is_worth_what_the_session_does_with_it() {
        let mut held = Held { counts: [1, 1], ..Held::default() };
        assert_eq!(held.worth(), Worth::Nothing, "it has shown no right");
        held.is_proven = true;
        for (counts, worth) in [
            ([1, 1], Worth::Publisher),
            ([0, 1], Worth::Publisher),
            ([2, 0], Worth::Subscriber),
            ([0, 0], Worth::Idle),
        ] {
            held.counts = counts;
            assert_eq!(held.worth(), worth);
        }
        held.is_upstream = true;
        assert_eq!(held.worth(), Worth::Upstream);
    }
}
