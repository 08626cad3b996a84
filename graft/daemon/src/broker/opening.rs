//! How a session is opened: from the first message about it until the applications of both ends have their
//! sockets.

use std::{os::fd::AsFd, time::Instant};

use millrace_base::control::ControlEnd;
use millrace_graft::packet::{PacketRuntime, choose::choose};
use millrace_graft_kernel::joint::SessionEnds;
use millrace_messages::{OpenedSession, SessionRefusal, Want, wire::BrokerReply};
use ring::rand::{SecureRandom as _, SystemRandom};
use tracing::info;

use super::{
    SessionBroker,
    desk::{ClientRole, Desk},
    far::PeerMessage,
    lease::{AGAIN, Denied, Lease, LeaseStage, PendingMessage, denied, insert, waits},
    line::ClientLine,
};

impl SessionBroker {
    /// Opens a session that an application of this host asks for.
    pub(super) fn begin(
        &mut self,
        runtime: &mut PacketRuntime,
        desk: u64,
        peer: usize,
        service: String,
        want: Want,
    ) -> Result<(), Denied> {
        let (Some(found), Some(far)) = (self.peers.get(peer), self.links.fars.get(peer)) else {
            return Ok(());
        };
        let offer = choose(&self.offers, &want, &far.path(), found.cipher.is_some());
        let offer = offer.map_err(|refused| denied(&refused))?;
        let graft = offer.graft.clone();
        let in_order = waits(&want, offer);
        // No user has the number `u32::MAX`.
        let user = self.desks.get(&desk).map_or(u32::MAX, |desk| desk.caller.user);
        self.check_share(peer, user)?;
        let ends = self.free_seat(runtime, peer, None)?;
        let life = random()?;
        let say = PeerMessage::Open { life, port: ends.local.port(), service: service.clone(), in_order };
        let lease = Lease {
            stage: LeaseStage::Asking,
            is_own: true,
            graft,
            want,
            in_order,
            said: Some(PendingMessage::new(say)),
            ..Lease::offered(peer, ends, service, desk, user)
        };
        insert(&mut self.leases, life, lease)?;
        self.desks.entry(desk).and_modify(|desk| desk.role = ClientRole::Session(life));
        Ok(())
    }

