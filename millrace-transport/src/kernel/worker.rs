//! The engine's thread: what has to wait for runs of the program, and the look at interfaces.

use std::{
    sync::{Arc, Weak, mpsc},
    time::{Duration, Instant},
};

use millrace_bpf::{crypto::QuicKeys, relay as bpf};
use millrace_proto::plane::downstream::StreamKey;
use tracing::{debug, warn};

use super::{Error, Kernel, connection::Connection};
use crate::offload::{Delegation, Path};

/// How often interfaces are looked at: a system call each.
const LOOK: Duration = Duration::from_secs(1);

/// How often keys of connections that have ended are erased, at most.
const ERASE: Duration = Duration::from_millis(500);

/// What is done on the engine's thread, since it waits for runs of the program.
pub(super) enum Command {
    /// Also since the thread is in the network namespace that the engine was started in.
    Interfaces {
        names: Vec<String>,
        done: mpsc::SyncSender<Result<(), Error>>,
    },
    /// Entries may have to be waited for.
    Settle,
    Recall {
        connection: Arc<Connection>,
        key: StreamKey,
        delegation: Option<Box<dyn Delegation>>,
    },
    /// Streams may have been opened under these tags, for nothing.
    Gone(Vec<(Weak<Connection>, u64)>),
    Path {
        connection: Arc<Connection>,
        path: Box<Path>,
    },
    Keys {
        connection: Arc<Connection>,
        generation: u16,
        keys: Box<QuicKeys>,
    },
}

/// The engine's thread, until the engine is gone.
pub(super) fn work(kernel: &Weak<Kernel>, todo: &mpsc::Receiver<Command>) {
    let (mut looked, mut erased) = (Instant::now(), Instant::now());
    loop {
        let first = match todo.recv_timeout(LOOK) {
            Ok(command) => Some(command),
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        };
        let Some(kernel) = kernel.upgrade() else { return };
        let mut returned = Vec::new();
        first.into_iter().chain(todo.try_iter()).for_each(|command| run(&kernel, command, &mut returned));
        let erases = erased.elapsed() >= ERASE && kernel.relay.has_old_keys();
        if !returned.is_empty() {
            give_back(&kernel, returned);
        } else if erases || kernel.relay.needs_settling() {
            settle(&kernel);
        }
        if erases {
            erased = Instant::now();
        }
        if looked.elapsed() >= LOOK {
            kernel.interfaces.look(&kernel.relay);
            looked = Instant::now();
        }
    }
}

fn run(kernel: &Kernel, command: Command, returned: &mut Vec<(Arc<Connection>, StreamKey)>) {
    match command {
        Command::Settle => {}
        Command::Interfaces { names, done } => {
            let _ = done.send(kernel.interfaces.set(&kernel.relay, &names)); // nobody waits any more
        }
        Command::Recall { connection, key, delegation } => {
            drop(delegation);
            returned.push((connection, key));
        }
        Command::Gone(prepared) => {
            let owners = prepared.iter().filter_map(|(connection, tag)| Some((connection.upgrade()?, tag)));
            for (connection, tag) in owners {
                connection.owner().into_iter().for_each(|owner| owner.on_gone(Instant::now(), &[*tag]));
            }
        }
        Command::Path { connection, path } => set_path(&connection, &path),
        Command::Keys { connection, generation, keys } => {
            if let Err(error) = connection.downstream.set_keys(generation, &keys) {
                warn!(%error, "keys cannot be installed: this connection is served from userspace");
            }
        }
    }
}

fn set_path(connection: &Connection, path: &Path) {
    let &Path { local, remote, id, traffic_class } = path;
    let to = bpf::Path { local, remote, id: id.to_vec(), traffic_class, flow_label: 0 };
    match connection.downstream.set_path(&to) {
        Ok(()) => connection.owner().into_iter().for_each(|owner| owner.on_path(Instant::now(), path)),
        Err(error) => debug!(?path, %error, "the kernel cannot send there"),
    }
}

fn settle(kernel: &Kernel) {
    if let Err(error) = kernel.relay.settle() {
        warn!(%error, "cannot wait for the kernel");
    }
}

/// Waits once for all of them.
fn give_back(kernel: &Kernel, mut returned: Vec<(Arc<Connection>, StreamKey)>) {
    settle(kernel);
    returned.sort_by_key(|(connection, _)| connection.downstream.id().index);
    for group in returned.chunk_by(|(one, _), (other, _)| Arc::ptr_eq(one, other)) {
        let keys: Vec<_> = group.iter().map(|(_, key)| *key).collect();
        if let Some(owner) = group.first().and_then(|(connection, _)| connection.owner()) {
            owner.on_returned(Instant::now(), &keys);
        }
    }
}
