//! Lets tasks wait until a key is added to a collection elsewhere. Adding a key wakes only the tasks that wait for this
//! key.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// The tasks that wait, by key.
///
/// A task first calls [`Self::wait`], then looks for its key, and awaits [`Waiter::woken`] only if the key is missing.
/// Whoever adds a key calls [`Self::wake`] afterwards. So either the task finds the key, or it is woken. Waking removes
/// a task's entry, and so does dropping the [`Waiter`], so there are never more entries than tasks.
pub struct Waiters<K>(Mutex<WaiterState<K>>);

struct WaiterState<K> {
    by_key: BTreeMap<(K, u64), oneshot::Sender<()>>,
    next: u64,
}

/// The entry of a task that waits. Dropping it removes the entry.
pub struct Waiter<'a, K: Ord + Clone> {
    waiters: &'a Waiters<K>,
    place: (K, u64),
    woken: oneshot::Receiver<()>,
}

impl<K> Default for Waiters<K> {
    fn default() -> Self {
        Self(Mutex::new(WaiterState { by_key: BTreeMap::new(), next: 0 }))
    }
}

impl<K: Ord + Clone> Waiters<K> {
    /// Registers the calling task for `key`. Call this before you look for the key, so that a key that is added in
    /// between is not missed.
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

    /// Wakes the tasks that wait for `first` or for later keys in order, up to the first key that is not `wanted`.
    pub fn wake_range(&self, first: &K, wanted: impl Fn(&K) -> bool) {
        let mut state = self.0.lock();
        let mut from = (first.clone(), 0);
        while let Some((place, _)) = state.by_key.range(from..).next().filter(|((key, _), _)| wanted(key)) {
            from = place.clone();
            if let Some(sender) = state.by_key.remove(&from) {
                let _ = sender.send(()); // The send fails only if the waiting task is gone.
            }
        }
    }

    /// Returns the number of tasks that wait.
    pub fn count(&self) -> usize {
        self.0.lock().by_key.len()
    }
}

impl<K: Ord + Clone> Waiter<'_, K> {
    /// Waits until the key is added for which the task has registered.
    pub async fn woken(mut self) {
        let _ = (&mut self.woken).await; // The sender is dropped only after it has sent, so receiving cannot fail.
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
    async fn only_tasks_waiting_for_the_woken_value_wake() {
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
