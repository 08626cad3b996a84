//! Lists of connections that have work for a task, so that the task does not have to check all connections.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicBool, Ordering},
};

use parking_lot::Mutex;

/// The connections (`C`) that have work for one task. Any thread may add a connection, and the task takes them all.
///
/// A connection has a state that shows the work to do, such as a full inbox. It also has an atomic flag (mark) for each
/// such list, which is set while the list contains the connection. A thread that changes the state calls [`Self::add`]
/// afterwards. The task takes the list, which clears the marks, and reads the states afterwards. All four accesses to
/// states and marks are sequentially consistent. So if the task reads a state too early to see a change, the thread
/// finds the mark cleared and lists the connection again.
pub(super) struct AttentionList<C>(Mutex<Vec<Weak<C>>>);

impl<C> Default for AttentionList<C> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<C> AttentionList<C> {
    /// Adds a connection to the list, unless its flag `mark` shows that the list contains it already.
    pub fn add(&self, connection: &Arc<C>, mark: &AtomicBool) {
        if !mark.swap(true, Ordering::SeqCst) {
            self.0.lock().push(Arc::downgrade(connection));
        }
    }

    /// Takes all connections out of the list. Connections that no longer exist are not returned.
    pub fn take(&self, mark: impl Fn(&C) -> &AtomicBool) -> Vec<Arc<C>> {
        let listed = std::mem::take(&mut *self.0.lock());
        let connections = listed.iter().filter_map(Weak::upgrade);
        connections.inspect(|connection| mark(connection).store(false, Ordering::SeqCst)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::AtomicU64, thread};

    use super::*;

    #[derive(Default)]
    struct Subject {
        wanted: AtomicU64,
        mark: AtomicBool,
    }

    #[test]
    fn changed_connection_is_listed_once_until_the_list_is_taken() {
        let list = AttentionList::default();
        let [first, second, gone] = [(); 3].map(|()| Arc::new(Subject::default()));
        for subject in [&first, &second, &first, &gone] {
            list.add(subject, &subject.mark);
        }
        drop(gone);
        let taken = list.take(|subject| &subject.mark);
        assert!(matches!(&taken[..], [a, b] if Arc::ptr_eq(a, &first) && Arc::ptr_eq(b, &second)));
        assert!(list.take(|subject| &subject.mark).is_empty());
        list.add(&second, &second.mark);
        assert_eq!(list.take(|subject| &subject.mark).len(), 1);
    }

    #[test]
    fn change_made_while_the_list_of_connections_is_taken_is_seen() {
        const CHANGES: u64 = 20_000;
        let list = AttentionList::default();
        let subject = Arc::new(Subject::default());
        let mut seen = 0;
        thread::scope(|scope| {
            let changing = scope.spawn(|| {
                for _ in 0..CHANGES {
                    subject.wanted.fetch_add(1, Ordering::SeqCst);
                    list.add(&subject, &subject.mark);
                }
            });
            let mut serve = || {
                let taken = list.take(|subject| &subject.mark);
                seen += taken.iter().map(|subject| subject.wanted.swap(0, Ordering::SeqCst)).sum::<u64>();
            };
            while !changing.is_finished() {
                serve();
            }
            serve();
        });
        assert_eq!(seen, CHANGES);
    }
}
