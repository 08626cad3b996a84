//! Handshakes that are under way, by the address that they come from. Strangers share some places, of which no network gets all. Whoever the settings name, or has shown a
//! known key from there before, has places of its own, which no stranger takes.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    sync::Arc,
};

use millrace_proto::networks::Places;
use parking_lot::Mutex;

/// Handshakes of strangers at once, and of one of them: an IPv4 address or an IPv6 /64.
const STRANGERS: usize = 64;
const OF_STRANGER: usize = 4;
/// Handshakes of an address that is known.
const OF_KNOWN: usize = 32;
/// Addresses that are remembered of each peer.
const REMEMBERED: usize = 8;

#[derive(Clone)]
pub struct Callers(Arc<Mutex<State>>);

struct State {
    strangers: Places,
    known: HashMap<IpAddr, usize>,
    /// Addresses from which peers have shown their keys, the latest last.
    shown: HashMap<String, VecDeque<IpAddr>>,
}

/// One of them, until this is dropped.
pub struct Caller {
    callers: Callers,
    address: IpAddr,
    is_known: bool,
}

impl Default for Callers {
    fn default() -> Self {
        let (strangers, known) = (Places::new(STRANGERS, OF_STRANGER), HashMap::new());
        Self(Arc::new(Mutex::new(State { strangers, known, shown: HashMap::new() })))
    }
}

impl Callers {
    /// Takes a place, if one is left for this address. `is_named` says whether the settings name it as a peer's.
    pub fn enter(&self, address: IpAddr, is_named: bool) -> Option<Caller> {
        let address = address.to_canonical();
        let state = &mut *self.0.lock();
        let is_known = is_named || state.shown.values().any(|all| all.contains(&address));
        let has_entered = match is_known {
            true => {
                let count = state.known.entry(address).or_default();
                let has_room = *count < OF_KNOWN;
                *count += usize::from(has_room);
                has_room
            }
            false => state.strangers.enter(address),
        };
        has_entered.then(|| Caller { callers: self.clone(), address, is_known })
    }
}

impl Caller {
    /// Remembers that a peer has shown its key from this address, and gives the place back.
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

impl Drop for Caller {
    fn drop(&mut self) {
        let state = &mut *self.callers.0.lock();
        if !self.is_known {
            return state.strangers.leave(self.address);
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

    /// Strangers from everywhere.
    fn crowd(callers: &Callers) -> Vec<Caller> {
        let each = (0..=255).map(|n| IpAddr::from(Ipv4Addr::new(10, n, 0, 1)));
        each.flat_map(|at| (0..64).filter_map(move |_| callers.enter(at, false))).collect()
    }

    #[test]
    fn strangers_leave_those_who_are_named_their_places() {
        let (callers, peer) = (Callers::default(), IpAddr::from([192, 0, 2, 1]));
        let strangers = crowd(&callers);
        assert_eq!(strangers.len(), STRANGERS);
        assert!(callers.enter(peer, false).is_none());
        let known: Vec<_> = std::iter::from_fn(|| callers.enter(peer, true)).collect();
        assert_eq!(known.len(), OF_KNOWN);
        drop(known);
        assert!(callers.enter(peer, true).is_some());
        drop(strangers);
        assert_eq!(crowd(&callers).len(), STRANGERS);
    }

    #[test]
    fn who_has_shown_a_key_is_known_the_next_time() {
        let callers = Callers::default();
        let at = |n| IpAddr::from([192, 0, 2, n]);
        callers.enter(at(0), false).unwrap().has_shown("peer");
        let _strangers = crowd(&callers);
        assert!(callers.enter(at(0), false).is_some());
        // It moves, and what it has left is forgotten.
        for n in 1..=REMEMBERED as u8 {
            callers.enter(at(n), true).unwrap().has_shown("peer");
        }
        assert!(callers.enter(at(0), false).is_none() && callers.enter(at(1), false).is_some());
    }

    #[test]
    fn one_network_of_strangers_leaves_others_places() {
        let callers = Callers::default();
        let each = (0..1000_u128).map(|n| IpAddr::from(Ipv6Addr::from_bits(0x2001_0db8_u128 << 96 | n)));
        let strangers: Vec<_> = each.filter_map(|at| callers.enter(at, false)).collect();
        assert_eq!(strangers.len(), OF_STRANGER);
        assert!(callers.enter(IpAddr::from([192, 0, 2, 1]), false).is_some());
    }
}
