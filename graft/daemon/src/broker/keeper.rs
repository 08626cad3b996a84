//! Ends the sockets of applications when the daemon is gone, however it went: without the daemon nothing would seal what they send.
//!
//! It is a process of its own, which has a descriptor of each socket that is lent, and of what seals. The kernel detaches programs when the
//! last descriptor of them is closed. So the daemon may be killed: what leaves is still sealed, until the keeper has shut all the
//! sockets down. Then it ends, and nothing is attached any more.

use std::{
    collections::BTreeMap,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt as _,
    },
    process::{Child, Command, Stdio},
};

use millrace_base::control::{Control, Received};
use millrace_graft_kernel::joint::Ends;
use millrace_kernel::udp::end_for_all;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::SigSet,
};
use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "tell", rename_all = "snake_case")]
enum Tell {
    /// What seals, instead of what was told before: the first of several.
    First,
    /// With a descriptor.
    Guard,
    /// With a descriptor, instead of what was at this port of this address before.
    Keep {
        at: String,
    },
    Forget {
        at: String,
    },
}

/// The daemon's side.
pub struct Keeper {
    process: Child,
    control: Control,
    is_ready: bool,
}

impl Keeper {
    pub fn start() -> io::Result<Self> {
        let (control, theirs) = Control::pair()?;
        let theirs = theirs.as_fd().try_clone_to_owned()?;
        let mut command = Command::new("/proc/self/exe");
        command.args(["graft", "packets", "keep"]).stdin(theirs).stdout(Stdio::null());
        // What ends the daemon from a terminal is not to end both.
        let process = command.process_group(0).spawn()?;
        Ok(Self { process, control, is_ready: false })
    }

    /// Whether it has what seals.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    pub fn is_alive(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    pub fn guard<'a>(&mut self, egress: impl Iterator<Item = BorrowedFd<'a>>) {
        self.tell(&Tell::First, &[]);
        egress.for_each(|descriptor| self.tell(&Tell::Guard, &[descriptor]));
        self.is_ready = true;
    }

    pub fn keep(&self, ends: &Ends, socket: impl AsFd) {
        self.tell(&Tell::Keep { at: ends.local.to_string() }, &[socket.as_fd()]);
    }

    pub fn forget(&self, ends: &Ends) {
        self.tell(&Tell::Forget { at: ends.local.to_string() }, &[]);
    }

    /// If it has ended, that is noticed elsewhere.
    fn tell(&self, tell: &Tell, descriptors: &[BorrowedFd<'_>]) {
        let _ = self.control.send(tell, descriptors);
    }
}

/// As the keeper: until the daemon is gone.
pub fn run() -> anyhow::Result<()> {
    // Whoever ends all processes of a service ends the daemon, and so this one.
    SigSet::all().thread_block()?;
    let control = Control::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (mut guards, mut sockets) = (Vec::<OwnedFd>::new(), BTreeMap::<String, OwnedFd>::new());
    loop {
        match control.receive() {
            Received::Record(Tell::First, _) => guards.clear(),
            Received::Record(Tell::Guard, descriptors) => guards.extend(descriptors),
            Received::Record(Tell::Keep { at }, descriptors) => {
                sockets.extend(descriptors.into_iter().map(|descriptor| (at.clone(), descriptor)));
            }
            Received::Record(Tell::Forget { at }, _) => drop(sockets.remove(&at)),
            Received::Malformed(_) => {}
            Received::Nothing => {
                poll(&mut [PollFd::new(control.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
            }
            Received::End => break,
        }
    }
    for socket in sockets.values() {
        // There is nobody to tell, and one that is shut down already is what is wanted.
        let _ = end_for_all(socket);
    }
    drop(guards);
    Ok(())
}
