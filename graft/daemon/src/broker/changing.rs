//! Open sessions: changes of requirements and of the graft, reports on delivered datagrams, and detection of ends
//! that are gone.

use millrace_graft::packet::{PacketEvent, PacketRuntime, choose::choose};
use millrace_graft_kernel::packet::SessionEnds;
use millrace_messages::{ChangeOrigin, SessionRefusal, Want, wire::BrokerReply};
use tracing::{info, warn};

use super::{
    SessionBroker,
    addresses::is_here,
    client_session::{ClientSession, ClientSessionStage, Denied, PendingMessage, SILENCE, denied, waits},
    peer_message::PeerMessage,
};

/// Interval in seconds of reports on a session if no end has asked for any.
const REPORT_EVERY: u64 = 8;

impl SessionBroker {
    pub(super) fn happened(&mut self, runtime: &mut PacketRuntime, event: &PacketEvent) {
        let (session, what) = match event {
            PacketEvent::Swapped { session, graft, .. } => (session, Ok(graft)),
            PacketEvent::NotSwapped { session, why, .. } => (session, Err(why.text())),
            PacketEvent::Restarted { session } => {
                if let Some(session_id) = self.session_id_of(session) {
                    self.end(session_id, "the daemon at the other end was restarted", false);
                }
                return;
            }
            PacketEvent::Room { ends } => return self.tell_room(ends),
            _ => return,
        };
        let Some(session_id) = self.session_id_of(session) else { return };
        let Some(client_session) = self.client_sessions.get_mut(&session_id) else { return };
        match (client_session.stage, what) {
            (ClientSessionStage::Swapping(_), Ok(_)) if client_session.is_own => {
                // The socket is opened before `Go` is sent, so that it receives what the other application
                // sends after `Ready`.
                let opened = self
                    .pooled_sockets
                    .get_mut(&client_session.ends)
                    .map(|pooled_socket| pooled_socket.lend(client_session.user).map(drop));
                client_session.stage = ClientSessionStage::Going;
                client_session.said = Some(PendingMessage::new(PeerMessage::Go { session_id }));
                client_session.begin(runtime);
                if !matches!(opened, Some(Ok(()))) {
                    self.give_up(session_id, SessionRefusal::Impossible, "the pooled socket cannot be used");
                }
            }
            // The accepting end has changed to the graft, and waits for `Go`.
            (ClientSessionStage::Swapping(_), Ok(_)) => {
                client_session.stage = ClientSessionStage::Swapping(true)
            }
            (ClientSessionStage::Swapping(_), Err(why)) if client_session.is_own => {
                self.give_up(session_id, SessionRefusal::Unreachable, why)
            }
            (ClientSessionStage::Open, Ok(graft)) => {
                client_session.graft.clone_from(graft);
                // A change that nobody here has asked for comes from the other end.
                let by = client_session.changing.take().unwrap_or(ChangeOrigin::Other);
                // The library can go on ordering messages only if the new graft retransmits all of them.
                client_session.in_order &=
                    self.offers.iter().any(|offer| offer.graft == *graft && offer.can_wait());
                let services = client_session.services(&self.offers);
                let client = client_session.client;
                info!(session, graft, ?by, "an open session uses another graft");
                let word = BrokerReply::Changed { graft: graft.clone(), services, by };
                client.into_iter().for_each(|client| self.tell(client, &word));
            }
            (ClientSessionStage::Open, Err(why)) => {
                let by = client_session.changing.take();
                // Only an application that has asked for the change learns that it failed.
                let client = client_session.client.filter(|_| by == Some(ChangeOrigin::Application));
                client
                    .into_iter()
                    .for_each(|client| self.refuse(client, SessionRefusal::Unreachable, why.to_owned()));
            }
            _ => {}
        }
    }

