//! A pair of UDP sockets of one endpoint: the main one, and the deferred socket, for packets that need not wake this
//! process at once.

use std::{
    fmt,
    io::{self, IoSliceMut},
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};

use quinn::{
    AsyncUdpSocket, UdpPoller,
    udp::{RecvMeta, Transmit, UdpSocketState},
};
use tokio::io::{Interest, unix::AsyncFd};

use super::deferred::Deferred;

/// Receives from the main and the deferred socket, and sends on the main one.
pub(super) struct PairedSocket {
    /// The main socket, registered for reads only. Registered for writes, it would become writable and wake the task
    /// after each sent packet.
    main: AsyncFd<Arc<UdpSocket>>,
    main_state: UdpSocketState,
    /// True from when the main socket's send buffer was full until the socket is writable again.
    full: Arc<AtomicBool>,
    /// Number of packets that had gone to the main socket when a read last emptied it.
    heard: AtomicU64,
    deferred: Arc<Deferred>,
    deferred_state: UdpSocketState,
    /// True while another process reads the main socket.
    is_left: Arc<AtomicBool>,
}

impl PairedSocket {
    /// Registers the main socket with the tokio runtime, in which this has to be called.
    pub fn new(main: UdpSocket, deferred: Arc<Deferred>) -> io::Result<Self> {
        let main_state = UdpSocketState::new((&main).into())?;
        let deferred_state = UdpSocketState::new(deferred.socket().into())?;
        let main = register(Arc::new(main), Interest::READABLE)?;
        Ok(Self {
            main,
            main_state,
            full: Arc::default(),
            heard: AtomicU64::new(0),
            deferred,
            deferred_state,
            is_left: Arc::default(),
        })
    }

    /// Returns the flag by which the main socket is left to another process.
    pub fn is_left(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_left)
    }

    /// Reads deferred packets, which are always older than the packets in the main socket.
    fn recv_deferred(&self, bufs: &mut [IoSliceMut<'_>], meta: &mut [RecvMeta]) -> Option<usize> {
        if self.deferred.waiting() == 0 {
            return None;
        }
        match self.deferred_state.recv(self.deferred.socket().into(), bufs, meta) {
            Ok(count) => {
                self.deferred.on_read(count as u64);
                Some(count)
            }
            Err(_) => {
                self.deferred.on_nothing();
                None
            }
        }
    }

    /// Reads from the main socket. `others` is the number of packets that have gone to the main socket so far.
    fn poll_main(
        &self,
        others: u64,
        context: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.main.poll_read_ready(context))?;
            let result = self.main_state.recv((&**self.main.get_ref()).into(), bufs, meta);
            // If a read returns fewer packets than it had buffers for, the socket was empty. A packet that has arrived
            // since makes the socket ready again, which `clear_ready` preserves.
            let is_over = match &result {
                Ok(count) => *count < bufs.len(),
                Err(error) => error.kind() == io::ErrorKind::WouldBlock,
            };
            if is_over {
                self.heard.store(others, Ordering::Relaxed);
                guard.clear_ready();
            }
            match result {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }
}

impl fmt::Debug for PairedSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PairedSocket").field("main", &self.main).finish_non_exhaustive()
    }
}

impl AsyncUdpSocket for PairedSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        let socket = Arc::clone(self.main.get_ref());
        let full = Arc::clone(&self.full);
        Box::pin(Poller { socket, full, waiting: None })
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let result = self.main_state.send((&**self.main.get_ref()).into(), transmit);
        if result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            self.full.store(true, Ordering::Release);
        }
        result
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        // The task to wake is set before the deferred socket is checked, so that no packet is missed.
        self.deferred.set_reader(context.waker());
        let others = self.deferred.wake();
        if let Some(count) = self.recv_deferred(bufs, meta) {
            return Poll::Ready(Ok(count));
        }
        // No packet is deferred from now on, since packets that take the way through the other process would come later
        // than deferred ones that arrived after them.
        if self.is_left.load(Ordering::SeqCst) {
            return Poll::Pending;
        }
        let received = self.poll_main(others, context, bufs, meta);
        if received.is_pending() {
            // Packets may have arrived on the main socket after a read last emptied it, without waking this task. So
            // `sleep` gets the packet count of that read (`heard`), not the present one.
            self.deferred.sleep(self.heard.load(Ordering::Relaxed));
        }
        received
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.main.get_ref().local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.main_state.max_gso_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.main_state.gro_segments()
    }

    fn may_fragment(&self) -> bool {
        self.main_state.may_fragment()
    }
}

/// Waits until the socket is writable again after its send buffer was full.
#[derive(Debug)]
struct Poller {
    socket: Arc<UdpSocket>,
    full: Arc<AtomicBool>,
    /// The main socket, registered with the runtime for writes while the task waits.
    waiting: Option<AsyncFd<UdpSocket>>,
}

impl UdpPoller for Poller {
    fn poll_writable(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.full.load(Ordering::Acquire) {
            this.waiting = None;
            return Poll::Ready(Ok(()));
        }
        let waiting = match this.waiting.take() {
            Some(waiting) => waiting,
            None => register(this.socket.try_clone()?, Interest::WRITABLE)?,
        };
        if waiting.poll_write_ready(context)?.is_pending() {
            this.waiting = Some(waiting);
            return Poll::Pending;
        }
        this.full.store(false, Ordering::Release);
        Poll::Ready(Ok(()))
    }
}

/// Registers a socket with the runtime. The constructor is deprecated because a descriptor might change or be closed
/// while registered, which a `UdpSocket` never does.
#[allow(deprecated)]
fn register<S: AsRawFd>(socket: S, interest: Interest) -> io::Result<AsyncFd<S>> {
    AsyncFd::with_interest(socket, interest)
}
