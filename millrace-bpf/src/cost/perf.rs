//! The software clock of a CPU, which runs the sampler.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use libbpf_sys::{PERF_COUNT_SW_CPU_CLOCK, PERF_FLAG_FD_CLOEXEC, PERF_TYPE_SOFTWARE, perf_event_attr};
use nix::libc;

/// Fires `hz` times a second on `cpu`, whatever runs there, idle or not. Programs on it run in an interrupt.
pub(super) fn clock(cpu: u32, hz: u32) -> io::Result<OwnedFd> {
    let mut attr = perf_event_attr {
        type_: PERF_TYPE_SOFTWARE,
        size: size_of::<perf_event_attr>() as u32,
        config: u64::from(PERF_COUNT_SW_CPU_CLOCK),
        ..perf_event_attr::default()
    };
    attr.__bindgen_anon_1.sample_freq = u64::from(hz);
    attr.set_freq(1);
    let (all_processes, no_group) = (-1, -1);
    // SAFETY: `attr` says its size, and outlives the call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attr,
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
