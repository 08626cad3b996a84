//! A runtime of packet grafts that goes on: a thread that holds it, and what it is asked. `docs/packet-grafts.md` documents it.

use std::{
    convert::Infallible,
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use millrace_graft::packet::{Event, Runtime, Settings, Status};
use serde::{Deserialize, Serialize};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::Semaphore,
};
use tracing::{error, info, warn};

use crate::socket::{self, Socket};

pub const DEFAULT_SOCKET: &str = "/run/millrace/packets.sock";

const WHO: &str = "daemon of packet grafts";
/// Connections at once.
const CONVERSATIONS_MAX: usize = 64;
/// Until a request is looked at, when nothing comes from the network.
const PATIENCE: Duration = Duration::from_millis(10);

pub struct Setup {
    pub config: PathBuf,
    pub socket: PathBuf,
    pub socket_group: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    Status,
    /// Answered when both ends have changed, or will not.
    Swap {
        session: String,
        graft: String,
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
}

impl From<anyhow::Error> for Answer {
    fn from(error: anyhow::Error) -> Self {
        Self { error: Some(format!("{error:#}")), ..Self::default() }
    }
}

/// Asks a running daemon one thing.
pub fn ask(socket: &Path, request: &Request) -> anyhow::Result<Answer> {
    let answer: Answer = socket::ask(socket, WHO, request)?;
    match answer.error {
        Some(error) => bail!("{error}"),
        None => Ok(answer),
    }
}

/// Until a signal ends it.
pub async fn run(setup: Setup) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let socket = Socket::bind(&setup.socket, WHO, setup.socket_group.as_deref())?;
    let daemon = Arc::new(Daemon::start(setup.config)?);
    info!("ready");
    let serve = serve(&socket, daemon.clone());
    tokio::pin!(serve);
    loop {
        tokio::select! {
            never = &mut serve => match never {},
            _ = hangup.recv() => {
                if let Err(error) = tokio::task::block_in_place(|| daemon.ask(Request::Reload)) {
                    error!("the new settings are not usable, the old ones stay: {error:#}");
                }
            }
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
        if daemon.thread.is_finished() {
            bail!("the runtime has ended");
        }
    }
    info!("taken back");
    Ok(())
}

async fn serve(socket: &Socket, daemon: Arc<Daemon>) -> Infallible {
    let places = Arc::new(Semaphore::new(CONVERSATIONS_MAX));
    loop {
        let stream = socket.accept().await;
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            warn!("a connection to the control socket is one too many");
            continue;
        };
        let daemon = daemon.clone();
        tokio::spawn(async move {
            let answer = |line: &[u8]| daemon.ask(serde_json::from_slice(line).context("not a request")?);
            socket::converse(stream, answer).await;
            drop(place);
        });
    }
}

type Asked = (Request, SyncSender<anyhow::Result<Answer>>);

struct Daemon {
    requests: Sender<Asked>,
    thread: JoinHandle<()>,
}

impl Daemon {
    fn start(config: PathBuf) -> anyhow::Result<Self> {
        let runtime = Runtime::start(Settings::read(&config)?)?;
        let (requests, asked) = channel();
        let worker = Worker { runtime, config, asked, waiting: None };
        let thread = std::thread::Builder::new().name("packets".into()).spawn(|| worker.run())?;
        Ok(Self { requests, thread })
    }

    fn ask(&self, request: Request) -> anyhow::Result<Answer> {
        let (reply, answer) = sync_channel(1);
        let ended = || anyhow!("the runtime has ended");
        self.requests.send((request, reply)).map_err(|_| ended())?;
        answer.recv().map_err(|_| ended())?
    }
}

/// Holds the runtime, and has what it does be known.
struct Worker {
    runtime: Runtime,
    config: PathBuf,
    asked: Receiver<Asked>,
    /// Who waits for the end of a swap of a session.
    waiting: Option<(String, SyncSender<anyhow::Result<Answer>>)>,
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
                Ok(events) => events.into_iter().for_each(|event| self.happened(event)),
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
            Request::Status => {
                self.runtime.status().map(|status| Answer { status: Some(status), ..ok }).map_err(Into::into)
            }
            Request::Reload => self.reload().map(|()| ok),
            Request::Swap { session, graft } => match self.runtime.swap(&session, &graft) {
                Ok(()) => {
                    self.waiting = Some((session, reply));
                    return;
                }
                Err(error) => Err(error.into()),
            },
        };
        // Who asked may have gone.
        let _ = reply.send(answer);
    }

    fn reload(&mut self) -> anyhow::Result<()> {
        self.runtime.apply(Settings::read(&self.config)?)?;
        info!("new settings");
        Ok(())
    }

    fn happened(&mut self, event: Event) {
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        match event {
            Event::Swapped { session, graft, took, cut } => {
                info!(session, graft, agreed_us = took.map(us), "swapped");
                let swapped = Swapped { agreed_us: took.map_or(0, us), cut_us: us(cut) };
                self.done(&session, Ok(Answer { ok: true, swapped: Some(swapped), ..Answer::default() }));
            }
            Event::NotSwapped { session, graft, why } => {
                let error = format!("session {session} keeps its graft: {}", why.text());
                warn!(session, graft, "not swapped: {}", why.text());
                self.done(&session, Err(anyhow!(error)));
            }
            Event::OverBudget { session, graft, joint, ns, fallback } => {
                warn!(session, graft, joint = joint.name(), ns, fallback, "over its budget");
            }
            Event::Keys { session } => info!(session, "both ends have keys"),
            Event::Restarted { session } => info!(session, "the other end was started anew"),
            Event::Detached { interface, error: None } => warn!(interface, "attached again"),
            Event::Detached { interface, error: Some(error) } => error!(interface, "not attached: {error}"),
        }
    }

    fn done(&mut self, session: &str, answer: anyhow::Result<Answer>) {
        if let Some((_, reply)) = self.waiting.take_if(|(waiting, _)| waiting == session) {
            let _ = reply.send(answer);
        }
    }
}
