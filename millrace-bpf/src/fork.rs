//! A child that was forked has a copy of each descriptor, and the kernel detaches a program when the last one of its link is
//! closed: a server that goes to the background, or forks its workers, would leave its programs to them, and nobody who
//! looks after them. So children get something else in the place of links, when they begin.

#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

use nix::libc;

/// Descriptors of links. A child that was forked from one of several threads must not take a lock.
static LINKS: [AtomicI32; 1024] = [const { AtomicI32::new(NONE) }; 1024];
/// What children get instead, so that their copies of what owns a link close nothing else.
static NOTHING: AtomicI32 = AtomicI32::new(NONE);
const NONE: i32 = -1;

/// Keeps a link from children until it is dropped, which is to be before the link is closed.
pub(crate) struct Kept(Option<&'static AtomicI32>);

/// What does not fit is not kept from them, which is harmless without them.
pub(crate) fn keep_from_children(link: &impl AsFd) -> Kept {
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
