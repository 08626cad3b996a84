//! Returns free memory of the C library's allocator to the system. After a flood of requests, the arena of each thread
//! would otherwise keep its peak size for ever.

use std::time::{Duration, Instant};

/// Shortest time between two checks how much memory is free. A check takes microseconds, while returning memory takes
/// milliseconds.
const INTERVAL: Duration = Duration::from_secs(5);
/// Least number of free bytes that are worth returning to the system. The free bytes must also be a third of all
/// resident memory.
const WORTH: usize = 4 << 20;

/// The state that decides when free memory is returned to the system.
#[derive(Debug, Default)]
pub struct MemoryTrimmer {
    last: Option<Instant>,
    /// Lowest number of resident bytes since memory was last returned to the system.
    floor: usize,
}

impl MemoryTrimmer {
    /// Reports whether [`look`](Self::look) should be called now, because the last check is long enough ago.
    pub fn is_time(&mut self, now: Instant) -> bool {
        let soon = self.last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL);
        if !soon {
            self.last = Some(now);
        }
        !soon
    }

    /// Checks how much memory of this process is free, and returns it to the system if it is enough. Returning memory
    /// blocks for some milliseconds.
    pub fn look(&mut self) {
        if let Some(resident) = resident()
            && self.is_worth(resident, in_use)
        {
            give_back();
            self.floor = self::resident().unwrap_or(resident);
        }
    }

    /// Reports whether resident memory has grown enough since the last trim, and enough of it is free.
    fn is_worth(&mut self, resident: usize, in_use: impl FnOnce() -> usize) -> bool {
        self.floor = self.floor.min(resident);
        if resident < self.floor.saturating_add(WORTH) {
            return false;
        }
        resident.saturating_sub(in_use()) >= WORTH.max(resident / 3)
    }
}

/// Returns the resident bytes of this process that are not shared (proc(5), `statm`).
fn resident() -> Option<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = statm.split(' ').skip(1).map(str::parse::<usize>);
    let resident = pages.next()?.ok()?;
    let shared = pages.next()?.ok()?;
    Some(resident.saturating_sub(shared) * rustix::param::page_size())
}

/// Returns the number of bytes that the program has allocated now.
#[cfg_attr(target_env = "gnu", expect(unsafe_code, reason = "a function of the C library"))]
fn in_use() -> usize {
    #[cfg(target_env = "gnu")]
    {
        // `mallinfo2` takes the allocator's lock while it runs, and changes nothing.
        let info = unsafe { libc::mallinfo2() };
        info.uordblks + info.hblkhd
    }
    // If the allocator reports nothing, all memory counts as used, so nothing is returned.
    #[cfg(not(target_env = "gnu"))]
    usize::MAX
}

#[cfg_attr(target_env = "gnu", expect(unsafe_code, reason = "a function of the C library"))]
fn give_back() {
    #[cfg(target_env = "gnu")]
    // `malloc_trim` takes the allocator's lock while it runs, and does not move memory that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn allocator_memory_is_trimmed_if_a_third_is_free_and_can_be_returned() {
        let mut memory = MemoryTrimmer { floor: 4 * MIB, ..MemoryTrimmer::default() };
        assert!(!memory.is_worth(5 * MIB, || panic!("it has hardly grown")));
        assert!(!memory.is_worth(60 * MIB, || 50 * MIB), "most of it is in use");
        assert!(!memory.is_worth(60 * MIB, || 41 * MIB));
        assert!(memory.is_worth(60 * MIB, || 40 * MIB));
        memory.floor = 58 * MIB;
        assert!(!memory.is_worth(60 * MIB, || 2 * MIB), "it could not be given back");
        assert!(!memory.is_worth(3 * MIB, || 2 * MIB));
        assert!(memory.is_worth(8 * MIB, || 2 * MIB), "it had gone by itself");
    }

    /// The test tolerates a difference of 40 MiB, because other tests of this process allocate memory at the same time.
    #[test]
    #[cfg(target_env = "gnu")]
    fn memory_of_freed_blocks_is_returned_to_the_system() {
        const SIZE: usize = 1000;
        let mut memory = MemoryTrimmer { floor: resident().unwrap(), ..MemoryTrimmer::default() };
        let before = resident().unwrap();
        // Every hundredth block stays allocated, so that the free memory is not one piece at the end of the heap.
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
