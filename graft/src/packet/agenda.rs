//! The times at which time-outs of sessions have to be handled. Finding the sessions that are due costs time for each
//! of these only, however many sessions exist.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use millrace_graft_kernel::packet::SessionEnds;

#[derive(Debug, Default)]
pub struct SessionAgenda {
    by_time: BTreeSet<(Duration, SessionEnds)>,
    of: HashMap<SessionEnds, Duration>,
}

impl SessionAgenda {
    /// Sets the time of a session's next time-out. This replaces an earlier time; `None` removes the session.
    pub fn put(&mut self, ends: SessionEnds, at: Option<Duration>) {
        let before = match at {
            Some(at) => self.of.insert(ends, at),
            None => self.of.remove(&ends),
        };
        // A session has at most one entry in each of the two maps.
        if let Some(before) = before {
            self.by_time.remove(&(before, ends));
        }
        if let Some(at) = at {
            self.by_time.insert((at, ends));
        }
    }

    pub fn next(&self) -> Option<Duration> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Returns the sessions with a time-out that has expired, and removes them.
    pub fn take(&mut self, now: Duration) -> Vec<SessionEnds> {
        let mut due = Vec::new();
        while self.next().is_some_and(|at| at <= now)
            && let Some((_, ends)) = self.by_time.pop_first()
        {
            self.of.remove(&ends);
            due.push(ends);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_whose_timer_is_due_are_returned_once() {
        const MS: Duration = Duration::from_millis(1);
        let ends = |port: u16| {
            let address = std::net::SocketAddr::from(([10, 0, 0, 1], port));
            SessionEnds { local: address, remote: address }
        };
        let mut agenda = SessionAgenda::default();
        assert_eq!(agenda.next(), None);
        for (port, at) in [(1, 30), (2, 10), (3, 20), (4, 40), (1, 5)] {
            agenda.put(ends(port), Some(at * MS));
        }
        agenda.put(ends(3), None);
        agenda.put(ends(9), None);
        assert_eq!(agenda.next(), Some(5 * MS));
        assert_eq!(agenda.take(4 * MS), []);
        assert_eq!(agenda.take(10 * MS), [ends(1), ends(2)]);
        assert_eq!(agenda.take(30 * MS), []);
        agenda.put(ends(2), Some(40 * MS));
        assert_eq!(agenda.take(1000 * MS), [ends(2), ends(4)]);
        assert_eq!(agenda.next(), None);
    }
}
