use std::{
    io::{self, IoSlice},
    net::{IpAddr, SocketAddr, UdpSocket},
    ops::AddAssign,
    os::fd::{AsFd, AsRawFd},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use nix::{
    errno::Errno,
    libc::{in_addr, in_pktinfo, in6_addr, in6_pktinfo},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        ControlMessage, MsgFlags, MultiHeaders, SockaddrStorage, cmsg_space, getsockopt, sendmmsg, sockopt,
    },
};
use parking_lot::Mutex;

use super::{
    PacketBatch, PacketFlow,
    batch::KernelMessage,
    thread::{SendingThread, ShardConnections},
};

/// Largest number of messages that the kernel takes in one call (UIO_MAXIOV).
const MAX_CALL: usize = 1024;
/// Requested size of the send buffer, bytes: enough for a packet to each of some thousand subscribers at once.
const SEND_BUFFER: usize = 8 << 20;
/// Longest time for which a flush waits for space in the socket's send buffer. Waiting is cheaper than retransmitting
/// dropped packets, but connection locks may be held meanwhile.
const MAX_WAIT: Duration = Duration::from_millis(2);
/// Number of times that one flush repeats to send packets that other threads have handed over meanwhile. The last
/// packets are then sent with the handover's lock held, so other threads have to wait.
const HANDOVERS: usize = 4;

/// The sender of batches on one UDP socket. It uses `sendmmsg` and, if allowed, generic segmentation offload.
#[derive(Debug)]
pub struct BatchSender {
    socket: UdpSocket,
    ipv6: bool,
    gso: AtomicBool,
    totals: Mutex<SendReport>,
    /// The thread that sends for connections of this socket, if the endpoint has several shards.
    thread: OnceLock<SendingThread>,
}

/// Counts of packets by the outcome of sending them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendReport {
    /// Packets that the kernel has accepted.
    pub packets: u64,
    /// Bytes of UDP payload of the packets that the kernel has accepted.
    pub bytes: u64,
    /// Number of system calls for sending.
    pub system_calls: u64,
    /// Packets dropped because they are larger than the path MTU (EMSGSIZE).
    pub too_large: u64,
    /// Packets dropped because the send buffer was full.
    pub overflowed: u64,
    /// Packets dropped for another reason, such as a missing route or a firewall.
    pub failed: u64,
}

impl BatchSender {
    /// Creates a sender on a duplicate of `socket`, which may also be the QUIC stack's. With `gso`, it uses
    /// segmentation offload if the kernel has it. BPF programs at the other end of a virtual device then see packets of
    /// up to 64 KiB.
    pub fn new(socket: &UdpSocket, gso: bool) -> io::Result<Self> {
        let socket = socket.try_clone()?;
        let ipv6 = socket.local_addr()?.is_ipv6();
        let gso = gso && getsockopt(&socket, sockopt::UdpGsoSegment).is_ok();
        grow_send_buffer(&socket)?;
        Ok(Self {
            socket,
            ipv6,
            gso: AtomicBool::new(gso),
            totals: Mutex::default(),
            thread: OnceLock::new(),
        })
    }

