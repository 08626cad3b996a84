//! Unauthorized sessions, whose peers have not shown yet that they may publish or subscribe: how many there may be, and
//! which one is closed if there are too many.
//!
//! A client may send a token with a later request, so unauthorized sessions are accepted at first. Their number is
//! limited: a client may have few, and no network more than half of them. A new session is always accepted. If a
//! network has reached its limit, its oldest unauthorized session is closed. If the total limit is reached, the oldest
//! session of the network that uses most of its own limit is closed. So a client that sends a token at once is served,
//! however many unauthorized sessions there are.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use millrace_base::networks::{NetworkFull, NetworkPlaces, NetworkPrefix};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::refusal::AccessRefusal;

/// Limits on unauthorized sessions, whose peers have not shown yet that they may publish or subscribe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnprovenBounds {
    /// Largest number of unauthorized sessions of all clients together.
    pub sessions: usize,
    /// Largest number of unauthorized sessions of one client, an IPv4 address or an IPv6 /64. Wider networks may have
    /// multiples of this number ([`millrace_base::networks`]).
    pub of_client: usize,
    /// Longest time that a session may be unauthorized, after SETUP or after its peer's last permission has ended.
    pub patience: Duration,
}

impl Default for UnprovenBounds {
    fn default() -> Self {
        Self { sessions: 1024, of_client: 64, patience: Duration::from_secs(10) }
    }
}

/// The unauthorized sessions.
#[derive(Debug)]
pub struct Unproven {
    bounds: UnprovenBounds,
    waiting: Mutex<UnprovenSessions>,
}

#[derive(Debug)]
struct UnprovenSessions {
    next: u64,
    /// The sessions by a number that counts up, so that the oldest session has the lowest number.
    sessions: BTreeMap<u64, UnprovenSession>,
    places: NetworkPlaces,
}

#[derive(Debug)]
struct UnprovenSession {
    address: IpAddr,
    displaced: Arc<Displaced>,
}

/// A notification to an unauthorized session that it must close, because there are too many such sessions.
#[derive(Debug, Default)]
struct Displaced {
    why: OnceLock<AccessRefusal>,
    told: Notify,
}

/// The entry of a session in the table of unauthorized sessions. Dropping this value removes the entry.
#[derive(Debug)]
pub struct UnprovenPlace {
    of: Arc<Unproven>,
    number: u64,
    displaced: Arc<Displaced>,
}

impl Unproven {
    /// Makes a table without sessions.
    pub fn new(bounds: UnprovenBounds) -> Arc<Self> {
        let places = NetworkPlaces::new(bounds.sessions, bounds.of_client);
        let waiting = UnprovenSessions { next: 0, sessions: BTreeMap::new(), places };
        Arc::new(Self { bounds, waiting: Mutex::new(waiting) })
    }

    /// Returns the longest time that a session may be unauthorized.
    pub fn patience(&self) -> Duration {
        self.bounds.patience
    }

    /// Returns the number of unauthorized sessions.
    pub fn count(&self) -> usize {
        self.waiting.lock().sessions.len()
    }

    /// Adds a session from this address to the table. If the table is full, or has too many sessions of the same
    /// network, another session is removed from it and closed.
    pub fn enter(self: &Arc<Self>, address: IpAddr) -> UnprovenPlace {
        let mut waiting = self.waiting.lock();
        // Each iteration removes one session of the full network, so the loop ends.
        while let Err(full) = waiting.places.enter(address) {
            waiting.make_room(full);
        }
        let number = waiting.next;
        let displaced = Arc::<Displaced>::default();
        waiting.next += 1;
        waiting.sessions.insert(number, UnprovenSession { address, displaced: Arc::clone(&displaced) });
        UnprovenPlace { of: Arc::clone(self), number, displaced }
    }
}

impl UnprovenSessions {
    fn make_room(&mut self, full: NetworkFull) {
        match full {
            NetworkFull::All => {
                let most = self.places.greatest_load();
                self.displace(AccessRefusal::Displaced, |places, address| places.load(address) == most);
            }
            NetworkFull::Client(client) => self.displace_of(AccessRefusal::Displaced, client),
            NetworkFull::Wider(network) => self.displace_of(AccessRefusal::NetworkDisplaced, network),
        }
    }

    fn displace_of(&mut self, why: AccessRefusal, network: NetworkPrefix) {
        self.displace(why, |_, address| network.contains(address));
    }

