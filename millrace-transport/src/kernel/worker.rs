//! The engine's thread: what has to wait for runs of the program, and the look at interfaces.

use std::{
    sync::{Weak, mpsc},
    time::{Duration, Instant},
};

use millrace_bpf::{crypto::QuicKeys, relay as bpf};
use millrace_proto::plane::downstream::StreamKey;
use tracing::{debug, warn};

use super::{
    Error, Kernel,
    connection::Connection,
    queue::{Place, Subject, Taker},
};
use crate::offload::Path;

/// How often interfaces are looked at: a system call each.
const LOOK: Duration = Duration::from_secs(1);

/// How often keys of connections that have ended are erased, at most.
const ERASE: Duration = Duration::from_millis(500);

/// The operator wants these interfaces. It is done on the engine's thread since that is in the network namespace that the engine was
/// started in.
pub(super) struct SetInterfaces {
    pub names: Vec<String>,
    pub done: mpsc::SyncSender<Result<(), Error>>,
}

/// The engine's thread, until the engine is gone.
pub(super) fn work(kernel: &Weak<Kernel>, commands: &Taker<Connection, SetInterfaces>) {
    let (mut looked, mut erased) = (Instant::now(), Instant::now());
    while let Some(mut batch) = commands.take(Instant::now() + LOOK) {
        let Some(kernel) = kernel.upgrade() else { return };
        for SetInterfaces { names, done } in std::mem::take(&mut batch.orders) {
            let _ = done.send(kernel.interfaces.set(&kernel.relay, &names)); // nobody waits any more
        }
        let erases = erased.elapsed() >= ERASE && kernel.relay.has_old_keys();
        batch.carry_out(erases || kernel.relay.needs_settling(), || settle(&kernel));
        if erases {
            erased = Instant::now();
        }
        if looked.elapsed() >= LOOK {
            kernel.interfaces.look(&kernel.relay);
            looked = Instant::now();
        }
    }
}

fn settle(kernel: &Kernel) {
    if let Err(error) = kernel.relay.settle() {
        warn!(%error, "cannot wait for the kernel");
    }
}

impl Subject for Connection {
    fn place(&self) -> &Place {
        &self.place
    }

    fn retire_keys(&self, generation: u16) -> bool {
        self.downstream.retire_keys(generation)
    }

    fn set_keys(&self, generation: u16, keys: &QuicKeys) {
        if let Err(error) = self.downstream.set_keys(generation, keys) {
            warn!(%error, "keys cannot be installed: this connection is served from userspace");
        }
    }

    fn path_waits(&self) -> bool {
        self.downstream.path_waits()
    }

    fn set_path(&self, path: &Path) {
        let &Path { local, remote, id, traffic_class } = path;
        let to = bpf::Path { local, remote, id: id.to_vec(), traffic_class, flow_label: 0 };
        match self.downstream.set_path(&to) {
            Ok(()) => self.owner().into_iter().for_each(|owner| owner.on_path(Instant::now(), path)),
            Err(error) => debug!(?path, %error, "the kernel cannot send there"),
        }
    }

    fn on_returned(&self, keys: &[StreamKey]) {
        self.owner().into_iter().for_each(|owner| owner.on_returned(Instant::now(), keys));
    }

    fn on_gone(&self, tags: &[u64]) {
        self.owner().into_iter().for_each(|owner| owner.on_gone(Instant::now(), tags));
    }
}