    fn check_share(&mut self, peer: usize, user: u32) -> Result<(), Denied> {
        let Some(found) = self.peers.get(peer) else { return Ok(()) };
        let most = found.sessions_per_user;
        let used = self.leases.values().filter(|lease| lease.peer == peer && lease.user == user).count();
        let ours: Vec<_> = found.seats().map(|(ends, _)| ends).collect();
        // A socket that an application still holds after its session counts as well.
        let held = ours.iter().filter(|ends| {
            let is_lent = self.leases.values().any(|lease| lease.ends == **ends);
            !is_lent && self.seats.get_mut(ends).is_some_and(|seat| seat.is_held_by(user))
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

    /// Returns a free pooled socket of those that this end opens sessions on, the one that was released first. `but`
    /// is left out.
    fn free_seat(
        &mut self,
        runtime: &mut PacketRuntime,
        peer: usize,
        but: Option<SessionEnds>,
    ) -> Result<SessionEnds, Denied> {
        let Some(found) = self.peers.get(peer) else { return Err((SessionRefusal::Unknown, String::new())) };
        let is_lent = |ends: &SessionEnds| self.leases.values().any(|lease| lease.ends == *ends);
        let own = found.seats().filter(|(_, is_own)| *is_own).map(|(ends, _)| ends);
        let mut free: Vec<_> = own.filter(|ends| Some(*ends) != but && !is_lent(ends)).collect();
        free.sort_by_key(|ends| self.seats.get(ends).and_then(|seat| seat.released));
        let mut trouble = None;
        for ends in free {
            let seen = runtime.see(&ends);
            // A sealed session without keys cannot be lent.
            if let Some(seen) = seen.filter(|seen| !seen.is_open) {
                trouble = seen.trouble;
                continue;
            }
            if self.seats.get_mut(&ends).is_some_and(|seat| seat.prepare().is_ok()) {
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
        life: u64,
        port: u16,
        service: String,
        in_order: bool,
    ) -> Result<(), Denied> {
        let Some(found) = self.peers.get(peer) else { return Ok(()) };
        // The other end opens sessions on the other half of the pool's ports.
        let seat = found.seats().find(|(ends, is_own)| ends.local.port() == port && !is_own);
        let unknown =
            || (SessionRefusal::Malformed, format!("the other end may not open sessions at port {port}"));
        let (ends, _) = seat.ok_or_else(unknown)?;
        if self.leases.values().any(|lease| lease.ends == ends) {
            return Err((SessionRefusal::Busy, "the session of this port is still in use here".to_owned()));
        }
        let wanted = ClientRole::Listener { peer, service: service.clone() };
        let listener = self.desks.iter().find(|(_, desk)| desk.role == wanted);
        let nobody = || (SessionRefusal::Unknown, format!("no application listens for {service} there"));
        let (desk, user) = listener.map(|(at, desk)| (*at, desk.caller.user)).ok_or_else(nobody)?;
        self.check_share(peer, user)?;
        let seat = self.seats.get_mut(&ends);
        if seat.is_none_or(|seat| seat.prepare().is_err()) {
            return Err((
                SessionRefusal::Busy,
                "its socket is still held by an application there".to_owned(),
            ));
        }
        let lease = Lease { in_order, ..Lease::offered(peer, ends, service, desk, user) };
        insert(&mut self.leases, life, lease)
    }

    /// Lends the pooled socket to the application and tells it. Returns `None` if that fails.
    fn lend(&mut self, life: u64, control: Option<&ControlEnd>) -> Option<()> {
        let lease = self.leases.get_mut(&life)?;
        let datagram_bytes = self.peers.get(lease.peer)?.datagram_bytes;
        let socket = self.seats.get_mut(&lease.ends)?.lend(lease.user).ok()?;
        // The keeper has to hold the socket before the application can send.
        self.keeper.iter().for_each(|keeper| keeper.keep(&lease.ends, socket));
        let opened = OpenedSession {
            peer: self.peers.get(lease.peer)?.name.clone(),
            service: lease.service.clone(),
            graft: lease.graft.clone(),
            services: lease.services(&self.offers),
            in_order: lease.in_order,
            is_sealed: self.peers.get(lease.peer)?.cipher.is_some(),
            datagram_bytes,
            local: lease.ends.local.to_string(),
            remote: lease.ends.remote.to_string(),
        };
        let desk = self.desks.get(&lease.desk?)?;
        info!(
            peer = opened.peer,
            service = opened.service,
            graft = opened.graft,
            user = lease.user,
            "an application has got a session"
        );
        let socket = socket.as_fd();
        let (descriptors, word) = match control {
            Some(control) => (vec![socket, control.as_fd()], BrokerReply::Accepted(opened)),
            None => (vec![socket], BrokerReply::Opened(opened)),
        };
        let is_taken = desk.tell(&word, &descriptors);
        (lease.stage, lease.said) = (LeaseStage::Open, None);
        let peer = lease.peer;
        is_taken.then(|| self.links.fars.get_mut(peer).into_iter().for_each(|far| far.opened += 1))
    }

    pub(super) fn accepted(&mut self, life: u64) {
        if let Some(lease) = self.leases.get_mut(&life)
            && lease.is_own
            && lease.stage == LeaseStage::Asking
        {
            (lease.stage, lease.said) = (LeaseStage::Waiting, None);
        }
    }

    pub(super) fn declined(
        &mut self,
        runtime: &mut PacketRuntime,
        life: u64,
        why: SessionRefusal,
        reason: &str,
    ) {
        let Some(lease) = self.leases.get(&life) else { return };
        if !lease.is_own || lease.stage != LeaseStage::Asking {
            return;
        }
        let peer = lease.peer;
        let ends = lease.ends;
        let service = lease.service.clone();
        let in_order = lease.in_order;
        // An application at the other end still holds that pooled socket, so another one is tried.
        if why == SessionRefusal::Busy
            && let Ok(other) = self.free_seat(runtime, peer, Some(ends))
            && let Some(lease) = self.leases.get_mut(&life)
        {
            lease.ends = other;
            let mut said =
                PendingMessage::new(PeerMessage::Open { life, port: other.local.port(), service, in_order });
            said.next = Instant::now() + AGAIN;
            lease.said = Some(said);
            return;
        }
        self.give_up(life, why, &format!("the other end refuses: {reason}"));
        // The other end has no state of a refused session.
        self.leases.remove(&life);
    }

    /// Restarts this end of the session with the chosen graft.
    pub(super) fn swap(&mut self, runtime: &mut PacketRuntime, life: u64) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        let Some(seen) = runtime.see(&lease.ends) else { return };
        if !seen.is_idle {
            return;
        }
        let Some(peer) = self.peers.get(lease.peer) else { return };
        let name = peer.session_name(&lease.ends);
        let graft = lease.graft.clone();
        match runtime.swap_anew(&name, &graft) {
            Ok(()) => lease.stage = LeaseStage::Swapping(true),
            Err(error) => self.give_up(life, SessionRefusal::Impossible, &error.to_string()),
        }
    }

    /// Handles the message `Go`: the other end uses the graft and receives datagrams, so this end opens the session
    /// as well.
    pub(super) fn go(&mut self, runtime: &mut PacketRuntime, life: u64) {
        let Some(lease) = self.leases.get_mut(&life).filter(|lease| !lease.is_own) else { return };
        match lease.stage {
            LeaseStage::Swapping(true) => {}
            // The other end has not received our `Ready`, which is sent again.
            LeaseStage::Open => return self.say_of(life, &PeerMessage::Ready { life }),
            _ => return,
        }
        lease.begin(runtime);
        let caller = lease.desk.and_then(|desk| self.desks.get(&desk)).map(|desk| desk.caller.clone());
        let Some(caller) = caller else {
            return self.end_own(life, "the application that listened there has gone");
        };
        // The session gets a connection of its own between the application and the daemon.
        let line = self.accepted.enter(caller.user).and_then(|place| {
            let (own, theirs) = ControlEnd::pair().ok()?;
            Some((ClientLine::start(own.into(), place).ok()?, theirs))
        });
        let Some((line, theirs)) = line else {
            return self.end_own(life, "the daemon there has no room for the application's connection");
        };
        if self.lend(life, Some(&theirs)).is_none() {
            return self.end_own(life, "the application that listens there does not take it");
        }
        let desk = self.add_desk(Desk::for_session(line, caller, life));
        self.leases.entry(life).and_modify(|lease| lease.desk = Some(desk));
        self.say_of(life, &PeerMessage::Ready { life });
    }

    pub(super) fn ready(&mut self, life: u64) {
        if !self.leases.get(&life).is_some_and(|lease| lease.is_own && lease.stage == LeaseStage::Going) {
            return;
        }
        if self.lend(life, None).is_none() {
            self.end_own(life, "the application there has gone");
        }
    }
}

fn random() -> Result<u64, Denied> {
    let mut bytes = [0; 8];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| (SessionRefusal::Busy, "the system has no random numbers".to_owned()))?;
    Ok(u64::from_ne_bytes(bytes))
}
