//! Closes what may linger, in threads that nobody waits for.
//!
//! Whoever connects to a Unix socket may pass descriptors. The kernel closes those that nobody has taken with the connection, and to close a TCP
//! socket takes as long as its owner has set (`SO_LINGER`). It waits only until the thread that closes it has a signal, however.

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

/// Connections that wait for it.
const WAITING: usize = 64;
/// Time between two looks whether a thread has ended by itself.
const PATIENCE: Duration = Duration::from_millis(5);
/// For one that has been told so again and again. Such as closes a file of a file system that does not answer may never do.
const PATIENCE_MOST: Duration = Duration::from_secs(5);
/// Means nothing to this process, and is ignored where there is no handler.
const INTERRUPT: Signal = Signal::SIGURG;

type Closed = Box<dyn Send>;

/// A thread that closes one connection after the other, and ends when this is dropped.
pub struct Closer {
    connections: Sender<Closed>,
    waiting: Arc<AtomicUsize>,
}

impl Closer {
    /// Starts it. Inside of a runtime.
    ///
    /// # Errors
    /// There can be no handler or thread.
    pub fn start() -> io::Result<Self> {
        // The handler stays. A signal that is ignored would interrupt nothing.
        drop(signal(SignalKind::from_raw(INTERRUPT as i32))?);
        let (connections, come) = channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let left = waiting.clone();
        thread::Builder::new().name("closer".into()).spawn(move || run(&come, &left))?;
        Ok(Self { connections, waiting })
    }

    /// Reports whether there is so much to close that nobody else should be let in meanwhile.
    pub fn is_full(&self) -> bool {
        self.waiting.load(Relaxed) >= WAITING
    }

    /// Closes a connection by dropping it, and does not wait for that.
    pub fn close(&self, connection: impl Send + 'static) {
        self.waiting.fetch_add(1, Relaxed);
        // The thread is there for as long as this is.
        let _ = self.connections.send(Box::new(connection));
    }

    /// Waits for the end of threads that have nothing more to do than to close something.
    pub fn end(&self, threads: Vec<JoinHandle<()>>) {
        end(threads);
    }
}

fn run(come: &Receiver<Closed>, waiting: &AtomicUsize) {
    for connection in come {
        let closing = thread::Builder::new().name("closing".into()).spawn(move || drop(connection));
        // Without a thread it was closed here.
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
                "threads do not end: they go on until the daemon ends"
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

    use millrace_base::control::Control;
    use millrace_testkit::{lingering, wait_for};

    use super::*;

    /// It would take an hour.
    #[tokio::test]
    async fn lingering_sockets_of_connections_that_are_turned_away_are_interrupted() {
        let closer = Closer::start().unwrap();
        let mut others = Vec::new();
        for _ in 0..3 {
            let (theirs, own) = Control::pair().unwrap();
            let (near, far) = lingering();
            theirs.send(&1, &[near.as_fd()]).unwrap();
            // What is in the record is the last descriptor: this one would linger else.
            drop(near);
            closer.close(OwnedFd::from(own));
            others.push((theirs, far));
        }
        wait_for("all to be closed", || closer.waiting.load(Relaxed) == 0);
    }
}
