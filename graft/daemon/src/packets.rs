//! A runtime of packet grafts that goes on: a thread that holds it, and what it is asked. `docs/packet-grafts.md` documents it.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use millrace_daemon::{
    daemon::{Front, Observed, Signal, Signals, router},
    socket,
};
use millrace_graft::{
    Error,
    packet::{Change, Event, Losses, Runtime, Settings, Status},
    status::Reload,
};
use millrace_kernel::clock;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::{error, info, warn};

use super::{broker::Broker, packet_metrics};

pub const DEFAULT_SOCKET: &str = "/run/millrace/packets.sock";

const WHO: &str = "daemon of packet grafts";
/// Until a request is looked at, when nothing comes from the network.
const PATIENCE: Duration = Duration::from_millis(10);

pub struct Setup {
    pub config: PathBuf,
    /// Where applications ask for sessions, if the settings have peers.
    pub messages: PathBuf,
    pub front: Front,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    Status,
    /// Answered when both ends have changed, or will not; and when it is known what was lost, where it is stateless.
    Swap {
        session: String,
        graft: String,
        #[serde(default)]
        stateless: bool,
    },
    Reload,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Answer {
    pub ok: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swapped: Option<Swapped>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Swapped {
    /// Until both ends had agreed.
    pub agreed_us: u64,
    /// The change of this end.
    pub cut_us: u64,
    pub change: Change,
}

impl From<Swapped> for Answer {
    fn from(swapped: Swapped) -> Self {
        Self { ok: true, swapped: Some(swapped), ..Self::default() }
    }
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
    let daemon = Arc::new(Daemon::start(setup.config, &setup.messages)?);
    let _http = setup.front.serve(router(daemon.clone())).await?;
    info!("ready");
    let serve = socket.serve(|| {
        let daemon = daemon.clone();
        move |line: &[u8]| daemon.ask(serde_json::from_slice(line).context("not a request")?)
    });
    tokio::pin!(serve);
    loop {
        tokio::select! {
            never = &mut serve => match never {},
            signal = signals.next() => match signal {
                Signal::Reload => {
                    if let Err(error) = tokio::task::block_in_place(|| daemon.ask(Request::Reload)) {
                        error!("the new settings are not usable, the old ones stay: {error:#}");
                    }
                }
                Signal::End => break,
            },
        }
        if daemon.thread.is_finished() {
            bail!("the runtime has ended");
        }
    }
    info!("taken back");
    Ok(())
}

type Asked = (Request, SyncSender<anyhow::Result<Answer>>);

struct Daemon {
    /// Of the thread that holds the runtime.
    requests: Mutex<Sender<Asked>>,
    thread: JoinHandle<()>,
}

impl Daemon {
    fn start(config: PathBuf, messages: &Path) -> anyhow::Result<Self> {
        let settings = Settings::read(&config)?;
        raise_descriptors(&settings)?;
        let runtime = Runtime::start(settings.clone())?;
        let broker = Broker::start(&settings, messages)?;
        let (requests, asked) = channel();
        let reloaded = Reload { time_s: unix_time(), error: None };
        let worker = Worker { runtime, broker, config, asked, reloaded, waiting: None };
        let thread = std::thread::Builder::new().name("packets".into()).spawn(|| worker.run())?;
        Ok(Self { requests: Mutex::new(requests), thread })
    }

    fn ask(&self, request: Request) -> anyhow::Result<Answer> {
        let (reply, answer) = sync_channel(1);
        let ended = || anyhow!("the runtime has ended");
        self.requests.lock().send((request, reply)).map_err(|_| ended())?;
        answer.recv().map_err(|_| ended())?
    }
}

impl Observed for Daemon {
    type Status = Status;

    fn status(&self) -> anyhow::Result<Status> {
        Ok(self.ask(Request::Status)?.status.unwrap_or_default())
    }

    fn metrics(&self) -> Result<String, fmt::Error> {
        packet_metrics::encode(self.status().map_err(|_| fmt::Error)?)
    }

    fn is_well(&self) -> bool {
        self.status().is_ok_and(|status| status.trouble.is_empty())
    }
}

/// Holds the runtime, and has what it does be known.
struct Worker {
    /// Ends the sockets that it has lent before what seals them goes.
    broker: Option<Broker>,
    runtime: Runtime,
    config: PathBuf,
    asked: Receiver<Asked>,
    /// The latest; at first what it was started with.
    reloaded: Reload,
    waiting: Option<Waiting>,
}

/// For the end of a swap of a session.
struct Waiting {
    session: String,
    reply: SyncSender<anyhow::Result<Answer>>,
    /// Agreed on; what was lost is not known yet.
    swapped: Option<Swapped>,
}

impl Worker {
    /// Until nobody can ask any more.
    fn run(mut self) {
        loop {
            match self.asked.try_recv() {
                Ok((request, reply)) => self.answer(request, reply),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return,
            }
            match self.runtime.step(PATIENCE) {
                Ok(events) => {
                    if let Some(broker) = &mut self.broker {
                        broker.step(&mut self.runtime, &events);
                    }
                    events.into_iter().for_each(|event| self.happened(event));
                }
                Err(error) => {
                    error!("{error}");
                    std::thread::sleep(PATIENCE);
                }
            }
        }
    }

    fn answer(&mut self, request: Request, reply: SyncSender<anyhow::Result<Answer>>) {
        let ok = Answer { ok: true, ..Answer::default() };
        let answer = match request {
            Request::Status => self.status().map(|status| Answer { status: Some(status), ..ok }),
            Request::Reload => self.reload().map(|()| ok),
            Request::Swap { session, graft, stateless } => {
                let swap = if stateless { Runtime::swap_anew } else { Runtime::swap };
                match swap(&mut self.runtime, &session, &graft) {
                    Ok(()) => {
                        self.waiting = Some(Waiting { session, reply, swapped: None });
                        return;
                    }
                    Err(error) => Err(error.into()),
                }
            }
        };
        // Who asked may have gone.
        let _ = reply.send(answer);
    }

    fn status(&mut self) -> anyhow::Result<Status> {
        let mut status = self.runtime.status()?;
        if let Some(error) = &self.reloaded.error {
            status.trouble.push(format!("the latest reload failed, the settings before stay: {error}"));
        }
        let peers = self.broker.as_ref().map(Broker::status).unwrap_or_default();
        let refusals = self.broker.as_ref().map(Broker::refusals).unwrap_or_default();
        Ok(Status { reload: Some(self.reloaded.clone()), peers, refusals, ..status })
    }

    fn reload(&mut self) -> anyhow::Result<()> {
        let done = self.try_reload();
        let error = done.as_ref().err().map(ToString::to_string);
        self.reloaded = Reload { time_s: unix_time(), error };
        done?;
        info!("new settings");
        Ok(())
    }

    fn try_reload(&mut self) -> Result<(), Error> {
        let settings = Settings::read(&self.config)?;
        Broker::check(self.broker.as_ref(), &settings).map_err(Error::Settings)?;
        self.runtime.apply(settings.clone())?;
        self.broker.iter_mut().for_each(|broker| broker.apply(&settings));
        Ok(())
    }

    fn happened(&mut self, event: Event) {
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        match event {
            Event::Swapped { session, graft, took, cut, change } => {
                let migrated = change.migrated.join(", ");
                info!(
                    session,
                    graft,
                    agreed_us = took.map(us),
                    stateless = change.stateless,
                    migrated,
                    "swapped"
                );
                let is_known = !change.stateless;
                let swapped = Swapped { agreed_us: took.map_or(0, us), cut_us: us(cut), change };
                match is_known {
                    true => self.done(&session, Ok(swapped.into())),
                    false => self.wait_for_count(&session, swapped),
                }
            }
            Event::Counted { session, losses } => {
                let Losses { sent, received } = losses;
                warn!(
                    session,
                    lost_sent = sent,
                    lost_received = received,
                    "begun anew: what had not come is lost"
                );
                self.counted(&session, losses);
            }
            Event::Ruled { session, graft, why } => info!(session, graft, "to be swapped: {why}"),
            Event::NotSwapped { session, graft, why } => {
                let error = format!("session {session} keeps its graft: {}", why.text());
                warn!(session, graft, "not swapped: {}", why.text());
                self.done(&session, Err(anyhow!(error)));
            }
            Event::OverBudget { session, graft, joint, ns, fallback } => {
                warn!(session, graft, joint = joint.name(), ns, fallback, "over its budget");
            }
            Event::Keys { session } => info!(session, "both ends have keys"),
            // For the broker.
            Event::Room { .. } => {}
            Event::Restarted { session } => info!(session, "the other end was started anew"),
            Event::Refused { session, why } => warn!(session, "{why}"),
            Event::Detached { interface, error: None } => warn!(interface, "attached again"),
            Event::Detached { interface, error: Some(error) } => error!(interface, "not attached: {error}"),
        }
    }

    fn done(&mut self, session: &str, answer: anyhow::Result<Answer>) {
        if let Some(Waiting { reply, .. }) = self.waiting.take_if(|waiting| waiting.session == session) {
            let _ = reply.send(answer);
        }
    }

    fn wait_for_count(&mut self, session: &str, swapped: Swapped) {
        if let Some(waiting) = self.waiting.as_mut().filter(|waiting| waiting.session == session) {
            waiting.swapped = Some(swapped);
        }
    }

    fn counted(&mut self, session: &str, losses: Losses) {
        let waiting = self.waiting.as_mut().filter(|waiting| waiting.session == session);
        if let Some(mut swapped) = waiting.and_then(|waiting| waiting.swapped.take()) {
            swapped.change.lost_sent = losses.sent;
            swapped.change.lost_received = losses.received;
            self.done(session, Ok(swapped.into()));
        }
    }
}

/// Sealed sessions have two each, and a reload may bring as many as there is room for.
fn raise_descriptors(settings: &Settings) -> anyhow::Result<()> {
    const OTHERS: u64 = 512;
    let wanted = OTHERS + 2 * u64::from(settings.room.sessions);
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < wanted {
        setrlimit(Resource::RLIMIT_NOFILE, wanted, hard.max(wanted))
            .or_else(|_| setrlimit(Resource::RLIMIT_NOFILE, hard, hard))?;
    }
    let (have, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let sealed = settings.sessions.iter().filter(|session| session.cipher.is_some()).count() as u64;
    if have < OTHERS + 2 * sealed {
        warn!(
            "descriptors (RLIMIT_NOFILE, {have}) are too few for {sealed} sealed sessions, which need {}",
            OTHERS + 2 * sealed
        );
    }
    Ok(())
}

/// Seconds since 1970.
fn unix_time() -> f64 {
    clock::unix_ns() as f64 / 1e9
}
