//! One direction of an emulated link: a thread that passes frames from one packet socket to another one through a
//! [`Shaper`].
//!
//! A frame's delay starts at the kernel's receive timestamp. So a frame is late only by the time that the thread takes
//! to wake up before sending.

use std::io::{IoSlice, IoSliceMut, PipeReader, PipeWriter, Write as _};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::socket::{self, ControlMessageOwned, LinkAddr, MsgFlags, MultiHeaders, sockopt};
use nix::sys::time::{TimeSpec, TimeValLike as _};
use nix::time::{ClockId, clock_gettime};
use parking_lot::Mutex;

use super::impair::{Impairment, Settings};
use super::shape::{FrameCounters, Shaper};
use super::{Error, Result};

/// Largest number of frames per system call.
const BATCH: usize = 64;

/// Size of the socket buffer, bytes. It holds bursts while the thread waits for a CPU.
const SOCKET_BUFFER: usize = 64 << 20;

/// Priority of the thread under SCHED_FIFO. The lowest one is enough to precede all ordinary threads.
const PRIORITY: &str = "1";

const ETHERNET_HEADER: usize = 14;

#[derive(Clone, Copy)]
struct IgnoreOutgoing;
nix::setsockopt_impl!(IgnoreOutgoing, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, bool, sockopt::SetBool);

#[derive(Clone, Copy)]
struct QdiscBypass;
nix::setsockopt_impl!(QdiscBypass, libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, bool, sockopt::SetBool);

#[derive(Clone, Copy)]
struct PacketStatistics;
nix::getsockopt_impl!(
    PacketStatistics,
    libc::SOL_PACKET,
    libc::PACKET_STATISTICS,
    libc::tpacket_stats,
    sockopt::GetStruct<libc::tpacket_stats>
);

/// A running direction of an emulated link. Dropping it stops the forwarding of frames.
pub struct EmulatedWire {
    shaper: Arc<Mutex<Shaper>>,
    input: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
    waker: PipeWriter,
    thread: Option<JoinHandle<()>>,
}

impl EmulatedWire {
    /// Starts to pass frames from the device `from` to the device `to`, both in the calling thread's namespace. The
    /// devices must be up, and must carry frames of `mtu` bytes plus the Ethernet header.
    pub fn start(from: &str, to: &str, mtu: usize, shaper: Shaper) -> Result<Self> {
        let io = |source: Errno| Error::Io {
            what: format!("packet socket {from} -> {to}"),
            source: source.into(),
        };
        let input = Arc::new(input(from).map_err(io)?);
        let output = output(to).map_err(io)?;
        let (wake, waker) = std::io::pipe().map_err(|source| Error::Io { what: "pipe".into(), source })?;
        let shaper = Arc::new(Mutex::new(shaper));
        let stop = Arc::new(AtomicBool::new(false));
        let pump = FramePump {
            shaper: shaper.clone(),
            input: input.clone(),
            output,
            wake,
            stop: stop.clone(),
            frame_size: mtu + ETHERNET_HEADER,
        };
        let thread = std::thread::Builder::new()
            .name(format!("wire {from}"))
            .spawn(move || pump.run())
            .map_err(|source| Error::Io { what: "start a thread".into(), source })?;
        Ok(Self { shaper, input, stop, waker, thread: Some(thread) })
    }

    pub fn settings(&self) -> Impairment {
        self.shaper.lock().settings().clone()
    }

    pub fn set(&self, settings: Impairment) {
        self.shaper.lock().set(Instant::now(), settings);
        self.wake();
    }

    /// Changes only the given settings of this direction.
    pub fn change(&self, settings: &Settings) -> Result<()> {
        let mut shaper = self.shaper.lock();
        let mut changed = shaper.settings().clone();
        changed.apply(settings)?;
        shaper.set(Instant::now(), changed);
        drop(shaper);
        self.wake();
        Ok(())
    }

