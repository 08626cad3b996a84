//! Takes back a gateway's rules and routes when the daemon is gone, however it went: the kernel keeps them. It is a process of its own, which
//! waits for that and ends. If it was ended itself, the next daemon takes them back.

use std::{
    io::{self, Read as _},
    os::unix::process::CommandExt as _,
    process::{Child, Command, Stdio},
};

use millrace_graft_kernel::gateway::{Run, remove_leftovers, remove_programs};
use nix::sys::signal::SigSet;

/// The daemon's side.
pub struct Keeper(Child);

impl Keeper {
    pub fn start(run: Run, interfaces: &[String]) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["graft", "gateway-keep", &run.0.to_string()]).args(interfaces);
        // What ends the daemon from a terminal is not to end both.
        let process = command.stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0).spawn()?;
        Ok(Self(process))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// As the keeper: until the daemon is gone.
pub fn run(run: u16, interfaces: &[String]) -> anyhow::Result<()> {
    // Whoever ends all processes of a service ends the daemon, and so this one.
    SigSet::all().thread_block()?;
    io::stdin().read_to_end(&mut Vec::new())?;
    remove_programs(interfaces);
    remove_leftovers(Some(Run(run)))?;
    Ok(())
}
