//! A session of packet grafts between two nodes, and an application that sends datagrams in it. Each datagram has a
//! number, its time of sending, and bytes that are computed from the number.

use std::collections::{BTreeMap, BTreeSet};
use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use millrace_graft::packet::{PacketRuntime, Settings};
use millrace_graft::settings::DaemonSettings;
use nix::libc::{ECONNREFUSED, ENOBUFS};
use nix::sys::socket::{setsockopt, sockopt};

use super::super::line::{self, ChannelEnd, PEER};
use super::super::packets::forget_words;
use super::super::two_links::{FIRST, LinkEndNames};
use crate::bench::site::BenchSite;
use crate::lab::LabNode;

const PORT: u16 = 7000;
/// Time for which a sender waits if the session's send window has no space for a datagram.
const NO_ROOM: Duration = Duration::from_micros(200);
const HEAD: usize = 16;

/// A graft as a list of packet functions, and the functions' parameters as TOML.
#[derive(Default)]
pub struct FunctionListSettings<'a> {
    pub functions: &'a [&'a str],
    pub parameters: String,
    /// Additional lines of the session's settings.
    pub session: &'a str,
    /// Paths of the session in addition to the first one.
    pub ways: &'a [LinkEndNames],
}

/// Result of one run: the datagrams that arrived, and their delays.
#[derive(Debug, Default)]
pub struct RepairOutcome {
    pub sent: u64,
    /// Number of messages that arrived, without duplicates.
    pub received: u64,
    /// Number of messages that were altered or duplicated.
    pub wrong: u64,
    /// Number of messages that arrived after a message that was sent later.
    pub disordered: u64,
    pub delays_ms: Vec<f64>,
    /// Longest time between two arrivals, ms.
    pub gap_ms: f64,
    /// The counters of the session's packets, by the reason why they were passed or dropped, at the sender and at the
    /// receiver.
    pub sender: BTreeMap<String, u64>,
    pub receiver: BTreeMap<String, u64>,
}

/// Pace at which an application sends.
#[derive(Clone, Copy)]
pub enum DatagramPace {
    /// Send as much as the session's send window allows.
    Window,
    /// Send this many messages per second.
    Rate(u32),
}

pub struct DatagramRun {
    pub pace: DatagramPace,
    pub bytes: usize,
    pub sending: Duration,
    /// Longest wait for messages that are still on their way after the last one was sent.
    pub grace: Duration,
}

impl DatagramRun {
    pub fn measure(&self, site: &BenchSite, graft: &FunctionListSettings) -> anyhow::Result<RepairOutcome> {
        self.measure_and(site, graft, || Ok(()))
    }

