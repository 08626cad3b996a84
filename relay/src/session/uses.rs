//! Counts a session's subscriptions and published tracks. The counts decide which sessions the kernel forwards for,
//! since it has room for a limited number.

use std::sync::Arc;

use millrace_transport::{Connection, offload::Worth};
use parking_lot::Mutex;

/// Whether the session has proved an access right, and the number of its open requests.
pub struct Uses {
    connection: Arc<Connection>,
    held: Mutex<HeldUses>,
}

#[derive(Default)]
struct HeldUses {
    is_upstream: bool,
    /// True once the session has proved an access right, for example by a token.
    is_proven: bool,
    // Numbers of the session's open subscriptions and of its published tracks, by [`UseKind`].
    counts: [usize; 2],
}

/// Uses of the relay that a session may have. Each of these uses counts when the relay decides for which sessions the
/// kernel forwards media.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UseKind {
    /// The session has a subscription. A namespace that the session has announced counts as a subscription, until a
    /// track of the namespace is requested.
    Subscription,
    /// The session's peer publishes a track.
    Publication,
}

/// A use of the relay by a session, such as a subscription. Dropping it ends the use.
pub struct Use {
    uses: Arc<Uses>,
    kind: UseKind,
}

impl Uses {
    pub fn new(connection: Arc<Connection>, is_upstream: bool) -> Arc<Self> {
        Arc::new(Self { connection, held: Mutex::new(HeldUses { is_upstream, ..HeldUses::default() }) })
    }

    /// Records that the session has proved an access right.
    pub fn prove(&self) {
        self.change(|held| held.is_proven = true);
    }

    pub fn begin(self: &Arc<Self>, kind: UseKind) -> Use {
        self.change(|held| held.counts[kind as usize] += 1);
        Use { uses: Arc::clone(self), kind }
    }

    fn change(&self, change: impl FnOnce(&mut HeldUses)) {
        let mut held = self.held.lock();
        let before = held.worth();
        change(&mut held);
        let worth = held.worth();
        if worth != before {
            // The connection is told under the lock how much forwarding in the kernel is worth to the session, so that
            // it never ends up with an outdated value.
            self.connection.set_worth(worth);
        }
    }
}

impl HeldUses {
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
    fn kernel_record_priority_follows_publish_or_subscribe_role_of_session() {
        let mut held = HeldUses { counts: [1, 1], ..HeldUses::default() };
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
