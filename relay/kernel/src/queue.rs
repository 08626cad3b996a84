//! Commands that wait for the engine's thread.
//!
//! Peers cause most of it: they move from port to port, and update keys, as often as they like. So a connection has one place for what
//! it wants, in which what is newer replaces what is older, and the queue is one of connections. Whatever peers do it is never longer than
//! there are connections. What the operator wants is taken first.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use millrace_kernel::crypto::QuicKeys;
use millrace_quic::{packet::ConnectionId, plane::downstream::StreamKey};
use millrace_transport::offload::{Delegation, Path};
use parking_lot::{Condvar, Mutex};
use tracing::error;

/// A connection that has commands carried out.
pub(super) trait Subject {
    fn place(&self) -> &Place;

    /// Stops the program's use of the keys that those of `generation` replace. Returns whether its runs have to be waited for before
    /// [`Self::set_keys`].
    fn retire_keys(&self, generation: u16) -> bool;

    fn set_keys(&self, generation: u16, keys: &QuicKeys);

    fn set_open_keys(&self, generation: u16, keys: &QuicKeys);

    /// The peer uses a connection ID from now on, or does not any more.
    fn set_id(&self, id: &ConnectionId, is_used: bool);

    /// Stops the program from opening the peer's packets.
    fn stop_opening(&self);

    /// No run of the program sends on the connection any more.
    fn on_released(&self);

    /// Returns whether runs of the program have to be waited for before [`Self::set_path`].
    fn path_waits(&self) -> bool;

    fn set_path(&self, path: &Path);

    /// No run of the program sends on these streams any more.
    fn on_returned(&self, keys: &[StreamKey]);

    /// Streams may have been opened under these tags, for nothing.
    fn on_gone(&self, tags: &[u64]);
}

/// The commands of one connection.
#[derive(Default)]
pub(super) struct Place(Mutex<Pending>);

#[derive(Default)]
struct Pending {
    is_queued: bool,
    path: Option<Box<Path>>,
    /// A generation and its keys, by parity of the generation.
    keys: [Option<(u16, Box<QuicKeys>)>; 2],
    /// Keys to open the peer's packets with, in places as those of `keys`.
    open_keys: [Option<(u16, Box<QuicKeys>)>; 2],
    /// The peer's connection IDs that are new, and those that it does not use any more: at most as many as it may use, of each.
    ids: Vec<(ConnectionId, bool)>,
    is_released: bool,
    /// The streams that are taken back; at most as many as the connection has.
    recalled: Vec<(StreamKey, Option<Box<dyn Delegation>>)>,
    /// Tags of prepared streams; at most as many as the connection has.
    gone: Vec<u64>,
}

/// Commands of connections (`C`), and of the operator (`O`).
pub(super) struct Queue<C, O> {
    waiting: Mutex<Waiting<C, O>>,
    changed: Condvar,
    commands: AtomicU64,
    coalesced: AtomicU64,
}

struct Waiting<C, O> {
    orders: Vec<O>,
    connections: Vec<Arc<C>>,
    /// Something is to be looked at that is not in here.
    wakes: bool,
    is_closed: bool,
}

/// Commands that are carried out together.
pub(super) struct Batch<C, O> {
    pub orders: Vec<O>,
    connections: Vec<(Arc<C>, Pending)>,
}

/// The end of a queue where commands are taken; when it is dropped the queue is closed.
pub(super) struct Taker<C, O>(Arc<Queue<C, O>>);

impl<C, O> Queue<C, O> {
    pub fn new() -> (Arc<Self>, Taker<C, O>) {
        let waiting = Waiting { orders: Vec::new(), connections: Vec::new(), wakes: false, is_closed: false };
        let queue = Arc::new(Self {
            waiting: Mutex::new(waiting),
            changed: Condvar::new(),
            commands: AtomicU64::new(0),
            coalesced: AtomicU64::new(0),
        });
        (Arc::clone(&queue), Taker(queue))
    }

    /// Returns the number of connections that wait.
    pub fn len(&self) -> usize {
        self.waiting.lock().connections.len()
    }

    /// Returns the number of commands of connections so far.
    pub fn commands(&self) -> u64 {
        self.commands.load(Ordering::Relaxed)
    }

