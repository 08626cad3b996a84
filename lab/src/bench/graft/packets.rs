//! `bench graft swap --packets`: swaps packet grafts under a stream of datagrams. No datagram may be lost.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use millrace_graft::packet::{PacketEvent, PacketRuntime, Settings};
use millrace_graft::settings::DaemonSettings;
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::{Value, json};

use super::line::{self, ChannelEnd, PEER};
use super::micros;
use crate::bench::site::{BenchSite, SUBSCRIBERS_LINK};
use crate::bench::table::columns;
use crate::lab::{Directions, LabNode, Topology};
use crate::progress::BenchProgress;
use crate::stats::Percentiles;

#[derive(Debug, clap::Args)]
pub struct PacketBench {
    /// Measure packet grafts instead: swap two lists of packet functions back and forth while this number of datagrams
    /// is sent
    #[arg(long = "packets", value_name = "COUNT")]
    count: Option<u64>,
    /// Round-trip time of the datagrams' path
    #[arg(long, default_value_t = 20, value_name = "MS", requires = "count")]
    rtt_ms: u32,
    /// Datagrams per second
    #[arg(long, default_value_t = 10_000, value_name = "COUNT", requires = "count")]
    rate: u64,
    /// The two lists of packet functions that replace each other
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "number+repair,number+order",
        value_name = "LIST,LIST",
        requires = "count"
    )]
    lists: Vec<String>,
    /// Cipher of the session; if absent, packets are not encrypted
    #[arg(long, value_parser = ["chacha20-poly1305", "aes-128-gcm"], value_name = "CIPHER", requires = "count")]
    cipher: Option<String>,
}

/// Result of one run: how long swaps took, and how many datagrams arrived.
struct PacketRunResult {
    agreed_us: Vec<f64>,
    cut_us: Vec<f64>,
    sent: u64,
    received: u64,
    wrong: u64,
    twice: u64,
}

const PORT: u16 = 7000;
const SESSION: &str = "bench";
const PAYLOAD: usize = 200;
/// Longest wait for datagrams that are still on their way after the last one was sent.
const GRACE: Duration = Duration::from_secs(5);
/// Longest wait until a swap is agreed on. It is longer than the swap's own time-out.
const SWAP_LIMIT: Duration = Duration::from_secs(20);

impl PacketBench {
    pub fn is_wanted(&self) -> bool {
        self.count.is_some()
    }

    /// Runs the swaps. Returns the result row as JSON and as text. For a while after a swap, receivers still accept
    /// packets that were sent with the previous function list. The next swap starts when that time is over.
    pub fn run(&self) -> anyhow::Result<(Value, String)> {
        let [one, other] = &self.lists[..] else {
            bail!("--lists must be two lists, such as number+repair,number")
        };
        let count = self.count.unwrap_or_default();
        ensure!(count > 0 && self.rate > 0, "--packets and --rate must be at least 1");
        let mut topology = Topology::standard(1, 1);
        topology.impair(SUBSCRIBERS_LINK, Directions::Both, &format!("delay={}us", self.rtt_ms * 500))?;
        let site = BenchSite::new(&topology)?;
        let ends = [site.relay()?, site.subscribers()?];
        let outcome = self.measure(&site, ends, [one, other], count)?;
        let agreed = Percentiles::from_samples(outcome.agreed_us.clone());
        let cut = Percentiles::from_samples(outcome.cut_us);
        let row = json!({
            "lists": self.lists, "cipher": self.cipher, "rtt_ms": self.rtt_ms, "rate": self.rate, "swaps": outcome.agreed_us.len(),
            "agreed_us": agreed, "cut_over_us": cut, "packets_sent": outcome.sent,
            "packets_received": outcome.received, "packets_lost": outcome.sent - outcome.received,
            "packets_wrong": outcome.wrong, "packets_twice": outcome.twice,
        });
        let head = [
            "swaps",
            "agreed p50 ms",
            "max ms",
            "cut-over p50 us",
            "max us",
            "sent",
            "lost",
            "wrong",
            "twice",
        ];
        let mut line = vec![outcome.agreed_us.len().to_string()];
        line.extend(
            agreed.map(|it| [it.p50 / 1e3, it.max / 1e3]).unwrap_or_default().map(|ms| format!("{ms:.1}")),
        );
        line.extend(cut.map(|it| [it.p50, it.max]).unwrap_or_default().map(|us| format!("{us:.0}")));
        let lost = outcome.sent - outcome.received;
        line.extend([outcome.sent, lost, outcome.wrong, outcome.twice].map(|it| it.to_string()));
        let text = columns(&[head.map(str::to_owned).to_vec(), line]);
        ensure!(
            lost == 0 && outcome.wrong == 0 && outcome.twice == 0,
            "{text}a stateful swap must lose no datagram, but {lost} were lost, {} altered, {} duplicated",
            outcome.wrong,
            outcome.twice
        );
        Ok((row, text))
    }

