//! Precomputes keystreams: a thread computes the bytes that the kernel will XOR the next packets with, so that no other
//! work waits for it, and without a system call for each packet.
//!
//! Each direction of a connection on which media passes has a ring of keystreams. [`KeystreamAhead`] decides its
//! length.

use std::{
    sync::{Arc, OnceLock, Weak},
    thread::Thread,
    time::Duration,
};

use crate::program::WantedRing;
use millrace_transport::ID_LEN;
use tracing::debug;

use super::{
    Error, RelayKernel,
    connection::KernelConnection,
    keystream::{KeystreamAhead, KeystreamPass},
};

/// How often the rings of precomputed keystreams are filled. A ring holds twice the keystreams that are used in this
/// time. A shorter interval takes less memory, a longer one fewer wake-ups.
const TICK: Duration = Duration::from_millis(10);

/// The most payload of a received packet: 1472 bytes of UDP payload fit Ethernet, less the QUIC header with this
/// relay's connection ID, and the tag.
const RECEIVED_TEXT: usize = 1472 - 1 - ID_LEN - 1 - 16;

/// The thread that computes keystreams.
#[derive(Default)]
pub(super) struct Computer(OnceLock<Thread>);

impl Computer {
    /// Makes the keystream thread check the rings of keystreams now.
    pub fn wake(&self) {
        if let Some(thread) = self.0.get() {
            thread.unpark();
        }
    }

    pub fn start(kernel: &Arc<RelayKernel>) -> Result<(), Error> {
        let weak = Arc::downgrade(kernel);
        let thread = std::thread::Builder::new()
            .name("keystreams".to_owned())
            .spawn(move || work(&weak))
            .map_err(Error::Thread)?;
        // The keystream thread is started only once, so the cell for its handle is empty.
        let _ = kernel.computer.0.set(thread.thread().clone());
        Ok(())
    }
}

/// Keeps the keystream rings filled until the engine is dropped. Only connections in the list `kept`, which use
/// precomputed keystreams at present, are visited.
fn work(kernel: &Weak<RelayKernel>) {
    while let Some(kernel) = kernel.upgrade() {
        let mut all = KeystreamPass::default();
        for connection in kernel.kept.take(|connection| &connection.is_kept) {
            let pass = keep(&connection);
            if pass.any {
                kernel.kept.add(&connection, &connection.is_kept);
            }
            all = all.or(pass);
        }
        // Keystream entries that no ring uses any more can be reused only when all program runs that may have seen them
        // have ended.
        if all.short
            && kernel.relay.has_retired_keystreams()
            && let Err(error) = kernel.relay.settle()
        {
            debug!(%error, "cannot wait for BPF programs to end: freed keystream memory stays unused");
        }
        // The thread drops its strong reference to the engine while it sleeps, so that the engine can be dropped.
        drop(kernel);
        if all.any {
            std::thread::park_timeout(TICK);
        } else {
            std::thread::park();
        }
    }
}

fn keep(connection: &KernelConnection) -> KeystreamPass {
    let sealing = connection.seal.keep(connection.downstream.next_number(), |len| {
        let want = WantedRing { len, text_bytes: usize::MAX };
        connection.downstream.refill(want, compute(&connection.seal))
    });
    let Some(upstream) = connection.upstream() else { return sealing };
    let opening = connection.open.keep(upstream.expected(), |len| {
        let want = WantedRing { len, text_bytes: RECEIVED_TEXT };
        upstream.refill(connection.open.generation(), want, compute(&connection.open))
    });
    sealing.or(opening)
}

fn compute(ahead: &KeystreamAhead) -> impl crate::program::Compute {
    let mut key = None;
    move |generation, number, once, text| {
        // One refill calls this closure for a single key generation, so the key is looked up only once.
        let key = key.get_or_insert_with(|| ahead.key(generation));
        key.as_ref().is_some_and(|key| {
            key.compute(number, once, text);
            true
        })
    }
}