    pub fn counters(&self) -> FrameCounters {
        // The kernel resets its count of dropped frames on each read, so the counts are added to a total.
        let dropped =
            socket::getsockopt(&self.input, PacketStatistics).map_or(0, |statistics| statistics.tp_drops);
        let mut shaper = self.shaper.lock();
        shaper.count_overrun(dropped.into());
        shaper.counters()
    }

    fn wake(&self) {
        // A write error is ignored: it means that the thread has ended.
        let _ = (&self.waker).write(&[0]);
    }
}

impl Drop for EmulatedWire {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Opens a packet socket that receives every frame that arrives at `device`.
pub(super) fn input(device: &str) -> nix::Result<OwnedFd> {
    let fd = socket::socket(
        socket::AddressFamily::Packet,
        socket::SockType::Raw,
        socket::SockFlag::SOCK_CLOEXEC | socket::SockFlag::SOCK_NONBLOCK,
        socket::SockProtocol::EthAll,
    )?;
    socket::setsockopt(&fd, IgnoreOutgoing, &true)?;
    socket::setsockopt(&fd, sockopt::ReceiveTimestampns, &true)?;
    socket::setsockopt(&fd, sockopt::RcvBufForce, &SOCKET_BUFFER)?;
    socket::bind(fd.as_raw_fd(), &address(device)?)?;
    Ok(fd)
}

/// Opens a packet socket that sends through `device` and receives no frames.
pub(super) fn output(device: &str) -> nix::Result<OwnedFd> {
    let fd = socket::socket(
        socket::AddressFamily::Packet,
        socket::SockType::Raw,
        socket::SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    socket::setsockopt(&fd, QdiscBypass, &true)?;
    socket::setsockopt(&fd, sockopt::SndBufForce, &SOCKET_BUFFER)?;
    socket::bind(fd.as_raw_fd(), &address(device)?)?;
    Ok(fd)
}

/// Returns the link-layer address of a device. The protocol in the address is 0, so that `bind` keeps the socket's own
/// protocol.
fn address(device: &str) -> nix::Result<LinkAddr> {
    let of_device = nix::ifaddrs::getifaddrs()?.filter(|entry| entry.interface_name == device);
    of_device.filter_map(|entry| entry.address?.as_link_addr().copied()).next().ok_or(Errno::ENODEV)
}

/// Gives the calling thread real-time priority and exact timers, as frames would not wait for a CPU on a real wire.
/// Without permission for that, links are less exact.
pub(super) fn be_punctual() {
    // With the default timer slack, the kernel may wake the thread 50 us late.
    let _ = nix::sys::prctl::set_timerslack(1);
    let thread = nix::unistd::gettid().to_string();
    match Command::new("chrt").args(["--fifo", "--pid", PRIORITY, &thread]).output() {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            let error = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            tracing::warn!(
                error,
                "lab: the emulator has no real-time priority, so packets may leave late: chrt failed"
            );
        }
        Err(error) => {
            tracing::warn!(%error, "lab: the emulator has no real-time priority, so packets may leave late: install chrt (util-linux)")
        }
    }
}

struct FramePump {
    shaper: Arc<Mutex<Shaper>>,
    input: Arc<OwnedFd>,
    output: OwnedFd,
    wake: PipeReader,
    stop: Arc<AtomicBool>,
    frame_size: usize,
}

impl FramePump {
    fn run(self) {
        be_punctual();
        let mut inbox = FrameBatch::new(self.frame_size);
        while !self.stop.load(Ordering::Relaxed) {
            let deadline = self.deliver();
            match self.wait(deadline).and_then(|()| self.collect(&mut inbox)) {
                Ok(()) | Err(Errno::EINTR | Errno::EAGAIN | Errno::ENETDOWN) => {}
                Err(error) => {
                    tracing::error!(%error, "lab: an emulated link stopped forwarding");
                    return;
                }
            }
        }
    }

