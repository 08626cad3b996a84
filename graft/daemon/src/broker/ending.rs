//! Ends sessions, and enforces the time limits of their states.

use std::time::{Duration, Instant};

use millrace_graft::packet::{CANONICAL, PacketRuntime};
use millrace_messages::{SessionRefusal, wire::BrokerReply};
use tracing::warn;

use super::{
    SessionBroker,
    client::{ClientConnection, ClientRole},
    client_session::{PendingMessage, SessionStage, short},
    peer_message::PeerMessage,
};

/// Time after which an attempt to open a session is given up.
const PATIENCE: Duration = Duration::from_secs(8);
/// Time for an application to read the datagrams that had arrived when its session ended.
const LET_GO: Duration = Duration::from_secs(10);

impl SessionBroker {
    /// Removes the connection of an application that has disconnected, and ends the application's session.
    pub(super) fn leave(&mut self, client: u64) {
        let Some(gone) = self.clients.remove(&client) else { return };
        if let ClientRole::Session(id) = gone.role {
            // The reason tells the application on the other host whether this one had finished sending.
            let has_finished = self.sessions.get(&id).is_some_and(|session| session.sent.is_some());
            let reason = if has_finished {
                "the other end has closed it"
            } else {
                "the application at the other end has gone"
            };
            self.end_own(id, reason);
        }
    }

    /// Ends a session on behalf of this host, because its application has disconnected or the session could not be
    /// opened.
    pub(super) fn end_own(&mut self, id: u64, reason: &str) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let is_told = matches!(session.stage, SessionStage::Ending(_));
        let reason = short(reason);
        // A session that is already ending has sent its `Close`, or has received one.
        if !is_told {
            session.said =
                Some(PendingMessage::new(PeerMessage::Close { id, messages: session.sent, reason }));
        }
        // `Close` contains the number of messages that `Finish` would report, so `Finish` is not repeated.
        (session.client, session.finish) = (None, None);
        session.stage = SessionStage::Ending(Instant::now() + LET_GO);
        let taken_back =
            self.sockets.get_mut(&session.ends).map(super::pooled_socket::PooledSocket::take_back);
        if let Some(Err(error)) = taken_back {
            warn!("a pooled socket could not be shut down: {error}");
        }
    }

    /// Ends a session that the other host has ended (`is_told`), or whose peer is unreachable. For the time `LET_GO`
    /// the application can still read datagrams that have arrived.
    pub(super) fn end(&mut self, id: u64, reason: &str, is_told: bool) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let client = session.client;
        let stage = session.stage;
        session.stage = SessionStage::Ending(Instant::now() + LET_GO);
        session.finish = None;
        let say = PeerMessage::Close { id, messages: None, reason: short(reason) };
        // If the other host has ended the session, it needs no `Close` from this host.
        session.said = (!is_told).then(|| PendingMessage::new(say));
        match stage {
            SessionStage::Open => {
                let reply = BrokerReply::Closed { reason: reason.to_owned() };
                client.into_iter().for_each(|client| self.tell(client, &reply));
            }
            SessionStage::Ending(_) => {}
            _ if session.is_own => {
                session.client = None;
                let reason = reason.to_owned();
                client.into_iter().for_each(|client| {
                    self.clients.entry(client).and_modify(ClientConnection::finish);
                    self.refuse(client, SessionRefusal::Unreachable, reason.clone());
                });
            }
            // The listening application does not know of the session yet, so it is told nothing.
            _ => session.client = None,
        }
    }

    /// Gives up a session that could not be opened, and tells the application why.
    pub(super) fn give_up(&mut self, id: u64, why: SessionRefusal, reason: &str) {
        let own = self.sessions.get_mut(&id).filter(|session| session.is_own);
        if let Some(client) = own.and_then(|session| session.client.take()) {
            self.clients.entry(client).and_modify(ClientConnection::finish);
            self.refuse(client, why, reason.to_owned());
        }
        self.end_own(id, reason);
    }

    pub(super) fn tick_sessions(&mut self, runtime: &mut PacketRuntime, now: Instant) {
        let session_ids: Vec<_> = self.sessions.keys().copied().collect();
        for id in session_ids {
            let Some(session) = self.sessions.get_mut(&id) else { continue };
            let peer = session.peer;
            let said = session.said.iter_mut().chain(&mut session.finish);
            said.filter_map(|said| said.due_message(now)).for_each(|say| self.links.say(peer, say));
            match session.stage {
                SessionStage::Open => self.try_change(runtime, id),
                SessionStage::Ending(until) => {
                    // Until the time limit, the session is kept while the application's connection to the daemon is
                    // open, so that the application can still read datagrams.
                    let is_read = session.client.is_none_or(|client| !self.clients.contains_key(&client));
                    let is_over = is_read && session.said.is_none();
                    if now >= until || is_over {
                        self.let_go(id);
                    }
                }
                // Every state before `Open` has the same time limit.
                _ if now > session.since + PATIENCE => {
                    self.give_up(id, SessionRefusal::Unreachable, "the other end does not answer in time");
                }
                SessionStage::Waiting => self.swap(runtime, id),
                _ => {}
            }
        }
    }

    /// Removes an ended session and frees its pooled socket.
    fn let_go(&mut self, id: u64) {
        let Some(session) = self.sessions.remove(&id) else { return };
        self.watchdog.iter().for_each(|watchdog| watchdog.forget(&session.ends));
        if let Some(socket) = self.sockets.get_mut(&session.ends) {
            // Only the host that has opened the session changes the pooled socket back to the graft without functions.
            socket.is_restless = session.is_own;
            if let Err(error) = socket.take_back() {
                warn!("a pooled socket could not be shut down: {error}");
            }
        }
        session.client.and_then(|client| self.clients.remove(&client));
    }

    /// Changes free pooled sockets back to the graft that only frames datagrams, so that the functions of their last
    /// session stop.
    pub(super) fn rest(&mut self, runtime: &mut PacketRuntime) {
        for peer in &self.peers {
            for (ends, _) in peer.pooled_sockets() {
                let Some(socket) = self.sockets.get_mut(&ends).filter(|socket| socket.is_restless) else {
                    continue;
                };
                // The socket is left as it is if another session already uses it.
                if self.sessions.values().any(|session| session.ends == ends) {
                    continue;
                }
                let Some(seen) = runtime.see(&ends) else { continue };
                if seen.is_idle {
                    socket.is_restless = false;
                    // An error of the change is ignored: while the two hosts use different grafts for the socket, no
                    // datagram passes.
                    let _ = runtime.swap_anew(&peer.session_name(&ends), CANONICAL);
                }
            }
        }
    }
}