    /// Tells the application of an open session that its socket has room to send again.
    fn tell_room(&mut self, ends: &SessionEnds) {
        let client_session = self.client_sessions.values().find(|client_session| {
            client_session.ends == *ends && client_session.stage == ClientSessionStage::Open
        });
        let client = client_session.and_then(|client_session| client_session.client);
        client.into_iter().for_each(|client| self.tell(client, &BrokerReply::Room));
    }

    fn session_id_of(&self, session: &str) -> Option<u64> {
        let is_its = |client_session: &ClientSession| {
            self.peers
                .get(client_session.peer)
                .is_some_and(|peer| peer.session_name(&client_session.ends) == session)
        };
        self.client_sessions
            .iter()
            .find(|(_, client_session)| is_its(client_session))
            .map(|(session_id, _)| *session_id)
    }

    pub(super) fn renegotiate(
        &mut self,
        runtime: &mut PacketRuntime,
        session_id: u64,
        want: Want,
    ) -> Result<(), Denied> {
        want.check().map_err(|reason| (SessionRefusal::Malformed, reason))?;
        let Some(client_session) = self
            .client_sessions
            .get(&session_id)
            .filter(|client_session| client_session.stage == ClientSessionStage::Open)
        else {
            return Err((SessionRefusal::Malformed, "the session is not open".to_owned()));
        };
        if client_session.changing.is_some() {
            return Err((SessionRefusal::Busy, "the session is being changed".to_owned()));
        }
        let (Some(peer), Some(far)) =
            (self.peers.get(client_session.peer), self.links.fars.get(client_session.peer))
        else {
            return Ok(());
        };
        let offer = choose(&self.offers, &want, &far.path(), peer.cipher.is_some());
        let offer = offer.map_err(|refused| denied(&refused))?;
        // Messages that were sent without order before cannot be ordered any more.
        if waits(&want, offer) && !client_session.in_order {
            let reason = format!(
                "impossible: with graft {} messages are in order from a session's first one on: open another session",
                offer.graft
            );
            return Err((SessionRefusal::Impossible, reason));
        }
        let graft = offer.graft.clone();
        if graft == client_session.graft && want == client_session.want {
            let reason = format!("redundant: the session already has all of it by graft {graft}");
            return Err((SessionRefusal::Redundant, reason));
        }
        self.change(runtime, session_id, graft, ChangeOrigin::Application);
        self.client_sessions.entry(session_id).and_modify(|client_session| {
            client_session.want = want;
            client_session.quality.forget();
        });
        Ok(())
    }

    /// Requests a change of the graft, which begins when no other change is under way.
    pub(super) fn change(
        &mut self,
        runtime: &mut PacketRuntime,
        session_id: u64,
        graft: String,
        by: ChangeOrigin,
    ) {
        let Some(client_session) = self.client_sessions.get_mut(&session_id) else { return };
        if graft == client_session.graft {
            let services = client_session.services(&self.offers);
            let client = client_session.client;
            let word = BrokerReply::Changed { graft, services, by };
            return client.into_iter().for_each(|client| self.tell(client, &word));
        }
        (client_session.changing, client_session.quality.next) = (Some(by), Some(graft));
        self.try_change(runtime, session_id);
    }

    pub(super) fn try_change(&mut self, runtime: &mut PacketRuntime, session_id: u64) {
        let Some(client_session) = self.client_sessions.get_mut(&session_id) else { return };
        let Some(graft) = client_session.quality.next.clone() else { return };
        // A session makes one change at a time. If another one is under way, a later tick tries again.
        match runtime.see(&client_session.ends) {
            Some(seen) if seen.is_idle => {}
            _ => return,
        }
        client_session.quality.next = None;
        let Some(peer) = self.peers.get(client_session.peer) else { return };
        let name = peer.session_name(&client_session.ends);
        if let Err(error) = runtime.swap(&name, &graft) {
            let by = client_session.changing.take();
            let client = client_session.client;
            warn!(session = name, graft, "the graft of an open session cannot be changed: {error}");
            let client = client.filter(|_| by == Some(ChangeOrigin::Application));
            client
                .into_iter()
                .for_each(|client| self.refuse(client, SessionRefusal::Impossible, error.to_string()));
        }
    }

