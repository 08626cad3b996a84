//! From start-up to the end of a gate.

use std::sync::Arc;

use millrace_daemon::daemon::{Frame, Front};
use tracing::info;

use super::daemon::{Daemon, Setup};

/// Runs a gate until a signal ends it.
pub async fn run(setup: &Setup, front: Front) -> anyhow::Result<()> {
    let frame = Frame::open(front, "gate")?;
    let daemon = Arc::new(Daemon::start(setup)?);
    if daemon.dry_run {
        info!("dry run: nothing is refused");
    }
    frame.run(&daemon).await?;
    daemon.gate.detach();
    info!("detached");
    Ok(())
}
