//! Objects made at a steady rate, for measuring.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use millrace_proto::moq::{Location, SubgroupId};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, ClockNanosleepFlags, clock_nanosleep};
use serde::Serialize;

use crate::broadcast::{DatagramObject, SubgroupWriter, Track};
use crate::payload::{self, MIN_LEN, Stamp};

/// How objects share streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum StreamsPer {
    /// One stream per subgroup of a group
    #[default]
    Group,
    /// One stream per object
    Object,
}

/// What to generate.
#[derive(Clone, Debug, clap::Args)]
pub struct GenerateArgs {
    /// Publish generated objects instead of media
    #[arg(long)]
    pub generate: bool,
    /// Payload of an object, in bytes (32 or more)
    #[arg(long, default_value_t = 1200, value_name = "N", requires = "generate")]
    pub object_bytes: usize,
    /// Objects per second (0.1 to 100,000)
    #[arg(long, default_value_t = 500.0, value_name = "R", requires = "generate")]
    pub rate_hz: f64,
    /// Objects in a group
    #[arg(long, default_value_t = 50, value_name = "G", requires = "generate")]
    pub objects_per_group: u64,
    /// Seconds to go on; forever without it
    #[arg(long, value_name = "S", requires = "generate")]
    pub duration: Option<f64>,
    /// Priorities of the subgroups of a group; its objects take turns in them
    #[arg(long, default_value = "128", value_delimiter = ',', value_name = "P,...", requires = "generate")]
    pub priority_pattern: Vec<u8>,
    /// Send each object as a datagram
    #[arg(long, requires = "generate")]
    pub datagrams: bool,
    /// How objects share streams
    #[arg(long, value_enum, default_value_t, requires = "generate", conflicts_with = "datagrams")]
    pub streams: StreamsPer,
    /// Name of the generated track
    #[arg(long, default_value = "objects", value_name = "T")]
    pub track: String,
}

/// Objects to make, checked.
#[derive(Clone, Debug)]
pub struct Generator {
    object_bytes: usize,
    interval: Duration,
    objects_per_group: u64,
    /// 0 for no end.
    total: u64,
    priorities: Vec<u8>,
    shape: Shape,
}

/// What was made.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Generated {
    pub objects: u64,
    /// From the first to the last.
    pub objects_per_second: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Groups,
    Objects,
    Datagrams,
}

impl Generator {
    pub fn new(args: &GenerateArgs) -> anyhow::Result<Self> {
        ensure!((0.1..=100_000.0).contains(&args.rate_hz), "--rate-hz must be 0.1 to 100000");
        ensure!(args.object_bytes >= MIN_LEN, "--object-bytes must be {MIN_LEN} or more");
        ensure!(args.objects_per_group > 0, "--objects-per-group must be 1 or more");
        ensure!(!args.priority_pattern.is_empty(), "--priority-pattern must name a priority");
        let duration = args.duration.unwrap_or(0.0);
        ensure!((0.0..1e9).contains(&duration), "--duration must be 0 or more");
        let total = (duration * args.rate_hz).round() as u64;
        ensure!(args.duration.is_none() || total > 0, "--duration is too short for one object");
        Ok(Self {
            object_bytes: args.object_bytes,
            interval: Duration::from_secs_f64(1.0 / args.rate_hz),
            objects_per_group: args.objects_per_group,
            total,
            priorities: args.priority_pattern.clone(),
            shape: match (args.datagrams, args.streams) {
                (true, _) => Shape::Datagrams,
                (false, StreamsPer::Group) => Shape::Groups,
                (false, StreamsPer::Object) => Shape::Objects,
            },
        })
    }

    /// Makes objects on a thread of its own until the end, or until `track` has ended; then ends it.
    pub fn run(&self, track: &Arc<Track>) -> Generated {
        let mut open: Vec<Option<SubgroupWriter>> = self.priorities.iter().map(|_| None).collect();
        let start = payload::now();
        let mut objects = 0;
        while (self.total == 0 || objects < self.total) && !track.is_ended() {
            sleep_until(start + self.at(objects));
            self.emit(track, &mut open, objects);
            objects += 1;
        }
        let seconds = payload::now().saturating_sub(start).as_secs_f64();
        drop(open);
        track.end();
        Generated { objects, objects_per_second: objects.saturating_sub(1) as f64 / seconds.max(1e-9) }
    }

