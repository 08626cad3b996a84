//! The daemon's worker process for datagram sessions: one thread holds the runtime of packet grafts, and handles the
//! requests about it. `docs/guide/packet-grafts.md` documents it.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{anyhow, bail, ensure};
use millrace_base::control::ControlEnd;
use millrace_daemon::daemon::{DaemonFrame, Reloads};
use millrace_graft::{
    Error,
    packet::{PacketEvent, PacketLosses, PacketRuntime, SessionStatus, Settings, Status},
    settings::DaemonSettings,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use parking_lot::Mutex;
use tracing::{error, info, warn};

use super::{
    broker::{KnownPeers, SessionBroker},
    control::{self, GraftAnswer, GraftRequest, PeerReport, SessionSwapped},
    packet_metrics,
    worker::{Served, WorkerProcess},
};

/// Longest time for which the worker thread waits for a packet from a peer's daemon before it handles the next request.
const PATIENCE: Duration = Duration::from_millis(10);

/// Arguments with which the worker process for sessions starts.
pub struct PacketSetup {
    /// Path of the settings file.
    pub config: PathBuf,
    /// Path of the Unix socket on which applications request sessions. It is used if the settings have peers.
    pub messages: PathBuf,
}

/// Runs the worker process for sessions until its supervisor or a signal ends it.
pub async fn run(setup: PacketSetup, frame: DaemonFrame) -> anyhow::Result<()> {
    let daemon = Arc::new(PacketDaemon::start(setup.config, &setup.messages)?);
    frame.run(&Arc::new(Served(daemon))).await?;
    info!("the sessions' BPF programs were removed from the kernel");
    Ok(())
}

type Reply = SyncSender<anyhow::Result<Option<GraftAnswer>>>;

struct PacketDaemon {
    /// The daemons of peers, or `None` if the settings have no peers.
    links: Option<Arc<KnownPeers>>,
    /// Requests to the thread that holds the runtime of packet grafts.
    requests: Mutex<Sender<(GraftRequest, Reply)>>,
    thread: JoinHandle<()>,
    reloads: Reloads,
}

impl PacketDaemon {
    fn start(config: PathBuf, messages: &Path) -> anyhow::Result<Self> {
        let settings = DaemonSettings::read(&config)?.into_sessions()?;
        raise_descriptors(&settings)?;
        let runtime = PacketRuntime::start(settings.clone())?;
        let broker = SessionBroker::start(&settings, messages)?;
        // The channel has no limit, but it stays short, since each sender waits for its answer.
        let (requests, asked) = channel();
        let links = broker.as_ref().map(SessionBroker::links);
        let worker = Worker { runtime, broker, config, asked, waiting: None };
        let thread = std::thread::Builder::new().name("packets".into()).spawn(|| worker.run())?;
        Ok(Self { links, requests: Mutex::new(requests), thread, reloads: Reloads::default() })
    }

    /// Sends a request to the thread and waits for its answer.
    fn ask(&self, request: GraftRequest) -> anyhow::Result<Option<GraftAnswer>> {
        // The answer channel has space for one answer, so the thread never blocks on a client.
        let (reply, answer) = sync_channel(1);
        let ended = || anyhow!("the thread that runs sessions has ended: restart the daemon");
        self.requests.lock().send((request, reply)).map_err(|_| ended())?;
        answer.recv().map_err(|_| ended())?
    }

    fn status(&self) -> anyhow::Result<Status> {
        match self.ask(GraftRequest::Status)? {
            Some(GraftAnswer::Status(status)) => Ok(status.sessions.unwrap_or_default()),
            _ => bail!("the runtime of sessions gave no status"),
        }
    }
}

impl WorkerProcess for PacketDaemon {
    fn share(&self) -> anyhow::Result<control::Status> {
        let sessions = Some(self.status()?);
        Ok(control::Status { sessions, ..control::Status::default() })
    }

    fn page(&self) -> anyhow::Result<String> {
        Ok(packet_metrics::encode(self.status()?)?)
    }

    fn answer(&self, request: GraftRequest) -> anyhow::Result<Option<GraftAnswer>> {
        match request {
            GraftRequest::Why { peer } => {
                let sessions = sessions_with(self.status()?, peer);
                Ok(Some(GraftAnswer::Why(PeerReport { sessions, ..PeerReport::default() }.into())))
            }
            request => self.ask(request),
        }
    }

    fn read_settings(&self) -> anyhow::Result<()> {
        self.ask(GraftRequest::Reload).map(drop)
    }

    fn reloads(&self) -> &Reloads {
        &self.reloads
    }

    fn tick(&self) -> anyhow::Result<()> {
        ensure!(!self.thread.is_finished(), "the thread that runs sessions has ended: restart the daemon");
        Ok(())
    }

    fn linked(self: &Arc<Self>, _name: &str, partner: OwnedFd) {
        if let Some(links) = &self.links {
            links.renew(ControlEnd::from(partner));
        }
    }
}

/// State of the thread that holds the runtime and logs its events.
struct Worker {
    /// The broker is dropped before the runtime: it shuts the applications' sockets down before the BPF programs that
    /// encrypt datagrams are detached.
    broker: Option<SessionBroker>,
    runtime: PacketRuntime,
    config: PathBuf,
    asked: Receiver<(GraftRequest, Reply)>,
    waiting: Option<WaitingSwap>,
}

/// A request to replace a session's graft, which is answered when the change is complete.
struct WaitingSwap {
    session: String,
    reply: Reply,
    /// Result of a change of the graft without transfer of state, which both hosts have made. The answer waits until
    /// the lost datagrams are counted.
    swapped: Option<SessionSwapped>,
}

impl Worker {
    /// Runs the thread's loop until the daemon drops the sender of the request channel.
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
                    error!("cannot handle the sessions' messages and timers; trying again: {error}");
                    // The error of the runtime may persist, so a pause keeps the loop from using all of a CPU.
                    std::thread::sleep(PATIENCE);
                }
            }
        }
    }

    fn answer(&mut self, request: GraftRequest, reply: Reply) {
        let answer = match request {
            GraftRequest::Status => self.status().map(|status| {
                let share = control::Status { sessions: Some(status), ..control::Status::default() };
                Some(GraftAnswer::Status(share.into()))
            }),
            GraftRequest::Reload => self.reload().map(|()| None).map_err(Into::into),
            GraftRequest::SwapSession { session, graft, stateless } => {
                let swap = if stateless { PacketRuntime::swap_anew } else { PacketRuntime::swap };
                match swap(&mut self.runtime, &session, &graft) {
                    Ok(()) => {
                        // The request is answered later, when both hosts have changed to the new graft, or have given
                        // up.
                        self.waiting = Some(WaitingSwap { session, reply, swapped: None });
                        return;
                    }
                    Err(error) => Err(error.into()),
                }
            }
            _ => Err(anyhow!("this part serves datagram sessions only: TCP belongs to the other part")),
        };
        // The send fails if the client has disconnected, which does not matter.
        let _ = reply.send(answer);
    }

    fn status(&mut self) -> anyhow::Result<Status> {
        let status = self.runtime.status()?;
        let peers = self.broker.as_ref().map(SessionBroker::status).unwrap_or_default();
        let without =
            peers.iter().filter_map(|peer| Some(format!("peer {}: {}", peer.name, peer.trouble.as_ref()?)));
        let trouble = status.trouble.iter().cloned().chain(without).collect();
        let refusals = self.broker.as_ref().map(SessionBroker::refusals).unwrap_or_default();
        Ok(Status { peers, refusals, trouble, ..status })
    }

    fn reload(&mut self) -> Result<(), Error> {
        let settings = DaemonSettings::read(&self.config)?.into_sessions()?;
        // The broker checks the settings before any is applied, since its pools cannot change.
        SessionBroker::check(self.broker.as_ref(), &settings).map_err(Error::Settings)?;
        self.runtime.apply(settings.clone())?;
        self.broker.iter_mut().for_each(|broker| broker.apply(&settings));
        info!("the new settings of sessions are in force");
        Ok(())
    }

    fn happened(&mut self, event: PacketEvent) {
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        match event {
            PacketEvent::Swapped { session, graft, took, cut, change } => {
                let migrated = change.migrated.join(", ");
                info!(
                    session,
                    graft,
                    agreed_us = took.map(us),
                    stateless = change.stateless,
                    migrated,
                    "a session has changed its graft"
                );
                let is_known = !change.stateless;
                let swapped = SessionSwapped { agreed_us: took.map_or(0, us), cut_us: us(cut), change };
                // After a change of the graft without transfer of state (`stateless`), the answer waits until the lost
                // datagrams are counted.
                match is_known {
                    true => self.done(&session, Ok(swapped)),
                    false => self.wait_for_count(&session, swapped),
                }
            }
            PacketEvent::Counted { session, losses } => {
                let PacketLosses { sent, received } = losses;
                warn!(
                    session,
                    lost_sent = sent,
                    lost_received = received,
                    "a session was restarted: datagrams under way were lost"
                );
                self.counted(&session, losses);
            }
            PacketEvent::Ruled { session, graft, why } => {
                info!(session, graft, "a rule changes a session's graft: {why}")
            }
            PacketEvent::NotSwapped { session, graft, why } => {
                let error = format!("session {session} keeps its graft: {}", why.text());
                warn!(session, graft, "a session keeps its graft: {}", why.text());
                self.done(&session, Err(anyhow!(error)));
            }
            PacketEvent::OverBudget { session, graft, hook, ns, fallback } => {
                warn!(
                    session,
                    graft,
                    hook = hook.name(),
                    ns,
                    fallback,
                    "a graft exceeds its budget of CPU time"
                );
            }
            PacketEvent::Keys { session } => info!(session, "both ends of a session have encryption keys"),
            // The broker handles this event, so it is not logged here.
            PacketEvent::Room { .. } => {}
            PacketEvent::Restarted { session } => {
                info!(session, "the daemon at the other end of a session was restarted");
            }
            PacketEvent::Detached { interface, error: None } => {
                warn!(interface, "the sessions' BPF programs had been detached, and were attached again")
            }
            PacketEvent::Detached { interface, error: Some(error) } => {
                error!(
                    interface,
                    "the sessions' BPF programs were detached, and cannot be attached again: {error}"
                )
            }
        }
    }

    fn done(&mut self, session: &str, swapped: anyhow::Result<SessionSwapped>) {
        if let Some(WaitingSwap { reply, .. }) = self.waiting.take_if(|waiting| waiting.session == session) {
            let _ = reply.send(swapped.map(|swapped| Some(GraftAnswer::SessionSwapped(swapped.into()))));
        }
    }

    fn wait_for_count(&mut self, session: &str, swapped: SessionSwapped) {
        if let Some(waiting) = self.waiting.as_mut().filter(|waiting| waiting.session == session) {
            waiting.swapped = Some(swapped);
        }
    }

    fn counted(&mut self, session: &str, losses: PacketLosses) {
        let waiting = self.waiting.as_mut().filter(|waiting| waiting.session == session);
        if let Some(mut swapped) = waiting.and_then(|waiting| waiting.swapped.take()) {
            swapped.change.lost_sent = losses.sent;
            swapped.change.lost_received = losses.received;
            self.done(session, Ok(swapped));
        }
    }
}

/// Raises the process's limit of file descriptors to two for each session that fits in the BPF maps. A reload of the
/// settings may add that many encrypted sessions, each of which needs two descriptors.
fn raise_descriptors(settings: &Settings) -> anyhow::Result<()> {
    const OTHERS: u64 = 512;
    let wanted = OTHERS + 2 * u64::from(settings.room.sessions);
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < wanted {
        // Without CAP_SYS_RESOURCE the hard limit cannot rise, so the soft limit is raised to it.
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

/// Returns the sessions with the remote host `host`.
fn sessions_with(status: Status, host: IpAddr) -> Vec<SessionStatus> {
    let is_with = |session: &SessionStatus| {
        session.remote.parse::<SocketAddr>().is_ok_and(|remote| remote.ip() == host)
    };
    status.sessions.into_iter().filter(is_with).collect()
}
