//! From the first word about a session until both ends' applications have it.

use std::{os::fd::AsFd, time::Instant};

use millrace_base::control::Control;
use millrace_graft::{
    message::{Opened, Want, Why, wire::Word},
    packet::{Runtime, choose::choose},
};
use millrace_graft_kernel::joint::Ends;
use ring::rand::{SecureRandom as _, SystemRandom};
use tracing::info;

use super::{
    Broker,
    desk::{Desk, Role},
    far::Say,
    lease::{AGAIN, Denied, Lease, Said, Stage, denied, insert, waits},
    line::Line,
};

impl Broker {
    /// An application here wants one.
    pub(super) fn begin(
        &mut self,
        runtime: &mut Runtime,
        desk: u64,
        peer: usize,
        service: String,
        want: Want,
    ) -> Result<(), Denied> {
        let (Some(found), Some(far)) = (self.peers.get(peer), self.fars.get(peer)) else { return Ok(()) };
        let offer = choose(&self.offers, &want, &far.path(), found.cipher.is_some());
        let offer = offer.map_err(|refused| denied(&refused))?;
        let (graft, in_order) = (offer.graft.clone(), waits(&want, offer));
        let user = self.desks.get(&desk).map_or(u32::MAX, |desk| desk.caller.user);
        self.check_share(peer, user)?;
        let ends = self.free_seat(runtime, peer, None)?;
        let life = random()?;
        let say = Say::Open { life, port: ends.local.port(), service: service.clone(), in_order };
        let lease = Lease {
            stage: Stage::Asking,
            is_own: true,
            graft,
            want,
            in_order,
            said: Some(Said::new(say)),
            ..Lease::offered((peer, ends), service, (desk, user))
        };
        insert(&mut self.leases, life, lease)?;
        self.desks.entry(desk).and_modify(|desk| desk.role = Role::Session(life));
        Ok(())
    }

    fn check_share(&mut self, peer: usize, user: u32) -> Result<(), Denied> {
        let Some(found) = self.peers.get(peer) else { return Ok(()) };
        let most = found.sessions_per_user;
        let used = self.leases.values().filter(|lease| lease.peer == peer && lease.user == user).count();
        let ours: Vec<_> = found.seats().map(|(ends, _)| ends).collect();
        let held = ours.iter().filter(|ends| {
            let is_lent = self.leases.values().any(|lease| lease.ends == **ends);
            !is_lent && self.seats.get_mut(ends).is_some_and(|seat| seat.is_held_by(user))
        });
        let held = held.count();
        match used + held < most {
            true => Ok(()),
            false => Err((
                Why::Exhausted,
                format!(
                    "user {user} has {used} sessions with {} and holds {held} sockets of others that are over: \
                     sessions-per-user of the daemon's settings is {most}",
                    self.peers.get(peer).map_or("", |peer| &peer.name)
                ),
            )),
        }
    }

