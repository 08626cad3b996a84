//! The queue of commands for the engine's thread.
//!
//! Most commands are caused by peers, which can change ports and update keys at will. So each connection has one set of
//! pending commands, in which newer ones replace older ones, and the queue consists of connections. Whatever peers do,
//! it is never longer than the number of connections. The operator's commands, such as attaching to other interfaces,
//! are carried out first.

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
use millrace_transport::offload::{Delegation, OffloadPath};
use parking_lot::{Condvar, Mutex};
use tracing::error;

/// A connection whose commands are queued.
pub(super) trait CommandSubject {
    fn place(&self) -> &ConnectionCommands;

    /// Stops the program from using the old keys that the keys of `generation` replace. Returns whether
    /// [`Self::set_keys`] has to wait for program runs.
    fn retire_keys(&self, generation: u16) -> bool;

    fn set_keys(&self, generation: u16, keys: &QuicKeys);

    fn set_open_keys(&self, generation: u16, keys: &QuicKeys);

    /// Tells the program that the peer uses a connection ID from now on, or does not use it any more.
    fn set_id(&self, id: &ConnectionId, is_used: bool);

    /// Stops the program from decrypting the peer's packets.
    fn stop_opening(&self);

    /// Reports to the connection that no program run sends on it any more.
    fn on_released(&self);

    /// Reports whether [`Self::set_path`] has to wait for program runs.
    fn path_waits(&self) -> bool;

    fn set_path(&self, path: &OffloadPath);

    /// Reports to the connection that no program run sends on these streams any more.
    fn on_returned(&self, keys: &[StreamKey]);

    /// Reports to the connection that the kernel will not forward anything on some streams that it was allowed to open.
    /// `tags` names the subscriptions that the streams belong to. The program may have opened them without sending
    /// anything.
    fn on_gone(&self, tags: &[u64]);
}

/// The queued commands of one connection to the engine's thread.
#[derive(Default)]
pub(super) struct ConnectionCommands(Mutex<PendingCommands>);

#[derive(Default)]
struct PendingCommands {
    is_queued: bool,
    path: Option<Box<OffloadPath>>,
    /// Send keys that wait to be installed, with their key generation, by parity of the generation.
    keys: [Option<(u16, Box<QuicKeys>)>; 2],
    /// Receive keys that wait to be installed, with their key generation, by parity of the generation.
    open_keys: [Option<(u16, Box<QuicKeys>)>; 2],
    /// Connection IDs that the peer has begun to use (`true`) or does not use any more (`false`). The protocol bounds
    /// their number.
    ids: Vec<(ConnectionId, bool)>,
    is_released: bool,
    /// Streams that userspace takes back from the program. Their number is limited by the connection's streams.
    recalled: Vec<(StreamKey, Option<Box<dyn Delegation>>)>,
    /// Numbers (tags) of subscriptions for which the kernel was allowed to open a stream until forwarding from the
    /// publisher ended. There are at most as many as the connection has streams.
    gone: Vec<u64>,
}

/// The queue: commands of connections (`C`), and of the operator (`O`).
pub(super) struct CommandQueue<C, O> {
    waiting: Mutex<WaitingCommands<C, O>>,
    changed: Condvar,
    commands: AtomicU64,
    coalesced: AtomicU64,
}

struct WaitingCommands<C, O> {
    orders: Vec<O>,
    connections: Vec<Arc<C>>,
    /// This flag is set to wake the engine's thread for work outside the queue, even if no command is queued.
    wakes: bool,
    is_closed: bool,
}

/// A batch of commands that the engine's thread carries out together.
pub(super) struct CommandBatch<C, O> {
    pub orders: Vec<O>,
    connections: Vec<(Arc<C>, PendingCommands)>,
}

/// The engine thread's handle, which takes commands from the queue. Dropping it closes the queue.
pub(super) struct Taker<C, O>(Arc<CommandQueue<C, O>>);

