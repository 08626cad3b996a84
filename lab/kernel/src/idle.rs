//! Times the idle task of each CPU by a clock, as a reference for programs that account CPU time by ticks or samples.
//!
//! Softirqs that interrupt the idle task count as busy, and hardware interrupts count as idle.

use libbpf_rs::{Link, MapCore, MapFlags};
use millrace_kernel::Error;
use millrace_kernel::clock::monotonic_ns;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{LoadedObject, embedded};

/// A measurement of idle time. It runs from [`attach`](Self::attach) until it is dropped.
pub struct Idle {
    object: LoadedObject,
    _links: Vec<Link>,
}

impl Idle {
    /// Starts to measure the idle time of all CPUs.
    pub fn attach() -> Result<Self, Error> {
        const PROGRAMS: [(&str, &str); 3] = [
            ("idle_switch", "sched_switch"),
            ("idle_softirq_entry", "softirq_entry"),
            ("idle_softirq_exit", "softirq_exit"),
        ];
        let object = embedded!("idle.bpf.o").open()?.load()?;
        let mut links = Vec::new();
        for (program, tracepoint) in PROGRAMS {
            let link = object.program(program)?.attach_trace();
            links.push(link.map_err(|source| Error::Tracepoint { tracepoint, source })?);
        }
        Ok(Self { object, _links: links })
    }

    /// Returns the idle time so far in ns, by CPU number. An idle task that ran already at [`attach`](Self::attach) is
    /// timed only after it has been scheduled again.
    pub fn times(&mut self) -> Result<Vec<u64>, Error> {
        let map = self.object.map("idle")?;
        let words = map.lookup_percpu(&0u32.to_ne_bytes(), MapFlags::ANY);
        let words = words.map_err(|source| Error::Read { what: "idle", source })?;
        let now = monotonic_ns();
        let word = |bytes: &Vec<u8>| u64::from_bytes(bytes).unwrap_or(0).cast_signed();
        Ok(words.iter().flatten().map(|bytes| so_far(word(bytes), now)).collect())
    }
}

fn so_far(word: i64, now_ns: u64) -> u64 {
    match u64::try_from(word) {
        Ok(ns) => ns,
        // The idle task runs now, so the map's value (`word`) is negative. `-word` is the idle task's start time minus
        // its earlier idle time.
        Err(_) => now_ns.saturating_sub(word.unsigned_abs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_includes_the_running_idle_task() {
        assert_eq!(so_far(0, 1000), 0);
        assert_eq!(so_far(70, 1000), 70);
        // The idle task ran for 70 ns in the past. It runs again since time 900, which is 100 ns ago.
        assert_eq!(so_far(70 - 900, 1000), 170);
    }
}