    /// When an object is due, after the start. Not a sum, which would drift by the rounding of each step.
    fn at(&self, sequence: u64) -> Duration {
        Duration::from_nanos((self.interval.as_nanos() * u128::from(sequence)) as u64)
    }

    fn emit(&self, track: &Arc<Track>, open: &mut [Option<SubgroupWriter>], sequence: u64) {
        let group = sequence / self.objects_per_group;
        let object = sequence % self.objects_per_group;
        let turn = (object % self.priorities.len() as u64) as usize;
        let priority = self.priorities[turn];
        let build = || {
            let stamp = Stamp { sequence, sent: payload::now(), total: self.total };
            payload::build(stamp, self.object_bytes)
        };
        match self.shape {
            Shape::Datagrams => {
                let location = Location::new(group, object);
                track.send_datagram(DatagramObject { location, priority, payload: build() });
            }
            Shape::Objects => {
                track.open(group, SubgroupId::FirstObject, priority).write(object, build());
            }
            Shape::Groups => {
                if object == 0 {
                    open.fill_with(|| None);
                }
                let subgroup = open[turn]
                    .get_or_insert_with(|| track.open(group, SubgroupId::Explicit(turn as u64), priority));
                subgroup.write(object, build());
            }
        }
    }
}

/// Sleeps to an absolute time of [`payload::now`]: the kernel to a little before, then the processor,
/// since a timer wakes some 50 us late.
fn sleep_until(deadline: Duration) {
    const SPIN: Duration = Duration::from_micros(80);
    let wake = deadline.saturating_sub(SPIN);
    while payload::now() < wake {
        // Interrupted by a signal: look at the clock again.
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
    use super::*;
    use crate::broadcast::{Broadcast, History};
    use millrace_proto::moq::{GroupOrder, Namespace, Properties};

    fn args() -> GenerateArgs {
        GenerateArgs {
            generate: true,
            object_bytes: 40,
            rate_hz: 20_000.0,
            objects_per_group: 5,
            duration: Some(0.0006),
            priority_pattern: vec![0, 9],
            datagrams: false,
            streams: StreamsPer::Group,
            track: "objects".into(),
        }
    }

    /// Location, subgroup and priority of everything that a generator makes.
    fn generated(args: &GenerateArgs) -> Vec<(u64, u64, Option<u64>, u8)> {
        let broadcast = Broadcast::new(Namespace::from_path("a").unwrap(), History::default());
        let track = broadcast.create("objects", Properties::default()).unwrap();
        let made = Generator::new(args).unwrap().run(&track);
        assert_eq!(made.objects, 12);
        assert!(made.objects_per_second > 0.0 && made.objects_per_second <= args.rate_hz, "{made:?}");
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
    fn groups_and_their_subgroups() {
        let all = generated(&args());
        assert_eq!(all.len(), 12);
        assert_eq!(all[..3], [(0, 0, Some(0), 0), (0, 1, Some(1), 9), (0, 2, Some(0), 0)]);
        assert_eq!(all[5], (1, 0, Some(0), 0));
        assert_eq!(all[11], (2, 1, Some(1), 9));
    }

    #[test]
    fn a_stream_per_object_and_datagrams() {
        let objects = generated(&GenerateArgs { streams: StreamsPer::Object, ..args() });
        assert_eq!(objects[6], (1, 1, Some(1), 9));
        let datagrams = generated(&GenerateArgs { datagrams: true, ..args() });
        assert_eq!(datagrams[6], (1, 1, None, 9));
    }

    #[test]
    fn arguments_are_checked() {
        for bad in [
            GenerateArgs { rate_hz: 0.0, ..args() },
            GenerateArgs { object_bytes: 31, ..args() },
            GenerateArgs { objects_per_group: 0, ..args() },
            GenerateArgs { duration: Some(0.00001), ..args() },
            GenerateArgs { priority_pattern: Vec::new(), ..args() },
        ] {
            assert!(Generator::new(&bad).is_err(), "{bad:?}");
        }
    }
}