impl<C, O> CommandQueue<C, O> {
    pub fn new() -> (Arc<Self>, Taker<C, O>) {
        let waiting =
            WaitingCommands { orders: Vec::new(), connections: Vec::new(), wakes: false, is_closed: false };
        let queue = Arc::new(Self {
            waiting: Mutex::new(waiting),
            changed: Condvar::new(),
            commands: AtomicU64::new(0),
            coalesced: AtomicU64::new(0),
        });
        (Arc::clone(&queue), Taker(queue))
    }

    /// Returns the number of connections with pending commands.
    pub fn len(&self) -> usize {
        self.waiting.lock().connections.len()
    }

    /// Returns how many commands for connections were queued since the engine started.
    pub fn commands(&self) -> u64 {
        self.commands.load(Ordering::Relaxed)
    }

    /// Returns the number of queued commands that were replaced by newer ones.
    pub fn coalesced(&self) -> u64 {
        self.coalesced.load(Ordering::Relaxed)
    }

    /// Adds a command of the operator, which is carried out before all others. Drops the command if the queue is
    /// closed.
    pub fn order(&self, order: O) {
        self.change(|waiting| waiting.orders.push(order));
    }

    /// Wakes the engine's thread for work that is not in the queue.
    pub fn wake(&self) {
        self.change(|waiting| waiting.wakes = true);
    }

    pub fn close(&self) {
        // The lock is released before the commands are dropped, because their destructors may use the queue.
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

    fn change(&self, change: impl FnOnce(&mut WaitingCommands<C, O>)) {
        let mut waiting = self.waiting.lock();
        if !waiting.is_closed {
            change(&mut waiting);
            drop(waiting);
            self.changed.notify_one();
        }
    }
}

impl<C: CommandSubject, O> CommandQueue<C, O> {
    /// Queues a new network path for the connection.
    pub fn set_path(&self, connection: Arc<C>, path: OffloadPath) {
        self.put(connection, |pending| pending.path.replace(Box::new(path)).is_some());
    }

    /// Queues the send keys of `generation`.
    pub fn set_keys(&self, connection: Arc<C>, generation: u16, keys: QuicKeys) {
        self.put(connection, |pending| put_keys(&mut pending.keys, generation, keys));
    }

    /// Queues the receive keys of `generation`.
    pub fn set_open_keys(&self, connection: Arc<C>, generation: u16, keys: QuicKeys) {
        self.put(connection, |pending| put_keys(&mut pending.open_keys, generation, keys));
    }

    /// Queues a connection ID that the peer uses from now on, or does not use any more.
    pub fn set_id(&self, connection: Arc<C>, id: ConnectionId, is_used: bool) {
        self.put(connection, |pending| {
            let known = pending.ids.iter().position(|(known, _)| *known == id);
            match known.map(|at| pending.ids.remove(at)) {
                // The connection ID was added and removed before the program got it, so both commands cancel out.
                Some((_, true)) if !is_used => {}
                _ => pending.ids.push((id, is_used)),
            }
            known.is_some()
        });
    }

    /// Queues the release of a connection. The connection is informed once no program run sends on it. The caller has
    /// queued the recall of the connection's delegated streams before.
    pub fn release(&self, connection: Arc<C>) {
        self.put(connection, |pending| std::mem::replace(&mut pending.is_released, true));
    }

    /// Queues the recall of a delegated stream, which userspace sends from then on.
    pub fn recall(&self, connection: Arc<C>, key: StreamKey, delegation: Option<Box<dyn Delegation>>) {
        self.put(connection, |pending| {
            pending.recalled.push((key, delegation));
            false
        });
    }

    /// Queues a report to the connection: the kernel forwards nothing on the stream that it was allowed to open for the
    /// subscription with this tag.
    pub fn remove_connection(&self, connection: Arc<C>, tag: u64) {
        self.put(connection, |pending| {
            pending.gone.push(tag);
            false
        });
    }

