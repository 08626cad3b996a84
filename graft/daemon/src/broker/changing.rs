//! Open sessions: changes of requirements and of the graft, reports on delivered datagrams, and detection of ends
//! that are gone.

use millrace_graft::packet::{PacketEvent, PacketRuntime, choose::choose};
use millrace_graft_kernel::joint::SessionEnds;
use millrace_messages::{ChangeOrigin, SessionRefusal, Want, wire::BrokerReply};
use tracing::{info, warn};

use super::{
    SessionBroker,
    addresses::is_here,
    far::PeerMessage,
    lease::{Denied, Lease, LeaseStage, PendingMessage, SILENCE, denied, waits},
};

/// Interval in seconds of reports on a session if no end has asked for any.
const REPORT_EVERY: u64 = 8;

impl SessionBroker {
    pub(super) fn happened(&mut self, runtime: &mut PacketRuntime, event: &PacketEvent) {
        let (session, what) = match event {
            PacketEvent::Swapped { session, graft, .. } => (session, Ok(graft)),
            PacketEvent::NotSwapped { session, why, .. } => (session, Err(why.text())),
            PacketEvent::Restarted { session } => {
                if let Some(life) = self.life_of(session) {
                    self.end(life, "the daemon at the other end was restarted", false);
                }
                return;
            }
            PacketEvent::Room { ends } => return self.tell_room(ends),
            _ => return,
        };
        let Some(life) = self.life_of(session) else { return };
        let Some(lease) = self.leases.get_mut(&life) else { return };
        match (lease.stage, what) {
            (LeaseStage::Swapping(_), Ok(_)) if lease.is_own => {
                // The socket is opened before `Go` is sent, so that it receives what the other application
                // sends after `Ready`.
                let opened = self.seats.get_mut(&lease.ends).map(|seat| seat.lend(lease.user).map(drop));
                lease.stage = LeaseStage::Going;
                lease.said = Some(PendingMessage::new(PeerMessage::Go { life }));
                lease.begin(runtime);
                if !matches!(opened, Some(Ok(()))) {
                    self.give_up(life, SessionRefusal::Impossible, "the pooled socket cannot be used");
                }
            }
            // The accepting end has changed to the graft, and waits for `Go`.
            (LeaseStage::Swapping(_), Ok(_)) => lease.stage = LeaseStage::Swapping(true),
            (LeaseStage::Swapping(_), Err(why)) if lease.is_own => {
                self.give_up(life, SessionRefusal::Unreachable, why)
            }
            (LeaseStage::Open, Ok(graft)) => {
                lease.graft.clone_from(graft);
                // A change that nobody here has asked for comes from the other end.
                let by = lease.changing.take().unwrap_or(ChangeOrigin::Other);
                // The library can go on ordering messages only if the new graft retransmits all of them.
                lease.in_order &= self.offers.iter().any(|offer| offer.graft == *graft && offer.can_wait());
                let services = lease.services(&self.offers);
                let desk = lease.desk;
                info!(session, graft, ?by, "an open session uses another graft");
                let word = BrokerReply::Changed { graft: graft.clone(), services, by };
                desk.into_iter().for_each(|desk| self.tell(desk, &word));
            }
            (LeaseStage::Open, Err(why)) => {
                let by = lease.changing.take();
                // Only an application that has asked for the change learns that it failed.
                let desk = lease.desk.filter(|_| by == Some(ChangeOrigin::Application));
                desk.into_iter()
                    .for_each(|desk| self.refuse(desk, SessionRefusal::Unreachable, why.to_owned()));
            }
            _ => {}
        }
    }

    /// Tells the application of an open session that its socket has room to send again.
    fn tell_room(&mut self, ends: &SessionEnds) {
        let lease = self.leases.values().find(|lease| lease.ends == *ends && lease.stage == LeaseStage::Open);
        let desk = lease.and_then(|lease| lease.desk);
        desk.into_iter().for_each(|desk| self.tell(desk, &BrokerReply::Room));
    }

    fn life_of(&self, session: &str) -> Option<u64> {
        let is_its = |lease: &Lease| {
            self.peers.get(lease.peer).is_some_and(|peer| peer.session_name(&lease.ends) == session)
        };
        self.leases.iter().find(|(_, lease)| is_its(lease)).map(|(life, _)| *life)
    }

    pub(super) fn renegotiate(
        &mut self,
        runtime: &mut PacketRuntime,
        life: u64,
        want: Want,
    ) -> Result<(), Denied> {
        want.check().map_err(|reason| (SessionRefusal::Malformed, reason))?;
        let Some(lease) = self.leases.get(&life).filter(|lease| lease.stage == LeaseStage::Open) else {
            return Err((SessionRefusal::Malformed, "the session is not open".to_owned()));
        };
        if lease.changing.is_some() {
            return Err((SessionRefusal::Busy, "the session is being changed".to_owned()));
        }
        let (Some(peer), Some(far)) = (self.peers.get(lease.peer), self.links.fars.get(lease.peer)) else {
            return Ok(());
        };
        let offer = choose(&self.offers, &want, &far.path(), peer.cipher.is_some());
        let offer = offer.map_err(|refused| denied(&refused))?;
        // Messages that were sent without order before cannot be ordered any more.
        if waits(&want, offer) && !lease.in_order {
            let reason = format!(
                "impossible: with graft {} messages are in order from a session's first one on: open another session",
                offer.graft
            );
            return Err((SessionRefusal::Impossible, reason));
        }
        let graft = offer.graft.clone();
        if graft == lease.graft && want == lease.want {
            let reason = format!("redundant: the session already has all of it by graft {graft}");
            return Err((SessionRefusal::Redundant, reason));
        }
        self.change(runtime, life, graft, ChangeOrigin::Application);
        self.leases.entry(life).and_modify(|lease| {
            lease.want = want;
            lease.quality.forget();
        });
        Ok(())
    }