    /// One that this end opens, and that nobody uses: the one that was given back first. `but`: not that one.
    fn free_seat(&mut self, runtime: &mut Runtime, peer: usize, but: Option<Ends>) -> Result<Ends, Denied> {
        let Some(found) = self.peers.get(peer) else { return Err((Why::Unknown, String::new())) };
        let is_lent = |ends: &Ends| self.leases.values().any(|lease| lease.ends == *ends);
        let own = found.seats().filter(|(_, is_own)| *is_own).map(|(ends, _)| ends);
        let mut free: Vec<_> = own.filter(|ends| Some(*ends) != but && !is_lent(ends)).collect();
        free.sort_by_key(|ends| self.seats.get(ends).and_then(|seat| seat.released));
        let mut trouble = None;
        for ends in free {
            let seen = runtime.see(&ends);
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
            Some(trouble) => (Why::Unreachable, format!("peer {name}: {trouble}")),
            None => (
                Why::Exhausted,
                format!(
                    "all sessions that this end opens with {name} are in use: `ports` of the daemon's settings"
                ),
            ),
        })
    }

    /// The other end's application wants one.
    pub(super) fn offered(
        &mut self,
        peer: usize,
        life: u64,
        (port, service): (u16, String),
        in_order: bool,
    ) -> Result<(), Denied> {
        let Some(found) = self.peers.get(peer) else { return Ok(()) };
        let seat = found.seats().find(|(ends, is_own)| ends.local.port() == port && !is_own);
        let unknown = || (Why::Malformed, format!("port {port} is none that the other end opens"));
        let (ends, _) = seat.ok_or_else(unknown)?;
        if self.leases.values().any(|lease| lease.ends == ends) {
            return Err((Why::Busy, "it is still in use here".to_owned()));
        }
        let wanted = Role::Listener { peer, service: service.clone() };
        let listener = self.desks.iter().find(|(_, desk)| desk.role == wanted);
        let nobody = || (Why::Unknown, format!("no application listens for {service} there"));
        let (desk, user) = listener.map(|(at, desk)| (*at, desk.caller.user)).ok_or_else(nobody)?;
        self.check_share(peer, user)?;
        let seat = self.seats.get_mut(&ends);
        if seat.is_none_or(|seat| seat.prepare().is_err()) {
            return Err((Why::Busy, "its socket is still held by an application there".to_owned()));
        }
        let lease = Lease { in_order, ..Lease::offered((peer, ends), service, (desk, user)) };
        insert(&mut self.leases, life, lease)
    }

    /// The socket is the application's.
    fn lend(&mut self, life: u64, control: Option<&Control>) -> Option<()> {
        let lease = self.leases.get_mut(&life)?;
        let datagram_bytes = self.peers.get(lease.peer)?.datagram_bytes;
        let socket = self.seats.get_mut(&lease.ends)?.lend(lease.user).ok()?;
        // Before anybody can send by it.
        self.keeper.keep(&lease.ends, socket);
        let opened = Opened {
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
            "a session is lent"
        );
        let socket = socket.as_fd();
        let (descriptors, word) = match control {
            Some(control) => (vec![socket, control.as_fd()], Word::Accepted(opened)),
            None => (vec![socket], Word::Opened(opened)),
        };
        let is_taken = desk.tell(&word, &descriptors);
        (lease.stage, lease.said) = (Stage::Open, None);
        let peer = lease.peer;
        is_taken.then(|| self.fars.get_mut(peer).into_iter().for_each(|far| far.opened += 1))
    }

    pub(super) fn accepted(&mut self, life: u64) {
        if let Some(lease) = self.leases.get_mut(&life)
            && lease.is_own
            && lease.stage == Stage::Asking
        {
            (lease.stage, lease.said) = (Stage::Waiting, None);
        }
    }

    pub(super) fn declined(&mut self, runtime: &mut Runtime, life: u64, why: Why, reason: &str) {
        let Some(lease) = self.leases.get(&life) else { return };
        if !lease.is_own || lease.stage != Stage::Asking {
            return;
        }
        let (peer, ends, service, in_order) = (lease.peer, lease.ends, lease.service.clone(), lease.in_order);
        if why == Why::Busy
            && let Ok(other) = self.free_seat(runtime, peer, Some(ends))
            && let Some(lease) = self.leases.get_mut(&life)
        {
            lease.ends = other;
            let mut said = Said::new(Say::Open { life, port: other.local.port(), service, in_order });
            said.next = Instant::now() + AGAIN;
            lease.said = Some(said);
            return;
        }
        self.give_up(life, why, &format!("the other end refuses: {reason}"));
        // It keeps nothing of it.
        self.leases.remove(&life);
    }

    /// Both ends are to begin anew with the graft.
    pub(super) fn swap(&mut self, runtime: &mut Runtime, life: u64) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        let Some(seen) = runtime.see(&lease.ends) else { return };
        if !seen.is_idle {
            return;
        }
        let Some(peer) = self.peers.get(lease.peer) else { return };
        let (name, graft) = (peer.session_name(&lease.ends), lease.graft.clone());
        match runtime.swap_anew(&name, &graft) {
            Ok(()) => lease.stage = Stage::Swapping(true),
            Err(error) => self.give_up(life, Why::Impossible, &error.to_string()),
        }
    }

    /// The other end uses the graft, and takes what comes.
    pub(super) fn go(&mut self, runtime: &mut Runtime, life: u64) {
        let Some(lease) = self.leases.get_mut(&life).filter(|lease| !lease.is_own) else { return };
        match lease.stage {
            Stage::Swapping(true) => {}
            // Our answer was lost.
            Stage::Open => return self.say_of(life, &Say::Ready { life }),
            _ => return,
        }
        lease.begin(runtime);
        let caller = lease.desk.and_then(|desk| self.desks.get(&desk)).map(|desk| desk.caller.clone());
        let Some(caller) = caller else {
            return self.end_own(life, "the application that listened there has gone");
        };
        let line = self.accepted.enter(caller.user).and_then(|place| {
            let (own, theirs) = Control::pair().ok()?;
            Some((Line::start(own.into(), place).ok()?, theirs))
        });
        let Some((line, theirs)) = line else {
            return self.end_own(life, "the daemon there has no room for the application's connection");
        };
        if self.lend(life, Some(&theirs)).is_none() {
            return self.end_own(life, "the application that listens there does not take it");
        }
        let desk = self.add_desk(Desk::of_session(line, caller, life));
        self.leases.entry(life).and_modify(|lease| lease.desk = Some(desk));
        self.say_of(life, &Say::Ready { life });
    }

    pub(super) fn ready(&mut self, life: u64) {
        if !self.leases.get(&life).is_some_and(|lease| lease.is_own && lease.stage == Stage::Going) {
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
    filled.map_err(|_| (Why::Busy, "the system has no random numbers".to_owned()))?;
    Ok(u64::from_ne_bytes(bytes))
}
