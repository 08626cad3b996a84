//! Rings of sessions: who gets one, who is told why not, and when they are taken back.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd as _, BorrowedFd},
};

use millrace_graft::{message::Receives, packet::Runtime};
use millrace_graft_kernel::joint::{Ends, Lent};
use tracing::{info, warn};

use super::Broker;

/// By the lives of sessions.
#[derive(Default)]
pub struct Rings(BTreeMap<u64, (Ends, Receives)>);

impl Broker {
    /// How what comes for a session gets to its application from now on, with a ring, if it gets one now.
    pub(super) fn receives(&mut self, runtime: &mut Runtime, life: u64) -> (Receives, Option<Lent>) {
        let Some(lease) = self.leases.get(&life) else { return Default::default() };
        let ends = lease.ends;
        let lent = match self.peers.get(lease.peer).is_some_and(|peer| peer.rings) {
            true => runtime.lend_ring(&ends),
            false => Err("the daemon's settings have no `rings = true` for this peer".to_owned()),
        };
        let (receives, lent) = match lent {
            Ok(lent) => (Receives::Ring, lent),
            Err(why) => (Receives::Socket { why }, None),
        };
        let before = self.rings.0.insert(life, (ends, receives.clone()));
        if before.is_none_or(|(_, before)| before != receives) {
            info!(local = %ends.local, %receives, "what comes for an application");
        }
        (receives, lent)
    }

    /// As it was said last.
    pub(super) fn receives_by(&self, life: u64) -> Receives {
        self.rings.0.get(&life).map(|(_, receives)| receives.clone()).unwrap_or_default()
    }

    /// By sessions' names, of a peer.
    pub(super) fn receivers(&self, peer: usize) -> BTreeMap<String, String> {
        let lent = self.rings.0.iter().filter_map(|(life, (ends, receives))| {
            let lease = self.leases.get(life).filter(|lease| lease.peer == peer)?;
            Some((self.peers.get(lease.peer)?.session_name(ends), receives.to_string()))
        });
        lent.collect()
    }

    /// Of applications that have gone. The queue is free again when nobody has the descriptors any more.
    pub(super) fn reclaim_rings(&mut self, runtime: &mut Runtime) {
        let is_used = |life: &u64| {
            let desk = self.leases.get(life).and_then(|lease| lease.desk);
            desk.is_some_and(|desk| self.desks.contains_key(&desk))
        };
        let over: Vec<_> = self.rings.0.keys().copied().filter(|life| !is_used(life)).collect();
        for life in over {
            let Some((ends, _)) = self.rings.0.remove(&life) else { continue };
            // Nobody else has had the session meanwhile.
            if let Err(error) = runtime.end_ring(&ends) {
                warn!(local = %ends.local, "a ring could not be taken back: {error}");
            }
        }
    }
}

/// That an application needs of one.
pub fn descriptors_of(ring: Option<&Lent>) -> impl Iterator<Item = BorrowedFd<'_>> {
    ring.into_iter().flat_map(|ring| ring.descriptors.iter().map(|it| it.as_fd()))
}
