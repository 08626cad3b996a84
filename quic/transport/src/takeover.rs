//! The takeover of an endpoint's socket by a new process, its successor, while connections of the old process go on.
//!
//! Both processes have the same socket, on which both send. Only one of them reads it:
//!
//! 1. The successor makes its endpoint by [`Endpoint::take_over`](crate::Endpoint::take_over). It does not read yet.
//! 2. The old process stops reading ([`Endpoint::leave`](crate::Endpoint::leave)), and the successor begins
//!    ([`Endpoint::begin`](crate::Endpoint::begin)). Packets that arrive in between wait in the socket.
//! 3. The successor passes packets of the old process's connections on to it, by a [`channel`]. Their connection IDs
//!    name the old process ([`ConnectionIds`]).
//! 4. When either process ends, the channel ends. If it was the successor, the old process reads the socket again. If
//!    it was the old process, the successor answers packets of its connections by stateless resets.
//!
//! A packet that the channel has no room for is dropped, like one that a full socket has no room for.

use std::{
    io::{self, IoSlice, IoSliceMut},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd as _, OwnedFd},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, recvmsg, sendmsg, setsockopt, socketpair,
        sockopt,
    },
};
use parking_lot::{Mutex, RwLock};
use quinn::{
    AsyncUdpSocket, UdpPoller,
    udp::{EcnCodepoint, RecvMeta, Transmit},
};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{
    ids::{ConnectionIds, destination},
    lasting::LastingSecret,
};

/// Requested size of a channel's send buffers, bytes.
const CHANNEL_BUFFER: usize = 4 << 20;
/// How often a read goes on if all packets that it has read were of the predecessor's connections.
const READS: usize = 32;

/// The process whose socket an endpoint takes over.
pub struct Predecessor {
    /// The secret that the predecessor's keys are derived from.
    pub secret: LastingSecret,
    /// The predecessor's [`generation`](crate::Config::generation).
    pub generation: u8,
    /// The successor's end of a [`channel`] for each shard. The other ends are given to
    /// [`Endpoint::leave`](crate::Endpoint::leave).
    pub channels: Vec<OwnedFd>,
}

/// Makes a channel by which a successor passes packets on to its predecessor. Returns an end for each.
///
/// # Errors
/// Fails if the system is out of descriptors or memory.
pub fn channel() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    // Unlike that of a datagram socket, the queue of SOCK_SEQPACKET is bounded in bytes and not in messages.
    let (one, other) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
    let grow = |end: &OwnedFd| {
        let forced = setsockopt(end, sockopt::SndBufForce, &CHANNEL_BUFFER);
        forced.or_else(|_| setsockopt(end, sockopt::SndBuf, &CHANNEL_BUFFER))
    };
    grow(&one)?;
    grow(&other)?;
    Ok((one, other))
}

/// A socket that another process may take over, or that was taken over from another process.
#[derive(Debug)]
pub(crate) struct TakeoverSocket {
    socket: Arc<dyn AsyncUdpSocket>,
    /// Tells the offload's part of `socket` that another process reads. `None`: the socket is of no offload, and is not
    /// polled meanwhile.
    is_left: Option<Arc<AtomicBool>>,
    ids: ConnectionIds,
    reading: Mutex<Reading>,
    predecessor: RwLock<Option<PredecessorLink>>,
}

#[derive(Debug)]
struct Reading {
    source: PacketSource,
    /// The task that reads.
    waker: Option<Waker>,
}

/// The place where an endpoint's packets come from.
#[derive(Clone, Debug)]
enum PacketSource {
    /// The predecessor still reads the socket.
    Predecessor,
    Socket,
    /// The successor reads the socket, and passes packets on by a channel.
    Successor(Arc<AsyncFd<OwnedFd>>),
}

#[derive(Debug)]
struct PredecessorLink {
    ids: ConnectionIds,
    channel: OwnedFd,
}

