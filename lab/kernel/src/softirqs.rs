//! Times the networking softirqs.
//!
//! A softirq runs on top of any process, and the kernel charges its time to that process: for example, forwarding in
//! the kernel to the publisher's. Both totals together separate a process' own time from softirqs on top of it.

use libbpf_rs::Link;
use millrace_kernel::Error;
use millrace_kernel::object::{LoadedObject, embedded};

use crate::intf::SoftirqsConfig;

/// Programs and their tracepoints.
const PROBES: [(&str, &str); 2] = [("softirqs_entry", "softirq_entry"), ("softirqs_exit", "softirq_exit")];

/// A measurement from [`attach`](Self::attach) until it is dropped.
pub struct Softirqs {
    object: LoadedObject,
    _links: Vec<Link>,
}

/// Time in NET_RX and NET_TX so far, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SoftirqTimes {
    /// Networking softirqs of all CPUs.
    pub all_ns: u64,
    /// The part that ran on top of the process.
    pub own_ns: u64,
}

impl Softirqs {
    /// Attaches the programs. `tgid` is the process ID as the initial PID namespace numbers it.
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

    pub fn times(&mut self) -> Result<SoftirqTimes, Error> {
        match self.object.counters("times")?[..] {
            [all_ns, own_ns, ..] => Ok(SoftirqTimes { all_ns, own_ns }),
            _ => Ok(SoftirqTimes::default()),
        }
    }
}
