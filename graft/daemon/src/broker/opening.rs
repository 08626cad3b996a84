//! Opens sessions: from the first message about a session until the applications on both hosts have their sockets.

use std::{os::fd::AsFd, time::Instant};

use millrace_base::control::ControlEnd;
use millrace_graft::packet::{PacketRuntime, choose::choose};
use millrace_graft_kernel::packet::SessionEnds;
use millrace_messages::{OpenedSession, SessionRefusal, Want, wire::BrokerReply};
use ring::rand::{SecureRandom as _, SystemRandom};
use tracing::info;

use super::{
    SessionBroker,
    client::{ClientConnection, ClientRole},
    client_session::{AGAIN, ClientSession, Denied, PendingMessage, SessionStage, denied, insert, waits},
    line::ClientLine,
    peer_message::PeerMessage,
};

impl SessionBroker {
    /// Opens a session that an application of this host requests.
    pub(super) fn begin(
        &mut self,
        runtime: &mut PacketRuntime,
        client: u64,
        peer: usize,
        service: String,
        want: Want,
    ) -> Result<(), Denied> {
        let Some(found) = self.peers.get(peer) else { return Ok(()) };
        let offer = choose(&self.offers, &want, &self.links.path(peer), found.cipher.is_some());
        let offer = offer.map_err(|refused| denied(&refused))?;
        let graft = offer.graft.clone();
        let in_order = waits(&want, offer);
        // `u32::MAX` stands for an unknown user, since the kernel assigns it to nobody.
        let user = self.clients.get(&client).map_or(u32::MAX, |client| client.caller.user);
        self.check_share(peer, user)?;
        let ends = self.free_socket(runtime, peer, None)?;
        let id = random()?;
        let say = PeerMessage::Open { id, port: ends.local.port(), service: service.clone(), in_order };
        let session = ClientSession {
            stage: SessionStage::Asking,
            is_own: true,
            graft,
            want,
            in_order,
            said: Some(PendingMessage::new(say)),
            ..ClientSession::offered(peer, ends, service, client, user)
        };
        insert(&mut self.sessions, id, session)?;
        self.clients.entry(client).and_modify(|client| client.role = ClientRole::Session(id));
        Ok(())
    }

    fn check_share(&mut self, peer: usize, user: u32) -> Result<(), Denied> {
        let Some(found) = self.peers.get(peer) else { return Ok(()) };
        let most = found.sessions_per_user;
        let used =
            self.sessions.values().filter(|session| session.peer == peer && session.user == user).count();
        let ours: Vec<_> = found.pooled_sockets().map(|(ends, _)| ends).collect();
        // A socket that an application keeps open after its session counts towards the user's limit of sessions as
        // well.
        let held = ours.iter().filter(|ends| {
            let is_lent = self.sessions.values().any(|session| session.ends == **ends);
            !is_lent && self.sockets.get_mut(ends).is_some_and(|socket| socket.is_held_by(user))
        });
        let held = held.count();
        match used + held < most {
            true => Ok(()),
            false => Err((
                SessionRefusal::Exhausted,
                format!(
                    "user {user} has {used} sessions with {} and holds {held} sockets of others that are over: \
                     sessions-per-user of the daemon's settings is {most}",
                    self.peers.get(peer).map_or("", |peer| &peer.name)
                ),
            )),
        }
    }

