//! BPF programs for measurements, and the handles that load them, for the laboratory and for tests.
//!
//! | object | hook | handle | does |
//! | --- | --- | --- | --- |
//! | `probe` | TC, both ways | [`probe::PacketProbe`] | stamps the packets that pass an interface |
//! | `flood` | XDP | [`flood::Flood`] | sends Initials from forged addresses, to measure the gate |
//! | `cpumap` | XDP | [`contexts::Cpumap`] | hands packets to a thread of another CPU |
//! | `recursion` | a tracepoint | [`recursion::Recursion`] | triggers itself, so that the kernel skips the nested run |
//! | `softirqs`, `syscalls`, `idle` | tracepoints | [`softirqs::Softirqs`], [`syscalls::Syscalls`], [`idle::Idle`] | measure softirq time, system calls and idle time |
#![deny(missing_docs)]

pub mod contexts;
pub mod flood;
pub mod idle;
mod intf;
pub mod probe;
pub mod recursion;
pub mod softirqs;
pub mod syscalls;

pub use millrace_kernel::Error;