    /// Runs the transfer, and calls `halfway` in the middle of the sending time.
    pub fn measure_and(
        &self,
        site: &BenchSite,
        graft: &FunctionListSettings,
        halfway: impl FnOnce() -> anyhow::Result<()> + Send,
    ) -> anyhow::Result<RepairOutcome> {
        let near = site.relay()?;
        let far = site.subscribers()?;
        let here = settings(site, near, far, graft)?;
        let there = settings(site, far, near, graft)?;
        let from = socket(near, far)?;
        let to = socket(far, near)?;
        setsockopt(&from, sockopt::Ipv4RecvErr, &true)?;
        setsockopt(&to, sockopt::RcvBufForce, &(64 << 20))?;
        to.set_read_timeout(Some(Duration::from_millis(50)))?;
        let stop = AtomicBool::new(false);
        let (is_ready, ready) = channel();
        std::thread::scope(|scope| {
            let stop = &stop;
            let far_is_ready = is_ready.clone();
            let [ours, theirs] = ChannelEnd::pair()?;
            let receiver = scope.spawn(move || far.enter(|| hold(there, theirs, stop, &far_is_ready))?);
            let sender = scope.spawn(move || near.enter(|| hold(here, ours, stop, &is_ready))?);
            // `recv` fails if the channel is closed, because a host's packet graft runtime failed to start.
            let outcome = match (0..2).all(|_| ready.recv().is_ok()) {
                true => forget_words(&to).and_then(|()| self.traffic(&from, &to, halfway)),
                false => Err(anyhow!("not started")),
            };
            stop.store(true, Ordering::Relaxed);
            let ended = |thread: std::thread::ScopedJoinHandle<'_, anyhow::Result<_>>| {
                thread.join().map_err(|_| anyhow!("a runtime panicked"))?
            };
            let sender = ended(sender)?;
            let receiver = ended(receiver)?;
            Ok(RepairOutcome { sender, receiver, ..outcome? })
        })
    }

    /// Returns when a message is due, as time since `base`. Its delay is measured from that time, so waiting for space
    /// in the send window adds to the delay. Returns `None` after the end of the sending time.
    pub fn due(&self, number: u64, base: Instant) -> Option<Duration> {
        let now = base.elapsed();
        match self.pace {
            DatagramPace::Window => (now < self.sending).then_some(now),
            DatagramPace::Rate(rate) => {
                let due = Duration::from_secs(number) / rate;
                (due < self.sending && now < self.sending + self.grace).then_some(due)
            }
        }
    }

    fn traffic(
        &self,
        from: &UdpSocket,
        to: &UdpSocket,
        halfway: impl FnOnce() -> anyhow::Result<()> + Send,
    ) -> anyhow::Result<RepairOutcome> {
        let base = Instant::now();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| receive(to, base, self.bytes, &is_over));
            let middle = scope.spawn(|| {
                std::thread::sleep(self.sending / 2);
                halfway()
            });
            let sent = self.send(from, base);
            if matches!(self.pace, DatagramPace::Rate(_)) {
                std::thread::sleep(self.grace);
            }
            is_over.store(true, Ordering::Relaxed);
            let outcome = receiving.join().map_err(|_| anyhow!("the receiver panicked"))?;
            middle.join().map_err(|_| anyhow!("the action in the middle of the run panicked"))??;
            Ok(RepairOutcome { sent: sent?, ..outcome })
        })
    }

    fn send(&self, from: &UdpSocket, base: Instant) -> anyhow::Result<u64> {
        let mut number = 0;
        while let Some(due) = self.due(number, base) {
            std::thread::sleep(due.saturating_sub(base.elapsed()));
            match from.send(&message(number, due, self.bytes)) {
                Ok(_) => number += 1,
                Err(error) if error.raw_os_error() == Some(ENOBUFS) => std::thread::sleep(NO_ROOM),
                // A refused connection is due to a packet of an earlier run, which arrived after its receiver had
                // closed the socket.
                Err(error) if error.raw_os_error() == Some(ECONNREFUSED) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(number)
    }
}

fn settings(
    site: &BenchSite,
    node: &LabNode,
    peer: &LabNode,
    graft: &FunctionListSettings,
) -> anyhow::Result<Settings> {
    let ways = [FIRST].into_iter().chain(graft.ways.iter().copied());
    // The interface `near` is on one of the two nodes and `far` on the other one. `node` may be either of them.
    let ends = |LinkEndNames { near, far }: LinkEndNames| {
        let ends = (node.interface(near), peer.interface(far));
        let turned = (node.interface(far), peer.interface(near));
        ends.0.zip(ends.1).or(turned.0.zip(turned.1))
    };
    let ways = ways.map(ends).collect::<Option<Vec<_>>>().context("no interface")?;
    let devices: Vec<_> = ways.iter().map(|(here, _)| &here.device).collect();
    let known = line::peer(site.directory(), [node, peer].map(|it| it.addr_v4().into()), "40000")?;
    let mut text = format!(
        "[sessions]\ninterface = {devices:?}\n{}\n[[graft]]\nname = \"measured\"\nfunctions = {:?}\n\
         {known}[[session]]\nname = \"bench\"\nlocal = \"{}:{PORT}\"\nremote = \"{}:{PORT}\"\npeer = \"{PEER}\"\nclear = true\ngraft = \"measured\"\n{}",
        graft.parameters,
        graft.functions,
        node.addr_v4(),
        peer.addr_v4(),
        graft.session,
    );
    for (at, (here, there)) in ways.iter().enumerate().filter(|_| ways.len() > 1) {
        let (local, remote) = if at == 0 { (node.addr_v4(), peer.addr_v4()) } else { (here.v4, there.v4) };
        let device = &here.device;
        text += &format!(
            "[[session.path]]\nlocal = \"{local}\"\nremote = \"{remote}\"\ninterface = {device:?}\n"
        );
    }
    Ok(DaemonSettings::parse(&text, site.directory())?.into_sessions()?)
}

fn socket(node: &LabNode, peer: &LabNode) -> anyhow::Result<UdpSocket> {
    let socket = node.enter(|| UdpSocket::bind((node.addr_v4(), PORT)))??;
    socket.connect((peer.addr_v4(), PORT))?;
    Ok(socket)
}

/// Runs the packet grafts of one host (a `PacketRuntime`) until `stop` is set. Returns the counters of the session's
/// packets, by the reason why they were passed or dropped.
fn hold(
    settings: Settings,
    line: ChannelEnd,
    stop: &AtomicBool,
    is_ready: &Sender<()>,
) -> anyhow::Result<BTreeMap<String, u64>> {
    let mut runtime = PacketRuntime::start(settings)?;
    line.connect(&mut runtime)?;
    let mut is_ready = Some(is_ready);
    while !stop.load(Ordering::Relaxed) {
        if let Some(ready) = is_ready.take_if(|_| runtime.is_open()) {
            let _ = ready.send(());
        }
        line.relay(&mut runtime)?;
        runtime.step(Duration::from_millis(5))?;
    }
    let status = runtime.status()?;
    ensure!(status.trouble.is_empty(), "{}", status.trouble.join("; "));
    Ok(status.sessions.into_iter().next().map(|session| session.packets).unwrap_or_default())
}

/// Builds a message: its number, the time in ns from which its delay is measured, and bytes computed from the number.
pub fn message(number: u64, since: Duration, bytes: usize) -> Vec<u8> {
    let sent_ns = since.as_nanos() as u64;
    let mut message = [number.to_be_bytes(), sent_ns.to_be_bytes()].concat();
    message.extend((HEAD..bytes).map(|at| (number as usize).wrapping_mul(31).wrapping_add(at * 7) as u8));
    message
}

/// Parses a message and checks its bytes. Returns its number and its delay in ms, or `None` if it was altered. Times
/// are relative to `base`.
pub fn read(got: &[u8], base: Instant, bytes: usize) -> Option<(u64, f64)> {
    let now_ns = base.elapsed().as_nanos() as u64;
    let (number, rest) = got.split_first_chunk()?;
    let (sent_ns, _) = rest.split_first_chunk()?;
    let number = u64::from_be_bytes(*number);
    let sent_ns = u64::from_be_bytes(*sent_ns);
    let is_whole = got.len() == bytes && got[HEAD..] == message(number, Duration::ZERO, bytes)[HEAD..];
    is_whole.then(|| (number, now_ns.saturating_sub(sent_ns) as f64 / 1e6))
}

/// State of the receiving application.
#[derive(Default)]
pub struct ReceiverState {
    pub outcome: RepairOutcome,
    seen: BTreeSet<u64>,
    newest: u64,
    /// Time of the latest arrival, ms since the start.
    latest: Option<f64>,
}

impl ReceiverState {
    pub fn take(&mut self, got: &[u8], base: Instant, bytes: usize) {
        let outcome = &mut self.outcome;
        match read(got, base, bytes) {
            Some((number, delay_ms)) if self.seen.insert(number) => {
                let now = base.elapsed().as_secs_f64() * 1e3;
                let gap = now - self.latest.replace(now).unwrap_or(now);
                outcome.gap_ms = outcome.gap_ms.max(gap);
                outcome.received += 1;
                outcome.disordered += u64::from(number < self.newest);
                outcome.delays_ms.push(delay_ms);
                self.newest = self.newest.max(number);
            }
            _ => outcome.wrong += 1,
        }
    }
}

fn receive(to: &UdpSocket, base: Instant, bytes: usize, is_over: &AtomicBool) -> RepairOutcome {
    let mut receiving = ReceiverState::default();
    let mut buffer = [0; 2048];
    while !is_over.load(Ordering::Relaxed) {
        let Ok(got) = to.recv(&mut buffer) else { continue };
        receiving.take(&buffer[..got], base, bytes);
    }
    receiving.outcome
}
