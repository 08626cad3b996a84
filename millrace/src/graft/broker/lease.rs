//! A session that an application has, or is about to have: from the first word about it until both ends have let go of it.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use millrace_bpf::graft::joint::{Ends, Lent};
use millrace_graft::{
    message::{By, Opened, Receives, Want, Why, control::Control, wire::Word},
    packet::{
        CANONICAL, Event, Runtime, Service,
        choose::{Offer, Refused, choose},
    },
};
use ring::rand::{SecureRandom as _, SystemRandom};
use std::os::fd::{AsFd, BorrowedFd};
use tracing::{info, warn};

use super::{
    Broker,
    addresses::is_here,
    desk::{Desk, Role},
    far::Say,
    process,
    quality::Quality,
};

/// Until an attempt to open one is given up.
const PATIENCE: Duration = Duration::from_secs(8);
/// Between two tries of a word, at first and at most.
const AGAIN: Duration = Duration::from_millis(100);
const AGAIN_MOST: Duration = Duration::from_secs(1);
/// For an application to read what has come, when the other end is gone.
const LET_GO: Duration = Duration::from_secs(10);
/// A daemon that says nothing for so long is gone, or cannot be reached any more.
pub const SILENCE: Duration = Duration::from_secs(10);
/// Seconds in which a session that nobody asks about is spoken of once.
const REPORT_EVERY: u64 = 8;
/// Of what is said to the other daemon, characters.
const REASON_MAX: usize = 160;

pub struct Lease {
    pub peer: usize,
    pub ends: Ends,
    pub service: String,
    pub stage: Stage,
    /// This end has asked for it.
    is_own: bool,
    /// Of the application here; `None`: it has gone.
    pub desk: Option<u64>,
    pub user: u32,
    /// The graft that was chosen for it last.
    pub graft: String,
    pub want: Want,
    /// Messages are put in order by the library, from the first one on.
    pub in_order: bool,
    since: Instant,
    /// What the other daemon has to answer.
    said: Option<Said>,
    finish: Option<Said>,
    /// Messages that this end has sent, once it sends no more.
    sent: Option<u32>,
    has_told_finish: bool,
    /// A change that was asked for and has not come: by whom.
    changing: Option<By>,
    /// The other end wants to know what comes here.
    is_asked: bool,
    pub quality: Quality,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// `Open` is said.
    Asking,
    /// It was accepted: the graft is to be changed as soon as that can be.
    Waiting,
    /// Both ends change to the graft; at the end that has accepted it, whether they have.
    Swapping(bool),
    /// `Go` is said.
    Going,
    Open,
    /// It is over, and so much is left for the application to read. Whether the other end knows: nothing is said any more then.
    Ending(Instant),
}

impl Lease {
    /// One that the other end has asked for.
    fn offered((peer, ends): (usize, Ends), service: String, (desk, user): (u64, u32)) -> Self {
        Self {
            peer,
            ends,
            service,
            stage: Stage::Swapping(false),
            is_own: false,
            desk: Some(desk),
            user,
            graft: String::new(),
            want: Want::default(),
            in_order: false,
            since: Instant::now(),
            said: None,
            finish: None,
            sent: None,
            has_told_finish: false,
            changing: None,
            is_asked: false,
            quality: Quality::default(),
        }
    }
}

struct Said {
    say: Say,
    next: Instant,
    pause: Duration,
}

impl Said {
    fn new(say: Say) -> Self {
        Self { say, next: Instant::now(), pause: AGAIN }
    }

    fn due(&mut self, now: Instant) -> Option<&Say> {
        if now < self.next {
            return None;
        }
        self.next = now + self.pause;
        self.pause = (2 * self.pause).min(AGAIN_MOST);
        Some(&self.say)
    }
}

type Denied = (Why, String);

fn denied(refused: &Refused) -> Denied {
    let why = match refused {
        Refused::Redundant(_) => Why::Redundant,
        Refused::Impossible(_) => Why::Impossible,
    };
    (why, refused.to_string())
}

