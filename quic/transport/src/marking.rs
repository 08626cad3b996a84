//! The QUIC stack's socket, which sets the configured DSCP on the stack's packets, and counts received packets.

use std::{
    io::{self, IoSliceMut},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
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
    pub counts: Arc<ReceivedCounts>,
}

/// Counts of the packets that one socket has received.
#[derive(Debug, Default)]
pub(crate) struct ReceivedCounts {
    pub received: AtomicU64,
    /// Packets of connections of another socket of the endpoint.
    pub misdirected: AtomicU64,
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
        let count = ready!(self.socket.poll_recv(context, bufs, meta))?;
        // A buffer has one packet, or several of `stride` bytes that the kernel has merged (GRO).
        let packets = meta.iter().take(count).map(|one| one.len.div_ceil(one.stride.max(1)).max(1) as u64);
        self.counts.received.fetch_add(packets.sum(), Ordering::Relaxed);
        Poll::Ready(Ok(count))
    }

    millrace_webtransport::described_by_field_socket!();
}
