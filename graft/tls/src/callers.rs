//! Limits concurrent handshakes by the address of the connecting host. Unknown addresses share a number of handshake
//! slots, and one network gets only a part of these. An address that the settings name, or from which a known key was
//! shown before, has slots of its own.
//!
//! A peer that connects from a new address is a stranger until it has shown its key. Strangers that stall must not
//! keep the peer waiting, so a stranger whose handshake has run for `GRACE` loses its slot to the next one.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_base::networks::NetworkPlaces;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Limits of concurrent handshakes from unknown addresses: from all together, and from one IPv4 address or IPv6 /64
/// (`OF_STRANGER`).
const STRANGERS: usize = 64;
const OF_STRANGER: usize = 4;
/// Time after which a handshake from an unknown address may be aborted to make room for another one.
const GRACE: Duration = Duration::from_millis(250);
/// Limit of concurrent handshakes from one known address.
const OF_KNOWN: usize = 32;
/// Number of the latest addresses of each peer that count as known because the peer has shown its key from there.
const REMEMBERED: usize = 8;

/// The handshakes in progress, and the addresses from which peers have shown their keys.
#[derive(Clone)]
pub struct Callers(Arc<Mutex<CallerState>>);

struct CallerState {
    strangers: NetworkPlaces,
    /// Handshakes from unknown addresses that are in progress, the oldest first.
    waiting: VecDeque<UnknownCaller>,
    known: HashMap<IpAddr, usize>,
    /// Addresses from which each peer has proved that it has its key, the latest address last.
    shown: HashMap<String, VecDeque<IpAddr>>,
}

struct UnknownCaller {
    address: IpAddr,
    since: Instant,
    makes_way: Arc<Notify>,
}

/// A handshake that counts towards the limits until this value is dropped.
pub struct CallerPlace {
    callers: Callers,
    address: IpAddr,
    /// Notified when the handshake has to be aborted to make room for another one. `None` for a known address, whose
    /// handshakes are never aborted for others.
    makes_way: Option<Arc<Notify>>,
}

impl Default for Callers {
    fn default() -> Self {
        let strangers = NetworkPlaces::new(STRANGERS, OF_STRANGER);
        let waiting = VecDeque::new();
        let known = HashMap::new();
        let shown = HashMap::new();
        Self(Arc::new(Mutex::new(CallerState { strangers, waiting, known, shown })))
    }
}

impl CallerState {
    /// Admits a handshake from an unknown address. If a limit is reached, the oldest such handshake that has run for
    /// `GRACE` is aborted.
    fn enter(&mut self, address: IpAddr, now: Instant) -> Option<Arc<Notify>> {
        if self.strangers.enter(address).is_err() && !self.make_room(address, now) {
            return None;
        }
        let makes_way = Arc::new(Notify::new());
        self.waiting.push_back(UnknownCaller { address, since: now, makes_way: makes_way.clone() });
        Some(makes_way)
    }

    fn make_room(&mut self, address: IpAddr, now: Instant) -> bool {
        let Self { strangers, waiting, .. } = self;
        // The handshakes are in the order of their arrival, so the search ends at the first one that is younger than
        // `GRACE`.
        let are_old = waiting.iter().take_while(|old| now.duration_since(old.since) >= GRACE);
        let goes = are_old.enumerate().find_map(|(at, old)| {
            strangers.leave(old.address);
            match strangers.enter(address) {
                Ok(()) => Some(at),
                Err(_) => {
                    // Aborting the old handshake would not help, because the new address's network would still exceed
                    // its own limit. The old handshake continues.
                    let _ = strangers.enter(old.address);
                    None
                }
            }
        });
        let goes = goes.and_then(|at| waiting.remove(at));
        goes.iter().for_each(|old| old.makes_way.notify_one());
        goes.is_some()
    }

    /// Removes a handshake from an unknown address from the counts, unless it was already aborted to make room for
    /// another one.
    fn leave(&mut self, makes_way: &Arc<Notify>) {
        let at = self.waiting.iter().position(|it| Arc::ptr_eq(&it.makes_way, makes_way));
        if let Some(gone) = at.and_then(|at| self.waiting.remove(at)) {
            self.strangers.leave(gone.address);
        }
    }
}

impl Callers {
    /// Admits a handshake from this address, or returns `None` if a limit is reached. `is_named` says whether the
    /// settings name the address as a peer's.
    pub fn enter(&self, address: IpAddr, is_named: bool, now: Instant) -> Option<CallerPlace> {
        // An IPv4-mapped IPv6 address counts as its IPv4 address.
        let address = address.to_canonical();
        let state = &mut *self.0.lock();
        let is_known = is_named || state.shown.values().any(|all| all.contains(&address));
        let makes_way = match is_known {
            true => {
                let count = state.known.entry(address).or_default();
                if *count >= OF_KNOWN {
                    return None;
                }
                *count += 1;
                None
            }
            false => Some(state.enter(address, now)?),
        };
        Some(CallerPlace { callers: self.clone(), address, makes_way })
    }
}

impl CallerPlace {
    /// Waits until this handshake has to be aborted to make room for another one, which never happens to a known
    /// address.
    pub async fn made_way(&self) {
        match &self.makes_way {
            Some(makes_way) => makes_way.notified().await,
            None => std::future::pending().await,
        }
    }

