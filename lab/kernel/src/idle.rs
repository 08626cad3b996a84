//! Times the idle task of each CPU by the clock, as a reference for programs that account CPU time by ticks or samples.
//!
//! Softirqs that interrupt the idle task are not in its time, and hardware interrupts are.

use libbpf_rs::{Link, MapCore, MapFlags};
use millrace_kernel::Error;
use millrace_kernel::clock::monotonic_ns;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{LoadedObject, embedded};

/// A measurement from [`attach`](Self::attach) until it is dropped.
pub struct Idle {
    object: LoadedObject,
    _links: Vec<Link>,
}

impl Idle {
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

    /// Returns nanoseconds so far, by CPU number. An idle task that was running at [`attach`](Self::attach) counts from
    /// its next turn on.
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
        // The idle task runs now. `-word` is the time when it began minus the idle time before that.
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
        // 70 ns before, and 100 ns since 900.
        assert_eq!(so_far(70 - 900, 1000), 170);
    }
}
