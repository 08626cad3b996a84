//! Which sessions are to be looked at, and when: so that a step costs what there is to do, however many sessions there are.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use millrace_graft_kernel::joint::Ends;

#[derive(Debug, Default)]
pub struct Agenda {
    by_time: BTreeSet<(Duration, Ends)>,
    of: HashMap<Ends, Duration>,
}

impl Agenda {
    /// In place of what was said of it before; `None`: not at all.
    pub fn put(&mut self, ends: Ends, at: Option<Duration>) {
        let before = match at {
            Some(at) => self.of.insert(ends, at),
            None => self.of.remove(&ends),
        };
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

    /// Those whose time has come, which are no longer on it.
    pub fn take(&mut self, now: Duration) -> Vec<Ends> {
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
    fn each_is_taken_once_in_its_time() {
        const MS: Duration = Duration::from_millis(1);
        let ends = |port: u16| {
            let address = std::net::SocketAddr::from(([10, 0, 0, 1], port));
            Ends { local: address, remote: address }
        };
        let mut agenda = Agenda::default();
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
