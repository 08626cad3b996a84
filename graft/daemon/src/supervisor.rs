//! The process that users start: it reads the settings, serves the control socket and HTTP, and starts the daemon's
//! worker processes: one for rules of TCP, one that negotiates with peers, one that tunnels connections, one for
//! datagram sessions, and one that connects to the daemons of peers about sessions.
//!
//! The supervisor holds no BPF program and parses nothing that a peer sends, so it keeps running when a worker process
//! ends or hangs.

use std::{ffi::OsString, fs, io, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use millrace_daemon::{
    daemon::{self, DaemonFrame, DaemonFront, Observed, Reloads},
    log,
    part::{KeptDescriptors, Lock, PartnerLink, SupervisedPart},
};
use millrace_graft::{settings::DaemonSettings, status};
use millrace_graft_kernel::gateway;
use millrace_graft_tunnel::is_populated;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::{task::block_in_place, time::Instant};
use tracing::warn;

use super::{
    control::{
        AGREEMENTS, GRAFTS, GraftAnswer, GraftRequest, PEERS, PeerReport, SESSIONS, Status, TUNNEL, WHO,
    },
    metrics,
    usable::usable,
};

/// Longest wait for each worker process, if several worker processes contribute to an answer.
const WHOLE_STATUS: Duration = Duration::from_secs(5);
/// Longest wait for a worker process to answer a user's request. Commands give up after the same time.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait for a worker process to apply new settings.
const RELOAD: Duration = Duration::from_secs(60);

/// Arguments with which the daemon's supervisor process starts.
pub struct SupervisorSetup {
    /// Path of the settings file.
    pub config: PathBuf,
    /// Interfaces behind which there are hosts whose connections are tunnelled, in addition to those of the settings.
    pub interfaces: Vec<String>,
    /// Arguments with which this program starts a worker process. The worker's name follows them.
    pub arguments: Vec<OsString>,
    /// Addresses of the control socket and of the HTTP server, and their access rules.
    pub front: DaemonFront,
}

/// Runs the daemon until a signal ends it.
pub async fn run(setup: SupervisorSetup) -> anyhow::Result<()> {
    let SupervisorSetup { config, interfaces, arguments, front } = setup;
    let socket = front.socket.clone();
    let frame = DaemonFrame::open(front, WHO)?;
    let settings = usable(&config, &interfaces)?;
    let lock = Arc::new(block_in_place(|| Lock::take(&socket))?);
    // Only now has each process of an earlier daemon ended.
    match block_in_place(|| gateway::remove_leftovers(None)) {
        Ok(0) => {}
        Ok(count) => warn!(count, "removed rules and routes that a killed gateway had left"),
        Err(error) => warn!("cannot find out whether a killed gateway has left rules or routes: {error}"),
    }
    let kept = Arc::new(KeptDescriptors::default());
    let part = |name: &'static str| {
        let arguments = arguments.iter().cloned().chain([name.into()]).collect();
        // The maps of the choices between tunnel and congestion controls outlive the part that has made them.
        SupervisedPart::new(name, arguments, lock.clone(), kept.clone(), name == GRAFTS)
    };
    let supervisor = Supervisor {
        config,
        interfaces,
        grafts: part(GRAFTS),
        agreements: part(AGREEMENTS),
        tunnel: part(TUNNEL),
        sessions: part(SESSIONS),
        peers: part(PEERS),
        hooked: Mutex::default(),
        reloads: Reloads::default(),
        started: Instant::now(),
    };
    SupervisedPart::link(&supervisor.grafts, &supervisor.agreements, PartnerLink::Stream);
    SupervisedPart::link(&supervisor.grafts, &supervisor.tunnel, PartnerLink::Stream);
    SupervisedPart::link(&supervisor.sessions, &supervisor.peers, PartnerLink::Records);
    let supervisor = Arc::new(supervisor);
    let done = match block_in_place(|| supervisor.follow(&settings)) {
        Ok(()) => frame.run(&supervisor).await,
        Err(error) => Err(error),
    };
    // All worker processes are stopped in any case, also if one of them refused the settings at the start.
    block_in_place(|| supervisor.parts().rev().for_each(|part| part.stop()));
    done
}

