//! A fan-out that runs: streams and their sockets, the program on its interfaces, what it is asked.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use millrace_daemon::{
    daemon::{self, Frame, Front, Observed, Reloads},
    socket,
};
use millrace_fanout::kernel::{self as kernel, Fanout, FurtherRun, LegOutcome, Outcome};
use millrace_fanout::token::Mint;
use nix::net::if_::if_nametoindex;
use parking_lot::Mutex;
use ring::rand::{SecureRandom as _, SystemRandom};
use serde::{Deserialize, Serialize};
use tokio::{net::UdpSocket, task::JoinHandle};
use tracing::{error, info, warn};

use super::{
    config::{RECEIVERS_MAX, STREAMS_MAX, Settings},
    metrics,
    status::{self, Counts, Status},
    stream::{Door, Stream},
    trace::{Follow, Seen, Watch},
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
    /// The settings are read again.
    Reload,
    /// What came since it was asked last; to be asked again within two seconds.
    Trace(Follow),
    /// Who asked for this has seen enough.
    Untrace(Follow),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Status(Status),
    Traced(Seen),
}

/// Asks a running daemon one thing.
pub fn ask(socket: &Path, request: &Request) -> anyhow::Result<Option<Answer>> {
    socket::ask(socket, WHO, request)
}

/// Until a signal ends it.
pub async fn run(setup: Setup) -> anyhow::Result<()> {
    let frame = Frame::open(setup.front, WHO)?;
    let daemon = Arc::new(Daemon::start(setup.config)?);
    frame.run(&daemon).await?;
    daemon.fanout.detach();
    info!("detached");
    Ok(())
}

struct Daemon {
    config: PathBuf,
    fanout: Fanout,
    running: Mutex<Running>,
    mint: Arc<Mint>,
    interfaces: Mutex<Vec<Interface>>,
    watch: Mutex<Watch>,
    reloads: Reloads,
    since: Instant,
}

/// What a reload changes.
struct Running {
    settings: Settings,
    streams: Vec<Served>,
}

/// A stream, and the tasks that look at its sockets, which end with it.
struct Served {
    stream: Arc<Stream>,
    tasks: Vec<JoinHandle<Infallible>>,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

struct Interface {
    name: String,
    mechanism: String,
    reattached: u64,
    /// Why it is not attached.
    trouble: Option<String>,
}

impl Daemon {
    /// On tasks of the current runtime.
    fn start(config: PathBuf) -> anyhow::Result<Self> {
        let settings = Settings::read(&config)?;
        let room = kernel::Config {
            // Those that a reload closes leave their places later than others need them.
            streams_max: 2 * STREAMS_MAX as u32,
            receivers_max: RECEIVERS_MAX,
            ..kernel::Config::default()
        };
        let fanout = Fanout::load(&room)?;
        let mut secret = [0; 32];
        SystemRandom::new().fill(&mut secret).map_err(|_| anyhow::anyhow!("there are no random numbers"))?;
        let mint = Arc::new(Mint::new(secret));
        let streams = settings
            .stream
            .iter()
            .map(|stream| Served::new(Stream::open(stream.clone(), &fanout, &[])?, &mint));
        let streams = streams.collect::<anyhow::Result<_>>()?;
        let interfaces = settings.interface.iter().map(|name| Interface::attach(&fanout, name));
        let interfaces = Mutex::new(interfaces.collect::<anyhow::Result<_>>()?);
        let running = Mutex::new(Running { settings, streams });
        let (watch, reloads, since) = (Mutex::default(), Reloads::default(), Instant::now());
        Ok(Self { config, fanout, running, mint, interfaces, watch, reloads, since })
    }