    fn measure(
        &self,
        site: &BenchSite,
        [near, far]: [&LabNode; 2],
        lists: [&str; 2],
        count: u64,
    ) -> anyhow::Result<PacketRunResult> {
        let address = |node: &LabNode| format!("{}:{PORT}", node.addr_v4());
        let settings = |node: &LabNode, peer: &LabNode| {
            let seal = match &self.cipher {
                Some(cipher) => format!("cipher = {cipher:?}"),
                None => "clear = true".to_owned(),
            };
            let known = line::peer(site.directory(), [node, peer].map(|it| it.addr_v4().into()), "40000")?;
            let text = settings(node, &known, [address(node), address(peer)], lists)? + &seal;
            Ok::<_, anyhow::Error>(DaemonSettings::parse(&text, site.directory())?.into_sessions()?)
        };
        let near_settings = settings(near, far)?;
        let far_settings = settings(far, near)?;
        let stop = AtomicBool::new(false);
        let (events, swapped) = channel();
        let (orders, ordered) = channel();
        let socket = |node: &LabNode, peer: &LabNode| -> anyhow::Result<UdpSocket> {
            let socket = node.enter(|| UdpSocket::bind(address(node)))??;
            socket.connect(address(peer))?;
            Ok(socket)
        };
        let from = socket(near, far)?;
        let to = socket(far, near)?;
        setsockopt(&to, sockopt::RcvBufForce, &(64 << 20))?;
        to.set_read_timeout(Some(Duration::from_millis(100)))?;
        std::thread::scope(|scope| {
            let stop = &stop;
            let ready = channel::<()>();
            let is_ready = ready.0.clone();
            let [here, there] = ChannelEnd::pair()?;
            let other =
                scope.spawn(move || far.enter(|| hold(far_settings, there, stop, None, &is_ready))?);
            let is_ready = ready.0;
            let work = Some((ordered, events));
            let this =
                scope.spawn(move || near.enter(|| hold(near_settings, here, stop, work, &is_ready))?);
            // An error of `recv_timeout` has one of two reasons. A closed channel means that a host's packet graft
            // runtime failed to start. A time-out means that the two hosts did not agree on session keys.
            let both = (0..2).all(|_| ready.1.recv_timeout(SWAP_LIMIT).is_ok());
            let done = if both {
                forget_words(&to)?;
                self.traffic(&from, &to, count, &orders, &swapped)
            } else {
                Err(anyhow!("not started"))
            };
            stop.store(true, Ordering::Relaxed);
            drop(orders);
            for thread in [this, other] {
                thread.join().map_err(|_| anyhow!("a runtime panicked"))??;
            }
            done
        })
    }

    /// Sends datagrams, and swaps grafts again and again until all have been sent.
    fn traffic(
        &self,
        from: &UdpSocket,
        to: &UdpSocket,
        count: u64,
        orders: &Sender<String>,
        swapped: &Receiver<PacketEvent>,
    ) -> anyhow::Result<PacketRunResult> {
        let is_over = AtomicBool::new(false);
        let received = AtomicU64::new(0);
        let mut agreed_us = Vec::new();
        let mut cut_us = Vec::new();
        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| receive(to, count, &is_over, &received));
            let sending = scope.spawn(|| send(from, count, self.rate));
            let progress = BenchProgress::with_steps(1);
            progress.begin(format!("{count} datagrams"));
            let swaps = (0..).try_for_each(|round: usize| {
                if sending.is_finished() {
                    return Err(None);
                }
                let graft = ["other", "one"][round % 2];
                orders.send(graft.to_owned()).map_err(|_| None)?;
                match swapped.recv_timeout(SWAP_LIMIT) {
                    Ok(PacketEvent::Swapped { took: Some(took), cut, .. }) => {
                        agreed_us.push(micros(took));
                        cut_us.push(micros(cut));
                        Ok(())
                    }
                    Ok(other) => Err(Some(anyhow!("a swap ended with {other:?}"))),
                    Err(_) => Err(Some(anyhow!("a swap did not end in time"))),
                }
            });
            let sent = sending.join().map_err(|_| anyhow!("the sender panicked"))?;
            let until = Instant::now() + GRACE;
            while received.load(Ordering::Relaxed) < count && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(20));
            }
            is_over.store(true, Ordering::Relaxed);
            drop(progress);
            let (wrong, twice) = receiving.join().map_err(|_| anyhow!("the receiver panicked"))?;
            if let Err(Some(error)) = swaps {
                return Err(error);
            }
            Ok((sent?, wrong, twice))
        })
        .map(|(sent, wrong, twice)| PacketRunResult {
            agreed_us,
            cut_us,
            sent,
            received: received.load(Ordering::Relaxed),
            wrong,
            twice,
        })
    }
}

