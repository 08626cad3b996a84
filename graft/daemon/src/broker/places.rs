//! How many connections users have.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

/// How many connections there may be.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    pub all: usize,
    pub of_user: usize,
}

/// Connections that are there, by users. Nobody gets more than are left, so that whoever comes later gets some, too.
#[derive(Clone)]
pub struct Places {
    pool: Pool,
    taken: Arc<Mutex<HashMap<u32, usize>>>,
}

/// One of them, until this is dropped.
pub struct Place(Places, u32);

impl Places {
    pub fn new(pool: Pool) -> Self {
        Self { pool, taken: Arc::default() }
    }

    /// Makes places of which one user may have so many.
    pub fn of_users(of_user: usize) -> Self {
        Self::new(Pool { all: usize::MAX, of_user })
    }

    pub fn set_of_user(&mut self, of_user: usize) {
        self.pool.of_user = of_user;
    }

    pub fn enter(&self, user: u32) -> Option<Place> {
        let mut taken = self.taken.lock();
        let left = self.pool.all.saturating_sub(taken.values().sum());
        let own = taken.get(&user).copied().unwrap_or_default();
        if left == 0 || own >= self.pool.of_user.min(left) {
            return None;
        }
        taken.insert(user, own + 1);
        Some(Place(self.clone(), user))
    }
}

impl Drop for Place {
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
    fn users_who_come_later_find_places() {
        let places = Places::new(Pool { all: 64, of_user: 8 });
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
