//! Runs the gate's daemon.

use std::sync::Arc;

use millrace_daemon::daemon::{DaemonFrame, DaemonFront};
use tracing::info;

use super::daemon::{GateDaemon, GateSetup};

/// Runs a gate until a signal ends it.
pub async fn run(setup: &GateSetup, front: DaemonFront) -> anyhow::Result<()> {
    let frame = DaemonFrame::open(front, "gate")?;
    let daemon = Arc::new(GateDaemon::start(setup)?);
    if daemon.dry_run {
        info!("the gate is in dry run: its rules count packets and refuse none");
    }
    frame.run(&daemon).await?;
    daemon.gate.detach();
    info!("detached the gate from its interfaces");
    Ok(())
}
