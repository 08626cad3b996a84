//! When which path is probed, as the settings say.

use std::{collections::BTreeMap, time::Duration};

use millrace_graft::settings;

use super::Target;

/// At once, of those that the settings name: requests find room beside them.
pub const AT_ONCE: usize = 4;

/// Times are of any clock that does not go back.
#[derive(Debug, Default)]
pub struct Schedule {
    next: BTreeMap<Target, Duration>,
}

impl From<&settings::Probe> for Target {
    fn from(probe: &settings::Probe) -> Self {
        Self { peer: probe.peer, udp_port: probe.udp_port }
    }
}

impl Schedule {
    /// What is to begin now, if so many more may. One that is new begins at once; one that waited for room, or was forgotten for
    /// long, is not made up for.
    pub fn due<'a>(
        &mut self,
        wanted: &'a [settings::Probe],
        now: Duration,
        room: usize,
    ) -> Vec<&'a settings::Probe> {
        self.next.retain(|target, _| wanted.iter().any(|probe| Target::from(probe) == *target));
        let mut due: Vec<_> = wanted
            .iter()
            .map(|probe| (self.next.get(&probe.into()).copied().unwrap_or_default(), probe))
            .filter(|(next, _)| *next <= now)
            .collect();
        // Who has waited longest goes first.
        due.sort_by_key(|(next, _)| *next);
        due.truncate(room);
        for (_, probe) in &due {
            self.next.insert((*probe).into(), now + probe.every);
        }
        due.into_iter().map(|(_, probe)| probe).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn probe(last: u8, every: u32) -> settings::Probe {
        settings::Probe {
            peer: [192, 0, 2, last].into(),
            udp_port: None,
            period: SECOND,
            duration: SECOND,
            every: every * SECOND,
        }
    }

    fn begun(schedule: &mut Schedule, wanted: &[settings::Probe], at: u32, room: usize) -> Vec<String> {
        let due = schedule.due(wanted, at * SECOND, room);
        due.iter().map(|probe| probe.peer.to_string()).collect()
    }

    #[test]
    fn each_has_its_turn() {
        let wanted = [probe(1, 10), probe(2, 25)];
        let mut schedule = Schedule::default();
        let at = |schedule: &mut Schedule, at| begun(schedule, &wanted, at, 9);
        assert_eq!(at(&mut schedule, 100), ["192.0.2.1", "192.0.2.2"]);
        assert_eq!(at(&mut schedule, 101), [""; 0]);
        assert_eq!(at(&mut schedule, 110), ["192.0.2.1"]);
        assert_eq!(at(&mut schedule, 120), ["192.0.2.1"]);
        assert_eq!(at(&mut schedule, 125), ["192.0.2.2"]);
        // The host slept: once, not once for each time that was missed.
        assert_eq!(at(&mut schedule, 1000).len(), 2);
        assert_eq!(at(&mut schedule, 1001), [""; 0]);
    }

    #[test]
    fn who_waits_for_room_goes_first() {
        let wanted = [probe(1, 10), probe(2, 10), probe(3, 10)];
        let mut schedule = Schedule::default();
        assert_eq!(begun(&mut schedule, &wanted, 1, 0), [""; 0]);
        assert_eq!(begun(&mut schedule, &wanted, 2, 2), ["192.0.2.1", "192.0.2.2"]);
        assert_eq!(begun(&mut schedule, &wanted, 13, 1), ["192.0.2.3"]);
        assert_eq!(begun(&mut schedule, &wanted, 14, 1), ["192.0.2.1"]);
    }

    #[test]
    fn what_is_not_wanted_any_more_is_forgotten() {
        let mut schedule = Schedule::default();
        begun(&mut schedule, &[probe(1, 10), probe(2, 10)], 1, 9);
        assert_eq!(begun(&mut schedule, &[probe(2, 10)], 2, 9), [""; 0]);
        assert_eq!(schedule.next.len(), 1);
        assert_eq!(begun(&mut schedule, &[probe(1, 10)], 3, 9), ["192.0.2.1"]);
    }
}
