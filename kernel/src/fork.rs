//! Keeps links from forked children. The kernel detaches a program when the last descriptor of its link is closed,
//! and a child has a copy of each descriptor. So programs would outlive a server that goes to the background or forks
//! workers. This module replaces a child's copies when the child begins.

#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

use nix::libc;

/// Descriptors of links. It is lock-free, because a child forked from one of several threads must not take a lock.
static LINKS: [AtomicI32; 1024] = [const { AtomicI32::new(NONE) }; 1024];
/// Descriptor that children get instead. The child's copy of the link's owner then closes this one, and not an
/// unrelated descriptor.
static NOTHING: AtomicI32 = AtomicI32::new(NONE);
const NONE: i32 = -1;

/// Keeps a link from children until it is dropped. It has to be dropped before the link is closed.
pub struct ForkSafeLink(Option<&'static AtomicI32>);

/// Keeps a link from children. Links beyond the table's size are not kept, which only matters if the process forks.
pub fn keep_from_children(link: &impl AsFd) -> ForkSafeLink {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let nothing = File::open("/dev/null").map_or(NONE, IntoRawFd::into_raw_fd);
        NOTHING.store(nothing, Ordering::Relaxed);
        // SAFETY: the handler only makes system calls that a child of a multithreaded process may make. The only
        // error is lack of memory, and leaves things as they were.
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
        // SAFETY: both calls only change the child's descriptor table, and only the link's owner uses this descriptor
        // there.
        unsafe {
            if libc::dup3(nothing, fd, libc::O_CLOEXEC) < 0 {
                libc::close(fd);
            }
        }
    }
}
