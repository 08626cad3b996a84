//! Sessions while applications have them: other wishes, other grafts, what each end has sent, and who is still there.

use millrace_graft::{
    message::{By, Want, Why, wire::Word},
    packet::{Event, Runtime, choose::choose},
};
use millrace_graft_kernel::joint::Ends;
use tracing::{info, warn};

use super::{
    Broker,
    addresses::is_here,
    far::Say,
    lease::{Denied, Lease, SILENCE, Said, Stage, denied, waits},
};

/// Seconds in which a session that nobody asks about is spoken of once.
const REPORT_EVERY: u64 = 8;

impl Broker {
    pub(super) fn happened(&mut self, runtime: &mut Runtime, event: &Event) {
        let (session, what) = match event {
            Event::Swapped { session, graft, .. } => (session, Ok(graft)),
            Event::NotSwapped { session, why, .. } => (session, Err(why.text())),
            Event::Restarted { session } => {
                if let Some(life) = self.life_of(session) {
                    self.end(life, "the daemon at the other end was started anew", false);
                }
                return;
            }
            Event::Room { ends } => return self.tell_room(ends),
            _ => return,
        };
        let Some(life) = self.life_of(session) else { return };
        let Some(lease) = self.leases.get_mut(&life) else { return };
        match (lease.stage, what) {
            (Stage::Swapping(_), Ok(_)) if lease.is_own => {
                // What the other one sends from its `Ready` on is taken.
                let opened = self.seats.get_mut(&lease.ends).map(|seat| seat.lend(lease.user).map(drop));
                lease.stage = Stage::Going;
                lease.said = Some(Said::new(Say::Go { life }));
                lease.begin(runtime);
                if !matches!(opened, Some(Ok(()))) {
                    self.give_up(life, Why::Impossible, "its socket cannot be used");
                }
            }
            (Stage::Swapping(_), Ok(_)) => lease.stage = Stage::Swapping(true),
            (Stage::Swapping(_), Err(why)) if lease.is_own => self.give_up(life, Why::Unreachable, why),
            (Stage::Open, Ok(graft)) => {
                lease.graft.clone_from(graft);
                let by = lease.changing.take().unwrap_or(By::Other);
                lease.in_order &= self.offers.iter().any(|offer| offer.graft == *graft && offer.can_wait());
                let services = lease.services(&self.offers);
                let desk = lease.desk;
                info!(session, graft, ?by, "a session has changed");
                let word = Word::Changed { graft: graft.clone(), services, by };
                desk.into_iter().for_each(|desk| self.tell(desk, &word));
            }
            (Stage::Open, Err(why)) => {
                let by = lease.changing.take();
                let desk = lease.desk.filter(|_| by == Some(By::Application));
                desk.into_iter().for_each(|desk| self.refuse(desk, Why::Unreachable, why.to_owned()));
            }
            _ => {}
        }
    }

    /// The application may have another try.
    fn tell_room(&mut self, ends: &Ends) {
        let lease = self.leases.values().find(|lease| lease.ends == *ends && lease.stage == Stage::Open);
        let desk = lease.and_then(|lease| lease.desk);
        desk.into_iter().for_each(|desk| self.tell(desk, &Word::Room));
    }

    fn life_of(&self, session: &str) -> Option<u64> {
        let is_its = |lease: &Lease| {
            self.peers.get(lease.peer).is_some_and(|peer| peer.session_name(&lease.ends) == session)
        };
        self.leases.iter().find(|(_, lease)| is_its(lease)).map(|(life, _)| *life)
    }

    pub(super) fn renegotiate(&mut self, runtime: &mut Runtime, life: u64, want: Want) -> Result<(), Denied> {
        want.check().map_err(|reason| (Why::Malformed, reason))?;
        let Some(lease) = self.leases.get(&life).filter(|lease| lease.stage == Stage::Open) else {
            return Err((Why::Malformed, "the session is not open".to_owned()));
        };
        if lease.changing.is_some() {
            return Err((Why::Busy, "the session is being changed".to_owned()));
        }
        let (Some(peer), Some(far)) = (self.peers.get(lease.peer), self.fars.get(lease.peer)) else {
            return Ok(());
        };
        let offer = choose(&self.offers, &want, &far.path(), peer.cipher.is_some());
        let offer = offer.map_err(|refused| denied(&refused))?;
        if waits(&want, offer) && !lease.in_order {
            let reason = format!(
                "impossible: with graft {} messages are in order from a session's first one on: open another session",
                offer.graft
            );
            return Err((Why::Impossible, reason));
        }
        let graft = offer.graft.clone();
        if graft == lease.graft && want == lease.want {
            let reason = format!("redundant: the session has all of it by graft {graft}");
            return Err((Why::Redundant, reason));
        }
        self.change(runtime, life, graft, By::Application);
        self.leases.entry(life).and_modify(|lease| {
            lease.want = want;
            lease.quality.forget();
        });
        Ok(())
    }

