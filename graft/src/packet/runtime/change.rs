//! How the graft of a session changes, and what goes on or is lost by it.

use std::time::Instant;

use millrace_graft_kernel::joint::{Ends, Joint};

use super::super::Change;
use super::super::agree::{Act, Why, Word};
use super::super::losses::{Before, Count, Losses};
use super::super::settings::Graft;
use super::super::versions::{Move, moves};
use super::live::{CLOCK, Live};
use super::{Duration, Event, Runtime, Traffic, needs_clock};
use crate::Error;

/// What a function knows of packets that come.
const IN: [Joint; 2] = [Joint::Rx, Joint::Repair];
const OUT: [Joint; 1] = [Joint::Tx];

impl Runtime {
    pub(super) fn propose(&mut self, ends: Ends, graft: &Graft, anew: bool) -> Result<(), Error> {
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

    pub(super) fn act(&mut self, ends: &Ends, acts: Vec<Act>, events: &mut Vec<Event>) -> Result<(), Error> {
        for act in acts {
            match act {
                Act::Accept(_) | Act::Expect(_) => {
                    if let Err(error) = self.make_ready(ends, act) {
                        let acts = self.live.get_mut(ends).map(|live| live.agreement.cannot());
                        self.act(ends, acts.unwrap_or_default(), events)?;
                        self.live.entry(*ends).and_modify(|live| live.trouble = Some(error.to_string()));
                        return Ok(());
                    }
                }
                Act::Switch => self.switch(ends)?,
                Act::Begin(_) => self.begin_anew(ends)?,
                Act::Retire => self.retire(ends)?,
                Act::Say(word) => self.say(ends, word),
                Act::Agreed(list) => self.agreed(ends, list, events)?,
                Act::Failed(list, why) => self.failed(ends, list, why, events),
            }
        }
        Ok(())
    }

    /// Two grafts may be the same list: the one that was proposed here, or any.
    fn graft_for(&self, live: &Live, list: u16) -> Option<Graft> {
        let wanted = live.wanted.as_ref().and_then(|name| self.settings.grafts.get(name));
        wanted.filter(|wanted| wanted.list.id == list).or_else(|| self.graft_of(list)).cloned()
    }

    /// For the list that is to come, whatever settings say from now on.
    fn make_ready(&mut self, ends: &Ends, act: Act) -> Result<(), Error> {
        let (Act::Accept(list) | Act::Expect(list)) = act else { return Ok(()) };
        let Some(live) = self.live.get(ends) else { return Ok(()) };
        let Some(graft) = self.graft_for(live, list) else { return Err(Error::NotLoaded(list.to_string())) };
        let mut change = Change::default();
        if let Act::Expect(_) = act {
            self.joints.make_pausable()?;
            change.stateless = true;
        } else {
            change.migrated = self.accept(ends, live, &graft)?;
            self.joints.accept(ends, &graft.list)?;
        }
        self.live.entry(*ends).and_modify(|live| (live.next, live.change) = (Some(graft), change));
        Ok(())
    }

    /// What its functions know of packets that come: none has come to them yet. Returns those that know it from another version.
    fn accept(&self, ends: &Ends, live: &Live, graft: &Graft) -> Result<Vec<String>, Error> {
        live.check_way_to(graft, false)?;
        let moved = self.move_states(ends, &live.graft, graft, &IN)?;
        Ok(moved.into_iter().map(|moved| moved.name).collect())
    }

    fn move_states(
        &self,
        ends: &Ends,
        from: &Graft,
        to: &Graft,
        joints: &[Joint],
    ) -> Result<Vec<Move>, Error> {
        let moves = moves(&from.functions, &to.functions).unwrap_or_default();
        for it in &moves {
            self.joints.migrate(ends, &it.from, &it.to, joints)?;
        }
        Ok(moves)
    }

    /// What functions know of packets that leave goes on where the last one left it.
    fn switch(&mut self, ends: &Ends) -> Result<(), Error> {
        let epoch = self.joints.epoch(ends)? ^ 1;
        let start = Instant::now();
        if let Some(live) = self.live.get(ends)
            && let Some(next) = &live.next
        {
            self.move_states(ends, &live.graft, next, &OUT)?;
        }
        self.joints.switch(ends, epoch)?;
        let cut = start.elapsed();
        self.live.entry(*ends).and_modify(|live| live.cut = cut);
        Ok(())
    }

    /// Nothing passes until the new list is there, so that what was counted before is all that there was; and nothing leaves until both
    /// ends have it.
    fn begin_anew(&mut self, ends: &Ends) -> Result<(), Error> {
        let Some(graft) = self.live.get(ends).and_then(|live| live.next.clone()) else { return Ok(()) };
        let epoch = self.joints.epoch(ends)? ^ 1;
        let start = Instant::now();
        self.joints.pause(ends)?;
        let totals = self.totals(ends)?;
        self.joints.replace(ends, &graft.list, epoch)?;
        let (now, cut) = (self.now(), start.elapsed());
        let Some(live) = self.live.get_mut(ends) else { return Ok(()) };
        let before = Before {
            sent: totals.sent.saturating_sub(live.begun.sent),
            delivered: totals.delivered.saturating_sub(live.begun.delivered),
        };
        (live.cut, live.begun) = (cut, totals);
        (live.count, live.is_counted) = (Some(Count::new(now, before)), false);
        Ok(())
    }

    /// Of the application's datagrams, since the session was opened.
    pub(super) fn totals(&mut self, ends: &Ends) -> Result<Before, Error> {
        let Traffic { sent, delivered, .. } = self.traffic(ends)?.unwrap_or_default();
        Ok(Before { sent, delivered })
    }

    fn retire(&mut self, ends: &Ends) -> Result<(), Error> {
        let epoch = self.joints.epoch(ends)? ^ 1;
        self.joints.retire(ends, epoch)?;
        if let Some(live) = self.live.get_mut(ends) {
            // Of a change that came to nothing `next` is of no use any more.
            (live.before, live.next) = (None, None);
        }
        self.unload_unused();
        Ok(())
    }

    fn agreed(&mut self, ends: &Ends, list: u16, events: &mut Vec<Event>) -> Result<(), Error> {
        let now = self.now();
        self.joints.resume(ends)?;
        let Some(live) = self.live.get_mut(ends) else { return Ok(()) };
        // The list that it has, under this name or another.
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
            (live.cut, live.change) = (Duration::ZERO, Change::default());
        } else {
            live.before = Some(before);
        }
        live.change.why = live.ruled.agreed(&live.graft.name);
        live.trouble = None;
        live.swaps += 1;
        let (session, graft) = (live.session.name.clone(), live.graft.clone());
        let change = live.change.clone();
        events.push(Event::Swapped { session, graft: graft.name.clone(), took, cut: live.cut, change });
        self.joints.set_clock(ends, if needs_clock(&graft) { CLOCK } else { Duration::ZERO })?;
        Ok(self.joints.set_budget(ends, graft.budget_ns)?)
    }

