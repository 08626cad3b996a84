//! A runtime of packet grafts that goes on: a thread that holds it, and what it is asked. `docs/packet-grafts.md` documents it.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{anyhow, ensure};
use millrace_daemon::{
    daemon::{self, Frame, Front, Observed, Reloads},
    expect_answer, socket,
};
use millrace_graft::{
    Error,
    packet::{Change, Event, Losses, Runtime, Settings, Status},
};
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

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Status(Box<Status>),
    Swapped(Box<Swapped>),
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Swapped {
    /// Until both ends had agreed.
    pub agreed_us: u64,
    /// The change of this end.
    pub cut_us: u64,
    pub change: Change,
}

/// Asks a running daemon one thing.
pub fn ask(socket: &Path, request: &Request) -> anyhow::Result<Option<Answer>> {
    socket::ask(socket, WHO, request)
}

/// Until a signal ends it.
pub async fn run(setup: Setup) -> anyhow::Result<()> {
    let frame = Frame::open(setup.front, WHO)?;
    let daemon = Arc::new(Daemon::start(setup.config, &setup.messages)?);
    frame.run(&daemon).await?;
    info!("taken back");
    Ok(())
}

type Reply = SyncSender<anyhow::Result<Option<Answer>>>;

struct Daemon {
    /// Of the thread that holds the runtime.
    requests: Mutex<Sender<(Request, Reply)>>,
    thread: JoinHandle<()>,
    reloads: Reloads,
}

impl Daemon {
    fn start(config: PathBuf, messages: &Path) -> anyhow::Result<Self> {
        let settings = Settings::read(&config)?;
        raise_descriptors(&settings)?;
        let runtime = Runtime::start(settings.clone())?;
        let broker = Broker::start(&settings, messages)?;
        let (requests, asked) = channel();
        let worker = Worker { runtime, broker, config, asked, waiting: None };
        let thread = std::thread::Builder::new().name("packets".into()).spawn(|| worker.run())?;
        Ok(Self { requests: Mutex::new(requests), thread, reloads: Reloads::default() })
    }

    /// Has the thread answer.
    fn ask(&self, request: Request) -> anyhow::Result<Option<Answer>> {
        let (reply, answer) = sync_channel(1);
        let ended = || anyhow!("the runtime has ended");
        self.requests.lock().send((request, reply)).map_err(|_| ended())?;
        answer.recv().map_err(|_| ended())?
    }
}

impl Observed for Daemon {
    type Status = Status;

    fn status(&self) -> anyhow::Result<Status> {
        let mut status = *expect_answer!(self.ask(Request::Status)?, Answer::Status)?;
        status.trouble.extend(self.reloads.trouble("settings before stay"));
        status.reload = Some(self.reloads.latest());
        Ok(status)
    }

    fn metrics(&self) -> anyhow::Result<String> {
        Ok(packet_metrics::encode(self.status()?)?)
    }

    fn is_well(&self) -> bool {
        self.status().is_ok_and(|status| status.trouble.is_empty())
    }
}

impl daemon::Daemon for Daemon {
    type Request = Request;
    type Answer = Answer;
    type Caller = ();

    fn caller(&self) {}

    fn answer(&self, (): &mut (), request: Request) -> anyhow::Result<Option<Answer>> {
        match request {
            Request::Status => Ok(Some(Answer::Status(self.status()?.into()))),
            Request::Reload => self.reload().map(|()| None),
            swap @ Request::Swap { .. } => self.ask(swap),
        }
    }

    fn read_settings(&self) -> anyhow::Result<()> {
        self.ask(Request::Reload).map(drop)
    }

    fn reloads(&self) -> &Reloads {
        &self.reloads
    }

    fn tick(&self) -> anyhow::Result<()> {
        ensure!(!self.thread.is_finished(), "the runtime has ended");
        Ok(())
    }
}

/// Holds the runtime, and has what it does be known.
struct Worker {
    /// Ends the sockets that it has lent before what seals them goes.
    broker: Option<Broker>,
    runtime: Runtime,
    config: PathBuf,
    asked: Receiver<(Request, Reply)>,
    waiting: Option<Waiting>,
}

/// For the end of a swap of a session.
struct Waiting {
    session: String,
    reply: Reply,
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

    fn answer(&mut self, request: Request, reply: Reply) {
        let answer = match request {
            Request::Status => self.status().map(|status| Some(Answer::Status(status.into()))),
            Request::Reload => self.reload().map(|()| None).map_err(Into::into),
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
        let status = self.runtime.status()?;
        let peers = self.broker.as_ref().map(Broker::status).unwrap_or_default();
        let refusals = self.broker.as_ref().map(Broker::refusals).unwrap_or_default();
        Ok(Status { peers, refusals, ..status })
    }

    fn reload(&mut self) -> Result<(), Error> {
        let settings = Settings::read(&self.config)?;
        Broker::check(self.broker.as_ref(), &settings).map_err(Error::Settings)?;
        self.runtime.apply(settings.clone())?;
        self.broker.iter_mut().for_each(|broker| broker.apply(&settings));
        info!("new settings");
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
                    true => self.done(&session, Ok(swapped)),
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

    fn done(&mut self, session: &str, swapped: anyhow::Result<Swapped>) {
        if let Some(Waiting { reply, .. }) = self.waiting.take_if(|waiting| waiting.session == session) {
            let _ = reply.send(swapped.map(|swapped| Some(Answer::Swapped(swapped.into()))));
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
            self.done(session, Ok(swapped));
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