    /// Returns the number of commands that newer ones have replaced.
    pub fn coalesced(&self) -> u64 {
        self.coalesced.load(Ordering::Relaxed)
    }

    /// Puts a command of the operator in front of everything else; drops it if the queue is closed.
    pub fn order(&self, order: O) {
        self.change(|waiting| waiting.orders.push(order));
    }

    /// Wakes the thread for something that is not in the queue.
    pub fn wake(&self) {
        self.change(|waiting| waiting.wakes = true);
    }

    pub fn close(&self) {
        // Dropped without the lock: what they hold may use the queue.
        let (orders, connections);
        {
            let mut waiting = self.waiting.lock();
            waiting.is_closed = true;
            orders = std::mem::take(&mut waiting.orders);
            connections = std::mem::take(&mut waiting.connections);
        }
        self.changed.notify_one();
        drop((orders, connections));
    }

    fn change(&self, change: impl FnOnce(&mut Waiting<C, O>)) {
        let mut waiting = self.waiting.lock();
        if !waiting.is_closed {
            change(&mut waiting);
            drop(waiting);
            self.changed.notify_one();
        }
    }
}

impl<C: Subject, O> Queue<C, O> {
    /// Sends to there from now on.
    pub fn set_path(&self, connection: Arc<C>, path: Path) {
        self.put(connection, |pending| pending.path.replace(Box::new(path)).is_some());
    }

    /// Seals with these keys once the packet number word has come to `generation`.
    pub fn set_keys(&self, connection: Arc<C>, generation: u16, keys: QuicKeys) {
        self.put(connection, |pending| put_keys(&mut pending.keys, generation, keys));
    }

    /// Opens the peer's packets of `generation` with these keys.
    pub fn set_open_keys(&self, connection: Arc<C>, generation: u16, keys: QuicKeys) {
        self.put(connection, |pending| put_keys(&mut pending.open_keys, generation, keys));
    }

    /// The peer uses a connection ID from now on, or does not any more.
    pub fn set_id(&self, connection: Arc<C>, id: ConnectionId, is_used: bool) {
        self.put(connection, |pending| {
            let known = pending.ids.iter().position(|(known, _)| *known == id);
            match known.map(|at| pending.ids.remove(at)) {
                // The program has never heard of it.
                Some((_, true)) if !is_used => {}
                _ => pending.ids.push((id, is_used)),
            }
            known.is_some()
        });
    }

    /// Tells the connection once no run of the program sends on it any more. Nothing is granted to it by now.
    pub fn release(&self, connection: Arc<C>) {
        self.put(connection, |pending| std::mem::replace(&mut pending.is_released, true));
    }

    /// Takes a delegation back.
    pub fn recall(&self, connection: Arc<C>, key: StreamKey, delegation: Option<Box<dyn Delegation>>) {
        self.put(connection, |pending| {
            pending.recalled.push((key, delegation));
            false
        });
    }

    /// Says that the ingress is gone for which a stream was prepared, or has been opened.
    pub fn gone(&self, connection: Arc<C>, tag: u64) {
        self.put(connection, |pending| {
            pending.gone.push(tag);
            false
        });
    }

    /// `put` returns whether it has replaced something.
    fn put(&self, connection: Arc<C>, put: impl FnOnce(&mut Pending) -> bool) {
        let (has_replaced, was_queued) = {
            let mut pending = connection.place().0.lock();
            (put(&mut pending), std::mem::replace(&mut pending.is_queued, true))
        };
        self.commands.fetch_add(1, Ordering::Relaxed);
        self.coalesced.fetch_add(has_replaced.into(), Ordering::Relaxed);
        if !was_queued {
            self.change(|waiting| waiting.connections.push(connection));
        }
    }
}

impl<C: Subject, O> Taker<C, O> {
    /// Takes everything that waits; waits for something until `deadline`. `None`: the queue is closed.
    pub fn take(&self, deadline: Instant) -> Option<Batch<C, O>> {
        let (orders, connections) = {
            let mut waiting = self.0.waiting.lock();
            while waiting.orders.is_empty() && waiting.connections.is_empty() && !waiting.wakes {
                if waiting.is_closed {
                    return None;
                }
                if self.0.changed.wait_until(&mut waiting, deadline).timed_out() {
                    break;
                }
            }
            waiting.wakes = false;
            (std::mem::take(&mut waiting.orders), std::mem::take(&mut waiting.connections))
        };
        let take = |connection: Arc<C>| {
            let pending = std::mem::take(&mut *connection.place().0.lock());
            (connection, pending)
        };
        Some(Batch { orders, connections: connections.into_iter().map(take).collect() })
    }
}

