//! Runs the daemon's worker process for TCP, from its start to its end.

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use anyhow::bail;
use millrace_daemon::daemon::{DaemonFrame, PartProcess, Reloads};
use tokio::{
    task::block_in_place,
    time::{Instant, MissedTickBehavior, interval_at},
};
use tracing::{info, warn};

use super::{
    control::{GraftAnswer, GraftRequest, PeerReport, Status, TUNNEL},
    daemon::{GraftDaemon, GraftSetup},
    link_server, metrics, tunnel_server,
    worker::{Served, WorkerProcess, another},
};

/// Interval at which the results of ended connections are read. The model that chooses congestion controls for rules
/// with `select` learns from them.
const LEARN: Duration = Duration::from_millis(100);

/// Interval at which the model that chooses congestion controls is written to its file.
const KEEP: Duration = Duration::from_secs(60);

/// Runs the worker process for TCP until its supervisor or a signal ends it.
pub async fn run(setup: GraftSetup, part: PartProcess, frame: DaemonFrame) -> anyhow::Result<()> {
    let daemon = Arc::new(GraftDaemon::start(&setup, &part)?);
    let every = |period| {
        let mut ticks = interval_at(Instant::now() + period, period);
        // If one tick is late, the next one follows a full interval later, so that no burst follows.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    };
    let mut lessons = every(LEARN);
    let mut keeping = every(KEEP);
    // Work beside requests: learns from ended connections, and writes the learned model to its file.
    let beside = async {
        loop {
            tokio::select! {
                _ = lessons.tick() => block_in_place(|| daemon.learn()),
                _ = keeping.tick() => block_in_place(|| daemon.keep()),
            }
        }
    };
    frame.run_beside(&Arc::new(Served(daemon.clone())), beside).await?;
    // The results of the latest connections are written to the file before the process ends.
    block_in_place(|| {
        daemon.learn();
        daemon.keep();
    });
    match setup.persist {
        true => info!("grafts and rules stay in the kernel; `millrace graft clean` removes them"),
        false => {
            info!("grafts and rules were removed from the kernel; connections keep their congestion control")
        }
    }
    Ok(())
}

impl WorkerProcess for GraftDaemon {
    fn share(&self) -> anyhow::Result<Status> {
        Ok(Status { in_place: self.status()?, ..Status::default() })
    }

    fn page(&self) -> anyhow::Result<String> {
        Ok(metrics::encode(self.status()?)?)
    }

    fn answer(&self, request: GraftRequest) -> anyhow::Result<Option<GraftAnswer>> {
        let done = |()| None;
        Ok(Some(match request {
            GraftRequest::Load { graft, parameters } => GraftAnswer::Loaded(self.load(&graft, parameters)?),
            GraftRequest::Unload { graft } => return self.unload(&graft).map(done),
            GraftRequest::Swap { from, to, parameters } => {
                GraftAnswer::Swapped(self.swap(&from, &to, parameters)?)
            }
            GraftRequest::Why { peer } => GraftAnswer::Why(
                PeerReport { in_place: self.explain_peer(peer)?, ..PeerReport::default() }.into(),
            ),
            GraftRequest::WhyConnection { local, remote } => {
                GraftAnswer::Connection(self.explain_connection([local, remote])?.into())
            }
            GraftRequest::Monitor => GraftAnswer::Paths(self.paths()),
            _ => bail!(another()),
        }))
    }

    fn read_settings(&self) -> anyhow::Result<()> {
        self.read_settings()
    }

    fn reloads(&self) -> &Reloads {
        &self.reloads
    }

    fn linked(self: &Arc<Self>, name: &str, partner: OwnedFd) {
        let serves = match name {
            TUNNEL => tunnel_server::serve(self.clone(), partner.into()),
            _ => link_server::serve(self.clone(), partner.into(), self.links.clone()),
        };
        if let Err(error) = serves {
            warn!("no thread for requests of the part {name}: {error}");
        }
    }

    fn tick(&self) -> anyhow::Result<()> {
        self.tick();
        Ok(())
    }
}