    /// Other streams and receivers, all or nothing: what can fail comes first.
    fn apply(&self, running: &mut Running, settings: Settings) -> anyhow::Result<()> {
        ensure!(
            settings.interface == running.settings.interface,
            "interface does not change while it runs: start it anew"
        );
        let before: Vec<_> = running.streams.iter().map(|served| served.stream.clone()).collect();
        let stays = |stream: &Arc<Stream>| settings.stream.iter().any(|new| stream.may_become(new));
        let mut opened: Vec<Arc<Stream>> = Vec::new();
        let mut served = Vec::new();
        for new in settings.stream.iter().filter(|new| !before.iter().any(|stream| stream.may_become(new))) {
            let made = Stream::open(new.clone(), &self.fanout, &before)
                .and_then(|stream| Served::new(stream, &self.mint));
            match made {
                Ok(made) => {
                    opened.push(made.stream.clone());
                    served.push(made);
                }
                Err(error) => {
                    opened.iter().for_each(|stream| stream.close(&self.fanout));
                    before.iter().for_each(|stream| stream.place(&self.fanout));
                    return Err(error);
                }
            }
        }
        for stream in before.iter().filter(|stream| !stays(stream)) {
            info!(stream = stream.settings.name, "closed");
            stream.close(&self.fanout);
        }
        running.streams.retain(|served| stays(&served.stream));
        for served in &running.streams {
            let new = settings.stream.iter().find(|new| served.stream.may_become(new));
            new.into_iter().for_each(|new| served.stream.change(new));
        }
        running.streams.extend(served);
        running.settings = settings;
        Ok(())
    }

    fn streams(&self) -> Vec<Arc<Stream>> {
        self.running.lock().streams.iter().map(|served| served.stream.clone()).collect()
    }
}

impl daemon::Daemon for Daemon {
    type Request = Request;
    type Answer = Answer;
    type Caller = ();

    const TICK: Duration = TICK;

    fn caller(&self) {}

    fn read_settings(&self) -> anyhow::Result<()> {
        let running = &mut self.running.lock();
        self.apply(running, Settings::read(&self.config)?)?;
        info!("new settings");
        Ok(())
    }

    fn reloads(&self) -> &Reloads {
        &self.reloads
    }

    fn tick(&self) -> anyhow::Result<()> {
        self.streams().iter().for_each(|stream| stream.tick());
        self.watch.lock().expire(&self.fanout);
        self.interfaces.lock().iter_mut().for_each(|interface| interface.keep(&self.fanout));
        Ok(())
    }

    fn answer(&self, (): &mut (), request: Request) -> anyhow::Result<Option<Answer>> {
        Ok(Some(match request {
            Request::Status => Answer::Status(self.status()?),
            Request::Reload => return self.reload().map(|()| None),
            Request::Trace(follow) => {
                Answer::Traced(self.watch.lock().look(&self.fanout, &self.streams(), follow)?)
            }
            Request::Untrace(follow) => {
                self.watch.lock().end(&self.fanout, &follow);
                return Ok(None);
            }
        }))
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
            streams: self.streams().iter().map(|stream| stream.status()).collect(),
            packets: counts(Outcome::ALL.map(|it| (it.name(), counters.packets(it)))),
            copies: counts(LegOutcome::ALL.map(|it| (it.name(), counters.copies(it)))),
            runs: counts(FurtherRun::ALL.map(|it| (it.name(), counters.runs(it)))),
            trouble: interfaces
                .iter()
                .filter_map(|interface| interface.trouble.clone())
                .chain(self.reloads.trouble("settings before stay"))
                .collect(),
            reload: Some(self.reloads.latest()),
        })
    }

    fn metrics(&self) -> anyhow::Result<String> {
        Ok(metrics::encode(self.status()?)?)
    }

    fn is_well(&self) -> bool {
        let is_attached = self.interfaces.lock().iter().all(|interface| interface.trouble.is_none());
        is_attached && self.reloads.latest().error.is_none()
    }
}

fn counts<const N: usize>(all: [(&str, u64); N]) -> Counts {
    all.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}

impl Served {
    fn new(stream: Stream, mint: &Arc<Mint>) -> anyhow::Result<Self> {
        let mut served = Self { stream: Arc::new(stream), tasks: Vec::new() };
        for door in [Door::Media, Door::Reports] {
            let Some(socket) = served.stream.socket(door) else { continue };
            let socket = UdpSocket::from_std(socket.try_clone()?)?;
            served.tasks.push(tokio::spawn(receive(socket, served.stream.clone(), mint.clone(), door)));
        }
        Ok(served)
    }
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