    /// Starts the thread of the shard with this index, to which [`Self::ask`] gives work.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(crate) fn start_thread(&self, index: usize) -> io::Result<()> {
        // A shard has one sender, so this is called once.
        let _ = self.thread.set(SendingThread::start(index)?);
        Ok(())
    }

    /// Makes the shard's thread send what these connections may send. Returns false if there is no thread, or if it has
    /// too much to do.
    pub(crate) fn ask(&self, connections: ShardConnections) -> bool {
        self.thread.get().is_some_and(|thread| thread.ask(connections))
    }

    /// Sends all packets in `batch` and empties it. Packets that cannot be sent are dropped, as a router would do, and
    /// loss recovery sends their contents again.
    pub fn flush(&self, batch: &mut PacketBatch) -> SendReport {
        let mut report = SendReport::default();
        in_turn(batch, |batch| report += self.send_batch(batch));
        report
    }

    fn send_batch(&self, batch: &mut PacketBatch) -> SendReport {
        if batch.is_empty() {
            return SendReport::default();
        }
        let report =
            send_all(batch, &self.gso, |call, segment| self.send(batch, call, segment), || self.wait());
        batch.clear();
        *self.totals.lock() += report;
        report
    }

    /// Returns the counts since the sender was created.
    pub fn totals(&self) -> SendReport {
        *self.totals.lock()
    }

    /// Makes the kernel deliver packets one by one. With UDP_GRO, packets would be merged before a program at TC
    /// ingress sees them.
    pub fn refuse_merged(&self) -> io::Result<()> {
        Ok(nix::sys::socket::setsockopt(&self.socket, sockopt::UdpGroSegment, &false)?)
    }

    /// Returns whether segmentation offload is in use.
    pub fn gso(&self) -> bool {
        self.gso.load(Ordering::Relaxed)
    }

    /// Sends messages in one system call, and returns how many the kernel accepted.
    fn send(
        &self,
        batch: &PacketBatch,
        messages: &[KernelMessage],
        segment: Option<u16>,
    ) -> nix::Result<usize> {
        let slices: Vec<_> = messages.iter().map(|m| [IoSlice::new(batch.slice(&m.bytes))]).collect();
        let addresses: Vec<_> = messages.iter().map(|m| Some(self.address(m.flow.to))).collect();
        let Some(first) = messages.first() else { return Ok(0) };
        self.call(&slices, &addresses, first.flow, segment)
    }

    /// Sends one message that is in no batch. If `segment` is given, the message contains packets of this many bytes
    /// each.
    pub(crate) fn send_one(&self, flow: PacketFlow, bytes: &[u8], segment: Option<u16>) -> io::Result<()> {
        self.call(&[[IoSlice::new(bytes)]], &[Some(self.address(flow.to))], flow, segment)?;
        Ok(())
    }

    /// Sends messages with the same source address and traffic class in one system call.
    fn call(
        &self,
        slices: &[[IoSlice<'_>; 1]],
        addresses: &[Option<SockaddrStorage>],
        flow: PacketFlow,
        segment: Option<u16>,
    ) -> nix::Result<usize> {
        let source = flow.from.map(SourceAddress::new);
        let tos = flow.traffic_class;
        let class = i32::from(flow.traffic_class);
        let marked = match (flow.traffic_class, self.ipv6) {
            (0, _) => None,
            (_, false) => Some(ControlMessage::Ipv4Tos(&tos)),
            (_, true) => Some(ControlMessage::Ipv6TClass(&class)),
        };
        let segments = segment.iter().map(ControlMessage::UdpGsoSegments);
        let control: Vec<_> =
            segments.chain(source.iter().map(SourceAddress::control)).chain(marked).collect();
        // The control message buffer has exactly the used size, because the kernel parses all of it.
        let space: usize = control.iter().map(space).sum();
        let space = (space > 0).then(|| vec![0; space]);
        let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(slices.len(), space);
        let fd = self.socket.as_raw_fd();
        let sent = sendmmsg(fd, &mut headers, slices, addresses, &control, MsgFlags::MSG_DONTWAIT)?;
        Ok(sent.count())
    }

    fn address(&self, to: SocketAddr) -> SockaddrStorage {
        match to.ip() {
            // An IPv6 socket accepts IPv4 addresses only as IPv4-mapped IPv6 addresses.
            IpAddr::V4(ip) if self.ipv6 => SocketAddr::new(ip.to_ipv6_mapped().into(), to.port()).into(),
            _ => to.into(),
        }
    }

    fn wait(&self) {
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLOUT)];
        let timeout = PollTimeout::try_from(MAX_WAIT).unwrap_or(PollTimeout::ZERO);
        // The result of `poll` does not matter, because the next attempt to send reports any error.
        let _ = poll(&mut fds, timeout);
    }
}

/// Sends the batch by `send`, which empties it, and then the packets that other threads have handed over meanwhile.
fn in_turn(batch: &mut PacketBatch, mut send: impl FnMut(&mut PacketBatch)) {
    send(batch);
    let mut connections = batch.take_connections();
    // The bound on repetitions keeps one thread from sending for all other threads without end.
    for _ in 0..HANDOVERS {
        connections.retain(|connection| batch.take_from(connection));
        if connections.is_empty() {
            return;
        }
        send(batch);
    }
    for connection in connections {
        connection.finish(|packets| {
            batch.add(packets);
            send(batch);
        });
    }
}

