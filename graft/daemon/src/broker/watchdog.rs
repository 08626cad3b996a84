//! Shuts down the sockets of applications when the daemon ends for any reason: without the daemon their datagrams would
//! be sent unencrypted.
//!
//! The watchdog is a process of its own. It holds a descriptor of each socket that an application has, and of the BPF
//! programs that seal (encrypt) datagrams. The kernel detaches a program when its last descriptor is closed. If the
//! daemon is killed, outgoing datagrams are still sealed until the watchdog has shut down all sockets. Then the
//! watchdog ends, and the programs are detached.

use std::{
    collections::BTreeMap,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt as _,
    },
    process::{Child, Command, Stdio},
};

use millrace_base::control::{ControlEnd, ControlReceived};
use millrace_graft_kernel::packet::SessionEnds;
use millrace_kernel::udp::end_for_all;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::SigSet,
};
use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "tell", rename_all = "snake_case")]
enum WatchdogMessage {
    /// Makes the watchdog drop the encrypting BPF programs that it was sent before, since new ones follow.
    First,
    /// Adds an encrypting BPF program, whose descriptor is attached to the message.
    Guard,
    /// Adds a socket that an application has, whose descriptor is attached to the message. The watchdog drops its
    /// earlier socket with the same address and port.
    Keep { at: String },
    /// Makes the watchdog drop its descriptor of the socket with this address and port.
    Forget { at: String },
}

/// The daemon's handle of the watchdog process.
pub struct SealWatchdog {
    process: Child,
    control: ControlEnd,
    is_ready: bool,
}

impl SealWatchdog {
    /// Starts the watchdog process. It has no encrypting BPF programs before [`Self::guard`] is called.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start() -> io::Result<Self> {
        let (control, theirs) = ControlEnd::pair()?;
        // The watchdog process gets its end of the socket pair as its standard input.
        let theirs = theirs.as_fd().try_clone_to_owned()?;
        // This path names the running program, even if its file was replaced.
        let mut command = Command::new("/proc/self/exe");
        command.args(["graft", "sessions-keep"]).stdin(theirs).stdout(Stdio::null());
        // The watchdog process has a process group of its own, so that a terminal's signal to the daemon does not end
        // it.
        let process = command.process_group(0).spawn()?;
        Ok(Self { process, control, is_ready: false })
    }

    /// Reports whether the watchdog process has received the encrypting BPF programs.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Reports whether the watchdog process still runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    /// Gives the watchdog process the encrypting BPF programs. They replace those of an earlier call.
    pub fn guard<'a>(&mut self, egress: impl Iterator<Item = BorrowedFd<'a>>) {
        self.tell(&WatchdogMessage::First, &[]);
        egress.for_each(|descriptor| self.tell(&WatchdogMessage::Guard, &[descriptor]));
        self.is_ready = true;
    }

    /// Gives the watchdog process a descriptor of a socket that an application gets. The caller does this before the
    /// application can send.
    pub fn keep(&self, ends: &SessionEnds, socket: impl AsFd) {
        self.tell(&WatchdogMessage::Keep { at: ends.local.to_string() }, &[socket.as_fd()]);
    }

    /// Makes the watchdog process close its descriptor of the socket with these addresses.
    pub fn forget(&self, ends: &SessionEnds) {
        self.tell(&WatchdogMessage::Forget { at: ends.local.to_string() }, &[]);
    }

    /// Sends a message to the watchdog process. Errors are ignored, since the session broker regularly checks whether
    /// the process still runs.
    fn tell(&self, tell: &WatchdogMessage, descriptors: &[BorrowedFd<'_>]) {
        let _ = self.control.send(tell, descriptors);
    }
}

/// Runs the watchdog process until the daemon has ended.
pub fn run() -> anyhow::Result<()> {
    // Signals are blocked in the watchdog process. A service manager that ends all processes also ends the daemon, and
    // the watchdog ends after the daemon.
    SigSet::all().thread_block()?;
    let control = ControlEnd::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut guards = Vec::<OwnedFd>::new();
    let mut sockets = BTreeMap::<String, OwnedFd>::new();
    loop {
        match control.receive() {
            ControlReceived::Record(WatchdogMessage::First, _) => guards.clear(),
            ControlReceived::Record(WatchdogMessage::Guard, descriptors) => guards.extend(descriptors),
            ControlReceived::Record(WatchdogMessage::Keep { at }, descriptors) => {
                sockets.extend(descriptors.into_iter().map(|descriptor| (at.clone(), descriptor)));
            }
            ControlReceived::Record(WatchdogMessage::Forget { at }, _) => drop(sockets.remove(&at)),
            ControlReceived::Malformed(_) => {}
            ControlReceived::Nothing => {
                poll(&mut [PollFd::new(control.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
            }
            ControlReceived::End => break,
        }
    }
    for socket in sockets.values() {
        // An error of the shutdown is ignored: the daemon that could log it has ended, and the socket may have been
        // shut down before.
        let _ = end_for_all(socket);
    }
    // The encrypting BPF programs are detached last, when no socket can send any more.
    drop(guards);
    Ok(())
}
