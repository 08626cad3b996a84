//! From start-up to the end of a daemon of grafts: socket, HTTP, signals.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_daemon::{
    daemon::{Signal, Signals, router},
    memory::Memory,
};
use millrace_graft::settings::Agreement;
use tracing::{error, info};

use super::{
    agreement::Agreements,
    control::{self, WHO},
    daemon::{Daemon, Setup},
};

/// How often the sockets are looked at.
const TICK: Duration = Duration::from_secs(1);
/// How often it is looked what has come of connections, where that says by what others go.
const LEARN: Duration = Duration::from_millis(100);

/// How often what is learned is written down.
const KEEP: Duration = Duration::from_secs(60);

/// Until a signal ends it.
pub async fn run(setup: Setup) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    let socket = setup.front.bind(WHO)?;
    let daemon = Arc::new(Daemon::start(&setup)?);
    let _http = setup.front.serve(router(daemon.clone())).await?;
    let mut agreements = Agreed::default();
    let mut changes = daemon.changes();
    agreements.follow(&daemon).await?;
    daemon.follow_carry()?;
    info!("ready");
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut lessons = tokio::time::interval(LEARN);
    lessons.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut keeping = tokio::time::interval_at(tokio::time::Instant::now() + KEEP, KEEP);
    keeping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let serve = control::serve(&socket, daemon.clone());
    tokio::pin!(serve);
    let mut memory = Memory::default();
    loop {
        tokio::select! {
            never = &mut serve => match never {},
            _ = ticks.tick() => tokio::task::block_in_place(|| {
                daemon.tick();
                if memory.is_time(Instant::now()) {
                    memory.look();
                }
            }),
            _ = lessons.tick() => tokio::task::block_in_place(|| daemon.learn()),
            _ = keeping.tick() => tokio::task::block_in_place(|| daemon.keep()),
            signal = signals.next() => match signal {
                Signal::Reload => {
                    if let Err(error) = tokio::task::block_in_place(|| daemon.reload()) {
                        error!("the new settings are not usable, the old ones stay: {error:#}");
                    }
                }
                Signal::End => break,
            },
            _ = changes.changed() => {
                if let Err(error) = agreements.follow(&daemon).await {
                    error!("there are no agreements: {error:#}");
                }
                if let Err(error) = tokio::task::block_in_place(|| daemon.follow_carry()) {
                    error!("nothing is carried: {error:#}");
                }
            }
        }
    }
    tokio::task::block_in_place(|| {
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
