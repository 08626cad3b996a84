//! A session of packet grafts between two nodes, and datagrams in it: each with a number, the time when it was sent, and bytes
//! that follow from the number.

use std::collections::{BTreeMap, BTreeSet};
use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use millrace_graft::packet::{Runtime, Settings};
use nix::libc::{ECONNREFUSED, ENOBUFS};
use nix::sys::socket::{setsockopt, sockopt};

use super::super::packets::forget_words;
use super::super::two_links::{Ends, FIRST};
use crate::bench::site::Site;
use crate::lab::Node;

const PORT: u16 = 7000;
/// Until a sender that was told that there is no room tries again.
const NO_ROOM: Duration = Duration::from_micros(200);
const HEAD: usize = 16;

/// A list of functions, and their parameters as TOML.
#[derive(Default)]
pub struct Graft<'a> {
    pub functions: &'a [&'a str],
    pub parameters: String,
    /// More lines of the session's settings.
    pub session: &'a str,
    /// Beside the first one, those by which it goes, too.
    pub ways: &'a [Ends],
}

/// What came of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    pub sent: u64,
    /// Without those that came twice.
    pub received: u64,
    /// Not as they were sent, or for the second time.
    pub wrong: u64,
    /// Behind one that was sent later.
    pub disordered: u64,
    pub delays_ms: Vec<f64>,
    /// The longest time between two that came.
    pub gap_ms: f64,
    /// What became of packets at both ends, by the names of the reasons.
    pub sender: BTreeMap<String, u64>,
    pub receiver: BTreeMap<String, u64>,
}

/// How an application sends.
#[derive(Clone, Copy)]
pub enum Pace {
    /// As much as the window lets it.
    Window,
    /// Messages a second.
    Rate(u32),
}

pub struct Run {
    pub pace: Pace,
    pub bytes: usize,
    pub sending: Duration,
    /// For what is still under way then.
    pub grace: Duration,
}

impl Run {
    pub fn measure(&self, site: &Site, graft: &Graft) -> anyhow::Result<Outcome> {
        self.measure_and(site, graft, || Ok(()))
    }

