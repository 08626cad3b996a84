//! Counts connections against two limits: one for all users together, and one for each user.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

/// Limits of the number of connections: for all users together, and for each user.
#[derive(Clone, Copy, Debug)]
pub struct PlacePool {
    pub all: usize,
    pub of_user: usize,
}

/// Counts of present connections by user. A user may hold at most as many connections as all users together may still
/// open, so that later users get some, too.
#[derive(Clone)]
pub struct ClientPlaces {
    pool: PlacePool,
    taken: Arc<Mutex<HashMap<u32, usize>>>,
}

/// One connection that counts towards the limits, until this value is dropped.
pub struct ClientPlace(ClientPlaces, u32);

impl ClientPlaces {
    pub fn new(pool: PlacePool) -> Self {
        Self { pool, taken: Arc::default() }
    }

    /// Creates limits for each user, without a limit for all users together.
    pub fn for_users(of_user: usize) -> Self {
        Self::new(PlacePool { all: usize::MAX, of_user })
    }

    pub fn set_of_user(&mut self, of_user: usize) {
        self.pool.of_user = of_user;
    }

    pub fn enter(&self, user: u32) -> Option<ClientPlace> {
        let mut taken = self.taken.lock();
        let left = self.pool.all.saturating_sub(taken.values().sum());
        let own = taken.get(&user).copied().unwrap_or_default();
        // A user gets no further connection once it holds as many as all users together may still open.
        if left == 0 || own >= self.pool.of_user.min(left) {
            return None;
        }
        taken.insert(user, own + 1);
        Some(ClientPlace(self.clone(), user))
    }
}

impl Drop for ClientPlace {
    fn drop(&mut self) {
        let mut taken = self.0.taken.lock();
        if let Some(count) = taken.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_cannot_take_all_connections_of_the_session_broker() {
        let places = ClientPlaces::new(PlacePool { all: 64, of_user: 8 });
        let mut kept = Vec::new();
        let counts: Vec<_> = (0..12)
            .map(|user| {
                let taken: Vec<_> = std::iter::from_fn(|| places.enter(user)).collect();
                let count = taken.len();
                kept.push(taken);
                count
            })
            .collect();
        assert_eq!(counts, [8, 8, 8, 8, 8, 8, 8, 4, 2, 1, 1, 0]);
        kept.truncate(1);
        assert_eq!(std::iter::from_fn(|| places.enter(11)).map(std::mem::forget).count(), 8);
    }
}