impl TakeoverSocket {
    /// Makes the socket of an endpoint with these connection IDs. `predecessor` is the process that reads the socket
    /// until [`Self::begin`], with its IDs and the channel to it.
    pub fn new(
        socket: Arc<dyn AsyncUdpSocket>,
        is_left: Option<Arc<AtomicBool>>,
        ids: ConnectionIds,
        predecessor: Option<(ConnectionIds, OwnedFd)>,
    ) -> Self {
        let source = match &predecessor {
            Some((earlier, _)) => {
                ids.set_other(Some(earlier.generation));
                PacketSource::Predecessor
            }
            None => PacketSource::Socket,
        };
        let predecessor = predecessor.map(|(ids, channel)| PredecessorLink { ids, channel });
        let reading = Mutex::new(Reading { source, waker: None });
        Self { socket, is_left, ids, reading, predecessor: RwLock::new(predecessor) }
    }

    /// Begins to read the socket.
    pub fn begin(&self) {
        self.read_from(PacketSource::Socket);
    }

    /// Lets the process with the next generation read the socket from now on, which passes packets on by `channel`.
    pub fn leave(&self, channel: OwnedFd) -> io::Result<()> {
        let channel = register(channel)?;
        self.ids.set_other(Some(self.ids.generation.wrapping_add(1)));
        self.read_from(PacketSource::Successor(Arc::new(channel)));
        Ok(())
    }

    fn read_from(&self, source: PacketSource) {
        let is_left = matches!(source, PacketSource::Successor(_));
        let waker = {
            let mut reading = self.reading.lock();
            self.is_left.iter().for_each(|flag| flag.store(is_left, Ordering::SeqCst));
            reading.source = source;
            reading.waker.take()
        };
        waker.iter().for_each(Waker::wake_by_ref);
    }

    /// Passes packets of the predecessor's connections on to it, and moves the other packets to the front. Returns how
    /// many of the `count` buffers have such packets.
    fn pass_on(&self, bufs: &mut [IoSliceMut<'_>], meta: &mut [RecvMeta], count: usize) -> usize {
        if self.predecessor.read().is_none() {
            return count;
        }
        let mut kept = 0;
        for at in 0..count.min(bufs.len()).min(meta.len()) {
            let RecvMeta { len, stride, .. } = meta[at];
            let buf = &mut bufs[at];
            let mut kept_len = 0;
            // Packets that the kernel has merged (GRO) may be of several connections.
            for start in (0..len).step_by(stride.max(1)) {
                let end = (start + stride.max(1)).min(len);
                if !self.pass(&meta[at], &buf[start..end]) {
                    buf.copy_within(start..end, kept_len);
                    kept_len += end - start;
                }
            }
            // A datagram without payload is kept, too.
            if kept_len > 0 || len == 0 {
                meta[at].len = kept_len;
                bufs.swap(kept, at);
                meta.swap(kept, at);
                kept += 1;
            }
        }
        kept
    }

    /// Passes a packet on if it belongs to a connection of the predecessor. Returns false if it does not, or if the
    /// predecessor has ended.
    fn pass(&self, meta: &RecvMeta, packet: &[u8]) -> bool {
        {
            let predecessor = self.predecessor.read();
            let Some(PredecessorLink { ids, channel }) = &*predecessor else { return false };
            if !destination(packet).is_some_and(|id| ids.has_issued(id)) {
                return false;
            }
            match send(channel, meta, packet) {
                // The channel has no room, so the packet is lost.
                Ok(()) | Err(Errno::EAGAIN | Errno::ENOBUFS | Errno::ENOMEM) => return true,
                Err(_) => {}
            }
        }
        self.predecessor.write().take();
        self.ids.set_other(None);
        tracing::info!("the process whose socket this one has taken over has ended");
        false
    }

    /// Receives packets that the successor has passed on. If it has ended, this process reads the socket again.
    fn poll_channel(
        &self,
        channel: &AsyncFd<OwnedFd>,
        context: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = std::task::ready!(channel.poll_read_ready(context))?;
            let mut count = 0;
            while let (Some(buf), Some(meta)) = (bufs.get_mut(count), meta.get_mut(count)) {
                match receive(channel.get_ref(), buf) {
                    Ok(Some(received)) => *meta = received,
                    Ok(None) => continue, // a packet that is malformed or longer than the buffer is dropped
                    Err(Errno::EAGAIN) => {
                        guard.clear_ready();
                        break;
                    }
                    Err(_) => {
                        tracing::warn!(
                            "the process that has taken over the socket has ended: reading it again"
                        );
                        self.ids.set_other(None);
                        self.begin();
                        return Poll::Ready(Ok(count));
                    }
                }
                count += 1;
            }
            if count > 0 {
                return Poll::Ready(Ok(count));
            }
        }
    }
}

