//! Removes a gateway's rules and routes when the daemon has ended for any reason, since the kernel would keep them. The
//! watchdog is a process of its own that waits for the daemon's end. If the watchdog itself was killed, the next daemon
//! removes the rules and routes.

use std::{
    io::{self, Read as _},
    os::unix::process::CommandExt as _,
    process::{Child, Command, Stdio},
};

use millrace_graft_kernel::gateway::{GatewayRun, remove_leftovers, remove_programs};
use nix::sys::signal::SigSet;

/// The daemon's handle of the watchdog process. Dropping it makes the process remove the
/// gateway's rules and routes, and waits until the process has ended.
pub struct TunnelWatchdog(Child);

impl TunnelWatchdog {
    /// Starts the watchdog process of the gateway on these interfaces. `run` identifies the routing to remove.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(run: GatewayRun, interfaces: &[String]) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["graft", "gateway-keep", &run.0.to_string()]).args(interfaces);
        // The watchdog process has a process group of its own, so that a terminal's signal to the daemon does not end
        // it.
        let process = command.stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0).spawn()?;
        Ok(Self(process))
    }
}

impl Drop for TunnelWatchdog {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Runs the watchdog process, which waits until the daemon has ended and removes its routing.
pub fn run(run: u16, interfaces: &[String]) -> anyhow::Result<()> {
    // Signals are blocked in the watchdog process. A service manager that ends all processes also ends the daemon, and
    // the watchdog ends after the daemon.
    SigSet::all().thread_block()?;
    // Standard input is a pipe from the daemon, which the kernel closes when the daemon ends.
    io::stdin().read_to_end(&mut Vec::new())?;
    remove_programs(interfaces);
    remove_leftovers(Some(GatewayRun(run)))?;
    Ok(())
}
