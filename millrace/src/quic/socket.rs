//! An endpoint's UDP socket together with the one that the kernel engine leads packets to that are no hurry.

use std::{
    fmt,
    io::{self, IoSliceMut},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use quinn::{
    AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller,
    udp::{RecvMeta, Transmit, UdpSocketState},
};

use crate::engine::kernel::Quiet;

/// Reads both, sends by the first.
pub struct Socket {
    main: Arc<dyn AsyncUdpSocket>,
    quiet: Arc<Quiet>,
    state: UdpSocketState,
}

impl Socket {
    pub fn new(main: std::net::UdpSocket, quiet: Arc<Quiet>) -> io::Result<Self> {
        let state = UdpSocketState::new(quiet.socket().into())?;
        Ok(Self { main: TokioRuntime.wrap_udp_socket(main)?, quiet, state })
    }

    /// What has to be read before the other socket.
    fn recv_quiet(&self, bufs: &mut [IoSliceMut<'_>], meta: &mut [RecvMeta]) -> Option<usize> {
        if self.quiet.waiting() == 0 {
            return None;
        }
        match self.state.recv(self.quiet.socket().into(), bufs, meta) {
            Ok(count) => {
                self.quiet.on_read(count as u64);
                Some(count)
            }
            Err(_) => {
                self.quiet.on_nothing();
                None
            }
        }
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket").field("main", &self.main).finish_non_exhaustive()
    }
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.main).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.main.try_send(transmit)
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        // Before the look, so that none is missed.
        self.quiet.set_reader(context.waker());
        let others = self.quiet.wake();
        if let Some(count) = self.recv_quiet(bufs, meta) {
            return Poll::Ready(Ok(count));
        }
        let received = self.main.poll_recv(context, bufs, meta);
        if received.is_pending() {
            self.quiet.sleep(others);
        }
        received
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.main.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.main.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.main.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.main.may_fragment()
    }
}
