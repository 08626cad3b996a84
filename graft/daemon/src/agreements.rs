//! The worker process that parses what peers send when they negotiate agreements, and answers to probes of paths. It
//! holds no capability for BPF programs, and asks the worker process for TCP for each effect on this host: see
//! [`link`](super::link).

use std::{os::fd::OwnedFd, path::PathBuf, sync::Arc, time::Duration};

use anyhow::bail;
use millrace_daemon::{
    daemon::{DaemonFrame, Reloads},
    log,
};
use millrace_graft::{
    settings::{AgreementSettings, class_of},
    status,
};
use parking_lot::Mutex;
use rustix::thread::CapabilitySet;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{error, info};

use super::{
    agreement::{AgreementHost, AgreementTasks},
    control::{GraftAnswer, GraftRequest, Status},
    link::LinkRequest,
    metrics,
    probe::{ProbeStatus, ProbeTarget, Probes},
    usable::usable,
    worker::{Served, WorkerProcess, another},
};

/// Capabilities that this process keeps: to listen on a port below 1024, and to probe a path by ICMP.
pub const KEPT: CapabilitySet = CapabilitySet::NET_BIND_SERVICE.union(CapabilitySet::NET_RAW);
/// Interval at which this process asks whether the rules have changed that are negotiated with peers.
const LOOK: Duration = Duration::from_millis(500);

/// Arguments with which the worker process starts.
pub struct AgreementPartSetup {
    /// Path of the settings file.
    pub config: PathBuf,
    /// Interfaces behind which there are hosts whose connections are tunnelled, in addition to those of the settings.
    pub interfaces: Vec<String>,
}

/// Runs the worker process until its supervisor or a signal ends it.
pub async fn run(setup: AgreementPartSetup, frame: DaemonFrame) -> anyhow::Result<()> {
    let daemon = Arc::new(AgreementPart::new(setup)?);
    let mut agreements = RunningAgreements::default();
    agreements.follow(&daemon).await?;
    // A task of its own waits for the other process, so that requests are served meanwhile.
    let following = tokio::spawn(follow(daemon.clone(), agreements));
    let done = frame.run(&Arc::new(Served(daemon.clone()))).await;
    daemon.host.link.end();
    following.abort();
    done
}

/// Follows the settings and the rules in force, for as long as this process runs.
async fn follow(daemon: Arc<AgreementPart>, mut agreements: RunningAgreements) {
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = looks.tick() => {}
            () = daemon.host.news.notified() => {}
        }
        daemon.host.look();
        for (peer, report) in daemon.probes.take_fresh() {
            daemon.host.link.tell(&LinkRequest::NoteProbe { peer, report });
        }
        daemon.probes.start_due(&daemon.host.settings().probes);
        if let Err(error) = agreements.follow(&daemon).await {
            error!("cannot negotiate grafts with peers: {error:#}");
        }
    }
}

struct AgreementPart {
    setup: AgreementPartSetup,
    host: Arc<AgreementHost>,
    probes: Probes,
    reloads: Reloads,
    /// Reason why agreements do not run although the settings have [agreement].
    disagrees: Mutex<Option<String>>,
}

impl AgreementPart {
    fn new(setup: AgreementPartSetup) -> anyhow::Result<Self> {
        let settings = usable(&setup.config, &setup.interfaces)?.in_place;
        let host = Arc::new(AgreementHost::new(settings));
        Ok(Self {
            setup,
            host,
            probes: Probes::default(),
            reloads: Reloads::default(),
            disagrees: Mutex::default(),
        })
    }

    fn probed(&self) -> Vec<ProbeStatus> {
        let classes = self.host.settings().classes;
        self.probes.all(|rtt_us| class_of(&classes, rtt_us))
    }
}

/// The running tasks that negotiate agreements with peers, and the settings for which they were started.
#[derive(Default)]
struct RunningAgreements {
    running: Option<AgreementTasks>,
    settings: Option<AgreementSettings>,
}

impl RunningAgreements {
    /// Restarts the tasks that negotiate agreements with peers, if the settings of agreements have changed.
    async fn follow(&mut self, daemon: &Arc<AgreementPart>) -> anyhow::Result<()> {
        let settings = daemon.host.agreement();
        if settings == self.settings {
            return Ok(());
        }
        if let Some(mut running) = self.running.take() {
            // All tasks that negotiate agreements end before the present agreements are cancelled, so that no task puts
            // another one into force after that.
            running.end().await;
            daemon.host.link.tell(&LinkRequest::ReleaseAll);
        }
        self.settings = settings.clone();
        let Some(settings) = settings else { return Ok(()) };
        let started = AgreementTasks::start(daemon.host.clone(), settings).await;
        *daemon.disagrees.lock() =
            started.as_ref().err().map(|error| format!("cannot negotiate grafts with peers: {error:#}"));
        let running = started?;
        if let Some(at) = running.listens {
            info!(%at, "listening for peers that negotiate grafts");
        }
        self.running = Some(running);
        Ok(())
    }
}

impl WorkerProcess for AgreementPart {
    fn share(&self) -> anyhow::Result<Status> {
        let trouble = self.disagrees.lock().iter().cloned().collect();
        let in_place =
            status::Status { trouble, log_lines_dropped: log::dropped(), ..status::Status::default() };
        Ok(Status { in_place, ..Status::default() })
    }

    fn page(&self) -> anyhow::Result<String> {
        Ok(metrics::of_probes(self.probed())?)
    }

    fn answer(&self, request: GraftRequest) -> anyhow::Result<Option<GraftAnswer>> {
        match request {
            GraftRequest::Probe { peer, udp_port, period_ms, duration_ms } => {
                let ms = Duration::from_millis;
                let target = ProbeTarget { peer, udp_port };
                self.probes.start(target, ms(period_ms), ms(duration_ms))?;
                info!(%peer, by = target.protocol_name(), "probing the network path to a peer");
                Ok(None)
            }
            GraftRequest::Probes => Ok(Some(GraftAnswer::Probed(self.probed()))),
            _ => bail!(another()),
        }
    }

    fn read_settings(&self) -> anyhow::Result<()> {
        self.host.set_settings(usable(&self.setup.config, &self.setup.interfaces)?.in_place);
        Ok(())
    }

    fn reloads(&self) -> &Reloads {
        &self.reloads
    }

    fn linked(self: &Arc<Self>, _name: &str, partner: OwnedFd) {
        self.host.renew_link(partner.into());
    }
}
