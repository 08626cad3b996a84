//! Sessions whose settings have rules that choose the graft (list of packet functions) by the round-trip time.

use std::time::Duration;

use millrace_graft_kernel::packet::{SessionEnds, SessionProgress};

use super::super::settings::{SessionSetting, Settings};
use super::super::when::reason;
use super::live::{DueChange, LiveSession, Ruled};
use super::{PacketEvent, PacketRuntime};
use crate::Error;

/// Interval of checks of round-trip times. Each check covers at most `AT_ONCE` sessions, so with more sessions each
/// session is checked less often.
const LOOK: Duration = Duration::from_millis(50);
const AT_ONCE: usize = 256;
/// Pause after which a failed change of a session's graft (list of packet functions) is tried again.
const RETRY: Duration = Duration::from_secs(10);

impl Ruled {
    /// Drops the change of the graft (list of packet functions) that a rule requires, since an operator or the broker
    /// (the local proxy) has chosen a graft. The chosen graft stays until another rule applies to the round-trip time.
    pub fn overrule(&mut self) {
        self.due = None;
    }

    /// Records that both ends use this graft (list of packet functions). Returns the rule's reason if a rule requested
    /// the change.
    pub fn agreed(&mut self, graft: &str) -> Option<String> {
        Some(self.due.take_if(|due| due.graft == graft)?.why)
    }
}

impl LiveSession {
    /// Applies new rules. If the rules have changed, the session starts as if its round-trip time were below the first
    /// rule's threshold.
    pub fn take_rules(&mut self, session: &SessionSetting) {
        if self.session.when != session.when || self.session.graft != session.graft {
            self.ruled = Ruled::default();
            self.session.when.clone_from(&session.when);
            self.session.graft.clone_from(&session.graft);
        }
    }

    /// Records the change of the graft (list of packet functions) that the rules require for the present round-trip
    /// time.
    fn look_at_rules(&mut self, now: Duration, progress: &SessionProgress) -> Option<PacketEvent> {
        let rtt = progress.round_trip?;
        let seen = (progress.acked, progress.delivered);
        if std::mem::replace(&mut self.ruled.seen, seen) == seen {
            return None;
        }
        let steps = &self.session.when;
        let level = self.ruled.watch.look(now, rtt, steps)?;
        let graft = level.checked_sub(1).map_or(&self.session.graft, |at| &steps[at].graft).clone();
        let why = reason(level, rtt, steps);
        self.ruled.due = Some(DueChange { graft: graft.clone(), why: why.clone(), next: now });
        Some(PacketEvent::Ruled { session: self.session.name.clone(), graft, why })
    }

    /// Returns the graft (list of packet functions) to propose to the other end now, if the rules require another one.
    fn due_graft(&mut self, now: Duration) -> Option<String> {
        // Only one change of a session's graft (list of packet functions) at a time is possible, and the other end may
        // have started one.
        let is_free = self.agreement.next().is_none();
        let due = self.ruled.due.as_mut().filter(|due| is_free && now >= due.next)?;
        due.next = now + RETRY;
        Some(due.graft.clone())
    }
}

/// Returns the sessions that have rules by round-trip time.
pub(super) fn list_ends(settings: &Settings) -> Vec<SessionEnds> {
    let ruled = settings.sessions.iter().filter(|session| !session.when.is_empty());
    ruled.map(|session| session.ends).collect()
}

impl PacketRuntime {
    pub(super) fn look_at_rules(&mut self, events: &mut Vec<PacketEvent>) -> Result<(), Error> {
        let now = self.now();
        if now < self.looked_at_rules + LOOK {
            return Ok(());
        }
        self.looked_at_rules = now;
        // The list of sessions with rules is rotated, so that every session is checked before any is checked again.
        let first = self.ruled.len().min(AT_ONCE);
        let mut due: Vec<(SessionEnds, String)> = Vec::new();
        for &ends in &self.ruled[..first] {
            let Some(live) = self.live.get_mut(&ends) else { continue };
            events.extend(live.look_at_rules(now, &self.hooks.progress(&ends)?));
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
