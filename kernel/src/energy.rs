//! Counters of the hardware's energy, by perf.

#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{FromRawFd, OwnedFd};

use libbpf_sys::{PERF_FLAG_FD_CLOEXEC, perf_event_attr};
use nix::libc;

/// One counter on one CPU, which stands for its package.
#[derive(Debug)]
pub struct Counter(File);

impl Counter {
    /// `kind` and `config`: as the PMU says in `/sys/bus/event_source/devices`.
    pub fn open(kind: u32, config: u64, cpu: u32) -> io::Result<Self> {
        let attr = perf_event_attr {
            type_: kind,
            size: size_of::<perf_event_attr>() as u32,
            config,
            ..perf_event_attr::default()
        };
        perf_event_open(&attr, cpu).map(|fd| Self(File::from(fd)))
    }

    /// Units since it was opened.
    pub fn read(&self) -> io::Result<u64> {
        let mut count = [0; 8];
        (&self.0).read_exact(&mut count)?;
        Ok(u64::from_ne_bytes(count))
    }
}

/// Of all processes on `cpu`.
pub fn perf_event_open(attr: &perf_event_attr, cpu: u32) -> io::Result<OwnedFd> {
    let (all_processes, no_group) = (-1, -1);
    // SAFETY: `attr` says its size, and outlives the call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            std::ptr::from_ref(attr),
            all_processes,
            cpu as libc::c_int,
            no_group,
            libc::c_ulong::from(PERF_FLAG_FD_CLOEXEC),
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that was just made for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
