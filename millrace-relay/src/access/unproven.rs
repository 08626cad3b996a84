//! Sessions that have not shown a right to anything yet: how many there may be, and which has to go.
//!
//! Whoever connects may bring a token with a request later, so strangers are let in for what they may become. They have
//! places of their own, few for one client. A newcomer is never turned away for want of one: the session that has waited
//! longest goes, of the client that has most of them. So who brings a token at once is served however many strangers there are.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use millrace_proto::networks;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Bounds of sessions without a right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Sessions, of all clients.
    pub sessions: usize,
    /// Sessions of one client, by address or /64.
    pub of_client: usize,
    /// How long one may be without a right after SETUP, and after its last right is over.
    pub patience: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { sessions: 1024, of_client: 64, patience: Duration::from_secs(10) }
    }
}

/// The sessions without a right.
#[derive(Debug)]
pub struct Unproven {
    bounds: Bounds,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    /// Sessions by age, the oldest first.
    places: BTreeMap<u64, Session>,
    of_client: HashMap<IpAddr, usize>,
}

#[derive(Debug)]
struct Session {
    client: IpAddr,
    displaced: Arc<Notify>,
}

/// A place among the sessions without a right, until it is dropped.
#[derive(Debug)]
pub struct Place {
    of: Arc<Unproven>,
    number: u64,
    displaced: Arc<Notify>,
}

impl Unproven {
    pub fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Self { bounds, waiting: Mutex::default() })
    }

    /// Returns how long a session may be without a right.
    pub fn patience(&self) -> Duration {
        self.bounds.patience
    }

    /// Returns how many sessions have no right.
    pub fn count(&self) -> usize {
        self.waiting.lock().places.len()
    }

    /// Gives a session of this address a place. Where there are as many as there may be, another loses its own.
    pub fn enter(self: &Arc<Self>, address: IpAddr) -> Place {
        let client = networks::client(address);
        let mut waiting = self.waiting.lock();
        if waiting.of_client.get(&client).is_some_and(|count| *count >= self.bounds.of_client) {
            waiting.displace(client);
        }
        if waiting.places.len() >= self.bounds.sessions
            && let Some(client) = waiting.greediest()
        {
            waiting.displace(client);
        }
        let (number, displaced) = (waiting.next, Arc::new(Notify::new()));
        waiting.next += 1;
        waiting.places.insert(number, Session { client, displaced: Arc::clone(&displaced) });
        *waiting.of_client.entry(client).or_default() += 1;
        Place { of: Arc::clone(self), number, displaced }
    }
}

impl Waiting {
    /// Returns the client that has most places; of several, the one whose session has waited longest.
    fn greediest(&self) -> Option<IpAddr> {
        let most = self.of_client.values().max()?;
        let mut oldest = self.places.values().map(|session| session.client);
        oldest.find(|client| self.of_client.get(client) == Some(most))
    }

    /// Takes the place of a client's oldest session, which is told.
    fn displace(&mut self, client: IpAddr) {
        let oldest = self.places.iter().find(|(_, session)| session.client == client);
        let Some(number) = oldest.map(|(number, _)| *number) else { return };
        if let Some(session) = self.leave(number) {
            session.displaced.notify_one();
        }
    }

    fn leave(&mut self, number: u64) -> Option<Session> {
        let session = self.places.remove(&number)?;
        if let Some(count) = self.of_client.get_mut(&session.client) {
            *count -= 1;
            if *count == 0 {
                self.of_client.remove(&session.client);
            }
        }
        Some(session)
    }
}

impl Place {
    /// Waits until the place is taken away.
    pub async fn displaced(&self) {
        self.displaced.notified().await;
    }
}

/// Waits until a session's place is taken away, if it has one.
pub async fn displaced(place: Option<&Place>) {
    match place {
        Some(place) => place.displaced().await,
        None => std::future::pending().await,
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of.waiting.lock().leave(self.number); // none if it was displaced
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn is_displaced(place: &Place) -> bool {
        pin!(place.displaced()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    fn enter(unproven: &Arc<Unproven>, address: &str) -> Place {
        unproven.enter(address.parse().unwrap())
    }

    #[test]
    fn the_oldest_of_a_client_makes_room_for_its_next() {
        let unproven = Unproven::new(Bounds { of_client: 2, ..Bounds::default() });
        let addresses = ["2001:db8::1", "2001:db8::2", "2001:db8::3"];
        let places = addresses.map(|address| enter(&unproven, address));
        let other = enter(&unproven, "2001:db8:0:1::1");
        assert_eq!(places.each_ref().map(is_displaced), [true, false, false]);
        assert!(!is_displaced(&other));
        assert_eq!(unproven.count(), 3);
        drop((places, other));
        assert_eq!(unproven.count(), 0);
        assert!(unproven.waiting.lock().of_client.is_empty());
    }

    #[test]
    fn the_client_with_most_sessions_makes_room_for_others() {
        let unproven = Unproven::new(Bounds { sessions: 4, of_client: 3, ..Bounds::default() });
        let single = enter(&unproven, "192.0.2.1");
        let greedy: Vec<_> = (0..3).map(|_| enter(&unproven, "192.0.2.2")).collect();
        let newcomer = enter(&unproven, "192.0.2.3");
        assert!(!is_displaced(&single) && !is_displaced(&newcomer));
        assert_eq!(greedy.iter().map(is_displaced).collect::<Vec<_>>(), [true, false, false]);
        assert_eq!(unproven.count(), 4);
    }
}
