//! Counts of system calls by name.

use nix::libc;
use serde_json::{Value, json};

/// Counts of the system calls of all threads of one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyscallCounts {
    pub total: u64,
    named: [u64; SyscallCounts::NAMED.len()],
}

impl SyscallCounts {
    /// Calls that are counted by name: the name and its system call numbers.
    pub const NAMED: [(&'static str, &'static [libc::c_long]); 6] = [
        ("futex", &[libc::SYS_futex]),
        #[cfg(target_arch = "x86_64")]
        ("epoll_wait", &[libc::SYS_epoll_wait, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2]),
        #[cfg(not(target_arch = "x86_64"))]
        ("epoll_wait", &[libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2]),
        ("clock_nanosleep", &[libc::SYS_clock_nanosleep]),
        ("sendmsg", &[libc::SYS_sendmsg]),
        ("sendmmsg", &[libc::SYS_sendmmsg]),
        ("recvmsg", &[libc::SYS_recvmsg, libc::SYS_recvmmsg]),
    ];

    /// Builds the counts from an array that is indexed by system call number.
    pub fn from_counts(counts: &[u64]) -> Self {
        let count = |number: &libc::c_long| {
            usize::try_from(*number).ok().and_then(|index| counts.get(index)).copied().unwrap_or(0)
        };
        Self {
            total: counts.iter().sum(),
            named: Self::NAMED.map(|(_, numbers)| numbers.iter().map(count).sum()),
        }
    }

    /// Returns the count of the call at this index of [`Self::NAMED`].
    pub fn named(&self, index: usize) -> f64 {
        self.named.get(index).map_or(0.0, |count| *count as f64)
    }

    pub fn json(&self) -> Value {
        let mut all = json!({ "total": self.total });
        for ((name, _), count) in Self::NAMED.iter().zip(self.named) {
            all[*name] = count.into();
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_system_call_number_has_one_name() {
        let mut counts = vec![0; 512];
        for (number, count) in [(libc::SYS_futex, 5), (libc::SYS_recvmsg, 3), (libc::SYS_recvmmsg, 4)] {
            counts[number as usize] = count;
        }
        counts[libc::SYS_getpid as usize] = 7;
        let calls = SyscallCounts::from_counts(&counts);
        let expected = json!({
            "total": 19, "futex": 5, "epoll_wait": 0, "clock_nanosleep": 0, "sendmsg": 0, "sendmmsg": 0, "recvmsg": 7
        });
        assert_eq!(calls.json(), expected);
        let mut numbers: Vec<_> = SyscallCounts::NAMED.iter().flat_map(|(_, numbers)| *numbers).collect();
        let count = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), count);
    }
}
