//! Times the idle task of each CPU, by the clock: a reference for what accounts CPU time by ticks or samples.
//!
//! Softirqs and hardware interrupts that run on top of the idle task are in its time.

use libbpf_rs::{Link, MapCore, MapFlags};
use millrace_kernel::Error;
use millrace_kernel::clock::monotonic_ns;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{Loaded, embedded};

/// Measures from [`attach`](Self::attach) on, until it is dropped.
pub struct Idle {
    object: Loaded,
    _link: Link,
}

impl Idle {
    pub fn attach() -> Result<Self, Error> {
        const TRACEPOINT: &str = "sched_switch";
        let object = embedded!("idle.bpf.o").open()?.load()?;
        let link = object.program("idle_switch")?.attach_trace();
        let link = link.map_err(|source| Error::Tracepoint { tracepoint: TRACEPOINT, source })?;
        Ok(Self { object, _link: link })
    }

    /// Nanoseconds so far, by CPU number. An idle task that was running at [`attach`](Self::attach) counts from its next
    /// turn on.
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
        // It runs, since `-word` less what was before.
        Err(_) => now_ns.saturating_sub(word.unsigned_abs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_counts_up_to_now() {
        assert_eq!(so_far(0, 1000), 0);
        assert_eq!(so_far(70, 1000), 70);
        // 70 before, and since 900.
        assert_eq!(so_far(70 - 900, 1000), 170);
    }
}