    /// Requests a change of the graft, which begins when no other change is under way.
    pub(super) fn change(&mut self, runtime: &mut PacketRuntime, life: u64, graft: String, by: ChangeOrigin) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        if graft == lease.graft {
            let services = lease.services(&self.offers);
            let desk = lease.desk;
            let word = BrokerReply::Changed { graft, services, by };
            return desk.into_iter().for_each(|desk| self.tell(desk, &word));
        }
        (lease.changing, lease.quality.next) = (Some(by), Some(graft));
        self.try_change(runtime, life);
    }

    pub(super) fn try_change(&mut self, runtime: &mut PacketRuntime, life: u64) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        let Some(graft) = lease.quality.next.clone() else { return };
        // A session makes one change at a time. If another one is under way, a later tick tries again.
        match runtime.see(&lease.ends) {
            Some(seen) if seen.is_idle => {}
            _ => return,
        }
        lease.quality.next = None;
        let Some(peer) = self.peers.get(lease.peer) else { return };
        let name = peer.session_name(&lease.ends);
        if let Err(error) = runtime.swap(&name, &graft) {
            let by = lease.changing.take();
            let desk = lease.desk;
            warn!(session = name, graft, "the graft of an open session cannot be changed: {error}");
            let desk = desk.filter(|_| by == Some(ChangeOrigin::Application));
            desk.into_iter()
                .for_each(|desk| self.refuse(desk, SessionRefusal::Impossible, error.to_string()));
        }
    }

    pub(super) fn finish(&mut self, life: u64, messages: u32) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        // Only the first call counts.
        if lease.sent.is_none() && lease.stage == LeaseStage::Open {
            lease.sent = Some(messages);
            lease.finish = Some(PendingMessage::new(PeerMessage::Finish { life, messages }));
        }
    }

    pub(super) fn tell_finish(&mut self, life: u64, messages: u32) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        // The application is told only once.
        if lease.stage != LeaseStage::Open || std::mem::replace(&mut lease.has_told_finish, true) {
            return;
        }
        let desk = lease.desk;
        desk.into_iter().for_each(|desk| self.tell(desk, &BrokerReply::Finished { messages }));
    }

    /// Sends a report of each open session to its peer. An end that has asked for reports gets one each second, with
    /// the number of delivered datagrams. Any other end gets one every `REPORT_EVERY` seconds, which only says that
    /// the session exists here.
    pub(super) fn report(&mut self, runtime: &mut PacketRuntime) {
        self.reports = self.reports.wrapping_add(1);
        let turn = self.reports % REPORT_EVERY;
        let open = self.leases.iter().filter(|(_, lease)| lease.stage == LeaseStage::Open);
        for (life, lease) in open {
            let asks = lease.want.qos.max_loss_percent.is_some();
            // The session IDs spread these reports evenly over the seconds.
            if !lease.is_asked && !asks && life % REPORT_EVERY != turn {
                continue;
            }
            let delivered = match lease.is_asked.then(|| runtime.traffic(&lease.ends)) {
                Some(Ok(Some(traffic))) => Some(lease.quality.delivered(&traffic)),
                _ => None,
            };
            let say = PeerMessage::Report { life: *life, delivered, asks };
            self.links.fars.get(lease.peer).into_iter().for_each(|far| far.say(&say));
        }
    }

    /// Ends the open sessions with peers whose daemon was silent for `SILENCE`.
    pub(super) fn look_at_peers(&mut self, runtime: &mut PacketRuntime) {
        let silent =
            |lease: &Lease| self.links.fars.get(lease.peer).is_some_and(|far| far.silence() > SILENCE);
        let words =
            "no message came from the other end's daemon for 10 s: it is gone, or an address has changed";
        self.end_those(runtime, &self.open(silent), words);
    }

    /// Ends sessions whose local address was removed from this host.
    pub(super) fn look_at_addresses(&mut self, runtime: &mut PacketRuntime) {
        let gone = |lease: &Lease| !is_here(lease.ends.local);
        self.end_those(
            runtime,
            &self.open(gone),
            "an address has changed: this host does not have the session's any more",
        );
    }

    fn open(&self, wanted: impl Fn(&Lease) -> bool) -> Vec<u64> {
        let open = self.leases.iter().filter(|(_, lease)| lease.stage == LeaseStage::Open && wanted(lease));
        open.map(|(life, _)| *life).collect()
    }

    /// Ends these sessions. The reason says how many sent datagrams were not acknowledged.
    fn end_those(&mut self, runtime: &mut PacketRuntime, lives: &[u64], words: &str) {
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
