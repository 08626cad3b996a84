//! Open sessions: changes of requirements and of the graft, reports on delivered datagrams, and detection of
//! unreachable peers.

use millrace_graft::packet::{PacketEvent, PacketRuntime, choose::choose};
use millrace_graft_kernel::packet::SessionEnds;
use millrace_messages::{ChangeOrigin, SessionRefusal, Want, wire::BrokerReply};
use tracing::{info, warn};

use super::{
    SessionBroker,
    addresses::is_here,
    client_session::{ClientSession, Denied, PendingMessage, SILENCE, SessionStage, denied, waits},
    peer_message::PeerMessage,
};

/// Interval in seconds of reports on a session whose peer has not asked for reports.
const REPORT_EVERY: u64 = 8;

impl SessionBroker {
    pub(super) fn happened(&mut self, runtime: &mut PacketRuntime, event: &PacketEvent) {
        let (name, what) = match event {
            PacketEvent::Swapped { session: name, graft, .. } => (name, Ok(graft)),
            PacketEvent::NotSwapped { session: name, why, .. } => (name, Err(why.text())),
            PacketEvent::Restarted { session: name } => {
                if let Some(id) = self.session_id_of(name) {
                    self.end(id, "the daemon at the other end was restarted", false);
                }
                return;
            }
            PacketEvent::Room { ends } => return self.tell_room(ends),
            _ => return,
        };
        let Some(id) = self.session_id_of(name) else { return };
        let Some(session) = self.sessions.get_mut(&id) else { return };
        match (session.stage, what) {
            (SessionStage::Swapping(_), Ok(_)) if session.is_own => {
                // The pooled socket starts to receive before `Go` is sent, so that it gets what the other application
                // sends after `Ready`.
                let opened =
                    self.sockets.get_mut(&session.ends).map(|socket| socket.lend(session.user).map(drop));
                session.stage = SessionStage::Going;
                session.said = Some(PendingMessage::new(PeerMessage::Go { id }));
                session.begin(runtime);
                if !matches!(opened, Some(Ok(()))) {
                    self.give_up(id, SessionRefusal::Impossible, "the pooled socket cannot be used");
                }
            }
            // This host, which accepts the session, has changed to the graft. It waits for the message `Go` of the host
            // that opens the session.
            (SessionStage::Swapping(_), Ok(_)) => session.stage = SessionStage::Swapping(true),
            (SessionStage::Swapping(_), Err(why)) if session.is_own => {
                self.give_up(id, SessionRefusal::Unreachable, why)
            }
            (SessionStage::Open, Ok(graft)) => {
                session.graft.clone_from(graft);
                // If neither an application nor a rule on this host has requested the change of the graft, the other
                // host has requested it.
                let by = session.changing.take().unwrap_or(ChangeOrigin::Other);
                // The application's client library can continue to deliver messages in order only if the new graft
                // retransmits lost ones.
                session.in_order &= self.offers.iter().any(|offer| offer.graft == *graft && offer.can_wait());
                let services = session.services(&self.offers);
                let client = session.client;
                info!(session = name, graft, ?by, "changed the graft of an open session");
                let reply = BrokerReply::Changed { graft: graft.clone(), services, by };
                client.into_iter().for_each(|client| self.tell(client, &reply));
            }
            (SessionStage::Open, Err(why)) => {
                let by = session.changing.take();
                // The application is told that the change of the graft failed only if it has requested that change.
                let client = session.client.filter(|_| by == Some(ChangeOrigin::Application));
                client
                    .into_iter()
                    .for_each(|client| self.refuse(client, SessionRefusal::Unreachable, why.to_owned()));
            }
            _ => {}
        }
    }

    /// Tells the application of an open session that it can send again.
    fn tell_room(&mut self, ends: &SessionEnds) {
        let session = self
            .sessions
            .values()
            .find(|session| session.ends == *ends && session.stage == SessionStage::Open);
        let client = session.and_then(|session| session.client);
        client.into_iter().for_each(|client| self.tell(client, &BrokerReply::Room));
    }

    fn session_id_of(&self, name: &str) -> Option<u64> {
        let is_its = |session: &ClientSession| {
            self.peers.get(session.peer).is_some_and(|peer| peer.session_name(&session.ends) == name)
        };
        self.sessions.iter().find(|(_, session)| is_its(session)).map(|(id, _)| *id)
    }

    pub(super) fn renegotiate(
        &mut self,
        runtime: &mut PacketRuntime,
        id: u64,
        want: Want,
    ) -> Result<(), Denied> {
        want.check().map_err(|reason| (SessionRefusal::Malformed, reason))?;
        let Some(session) = self.sessions.get(&id).filter(|session| session.stage == SessionStage::Open)
        else {
            return Err((SessionRefusal::Malformed, "the session is not open".to_owned()));
        };
        if session.changing.is_some() {
            return Err((SessionRefusal::Busy, "the session is being changed".to_owned()));
        }
        let Some(peer) = self.peers.get(session.peer) else { return Ok(()) };
        let offer = choose(&self.offers, &want, &self.links.path(session.peer), peer.cipher.is_some());
        let offer = offer.map_err(|refused| denied(&refused))?;
        // The client library can put messages in order only from a session's first message on, so it cannot start in
        // the middle of the session.
        if waits(&want, offer) && !session.in_order {
            let reason = format!(
                "impossible: with graft {} messages are in order from a session's first one on: open another session",
                offer.graft
            );
            return Err((SessionRefusal::Impossible, reason));
        }
        let graft = offer.graft.clone();
        if graft == session.graft && want == session.want {
            let reason = format!("redundant: the session already has all of it by graft {graft}");
            return Err((SessionRefusal::Redundant, reason));
        }
        self.change(runtime, id, graft, ChangeOrigin::Application);
        self.sessions.entry(id).and_modify(|session| {
            session.want = want;
            session.quality.forget();
        });
        Ok(())
    }