struct Supervisor {
    config: PathBuf,
    interfaces: Vec<String>,
    grafts: Arc<SupervisedPart>,
    agreements: Arc<SupervisedPart>,
    tunnel: Arc<SupervisedPart>,
    sessions: Arc<SupervisedPart>,
    peers: Arc<SupervisedPart>,
    /// Commands with tunnelled connections.
    hooked: Mutex<Vec<HookedCommand>>,
    reloads: Reloads,
    started: Instant,
}

/// A command whose connections are tunnelled.
struct HookedCommand {
    /// The command's cgroup. It is removed once it has no process any more.
    cgroup: PathBuf,
    /// The request for the command's rules.
    request: GraftRequest,
    /// Process ID of the worker process that has these rules. They end with it, and its successor is asked for them.
    tunnel: Option<u32>,
}

impl Supervisor {
    fn parts(&self) -> impl DoubleEndedIterator<Item = &Arc<SupervisedPart>> {
        [&self.grafts, &self.agreements, &self.tunnel, &self.sessions, &self.peers].into_iter()
    }

    /// Starts or reloads each worker process that the settings need, and stops a worker process that they do not need.
    ///
    /// # Errors
    /// A worker process refuses the settings. The error has the reasons of all that refuse. The others use the new
    /// settings.
    fn follow(&self, settings: &DaemonSettings) -> anyhow::Result<()> {
        let wanted = [
            (&self.grafts, settings.wants_in_place()),
            (&self.agreements, settings.wants_in_place()),
            (&self.tunnel, settings.wants_tunnel()),
            (&self.sessions, settings.sessions.is_some()),
            (&self.peers, settings.wants_peers()),
        ];
        let mut refusals = Vec::new();
        for (part, is_wanted) in wanted {
            let done = match (is_wanted, part.is_wanted()) {
                (true, true) => part.ask(&GraftRequest::Reload, RELOAD).map(drop),
                (true, false) => part.start(),
                (false, is_running) => {
                    if is_running {
                        part.stop();
                    }
                    Ok(())
                }
            };
            let refusal = done.err().map(|error| format!("{error:#}"));
            // Several worker processes may refuse the settings for the same reason.
            refusals.extend(refusal.filter(|refusal| !refusals.contains(refusal)));
        }
        match refusals.is_empty() {
            true => Ok(()),
            false => Err(anyhow::Error::msg(refusals.join("; "))),
        }
    }

    /// Asks one worker process for its contribution to an answer of the whole daemon. Returns `None` if the settings do
    /// not need this worker process.
    fn share(&self, part: &SupervisedPart, request: &GraftRequest) -> anyhow::Result<Option<GraftAnswer>> {
        if !part.is_wanted() {
            return Ok(None);
        }
        let answer = part
            .ask(request, WHOLE_STATUS)?
            .with_context(|| format!("no answer from the daemon's part for {}", part.name))?;
        Ok(Some(serde_json::from_value(Value::Object(answer))?))
    }

    /// Returns the answers of these worker processes, and a reason for each that has failed to answer.
    fn shares<const N: usize>(
        &self,
        parts: [&Arc<SupervisedPart>; N],
        request: &GraftRequest,
    ) -> ([Option<GraftAnswer>; N], Vec<String>) {
        let mut missing = Vec::new();
        let shares = parts.map(|part| {
            self.share(part, request).unwrap_or_else(|error| {
                missing.push(part.trouble().unwrap_or_else(|| format!("the part {}: {error:#}", part.name)));
                None
            })
        });
        (shares, missing)
    }

    fn whole_status(&self) -> Status {
        let all = [&self.grafts, &self.agreements, &self.tunnel, &self.sessions, &self.peers];
        let (shares, missing) = self.shares(all, &GraftRequest::Status);
        let [grafts, agreements, tunnel, sessions, peers] = shares.map(|share| match share {
            Some(GraftAnswer::Status(share)) => *share,
            _ => Status::default(),
        });
        let Status { in_place, .. } = grafts;
        let sessions = sessions.sessions;
        let mut trouble = in_place.trouble;
        trouble.extend(agreements.in_place.trouble);
        trouble.extend(tunnel.in_place.trouble);
        trouble.extend(sessions.iter().flat_map(|it| it.trouble.clone()));
        trouble.extend(missing);
        trouble.extend(self.reloads.trouble("settings before stay"));
        Status {
            in_place: status::Status {
                uptime_s: self.started.elapsed().as_secs_f64(),
                trouble,
                reload: Some(self.reloads.latest()),
                carry: tunnel.in_place.carry,
                log_lines_dropped: in_place.log_lines_dropped
                    + agreements.in_place.log_lines_dropped
                    + tunnel.in_place.log_lines_dropped
                    + peers.in_place.log_lines_dropped
                    + log::dropped(),
                ..in_place
            },
            parts: self.parts().map(|part| part.status()).collect(),
            sessions,
        }
    }

