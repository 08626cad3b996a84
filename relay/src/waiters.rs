//! Tasks that wait, by key. A task is woken once, by the key that it waits for and by no other.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// The tasks that wait, by key.
pub struct Waiters<K>(Mutex<State<K>>);

struct State<K> {
    by_key: BTreeMap<(K, u64), oneshot::Sender<()>>,
    next: u64,
}

/// A task's place among those that wait, until it is dropped.
pub struct Waiter<'a, K: Ord + Clone> {
    waiters: &'a Waiters<K>,
    place: (K, u64),
    woken: oneshot::Receiver<()>,
}

impl<K> Default for Waiters<K> {
    fn default() -> Self {
        Self(Mutex::new(State { by_key: BTreeMap::new(), next: 0 }))
    }
}

impl<K: Ord + Clone> Waiters<K> {
    /// Registers the caller for `key`. Call this before you look for it, so that no arrival is missed.
    pub fn wait(&self, key: &K) -> Waiter<'_, K> {
        let mut state = self.0.lock();
        let place = (key.clone(), state.next);
        state.next += 1;
        let (sender, woken) = oneshot::channel();
        state.by_key.insert(place.clone(), sender);
        Waiter { waiters: self, place, woken }
    }

    /// Wakes the tasks that wait for `key`.
    pub fn wake(&self, key: &K) {
        self.wake_range(key, |waiting| waiting == key);
    }

    /// Wakes the tasks that wait for `first` and for the keys behind it, until one is not `wanted`.
    pub fn wake_range(&self, first: &K, wanted: impl Fn(&K) -> bool) {
        let mut state = self.0.lock();
        let mut from = (first.clone(), 0);
        while let Some((place, _)) = state.by_key.range(from..).next().filter(|((key, _), _)| wanted(key)) {
            from = place.clone();
            if let Some(sender) = state.by_key.remove(&from) {
                let _ = sender.send(()); // the task may be gone
            }
        }
    }

    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.0.lock().by_key.len()
    }
}

impl<K: Ord + Clone> Waiter<'_, K> {
    /// Returns once it has been woken.
    pub async fn woken(mut self) {
        let _ = (&mut self.woken).await; // nobody drops the sender before
    }
}

impl<K: Ord + Clone> Drop for Waiter<'_, K> {
    fn drop(&mut self) {
        self.waiters.0.lock().by_key.remove(&self.place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_those_wake_who_wait_for_it() {
        let waiters = Waiters::default();
        let [mut one, mut two, mut other, mut gone] = [1, 1, 2, 3].map(|key| waiters.wait(&key));
        waiters.wake(&1);
        assert!(one.woken.try_recv().is_ok() && two.woken.try_recv().is_ok());
        assert!(other.woken.try_recv().is_err());
        waiters.wake_range(&2, |key| *key < 4);
        assert!(other.woken.try_recv().is_ok() && gone.woken.try_recv().is_ok());
        let waiting = waiters.wait(&1);
        drop((one, two, other, gone));
        assert_eq!(waiters.count(), 1);
        waiters.wake(&1);
        waiting.woken().await;
        assert_eq!(waiters.count(), 0);
    }
}
