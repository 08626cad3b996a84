//! Closes connections whose descriptors may linger. It uses separate threads, so that no other work waits for the
//! close.
//!
//! A client of a Unix socket may pass descriptors. When the connection is closed, the kernel also closes the passed
//! descriptors that nobody received. Closing a TCP socket may take as long as its owner has set with `SO_LINGER`. A
//! signal to the closing thread ends that wait.

use std::{
    io,
    os::unix::thread::JoinHandleExt as _,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::sys::{pthread::pthread_kill, signal::Signal};
use tokio::signal::unix::{SignalKind, signal};

/// Largest number of connections that may wait to be closed.
const WAITING: usize = 64;
/// Time between two checks whether a thread that closes a connection has ended.
const PATIENCE: Duration = Duration::from_millis(5);
/// Time after which the closer stops waiting for its threads. A thread that closes a file on an unresponsive file
/// system may never end.
const PATIENCE_MOST: Duration = Duration::from_secs(5);
/// The signal that interrupts a close. This process uses it for nothing else. Without a handler, the kernel ignores the
/// signal.
const INTERRUPT: Signal = Signal::SIGURG;

type Closed = Box<dyn Send>;

/// A handle of the thread that closes one connection after the other. The thread ends when the handle is dropped.
pub struct Closer {
    connections: Sender<Closed>,
    waiting: Arc<AtomicUsize>,
}

impl Closer {
    /// Starts the thread. Call it inside a Tokio runtime.
    ///
    /// # Errors
    /// Fails if the signal handler or the thread cannot be created.
    pub fn start() -> io::Result<Self> {
        // Tokio's signal handler stays installed after its stream is dropped here. Without a handler, the kernel
        // ignores the signal, so no close is interrupted.
        drop(signal(SignalKind::from_raw(INTERRUPT as i32))?);
        let (connections, come) = channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let left = waiting.clone();
        thread::Builder::new().name("closer".into()).spawn(move || run(&come, &left))?;
        Ok(Self { connections, waiting })
    }

    /// Reports whether the queue of connections to close is full. If so, the caller accepts no new connection.
    pub fn is_full(&self) -> bool {
        self.waiting.load(Relaxed) >= WAITING
    }

    /// Drops a connection in the closer's thread, so that the caller does not wait until it is closed.
    pub fn close(&self, connection: impl Send + 'static) {
        self.waiting.fetch_add(1, Relaxed);
        // The closer's thread lives as long as this value, so the send cannot fail.
        let _ = self.connections.send(Box::new(connection));
    }

    /// Waits until `threads` have ended, whose only remaining work is to close a connection. Signals interrupt a close
    /// that blocks.
    pub fn end(&self, threads: Vec<JoinHandle<()>>) {
        end(threads);
    }
}

fn run(come: &Receiver<Closed>, waiting: &AtomicUsize) {
    for connection in come {
        let closing = thread::Builder::new().name("closing".into()).spawn(move || drop(connection));
        // If no thread can be created, `spawn` drops the connection, so this thread closes it.
        end(closing.into_iter().collect());
        waiting.fetch_sub(1, Relaxed);
    }
}

fn end(mut threads: Vec<JoinHandle<()>>) {
    let begin = Instant::now();
    loop {
        threads.retain(|thread| !thread.is_finished());
        let Some(one) = threads.first() else { return };
        if begin.elapsed() > PATIENCE_MOST {
            let name = one.thread().name().unwrap_or_default();
            return tracing::warn!(
                threads = threads.len(),
                name,
                "threads have not closed their connections in time: the daemon no longer waits for these threads"
            );
        }
        thread::sleep(PATIENCE);
        for thread in &threads {
            let _ = pthread_kill(thread.as_pthread_t(), INTERRUPT);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, OwnedFd};

    use millrace_base::control::ControlEnd;
    use millrace_testkit::{lingering, wait_for};

    use super::*;

    /// Without an interrupt, closing each of the three sockets would take an hour, because of `SO_LINGER`.
    #[tokio::test]
    async fn close_blocked_by_so_linger_is_interrupted() {
        let closer = Closer::start().unwrap();
        let mut others = Vec::new();
        for _ in 0..3 {
            let (theirs, own) = ControlEnd::pair().unwrap();
            let (near, far) = lingering();
            theirs.send(&1, &[near.as_fd()]).unwrap();
            // The message that was sent with the socket `near` is still unread and keeps the socket open, so dropping
            // `near` does not block.
            drop(near);
            closer.close(OwnedFd::from(own));
            others.push((theirs, far));
        }
        wait_for("all to be closed", || closer.waiting.load(Relaxed) == 0);
    }
}
