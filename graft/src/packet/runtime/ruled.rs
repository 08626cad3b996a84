//! Sessions whose settings have rules by the round trip.

use std::time::Duration;

use millrace_graft_kernel::joint::{Ends, Progress};

use super::super::settings::{Session, Settings};
use super::super::when::reason;
use super::live::{Due, Live, Ruled};
use super::{Event, Runtime};
use crate::Error;

/// Between two looks at round trips, of so many sessions; of more, it takes longer.
const LOOK: Duration = Duration::from_millis(50);
const AT_ONCE: usize = 256;
/// Until what did not come about is tried again.
const RETRY: Duration = Duration::from_secs(10);

impl Ruled {
    /// Somebody else has said what it is to have: until a round trip changes, that holds.
    pub fn overrule(&mut self) {
        self.due = None;
    }

    /// Both ends have this graft; why, if it was due.
    pub fn agreed(&mut self, graft: &str) -> Option<String> {
        Some(self.due.take_if(|due| due.graft == graft)?.why)
    }
}

impl Live {
    /// Of settings that are new. Where they are others than before, the session begins below the first step.
    pub fn take_rules(&mut self, session: &Session) {
        if self.session.when != session.when || self.session.graft != session.graft {
            self.ruled = Ruled::default();
            self.session.when.clone_from(&session.when);
            self.session.graft.clone_from(&session.graft);
        }
    }

    /// What is due now, by what is known of its packets.
    fn look_at_rules(&mut self, now: Duration, progress: &Progress) -> Option<Event> {
        let (rtt, seen) = (progress.round_trip?, (progress.acked, progress.delivered));
        if std::mem::replace(&mut self.ruled.seen, seen) == seen {
            return None;
        }
        let steps = &self.session.when;
        let level = self.ruled.watch.look(now, rtt, steps)?;
        let graft = level.checked_sub(1).map_or(&self.session.graft, |at| &steps[at].graft).clone();
        let why = reason(level, rtt, steps);
        self.ruled.due = Some(Due { graft: graft.clone(), why: why.clone(), next: now });
        Some(Event::Ruled { session: self.session.name.clone(), graft, why })
    }

    /// What is to be proposed now.
    fn due_graft(&mut self, now: Duration) -> Option<String> {
        // One change at a time; the other end may have one under way.
        let is_free = self.agreement.next().is_none();
        let due = self.ruled.due.as_mut().filter(|due| is_free && now >= due.next)?;
        due.next = now + RETRY;
        Some(due.graft.clone())
    }
}

/// Sessions that have rules.
pub(super) fn of(settings: &Settings) -> Vec<Ends> {
    let ruled = settings.sessions.iter().filter(|session| !session.when.is_empty());
    ruled.map(|session| session.ends).collect()
}

impl Runtime {
    pub(super) fn look_at_rules(&mut self, events: &mut Vec<Event>) -> Result<(), Error> {
        let now = self.now();
        if now < self.looked_at_rules + LOOK {
            return Ok(());
        }
        self.looked_at_rules = now;
        // All of them have had their turn before one has its next.
        let first = self.ruled.len().min(AT_ONCE);
        let mut due: Vec<(Ends, String)> = Vec::new();
        for &ends in &self.ruled[..first] {
            let Some(live) = self.live.get_mut(&ends) else { continue };
            events.extend(live.look_at_rules(now, &self.joints.progress(&ends)?));
            due.extend(live.due_graft(now).map(|graft| (ends, graft)));
        }
        self.ruled.rotate_left(first);
        for (ends, graft) in due {
            let graft = self.settings.graft(&graft)?.clone();
            if let Err(error) = self.propose(ends, &graft, graft.anew) {
                self.live.entry(ends).and_modify(|live| live.trouble = Some(error.to_string()));
            }
        }
        Ok(())
    }
}
