//! Schedules the probes of the paths that the settings name.

use std::{collections::BTreeMap, time::Duration};

use millrace_graft::settings;

use super::ProbeTarget;

/// Limit of scheduled probes that run at the same time. It is lower than the limit of all probes, so that users can
/// always request some.
pub const AT_ONCE: usize = 4;

/// Times of the next scheduled probes, on any clock that does not go back.
#[derive(Debug, Default)]
pub struct Schedule {
    next: BTreeMap<ProbeTarget, Duration>,
}

impl From<&settings::ProbeSettings> for ProbeTarget {
    fn from(probe: &settings::ProbeSettings) -> Self {
        Self { peer: probe.peer, udp_port: probe.udp_port }
    }
}

impl Schedule {
    /// Returns the probes that should begin now, at most `room` of them. A new path is probed at once. Missed periods
    /// are skipped.
    pub fn due_probe<'a>(
        &mut self,
        wanted: &'a [settings::ProbeSettings],
        now: Duration,
        room: usize,
    ) -> Vec<&'a settings::ProbeSettings> {
        self.next.retain(|target, _| wanted.iter().any(|probe| ProbeTarget::from(probe) == *target));
        let mut due: Vec<_> = wanted
            .iter()
            .map(|probe| (self.next.get(&probe.into()).copied().unwrap_or_default(), probe))
            .filter(|(next, _)| *next <= now)
            .collect();
        // The probe that is overdue longest begins first.
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

    fn probe(last: u8, every: u32) -> settings::ProbeSettings {
        settings::ProbeSettings {
            peer: [192, 0, 2, last].into(),
            udp_port: None,
            period: SECOND,
            duration: SECOND,
            every: every * SECOND,
        }
    }

    fn begun(
        schedule: &mut Schedule,
        wanted: &[settings::ProbeSettings],
        at: u32,
        room: usize,
    ) -> Vec<String> {
        let due = schedule.due_probe(wanted, at * SECOND, room);
        due.iter().map(|probe| probe.peer.to_string()).collect()
    }

    #[test]
    fn every_path_is_probed_at_its_own_interval() {
        let wanted = [probe(1, 10), probe(2, 25)];
        let mut schedule = Schedule::default();
        let at = |schedule: &mut Schedule, at| begun(schedule, &wanted, at, 9);
        assert_eq!(at(&mut schedule, 100), ["192.0.2.1", "192.0.2.2"]);
        assert_eq!(at(&mut schedule, 101), [""; 0]);
        assert_eq!(at(&mut schedule, 110), ["192.0.2.1"]);
        assert_eq!(at(&mut schedule, 120), ["192.0.2.1"]);
        assert_eq!(at(&mut schedule, 125), ["192.0.2.2"]);
        // When several periods were missed, as after a suspension of the host, each probe begins only once.
        assert_eq!(at(&mut schedule, 1000).len(), 2);
        assert_eq!(at(&mut schedule, 1001), [""; 0]);
    }

    #[test]
    fn overdue_path_probe_runs_first_when_the_limit_permits() {
        let wanted = [probe(1, 10), probe(2, 10), probe(3, 10)];
        let mut schedule = Schedule::default();
        assert_eq!(begun(&mut schedule, &wanted, 1, 0), [""; 0]);
        assert_eq!(begun(&mut schedule, &wanted, 2, 2), ["192.0.2.1", "192.0.2.2"]);
        assert_eq!(begun(&mut schedule, &wanted, 13, 1), ["192.0.2.3"]);
        assert_eq!(begun(&mut schedule, &wanted, 14, 1), ["192.0.2.1"]);
    }

    #[test]
    fn removed_path_probe_is_removed_from_the_schedule() {
        let mut schedule = Schedule::default();
        begun(&mut schedule, &[probe(1, 10), probe(2, 10)], 1, 9);
        assert_eq!(begun(&mut schedule, &[probe(2, 10)], 2, 9), [""; 0]);
        assert_eq!(schedule.next.len(), 1);
        assert_eq!(begun(&mut schedule, &[probe(1, 10)], 3, 9), ["192.0.2.1"]);
    }
}
