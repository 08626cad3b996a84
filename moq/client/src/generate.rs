//! Generates MoQ objects at a steady rate, for measurements of delay and loss between publisher and subscriber.

use std::sync::Arc;
use std::time::Duration;

use millrace_moq::{Location, SubgroupId};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, ClockNanosleepFlags, clock_nanosleep};
use serde::Serialize;

use crate::broadcast::{BroadcastTrack, DatagramObject, SubgroupWriter};
use crate::payload::{self, MIN_LEN, Stamp};

/// The longest payload that [`Settings::sizes`] may have, in bytes.
const MAX_LEN: usize = 1 << 26;

/// The way in which objects are sent: on streams or as datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ObjectShape {
    /// One stream per subgroup.
    #[default]
    Groups,
    /// One stream per object.
    Objects,
    /// One datagram per object.
    Datagrams,
}

/// The objects to generate.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Payload length of each object in bytes, at least [`MIN_LEN`].
    pub object_bytes: usize,
    /// Payload lengths that successive objects cycle through, in place of `object_bytes`.
    pub sizes: Vec<usize>,
    /// Objects per second: 0.1 to 100,000.
    pub rate_hz: f64,
    /// Number of objects in a group.
    pub objects_per_group: u64,
    /// Number of seconds for which objects are generated. With `None` the generator does not stop by itself.
    pub duration: Option<f64>,
    /// Publisher priorities of the subgroups of each group, one for each subgroup. Successive objects of the group go
    /// to its subgroups in turn.
    pub priority_pattern: Vec<u8>,
    /// The way in which objects are sent: on streams or as datagrams.
    pub shape: ObjectShape,
}

/// The error for a setting that is out of range.
#[derive(Debug, thiserror::Error)]
#[error("{name} {rule}")]
pub struct Unusable {
    /// Name of the field of [`Settings`] that is out of range.
    pub name: &'static str,
    /// The rule that the field's value violates.
    pub rule: String,
}

/// A generator of objects, with checked settings.
#[derive(Clone, Debug)]
pub struct Generator {
    /// Payload lengths in bytes that successive objects cycle through.
    sizes: Vec<usize>,
    interval: Duration,
    objects_per_group: u64,
    /// Number of objects to generate; 0 means that there is no limit.
    total: u64,
    priorities: Vec<u8>,
    shape: ObjectShape,
    is_replica: bool,
}

/// Statistics of the generated objects.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Generated {
    /// Number of generated objects.
    pub objects: u64,
    /// Mean number of objects per second, from the first object to the last.
    pub objects_per_second: f64,
}

impl Generator {
    /// Makes a generator.
    ///
    /// # Errors
    /// Fails if a setting is out of its range.
    pub fn new(settings: Settings) -> Result<Self, Unusable> {
        let Settings { object_bytes, sizes, rate_hz, objects_per_group, duration, priority_pattern, shape } =
            settings;
        ensure((0.1..=100_000.0).contains(&rate_hz), "rate_hz", || "must be 0.1 to 100000".into())?;
        ensure(object_bytes >= MIN_LEN, "object_bytes", || format!("must be {MIN_LEN} or more"))?;
        let all = |least: usize, most: usize| sizes.iter().all(|size| (least..=most).contains(size));
        ensure(all(MIN_LEN, MAX_LEN), "object_sizes", || format!("must be {MIN_LEN} to {MAX_LEN}"))?;
        ensure(objects_per_group > 0, "objects_per_group", || "must be 1 or more".into())?;
        ensure(!priority_pattern.is_empty(), "priority_pattern", || "must name a priority".into())?;
        let seconds = duration.unwrap_or(0.0);
        ensure((0.0..1e9).contains(&seconds), "duration", || "must be 0 or more".into())?;
        let total = (seconds * rate_hz).round() as u64;
        ensure(duration.is_none() || total > 0, "duration", || "is too short for one object".into())?;
        Ok(Self {
            sizes: if sizes.is_empty() { vec![object_bytes] } else { sizes },
            interval: Duration::from_secs_f64(1.0 / rate_hz),
            objects_per_group,
            total,
            priorities: priority_pattern,
            shape,
            is_replica: false,
        })
    }

    /// Makes the generator number groups and objects by this host's monotonic clock, and state the time when an object
    /// is due as its time of sending. All such generators of a host with the same settings make the same objects.
    pub fn numbered_by_time(self) -> Self {
        Self { is_replica: true, ..self }
    }

    /// Generates objects on the calling thread until the configured duration is over, or until `track` has ended. Then
    /// it ends the track.
    pub fn run(&self, track: &Arc<BroadcastTrack>) -> Generated {
        let mut open: Vec<Option<SubgroupWriter>> = self.priorities.iter().map(|_| None).collect();
        let start = payload::now();
        let (origin, first) = match self.is_replica {
            // The first whole group from now on.
            true => {
                let group = self.at(self.objects_per_group).as_nanos().max(1);
                (Duration::ZERO, (start.as_nanos() / group + 1) as u64 * self.objects_per_group)
            }
            false => (start, 0),
        };
        let mut objects = 0;
        while (self.total == 0 || objects < self.total) && !track.is_ended() {
            let due = origin + self.at(first + objects);
            sleep_until(due);
            self.emit(track, &mut open, first + objects, self.is_replica.then_some(due));
            objects += 1;
        }
        let seconds = payload::now().saturating_sub(start).as_secs_f64();
        drop(open);
        track.end();
        Generated { objects, objects_per_second: objects.saturating_sub(1) as f64 / seconds.max(1e-9) }
    }