    /// Returns a free pooled socket with a port on which this host may open sessions: the socket that has been free for
    /// longest. A socket with the addresses `but` is never returned.
    fn free_socket(
        &mut self,
        runtime: &mut PacketRuntime,
        peer: usize,
        but: Option<SessionEnds>,
    ) -> Result<SessionEnds, Denied> {
        let Some(found) = self.peers.get(peer) else { return Err((SessionRefusal::Unknown, String::new())) };
        let is_lent = |ends: &SessionEnds| self.sessions.values().any(|session| session.ends == *ends);
        let own = found.pooled_sockets().filter(|(_, is_own)| *is_own).map(|(ends, _)| ends);
        let mut free: Vec<_> = own.filter(|ends| Some(*ends) != but && !is_lent(ends)).collect();
        free.sort_by_key(|ends| self.sockets.get(ends).and_then(|socket| socket.released));
        let mut trouble = None;
        for ends in free {
            let seen = runtime.see(&ends);
            // A socket whose datagrams must be sealed (encrypted) is not lent to an application while it has no session
            // keys.
            if let Some(seen) = seen.filter(|seen| !seen.is_open) {
                trouble = seen.trouble;
                continue;
            }
            if self.sockets.get_mut(&ends).is_some_and(|socket| socket.prepare().is_ok()) {
                return Ok(ends);
            }
        }
        let name = &found.name;
        Err(match trouble {
            Some(trouble) => (SessionRefusal::Unreachable, format!("peer {name}: {trouble}")),
            None => (
                SessionRefusal::Exhausted,
                format!(
                    "all sessions that this end opens with {name} are in use: `ports` of the daemon's settings limits them"
                ),
            ),
        })
    }

    /// Handles the message `Open` of the other end.
    pub(super) fn offered(
        &mut self,
        peer: usize,
        id: u64,
        port: u16,
        service: String,
        in_order: bool,
    ) -> Result<(), Denied> {
        let Some(found) = self.peers.get(peer) else { return Ok(()) };
        // Each host may open sessions only on its own half of the pool's ports.
        let socket = found.pooled_sockets().find(|(ends, is_own)| ends.local.port() == port && !is_own);
        let unknown =
            || (SessionRefusal::Malformed, format!("the other end may not open sessions at port {port}"));
        let (ends, _) = socket.ok_or_else(unknown)?;
        if self.sessions.values().any(|session| session.ends == ends) {
            return Err((SessionRefusal::Busy, "the session of this port is still in use here".to_owned()));
        }
        let wanted = ClientRole::Listener { peer, service: service.clone() };
        let listener = self.clients.iter().find(|(_, client)| client.role == wanted);
        let nobody = || (SessionRefusal::Unknown, format!("no application listens for {service} there"));
        let (client, user) = listener.map(|(at, client)| (*at, client.caller.user)).ok_or_else(nobody)?;
        self.check_share(peer, user)?;
        let socket = self.sockets.get_mut(&ends);
        if socket.is_none_or(|socket| socket.prepare().is_err()) {
            return Err((
                SessionRefusal::Busy,
                "its socket is still held by an application there".to_owned(),
            ));
        }
        let session = ClientSession { in_order, ..ClientSession::offered(peer, ends, service, client, user) };
        insert(&mut self.sessions, id, session)
    }

    /// Lends the pooled socket to the application, and tells the application that its session is open. Returns `None`
    /// if that fails.
    fn lend(&mut self, id: u64, control: Option<&ControlEnd>) -> Option<()> {
        let session = self.sessions.get_mut(&id)?;
        let datagram_bytes = self.peers.get(session.peer)?.datagram_bytes;
        let socket = self.sockets.get_mut(&session.ends)?.lend(session.user).ok()?;
        // The watchdog process has to hold a descriptor of the socket before the application can send.
        self.watchdog.iter().for_each(|watchdog| watchdog.keep(&session.ends, socket));
        let opened = OpenedSession {
            peer: self.peers.get(session.peer)?.name.clone(),
            service: session.service.clone(),
            graft: session.graft.clone(),
            services: session.services(&self.offers),
            in_order: session.in_order,
            is_sealed: self.peers.get(session.peer)?.cipher.is_some(),
            datagram_bytes,
            local: session.ends.local.to_string(),
            remote: session.ends.remote.to_string(),
        };
        let client = self.clients.get(&session.client?)?;
        info!(
            peer = opened.peer,
            service = opened.service,
            graft = opened.graft,
            user = session.user,
            "an application has got a session"
        );
        let socket = socket.as_fd();
        let (descriptors, reply) = match control {
            Some(control) => (vec![socket, control.as_fd()], BrokerReply::Accepted(opened)),
            None => (vec![socket], BrokerReply::Opened(opened)),
        };
        let is_taken = client.tell(&reply, &descriptors);
        (session.stage, session.said) = (SessionStage::Open, None);
        let peer = session.peer;
        is_taken.then(|| self.links.note_opened(peer))
    }