impl AsyncUdpSocket for TakeoverSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.socket).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.socket.try_send(transmit)
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        for _ in 0..READS {
            let source = {
                let mut reading = self.reading.lock();
                reading.waker = Some(context.waker().clone());
                reading.source.clone()
            };
            let count = match source {
                PacketSource::Predecessor => return Poll::Pending,
                PacketSource::Socket => std::task::ready!(self.socket.poll_recv(context, bufs, meta))?,
                PacketSource::Successor(channel) => {
                    // Packets that an offload has set aside before the takeover are older than those of the channel.
                    if self.is_left.is_some()
                        && let Poll::Ready(left) = self.socket.poll_recv(context, bufs, meta)
                    {
                        return Poll::Ready(left);
                    }
                    std::task::ready!(self.poll_channel(&channel, context, bufs, meta))?
                }
            };
            let kept = self.pass_on(bufs, meta, count);
            if kept > 0 {
                return Poll::Ready(Ok(kept));
            }
        }
        // The task is polled again soon, after other tasks.
        context.waker().wake_by_ref();
        Poll::Pending
    }

    millrace_webtransport::described_by_field_socket!();
}

/// Registers a channel with the runtime. The constructor is deprecated because a descriptor might change or be closed
/// while registered, which an `OwnedFd` never does.
#[allow(deprecated)]
fn register(channel: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(channel, Interest::READABLE)
}

/// Length of the head that precedes each packet on a channel: source address and port, scope ID of the source address,
/// local address, and ECN codepoint. Each address is in IPv6 form; an unspecified local address is unknown.
const HEAD: usize = 39;

