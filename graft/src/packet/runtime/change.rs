//! Changes a session's graft (list of packet functions), and decides which state is kept and which datagrams are
//! counted as lost.

use std::time::Instant;

use millrace_graft_kernel::packet::{FunctionHook, SessionEnds};

use super::super::SessionChange;
use super::super::agree::{ListAction, ListMessage, ListRefusal};
use super::super::losses::{Before, LossCount, PacketLosses};
use super::super::settings::GraftSetting;
use super::super::versions::{StateMove, moves};
use super::live::{CLOCK, LiveSession};
use super::{Duration, PacketEvent, PacketRuntime, SessionTraffic, needs_clock};
use crate::Error;

/// Hooks for incoming packets.
const IN: [FunctionHook; 2] = [FunctionHook::Rx, FunctionHook::Repair];
const OUT: [FunctionHook; 1] = [FunctionHook::Tx];

impl PacketRuntime {
    pub(super) fn propose(
        &mut self,
        ends: SessionEnds,
        graft: &GraftSetting,
        anew: bool,
    ) -> Result<(), Error> {
        let now = self.now();
        let Some(live) = self.live.get_mut(&ends) else { return Ok(()) };
        live.check_way_to(graft, anew)?;
        (live.proposed, live.wanted) = (Some(now), Some(graft.name.clone()));
        let acts = live.agreement.propose(now, graft.list.id, anew);
        let mut events = Vec::new();
        let acted = self.act(&ends, acts, &mut events);
        self.pending.extend(events);
        self.plan(&ends);
        acted
    }

    pub(super) fn act(
        &mut self,
        ends: &SessionEnds,
        acts: Vec<ListAction>,
        events: &mut Vec<PacketEvent>,
    ) -> Result<(), Error> {
        for act in acts {
            // If an action fails, the remaining actions are dropped, and `ListAgreement::cannot` returns those that
            // abandon the change.
            match act {
                ListAction::Accept(_) | ListAction::Expect(_) => {
                    if let Err(error) = self.make_ready(ends, act) {
                        let acts = self.live.get_mut(ends).map(|live| live.agreement.cannot());
                        self.act(ends, acts.unwrap_or_default(), events)?;
                        self.live.entry(*ends).and_modify(|live| live.trouble = Some(error.to_string()));
                        return Ok(());
                    }
                }
                ListAction::Switch => self.switch(ends)?,
                ListAction::Begin(_) => self.begin_anew(ends)?,
                ListAction::Retire => self.retire(ends)?,
                ListAction::Say(message) => self.say(ends, message),
                ListAction::Agreed(list) => self.agreed(ends, list, events)?,
                ListAction::Failed(list, why) => self.failed(ends, list, why, events),
            }
        }
        Ok(())
    }

    /// Returns the graft in the settings that has this function list. If two grafts have the same list, the one that
    /// was proposed for the session is returned.
    fn graft_for(&self, live: &LiveSession, list: u16) -> Option<GraftSetting> {
        let wanted = live.wanted.as_ref().and_then(|name| self.settings.grafts.get(name));
        wanted.filter(|wanted| wanted.list.id == list).or_else(|| self.graft_of(list)).cloned()
    }

    /// Prepares the new function list. Later changes of the settings do not affect it.
    fn make_ready(&mut self, ends: &SessionEnds, act: ListAction) -> Result<(), Error> {
        let (ListAction::Accept(list) | ListAction::Expect(list)) = act else { return Ok(()) };
        let Some(live) = self.live.get(ends) else { return Ok(()) };
        let Some(graft) = self.graft_for(live, list) else { return Err(Error::NotLoaded(list.to_string())) };
        let mut change = SessionChange::default();
        if let ListAction::Expect(_) = act {
            self.hooks.make_pausable()?;
            change.stateless = true;
        } else {
            change.migrated = self.accept(ends, live, &graft)?;
            // The functions of the new function list have their state now, so packets of the list may arrive.
            self.hooks.accept(ends, &graft.list)?;
        }
        self.live.entry(*ends).and_modify(|live| (live.next, live.change) = (Some(graft), change));
        Ok(())
    }

