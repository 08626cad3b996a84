//! Links are kept from forked children. The kernel detaches a program when the last descriptor of its link is closed, and a
//! child has a copy of each descriptor. So programs would outlive a server that goes to the background or forks workers,
//! with nobody to look after them. Here a child's copies are replaced when it begins.

#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

use nix::libc;

/// Descriptors of links. A child that was forked from one of several threads must not take a lock.
static LINKS: [AtomicI32; 1024] = [const { AtomicI32::new(NONE) }; 1024];
/// What children get instead: their copy of the link's owner then closes this, and not somebody else's descriptor.
static NOTHING: AtomicI32 = AtomicI32::new(NONE);
const NONE: i32 = -1;

/// Keeps a link from children until it is dropped. To be dropped before the link is closed.
pub struct Kept(Option<&'static AtomicI32>);

/// More links than there is room for are not kept, which only matters if there are children.
pub fn keep_from_children(link: &impl AsFd) -> Kept {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let nothing = File::open("/dev/null").map_or(NONE, IntoRawFd::into_raw_fd);
        NOTHING.store(nothing, Ordering::Relaxed);
        // SAFETY: the handler only makes system calls that a child of a process with threads may make. An error is
        // want of memory, and leaves things as they would be.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    let fd = link.as_fd().as_raw_fd();
    let taken =
        |slot: &&AtomicI32| slot.compare_exchange(NONE, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    Kept(LINKS.iter().find(taken))
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.store(NONE, Ordering::Relaxed);
        }
    }
}

extern "C" fn in_child() {
    let nothing = NOTHING.load(Ordering::Relaxed);
    for fd in LINKS.iter().map(|slot| slot.swap(NONE, Ordering::Relaxed)).filter(|fd| *fd != NONE) {
        // SAFETY: both only change the child's table of descriptors, where nothing but a link's owner uses this one.
        unsafe {
            if libc::dup3(nothing, fd, libc::O_CLOEXEC) < 0 {
                libc::close(fd);
            }
        }
    }
}
