//! Times the networking softirqs.
//!
//! A softirq runs on top of whoever was there, and the kernel charges it to that process: forwarding in the kernel to the
//! publisher's, for example. With both totals a process can be told from what only ran on its time.

use libbpf_rs::Link;
use millrace_kernel::Error;
use millrace_kernel::object::{Loaded, embedded};

use crate::intf::SoftirqsConfig;

/// Program and tracepoint.
const PROBES: [(&str, &str); 2] = [("softirqs_entry", "softirq_entry"), ("softirqs_exit", "softirq_exit")];

/// Measures from [`attach`](Self::attach) on, until it is dropped.
pub struct Softirqs {
    object: Loaded,
    _links: Vec<Link>,
}

/// Time in NET_RX and NET_TX so far, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// On all CPUs.
    pub all_ns: u64,
    /// Of that, on top of the process.
    pub own_ns: u64,
}

impl Softirqs {
    /// `tgid` is the process ID as the initial PID namespace numbers it.
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

    pub fn times(&mut self) -> Result<Times, Error> {
        match self.object.counters("times")?[..] {
            [all_ns, own_ns, ..] => Ok(Times { all_ns, own_ns }),
            _ => Ok(Times::default()),
        }
    }
}
