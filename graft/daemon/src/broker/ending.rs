//! The end of sessions, and what is due in time.

use std::time::{Duration, Instant};

use millrace_graft::{
    message::{Why, wire::Word},
    packet::{CANONICAL, Runtime},
};
use tracing::warn;

use super::{
    Broker,
    desk::{Desk, Role},
    far::Say,
    lease::{Said, Stage, short},
};

/// Until an attempt to open one is given up.
const PATIENCE: Duration = Duration::from_secs(8);
/// For an application to read what has come, when the other end is gone.
const LET_GO: Duration = Duration::from_secs(10);

impl Broker {
    /// An application has gone from its desk.
    pub(super) fn leave(&mut self, desk: u64) {
        let Some(gone) = self.desks.remove(&desk) else { return };
        if let Role::Session(life) = gone.role {
            let has_finished = self.leases.get(&life).is_some_and(|lease| lease.sent.is_some());
            let reason = if has_finished {
                "the other end has closed it"
            } else {
                "the application at the other end has gone"
            };
            self.end_own(life, reason);
        }
    }

    /// This end ends it: its application has gone, or does not get it.
    pub(super) fn end_own(&mut self, life: u64, reason: &str) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        let is_told = matches!(lease.stage, Stage::Ending(_));
        let reason = short(reason);
        if !is_told {
            lease.said = Some(Said::new(Say::Close { life, messages: lease.sent, reason }));
        }
        (lease.desk, lease.finish) = (None, None);
        lease.stage = Stage::Ending(Instant::now() + LET_GO);
        let taken_back = self.seats.get_mut(&lease.ends).map(super::seat::Seat::take_back);
        if let Some(Err(error)) = taken_back {
            warn!("a socket could not be taken back: {error}");
        }
    }

    /// The other end has ended it, or is gone. What has come can be read for a while.
    pub(super) fn end(&mut self, life: u64, reason: &str, is_told: bool) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        let (desk, stage) = (lease.desk, lease.stage);
        lease.stage = Stage::Ending(Instant::now() + LET_GO);
        lease.finish = None;
        let say = Say::Close { life, messages: None, reason: short(reason) };
        lease.said = (!is_told).then(|| Said::new(say));
        match stage {
            Stage::Open => {
                let word = Word::Closed { reason: reason.to_owned() };
                desk.into_iter().for_each(|desk| self.tell(desk, &word));
            }
            Stage::Ending(_) => {}
            _ if lease.is_own => {
                lease.desk = None;
                let reason = reason.to_owned();
                desk.into_iter().for_each(|desk| {
                    self.desks.entry(desk).and_modify(Desk::finish);
                    self.refuse(desk, Why::Unreachable, reason.clone());
                });
            }
            // The listener has not heard of it.
            _ => lease.desk = None,
        }
    }

    /// It could not be opened.
    pub(super) fn give_up(&mut self, life: u64, why: Why, reason: &str) {
        let own = self.leases.get_mut(&life).filter(|lease| lease.is_own);
        if let Some(desk) = own.and_then(|lease| lease.desk.take()) {
            self.desks.entry(desk).and_modify(Desk::finish);
            self.refuse(desk, why, reason.to_owned());
        }
        self.end_own(life, reason);
    }

    pub(super) fn tick_leases(&mut self, runtime: &mut Runtime, now: Instant) {
        let lives: Vec<_> = self.leases.keys().copied().collect();
        for life in lives {
            let Some(lease) = self.leases.get_mut(&life) else { continue };
            if let Some(far) = self.fars.get(lease.peer) {
                lease
                    .said
                    .iter_mut()
                    .chain(&mut lease.finish)
                    .filter_map(|said| said.due(now))
                    .for_each(|say| far.say(say));
            }
            match lease.stage {
                Stage::Open => self.try_change(runtime, life),
                Stage::Ending(until) => {
                    let is_read = lease.desk.is_none_or(|desk| !self.desks.contains_key(&desk));
                    let is_over = is_read && lease.said.is_none();
                    if now >= until || is_over {
                        self.let_go(life);
                    }
                }
                _ if now > lease.since + PATIENCE => {
                    self.give_up(life, Why::Unreachable, "the other end does not answer in time");
                }
                Stage::Waiting => self.swap(runtime, life),
                _ => {}
            }
        }
    }

    /// Nobody has it any more.
    fn let_go(&mut self, life: u64) {
        let Some(lease) = self.leases.remove(&life) else { return };
        self.keeper.forget(&lease.ends);
        if let Some(seat) = self.seats.get_mut(&lease.ends) {
            seat.is_restless = lease.is_own;
            if let Err(error) = seat.take_back() {
                warn!("a socket could not be taken back: {error}");
            }
        }
        lease.desk.and_then(|desk| self.desks.remove(&desk));
    }

    /// What functions still do for a session that nobody has any more is ended: it has framing alone until it is lent again.
    pub(super) fn rest(&mut self, runtime: &mut Runtime) {
        for peer in &self.peers {
            for (ends, _) in peer.seats() {
                let Some(seat) = self.seats.get_mut(&ends).filter(|seat| seat.is_restless) else { continue };
                if self.leases.values().any(|lease| lease.ends == ends) {
                    continue;
                }
                let Some(seen) = runtime.see(&ends) else { continue };
                if seen.is_idle {
                    seat.is_restless = false;
                    // Without the other end it does not matter: nothing passes then.
                    let _ = runtime.swap_anew(&peer.session_name(&ends), CANONICAL);
                }
            }
        }
    }
}
