//! Counts a process's system calls, all threads, by number.

use libbpf_rs::Link;
use millrace_kernel::Error;
use millrace_kernel::object::{Loaded, embedded};

use crate::intf::SyscallsConfig;

const TRACEPOINT: &str = "sys_enter";

/// Counts from [`attach`](Self::attach) on, until it is dropped.
pub struct Syscalls {
    object: Loaded,
    _link: Link,
}

impl Syscalls {
    /// `tgid` is the process ID as the initial PID namespace numbers it.
    pub fn attach(tgid: u32) -> Result<Self, Error> {
        let mut open = embedded!("syscalls.bpf.o").open()?;
        open.configure(&SyscallsConfig { tgid })?;
        let object = open.load()?;
        let link = object
            .program("syscalls_enter")?
            .attach_raw_tracepoint(TRACEPOINT)
            .map_err(|source| Error::Tracepoint { tracepoint: TRACEPOINT, source })?;
        Ok(Self { object, _link: link })
    }

    /// Calls so far, indexed by system call number.
    pub fn counts(&mut self) -> Result<Vec<u64>, Error> {
        self.object.counters("calls")
    }
}