    /// Begins when nothing else is under way.
    pub(super) fn change(&mut self, runtime: &mut Runtime, life: u64, graft: String, by: By) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        if graft == lease.graft {
            let services = lease.services(&self.offers);
            let desk = lease.desk;
            let word = Word::Changed { graft, services, by };
            return desk.into_iter().for_each(|desk| self.tell(desk, &word));
        }
        (lease.changing, lease.quality.next) = (Some(by), Some(graft));
        self.try_change(runtime, life);
    }

    pub(super) fn try_change(&mut self, runtime: &mut Runtime, life: u64) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        let Some(graft) = lease.quality.next.clone() else { return };
        match runtime.see(&lease.ends) {
            Some(seen) if seen.is_idle => {}
            _ => return,
        }
        lease.quality.next = None;
        let Some(peer) = self.peers.get(lease.peer) else { return };
        let name = peer.session_name(&lease.ends);
        if let Err(error) = runtime.swap(&name, &graft) {
            let (by, desk) = (lease.changing.take(), lease.desk);
            warn!(session = name, graft, "not changed: {error}");
            let desk = desk.filter(|_| by == Some(By::Application));
            desk.into_iter().for_each(|desk| self.refuse(desk, Why::Impossible, error.to_string()));
        }
    }

    pub(super) fn finish(&mut self, life: u64, messages: u32) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        if lease.sent.is_none() && lease.stage == Stage::Open {
            lease.sent = Some(messages);
            lease.finish = Some(Said::new(Say::Finish { life, messages }));
        }
    }

    pub(super) fn tell_finish(&mut self, life: u64, messages: u32) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        if lease.stage != Stage::Open || std::mem::replace(&mut lease.has_told_finish, true) {
            return;
        }
        let desk = lease.desk;
        desk.into_iter().for_each(|desk| self.tell(desk, &Word::Finished { messages }));
    }

    /// Who asks for it hears each second what has come here; others now and then that the session is known here.
    pub(super) fn report(&mut self, runtime: &mut Runtime) {
        self.reports = self.reports.wrapping_add(1);
        let turn = self.reports % REPORT_EVERY;
        let open = self.leases.iter().filter(|(_, lease)| lease.stage == Stage::Open);
        for (life, lease) in open {
            let asks = lease.want.qos.max_loss_percent.is_some();
            if !lease.is_asked && !asks && life % REPORT_EVERY != turn {
                continue;
            }
            let delivered = match lease.is_asked.then(|| runtime.traffic(&lease.ends)) {
                Some(Ok(Some(traffic))) => Some(lease.quality.delivered(&traffic)),
                _ => None,
            };
            let say = Say::Report { life: *life, delivered, asks };
            self.fars.get(lease.peer).into_iter().for_each(|far| far.say(&say));
        }
    }

    /// A peer that says nothing has gone, or one of the addresses has.
    pub(super) fn look_at_peers(&mut self, runtime: &mut Runtime) {
        let silent = |lease: &Lease| self.fars.get(lease.peer).is_some_and(|far| far.silence() > SILENCE);
        let words = "nothing was heard of the other end for 10 s: it has gone, or an address has changed";
        self.end_those(runtime, &self.open(silent), words);
    }

    /// One of this host's is not there any more: nothing leaves from it.
    pub(super) fn look_at_addresses(&mut self, runtime: &mut Runtime) {
        let gone = |lease: &Lease| !is_here(lease.ends.local);
        self.end_those(
            runtime,
            &self.open(gone),
            "an address has changed: this host does not have the session's any more",
        );
    }

    fn open(&self, wanted: impl Fn(&Lease) -> bool) -> Vec<u64> {
        let open = self.leases.iter().filter(|(_, lease)| lease.stage == Stage::Open && wanted(lease));
        open.map(|(life, _)| *life).collect()
    }

    /// With what may not have come.
    fn end_those(&mut self, runtime: &mut Runtime, lives: &[u64], words: &str) {
        for life in lives {
            let ends = self.leases.get(life).map(|lease| lease.ends);
            let owed = ends.and_then(|ends| runtime.under_way(&ends).ok().flatten()).filter(|owed| *owed > 0);
            let owed = owed.map_or_else(String::new, |owed| {
                format!("; of what was sent last, {owed} datagrams have not been acknowledged")
            });
            self.end(*life, &format!("{words}{owed}"), false);
        }
    }
}