    /// Remembers that a peer has proved from this address that it has its key. The handshake no longer counts towards
    /// the limits.
    pub fn has_shown(self, peer: &str) {
        let state = &mut *self.callers.0.lock();
        let all = state.shown.entry(peer.to_owned()).or_default();
        all.retain(|address| *address != self.address);
        all.push_back(self.address);
        if all.len() > REMEMBERED {
            all.pop_front();
        }
    }
}

impl Drop for CallerPlace {
    fn drop(&mut self) {
        let state = &mut *self.callers.0.lock();
        if let Some(makes_way) = &self.makes_way {
            return state.leave(makes_way);
        }
        if let Some(count) = state.known.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                state.known.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    /// Starts handshakes from unknown addresses in different networks, until no more are admitted.
    fn crowd(callers: &Callers, now: Instant) -> Vec<CallerPlace> {
        let each = (0..=255).map(|n| IpAddr::from(Ipv4Addr::new(10, n, 0, 1)));
        each.flat_map(|at| (0..64).filter_map(move |_| callers.enter(at, false, now))).collect()
    }

    #[test]
    fn configured_peer_connects_while_unknown_addresses_are_at_their_limit() {
        let callers = Callers::default();
        let peer = IpAddr::from([192, 0, 2, 1]);
        let now = Instant::now();
        let strangers = crowd(&callers, now);
        assert_eq!(strangers.len(), STRANGERS);
        assert!(callers.enter(peer, false, now).is_none());
        let known: Vec<_> = std::iter::from_fn(|| callers.enter(peer, true, now)).collect();
        assert_eq!(known.len(), OF_KNOWN);
        drop(known);
        assert!(callers.enter(peer, true, now).is_some());
        drop(strangers);
        assert_eq!(crowd(&callers, now).len(), STRANGERS);
    }

    #[test]
    fn authenticated_address_is_admitted_at_the_limit_of_unknown_addresses() {
        let callers = Callers::default();
        let now = Instant::now();
        let at = |n| IpAddr::from([192, 0, 2, n]);
        callers.enter(at(0), false, now).unwrap().has_shown("peer");
        let _strangers = crowd(&callers, now);
        assert!(callers.enter(at(0), false, now).is_some());
        // The peer connects from `REMEMBERED` other addresses, so its first address is forgotten.
        for n in 1..=REMEMBERED as u8 {
            callers.enter(at(n), true, now).unwrap().has_shown("peer");
        }
        assert!(callers.enter(at(0), false, now).is_none() && callers.enter(at(1), false, now).is_some());
    }

    #[test]
    fn one_network_cannot_take_all_handshakes_of_unknown_addresses() {
        let callers = Callers::default();
        let now = Instant::now();
        let each = (0..1000_u128).map(|n| IpAddr::from(Ipv6Addr::from_bits(0x2001_0db8_u128 << 96 | n)));
        let strangers: Vec<_> = each.filter_map(|at| callers.enter(at, false, now)).collect();
        assert_eq!(strangers.len(), OF_STRANGER);
        assert!(callers.enter(IpAddr::from([192, 0, 2, 1]), false, now).is_some());
    }

    /// When all unknown addresses together are at their limit, each new handshake aborts the oldest one that has run
    /// for `GRACE`. Younger handshakes continue. When one network is at its limit, a new handshake from it aborts only
    /// handshakes from that network.
    #[test]
    fn new_handshake_at_the_limit_aborts_the_oldest_stalled_handshake() {
        let callers = Callers::default();
        let start = Instant::now();
        let has_made_way = |caller: &CallerPlace| {
            let mut waits = Box::pin(caller.made_way());
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            waits.as_mut().poll(&mut context).is_ready()
        };
        let strangers = crowd(&callers, start);
        let new = IpAddr::from([192, 0, 2, 1]);
        assert!(callers.enter(new, false, start + GRACE / 2).is_none());
        assert!(!strangers.iter().any(has_made_way));
        let peer = callers.enter(new, false, start + GRACE).unwrap();
        let gone: Vec<_> = strangers.iter().map(has_made_way).collect();
        assert_eq!(gone.iter().filter(|gone| **gone).count(), 1);
        assert!(gone[0]);
        // Dropping the first handshakes makes room for as many others, except for the one that was aborted in favour of
        // `peer`.
        drop(strangers);
        assert_eq!(crowd(&callers, start + GRACE).len(), STRANGERS - 1);
        assert!(!has_made_way(&peer));

        let callers = Callers::default();
        let [own, other] = [[192, 0, 2, 1], [198, 51, 100, 1]].map(IpAddr::from);
        let older = callers.enter(other, false, start).unwrap();
        let full: Vec<_> = (0..OF_STRANGER).map(|_| callers.enter(own, false, start).unwrap()).collect();
        let _next = callers.enter(own, false, start + GRACE).unwrap();
        assert!(!has_made_way(&older) && has_made_way(&full[0]));
        // 1000 new handshakes arrive at once from a network that is at its limit. Each handshake that has run for
        // `GRACE` is aborted for one of them, and no further one is admitted.
        let all = (0..1000).filter_map(|_| callers.enter(own, false, start + GRACE));
        assert_eq!(all.collect::<Vec<_>>().len(), OF_STRANGER - 1);
    }
}
