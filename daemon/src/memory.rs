//! What the allocator of a daemon keeps of memory that is free goes back to the system: each thread's arena keeps its peak otherwise, for
//! ever after a flood.

use std::time::{Duration, Instant};

/// Looking takes microseconds, giving back milliseconds: no more often than this.
const INTERVAL: Duration = Duration::from_secs(5);
/// Bytes that are worth it, if they are also a third of all that is resident.
const WORTH: usize = 4 << 20;

/// Decides when memory is given back.
#[derive(Debug, Default)]
pub struct Memory {
    last: Option<Instant>,
    /// Resident bytes that giving back did not reduce any further, or the least since.
    floor: usize,
}

impl Memory {
    /// Whether it is time to look.
    pub fn is_time(&mut self, now: Instant) -> bool {
        let soon = self.last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL);
        if !soon {
            self.last = Some(now);
        }
        !soon
    }

    /// Gives back what is worth it. Blocks for some milliseconds if that is much.
    pub fn look(&mut self) {
        if let Some(resident) = resident()
            && self.is_worth(resident, in_use)
        {
            give_back();
            self.floor = self::resident().unwrap_or(resident);
        }
    }

    /// Whether so much is resident that is not in use, and was not at the last time.
    fn is_worth(&mut self, resident: usize, in_use: impl FnOnce() -> usize) -> bool {
        self.floor = self.floor.min(resident);
        if resident < self.floor.saturating_add(WORTH) {
            return false;
        }
        resident.saturating_sub(in_use()) >= WORTH.max(resident / 3)
    }
}

/// Bytes of memory of the process's own that are there (proc(5), `statm`).
fn resident() -> Option<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = statm.split(' ').skip(1).map(str::parse::<usize>);
    let (resident, shared) = (pages.next()?.ok()?, pages.next()?.ok()?);
    Some(resident.saturating_sub(shared) * rustix::param::page_size())
}

/// Bytes that the allocator has given out.
#[cfg_attr(target_env = "gnu", expect(unsafe_code, reason = "a function of the C library"))]
fn in_use() -> usize {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it takes the allocator's own locks, and changes nothing.
        let info = unsafe { libc::mallinfo2() };
        info.uordblks + info.hblkhd
    }
    // Nothing is known, and nothing can be given back.
    #[cfg(not(target_env = "gnu"))]
    usize::MAX
}

#[cfg_attr(target_env = "gnu", expect(unsafe_code, reason = "a function of the C library"))]
fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes the allocator's own locks, and moves nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn what_is_resident_and_not_in_use_goes_back_once() {
        let mut memory = Memory { floor: 4 * MIB, ..Memory::default() };
        assert!(!memory.is_worth(5 * MIB, || panic!("it has hardly grown")));
        assert!(!memory.is_worth(60 * MIB, || 50 * MIB), "most of it is in use");
        assert!(!memory.is_worth(60 * MIB, || 41 * MIB));
        assert!(memory.is_worth(60 * MIB, || 40 * MIB));
        memory.floor = 58 * MIB;
        assert!(!memory.is_worth(60 * MIB, || 2 * MIB), "it could not be given back");
        assert!(!memory.is_worth(3 * MIB, || 2 * MIB));
        assert!(memory.is_worth(8 * MIB, || 2 * MIB), "it had gone by itself");
    }

    /// Other tests of this process allocate meanwhile, but not as much as this.
    #[test]
    #[cfg(target_env = "gnu")]
    fn memory_goes_back() {
        const SIZE: usize = 1000;
        let mut memory = Memory { floor: resident().unwrap(), ..Memory::default() };
        let before = resident().unwrap();
        // Every hundredth stays, so that no large piece at the end is free.
        let mut kept: Vec<_> = (0..100_000).map(|_| vec![1u8; SIZE]).collect();
        let peak = resident().unwrap();
        assert!(peak > before + 80 * MIB, "{before} {peak}");
        let mut at = 0;
        kept.retain(|_| {
            at += 1;
            at % 100 == 0
        });
        memory.look();
        let after = resident().unwrap();
        assert!(after < before + 40 * MIB, "{before} {peak} {after}, {} kept", kept.len());
    }
}