    /// Copies the state for incoming packets to the functions of the new function list, which have handled no packet
    /// yet. Returns the functions that got another version's state.
    fn accept(
        &self,
        ends: &SessionEnds,
        live: &LiveSession,
        graft: &GraftSetting,
    ) -> Result<Vec<String>, Error> {
        live.check_way_to(graft, false)?;
        let moved = self.move_states(ends, &live.graft, graft, &IN)?;
        Ok(moved.into_iter().map(|moved| moved.name).collect())
    }

    fn move_states(
        &self,
        ends: &SessionEnds,
        from: &GraftSetting,
        to: &GraftSetting,
        hooks: &[FunctionHook],
    ) -> Result<Vec<StateMove>, Error> {
        let moves = moves(&from.functions, &to.functions).unwrap_or_default();
        for it in &moves {
            self.hooks.migrate(ends, &it.from, &it.to, hooks)?;
        }
        Ok(moves)
    }

    /// Switches sending to the new function list. Its functions continue with the present state for outgoing packets.
    fn switch(&mut self, ends: &SessionEnds) -> Result<(), Error> {
        // The kernel has two entries for the session's lists of functions. The lowest bit of the epoch selects the
        // entry for sending.
        let epoch = self.hooks.epoch(ends)? ^ 1;
        let start = Instant::now();
        if let Some(live) = self.live.get(ends)
            && let Some(next) = &live.next
        {
            // The state is copied as late as possible, since packets change it until the kernel switches.
            self.move_states(ends, &live.graft, next, &OUT)?;
        }
        self.hooks.switch(ends, epoch)?;
        let cut = start.elapsed();
        self.live.entry(*ends).and_modify(|live| live.cut = cut);
        Ok(())
    }

    /// Restarts the session. No packet passes before the new function list is in force, so that the counters are
    /// complete. No packet is sent before both ends have the list.
    fn begin_anew(&mut self, ends: &SessionEnds) -> Result<(), Error> {
        let Some(graft) = self.live.get(ends).and_then(|live| live.next.clone()) else { return Ok(()) };
        let epoch = self.hooks.epoch(ends)? ^ 1;
        let start = Instant::now();
        self.hooks.pause(ends)?;
        // While the session is paused, the counters do not change.
        let totals = self.totals(ends)?;
        self.hooks.replace(ends, &graft.list, epoch)?;
        let now = self.now();
        let cut = start.elapsed();
        let Some(live) = self.live.get_mut(ends) else { return Ok(()) };
        let before = Before {
            sent: totals.sent.saturating_sub(live.begun.sent),
            delivered: totals.delivered.saturating_sub(live.begun.delivered),
        };
        (live.cut, live.begun) = (cut, totals);
        (live.count, live.is_counted) = (Some(LossCount::new(now, before)), false);
        Ok(())
    }

    /// Returns the counts of the application's datagrams since the session was opened.
    pub(super) fn totals(&mut self, ends: &SessionEnds) -> Result<Before, Error> {
        let SessionTraffic { sent, delivered, .. } = self.traffic(ends)?.unwrap_or_default();
        Ok(Before { sent, delivered })
    }

    fn retire(&mut self, ends: &SessionEnds) -> Result<(), Error> {
        let epoch = self.hooks.epoch(ends)? ^ 1;
        self.hooks.retire(ends, epoch)?;
        if let Some(live) = self.live.get_mut(ends) {
            // After a failed change the new function list is no longer needed.
            (live.before, live.next) = (None, None);
        }
        self.unload_unused();
        Ok(())
    }

