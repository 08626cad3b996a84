//! Where applications come in: a Unix socket that all users may connect to, since the kernel says who each one is.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::PermissionsExt as _, net::UnixStream},
    },
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use millrace_graft::message::control::Control;
use nix::unistd::{Gid, Uid, User, getgrouplist};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
    sockopt::socket_peercred,
};

use crate::socket::put;

const BACKLOG: i32 = 64;

/// Its file goes when it is dropped.
pub struct Door {
    path: PathBuf,
    socket: OwnedFd,
}

/// Who is at the other end of a connection, when it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    pub user: u32,
    pub groups: Vec<u32>,
}

impl Door {
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        Self::try_open(path).with_context(|| format!("socket {}", path.display()))
    }

    fn try_open(path: &Path) -> anyhow::Result<Self> {
        match Control::connect(path) {
            Ok(_) => bail!("another daemon answers on it; choose another with --messages-socket"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // Of a daemon that died. It is replaced below.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) if UnixStream::connect(path).is_err() => return Err(error.into()),
            Err(_) => bail!("another daemon answers on it; choose another with --messages-socket"),
        }
        let socket = put(path, |new| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            bind(&socket, &SocketAddrUnix::new(new)?)?;
            listen(&socket, BACKLOG)?;
            std::fs::set_permissions(new, std::fs::Permissions::from_mode(0o666))?;
            Ok(socket)
        })?;
        Ok(Self { path: path.to_owned(), socket })
    }

    /// The next one, if there is one.
    pub fn accept(&self) -> io::Result<Option<(Control, Caller)>> {
        let connection = match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(connection) => connection,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let caller = Caller::of(&connection)?;
        Ok(Some((Control::from(connection), caller)))
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Caller {
    fn of(connection: impl AsFd) -> io::Result<Self> {
        let who = socket_peercred(connection)?;
        let (user, group) = (who.uid.as_raw(), who.gid.as_raw());
        // Those that the user has by name, besides.
        let named = User::from_uid(Uid::from_raw(user)).ok().flatten();
        let name = named.and_then(|user| std::ffi::CString::new(user.name).ok());
        let groups = name.and_then(|name| getgrouplist(&name, Gid::from_raw(group)).ok()).unwrap_or_default();
        let groups = groups.into_iter().map(Gid::as_raw).chain([group]).collect();
        Ok(Self { user, groups })
    }
}
