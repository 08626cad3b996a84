//! The software clock of a CPU, which runs the sampler.

use std::io;
use std::os::fd::OwnedFd;

use libbpf_sys::{PERF_COUNT_SW_CPU_CLOCK, PERF_TYPE_SOFTWARE, perf_event_attr};

use crate::energy::perf_event_open;

/// Fires `hz` times a second on `cpu`, whatever runs there, idle or not, until it is closed. Programs on it run in an
/// interrupt; without one it does nothing but interrupt.
pub fn clock(cpu: u32, hz: u32) -> io::Result<OwnedFd> {
    let mut attr = perf_event_attr {
        type_: PERF_TYPE_SOFTWARE,
        size: size_of::<perf_event_attr>() as u32,
        config: u64::from(PERF_COUNT_SW_CPU_CLOCK),
        ..perf_event_attr::default()
    };
    attr.__bindgen_anon_1.sample_freq = u64::from(hz);
    attr.set_freq(1);
    perf_event_open(&attr, cpu)
}
