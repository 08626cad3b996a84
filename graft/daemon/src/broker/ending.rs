//! The end of sessions, and the timers of their states.

use std::time::{Duration, Instant};

use millrace_graft::packet::{CANONICAL, PacketRuntime};
use millrace_messages::{SessionRefusal, wire::BrokerReply};
use tracing::warn;

use super::{
    SessionBroker,
    desk::{ClientRole, Desk},
    far::PeerMessage,
    lease::{LeaseStage, PendingMessage, short},
};

/// Time after which an attempt to open a session is given up.
const PATIENCE: Duration = Duration::from_secs(8);
/// Time for an application to read the datagrams that had arrived when its session ended.
const LET_GO: Duration = Duration::from_secs(10);

impl SessionBroker {
    /// Removes the connection of an application that has disconnected, and ends its session.
    pub(super) fn leave(&mut self, desk: u64) {
        let Some(gone) = self.desks.remove(&desk) else { return };
        if let ClientRole::Session(life) = gone.role {
            // The reason tells the other end whether all messages were sent.
            let has_finished = self.leases.get(&life).is_some_and(|lease| lease.sent.is_some());
            let reason = if has_finished {
                "the other end has closed it"
            } else {
                "the application at the other end has gone"
            };
            self.end_own(life, reason);
        }
    }

    /// Ends a session from this end, because its application has disconnected or cannot have it.
    pub(super) fn end_own(&mut self, life: u64, reason: &str) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        let is_told = matches!(lease.stage, LeaseStage::Ending(_));
        let reason = short(reason);
        // A session that is already ending has sent its `Close`, or has got one.
        if !is_told {
            lease.said = Some(PendingMessage::new(PeerMessage::Close { life, messages: lease.sent, reason }));
        }
        // The application has gone, so nothing is repeated for it.
        (lease.desk, lease.finish) = (None, None);
        lease.stage = LeaseStage::Ending(Instant::now() + LET_GO);
        let taken_back = self.seats.get_mut(&lease.ends).map(super::seat::PooledSocket::take_back);
        if let Some(Err(error)) = taken_back {
            warn!("a pooled socket could not be shut down: {error}");
        }
    }

    /// Ends a session that the other end has ended, or whose other end is gone. The application can read datagrams
    /// that have arrived for a while.
    pub(super) fn end(&mut self, life: u64, reason: &str, is_told: bool) {
        let Some(lease) = self.leases.get_mut(&life) else { return };
        let desk = lease.desk;
        let stage = lease.stage;
        lease.stage = LeaseStage::Ending(Instant::now() + LET_GO);
        lease.finish = None;
        let say = PeerMessage::Close { life, messages: None, reason: short(reason) };
        // A session that the other end has ended needs no `Close`.
        lease.said = (!is_told).then(|| PendingMessage::new(say));
        match stage {
            LeaseStage::Open => {
                let word = BrokerReply::Closed { reason: reason.to_owned() };
                desk.into_iter().for_each(|desk| self.tell(desk, &word));
            }
            LeaseStage::Ending(_) => {}
            _ if lease.is_own => {
                lease.desk = None;
                let reason = reason.to_owned();
                desk.into_iter().for_each(|desk| {
                    self.desks.entry(desk).and_modify(Desk::finish);
                    self.refuse(desk, SessionRefusal::Unreachable, reason.clone());
                });
            }
            // The listening application has not been told of the session yet.
            _ => lease.desk = None,
        }
    }

    /// Gives up a session that could not be opened, and tells the application why.
    pub(super) fn give_up(&mut self, life: u64, why: SessionRefusal, reason: &str) {
        let own = self.leases.get_mut(&life).filter(|lease| lease.is_own);
        if let Some(desk) = own.and_then(|lease| lease.desk.take()) {
            self.desks.entry(desk).and_modify(Desk::finish);
            self.refuse(desk, why, reason.to_owned());
        }
        self.end_own(life, reason);
    }

    pub(super) fn tick_leases(&mut self, runtime: &mut PacketRuntime, now: Instant) {
        let lives: Vec<_> = self.leases.keys().copied().collect();
        for life in lives {
            let Some(lease) = self.leases.get_mut(&life) else { continue };
            if let Some(far) = self.links.fars.get(lease.peer) {
                lease
                    .said
                    .iter_mut()
                    .chain(&mut lease.finish)
                    .filter_map(|said| said.due_message(now))
                    .for_each(|say| far.say(say));
            }
            match lease.stage {
                LeaseStage::Open => self.try_change(runtime, life),
                LeaseStage::Ending(until) => {
                    // The application can read until it closes its connection.
                    let is_read = lease.desk.is_none_or(|desk| !self.desks.contains_key(&desk));
                    let is_over = is_read && lease.said.is_none();
                    if now >= until || is_over {
                        self.let_go(life);
                    }
                }
                // Every state before `Open` has the same time limit.
                _ if now > lease.since + PATIENCE => {
                    self.give_up(life, SessionRefusal::Unreachable, "the other end does not answer in time");
                }
                LeaseStage::Waiting => self.swap(runtime, life),
                _ => {}
            }
        }
    }

    /// Removes an ended session, whose pooled socket is free then.
    fn let_go(&mut self, life: u64) {
        let Some(lease) = self.leases.remove(&life) else { return };
        self.keeper.iter().for_each(|keeper| keeper.forget(&lease.ends));
        if let Some(seat) = self.seats.get_mut(&lease.ends) {
            // Only the end that has opened the session changes the socket's graft back.
            seat.is_restless = lease.is_own;
            if let Err(error) = seat.take_back() {
                warn!("a pooled socket could not be shut down: {error}");
            }
        }
        lease.desk.and_then(|desk| self.desks.remove(&desk));
    }

    /// Changes free pooled sockets back to the graft that only frames datagrams, so that the functions of their last
    /// session stop.
    pub(super) fn rest(&mut self, runtime: &mut PacketRuntime) {
        for peer in &self.peers {
            for (ends, _) in peer.seats() {
                let Some(seat) = self.seats.get_mut(&ends).filter(|seat| seat.is_restless) else { continue };
                // Another session may have the socket by now.
                if self.leases.values().any(|lease| lease.ends == ends) {
                    continue;
                }
                let Some(seen) = runtime.see(&ends) else { continue };
                if seen.is_idle {
                    seat.is_restless = false;
                    // A failure does not matter: without the other end no datagram passes.
                    let _ = runtime.swap_anew(&peer.session_name(&ends), CANONICAL);
                }
            }
        }
    }
}
