//! Counts the system calls of all threads of a process, by number.

use libbpf_rs::Link;
use millrace_kernel::Error;
use millrace_kernel::object::{LoadedObject, embedded};

use crate::intf::SyscallsConfig;

const TRACEPOINT: &str = "sys_enter";

/// A count of system calls. It runs from [`attach`](Self::attach) until it is dropped.
pub struct Syscalls {
    object: LoadedObject,
    _link: Link,
}

impl Syscalls {
    /// Attaches the program. `tgid` is the counted process' ID in the initial PID namespace.
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

    /// Returns the number of calls so far, indexed by system call number.
    pub fn counts(&mut self) -> Result<Vec<u64>, Error> {
        self.object.counters("calls")
    }
}
