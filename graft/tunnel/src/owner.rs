//! Creates sockets that belong to another user, as netfilter sees it.

use std::{io, os::fd::AsFd};

use millrace_graft_kernel::hook::SocketOwner;
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use socket2::SockRef;

/// The user and group as which this thread creates files and sockets. Dropping this value restores the previous ones.
struct Guise(Uid, Gid);

impl Guise {
    fn take(owner: SocketOwner) -> io::Result<Self> {
        let uid = Uid::from_raw(owner.uid);
        let gid = Gid::from_raw(owner.gid);
        let before = (setfsgid(gid), setfsuid(uid));
        let guise = Self(before.1, before.0);
        // `setfsuid` and `setfsgid` return the previous identity and no error, so a second call shows whether the
        // first one has worked.
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

/// Creates a socket that belongs to this owner: netfilter's `skuid`, `skgid` and `mark`, and routing rules, match the
/// owner for packets that the socket sends.
///
/// # Errors
/// The socket cannot be created, or this process may not act as that owner.
pub fn socket_of<S: AsFd>(owner: SocketOwner, make: impl FnOnce() -> io::Result<S>) -> io::Result<S> {
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
    fn socket_is_created_with_the_given_uid_and_thread_keeps_its_uid() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP socket_is_created_with_the_given_uid_and_thread_keeps_its_uid: needs root");
            return;
        }
        let make = || std::net::UdpSocket::bind(("127.0.0.1", 0));
        let owned = socket_of(SocketOwner { uid: 7, gid: 8, mark: 9 }, make).unwrap();
        let about = fstat(&owned).unwrap();
        assert_eq!((about.st_uid, about.st_gid), (7, 8));
        assert_eq!(SockRef::from(&owned).mark().unwrap(), 9);
        let about = fstat(make().unwrap()).unwrap();
        assert_eq!((about.st_uid, about.st_gid), (0, nix::unistd::getegid().as_raw()));
    }
}
