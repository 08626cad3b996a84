//! Handshakes that are under way, by the address that they come from. Strangers share some places, of which no network gets all. Whoever the settings name, or has shown a
//! known key from there before, has places of its own, which no stranger takes.
//!
//! A peer that calls from a new address is a stranger until it has shown its key. So that it need not wait for those who stall, a stranger who has had
//! the time of a handshake makes way for the next one. That time also bounds how many handshakes there are to work on.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_base::networks::Places;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Handshakes of strangers at once, and of one of them: an IPv4 address or an IPv6 /64.
const STRANGERS: usize = 64;
const OF_STRANGER: usize = 4;
/// A handshake that is younger does not make way for another one.
const GRACE: Duration = Duration::from_millis(250);
/// Handshakes of an address that is known.
const OF_KNOWN: usize = 32;
/// Addresses that are remembered of each peer.
const REMEMBERED: usize = 8;

#[derive(Clone)]
pub struct Callers(Arc<Mutex<State>>);

struct State {
    strangers: Places,
    /// Strangers that have a place, the oldest first.
    waiting: VecDeque<Stranger>,
    known: HashMap<IpAddr, usize>,
    /// Addresses from which peers have shown their keys, the latest last.
    shown: HashMap<String, VecDeque<IpAddr>>,
}

struct Stranger {
    address: IpAddr,
    since: Instant,
    makes_way: Arc<Notify>,
}

/// One of them, until this is dropped.
pub struct Caller {
    callers: Callers,
    address: IpAddr,
    /// `None`: it is known.
    makes_way: Option<Arc<Notify>>,
}

impl Default for Callers {
    fn default() -> Self {
        let (strangers, waiting) = (Places::new(STRANGERS, OF_STRANGER), VecDeque::new());
        let (known, shown) = (HashMap::new(), HashMap::new());
        Self(Arc::new(Mutex::new(State { strangers, waiting, known, shown })))
    }
}

impl State {
    /// Takes a place, which an older stranger has to leave if there is none.
    fn enter(&mut self, address: IpAddr, now: Instant) -> Option<Arc<Notify>> {
        if self.strangers.enter(address).is_err() && !self.make_room(address, now) {
            return None;
        }
        let makes_way = Arc::new(Notify::new());
        self.waiting.push_back(Stranger { address, since: now, makes_way: makes_way.clone() });
        Some(makes_way)
    }

    fn make_room(&mut self, address: IpAddr, now: Instant) -> bool {
        let Self { strangers, waiting, .. } = self;
        let are_old = waiting.iter().take_while(|old| now.duration_since(old.since) >= GRACE);
        let goes = are_old.enumerate().find_map(|(at, old)| {
            strangers.leave(old.address);
            match strangers.enter(address) {
                Ok(()) => Some(at),
                Err(_) => {
                    // It is as it was.
                    let _ = strangers.enter(old.address);
                    None
                }
            }
        });
        let goes = goes.and_then(|at| waiting.remove(at));
        goes.iter().for_each(|old| old.makes_way.notify_one());
        goes.is_some()
    }

    /// Gives a place back, unless it has gone to another stranger already.
    fn leave(&mut self, makes_way: &Arc<Notify>) {
        let at = self.waiting.iter().position(|it| Arc::ptr_eq(&it.makes_way, makes_way));
        if let Some(gone) = at.and_then(|at| self.waiting.remove(at)) {
            self.strangers.leave(gone.address);
        }
    }
}

impl Callers {
    /// Takes a place, if there is one for this address. `is_named` says whether the settings name it as a peer's.
    pub fn enter(&self, address: IpAddr, is_named: bool, now: Instant) -> Option<Caller> {
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
        Some(Caller { callers: self.clone(), address, makes_way })
    }
}

impl Caller {
    /// Returns when another stranger has the place.
    pub async fn made_way(&self) {
        match &self.makes_way {
            Some(makes_way) => makes_way.notified().await,
            None => std::future::pending().await,
        }
    }

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

    /// Strangers from everywhere.
    fn crowd(callers: &Callers, now: Instant) -> Vec<Caller> {
        let each = (0..=255).map(|n| IpAddr::from(Ipv4Addr::new(10, n, 0, 1)));
        each.flat_map(|at| (0..64).filter_map(move |_| callers.enter(at, false, now))).collect()
    }

    #[test]
    fn strangers_leave_those_who_are_named_their_places() {
        let (callers, peer, now) = (Callers::default(), IpAddr::from([192, 0, 2, 1]), Instant::now());
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
    fn who_has_shown_a_key_is_known_the_next_time() {
        let (callers, now) = (Callers::default(), Instant::now());
        let at = |n| IpAddr::from([192, 0, 2, n]);
        callers.enter(at(0), false, now).unwrap().has_shown("peer");
        let _strangers = crowd(&callers, now);
        assert!(callers.enter(at(0), false, now).is_some());
        // It moves, and what it has left is forgotten.
        for n in 1..=REMEMBERED as u8 {
            callers.enter(at(n), true, now).unwrap().has_shown("peer");
        }
        assert!(callers.enter(at(0), false, now).is_none() && callers.enter(at(1), false, now).is_some());
    }

    #[test]
    fn one_network_of_strangers_leaves_others_places() {
        let (callers, now) = (Callers::default(), Instant::now());
        let each = (0..1000_u128).map(|n| IpAddr::from(Ipv6Addr::from_bits(0x2001_0db8_u128 << 96 | n)));
        let strangers: Vec<_> = each.filter_map(|at| callers.enter(at, false, now)).collect();
        assert_eq!(strangers.len(), OF_STRANGER);
        assert!(callers.enter(IpAddr::from([192, 0, 2, 1]), false, now).is_some());
    }

    /// Whoever has had its time makes way, the oldest first and one for each; whoever has not does not. A network makes way for its own alone
    /// where it is the network that is full.
    #[test]
    fn strangers_who_stall_make_way_for_the_next_one() {
        let (callers, start) = (Callers::default(), Instant::now());
        let has_made_way = |caller: &Caller| {
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
        // It was another's place when it was dropped.
        drop(strangers);
        assert_eq!(crowd(&callers, start + GRACE).len(), STRANGERS - 1);
        assert!(!has_made_way(&peer));

        let callers = Callers::default();
        let [own, other] = [[192, 0, 2, 1], [198, 51, 100, 1]].map(IpAddr::from);
        let older = callers.enter(other, false, start).unwrap();
        let full: Vec<_> = (0..OF_STRANGER).map(|_| callers.enter(own, false, start).unwrap()).collect();
        let _next = callers.enter(own, false, start + GRACE).unwrap();
        assert!(!has_made_way(&older) && has_made_way(&full[0]));
        // Those who come all at once find no more room than there is.
        let all = (0..1000).filter_map(|_| callers.enter(own, false, start + GRACE));
        assert_eq!(all.collect::<Vec<_>>().len(), OF_STRANGER - 1);
    }
}
