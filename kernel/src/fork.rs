//! Closes the descriptors of BPF links in forked children. The kernel detaches a program when the last descriptor of
//! its link is closed, and a child inherits a copy of each descriptor. So programs would stay attached after a server
//! that forked workers has ended. This module closes the child's copies when the child begins.

#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

use nix::libc;

/// The descriptors of links. The table is lock-free, because a child of a process with several threads must not take a
/// lock that another thread may have held.
static LINKS: [AtomicI32; 1024] = [const { AtomicI32::new(NONE) }; 1024];
/// The descriptor of `/dev/null` that replaces descriptors of links in children. A child also has a copy of the Rust
/// value that owns a link. When that copy is dropped, it closes the replacement, and not an unrelated descriptor.
static NOTHING: AtomicI32 = AtomicI32::new(NONE);
const NONE: i32 = -1;

/// Makes forked children close their copy of a link's descriptor, as long as this value exists. Drop it before the link
/// is closed.
pub struct ForkSafeLink(Option<&'static AtomicI32>);

/// Makes forked children close their copy of a link's descriptor. If the table of descriptors is full, they keep the
/// copy, which only matters if the process forks.
pub fn keep_from_children(link: &impl AsFd) -> ForkSafeLink {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let nothing = File::open("/dev/null").map_or(NONE, IntoRawFd::into_raw_fd);
        NOTHING.store(nothing, Ordering::Relaxed);
        // SAFETY: the handler only makes system calls that a child of a multithreaded process may make. The only error
        // is lack of memory, and the handler is then not installed.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    let fd = link.as_fd().as_raw_fd();
    let taken =
        |slot: &&AtomicI32| slot.compare_exchange(NONE, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    ForkSafeLink(LINKS.iter().find(taken))
}

impl Drop for ForkSafeLink {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.store(NONE, Ordering::Relaxed);
        }
    }
}

extern "C" fn in_child() {
    let nothing = NOTHING.load(Ordering::Relaxed);
    for fd in LINKS.iter().map(|slot| slot.swap(NONE, Ordering::Relaxed)).filter(|fd| *fd != NONE) {
        // SAFETY: `dup3` and `close` only change the child's descriptor table. In the child, only the Rust value that
        // owns the link uses this descriptor.
        unsafe {
            if libc::dup3(nothing, fd, libc::O_CLOEXEC) < 0 {
                libc::close(fd);
            }
        }
    }
}
