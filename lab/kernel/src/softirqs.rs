//! Times all networking softirqs, and separately those that interrupt one process.
//!
//! A softirq interrupts any process, and the kernel charges the time to that process. For example, a publisher of media
//! on the same machine may be charged for a relay's forwarding in the kernel. The two totals separate a process' own
//! time from that of the softirqs that interrupted it.

use libbpf_rs::Link;
use millrace_kernel::Error;
use millrace_kernel::object::{LoadedObject, embedded};

use crate::intf::SoftirqsConfig;

/// Programs and the tracepoints that they are attached to.
const PROBES: [(&str, &str); 2] = [("softirqs_entry", "softirq_entry"), ("softirqs_exit", "softirq_exit")];

/// A measurement of softirq time. It runs from [`attach`](Self::attach) until it is dropped.
pub struct Softirqs {
    object: LoadedObject,
    _links: Vec<Link>,
}

/// Time in the softirqs NET_RX and NET_TX since the start of the measurement, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SoftirqTimes {
    /// Time of networking softirqs on all CPUs.
    pub all_ns: u64,
    /// Time of networking softirqs that interrupted the measured process.
    pub own_ns: u64,
}

impl Softirqs {
    /// Attaches the programs. `tgid` is the measured process' ID in the initial PID namespace.
    pub fn attach(tgid: u32) -> Result<Self, Error> {
        let mut open = embedded!("softirqs.bpf.o").open()?;
        open.configure(&SoftirqsConfig { tgid })?;
        let object = open.load()?;
        let links = PROBES.map(|(program, tracepoint)| {
            let attached = object.program(program)?.attach_raw_tracepoint(tracepoint);
            attached.map_err(|source| Error::Tracepoint { tracepoint, source })
        });
        let links = links.into_iter().collect::<Result<_, _>>()?;
        Ok(Self { object, _links: links })
    }

    /// Returns the softirq times since the programs were attached.
    pub fn times(&mut self) -> Result<SoftirqTimes, Error> {
        match self.object.counters("times")?[..] {
            [all_ns, own_ns, ..] => Ok(SoftirqTimes { all_ns, own_ns }),
            _ => Ok(SoftirqTimes::default()),
        }
    }
}
