//! Rules that choose a session's graft (list of packet functions) by its round-trip time. The code does no I/O, and
//! gets the time as an argument.
//!
//! The rules of a session are steps, from the shortest round-trip time to the longest. A session is on one step, or
//! below the first one, where it uses its own graft. It goes up when the round-trip time reaches the `rtt` of the next
//! step, and down when the time is shorter than the `until` of its present step. Both happen only after `hold`, so that
//! a session does not change back and forth with every packet.

use std::time::Duration;

/// A rule that chooses a session's graft (list of packet functions) by the session's round-trip time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct When {
    /// Name of the graft (list of packet functions) that sessions use while this rule applies to them.
    pub graft: String,
    /// Round-trip time from which this rule applies to a session.
    pub rtt: Duration,
    /// Round-trip time below which this rule no longer applies to a session.
    pub until: Duration,
    /// Time for which the round-trip time must stay beyond `rtt` or `until` before the session changes its graft.
    pub hold: Duration,
}

/// Gap between two measurements of the round-trip time after which the time `hold` begins again. The gap is an absolute
/// time, or a number of round trips if that is longer.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_ROUND_TRIPS: u32 = 4;

/// The rule that applies to a session, and the change of the rule that the session's round-trip time requires.
#[derive(Debug, Default)]
pub struct RuleWatch {
    /// Position of the rule that applies to the session, from 1 on, or 0 if no rule does.
    level: usize,
    /// The change of the rule that the round-trip time requires, if any. The flag is true if the new rule is for longer
    /// round-trip times. The duration is the time at which the change was first required.
    leaning: Option<(bool, Duration)>,
    looked: Duration,
}

impl RuleWatch {
    /// Evaluates a new round-trip time. If another rule applies now, returns that rule's position from 1 on, or 0 if no
    /// rule applies.
    pub fn look(&mut self, now: Duration, rtt: Duration, steps: &[When]) -> Option<usize> {
        let pause = PAUSE.max(PAUSE_ROUND_TRIPS * rtt);
        if now.saturating_sub(self.looked) > pause {
            self.leaning = None;
        }
        self.looked = now;
        let level = self.level_at(rtt, steps);
        if level == self.level {
            self.leaning = None;
            return None;
        }
        let is_up = level > self.level;
        let since = match self.leaning {
            Some((up, since)) if up == is_up => since,
            _ => now,
        };
        self.leaning = Some((is_up, since));
        // Of the old and the new rule, the `hold` of the rule for longer round-trip times counts.
        let step = steps.get(level.max(self.level) - 1)?;
        if now.saturating_sub(since) < step.hold {
            return None;
        }
        (self.level, self.leaning) = (level, None);
        Some(level)
    }

    fn level_at(&self, rtt: Duration, steps: &[When]) -> usize {
        let holds = |(at, step): &(usize, &When)| rtt >= if *at < self.level { step.until } else { step.rtt };
        steps.iter().enumerate().take_while(holds).count()
    }
}

/// Returns the reason, as text, for a change to the rule at position `level`, or to no rule if that is 0.
pub fn reason(level: usize, rtt: Duration, steps: &[When]) -> String {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let above = level.checked_sub(1).and_then(|at| steps.get(at));
    let bound = match (above, steps.get(level)) {
        (Some(step), _) if rtt >= step.rtt => format!("{} ms or more", step.rtt.as_millis()),
        (_, Some(step)) => format!("less than {} ms", step.until.as_millis()),
        _ => "within its steps".to_owned(),
    };
    format!("the round trip is {:.1} ms, {bound}", ms(rtt))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn step(graft: &str, rtt_ms: u32, until_ms: u32, hold_ms: u32) -> When {
        When { graft: graft.into(), rtt: rtt_ms * MS, until: until_ms * MS, hold: hold_ms * MS }
    }

    /// Each row of the table has a name, the rules, and periods with one round-trip time each: start, end and
    /// round-trip time in ms. The last column has the expected changes: the time in ms, and the position of the rule
    /// that applies then. Round-trip times are measured every 100 ms.
    #[test]
    fn session_changes_graft_when_round_trip_time_rule_holds_long_enough() {
        type Trips = &'static [(u32, u32, u32)];
        type Row<'a> = (&'a str, &'a [When], Trips, &'a [(u32, usize)]);
        let one = [step("far", 300, 240, 500)];
        let two = [step("far", 300, 240, 500), step("moon", 1000, 800, 1000)];
        let table: [Row<'_>; 10] = [
            ("never", &one, &[(0, 5000, 299)], &[]),
            ("from the bound on", &one, &[(0, 2000, 300)], &[(500, 1)]),
            (
                "there and back",
                &one,
                &[(0, 1000, 20), (1000, 3000, 320), (3000, 5000, 20)],
                &[(1500, 1), (3500, 0)],
            ),
            ("between the bounds it stays", &one, &[(0, 1000, 320), (1000, 9000, 241)], &[(500, 1)]),
            (
                "at its end it stays",
                &one,
                &[(0, 1000, 320), (1000, 3000, 240), (3000, 4000, 239)],
                &[(500, 1), (3500, 0)],
            ),
            (
                "a moment is none",
                &one,
                &[(0, 400, 320), (400, 500, 20), (500, 900, 320), (900, 2000, 20)],
                &[],
            ),
            (
                "to and fro around a bound",
                &one,
                &[(0, 300, 310), (300, 600, 290), (600, 900, 310), (900, 5000, 290)],
                &[],
            ),
            ("a pause is not a while", &one, &[(0, 200, 320), (9000, 9400, 320), (9400, 9900, 20)], &[]),
            ("over two", &two, &[(0, 3000, 1200), (3000, 9000, 20)], &[(1000, 2), (4000, 0)]),
            (
                "one after the other",
                &two,
                &[(0, 1000, 400), (1000, 3000, 1000), (3000, 6000, 500)],
                &[(500, 1), (2000, 2), (4000, 1)],
            ),
        ];
        for (what, steps, trips, want) in table {
            let mut watch = RuleWatch::default();
            let mut got = Vec::new();
            for (from, to, rtt) in trips {
                for at in (*from..*to).step_by(100) {
                    got.extend(watch.look(at * MS, *rtt * MS, steps).map(|level| (at, level)));
                }
            }
            assert_eq!(got, want, "{what}");
        }
    }

    #[test]
    fn removed_round_trip_rule_changes_no_session() {
        let mut watch = RuleWatch::default();
        let steps = [step("far", 300, 240, 0)];
        assert_eq!(watch.look(MS, 400 * MS, &steps), Some(1));
        assert_eq!(watch.look(2 * MS, 400 * MS, &[]), None);
    }

    #[test]
    fn reason_for_a_graft_change_names_the_round_trip_and_its_bound() {
        let steps = [step("far", 300, 240, 500), step("moon", 1000, 800, 1000)];
        let table = [
            (1, 312, "the round trip is 312.0 ms, 300 ms or more"),
            (0, 100, "the round trip is 100.0 ms, less than 240 ms"),
            (2, 1000, "the round trip is 1000.0 ms, 1000 ms or more"),
            (1, 799, "the round trip is 799.0 ms, 300 ms or more"),
            (1, 250, "the round trip is 250.0 ms, less than 800 ms"),
        ];
        for (level, rtt, want) in table {
            assert_eq!(reason(level, rtt * MS, &steps), want);
        }
    }
}