    /// Sends the frames that are due. Returns when the next frame is due.
    fn deliver(&self) -> Option<Instant> {
        loop {
            let mut shaper = self.shaper.lock();
            let now = Instant::now();
            let due: Vec<Vec<u8>> = std::iter::from_fn(|| shaper.pop(now)).take(BATCH).collect();
            let deadline = shaper.deadline();
            drop(shaper);
            if due.is_empty() {
                return deadline;
            }
            self.send(&due);
        }
    }

    fn send(&self, mut frames: &[Vec<u8>]) {
        let mut headers = MultiHeaders::<()>::preallocate(frames.len(), None);
        while !frames.is_empty() {
            let slices: Vec<[IoSlice; 1]> = frames.iter().map(|frame| [IoSlice::new(frame)]).collect();
            let nowhere = vec![None; frames.len()];
            let fd = self.output.as_raw_fd();
            let sent = socket::sendmmsg(fd, &mut headers, &slices, nowhere, [], MsgFlags::empty());
            let sent = match sent.map(Iterator::count) {
                Ok(sent) => sent,
                Err(Errno::EINTR) => continue,
                Err(_) => 0,
            };
            if sent == 0 {
                // The first frame of the batch cannot be sent: the device is down, or memory is short. Count it as lost
                // by the emulator (`overrun`).
                self.shaper.lock().count_overrun(1);
            }
            frames = frames.get(sent.max(1)..).unwrap_or_default();
        }
    }

    fn wait(&self, deadline: Option<Instant>) -> nix::Result<()> {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let mut fds = [
            PollFd::new(self.input.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
        ];
        ppoll(&mut fds, left.map(TimeSpec::from_duration), None)?;
        if fds[1].any() == Some(true) {
            nix::unistd::read(&self.wake, &mut [0; 64])?;
        }
        Ok(())
    }

    /// Reads a batch of frames that have arrived.
    fn collect(&self, inbox: &mut FrameBatch) -> nix::Result<()> {
        let arrived = inbox.receive(&self.input)?;
        let mut shaper = self.shaper.lock();
        for ((at, len), slot) in arrived.into_iter().zip(&mut inbox.frames) {
            let mut frame = std::mem::replace(slot, vec![0; self.frame_size]);
            frame.truncate(len);
            shaper.push(at, frame);
        }
        Ok(())
    }
}

/// Buffers for a batch of received frames.
struct FrameBatch {
    frames: Vec<Vec<u8>>,
    /// Message headers, which are reused. Each has room for the timestamp that every frame has.
    headers: MultiHeaders<LinkAddr>,
}

impl FrameBatch {
    fn new(frame_size: usize) -> Self {
        let headers = MultiHeaders::preallocate(BATCH, Some(nix::cmsg_space!(TimeSpec)));
        Self { frames: vec![vec![0; frame_size]; BATCH], headers }
    }

    /// Receives a batch. Returns the arrival time and the length of each frame; the data is in `frames`.
    fn receive(&mut self, socket: &OwnedFd) -> nix::Result<Vec<(Instant, usize)>> {
        let mut slices: Vec<[IoSliceMut; 1]> =
            self.frames.iter_mut().map(|frame| [IoSliceMut::new(frame)]).collect();
        let fd = socket.as_raw_fd();
        let messages = socket::recvmmsg(fd, &mut self.headers, &mut slices, MsgFlags::MSG_DONTWAIT, None)?;
        let now = Instant::now();
        let wall = clock_gettime(ClockId::CLOCK_REALTIME)?;
        let arrived = |message: &socket::RecvMsg<LinkAddr>| {
            let stamp = message.cmsgs().ok()?.find_map(|cmsg| match cmsg {
                ControlMessageOwned::ScmTimestampns(stamp) => Some(stamp),
                _ => None,
            })?;
            let age = u64::try_from((wall - stamp).num_nanoseconds()).ok()?;
            now.checked_sub(Duration::from_nanos(age))
        };
        Ok(messages.map(|message| (arrived(&message).unwrap_or(now), message.bytes)).collect())
    }
}