impl Broker {
    // --- Beginning ---

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
        self.leases.insert(life, lease);
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
    fn offered(
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
        self.leases.insert(life, lease);
        Ok(())
    }

    /// The socket is the application's.
    fn lend(&mut self, runtime: &mut Runtime, life: u64, control: Option<&Control>) -> Option<()> {
        let is_process = self.processes.is_process(&self.leases.get(&life)?.graft);
        let (receives, ring) = match is_process {
            true => {
                (Receives::Socket { why: "of a process, which has the session's datagrams".to_owned() }, None)
            }
            false => self.receives(runtime, life),
        };
        let lease = self.leases.get_mut(&life)?;
        let datagram_bytes = self.peers.get(lease.peer)?.datagram_bytes;
        let socket = self.seats.get_mut(&lease.ends)?.lend(lease.user).ok()?;
        // Before anybody can send by it.
        self.keeper.keep(&lease.ends, socket);
        let started = is_process.then(|| self.processes.start(life, &lease.graft, socket, datagram_bytes));
        let processed = started.transpose().inspect_err(|why| warn!("{why}")).ok()?;
        let around = if is_process { process::AROUND } else { 0 };
        let opened = Opened {
            peer: self.peers.get(lease.peer)?.name.clone(),
            service: lease.service.clone(),
            graft: lease.graft.clone(),
            services: lease.services(&self.offers),
            in_order: lease.in_order,
            is_sealed: self.peers.get(lease.peer)?.cipher.is_some(),
            datagram_bytes: datagram_bytes.saturating_sub(around),
            is_process,
            local: lease.ends.local.to_string(),
            remote: lease.ends.remote.to_string(),
            receives,
            ring: ring.as_ref().map(|ring| ring.frames),
        };
        let desk = self.desks.get(&lease.desk?)?;
        info!(
            peer = opened.peer,
            service = opened.service,
            graft = opened.graft,
            user = lease.user,
            "a session is lent"
        );
        let socket = processed.as_ref().map_or(socket.as_fd(), AsFd::as_fd);
        let (own, word) = match control {
            Some(control) => (vec![socket, control.as_fd()], Word::Accepted(opened)),
            None => (vec![socket], Word::Opened(opened)),
        };
        let descriptors: Vec<_> = own.into_iter().chain(descriptors_of(ring.as_ref())).collect();
        let is_taken = desk.tell(&word, &descriptors);
        (lease.stage, lease.said) = (Stage::Open, None);
        let peer = lease.peer;
        is_taken.then(|| self.fars.get_mut(peer).into_iter().for_each(|far| far.opened += 1))
    }

    // --- What the other daemon says ---

    pub(super) fn hear(&mut self, runtime: &mut Runtime, peer: usize, say: Say) {
        // Of a session with another peer it is nothing.
        let is_known = |life: &u64| self.leases.get(life).is_some_and(|lease| lease.peer == peer);
        match say {
            Say::Open { life, port, service, in_order } => {
                let known = self.leases.get(&life).is_some_and(|lease| lease.peer == peer && !lease.is_own);
                let answer =
                    match if known { Ok(()) } else { self.offered(peer, life, (port, service), in_order) } {
                        Ok(()) => Say::Accept { life },
                        Err((why, reason)) => Say::Refuse { life, why, reason: short(&reason) },
                    };
                self.say(peer, &answer);
            }
            Say::Accept { life } if is_known(&life) => self.accepted(life),
            Say::Refuse { life, why, reason } if is_known(&life) => {
                self.declined(runtime, life, why, &reason)
            }
            Say::Go { life } if is_known(&life) => self.go(runtime, life),
            Say::Ready { life } if is_known(&life) => self.ready(runtime, life),
            Say::Finish { life, messages } => {
                if is_known(&life) {
                    self.tell_finish(life, messages);
                }
                self.say(peer, &Say::Finished { life });
            }
            Say::Finished { life } if is_known(&life) => {
                self.leases.entry(life).and_modify(|lease| lease.finish = None);
            }
            Say::Close { life, messages, reason } => {
                if is_known(&life) {
                    messages.into_iter().for_each(|messages| self.tell_finish(life, messages));
                    self.end(life, &reason, true);
                }
                self.say(peer, &Say::Closed { life });
            }
            Say::Closed { life } if is_known(&life) => {
                if let Some(lease) = self.leases.get_mut(&life) {
                    lease.said = None;
                }
            }
            Say::Report { life, delivered, asks } if is_known(&life) => {
                if let Some(lease) = self.leases.get_mut(&life) {
                    lease.is_asked = asks;
                    delivered.into_iter().for_each(|delivered| lease.quality.hear(delivered));
                }
            }
            // It believes to have what this end knows nothing of.
            Say::Report { life, .. } => {
                let reason =
                    "the daemon at the other end knows nothing of it: it was started anew".to_owned();
                self.say(peer, &Say::Close { life, messages: None, reason });
            }
            // Of what is over, or not for this end.
            _ => {}
        }
    }

