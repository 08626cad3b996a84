//! Who calls: handshakes by address, of those that are under way.

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use parking_lot::Mutex;

#[derive(Clone)]
pub struct Callers {
    most: usize,
    counts: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// One of them, until this is dropped.
pub struct Caller(Callers, IpAddr);

impl Callers {
    /// At most so many of one address.
    pub fn new(most: usize) -> Self {
        Self { most, counts: Arc::default() }
    }

    pub fn enter(&self, address: IpAddr) -> Option<Caller> {
        let mut counts = self.counts.lock();
        let count = counts.entry(address).or_default();
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(Caller(self.clone(), address))
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let mut counts = self.0.counts.lock();
        if let Some(count) = counts.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_has_so_many() {
        let callers = Callers::new(2);
        let [one, other] = [1, 2].map(|it| IpAddr::from([192, 0, 2, it]));
        let first = callers.enter(one);
        let _second = callers.enter(one);
        assert!(first.is_some() && callers.enter(one).is_none() && callers.enter(other).is_some());
        drop(first);
        assert!(callers.enter(one).is_some());
    }
}