fn settings(
    node: &LabNode,
    known: &str,
    [local, remote]: [String; 2],
    [one, other]: [&str; 2],
) -> anyhow::Result<String> {
    let device = &node.interface(SUBSCRIBERS_LINK).context("no interface")?.device;
    let list = |text: &str| text.split('+').map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
    Ok(format!(
        "[sessions]\ninterface = [{device:?}]\n\
         [[graft]]\nname = \"one\"\nfunctions = [{}]\n[[graft]]\nname = \"other\"\nfunctions = [{}]\n\
         {known}[[session]]\nname = \"{SESSION}\"\nlocal = \"{local}\"\nremote = \"{remote}\"\npeer = \"{PEER}\"\ngraft = \"one\"\n",
        list(one),
        list(other)
    ))
}

/// Runs the packet grafts of one host (a `PacketRuntime`). The channel pair `work` delivers names of grafts to swap to,
/// and takes the result of each swap.
fn hold(
    settings: Settings,
    line: ChannelEnd,
    stop: &AtomicBool,
    work: Option<(Receiver<String>, Sender<PacketEvent>)>,
    is_ready: &Sender<()>,
) -> anyhow::Result<()> {
    let mut runtime = PacketRuntime::start(settings)?;
    line.connect(&mut runtime)?;
    let mut is_ready = Some(is_ready);
    let mut waiting: Option<String> = None;
    while !stop.load(Ordering::Relaxed) {
        if let Some(ready) = is_ready.take_if(|_| runtime.is_open()) {
            let _ = ready.send(());
        }
        if let Some((orders, _)) = &work
            && waiting.is_none()
        {
            waiting = orders.try_recv().ok();
        }
        if let Some(graft) = &waiting {
            match runtime.swap(SESSION, graft) {
                Ok(()) => waiting = None,
                // Receivers still accept packets that were sent before the previous swap, so this swap is tried later.
                Err(millrace_graft::Error::Busy(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        line.relay(&mut runtime)?;
        for event in runtime.step(Duration::from_millis(20))? {
            if let (Some((_, events)), PacketEvent::Swapped { .. } | PacketEvent::NotSwapped { .. }) =
                (&work, &event)
            {
                let _ = events.send(event);
            }
        }
    }
    Ok(())
}

/// Discards messages that one host's session sent before the other host's grafts were loaded. They reached the
/// application's socket unprocessed.
pub fn forget_words(to: &UdpSocket) -> anyhow::Result<()> {
    to.set_nonblocking(true)?;
    while to.recv(&mut [0; 2048]).is_ok() {}
    Ok(to.set_nonblocking(false)?)
}

fn message(number: u64) -> [u8; PAYLOAD] {
    let mut bytes = [0; PAYLOAD];
    bytes[..8].copy_from_slice(&number.to_be_bytes());
    for (at, byte) in bytes.iter_mut().enumerate().skip(8) {
        *byte = (number as usize).wrapping_mul(31).wrapping_add(at * 7) as u8;
    }
    bytes
}

fn send(from: &UdpSocket, count: u64, rate: u64) -> anyhow::Result<u64> {
    let start = Instant::now();
    for number in 0..count {
        let due = start + Duration::from_nanos(number * 1_000_000_000 / rate);
        // A sleep overruns by some 60 us. All datagrams that are due by then are sent at once.
        if let Some(early) = due.checked_duration_since(Instant::now()) {
            std::thread::sleep(early);
        }
        from.send(&message(number))?;
    }
    Ok(count)
}

/// Receives datagrams. Returns how many were altered and how many were duplicates.
fn receive(to: &UdpSocket, count: u64, is_over: &AtomicBool, received: &AtomicU64) -> (u64, u64) {
    let mut seen = vec![false; usize::try_from(count).unwrap_or(usize::MAX)];
    let mut wrong = 0;
    let mut twice = 0;
    let mut buffer = [0; 2 * PAYLOAD];
    while !is_over.load(Ordering::Relaxed) {
        let Ok(bytes) = to.recv(&mut buffer) else { continue };
        let number = buffer.first_chunk().map_or(u64::MAX, |bytes| u64::from_be_bytes(*bytes));
        let place = usize::try_from(number).ok().and_then(|at| seen.get_mut(at));
        match place {
            Some(seen) if buffer[..bytes] == message(number) => {
                twice += u64::from(*seen);
                received.fetch_add(u64::from(!*seen), Ordering::Relaxed);
                *seen = true;
            }
            _ => wrong += 1,
        }
    }
    (wrong, twice)
}