/// Sends the batch's messages by `send`, which gets the messages for one system call and returns how many were sent.
fn send_all(
    batch: &PacketBatch,
    gso: &AtomicBool,
    mut send: impl FnMut(&[KernelMessage], Option<u16>) -> nix::Result<usize>,
    wait: impl FnOnce(),
) -> SendReport {
    let mut report = SendReport::default();
    let mut messages = batch.messages(gso.load(Ordering::Relaxed));
    let mut at = 0;
    let mut wait = Some(wait);
    while let Some(rest) = messages.get(at..)
        && let Some(first) = rest.first()
    {
        let packets = first.packets as u64;
        let (count, segment) = one_call(rest);
        let call = rest.get(..count).unwrap_or(rest);
        report.system_calls += 1;
        match send(call, segment) {
            Ok(sent) => {
                report.count(call.iter().take(sent));
                at += sent;
                continue;
            }
            Err(Errno::EINTR) => continue,
            Err(Errno::EAGAIN | Errno::ENOBUFS) => match wait.take() {
                Some(wait) => {
                    wait();
                    continue;
                }
                None => {
                    report.overflowed += rest.iter().map(|message| message.packets as u64).sum::<u64>();
                    break;
                }
            },
            // The route's device does not support segmentation offload, or segments of this size.
            Err(error @ (Errno::EIO | Errno::EINVAL | Errno::EMSGSIZE)) if packets > 1 => {
                if error == Errno::EIO {
                    // A device without segmentation offload would fail each time, so this sender does not use the
                    // offload any more.
                    gso.store(false, Ordering::Relaxed);
                }
                let split: Vec<_> = first.split().collect();
                messages.splice(at..=at, split);
                continue;
            }
            Err(Errno::EMSGSIZE) => report.too_large += packets,
            Err(_) => report.failed += packets,
        }
        at += 1;
    }
    report
}

impl SendReport {
    fn count<'a>(&mut self, messages: impl Iterator<Item = &'a KernelMessage>) {
        for message in messages {
            self.packets += message.packets as u64;
            self.bytes += message.bytes.len() as u64;
        }
    }
}

impl AddAssign for SendReport {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
        self.system_calls += other.system_calls;
        self.too_large += other.too_large;
        self.overflowed += other.overflowed;
        self.failed += other.failed;
    }
}

/// Returns the size of a control message, bytes.
fn space(message: &ControlMessage<'_>) -> usize {
    match message {
        ControlMessage::UdpGsoSegments(_) => cmsg_space::<u16>(),
        ControlMessage::Ipv4PacketInfo(_) => cmsg_space::<in_pktinfo>(),
        ControlMessage::Ipv6PacketInfo(_) => cmsg_space::<in6_pktinfo>(),
        ControlMessage::Ipv4Tos(_) => cmsg_space::<u8>(),
        ControlMessage::Ipv6TClass(_) => cmsg_space::<i32>(),
        _ => 0,
    }
}

/// A source address in the form of the kernel's control message.
enum SourceAddress {
    V4(in_pktinfo),
    V6(in6_pktinfo),
}

impl SourceAddress {
    fn new(ip: IpAddr) -> Self {
        let any = in_addr { s_addr: 0 };
        match ip {
            IpAddr::V4(ip) => Self::V4(in_pktinfo {
                // With interface index 0, the route selects the interface.
                ipi_ifindex: 0,
                ipi_spec_dst: in_addr { s_addr: u32::from_ne_bytes(ip.octets()) },
                ipi_addr: any,
            }),
            IpAddr::V6(ip) => {
                Self::V6(in6_pktinfo { ipi6_addr: in6_addr { s6_addr: ip.octets() }, ipi6_ifindex: 0 })
            }
        }
    }

    fn control(&self) -> ControlMessage<'_> {
        match self {
            Self::V4(info) => ControlMessage::Ipv4PacketInfo(info),
            Self::V6(info) => ControlMessage::Ipv6PacketInfo(info),
        }
    }
}

/// Returns how many of the first `messages` can be sent in one system call, and the call's segment size. There must be
/// at least one message.
///
/// All messages of a call have the same source address, traffic class and segment size. A message that is not longer
/// than the segment size is not segmented.
fn one_call(messages: &[KernelMessage]) -> (usize, Option<u16>) {
    let mut segment = None;
    let mut longest_single = 0;
    let kind = |message: &KernelMessage| (message.flow.from, message.flow.traffic_class);
    let first = messages.first().map(kind);
    let fits = |message: &&KernelMessage| {
        if Some(kind(message)) != first {
            return false;
        }
        if message.packets == 1 {
            longest_single = longest_single.max(message.segment);
        } else if *segment.get_or_insert(message.segment) != message.segment {
            return false;
        }
        segment.is_none_or(|segment| longest_single <= segment)
    };
    let count = messages.iter().take(MAX_CALL).take_while(fits).count();
    let segmented = messages.iter().take(count).find(|message| message.packets > 1);
    (count.max(1), segmented.map(|message| message.segment as u16))
}

/// Enlarges the send buffer up to the system's limit, or beyond it if the process has CAP_NET_ADMIN.
fn grow_send_buffer(socket: &UdpSocket) -> io::Result<()> {
    let forced = nix::sys::socket::setsockopt(socket, sockopt::SndBufForce, &SEND_BUFFER);
    if forced.is_err() {
        nix::sys::socket::setsockopt(socket, sockopt::SndBuf, &SEND_BUFFER)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