    fn why(&self, request: &GraftRequest) -> anyhow::Result<PeerReport> {
        let ([grafts, tunnel, sessions], missing) =
            self.shares([&self.grafts, &self.tunnel, &self.sessions], request);
        let mut why = PeerReport::default();
        if let Some(GraftAnswer::Why(share)) = grafts {
            why.in_place = share.in_place;
        }
        if let Some(GraftAnswer::Why(share)) = tunnel {
            why.in_place.carrier = share.in_place.carrier;
        }
        if let Some(GraftAnswer::Why(share)) = sessions {
            why.sessions = share.sessions;
        }
        why.unknown = missing;
        Ok(why)
    }
}

impl Observed for Supervisor {
    type Status = Status;

    fn status(&self) -> anyhow::Result<Status> {
        Ok(self.whole_status())
    }

    fn metrics(&self) -> anyhow::Result<String> {
        let all = [&self.grafts, &self.agreements, &self.tunnel, &self.sessions];
        let (shares, missing) = self.shares(all, &GraftRequest::Metrics);
        missing.iter().for_each(|missing| warn!("metrics of a part of the daemon are missing: {missing}"));
        let pages = shares.into_iter().filter_map(|share| match share {
            Some(GraftAnswer::Metrics(page)) => Some(page),
            _ => None,
        });
        let parts: Vec<_> = self.parts().map(|part| part.status()).collect();
        let own = metrics::of_daemon(self.started.elapsed(), &self.reloads.latest(), &parts)?;
        Ok(metrics::joined([own].into_iter().chain(pages)))
    }

    fn is_well(&self) -> bool {
        self.whole_status().in_place.trouble.is_empty()
    }
}

impl daemon::Daemon for Supervisor {
    type Request = GraftRequest;
    type Answer = Map<String, Value>;
    type Caller = ();

    fn caller(&self) {}

    fn answer(&self, (): &mut (), request: GraftRequest) -> anyhow::Result<Option<Self::Answer>> {
        let answer = match request {
            GraftRequest::Status => GraftAnswer::Status(self.whole_status().into()),
            GraftRequest::Metrics => GraftAnswer::Metrics(self.metrics()?),
            GraftRequest::Why { .. } => GraftAnswer::Why(self.why(&request)?.into()),
            GraftRequest::Reload => return daemon::Daemon::reload(self).map(|()| None),
            GraftRequest::SwapSession { .. } => return self.sessions.ask(&request, PATIENCE),
            GraftRequest::Probe { .. } | GraftRequest::Probes => {
                return self.agreements.ask(&request, PATIENCE);
            }
            GraftRequest::Hook { ref cgroup, .. } => {
                let cgroup = cgroup.clone();
                let tunnel = self.tunnel.status().pid;
                self.tunnel.ask(&request, PATIENCE)?;
                self.hooked.lock().push(HookedCommand { cgroup, request, tunnel });
                return Ok(None);
            }
            _ => return self.grafts.ask(&request, PATIENCE),
        };
        match serde_json::to_value(answer)? {
            Value::Object(answer) => Ok(Some(answer)),
            _ => Ok(None),
        }
    }

    fn read_settings(&self) -> anyhow::Result<()> {
        self.follow(&usable(&self.config, &self.interfaces)?)
    }

    fn reloads(&self) -> &Reloads {
        &self.reloads
    }

    fn tick(&self) -> anyhow::Result<()> {
        let mut hooked = self.hooked.lock();
        // The process that tunnels their connections may not change files.
        hooked.retain(|HookedCommand { cgroup, .. }| {
            is_populated(cgroup)
                || fs::remove_dir(cgroup).is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
        });
        let tunnel = self.tunnel.status().pid;
        for command in hooked.iter_mut().filter(|command| command.tunnel != tunnel) {
            if self.tunnel.trouble().is_some() {
                break; // it is asked once it serves
            }
            if let Err(error) = self.tunnel.ask(&command.request, WHOLE_STATUS) {
                let cgroup = command.cgroup.display();
                warn!(%cgroup, "connections of a command are not tunnelled any more: {error:#}");
            }
            command.tunnel = tunnel;
        }
        Ok(())
    }
}