    /// Removes the oldest unauthorized session for which the predicate `of` returns true from the table, and notifies
    /// the session that it must close.
    fn displace(&mut self, why: AccessRefusal, of: impl Fn(&NetworkPlaces, IpAddr) -> bool) {
        let oldest = self.sessions.iter().find(|(_, session)| of(&self.places, session.address));
        let Some(number) = oldest.map(|(number, _)| *number) else { return };
        if let Some(UnprovenSession { displaced, .. }) = self.leave(number) {
            let _ = displaced.why.set(why); // no reason was set before, since a session is removed only once
            displaced.told.notify_one();
        }
    }

    fn leave(&mut self, number: u64) -> Option<UnprovenSession> {
        let session = self.sessions.remove(&number)?;
        self.places.leave(session.address);
        Some(session)
    }
}

impl UnprovenPlace {
    /// Waits until the session must close to make room for newer unauthorized sessions, and returns the reason.
    pub async fn displaced(&self) -> AccessRefusal {
        self.displaced.told.notified().await;
        self.displaced.why.get().copied().unwrap_or(AccessRefusal::Displaced)
    }
}

/// Waits until a session must close to make room for newer unauthorized sessions, and returns the reason. Waits for
/// ever if the session is not in the table.
pub async fn displaced(place: Option<&UnprovenPlace>) -> AccessRefusal {
    match place {
        Some(place) => place.displaced().await,
        None => std::future::pending().await,
    }
}

impl Drop for UnprovenPlace {
    fn drop(&mut self) {
        self.of.waiting.lock().leave(self.number); // `leave` has no effect if the session was removed before
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn why_displaced(place: &UnprovenPlace) -> Option<AccessRefusal> {
        match pin!(place.displaced()).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(why) => Some(why),
            Poll::Pending => None,
        }
    }

    fn is_displaced(place: &UnprovenPlace) -> bool {
        why_displaced(place).is_some()
    }

    fn enter(unproven: &Arc<Unproven>, address: &str) -> UnprovenPlace {
        unproven.enter(address.parse().unwrap())
    }

    #[test]
    fn unauthorized_session_above_a_client_limit_displaces_that_clients_first() {
        let unproven = Unproven::new(UnprovenBounds { of_client: 2, ..UnprovenBounds::default() });
        let addresses = ["2001:db8::1", "2001:db8::2", "2001:db8::3"];
        let places = addresses.map(|address| enter(&unproven, address));
        let other = enter(&unproven, "2001:db8:0:1::1");
        assert_eq!(places.each_ref().map(why_displaced), [Some(AccessRefusal::Displaced), None, None]);
        assert!(!is_displaced(&other));
        assert_eq!(unproven.count(), 3);
        drop((places, other));
        assert_eq!(unproven.count(), 0);
        assert_eq!(unproven.waiting.lock().places.taken(), 0);
    }

    #[test]
    fn session_above_the_total_limit_displaces_one_of_the_largest_client() {
        let unproven =
            Unproven::new(UnprovenBounds { sessions: 6, of_client: 3, ..UnprovenBounds::default() });
        let singles = ["192.0.2.1", "198.51.100.1", "198.51.100.2"].map(|at| enter(&unproven, at));
        let greedy: Vec<_> = (0..3).map(|_| enter(&unproven, "203.0.113.2")).collect();
        let newcomer = enter(&unproven, "192.0.2.3");
        assert!(!singles.iter().any(is_displaced) && !is_displaced(&newcomer));
        assert_eq!(greedy.iter().map(is_displaced).collect::<Vec<_>>(), [true, false, false]);
        assert_eq!(unproven.count(), 6);
    }

    /// Connects 1000 clients of one /48. A /48 contains 65,536 clients, but may have no more than half of all sessions.
    #[test]
    fn network_above_half_of_all_sessions_displaces_only_its_own_sessions() {
        let unproven =
            Unproven::new(UnprovenBounds { sessions: 64, of_client: 4, ..UnprovenBounds::default() });
        let others: Vec<_> = (0..16).map(|n| enter(&unproven, &format!("198.51.{n}.1"))).collect();
        let nth = |n: u128| IpAddr::from(Ipv6Addr::from_bits(0x2001_0db8_u128 << 96 | n << 64));
        let many: Vec<_> = (0..1000).map(|n| unproven.enter(nth(n * 61))).collect();
        assert!(!others.iter().any(is_displaced));
        let gone: Vec<_> = many.iter().filter_map(why_displaced).collect();
        assert_eq!((gone.len(), unproven.count()), (1000 - 32, 16 + 32));
        assert!(gone.iter().all(|why| *why == AccessRefusal::NetworkDisplaced));
        // A /56 may have 8 times as many sessions as a client.
        drop(many);
        let site: Vec<_> = (0..256).map(|n| unproven.enter(nth(n))).collect();
        assert_eq!(site.iter().filter(|place| !is_displaced(place)).count(), 32);
    }
}
