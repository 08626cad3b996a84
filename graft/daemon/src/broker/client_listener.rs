//! The Unix socket that applications connect to. All users may connect, since the kernel tells the daemon which user
//! has connected.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::PermissionsExt as _, net::UnixStream},
    },
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use millrace_base::control::ControlEnd;
use millrace_daemon::{closer::Closer, socket::put};
use millrace_kernel::unix::peer_groups;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
    sockopt::socket_peercred,
};

use super::{
    line::ClientLine,
    places::{ClientPlaces, PlacePool},
};

const BACKLOG: i32 = 64;
/// Limits of concurrent connections to the Unix socket for users whom the settings name: for all these users together,
/// and for each.
const NAMED: PlacePool = PlacePool { all: 512, of_user: 64 };
/// Limits of concurrent connections to the Unix socket for users whom the settings do not name, and whose requests are
/// always refused.
const STRANGERS: PlacePool = PlacePool { all: 64, of_user: 8 };

/// The listening socket. Its file is removed when this value is dropped.
pub struct ClientListener {
    path: PathBuf,
    socket: OwnedFd,
    closer: Closer,
    named: ClientPlaces,
    strangers: ClientPlaces,
}

/// A connection that an application made to the Unix socket, accepted or refused.
pub enum ClientArrival {
    Application(ClientLine, ClientProcess),
    /// The user already has as many connections as its limit permits.
    TurnedAway(ClientProcess),
}

/// User and groups of the process at the other end, as the kernel recorded them when it connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientProcess {
    pub user: u32,
    pub groups: Vec<u32>,
}

impl ClientListener {
    /// Binds the socket and listens on it.
    ///
    /// # Errors
    /// Another daemon answers on the socket, or the socket cannot be created.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        Self::try_open(path).with_context(|| format!("socket {}", path.display()))
    }

    fn try_open(path: &Path) -> anyhow::Result<Self> {
        match ControlEnd::connect(path) {
            Ok(_) => bail!("another daemon answers on it; choose another with --messages-socket"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // The socket file is a leftover of a daemon that died. It is replaced below.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) if UnixStream::connect(path).is_err() => return Err(error.into()),
            // A stream socket answers at this path, so the path belongs to a running program.
            Err(_) => bail!("another daemon answers on it; choose another with --messages-socket"),
        }
        // A separate thread closes refused connections, since a close can block.
        let closer = Closer::start()?;
        let socket = put(path, |new| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            bind(&socket, &SocketAddrUnix::new(new)?)?;
            listen(&socket, BACKLOG)?;
            // Every user may connect, since the kernel reports which user is at the other end.
            std::fs::set_permissions(new, std::fs::Permissions::from_mode(0o666))?;
            Ok(socket)
        })?;
        let named = ClientPlaces::new(NAMED);
        let strangers = ClientPlaces::new(STRANGERS);
        Ok(Self { path: path.to_owned(), socket, closer, named, strangers })
    }

    /// Accepts the next connection, if one waits. `is_named` says whether the settings name the connecting user or its
    /// groups.
    ///
    /// # Errors
    /// The connection cannot be accepted, mostly because this process has no free descriptors.
    pub fn accept(&self, is_named: impl FnOnce(&ClientProcess) -> bool) -> io::Result<Option<ClientArrival>> {
        // While the closing thread is busy, new connections stay in the listening socket's queue.
        if self.closer.is_full() {
            return Ok(None);
        }
        let connection = match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(connection) => connection,
            // No connection waits in the queue, or the client has already closed it.
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let caller = match ClientProcess::from_connection(&connection) {
            Ok(caller) => caller,
            Err(error) => {
                self.closer.close(connection);
                return Err(error);
            }
        };
        let places = if is_named(&caller) { &self.named } else { &self.strangers };
        let Some(place) = places.enter(caller.user) else {
            self.closer.close(connection);
            return Ok(Some(ClientArrival::TurnedAway(caller)));
        };
        match ClientLine::start(connection, place) {
            Ok(line) => Ok(Some(ClientArrival::Application(line, caller))),
            Err((connection, error)) => {
                self.closer.close(connection);
                Err(error)
            }
        }
    }
}

impl Drop for ClientListener {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl ClientProcess {
    /// Looks up the user in the kernel only. A look-up of user or group names could ask another machine, and block.
    fn from_connection(connection: impl AsFd) -> io::Result<Self> {
        let who = socket_peercred(&connection)?;
        let mut groups = peer_groups(connection.as_fd())?;
        groups.push(who.gid.as_raw());
        Ok(Self { user: who.uid.as_raw(), groups })
    }
}
