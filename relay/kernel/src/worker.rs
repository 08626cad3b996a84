//! The engine's thread: what has to wait for runs of the program, and the look at interfaces.

use std::{
    sync::{Weak, mpsc},
    time::{Duration, Instant},
};

use millrace_kernel::crypto::QuicKeys;
use millrace_quic::{packet::ConnectionId, plane::downstream::StreamKey};

use crate::program as bpf;
use millrace_transport::offload::Path;
use tracing::{debug, warn};

use super::{
    Error, Kernel,
    connection::KernelConnection,
    queue::{Place, Subject, Taker, guarded},
};

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
pub(super) fn work(kernel: &Weak<Kernel>, commands: &Taker<KernelConnection, SetInterfaces>) {
    let (mut looked, mut erased) = (Instant::now(), Instant::now());
    while let Some(mut batch) = commands.take(Instant::now() + LOOK) {
        let Some(kernel) = kernel.upgrade() else { return };
        for SetInterfaces { names, done } in std::mem::take(&mut batch.orders) {
            guarded(|| drop(done.send(kernel.interfaces.set(&kernel.relay, &names)))); // nobody may wait any more
        }
        let erases = erased.elapsed() >= ERASE && kernel.relay.has_old_keys();
        batch.carry_out(erases || kernel.relay.needs_settling(), || settle(&kernel));
        if erases {
            erased = Instant::now();
        }
        guarded(|| kernel.decide());
        if looked.elapsed() >= LOOK {
            guarded(|| kernel.interfaces.look(&kernel.relay));
            looked = Instant::now();
        }
    }
}

/// Waits for runs of the program that have begun.
pub(super) fn settle(kernel: &Kernel) {
    if let Err(error) = kernel.relay.settle() {
        warn!(%error, "cannot wait for the kernel");
    }
}

impl Subject for KernelConnection {
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

    fn set_open_keys(&self, generation: u16, keys: &QuicKeys) {
        let Some(upstream) = self.upstream() else { return };
        if let Err(error) = upstream.set_keys(generation, keys) {
            debug!(%error, "the kernel has no keys to open packets with");
        }
    }

    fn set_id(&self, id: &ConnectionId, is_used: bool) {
        let changed = match (self.upstream(), is_used) {
            (Some(upstream), true) => {
                // They are the publisher's from now on, which is told all of them.
                self.downstream.remove_ids();
                upstream.add_id(id)
            }
            (Some(upstream), false) => upstream.remove_id(id),
            (None, true) => self.downstream.add_id(id),
            (None, false) => self.downstream.remove_id(id),
        };
        if let Err(error) = changed {
            debug!(%error, "the kernel does not know which connection ID is in use");
        }
    }

    fn stop_opening(&self) {
        self.upstream().into_iter().for_each(|upstream| upstream.stop());
    }

    fn on_released(&self) {
        self.owner().into_iter().for_each(|owner| owner.on_released(Instant::now()));
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
