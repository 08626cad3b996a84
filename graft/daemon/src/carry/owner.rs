//! Sockets that belong to somebody else, as firewalls see it.

use std::{io, os::fd::AsFd};

use millrace_graft_kernel::hook::Owner;
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use socket2::SockRef;

/// The identity of the thread for files and sockets that it makes, until this is dropped.
struct Guise(Uid, Gid);

impl Guise {
    fn take(owner: Owner) -> io::Result<Self> {
        let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
        let before = (setfsgid(gid), setfsuid(uid));
        let guise = Self(before.1, before.0);
        // The calls say who it was before, and nothing of errors.
        match (setfsgid(gid), setfsuid(uid)) == (gid, uid) {
            true => Ok(guise),
            false => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }
}

impl Drop for Guise {
    fn drop(&mut self) {
        setfsuid(self.0);
        setfsgid(self.1);
    }
}

/// Makes a socket of this owner: netfilter's `skuid`, `skgid` and `mark` see the owner in what it sends, and routing rules, too.
///
/// # Errors
/// There is no socket, or this process may not make one for that owner.
pub fn socket_of<S: AsFd>(owner: Owner, make: impl FnOnce() -> io::Result<S>) -> io::Result<S> {
    let guise = Guise::take(owner)?;
    let socket = make();
    drop(guise);
    let socket = socket?;
    if owner.mark != 0 {
        SockRef::from(&socket).set_mark(owner.mark)?;
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::fstat;

    use super::*;

    #[test]
    fn socket_belongs_to_its_owner_and_the_thread_to_itself() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP socket_belongs_to_its_owner_and_the_thread_to_itself: needs root");
            return;
        }
        let make = || std::net::UdpSocket::bind(("127.0.0.1", 0));
        let owned = socket_of(Owner { uid: 7, gid: 8, mark: 9 }, make).unwrap();
        let about = fstat(&owned).unwrap();
        assert_eq!((about.st_uid, about.st_gid), (7, 8));
        assert_eq!(SockRef::from(&owned).mark().unwrap(), 9);
        let about = fstat(make().unwrap()).unwrap();
        assert_eq!((about.st_uid, about.st_gid), (0, nix::unistd::getegid().as_raw()));
    }
}
