//! Run time and number of runs of every BPF program on the machine.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use libbpf_rs::query::ProgInfoIter;

use crate::Error;

/// While this lives, the kernel keeps run-time statistics of all programs; it reads a clock twice per run for it.
pub struct Statistics {
    _enabled: OwnedFd,
}

/// A program's figures since it was loaded; they grow while some [`Statistics`] lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    pub id: u32,
    pub name: String,
    /// `tracing`, `sched_cls`, `xdp`, ...
    pub kind: String,
    pub run_ns: u64,
    pub runs: u64,
    /// Runs that were skipped because the program was running on that CPU already.
    pub skipped: u64,
}

impl Statistics {
    pub fn enable() -> Result<Self, Error> {
        // SAFETY: takes a number, gives a descriptor or an error.
        let fd = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
        if fd < 0 {
            return Err(Error::Statistics(io::Error::from_raw_os_error(-fd)));
        }
        // SAFETY: a descriptor that was just made for us.
        Ok(Self { _enabled: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Every program that is loaded now.
    pub fn read(&self) -> Vec<Program> {
        ProgInfoIter::default()
            .map(|info| Program {
                id: info.id,
                name: info.name.to_string_lossy().into_owned(),
                kind: snake_case(&format!("{:?}", info.ty)),
                run_ns: info.run_time_ns,
                runs: info.run_cnt,
                skipped: info.recursion_misses,
            })
            .collect()
    }
}

/// `SchedCls` as the kernel writes it.
fn snake_case(name: &str) -> String {
    let mut text = String::with_capacity(name.len() + 4);
    for (at, letter) in name.char_indices() {
        if letter.is_ascii_uppercase() && at > 0 {
            text.push('_');
        }
        text.push(letter.to_ascii_lowercase());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::snake_case;

    #[test]
    fn kinds_are_written_as_the_kernel_does() {
        assert_eq!(snake_case("SchedCls"), "sched_cls");
        assert_eq!(snake_case("Xdp"), "xdp");
        assert_eq!(snake_case("RawTracepointWritable"), "raw_tracepoint_writable");
    }
}