    pub(super) fn accepted(&mut self, id: u64) {
        if let Some(session) = self.sessions.get_mut(&id)
            && session.is_own
            && session.stage == SessionStage::Asking
        {
            (session.stage, session.said) = (SessionStage::Waiting, None);
        }
    }

    pub(super) fn declined(
        &mut self,
        runtime: &mut PacketRuntime,
        id: u64,
        why: SessionRefusal,
        reason: &str,
    ) {
        let Some(session) = self.sessions.get(&id) else { return };
        if !session.is_own || session.stage != SessionStage::Asking {
            return;
        }
        let peer = session.peer;
        let ends = session.ends;
        let service = session.service.clone();
        let in_order = session.in_order;
        // The other host refuses because an application there still holds the pooled socket, so another pooled socket
        // is tried.
        if why == SessionRefusal::Busy
            && let Ok(other) = self.free_socket(runtime, peer, Some(ends))
            && let Some(session) = self.sessions.get_mut(&id)
        {
            session.ends = other;
            let mut said =
                PendingMessage::new(PeerMessage::Open { id, port: other.local.port(), service, in_order });
            said.next = Instant::now() + AGAIN;
            session.said = Some(said);
            return;
        }
        self.give_up(id, why, &format!("the other end refuses: {reason}"));
        // The other end keeps no state of a session that it has refused.
        self.sessions.remove(&id);
    }

    /// Changes this host's pooled socket to the session's graft, with a new state of the graft's functions.
    pub(super) fn swap(&mut self, runtime: &mut PacketRuntime, id: u64) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let Some(seen) = runtime.see(&session.ends) else { return };
        if !seen.is_idle {
            return;
        }
        let Some(peer) = self.peers.get(session.peer) else { return };
        let name = peer.session_name(&session.ends);
        let graft = session.graft.clone();
        match runtime.swap_anew(&name, &graft) {
            Ok(()) => session.stage = SessionStage::Swapping(true),
            Err(error) => self.give_up(id, SessionRefusal::Impossible, &error.to_string()),
        }
    }

    /// Handles the message `Go`: the other end uses the graft and receives datagrams, so this end opens the session
    /// as well.
    pub(super) fn go(&mut self, runtime: &mut PacketRuntime, id: u64) {
        let Some(session) = self.sessions.get_mut(&id).filter(|session| !session.is_own) else {
            return;
        };
        match session.stage {
            SessionStage::Swapping(true) => {}
            // The repeated `Go` shows that our `Ready` was lost, so it is sent again.
            SessionStage::Open => return self.say_of(id, &PeerMessage::Ready { id }),
            _ => return,
        }
        session.begin(runtime);
        let caller =
            session.client.and_then(|client| self.clients.get(&client)).map(|client| client.caller.clone());
        let Some(caller) = caller else {
            return self.end_own(id, "the application that listened there has gone");
        };
        // The session gets a control connection of its own between the listening application and the daemon.
        let line = self.accepted.enter(caller.user).and_then(|place| {
            let (own, theirs) = ControlEnd::pair().ok()?;
            Some((ClientLine::start(own.into(), place).ok()?, theirs))
        });
        let Some((line, theirs)) = line else {
            return self.end_own(id, "the daemon there has no room for the application's connection");
        };
        if self.lend(id, Some(&theirs)).is_none() {
            return self.end_own(id, "the application that listens there does not take it");
        }
        let client = self.add_client(ClientConnection::for_session(line, caller, id));
        self.sessions.entry(id).and_modify(|session| session.client = Some(client));
        self.say_of(id, &PeerMessage::Ready { id });
    }

    pub(super) fn ready(&mut self, id: u64) {
        if !self
            .sessions
            .get(&id)
            .is_some_and(|session| session.is_own && session.stage == SessionStage::Going)
        {
            return;
        }
        if self.lend(id, None).is_none() {
            self.end_own(id, "the application there has gone");
        }
    }
}

fn random() -> Result<u64, Denied> {
    let mut bytes = [0; 8];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| (SessionRefusal::Busy, "the system has no random numbers".to_owned()))?;
    Ok(u64::from_ne_bytes(bytes))
}
