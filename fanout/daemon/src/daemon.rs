//! Runs a fan-out: streams and their sockets, the BPF program on the interfaces, and requests of operators.

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
    daemon::{self, DaemonFrame, DaemonFront, Observed, Reloads},
    socket,
};
use millrace_fanout::kernel::{self as kernel, CopyOutcome, Fanout, FurtherRun, Outcome};
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
    status::{self, CounterStatus, Status},
    stream::{ServedRtpStream, SocketKind},
    trace::{FanoutTraceFilter, FanoutTraceWatch, TraceEvents},
};

const WHO: &str = "fan-out";
/// Time between two checks of leases, silent receivers and interfaces.
const TICK: Duration = Duration::from_millis(250);
/// Largest number of datagrams read from one socket in a row, so that other sockets are served too.
const BATCH: usize = 64;
const DATAGRAM_MAX: usize = 65_536;

/// Arguments of the daemon.
pub struct FanoutSetup {
    /// Path of the settings file.
    pub config: PathBuf,
    /// The control socket and HTTP address that the daemon answers on.
    pub front: DaemonFront,
}

/// A request on the control socket.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum FanoutRequest {
    /// Asks for the status.
    Status,
    /// Reads the settings file again and applies it.
    Reload,
    /// Returns the traced events since the previous `Trace` request. The trace ends if no such request follows within
    /// two seconds.
    Trace(FanoutTraceFilter),
    /// Ends the trace that was started with this filter.
    Untrace(FanoutTraceFilter),
}

/// An answer on the control socket.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FanoutAnswer {
    /// The status of the fan-out.
    Status(Status),
    /// Traced events of packets.
    Traced(TraceEvents),
}

/// Sends one request to a running fan-out daemon, and returns the answer.
pub fn ask(socket: &Path, request: &FanoutRequest) -> anyhow::Result<Option<FanoutAnswer>> {
    socket::ask(socket, WHO, request)
}

/// Runs the daemon until a signal ends it.
pub async fn run(setup: FanoutSetup) -> anyhow::Result<()> {
    let frame = DaemonFrame::open(setup.front, WHO)?;
    let daemon = Arc::new(FanoutDaemon::start(setup.config)?);
    frame.run(&daemon).await?;
    daemon.fanout.detach();
    info!("detached the fan-out from its interfaces");
    Ok(())
}

struct FanoutDaemon {
    config: PathBuf,
    fanout: Fanout,
    running: Mutex<RunningFanout>,
    mint: Arc<Mint>,
    interfaces: Mutex<Vec<InterfaceAnswer>>,
    watch: Mutex<FanoutTraceWatch>,
    reloads: Reloads,
    since: Instant,
}

/// The settings and the RTP streams of a daemon, which a reload of the settings changes.
struct RunningFanout {
    settings: Settings,
    streams: Vec<ServedStream>,
}

/// A stream, and the tasks that read its sockets. Dropping this value aborts the tasks.
struct ServedStream {
    stream: Arc<ServedRtpStream>,
    tasks: Vec<JoinHandle<Infallible>>,
}

impl Drop for ServedStream {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

struct InterfaceAnswer {
    name: String,
    mechanism: String,
    reattached: u64,
    /// The reason why the BPF program is not attached to the interface.
    trouble: Option<String>,
}

impl FanoutDaemon {
    /// Starts the daemon, with tasks on the current runtime.
    fn start(config: PathBuf) -> anyhow::Result<Self> {
        let settings = Settings::read(&config)?;
        let room = kernel::Config {
            // A reload opens the new streams before it closes the old ones, so the kernel's table has entries for both.
            streams_max: 2 * STREAMS_MAX as u32,
            receivers_max: RECEIVERS_MAX,
            ..kernel::Config::default()
        };
        let fanout = Fanout::load(&room)?;
        // A new secret at each start makes the tokens of an earlier process invalid.
        let mut secret = [0; 32];
        SystemRandom::new()
            .fill(&mut secret)
            .map_err(|_| anyhow::anyhow!("the system gives no random numbers for the fan-out's secret"))?;
        let mint = Arc::new(Mint::new(secret));
        let streams = settings
            .stream
            .iter()
            .map(|stream| ServedStream::new(ServedRtpStream::open(stream.clone(), &fanout, &[])?, &mint));
        let streams = streams.collect::<anyhow::Result<_>>()?;
        let interfaces = settings.interface.iter().map(|name| InterfaceAnswer::attach(&fanout, name));
        let interfaces = Mutex::new(interfaces.collect::<anyhow::Result<_>>()?);
        let running = Mutex::new(RunningFanout { settings, streams });
        let reloads = Reloads::default();
        let since = Instant::now();
        Ok(Self { config, fanout, running, mint, interfaces, watch: Mutex::default(), reloads, since })
    }

