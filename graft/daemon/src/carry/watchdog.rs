//! Removes a gateway's rules and routes when the daemon is gone, however it ended, since the kernel keeps them. The
//! keeper is a process of its own that waits for the daemon's end. If the keeper was killed itself, the next daemon
//! removes them.

use std::{
    io::{self, Read as _},
    os::unix::process::CommandExt as _,
    process::{Child, Command, Stdio},
};

use millrace_graft_kernel::gateway::{GatewayRun, remove_leftovers, remove_programs};
use nix::sys::signal::SigSet;

/// The daemon's handle of the keeper.
pub struct TunnelWatchdog(Child);

impl TunnelWatchdog {
    pub fn start(run: GatewayRun, interfaces: &[String]) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["graft", "gateway-keep", &run.0.to_string()]).args(interfaces);
        // A signal from a terminal that ends the daemon must not end the keeper.
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

/// Runs the keeper process: waits until the daemon is gone, and removes its routing.
pub fn run(run: u16, interfaces: &[String]) -> anyhow::Result<()> {
    // Signals are blocked here: a service manager that ends all processes also ends the daemon, and then this
    // process.
    SigSet::all().thread_block()?;
    // Standard input is a pipe from the daemon, which ends with the daemon.
    io::stdin().read_to_end(&mut Vec::new())?;
    remove_programs(interfaces);
    remove_leftovers(Some(GatewayRun(run)))?;
    Ok(())
}
