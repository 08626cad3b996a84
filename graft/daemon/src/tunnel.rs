//! The worker process that parses what peers send when they negotiate agreements. It holds no capability for BPF
//! programs, and asks the worker process for TCP for each effect on this host: see [`link`](super::link).

use std::{os::unix::net::UnixStream, path::PathBuf, sync::Arc, time::Duration};

use anyhow::bail;
use millrace_daemon::{
    daemon::{self, DaemonFrame, Observed, Reloads},
    log,
    rights::keep_capabilities,
};
use millrace_graft::{settings::AgreementSettings, status};
use parking_lot::Mutex;
use rustix::thread::CapabilitySet;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{error, info};

use super::{
    agreement::{AgreementHost, AgreementTasks},
    control::{GraftAnswer, GraftRequest, Status},
    daemon::usable,
    link::LinkRequest,
};

/// Capabilities that this process keeps: to listen on a port below 1024, and to probe a path by IP protocol 253.
const KEPT: CapabilitySet = CapabilitySet::NET_BIND_SERVICE.union(CapabilitySet::NET_RAW);
/// Interval at which this process asks whether the rules have changed that are negotiated with peers.
const LOOK: Duration = Duration::from_millis(500);

/// Arguments with which the worker process starts.
pub struct TunnelSetup {
    /// Path of the settings file.
    pub config: PathBuf,
    /// Interfaces behind which there are hosts whose connections are tunnelled, in addition to those of the settings.
    pub interfaces: Vec<String>,
}

/// Drops the capabilities that this process does not need, for good. Must be called before any other thread is started.
///
/// # Errors
/// The kernel refuses a step.
pub fn confine() -> anyhow::Result<()> {
    Ok(keep_capabilities(KEPT)?)
}

/// Runs the worker process until its supervisor or a signal ends it.
pub async fn run(setup: TunnelSetup, frame: DaemonFrame) -> anyhow::Result<()> {
    let daemon = Arc::new(TunnelDaemon::new(setup)?);
    let mut agreements = AgreementSetup::default();
    agreements.follow(&daemon).await?;
    // A task of its own waits for the other process, so that requests are served meanwhile.
    let following = tokio::spawn(follow(daemon.clone(), agreements));
    let done = frame.run(&daemon).await;
    daemon.host.link.end();
    following.abort();
    done
}

/// Follows the settings and the rules in force, for as long as this process runs.
async fn follow(daemon: Arc<TunnelDaemon>, mut agreements: AgreementSetup) {
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = looks.tick() => {}
            () = daemon.host.news.notified() => {}
        }
        daemon.host.look();
        if let Err(error) = agreements.follow(&daemon).await {
            error!("cannot negotiate grafts with peers: {error:#}");
        }
    }
}

struct TunnelDaemon {
    setup: TunnelSetup,
    host: Arc<AgreementHost>,
    reloads: Reloads,
    /// Reason why agreements do not run although the settings have [agreement].
    disagrees: Mutex<Option<String>>,
}

impl TunnelDaemon {
    fn new(setup: TunnelSetup) -> anyhow::Result<Self> {
        let settings = usable(&setup.config, &setup.interfaces)?.in_place;
        let host = Arc::new(AgreementHost::new(settings));
        Ok(Self { setup, host, reloads: Reloads::default(), disagrees: Mutex::default() })
    }
}

/// The running tasks that negotiate agreements with peers, and the settings for which they were started.
#[derive(Default)]
struct AgreementSetup {
    running: Option<AgreementTasks>,
    settings: Option<AgreementSettings>,
}

impl AgreementSetup {
    /// Restarts the tasks that negotiate agreements with peers, if the settings of agreements have changed.
    async fn follow(&mut self, daemon: &Arc<TunnelDaemon>) -> anyhow::Result<()> {
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

impl Observed for TunnelDaemon {
    type Status = status::Status;

    fn status(&self) -> anyhow::Result<status::Status> {
        let trouble = self.disagrees.lock().iter().cloned().collect();
        Ok(status::Status { trouble, log_lines_dropped: log::dropped(), ..status::Status::default() })
    }

    fn metrics(&self) -> anyhow::Result<String> {
        bail!("the part for agreements has no metrics of its own")
    }

    fn is_well(&self) -> bool {
        self.disagrees.lock().is_none()
    }
}

impl daemon::Daemon for TunnelDaemon {
    type Request = GraftRequest;
    type Answer = GraftAnswer;
    type Caller = ();

    fn caller(&self) {}

    fn answer(&self, (): &mut (), request: GraftRequest) -> anyhow::Result<Option<GraftAnswer>> {
        match request {
            GraftRequest::Status => {
                let share = Status { in_place: self.status()?, ..Status::default() };
                Ok(Some(GraftAnswer::Status(share.into())))
            }
            GraftRequest::Reload => daemon::Daemon::reload(self).map(|()| None),
            _ => bail!("this part negotiates agreements, and serves no other request"),
        }
    }

    fn read_settings(&self) -> anyhow::Result<()> {
        self.host.set_settings(usable(&self.setup.config, &self.setup.interfaces)?.in_place);
        Ok(())
    }

    fn reloads(&self) -> &Reloads {
        &self.reloads
    }

    fn tick(&self) -> anyhow::Result<()> {
        Ok(())
    }

    fn linked(self: &Arc<Self>, partner: UnixStream) {
        self.host.renew_link(partner);
    }
}
