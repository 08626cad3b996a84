//! Passes frames between two TAP devices, as between a virtual machine and its host. Each frame has a virtio-net
//! header, so that super-packets and unfinished checksums pass unchanged.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, poll};

/// Largest frame with its virtio-net header, bytes.
const FRAME_MOST: usize = 65_700;
/// Interval at which a thread checks whether it must end, ms.
const LOOK_MS: u8 = 100;

// Flags of linux/if_tun.h: what the kernel may leave to the reader of the device. USO needs Linux 6.2.
const TUN_F_CSUM: u32 = 0x01;
const TUN_F_TSO4: u32 = 0x02;
const TUN_F_TSO6: u32 = 0x04;
const TUN_F_USO4: u32 = 0x20;
const TUN_F_USO6: u32 = 0x40;
const FINISHED: u32 = 0;
const CHECKSUMS: u32 = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6;
const ALL: u32 = CHECKSUMS | TUN_F_USO4 | TUN_F_USO6;

nix::ioctl_write_ptr_bad!(
    set_interface,
    nix::request_code_write!(b'T', 202, size_of::<libc::c_int>()),
    libc::ifreq
);
nix::ioctl_write_int_bad!(set_offload, nix::request_code_write!(b'T', 208, size_of::<libc::c_uint>()));

/// Creates a TAP or TUN device in the calling thread's namespace. Closing its descriptor removes the device.
pub fn open(name: &str, tun: bool, offloads: bool) -> io::Result<OwnedFd> {
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: zeros are valid for `ifreq`, and stand for an empty request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()).take(libc::IFNAMSIZ - 1) {
        *to = from as libc::c_char;
    }
    let kind = if tun { libc::IFF_TUN } else { libc::IFF_TAP };
    request.ifr_ifru.ifru_flags = (kind | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: the descriptor is open, and the request outlives the call.
    unsafe { set_interface(file.as_raw_fd(), &raw const request) }?;
    let wanted: &[u32] = if offloads { &[ALL, CHECKSUMS] } else { &[FINISHED] };
    // SAFETY: the descriptor is open, and no pointers are passed.
    let set = |flags: &u32| unsafe { set_offload(file.as_raw_fd(), *flags as libc::c_int) };
    wanted.iter().map(set).find(Result::is_ok).unwrap_or(Err(Errno::EINVAL))?;
    // SAFETY: the descriptor is open, and no pointers are passed.
    Errno::result(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_RDWR | libc::O_NONBLOCK) })?;
    Ok(file.into())
}

/// Threads that pass frames in both directions. They end when this is dropped.
pub struct Shuttle {
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Shuttle {
    pub fn start(a: OwnedFd, b: OwnedFd) -> io::Result<Self> {
        let a = Arc::new(a);
        let b = Arc::new(b);
        let mut shuttle = Self { ended: Arc::default(), threads: Vec::new() };
        for (from, to) in [(&a, &b), (&b, &a)] {
            let from = Arc::clone(from);
            let to = Arc::clone(to);
            let ended = Arc::clone(&shuttle.ended);
            let carry = move || carry(&from, &to, &ended);
            shuttle.threads.push(std::thread::Builder::new().name("shuttle".into()).spawn(carry)?);
        }
        Ok(shuttle)
    }
}

impl Drop for Shuttle {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // a thread that panicked has ended as well
        }
    }
}

fn carry(from: &OwnedFd, to: &OwnedFd, ended: &AtomicBool) {
    let mut buffer = vec![0; FRAME_MOST];
    while !ended.load(Ordering::Relaxed) {
        match nix::unistd::read(from, &mut buffer) {
            // A write error is ignored: a frame that the other device does not accept is lost, as on a real link.
            Ok(len) => drop(nix::unistd::write(to, buffer.get(..len).unwrap_or_default())),
            Err(Errno::EAGAIN) => drop(poll(&mut [PollFd::new(from.as_fd(), PollFlags::POLLIN)], LOOK_MS)),
            // The device is not up yet, so try again later.
            Err(_) => drop(poll(&mut [], LOOK_MS)),
        }
    }
}
