//! Energy counters of the hardware, read through perf.

#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{FromRawFd, OwnedFd};

use libbpf_sys::{PERF_FLAG_FD_CLOEXEC, perf_event_attr};
use nix::libc;

/// A counter that is opened on one CPU, and counts the energy of the CPU's whole package.
#[derive(Debug)]
pub struct EnergyCounter(File);

impl EnergyCounter {
    /// Opens a counter. `kind` and `config` are the values that `/sys/bus/event_source/devices` shows for the PMU.
    pub fn open(kind: u32, config: u64, cpu: u32) -> io::Result<Self> {
        let attr = perf_event_attr {
            type_: kind,
            size: size_of::<perf_event_attr>() as u32,
            config,
            ..perf_event_attr::default()
        };
        perf_event_open(&attr, cpu).map(|fd| Self(File::from(fd)))
    }

    /// Returns the energy that was counted since the counter was opened, in the units of the PMU.
    pub fn read(&self) -> io::Result<u64> {
        let mut count = [0; 8];
        (&self.0).read_exact(&mut count)?;
        Ok(u64::from_ne_bytes(count))
    }
}

/// Opens a perf event that counts all processes on `cpu`.
pub fn perf_event_open(attr: &perf_event_attr, cpu: u32) -> io::Result<OwnedFd> {
    // SAFETY: `attr` has its size in its field `size`, and outlives the system call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            std::ptr::from_ref(attr),
            -1, // the process ID -1 stands for all processes
            cpu as libc::c_int,
            -1, // the group descriptor -1 means that the event joins no group of events
            libc::c_ulong::from(PERF_FLAG_FD_CLOEXEC),
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created the descriptor, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