fn send(channel: &OwnedFd, meta: &RecvMeta, packet: &[u8]) -> nix::Result<()> {
    let scope = if let SocketAddr::V6(addr) = meta.addr { addr.scope_id() } else { 0 };
    let local = meta.dst_ip.unwrap_or(Ipv6Addr::UNSPECIFIED.into());
    let mut head = [0; HEAD];
    head[..16].copy_from_slice(&six(meta.addr.ip()));
    head[16..18].copy_from_slice(&meta.addr.port().to_be_bytes());
    head[18..22].copy_from_slice(&scope.to_be_bytes());
    head[22..38].copy_from_slice(&six(local));
    head[38] = meta.ecn.map_or(0, |ecn| ecn as u8);
    let parts = [IoSlice::new(&head), IoSlice::new(packet)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<UnixAddr>(channel.as_raw_fd(), &parts, &[], flags, None).map(drop)
}

/// Receives a packet. Returns `None` for one that is malformed or longer than `buf`.
///
/// # Errors
/// Fails with `EAGAIN` if no packet waits. Other errors mean that the other process has ended.
fn receive(channel: &OwnedFd, buf: &mut [u8]) -> nix::Result<Option<RecvMeta>> {
    let mut head = [0; HEAD];
    let (got, flags) = {
        let mut parts = [IoSliceMut::new(&mut head), IoSliceMut::new(buf)];
        let received = recvmsg::<()>(channel.as_raw_fd(), &mut parts, None, MsgFlags::MSG_DONTWAIT)?;
        (received.bytes, received.flags)
    };
    match got.checked_sub(HEAD) {
        _ if got == 0 => Err(Errno::EPIPE),
        Some(len) if !flags.contains(MsgFlags::MSG_TRUNC) => Ok(Some(read_head(&head, len))),
        _ => Ok(None),
    }
}

fn read_head(head: &[u8; HEAD], len: usize) -> RecvMeta {
    let ip = |at: usize| Ipv6Addr::from(std::array::from_fn(|byte| head[at + byte]));
    let port = u16::from_be_bytes([head[16], head[17]]);
    let scope = u32::from_be_bytes([head[18], head[19], head[20], head[21]]);
    let addr = match ip(0).to_ipv4_mapped() {
        Some(four) => SocketAddr::new(four.into(), port),
        None => std::net::SocketAddrV6::new(ip(0), port, 0, scope).into(),
    };
    let local = Some(ip(22)).filter(|ip| !ip.is_unspecified()).map(|ip| ip.to_canonical());
    RecvMeta { addr, len, stride: len, ecn: EcnCodepoint::from_bits(head[38]), dst_ip: local }
}

fn six(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

#[cfg(test)]
mod tests {
    use std::{net::UdpSocket, task::ready};

    use millrace_testkit::{async_wait_for, wait_for};
    use quinn::{Runtime as _, TokioRuntime};
    use quinn_proto::ConnectionIdGenerator as _;

    use super::*;

    const KEY: &[u8] = b"key";

    /// Both processes of a takeover, each with a descriptor of the same socket, and a peer's socket.
    struct Processes {
        old: TakeoverSocket,
        new: TakeoverSocket,
        peer: UdpSocket,
        channel: OwnedFd,
    }

    impl Processes {
        fn start() -> Self {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket.set_nonblocking(true).unwrap();
            let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
            peer.connect(socket.local_addr().unwrap()).unwrap();
            let wrap = |socket| TokioRuntime.wrap_udp_socket(socket).unwrap();
            let [old, new] = [255, 0].map(|generation| ConnectionIds::new(KEY, generation));
            let (theirs, ours) = channel().unwrap();
            let predecessor = Some((old.clone(), ours));
            let new = TakeoverSocket::new(wrap(socket.try_clone().unwrap()), None, new, predecessor);
            Self { old: TakeoverSocket::new(wrap(socket), None, old, None), new, peer, channel: theirs }
        }

        /// Makes the new process read the socket, and the old one the channel.
        fn switch(self) -> (TakeoverSocket, TakeoverSocket, UdpSocket) {
            self.old.leave(self.channel).unwrap();
            self.new.begin();
            (self.old, self.new, self.peer)
        }
    }

    /// Returns a packet with a short header and the next ID of this generation.
    fn packet(generation: u8) -> Vec<u8> {
        [&[0x40][..], &ConnectionIds::new(KEY, generation).generate_cid(), b"sealed"].concat()
    }

    async fn next_packet(socket: &TakeoverSocket) -> (RecvMeta, Vec<u8>) {
        let mut buf = [0; 2000];
        let mut meta = [RecvMeta::default()];
        let count = std::future::poll_fn(|context| {
            let mut bufs = [IoSliceMut::new(&mut buf)];
            Poll::Ready(ready!(socket.poll_recv(context, &mut bufs, &mut meta)))
        });
        assert_eq!(count.await.unwrap(), 1);
        (meta[0], buf[..meta[0].len].to_vec())
    }

    #[tokio::test]
    async fn packets_reach_the_process_that_issued_their_ids() {
        let processes = Processes::start();
        let first = packet(255);
        processes.peer.send(&first).unwrap();
        assert_eq!(next_packet(&processes.old).await.1, first);
        // This packet arrives before the new process begins to read, and waits in the socket.
        let waiting = packet(0);
        processes.peer.send(&waiting).unwrap();
        let (old, new, peer) = processes.switch();
        assert_eq!(next_packet(&new).await.1, waiting);
        let initial = [&[0xc3, 0, 0, 0, 1, 8][..], &[255; 20]].concat();
        let [to_old, to_new] = [packet(255), packet(0)];
        for sent in [&to_old, &initial, &to_old, &to_new] {
            peer.send(sent).unwrap();
        }
        // The new process passes packets on only while it is polled for its own.
        assert_eq!(next_packet(&new).await.1, initial);
        assert_eq!(next_packet(&new).await.1, to_new);
        for _ in 0..2 {
            let (meta, received) = next_packet(&old).await;
            assert_eq!((received, meta.addr), (to_old.clone(), peer.local_addr().unwrap()));
        }
    }

    #[tokio::test]
    async fn packet_that_is_steered_to_the_wrong_process_is_not_valid_there() {
        let processes = Processes::start();
        let is_valid = |process: &TakeoverSocket, packet: &[u8]| {
            let id = quinn_proto::ConnectionId::new(destination(packet).unwrap());
            process.ids.validate(&id).is_ok()
        };
        let (old, new, peer) = processes.switch();
        let wrong = packet(0);
        {
            let predecessor = new.predecessor.read();
            let meta = RecvMeta { addr: "[::1]:7".parse().unwrap(), ..RecvMeta::default() };
            send(&predecessor.as_ref().unwrap().channel, &meta, &wrong).unwrap();
        }
        let (meta, received) = next_packet(&old).await;
        assert_eq!((received, meta.addr), (wrong.clone(), "[::1]:7".parse().unwrap()));
        assert!(!is_valid(&old, &wrong) && !is_valid(&new, &packet(255)), "a reset would end the connection");
        drop(new);
        let own = packet(255);
        peer.send(&own).unwrap();
        assert_eq!(next_packet(&old).await.1, own);
        assert!(is_valid(&old, &wrong), "the process that issued it has ended");
    }

    #[tokio::test]
    async fn each_process_goes_on_alone_after_the_end_of_the_other() {
        let (old, new, peer) = Processes::start().switch();
        drop(old);
        let orphan = packet(255);
        async_wait_for("the orphan", || {
            peer.send(&orphan).unwrap();
            let context = &mut Context::from_waker(Waker::noop());
            let mut buf = [0; 2000];
            let mut meta = [RecvMeta::default()];
            matches!(new.poll_recv(context, &mut [IoSliceMut::new(&mut buf)], &mut meta), Poll::Ready(Ok(1)))
                .then_some(())
        })
        .await;
        assert!(new.predecessor.read().is_none());
    }

    #[test]
    fn head_of_a_passed_packet_keeps_addresses_and_ecn() {
        let (one, other) = channel().unwrap();
        let addr = |text: &str| text.parse::<SocketAddr>().unwrap();
        let four = RecvMeta {
            addr: addr("192.0.2.1:443"),
            dst_ip: Some([192, 0, 2, 2].into()),
            ..RecvMeta::default()
        };
        let six =
            RecvMeta { addr: addr("[fe80::1%3]:9"), ecn: Some(EcnCodepoint::Ce), ..RecvMeta::default() };
        for meta in [four, six] {
            super::send(&one, &meta, b"packet").unwrap();
            let mut buf = [0; 10];
            let got = wait_for("the packet", || super::receive(&other, &mut buf).ok()).unwrap();
            assert_eq!((got.addr, got.dst_ip, got.ecn), (meta.addr, meta.dst_ip, meta.ecn));
            assert_eq!((got.len, got.stride, &buf[..6]), (6, 6, b"packet".as_slice()));
        }
        super::send(&one, &four, &[7; 11]).unwrap();
        assert_eq!(super::receive(&other, &mut [0; 10]).unwrap().map(|meta| meta.len), None, "too long");
        drop(one);
        assert_eq!(super::receive(&other, &mut [0; 10]).unwrap_err(), Errno::EPIPE);
    }
}
