//! The engine's thread, which carries out commands that have to wait for program runs, and the thread that checks the
//! interfaces and erases old keys.

use std::{
    sync::{Weak, mpsc},
    time::{Duration, Instant},
};

use millrace_kernel::crypto::QuicKeys;
use millrace_quic::{packet::ConnectionId, plane::downstream::StreamKey};

use crate::program as bpf;
use millrace_transport::offload::OffloadPath;
use tracing::{debug, warn};

use super::{
    Error, RelayKernel,
    connection::KernelConnection,
    queue::{CommandSubject, ConnectionCommands, Taker, guarded},
};

/// How often the interfaces are checked, at one system call each, and the keys of ended connections are erased.
const LOOK: Duration = Duration::from_secs(1);

/// A command to attach to these interfaces. The engine's thread carries it out, because that thread is in the network
/// namespace in which the engine was started.
pub(super) struct SetInterfaces {
    pub names: Vec<String>,
    pub done: mpsc::SyncSender<Result<(), Error>>,
}

/// Runs the engine's thread until the engine is dropped.
pub(super) fn work(kernel: &Weak<RelayKernel>, commands: &Taker<KernelConnection, SetInterfaces>) {
    while let Some(mut batch) = commands.take(Instant::now() + LOOK) {
        let Some(kernel) = kernel.upgrade() else { return };
        for SetInterfaces { names, done } in std::mem::take(&mut batch.orders) {
            // Sending the result of the attachment fails only if nobody waits for the result.
            guarded(|| drop(done.send(kernel.interfaces.set(&kernel.relay, &names))));
        }
        batch.carry_out(kernel.relay.needs_settling(), || settle(&kernel));
        guarded(|| kernel.decide());
    }
}

/// Checks the interfaces and erases the keys of ended connections, until the engine is dropped. Both wait for the
/// kernel: for its lock of all interfaces, and for program runs. The engine's thread must not wait for that, because a
/// new publisher's keys, and streams that userspace takes back, wait for that thread.
pub(super) fn keep_house(kernel: &Weak<RelayKernel>) {
    loop {
        std::thread::sleep(LOOK);
        let Some(kernel) = kernel.upgrade() else { return };
        guarded(|| kernel.interfaces.look(&kernel.relay));
        if kernel.relay.has_old_keys() {
            guarded(|| settle(&kernel));
        }
    }
}

/// Waits for the program runs that have begun. Then frees the map entries that were removed before.
pub(super) fn settle(kernel: &RelayKernel) {
    if let Err(error) = kernel.relay.settle() {
        warn!(%error, "cannot wait for BPF programs to end: removed map entries stay unused");
    }
}

impl CommandSubject for KernelConnection {
    fn place(&self) -> &ConnectionCommands {
        &self.place
    }

    fn retire_keys(&self, generation: u16) -> bool {
        self.downstream.retire_keys(generation)
    }

    fn set_keys(&self, generation: u16, keys: &QuicKeys) {
        if let Err(error) = self.downstream.set_keys(generation, keys) {
            warn!(%error, "cannot install a connection's keys in the kernel: userspace serves the connection");
        }
    }

    fn set_open_keys(&self, generation: u16, keys: &QuicKeys) {
        let Some(upstream) = self.upstream() else { return };
        if let Err(error) = upstream.set_keys(generation, keys) {
            debug!(%error, "cannot install a publisher's keys in the kernel: userspace decrypts its packets");
        }
    }

    fn set_id(&self, id: &ConnectionId, is_used: bool) {
        let changed = match (self.upstream(), is_used) {
            (Some(upstream), true) => {
                // The program looks up the peer's packets in `upstream` (the entry for received media) from now on, so
                // all connection IDs move to that entry.
                self.downstream.remove_ids();
                upstream.add_id(id)
            }
            (Some(upstream), false) => upstream.remove_id(id),
            (None, true) => self.downstream.add_id(id),
            (None, false) => self.downstream.remove_id(id),
        };
        if let Err(error) = changed {
            debug!(%error, "cannot tell the kernel which connection ID is in use: userspace handles packets with this ID");
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

    fn set_path(&self, path: &OffloadPath) {
        let &OffloadPath { local, remote, id, traffic_class } = path;
        let to = bpf::PacketPath { local, remote, id: id.to_vec(), traffic_class, flow_label: 0 };
        match self.downstream.set_path(&to) {
            Ok(()) => self.owner().into_iter().for_each(|owner| owner.on_path(Instant::now(), path)),
            Err(error) => debug!(?path, %error, "the kernel cannot send to this peer: userspace does"),
        }
    }

    fn on_returned(&self, keys: &[StreamKey]) {
        self.owner().into_iter().for_each(|owner| owner.on_returned(Instant::now(), keys));
    }

    fn on_gone(&self, tags: &[u64]) {
        self.owner().into_iter().for_each(|owner| owner.on_gone(Instant::now(), tags));
    }
}
