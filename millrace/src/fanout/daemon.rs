//! A fan-out that runs: streams and their sockets, the program on its interfaces, what it is asked.

use std::{
    convert::Infallible,
    fmt, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use millrace_bpf::fanout::{self as kernel, Fanout, FurtherRun, LegOutcome, Outcome};
use millrace_proto::fanout::token::Mint;
use nix::net::if_::if_nametoindex;
use parking_lot::Mutex;
use ring::rand::{SecureRandom as _, SystemRandom};
use serde::{Deserialize, Serialize};
use tokio::net::UdpSocket;
use tracing::{error, info, warn};

use super::{
    config::Settings,
    metrics,
    status::{self, Counts, Status},
    stream::{Door, Stream},
    trace::{Follow, Seen, Watch},
};
use crate::{
    daemon::{Front, Observed, Signal, Signals, router},
    socket,
};

const WHO: &str = "fan-out";
/// Between looks at leases, silent receivers and the interfaces.
const TICK: Duration = Duration::from_millis(250);
/// Datagrams of one socket in a row, before others have their turn.
const BATCH: usize = 64;
const DATAGRAM_MAX: usize = 65_536;

pub struct Setup {
    pub config: PathBuf,
    pub front: Front,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    Status,
    /// What came since it was asked last; to be asked again within two seconds.
    Trace(Follow),
    /// Who asked for this has seen enough.
    Untrace(Follow),
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Answer {
    pub ok: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traced: Option<Seen>,
}

impl From<anyhow::Error> for Answer {
    fn from(error: anyhow::Error) -> Self {
        Self { error: Some(format!("{error:#}")), ..Self::default() }
    }
}

/// Asks a running daemon one thing.
pub fn ask(socket: &Path, request: &Request) -> anyhow::Result<Answer> {
    socket::ask(socket, WHO, request)
}

/// Until a signal ends it.
pub async fn run(setup: Setup) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    let socket = setup.front.bind(WHO)?;
    let daemon = Arc::new(Daemon::start(&Settings::read(&setup.config)?)?);
    let _http = setup.front.serve(router(daemon.clone())).await?;
    daemon.serve_streams()?;
    info!("ready");
    let asked = daemon.clone();
    let serve =
        socket.serve(move |line| asked.answer(serde_json::from_slice(line).context("not a request")?));
    tokio::pin!(serve);
    let mut ticks = tokio::time::interval(TICK);
    loop {
        tokio::select! {
            never = &mut serve => match never {},
            _ = ticks.tick() => tokio::task::block_in_place(|| daemon.tick()),
            signal = signals.next() => match signal {
                Signal::Reload => warn!("settings are read at the start only: start it anew"),
                Signal::End => break,
            },
        }
    }
    daemon.fanout.detach();
    info!("detached");
    Ok(())
}

struct Daemon {
    fanout: Fanout,
    streams: Vec<Arc<Stream>>,
    mint: Arc<Mint>,
    interfaces: Mutex<Vec<Interface>>,
    watch: Mutex<Watch>,
    since: Instant,
}

struct Interface {
    name: String,
    mechanism: String,
    reattached: u64,
    /// Why it is not attached.
    trouble: Option<String>,
}

impl Daemon {
    fn start(settings: &Settings) -> anyhow::Result<Self> {
        let streams = settings.stream.iter().map(super::config::Stream::kernel).collect();
        let fanout = Fanout::load(&kernel::Config { streams, ..kernel::Config::default() })?;
        let streams = settings.stream.iter().zip(fanout.streams());
        let streams =
            streams.map(|(settings, kernel)| Ok(Arc::new(Stream::open(settings.clone(), kernel.clone())?)));
        let streams = streams.collect::<anyhow::Result<_>>()?;
        let interfaces = settings.interface.iter().map(|name| Interface::attach(&fanout, name));
        let interfaces = Mutex::new(interfaces.collect::<anyhow::Result<_>>()?);
        let mut secret = [0; 32];
        SystemRandom::new().fill(&mut secret).map_err(|_| anyhow::anyhow!("there are no random numbers"))?;
        let (mint, watch) = (Arc::new(Mint::new(secret)), Mutex::default());
        Ok(Self { fanout, streams, mint, interfaces, watch, since: Instant::now() })
    }

    /// On tasks of the current runtime.
    fn serve_streams(&self) -> anyhow::Result<()> {
        for stream in &self.streams {
            for door in [Door::Media, Door::Reports] {
                let Some(socket) = stream.socket(door) else { continue };
                let socket = UdpSocket::from_std(socket.try_clone()?)?;
                tokio::spawn(receive(socket, stream.clone(), self.mint.clone(), door));
            }
        }
        Ok(())
    }

    fn tick(&self) {
        self.streams.iter().for_each(|stream| stream.tick());
        self.watch.lock().expire(&self.fanout);
        self.interfaces.lock().iter_mut().for_each(|interface| interface.keep(&self.fanout));
    }

    fn answer(&self, request: Request) -> anyhow::Result<Answer> {
        let ok = Answer { ok: true, ..Answer::default() };
        match request {
            Request::Status => Ok(Answer { status: Some(self.status()?), ..ok }),
            Request::Trace(follow) => {
                let seen = self.watch.lock().look(&self.fanout, &self.streams, follow)?;
                Ok(Answer { traced: Some(seen), ..ok })
            }
            Request::Untrace(follow) => {
                self.watch.lock().end(&self.fanout, &follow);
                Ok(ok)
            }
        }
    }
}

impl Observed for Daemon {
    type Status = Status;

    fn status(&self) -> anyhow::Result<Status> {
        let counters = self.fanout.counters()?;
        let interfaces = self.interfaces.lock();
        Ok(Status {
            uptime_s: self.since.elapsed().as_secs_f64(),
            interfaces: interfaces.iter().map(Interface::status).collect(),
            streams: self.streams.iter().map(|stream| stream.status()).collect(),
            packets: counts(Outcome::ALL.map(|it| (it.name(), counters.packets(it)))),
            copies: counts(LegOutcome::ALL.map(|it| (it.name(), counters.copies(it)))),
            runs: counts(FurtherRun::ALL.map(|it| (it.name(), counters.runs(it)))),
            trouble: interfaces.iter().filter_map(|interface| interface.trouble.clone()).collect(),
        })
    }

    fn metrics(&self) -> Result<String, fmt::Error> {
        metrics::encode(self.status().map_err(|_| fmt::Error)?)
    }

    fn is_well(&self) -> bool {
        self.interfaces.lock().iter().all(|interface| interface.trouble.is_none())
    }
}

fn counts<const N: usize>(all: [(&str, u64); N]) -> Counts {
    all.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}

impl Interface {
    fn attach(fanout: &Fanout, name: &str) -> anyhow::Result<Self> {
        let mechanism = fanout.attach(index(name)?).with_context(|| format!("interface {name}"))?;
        info!(interface = name, %mechanism, "attached");
        Ok(Self { name: name.to_owned(), mechanism: mechanism.to_string(), reattached: 0, trouble: None })
    }

    /// Somebody may have detached the program, or made the interface anew. What came meanwhile came to the sockets.
    fn keep(&mut self, fanout: &Fanout) {
        let name = &self.name;
        let found = index(name);
        if found.as_ref().is_ok_and(|index| fanout.is_attached(*index)) {
            return;
        }
        match found.and_then(|index| Ok(fanout.attach(index)?)) {
            Ok(_) => {
                warn!(interface = name, "attached again");
                self.reattached += 1;
                self.trouble = None;
            }
            Err(error) if self.trouble.is_none() => {
                error!(interface = name, "not attached, userspace fans out: {error:#}");
                self.trouble = Some(format!("interface {name}: not attached, userspace fans out: {error:#}"));
            }
            Err(_) => {}
        }
    }

    fn status(&self) -> status::Interface {
        status::Interface {
            name: self.name.clone(),
            attached: self.trouble.is_none(),
            mechanism: self.mechanism.clone(),
            reattached: self.reattached,
        }
    }
}

fn index(name: &str) -> anyhow::Result<i32> {
    let index = if_nametoindex(name).with_context(|| format!("there is no interface {name}"))?;
    Ok(index.cast_signed())
}

/// Everything that comes to a socket, until the task is aborted.
async fn receive(socket: UdpSocket, stream: Arc<Stream>, mint: Arc<Mint>, door: Door) -> Infallible {
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        if socket.readable().await.is_err() {
            tokio::time::sleep(TICK).await;
            continue;
        }
        for _ in 0..BATCH {
            match socket.try_recv_from(&mut buffer) {
                Ok((len, from)) => {
                    let datagram = buffer.get(..len).unwrap_or_default();
                    let from = SocketAddr::new(from.ip().to_canonical(), from.port());
                    stream.receive(&mint, datagram, from, door);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // What a receiver's host says of a copy that nobody takes there.
                Err(_) => {}
            }
        }
        tokio::task::yield_now().await;
    }
}