    fn accepted(&mut self, life: u64) {
        if let Some(lease) = self.leases.get_mut(&life)
            && lease.is_own
            && lease.stage == Stage::Asking
        {
            (lease.stage, lease.said) = (Stage::Waiting, None);
        }
    }

    fn declined(&mut self, runtime: &mut Runtime, life: u64, why: Why, reason: &str) {
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
    fn swap(&mut self, runtime: &mut Runtime, life: u64) {
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
    fn go(&mut self, runtime: &mut Runtime, life: u64) {
        let Some(lease) = self.leases.get_mut(&life).filter(|lease| !lease.is_own) else { return };
        match lease.stage {
            Stage::Swapping(true) => {}
            // Our answer was lost.
            Stage::Open => return self.say_of(life, &Say::Ready { life }),
            _ => return,
        }
        lease.begin(runtime);
        let caller = lease.desk.and_then(|desk| self.desks.get(&desk)).map(|desk| desk.caller.clone());
        let (Some(caller), Ok((own, theirs))) = (caller, Control::pair()) else {
            return self.end_own(life, "the application that listened there has gone");
        };
        if let Err(why) = self.prepare(life) {
            return self.end_own(life, &format!("at the other end: {why}"));
        }
        if self.lend(runtime, life, Some(&theirs)).is_none() {
            return self.end_own(life, "the application that listens there does not take it");
        }
        let desk = self.add_desk(Desk::of_session(own, caller, life));
        self.leases.entry(life).and_modify(|lease| lease.desk = Some(desk));
        self.say_of(life, &Say::Ready { life });
    }

    fn ready(&mut self, runtime: &mut Runtime, life: u64) {
        if !self.leases.get(&life).is_some_and(|lease| lease.is_own && lease.stage == Stage::Going) {
            return;
        }
        if let Err(why) = self.prepare(life) {
            return self.give_up(life, Why::Busy, &why);
        }
        if self.lend(runtime, life, None).is_none() {
            self.end_own(life, "the application there has gone");
        }
    }

    fn prepare(&mut self, life: u64) -> Result<(), String> {
        self.leases.get(&life).map_or(Ok(()), |lease| self.processes.prepare(&lease.graft))
    }

    // --- What happens to sessions of the runtime ---

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
                let (receives, lent) = match self.processes.has(life) {
                    true => (Receives::default(), None),
                    false => self.receives(runtime, life),
                };
                let ring = lent.as_ref().map(|ring| ring.frames);
                let word = Word::Changed { graft: graft.clone(), services, by, receives, ring };
                let descriptors: Vec<_> = descriptors_of(lent.as_ref()).collect();
                desk.into_iter().for_each(|desk| self.tell_with(desk, &word, &descriptors));
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

    // --- While it is open ---

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
        self.processes.check_change(&lease.graft, &graft).map_err(|reason| (Why::Impossible, reason))?;
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
            let word = Word::Changed { graft, services, by, receives: self.receives_by(life), ring: None };
            return desk.into_iter().for_each(|desk| self.tell(desk, &word));
        }
        (lease.changing, lease.quality.next) = (Some(by), Some(graft));
        self.try_change(runtime, life);
    }

