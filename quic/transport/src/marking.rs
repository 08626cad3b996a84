//! The QUIC stack's socket, which sets the configured DSCP on the stack's packets.

use std::{
    io::{self, IoSliceMut},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use quinn::{
    AsyncUdpSocket, UdpPoller,
    udp::{RecvMeta, Transmit},
};

use crate::{
    dscp::Dscp,
    send::{BatchSender, PacketFlow},
};

/// The QUIC stack's socket. It never sends packets as ECT, because the stack would attribute the ECN counts of other
/// senders' packets to its own packets.
#[derive(Debug)]
pub(crate) struct Marking {
    pub socket: Arc<dyn AsyncUdpSocket>,
    pub sender: Arc<BatchSender>,
    pub dscp: Dscp,
}

impl AsyncUdpSocket for Marking {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.socket).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let &Transmit { destination, contents, segment_size, src_ip, .. } = transmit;
        let flow =
            PacketFlow { to: destination, from: src_ip, traffic_class: self.dscp.traffic_class(false) };
        let segment = segment_size.map(u16::try_from).transpose();
        // The stack's own socket cannot set a DSCP, so `sender` tries first to send the packet. If `sender` fails, the
        // stack's socket sends the packet without DSCP, and handles all errors.
        if flow.traffic_class != 0
            && let Ok(segment) = segment
            && self.sender.send_one(flow, contents, segment).is_ok()
        {
            return Ok(());
        }
        self.socket.try_send(&Transmit { ecn: None, destination, contents, segment_size, src_ip })
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.socket.poll_recv(context, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.socket.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.socket.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.socket.may_fragment()
    }
}