    /// Returns the time after the start at which an object is due. That time is the object's index times the interval.
    /// Adding up intervals would accumulate rounding errors.
    fn at(&self, sequence: u64) -> Duration {
        Duration::from_nanos((self.interval.as_nanos() * u128::from(sequence)) as u64)
    }

    /// Sends an object. Its time of sending is `sent`, or else the present time.
    fn emit(
        &self,
        track: &Arc<BroadcastTrack>,
        open: &mut [Option<SubgroupWriter>],
        sequence: u64,
        sent: Option<Duration>,
    ) {
        let group = sequence / self.objects_per_group;
        let object = sequence % self.objects_per_group;
        let turn = (object % self.priorities.len() as u64) as usize;
        let priority = self.priorities[turn];
        let build = || {
            let stamp = Stamp { sequence, sent: sent.unwrap_or_else(payload::now), total: self.total };
            let turn = (sequence % self.sizes.len() as u64) as usize;
            payload::build(stamp, self.sizes[turn])
        };
        match self.shape {
            ObjectShape::Datagrams => {
                let location = Location::new(group, object);
                track.send_datagram(DatagramObject { location, priority, payload: build() });
            }
            ObjectShape::Objects => {
                track.open(group, SubgroupId::FirstObject, priority).write(object, build());
            }
            ObjectShape::Groups => {
                if object == 0 {
                    // Dropping the `SubgroupWriter`s ends the subgroups of the previous group.
                    open.fill_with(|| None);
                }
                let subgroup = open[turn]
                    .get_or_insert_with(|| track.open(group, SubgroupId::Explicit(turn as u64), priority));
                subgroup.write(object, build());
            }
        }
    }
}

fn ensure(holds: bool, name: &'static str, rule: impl FnOnce() -> String) -> Result<(), Unusable> {
    if holds { Ok(()) } else { Err(Unusable { name, rule: rule() }) }
}

/// Sleeps until a time on the clock of [`payload::now`]. A timer wakes about 50 us late, so the thread sleeps until
/// shortly before and then busy-waits.
fn sleep_until(deadline: Duration) {
    const SPIN: Duration = Duration::from_micros(80);
    let wake = deadline.saturating_sub(SPIN);
    while payload::now() < wake {
        // A signal may interrupt the sleep, so the loop reads the clock again after it.
        let _ = clock_nanosleep(
            ClockId::CLOCK_MONOTONIC,
            ClockNanosleepFlags::TIMER_ABSTIME,
            &TimeSpec::from(wake),
        );
    }
    while payload::now() < deadline {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use millrace_moq::{GroupOrder, Namespace, Properties};

    use super::*;
    use crate::broadcast::{Broadcast, History};

    fn settings() -> Settings {
        Settings {
            object_bytes: 40,
            sizes: Vec::new(),
            rate_hz: 20_000.0,
            objects_per_group: 5,
            duration: Some(0.0006),
            priority_pattern: vec![0, 9],
            shape: ObjectShape::Groups,
        }
    }

    /// Returns the location, subgroup and priority of each generated object.
    fn generated(settings: Settings) -> Vec<(u64, u64, Option<u64>, u8)> {
        let broadcast = Broadcast::new(Namespace::from_path("a").unwrap(), History::default());
        let track = broadcast.create("objects", Properties::default()).unwrap();
        let rate_hz = settings.rate_hz;
        let made = Generator::new(settings).unwrap().run(&track);
        assert_eq!(made.objects, 12);
        assert!(made.objects_per_second > 0.0 && made.objects_per_second <= rate_hz, "{made:?}");
        assert!(track.is_ended());
        let all = track.range(Location::default(), Location::new(u64::MAX, 0), GroupOrder::Ascending);
        for (sequence, object) in (0..).zip(&all) {
            let stamp = payload::check(&object.payload).unwrap();
            assert_eq!((stamp.sequence, stamp.total), (sequence, 12));
        }
        let place = |object: &crate::broadcast::StoredObject| {
            (object.location.group, object.location.object, object.subgroup, object.priority)
        };
        all.iter().map(place).collect()
    }

    #[test]
    fn generated_groups_have_subgroups_by_the_priority_pattern() {
        let all = generated(settings());
        assert_eq!(all.len(), 12);
        assert_eq!(all[..3], [(0, 0, Some(0), 0), (0, 1, Some(1), 9), (0, 2, Some(0), 0)]);
        assert_eq!(all[5], (1, 0, Some(0), 0));
        assert_eq!(all[11], (2, 1, Some(1), 9));
    }

    #[test]
    fn object_shape_setting_selects_subgroup_streams_or_datagrams() {
        let objects = generated(Settings { shape: ObjectShape::Objects, ..settings() });
        assert_eq!(objects[6], (1, 1, Some(1), 9));
        let datagrams = generated(Settings { shape: ObjectShape::Datagrams, ..settings() });
        assert_eq!(datagrams[6], (1, 1, None, 9));
    }

    #[test]
    fn generator_refuses_settings_out_of_range() {
        for bad in [
            Settings { rate_hz: 0.0, ..settings() },
            Settings { object_bytes: 31, ..settings() },
            Settings { objects_per_group: 0, ..settings() },
            Settings { duration: Some(0.00001), ..settings() },
            Settings { priority_pattern: Vec::new(), ..settings() },
        ] {
            assert!(Generator::new(bad.clone()).is_err(), "{bad:?}");
        }
    }
}