    fn agreed(&mut self, ends: &SessionEnds, list: u16, events: &mut Vec<PacketEvent>) -> Result<(), Error> {
        let now = self.now();
        self.hooks.resume(ends)?;
        let Some(live) = self.live.get_mut(ends) else { return Ok(()) };
        // The session already has this function list, perhaps under the name of another graft.
        let next = live.next.take().filter(|next| next.list.id == list);
        let was_there = next.is_none();
        let next = match next {
            Some(next) => next,
            None => match self.live.get(ends).and_then(|live| self.graft_for(live, list)) {
                Some(graft) => graft,
                None => return Ok(()),
            },
        };
        let Some(live) = self.live.get_mut(ends) else { return Ok(()) };
        let took = live.proposed.take().map(|since| now.saturating_sub(since));
        let before = std::mem::replace(&mut live.graft, next);
        if was_there {
            (live.cut, live.change) = (Duration::ZERO, SessionChange::default());
        } else {
            live.before = Some(before);
        }
        live.change.why = live.ruled.agreed(&live.graft.name);
        live.trouble = None;
        live.swaps += 1;
        let session = live.session.name.clone();
        let graft = live.graft.clone();
        let change = live.change.clone();
        events.push(PacketEvent::Swapped { session, graft: graft.name.clone(), took, cut: live.cut, change });
        self.hooks.set_clock(ends, if needs_clock(&graft) { CLOCK } else { Duration::ZERO })?;
        Ok(self.hooks.set_budget(ends, graft.budget_ns)?)
    }

    fn failed(&mut self, ends: &SessionEnds, list: u16, why: ListRefusal, events: &mut Vec<PacketEvent>) {
        let wanted = self.graft_of(list).map(|graft| graft.name.clone()).unwrap_or_default();
        let Some(live) = self.live.get_mut(ends) else { return };
        live.proposed = None;
        live.swaps_failed += 1;
        live.trouble = Some(format!("it was not swapped to graft {wanted}: {}", why.text()));
        events.push(PacketEvent::NotSwapped { session: live.session.name.clone(), graft: wanted, why });
    }

    // --- Losses ---

    /// Handles a message about datagrams that were lost when the session restarted. Returns false if the message is
    /// about something else.
    pub(super) fn hear_losses(&mut self, ends: &SessionEnds, message: ListMessage) -> bool {
        if !matches!(message, ListMessage::Sent(_) | ListMessage::Lost(_)) {
            return false;
        }
        let count = self.live.get_mut(ends).and_then(|live| live.count.as_mut());
        if let Some(answer) = count.and_then(|count| count.on_message(message)) {
            self.say(ends, answer);
        }
        true
    }

    pub(super) fn tick_losses(&mut self, ends: &SessionEnds, events: &mut Vec<PacketEvent>) {
        let now = self.now();
        let Some(live) = self.live.get_mut(ends) else { return };
        let Some(count) = &mut live.count else { return };
        let ticked = count.tick(now);
        let is_known = count.is_known();
        let known = count.total_losses();
        // The other end asks about losses only once both ends use the new function list.
        let is_agreed = live.next.is_none();
        if is_agreed && !live.is_counted && (is_known || ticked.is_err()) {
            live.counted(known);
            events.push(PacketEvent::Counted { session: live.session.name.clone(), losses: known });
        }
        match ticked {
            Ok(Some(message)) => self.say(ends, message),
            Err(_) if is_agreed => live.count = None,
            _ => {}
        }
    }
}

impl LiveSession {
    fn counted(&mut self, losses: PacketLosses) {
        self.is_counted = true;
        (self.change.lost_sent, self.change.lost_received) = (losses.sent, losses.received);
        self.lost_sent += losses.sent.unwrap_or_default();
        self.lost_received += losses.received.unwrap_or_default();
    }
}

impl ListRefusal {
    /// Returns the reason for a failed change, as text.
    pub fn text(self) -> &'static str {
        match self {
            Self::Refused => {
                "the other end does not have this list of functions, or has other values of parameters that both ends need to agree on (such as parity of fec)"
            }
            Self::Silent => "the other end does not answer",
            Self::Busy => "another swap is under way",
            Self::NoState => "a function cannot continue with the state of its previous version",
        }
    }
}
