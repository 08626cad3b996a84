//! Keystreams ahead: a thread of its own computes what the kernel will XOR the next packets with, so that nothing
//! else waits for it, and without a system call for any packet.
//!
//! Each direction of a connection that media passes in has a ring of keystreams; [`Ahead`] says how long that is.

use std::{
    sync::{Arc, OnceLock, Weak},
    thread::Thread,
    time::Duration,
};

use crate::program::Want;
use millrace_transport::ID_LEN;
use tracing::debug;

use super::{
    Error, Kernel,
    connection::KernelConnection,
    keystream::{Ahead, Kept},
};

/// How often rings are filled up. Twice what is used in this time is kept ahead, so a shorter tick takes less
/// memory, and a longer one fewer wake-ups.
const TICK: Duration = Duration::from_millis(10);

/// Frames of a packet of 1472 bytes, the most that Ethernet takes, with IDs of this relay's own.
const RECEIVED_TEXT: usize = 1472 - 1 - ID_LEN - 1 - 16;

/// The thread that computes.
#[derive(Default)]
pub(super) struct Computer(OnceLock<Thread>);

impl Computer {
    /// Has it look at once.
    pub fn wake(&self) {
        if let Some(thread) = self.0.get() {
            thread.unpark();
        }
    }

    pub fn start(kernel: &Arc<Kernel>) -> Result<(), Error> {
        let weak = Arc::downgrade(kernel);
        let thread = std::thread::Builder::new()
            .name("keystreams".to_owned())
            .spawn(move || work(&weak))
            .map_err(Error::Thread)?;
        let _ = kernel.computer.0.set(thread.thread().clone()); // once
        Ok(())
    }
}

/// Until the engine is gone.
fn work(kernel: &Weak<Kernel>) {
    while let Some(kernel) = kernel.upgrade() {
        let kept =
            kernel.connections().iter().map(|connection| keep(connection)).fold(Kept::default(), Kept::or);
        // What was given back may have to be waited for.
        if kept.short
            && kernel.relay.has_retired_keystreams()
            && let Err(error) = kernel.relay.settle()
        {
            debug!(%error, "cannot wait for the kernel");
        }
        drop(kernel);
        if kept.any {
            std::thread::park_timeout(TICK);
        } else {
            std::thread::park();
        }
    }
}

fn keep(connection: &KernelConnection) -> Kept {
    let sealing = connection.seal.keep(connection.downstream.next_number(), |len| {
        let want = Want { len, text_bytes: usize::MAX };
        connection.downstream.refill(want, compute(&connection.seal))
    });
    let Some(upstream) = connection.upstream() else { return sealing };
    let opening = connection.open.keep(upstream.expected(), |len| {
        let want = Want { len, text_bytes: RECEIVED_TEXT };
        upstream.refill(connection.open.generation(), want, compute(&connection.open))
    });
    sealing.or(opening)
}

fn compute(ahead: &Ahead) -> impl crate::program::Compute {
    let mut key = None;
    move |generation, number, once, text| {
        // Of one generation from the first to the last call.
        let key = key.get_or_insert_with(|| ahead.key(generation));
        key.as_ref().is_some_and(|key| {
            key.compute(number, once, text);
            true
        })
    }
}