impl<C, O> Drop for Taker<C, O> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<C: Subject, O> Batch<C, O> {
    /// Carries out what connections want. `wait`, which returns when runs of the program that have begun are over, is called once, if it
    /// is needed or `must_wait`. What does not need it goes first. A command that panics is given up, and none besides: streams that were
    /// taken back would otherwise be sent by nobody.
    pub fn carry_out(mut self, must_wait: bool, wait: impl FnOnce()) {
        for (connection, pending) in &mut self.connections {
            guarded(|| pending.begin(&**connection));
            guarded(|| pending.recalled.iter_mut().for_each(|(_, delegation)| drop(delegation.take())));
            guarded(|| pending.install(&**connection));
        }
        self.connections.retain(|(_, pending)| !pending.is_empty());
        if must_wait || !self.connections.is_empty() {
            guarded(wait);
        }
        for (connection, mut pending) in self.connections {
            guarded(|| pending.finish(&*connection));
            guarded(|| pending.give_back(&*connection));
        }
    }
}

/// Does some work of the engine's thread, which goes on if that panics.
pub(super) fn guarded(work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        error!(
            "the kernel engine has given up a command, and goes on: please report the panic that was written to standard error"
        );
    }
}

/// Puts keys in place of older ones; returns whether there are some.
fn put_keys(places: &mut [Option<(u16, Box<QuicKeys>)>; 2], generation: u16, keys: QuicKeys) -> bool {
    let place = &mut places[usize::from(generation & 1)];
    let is_newer = place.as_ref().is_none_or(|(known, _)| *known <= generation);
    let replaces = place.is_some();
    if is_newer {
        *place = Some((generation, Box::new(keys)));
    }
    replaces
}

impl Pending {
    /// Does what never has to wait.
    fn begin(&mut self, connection: &impl Subject) {
        let open_keys = self.open_keys.iter_mut().filter_map(Option::take);
        open_keys.for_each(|(generation, keys)| connection.set_open_keys(generation, &keys));
        self.ids.drain(..).for_each(|(id, is_used)| connection.set_id(&id, is_used));
        if self.is_released {
            connection.stop_opening();
        }
        let gone = std::mem::take(&mut self.gone);
        if !gone.is_empty() {
            connection.on_gone(&gone);
        }
    }

    /// Puts a path and keys in place that nothing has to be waited for.
    fn install(&mut self, connection: &impl Subject) {
        for place in &mut self.keys {
            let is_free = |keys: &mut (u16, _)| !connection.retire_keys(keys.0);
            place.take_if(is_free).into_iter().for_each(|(number, keys)| connection.set_keys(number, &keys));
        }
        let path = self.path.take_if(|_| !connection.path_waits());
        path.into_iter().for_each(|path| connection.set_path(&path));
    }

    /// Does what had to wait.
    fn finish(&mut self, connection: &impl Subject) {
        let keys = self.keys.iter_mut().filter_map(Option::take);
        keys.for_each(|(generation, keys)| connection.set_keys(generation, &keys));
        self.path.take().into_iter().for_each(|path| connection.set_path(&path));
    }

    /// Says what the program has no part in any more.
    fn give_back(&self, connection: &impl Subject) {
        if !self.recalled.is_empty() {
            let keys: Vec<_> = self.recalled.iter().map(|(key, _)| *key).collect();
            connection.on_returned(&keys);
        }
        if self.is_released {
            connection.on_released();
        }
    }

    fn is_empty(&self) -> bool {
        let Self { is_queued: _, path, keys, open_keys, ids, is_released, recalled, gone } = self;
        let no_keys = keys.iter().chain(open_keys).all(Option::is_none);
        path.is_none() && no_keys && ids.is_empty() && !is_released && recalled.is_empty() && gone.is_empty()
    }
}

#[cfg(test)]
mod tests;
