//! From start-up to the end of a daemon of grafts: socket, HTTP, signals.

use std::{sync::Arc, time::Duration};

use millrace_daemon::daemon::{Frame, Front};
use millrace_graft::settings::Agreement;
use tokio::{
    task::block_in_place,
    time::{Instant, MissedTickBehavior, interval_at},
};
use tracing::{error, info};

use super::{
    agreement::Agreements,
    control::WHO,
    daemon::{Daemon, Setup},
};

/// How often it is looked what has come of connections, where that says by what others go.
const LEARN: Duration = Duration::from_millis(100);

/// How often what is learned is written down.
const KEEP: Duration = Duration::from_secs(60);

/// Until a signal ends it.
pub async fn run(setup: Setup, front: Front) -> anyhow::Result<()> {
    let frame = Frame::open(front, WHO)?;
    let daemon = Arc::new(Daemon::start(&setup)?);
    let mut agreements = Agreed::default();
    let mut changes = daemon.changes();
    agreements.follow(&daemon).await?;
    daemon.follow_carry()?;
    let every = |period| {
        let mut ticks = interval_at(Instant::now() + period, period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    };
    let (mut lessons, mut keeping) = (every(LEARN), every(KEEP));
    let beside = async {
        loop {
            tokio::select! {
                _ = lessons.tick() => block_in_place(|| daemon.learn()),
                _ = keeping.tick() => block_in_place(|| daemon.keep()),
                _ = changes.changed() => {
                    if let Err(error) = agreements.follow(&daemon).await {
                        error!("there are no agreements: {error:#}");
                    }
                    if let Err(error) = block_in_place(|| daemon.follow_carry()) {
                        error!("nothing is carried: {error:#}");
                    }
                }
            }
        }
    };
    frame.run_beside(&daemon, beside).await?;
    block_in_place(|| {
        daemon.learn();
        daemon.keep();
    });
    match setup.persist {
        true => info!("all of it stays; `millrace graft clean` takes it back"),
        false => info!("taken back; connections keep what they have"),
    }
    Ok(())
}

/// The agreements as the settings are.
#[derive(Default)]
struct Agreed {
    running: Option<Agreements>,
    settings: Option<Agreement>,
}

impl Agreed {
    /// Begins anew if the settings are others.
    async fn follow(&mut self, daemon: &Arc<Daemon>) -> anyhow::Result<()> {
        let settings = daemon.agreement();
        if settings == self.settings {
            return Ok(());
        }
        if let Some(mut running) = self.running.take() {
            running.end().await;
            daemon.with(millrace_graft::Runtime::release_all)?;
        }
        self.settings = settings.clone();
        let Some(settings) = settings else { return Ok(()) };
        let started = Agreements::start(daemon.clone(), settings).await;
        daemon.set_disagreement(started.as_ref().err().map(|error| format!("no agreements: {error:#}")));
        let running = started?;
        if let Some(at) = running.listens {
            info!(%at, "peers are heard");
        }
        self.running = Some(running);
        Ok(())
    }
}