    /// Requests a change of the session's graft, which begins when no other change is in progress.
    pub(super) fn change(&mut self, runtime: &mut PacketRuntime, id: u64, graft: String, by: ChangeOrigin) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if graft == session.graft {
            let services = session.services(&self.offers);
            let client = session.client;
            let reply = BrokerReply::Changed { graft, services, by };
            return client.into_iter().for_each(|client| self.tell(client, &reply));
        }
        (session.changing, session.quality.next) = (Some(by), Some(graft));
        self.try_change(runtime, id);
    }

    pub(super) fn try_change(&mut self, runtime: &mut PacketRuntime, id: u64) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let Some(graft) = session.quality.next.clone() else { return };
        // A session changes its graft only once at a time. If another change is in progress, this one is tried again at
        // the next periodic check.
        match runtime.see(&session.ends) {
            Some(seen) if seen.is_idle => {}
            _ => return,
        }
        session.quality.next = None;
        let Some(peer) = self.peers.get(session.peer) else { return };
        let name = peer.session_name(&session.ends);
        if let Err(error) = runtime.swap(&name, &graft) {
            let by = session.changing.take();
            let client = session.client;
            warn!(session = name, graft, "the graft of an open session cannot be changed: {error}");
            let client = client.filter(|_| by == Some(ChangeOrigin::Application));
            client
                .into_iter()
                .for_each(|client| self.refuse(client, SessionRefusal::Impossible, error.to_string()));
        }
    }

    pub(super) fn finish(&mut self, id: u64, messages: u32) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        // The application reports how many messages it has sent when it finishes sending. Further such reports are
        // ignored.
        if session.sent.is_none() && session.stage == SessionStage::Open {
            session.sent = Some(messages);
            session.finish = Some(PendingMessage::new(PeerMessage::Finish { id, messages }));
        }
    }

    pub(super) fn tell_finish(&mut self, id: u64, messages: u32) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        // The application is told at most once that the other end has finished sending.
        if session.stage != SessionStage::Open || std::mem::replace(&mut session.has_told_finish, true) {
            return;
        }
        let client = session.client;
        client.into_iter().for_each(|client| self.tell(client, &BrokerReply::Finished { messages }));
    }

    /// Sends the peer a report on each open session. A peer that has asked for reports gets one each second, with the
    /// number of delivered datagrams. Any other peer gets one every `REPORT_EVERY` seconds, which only says that the
    /// session still exists on this host.
    pub(super) fn report(&mut self, runtime: &mut PacketRuntime) {
        self.reports = self.reports.wrapping_add(1);
        let turn = self.reports % REPORT_EVERY;
        let open = self.sessions.iter().filter(|(_, session)| session.stage == SessionStage::Open);
        for (id, session) in open {
            let asks = session.want.qos.max_loss_percent.is_some();
            // The session ID determines in which second a session's report is sent, so that the reports are spread
            // evenly.
            if !session.is_asked && !asks && id % REPORT_EVERY != turn {
                continue;
            }
            let delivered = match session.is_asked.then(|| runtime.traffic(&session.ends)) {
                Some(Ok(Some(traffic))) => Some(session.quality.delivered(&traffic)),
                _ => None,
            };
            let say = PeerMessage::Report { id: *id, delivered, asks };
            self.links.say(session.peer, &say);
        }
    }

    /// Ends the open sessions with each peer whose daemon was silent for `SILENCE`.
    pub(super) fn look_at_peers(&mut self, runtime: &mut PacketRuntime) {
        let silent = |session: &ClientSession| self.links.is_silent(session.peer, SILENCE);
        let reason =
            "no message came from the other end's daemon for 10 s: it is gone, or an address has changed";
        self.end_those(runtime, &self.open(silent), reason);
    }

    /// Ends sessions whose local address was removed from this host.
    pub(super) fn look_at_addresses(&mut self, runtime: &mut PacketRuntime) {
        let gone = |session: &ClientSession| !is_here(session.ends.local);
        self.end_those(
            runtime,
            &self.open(gone),
            "an address has changed: this host does not have the session's any more",
        );
    }

    fn open(&self, wanted: impl Fn(&ClientSession) -> bool) -> Vec<u64> {
        let open = self
            .sessions
            .iter()
            .filter(|(_, session)| session.stage == SessionStage::Open && wanted(session));
        open.map(|(id, _)| *id).collect()
    }

    /// Ends the given sessions. Both applications get a reason, which says how many sent datagrams were not
    /// acknowledged.
    fn end_those(&mut self, runtime: &mut PacketRuntime, session_ids: &[u64], reason: &str) {
        for id in session_ids {
            let ends = self.sessions.get(id).map(|session| session.ends);
            let owed = ends.and_then(|ends| runtime.under_way(&ends).ok().flatten()).filter(|owed| *owed > 0);
            let owed = owed.map_or_else(String::new, |owed| {
                format!("; of what was sent last, {owed} datagrams have not been acknowledged")
            });
            self.end(*id, &format!("{reason}{owed}"), false);
        }
    }
}