    fn try_change(&mut self, runtime: &mut Runtime, life: u64) {
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

    fn tell_finish(&mut self, life: u64, messages: u32) {
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

    // --- Its end ---

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
    fn end_own(&mut self, life: u64, reason: &str) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        let is_told = matches!(lease.stage, Stage::Ending(_));
        let reason = short(reason);
        if !is_told {
            lease.said = Some(Said::new(Say::Close { life, messages: lease.sent, reason }));
        }
        (lease.desk, lease.finish) = (None, None);
        lease.stage = Stage::Ending(Instant::now() + LET_GO);
        // A process goes on until the other end has everything.
        if self.processes.has(life) {
            return;
        }
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
                    self.desks.entry(desk).and_modify(|desk| desk.role = Role::Done);
                    self.refuse(desk, Why::Unreachable, reason.clone());
                });
            }
            // The listener has not heard of it.
            _ => lease.desk = None,
        }
    }

    /// It could not be opened.
    fn give_up(&mut self, life: u64, why: Why, reason: &str) {
        let own = self.leases.get_mut(&life).filter(|lease| lease.is_own);
        if let Some(desk) = own.and_then(|lease| lease.desk.take()) {
            self.desks.entry(desk).and_modify(|desk| desk.role = Role::Done);
            self.refuse(desk, why, reason.to_owned());
        }
        self.end_own(life, reason);
    }

    // --- Time ---

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
                    let is_over = is_read && lease.said.is_none() && !self.processes.has(life);
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
        self.processes.stop(life);
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

    fn say(&self, peer: usize, say: &Say) {
        self.fars.get(peer).into_iter().for_each(|far| far.say(say));
    }

    fn say_of(&self, life: u64, say: &Say) {
        self.leases.get(&life).into_iter().for_each(|lease| self.say(lease.peer, say));
    }
}

impl Lease {
    /// Both ends have begun anew, and no application has sent anything yet.
    fn begin(&mut self, runtime: &mut Runtime) {
        if let (Some(seen), Ok(Some(traffic))) = (runtime.see(&self.ends), runtime.traffic(&self.ends)) {
            self.quality.begin(&traffic);
            self.graft = seen.graft;
        }
        if let Err(error) = runtime.tell_room(&self.ends) {
            warn!("nobody says when there is room: {error}");
        }
    }

    fn services(&self, offers: &[Offer]) -> Vec<String> {
        let found = offers.iter().find(|offer| offer.graft == self.graft);
        let of_graft = found.into_iter().flat_map(|offer| &offer.services).copied();
        let all: BTreeSet<_> = of_graft.chain(self.in_order.then_some(Service::Order)).collect();
        all.into_iter().map(|service| service.name().to_owned()).collect()
    }

    pub fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    pub fn may_adapt(&self) -> bool {
        self.want.adapt && self.changing.is_none()
    }
}

/// Whether order is the library's matter with this graft.
pub fn waits(want: &Want, offer: &Offer) -> bool {
    want.services.contains(Service::Order.name()) && !offer.services.contains(&Service::Order)
}

fn descriptors_of(ring: Option<&Lent>) -> impl Iterator<Item = BorrowedFd<'_>> {
    ring.into_iter().flat_map(|ring| ring.descriptors.iter().map(AsFd::as_fd))
}

fn short(reason: &str) -> String {
    reason.chars().take(REASON_MAX).collect()
}

fn random() -> Result<u64, Denied> {
    let mut bytes = [0; 8];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| (Why::Busy, "the system has no random numbers".to_owned()))?;
    Ok(u64::from_ne_bytes(bytes))
}