    pub(super) fn finish(&mut self, session_id: u64, messages: u32) {
        let Some(client_session) = self.client_sessions.get_mut(&session_id) else { return };
        // Only the first call counts.
        if client_session.sent.is_none() && client_session.stage == ClientSessionStage::Open {
            client_session.sent = Some(messages);
            client_session.finish = Some(PendingMessage::new(PeerMessage::Finish { session_id, messages }));
        }
    }

    pub(super) fn tell_finish(&mut self, session_id: u64, messages: u32) {
        let Some(client_session) = self.client_sessions.get_mut(&session_id) else { return };
        // The application is told only once.
        if client_session.stage != ClientSessionStage::Open
            || std::mem::replace(&mut client_session.has_told_finish, true)
        {
            return;
        }
        let client = client_session.client;
        client.into_iter().for_each(|client| self.tell(client, &BrokerReply::Finished { messages }));
    }

    /// Sends a report of each open session to its peer. An end that has asked for reports gets one each second, with
    /// the number of delivered datagrams. Any other end gets one every `REPORT_EVERY` seconds, which only says that
    /// the session exists here.
    pub(super) fn report(&mut self, runtime: &mut PacketRuntime) {
        self.reports = self.reports.wrapping_add(1);
        let turn = self.reports % REPORT_EVERY;
        let open = self
            .client_sessions
            .iter()
            .filter(|(_, client_session)| client_session.stage == ClientSessionStage::Open);
        for (session_id, client_session) in open {
            let asks = client_session.want.qos.max_loss_percent.is_some();
            // The session IDs spread these reports evenly over the seconds.
            if !client_session.is_asked && !asks && session_id % REPORT_EVERY != turn {
                continue;
            }
            let delivered = match client_session.is_asked.then(|| runtime.traffic(&client_session.ends)) {
                Some(Ok(Some(traffic))) => Some(client_session.quality.delivered(&traffic)),
                _ => None,
            };
            let say = PeerMessage::Report { session_id: *session_id, delivered, asks };
            self.links.fars.get(client_session.peer).into_iter().for_each(|far| far.say(&say));
        }
    }

    /// Ends the open sessions with peers whose daemon was silent for `SILENCE`.
    pub(super) fn look_at_peers(&mut self, runtime: &mut PacketRuntime) {
        let silent = |client_session: &ClientSession| {
            self.links.fars.get(client_session.peer).is_some_and(|far| far.silence() > SILENCE)
        };
        let words =
            "no message came from the other end's daemon for 10 s: it is gone, or an address has changed";
        self.end_those(runtime, &self.open(silent), words);
    }

    /// Ends sessions whose local address was removed from this host.
    pub(super) fn look_at_addresses(&mut self, runtime: &mut PacketRuntime) {
        let gone = |client_session: &ClientSession| !is_here(client_session.ends.local);
        self.end_those(
            runtime,
            &self.open(gone),
            "an address has changed: this host does not have the session's any more",
        );
    }

    fn open(&self, wanted: impl Fn(&ClientSession) -> bool) -> Vec<u64> {
        let open = self.client_sessions.iter().filter(|(_, client_session)| {
            client_session.stage == ClientSessionStage::Open && wanted(client_session)
        });
        open.map(|(session_id, _)| *session_id).collect()
    }

    /// Ends these sessions. The reason says how many sent datagrams were not acknowledged.
    fn end_those(&mut self, runtime: &mut PacketRuntime, lives: &[u64], words: &str) {
        for session_id in lives {
            let ends = self.client_sessions.get(session_id).map(|client_session| client_session.ends);
            let owed = ends.and_then(|ends| runtime.under_way(&ends).ok().flatten()).filter(|owed| *owed > 0);
            let owed = owed.map_or_else(String::new, |owed| {
                format!("; of what was sent last, {owed} datagrams have not been acknowledged")
            });
            self.end(*session_id, &format!("{words}{owed}"), false);
        }
    }
}