    /// Changes the pending commands of a connection, and queues it. `put` returns whether it has replaced a command.
    fn put(&self, connection: Arc<C>, put: impl FnOnce(&mut PendingCommands) -> bool) {
        let (has_replaced, was_queued) = {
            let mut pending = connection.place().0.lock();
            (put(&mut pending), std::mem::replace(&mut pending.is_queued, true))
        };
        self.commands.fetch_add(1, Ordering::Relaxed);
        self.coalesced.fetch_add(has_replaced.into(), Ordering::Relaxed);
        // `is_queued` is cleared when the connection's commands are taken, so a connection is in the queue once at
        // most.
        if !was_queued {
            self.change(|waiting| waiting.connections.push(connection));
        }
    }
}

impl<C: CommandSubject, O> Taker<C, O> {
    /// Takes all pending commands. Waits until a command arrives or `deadline` passes. Returns `None` if the queue is
    /// closed.
    pub fn take(&self, deadline: Instant) -> Option<CommandBatch<C, O>> {
        let (orders, connections) = {
            let mut waiting = self.0.waiting.lock();
            // The thread may wake up without a reason, so the condition is checked again.
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
        // A command that is added before this point belongs to the batch. A later one queues the connection again.
        let take = |connection: Arc<C>| {
            let pending = std::mem::take(&mut *connection.place().0.lock());
            (connection, pending)
        };
        Some(CommandBatch { orders, connections: connections.into_iter().map(take).collect() })
    }
}

impl<C, O> Drop for Taker<C, O> {
    fn drop(&mut self) {
        self.0.close();
    }
}

// The order is: commands that need no wait for program runs, one wait for all connections, the other commands, and
// reports to the connections.
impl<C: CommandSubject, O> CommandBatch<C, O> {
    /// Carries out the commands of connections. `wait`, which waits for program runs, is called once if a command needs
    /// it or `must_wait` is set. Commands that need no wait are carried out first. A command that panics is dropped,
    /// and the others are still carried out: otherwise nobody would send the recalled streams.
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

/// Runs a part of the engine thread's work. The thread continues if this part panics.
pub(super) fn guarded(work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        error!(
            "the kernel engine has dropped a command that panicked, and goes on: please report the panic on standard error"
        );
    }
}

/// Queues keys in place of queued keys whose key generation has the same parity, unless these are newer. Returns
/// whether keys were replaced.
fn put_keys(places: &mut [Option<(u16, Box<QuicKeys>)>; 2], generation: u16, keys: QuicKeys) -> bool {
    let place = &mut places[usize::from(generation & 1)];
    let is_newer = place.as_ref().is_none_or(|(known, _)| *known <= generation);
    let replaces = place.is_some();
    if is_newer {
        *place = Some((generation, Box::new(keys)));
    }
    replaces
}

impl PendingCommands {
    /// Carries out the commands that need no wait for program runs.
    fn begin(&mut self, connection: &impl CommandSubject) {
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

    /// Sets the path and the keys if no program run can still use the map entry that they overwrite.
    fn install(&mut self, connection: &impl CommandSubject) {
        for place in &mut self.keys {
            let is_free = |keys: &mut (u16, _)| !connection.retire_keys(keys.0);
            place.take_if(is_free).into_iter().for_each(|(number, keys)| connection.set_keys(number, &keys));
        }
        let path = self.path.take_if(|_| !connection.path_waits());
        path.into_iter().for_each(|path| connection.set_path(&path));
    }

    /// Carries out the commands that had to wait for program runs.
    fn finish(&mut self, connection: &impl CommandSubject) {
        let keys = self.keys.iter_mut().filter_map(Option::take);
        keys.for_each(|(generation, keys)| connection.set_keys(generation, &keys));
        self.path.take().into_iter().for_each(|path| connection.set_path(&path));
    }

    /// Informs the connection that the program does not use the recalled streams, or the connection's entry in the
    /// tables, any more.
    fn give_back(&self, connection: &impl CommandSubject) {
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