    /// The same; in the middle of the sending something is done.
    pub fn measure_and(
        &self,
        site: &Site,
        graft: &Graft,
        halfway: impl FnOnce() -> anyhow::Result<()> + Send,
    ) -> anyhow::Result<Outcome> {
        let (near, far) = (site.relay()?, site.subscribers()?);
        std::fs::write(site.directory().join("key"), "00112233445566778899aabbccddeeff")?;
        let (here, there) = (settings(site, near, far, graft)?, settings(site, far, near, graft)?);
        let (from, to) = (socket(near, far)?, socket(far, near)?);
        setsockopt(&from, sockopt::Ipv4RecvErr, &true)?;
        setsockopt(&to, sockopt::RcvBufForce, &(64 << 20))?;
        to.set_read_timeout(Some(Duration::from_millis(50)))?;
        let (stop, (is_ready, ready)) = (AtomicBool::new(false), channel());
        std::thread::scope(|scope| {
            let (stop, far_is_ready) = (&stop, is_ready.clone());
            let receiver = scope.spawn(move || far.enter(|| hold(there, stop, &far_is_ready))?);
            let sender = scope.spawn(move || near.enter(|| hold(here, stop, &is_ready))?);
            // A channel that is closed says that one of them could not start.
            let outcome = match (0..2).all(|_| ready.recv().is_ok()) {
                true => forget_words(&to).and_then(|()| self.traffic(&from, &to, halfway)),
                false => Err(anyhow!("not started")),
            };
            stop.store(true, Ordering::Relaxed);
            let ended = |thread: std::thread::ScopedJoinHandle<'_, anyhow::Result<_>>| {
                thread.join().map_err(|_| anyhow!("a runtime panicked"))?
            };
            let (sender, receiver) = (ended(sender)?, ended(receiver)?);
            Ok(Outcome { sender, receiver, ..outcome? })
        })
    }

    /// When a message is due, in time since `base`, which is also what its delay counts from: who has to wait for room is late by that.
    /// `None`: there is no more to send, or no time.
    pub fn due(&self, number: u64, base: Instant) -> Option<Duration> {
        let now = base.elapsed();
        match self.pace {
            Pace::Window => (now < self.sending).then_some(now),
            Pace::Rate(rate) => {
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
    ) -> anyhow::Result<Outcome> {
        let (base, is_over) = (Instant::now(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| receive(to, base, self.bytes, &is_over));
            let middle = scope.spawn(|| {
                std::thread::sleep(self.sending / 2);
                halfway()
            });
            let sent = self.send(from, base);
            if matches!(self.pace, Pace::Rate(_)) {
                std::thread::sleep(self.grace);
            }
            is_over.store(true, Ordering::Relaxed);
            let outcome = receiving.join().map_err(|_| anyhow!("the receiver panicked"))?;
            middle.join().map_err(|_| anyhow!("what was to be done in the middle panicked"))??;
            Ok(Outcome { sent: sent?, ..outcome })
        })
    }

    fn send(&self, from: &UdpSocket, base: Instant) -> anyhow::Result<u64> {
        let mut number = 0;
        while let Some(due) = self.due(number, base) {
            std::thread::sleep(due.saturating_sub(base.elapsed()));
            match from.send(&message(number, due, self.bytes)) {
                Ok(_) => number += 1,
                Err(error) if error.raw_os_error() == Some(ENOBUFS) => std::thread::sleep(NO_ROOM),
                // Of a packet of the run before, which was under way when its receiver closed.
                Err(error) if error.raw_os_error() == Some(ECONNREFUSED) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(number)
    }
}

fn settings(site: &Site, node: &Node, peer: &Node, graft: &Graft) -> anyhow::Result<Settings> {
    let ways = [FIRST].into_iter().chain(graft.ways.iter().copied());
    // Either of them may be the near end.
    let ends = |Ends { near, far }: Ends| {
        let ends = (node.interface(near), peer.interface(far));
        let turned = (node.interface(far), peer.interface(near));
        ends.0.zip(ends.1).or(turned.0.zip(turned.1))
    };
    let ways = ways.map(ends).collect::<Option<Vec<_>>>().context("no interface")?;
    let devices: Vec<_> = ways.iter().map(|(here, _)| &here.device).collect();
    let mut text = format!(
        "interface = {devices:?}\n{}\n[[graft]]\nname = \"measured\"\nfunctions = {:?}\n\
         [[session]]\nname = \"bench\"\nlocal = \"{}:{PORT}\"\nremote = \"{}:{PORT}\"\nkey-file = \"key\"\nclear = true\ngraft = \"measured\"\n{}",
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
    Ok(Settings::parse(&text, site.directory())?)
}

fn socket(node: &Node, peer: &Node) -> anyhow::Result<UdpSocket> {
    let socket = node.enter(|| UdpSocket::bind((node.addr_v4(), PORT)))??;
    socket.connect((peer.addr_v4(), PORT))?;
    Ok(socket)
}

/// One end's runtime. Returns what became of packets.
fn hold(
    settings: Settings,
    stop: &AtomicBool,
    is_ready: &Sender<()>,
) -> anyhow::Result<BTreeMap<String, u64>> {
    let mut runtime = Runtime::start(settings)?;
    let _ = is_ready.send(());
    while !stop.load(Ordering::Relaxed) {
        runtime.step(Duration::from_millis(5))?;
    }
    let status = runtime.status()?;
    ensure!(status.trouble.is_empty(), "{}", status.trouble.join("; "));
    Ok(status.sessions.into_iter().next().map(|session| session.packets).unwrap_or_default())
}

/// A number, the time that its delay counts from in ns, and bytes that follow from the number.
pub fn message(number: u64, since: Duration, bytes: usize) -> Vec<u8> {
    let sent_ns = since.as_nanos() as u64;
    let mut message = [number.to_be_bytes(), sent_ns.to_be_bytes()].concat();
    message.extend((HEAD..bytes).map(|at| (number as usize).wrapping_mul(31).wrapping_add(at * 7) as u8));
    message
}

/// What has come, as it was sent: its number and its delay; times count from `base`.
pub fn read(got: &[u8], base: Instant, bytes: usize) -> Option<(u64, f64)> {
    let now_ns = base.elapsed().as_nanos() as u64;
    let (number, rest) = got.split_first_chunk()?;
    let (sent_ns, _) = rest.split_first_chunk()?;
    let (number, sent_ns) = (u64::from_be_bytes(*number), u64::from_be_bytes(*sent_ns));
    let is_whole = got.len() == bytes && got[HEAD..] == message(number, Duration::ZERO, bytes)[HEAD..];
    is_whole.then(|| (number, now_ns.saturating_sub(sent_ns) as f64 / 1e6))
}

/// What comes at the receiver.
#[derive(Default)]
pub struct Receiving {
    pub outcome: Outcome,
    seen: BTreeSet<u64>,
    newest: u64,
    /// When the latest came, in ms.
    latest: Option<f64>,
}

impl Receiving {
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

fn receive(to: &UdpSocket, base: Instant, bytes: usize, is_over: &AtomicBool) -> Outcome {
    let (mut receiving, mut buffer) = (Receiving::default(), [0; 2048]);
    while !is_over.load(Ordering::Relaxed) {
        let Ok(got) = to.recv(&mut buffer) else { continue };
        receiving.take(&buffer[..got], base, bytes);
    }
    receiving.outcome
}