    fn failed(&mut self, ends: &Ends, list: u16, why: Why, events: &mut Vec<Event>) {
        let wanted = self.graft_of(list).map(|graft| graft.name.clone()).unwrap_or_default();
        let Some(live) = self.live.get_mut(ends) else { return };
        live.proposed = None;
        live.swaps_failed += 1;
        live.trouble = Some(format!("it was not swapped to graft {wanted}: {}", why.text()));
        events.push(Event::NotSwapped { session: live.session.name.clone(), graft: wanted, why });
    }

    // --- Losses ---

    /// Whether the word was about these.
    pub(super) fn hear_losses(&mut self, ends: &Ends, word: Word) -> bool {
        if !matches!(word, Word::Sent(_) | Word::Lost(_)) {
            return false;
        }
        let count = self.live.get_mut(ends).and_then(|live| live.count.as_mut());
        if let Some(answer) = count.and_then(|count| count.hear(word)) {
            self.say(ends, answer);
        }
        true
    }

    pub(super) fn tick_losses(&mut self, ends: &Ends, events: &mut Vec<Event>) {
        let now = self.now();
        let Some(live) = self.live.get_mut(ends) else { return };
        let Some(count) = &mut live.count else { return };
        let (ticked, is_known, known) = (count.tick(now), count.is_known(), count.known());
        // Before both ends use the new list nobody has asked.
        let is_agreed = live.next.is_none();
        if is_agreed && !live.is_counted && (is_known || ticked.is_err()) {
            live.counted(known);
            events.push(Event::Counted { session: live.session.name.clone(), losses: known });
        }
        match ticked {
            Ok(Some(word)) => self.say(ends, word),
            Err(_) if is_agreed => live.count = None,
            _ => {}
        }
    }
}

impl Live {
    fn counted(&mut self, losses: Losses) {
        self.is_counted = true;
        (self.change.lost_sent, self.change.lost_received) = (losses.sent, losses.received);
        self.lost_sent += losses.sent.unwrap_or_default();
        self.lost_received += losses.received.unwrap_or_default();
    }
}

impl Why {
    pub fn text(self) -> &'static str {
        match self {
            Self::Refused => {
                "the other end has no such list of the same functions, or other values of parameters that both need alike (such as parity of fec)"
            }
            Self::Silent => "the other end does not answer",
            Self::Busy => "another swap is under way",
            Self::NoState => "a function cannot go on with what the version before it knew",
        }
    }
}
