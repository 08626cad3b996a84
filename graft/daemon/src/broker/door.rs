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
use millrace_base::control::Control;
use millrace_daemon::{closer::Closer, socket::put};
use millrace_kernel::unix::peer_groups;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
    sockopt::socket_peercred,
};

use super::{
    line::Line,
    places::{Places, Pool},
};

const BACKLOG: i32 = 64;
/// Connections at once, and of one user, of those whom the settings name.
const NAMED: Pool = Pool { all: 512, of_user: 64 };
/// The same of all others, who get nothing but a refusal.
const STRANGERS: Pool = Pool { all: 64, of_user: 8 };

/// The listening socket. Its file goes when it is dropped.
pub struct Door {
    path: PathBuf,
    socket: OwnedFd,
    closer: Closer,
    named: Places,
    strangers: Places,
}

/// A connection that came to the socket.
pub enum Arrival {
    Application(Line, Caller),
    /// All places that this user may have are taken.
    TurnedAway(Caller),
}

/// Who is at the other end of a connection, when it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    pub user: u32,
    pub groups: Vec<u32>,
}

impl Door {
    /// Listens. Inside of a runtime.
    ///
    /// # Errors
    /// Another daemon answers there, or there can be no socket.
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
        let closer = Closer::start()?;
        let socket = put(path, |new| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            bind(&socket, &SocketAddrUnix::new(new)?)?;
            listen(&socket, BACKLOG)?;
            std::fs::set_permissions(new, std::fs::Permissions::from_mode(0o666))?;
            Ok(socket)
        })?;
        let (named, strangers) = (Places::new(NAMED), Places::new(STRANGERS));
        Ok(Self { path: path.to_owned(), socket, closer, named, strangers })
    }

    /// Takes the next connection, if there is one. `is_named` says whether the settings name a caller.
    ///
    /// # Errors
    /// It cannot be taken, mostly for want of descriptors.
    pub fn accept(&self, is_named: impl FnOnce(&Caller) -> bool) -> io::Result<Option<Arrival>> {
        // The closer has as much to do as it may have: who waits at the socket waits on.
        if self.closer.is_full() {
            return Ok(None);
        }
        let connection = match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(connection) => connection,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let caller = match Caller::of(&connection) {
            Ok(caller) => caller,
            Err(error) => {
                self.closer.close(connection);
                return Err(error);
            }
        };
        let places = if is_named(&caller) { &self.named } else { &self.strangers };
        let Some(place) = places.enter(caller.user) else {
            self.closer.close(connection);
            return Ok(Some(Arrival::TurnedAway(caller)));
        };
        match Line::start(connection, place) {
            Ok(line) => Ok(Some(Arrival::Application(line, caller))),
            Err((connection, error)) => {
                self.closer.close(connection);
                Err(error)
            }
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Caller {
    /// Asks the kernel alone: the names of users and groups may be on another machine, which takes its time.
    fn of(connection: impl AsFd) -> io::Result<Self> {
        let who = socket_peercred(&connection)?;
        let mut groups = peer_groups(connection.as_fd())?;
        groups.push(who.gid.as_raw());
        Ok(Self { user: who.uid.as_raw(), groups })
    }
}