    /// Replaces streams and receivers by those of the new settings. Either all changes apply or none, since the steps
    /// that can fail come first.
    fn apply(&self, running: &mut RunningFanout, settings: Settings) -> anyhow::Result<()> {
        ensure!(
            settings.interface == running.settings.interface,
            "interface: it cannot change while the daemon runs; restart the daemon"
        );
        let before: Vec<_> = running.streams.iter().map(|served| served.stream.clone()).collect();
        let stays = |stream: &Arc<ServedRtpStream>| settings.stream.iter().any(|new| stream.may_become(new));
        let mut opened: Vec<Arc<ServedRtpStream>> = Vec::new();
        let mut served = Vec::new();
        for new in settings.stream.iter().filter(|new| !before.iter().any(|stream| stream.may_become(new))) {
            let made = ServedRtpStream::open(new.clone(), &self.fanout, &before)
                .and_then(|stream| ServedStream::new(stream, &self.mint));
            match made {
                Ok(made) => {
                    opened.push(made.stream.clone());
                    served.push(made);
                }
                Err(error) => {
                    // After an error, the streams that were opened so far are closed, and the kernel directs packets to
                    // the old streams again.
                    opened.iter().for_each(|stream| stream.close(&self.fanout));
                    before.iter().for_each(|stream| stream.place(&self.fanout));
                    return Err(error);
                }
            }
        }
        // Nothing can fail from here on, so old streams are closed only after all new streams were opened.
        for stream in before.iter().filter(|stream| !stays(stream)) {
            info!(stream = stream.settings.name, "closed a stream that the settings no longer name");
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

    fn streams(&self) -> Vec<Arc<ServedRtpStream>> {
        self.running.lock().streams.iter().map(|served| served.stream.clone()).collect()
    }
}

impl daemon::Daemon for FanoutDaemon {
    type Request = FanoutRequest;
    type Answer = FanoutAnswer;
    type Caller = ();

    const TICK: Duration = TICK;

    fn caller(&self) {}

    fn read_settings(&self) -> anyhow::Result<()> {
        let running = &mut self.running.lock();
        self.apply(running, Settings::read(&self.config)?)?;
        info!("the fan-out's new settings are in force");
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

    fn answer(&self, (): &mut (), request: FanoutRequest) -> anyhow::Result<Option<FanoutAnswer>> {
        Ok(Some(match request {
            FanoutRequest::Status => FanoutAnswer::Status(self.status()?),
            FanoutRequest::Reload => return self.reload().map(|()| None),
            FanoutRequest::Trace(follow) => {
                FanoutAnswer::Traced(self.watch.lock().look(&self.fanout, &self.streams(), follow)?)
            }
            FanoutRequest::Untrace(follow) => {
                self.watch.lock().end(&self.fanout, &follow);
                return Ok(None);
            }
        }))
    }
}

impl Observed for FanoutDaemon {
    type Status = Status;

    fn status(&self) -> anyhow::Result<Status> {
        let counters = self.fanout.counters()?;
        let interfaces = self.interfaces.lock();
        Ok(Status {
            uptime_s: self.since.elapsed().as_secs_f64(),
            interfaces: interfaces.iter().map(InterfaceAnswer::status).collect(),
            streams: self.streams().iter().map(|stream| stream.status()).collect(),
            packets: counts(Outcome::ALL.map(|it| (it.name(), counters.packets(it)))),
            copies: counts(CopyOutcome::ALL.map(|it| (it.name(), counters.copies(it)))),
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

fn counts<const N: usize>(all: [(&str, u64); N]) -> CounterStatus {
    all.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}

impl ServedStream {
    fn new(stream: ServedRtpStream, mint: &Arc<Mint>) -> anyhow::Result<Self> {
        let mut served = Self { stream: Arc::new(stream), tasks: Vec::new() };
        for kind in [SocketKind::Media, SocketKind::Reports] {
            let Some(socket) = served.stream.socket(kind) else { continue };
            let socket = UdpSocket::from_std(socket.try_clone()?)?;
            served.tasks.push(tokio::spawn(receive(socket, served.stream.clone(), mint.clone(), kind)));
        }
        Ok(served)
    }
}

impl InterfaceAnswer {
    fn attach(fanout: &Fanout, name: &str) -> anyhow::Result<Self> {
        let mechanism = fanout.attach(index(name)?).with_context(|| format!("interface {name}"))?;
        info!(interface = name, %mechanism, "attached the fan-out to the interface");
        Ok(Self { name: name.to_owned(), mechanism: mechanism.to_string(), reattached: 0, trouble: None })
    }

    /// Attaches the BPF program again if another program has detached it, or the interface was replaced. Until then,
    /// packets arrive at the sockets, and userspace fans them out.
    fn keep(&mut self, fanout: &Fanout) {
        let name = &self.name;
        let found = index(name);
        if found.as_ref().is_ok_and(|index| fanout.is_attached(*index)) {
            return;
        }
        match found.and_then(|index| Ok(fanout.attach(index)?)) {
            Ok(_) => {
                warn!(
                    interface = name,
                    "attached the fan-out to the interface again: it was detached, or the interface was replaced"
                );
                self.reattached += 1;
                self.trouble = None;
            }
            Err(error) if self.trouble.is_none() => {
                error!(
                    interface = name,
                    "cannot attach the fan-out to the interface, so userspace fans out: {error:#}"
                );
                self.trouble =
                    Some(format!("interface {name}: cannot attach, userspace fans out: {error:#}"));
            }
            // The error was logged at the first attempt, and the next periodic check tries again.
            Err(_) => {}
        }
    }

    fn status(&self) -> status::FanoutInterfaceStatus {
        status::FanoutInterfaceStatus {
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

/// Reads a socket until the task is aborted.
async fn receive(
    socket: UdpSocket,
    stream: Arc<ServedRtpStream>,
    mint: Arc<Mint>,
    kind: SocketKind,
) -> Infallible {
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        if socket.readable().await.is_err() {
            // The pause keeps a socket with a lasting error from using a whole CPU.
            tokio::time::sleep(TICK).await;
            continue;
        }
        for _ in 0..BATCH {
            match socket.try_recv_from(&mut buffer) {
                Ok((len, from)) => {
                    let datagram = buffer.get(..len).unwrap_or_default();
                    // A socket for both families shows IPv4 addresses as IPv4-mapped ones.
                    let from = SocketAddr::new(from.ip().to_canonical(), from.port());
                    stream.receive(&mint, datagram, from, kind);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // An ICMP error is ignored. It says that no program on a receiver's host reads the stream any more.
                Err(_) => {}
            }
        }
        // A busy socket yields after each batch, so that other sockets and the daemon's timers get a turn.
        tokio::task::yield_now().await;
    }
}
