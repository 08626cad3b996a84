//! An upgrade: the running relay starts its successor, which takes over its sockets.
//!
//! The running process starts the program that is at its path now, with its own arguments. Both speak over a Unix
//! socket, which is the successor's standard input:
//!
//! 1. The running process passes its listening sockets, with a channel for each, the socket of the HTTP server, and the
//!    secrets by which the successor recognizes its connections and joins its private link.
//! 2. The successor starts wholly, but reads no socket. Then it says that it is ready, or why it is not. Until then
//!    nothing changes for any client.
//! 3. The running process stops reading its sockets, and tells the successor to begin. Then it drains, while the
//!    successor passes packets of its connections on to it.
//! 4. If the successor ends before the drain is over, the old process reads its sockets again.

use std::{
    env,
    ffi::OsString,
    fs::File,
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::PathBuf,
    process::{Child, Command},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use millrace_base::control::{ControlEnd, ControlReceived};
use millrace_daemon::http::HttpServer;
use millrace_moq::HopId;
use millrace_relay::{InheritedSockets, LINK_NAME, LinkCertificate};
use millrace_transport::{
    LastingSecret,
    takeover::{self, Predecessor},
};
use nix::unistd::dup2_stdin;
use rustls::{RootCertStore, crypto::ring, pki_types::PrivatePkcs8KeyDer, sign::CertifiedKey};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::server::RunningServer;

/// The environment variable that is set for a successor.
const SUCCESSOR: &str = "MILLRACE_SUCCESSOR";
/// The version of the messages below, and of the packets on the channels.
const VERSION: u32 = 1;
/// The longest time that a successor may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A message to the successor.
#[derive(Serialize, Deserialize)]
enum ToSuccessor {
    /// The first message.
    Begin(Inheritance),
    /// A listening socket, which was configured as `listen`. Its descriptors are the socket, and the successor's end of
    /// the channel to the old process.
    Socket { listen: SocketAddr },
    /// The HTTP server's listening socket. Its descriptor is the socket.
    Http { addr: SocketAddr },
    /// The old process has stopped reading the sockets. From now on the successor serves.
    Go,
}

/// A message to the old process.
#[derive(Serialize, Deserialize)]
enum ToPredecessor {
    /// The successor can serve. It may have taken the socket of the HTTP server.
    Ready { has_http: bool },
    /// The successor cannot start. The text is the reason.
    Failed(String),
}

/// The data that a successor needs of the process before it.
#[derive(Serialize, Deserialize)]
struct Inheritance {
    version: u32,
    generation: u8,
    secret: [u8; 32],
    /// The address of the private link, its certificate and its key, both in DER.
    link: SocketAddr,
    certificate: Vec<u8>,
    key: Vec<u8>,
    /// The number of sockets that follow, with the HTTP server's.
    sockets: usize,
    /// The relay's hop ID in its cluster.
    hop: Option<u64>,
}

/// The program and the arguments of this process, for its successor.
pub struct ThisProgram {
    path: io::Result<PathBuf>,
    arguments: Vec<OsString>,
}

impl ThisProgram {
    /// Reads them. Has to be called at start-up, before the file of the program is replaced.
    pub fn read() -> Self {
        Self { path: env::current_exe(), arguments: env::args_os().skip(1).collect() }
    }
}

/// A successor that was started, and waits until it may begin. Dropping it ends its process.
pub struct Successor {
    control: ControlEnd,
    process: Child,
    channels: Vec<Vec<OwnedFd>>,
    /// Whether it serves HTTP at this process's address.
    has_http: bool,
    may_live: bool,
}

impl Successor {
    /// Starts a successor, and waits until it is ready.
    ///
    /// # Errors
    /// Fails if it cannot be started or is not ready in time, with its reason. It has ended then.
    pub async fn start(
        program: &ThisProgram,
        server: &RunningServer,
        http: Option<&HttpServer>,
    ) -> anyhow::Result<Self> {
        let path = program.path.as_ref().map_err(|error| anyhow!("the path of this program: {error}"))?;
        let (control, theirs) = ControlEnd::pair()?;
        let mut command = Command::new(path);
        command.args(&program.arguments).env(SUCCESSOR, "1").stdin(OwnedFd::from(theirs));
        let process = command.spawn().with_context(|| path.display().to_string())?;
        drop(command); // It holds the successor's end, without which this process notices the successor's end.
        let mut successor = Self { control, process, channels: Vec::new(), has_http: false, may_live: false };
        successor.bequeath(server, http)?;
        let control = successor.control.try_clone()?;
        let (told, answer) = oneshot::channel();
        thread::Builder::new().name("successor".to_owned()).spawn(move || {
            let _ = told.send(receive(&control)); // fails only after the timeout
        })?;
        match tokio::time::timeout(START_TIMEOUT, answer).await {
            Err(_) => bail!("it was not ready within {} s", START_TIMEOUT.as_secs()),
            Ok(Ok(Ok((ToPredecessor::Ready { has_http }, _)))) => {
                successor.has_http = has_http;
                Ok(successor)
            }
            Ok(Ok(Ok((ToPredecessor::Failed(reason), _)))) => bail!("{reason}"),
            Ok(_) => {
                let status = successor.process.wait()?;
                bail!("it has ended ({status}): see its log, or run it with --check")
            }
        }
    }

    /// Passes everything to the successor that it needs to start.
    fn bequeath(&mut self, server: &RunningServer, http: Option<&HttpServer>) -> anyhow::Result<()> {
        let made = rcgen::generate_simple_self_signed([LINK_NAME.to_owned()])?;
        let certificate = made.cert.der().to_vec();
        let key = made.signing_key.serialize_der();
        let link = server.open_link(&link_certificate(&certificate, &key)?)?;
        let sockets = server.sockets();
        let (secret, generation) = server.issues();
        self.send(
            &ToSuccessor::Begin(Inheritance {
                version: VERSION,
                generation,
                secret: secret.to_bytes(),
                link,
                certificate,
                key,
                sockets: sockets.iter().map(|(_, sockets)| sockets.len()).sum::<usize>()
                    + usize::from(http.is_some()),
                hop: server.hop().map(|hop| hop.0),
            }),
            &[],
        )?;
        for (listen, sockets) in sockets {
            let mut channels = Vec::new();
            for socket in sockets {
                let (ours, theirs) = takeover::channel()?;
                self.send(&ToSuccessor::Socket { listen }, &[socket, theirs.as_fd()])?;
                channels.push(ours);
            }
            self.channels.push(channels);
        }
        if let Some(http) = http {
            self.send(&ToSuccessor::Http { addr: http.local_addr }, &[http.socket.as_fd()])?;
        }
        Ok(())
    }

    fn send(&self, message: &ToSuccessor, descriptors: &[BorrowedFd<'_>]) -> anyhow::Result<()> {
        self.control.send(message, descriptors).context("it has ended")
    }

    /// Reports whether the successor serves HTTP at this process's address. If it does not, this process goes on.
    pub fn has_http(&self) -> bool {
        self.has_http
    }

    /// Returns the successor's process ID.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Lets the successor serve instead of this process.
    ///
    /// # Errors
    /// Fails if the successor has ended, or the system is out of resources. This process reads its sockets again then.
    pub fn begin(&mut self, server: &RunningServer) -> anyhow::Result<()> {
        // If this process fails between these steps, the channels close, and its endpoints read their sockets again.
        server.leave(std::mem::take(&mut self.channels))?;
        self.send(&ToSuccessor::Go, &[])?;
        self.may_live = true;
        Ok(())
    }

    /// Waits for the end of the successor.
    pub async fn ended(&mut self) {
        let (told, end) = oneshot::channel::<()>();
        let Ok(control) = self.control.try_clone() else { return std::future::pending().await };
        let wait = move || {
            while receive::<ToPredecessor>(&control).is_ok() {}
            drop(told);
        };
        // Without a thread, the end of the successor is noticed only by the endpoints, which read their sockets again.
        if thread::Builder::new().name("successor".to_owned()).spawn(wait).is_err() {
            return std::future::pending().await;
        }
        let _ = end.await; // ends when the sender is dropped
        let _ = self.process.wait(); // the process has closed its end, so it ends
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        if !self.may_live {
            // Errors mean that it has ended already.
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

/// The process whose sockets this one takes over, before this one serves.
pub struct RunningPredecessor {
    control: ControlEnd,
    inheritance: Inheritance,
    /// The sockets of each listen address, with their channels.
    sockets: Vec<(SocketAddr, Vec<(UdpSocket, OwnedFd)>)>,
    http: Option<(SocketAddr, OwnedFd)>,
}

impl RunningPredecessor {
    /// Returns the predecessor if this process was started as a successor. Has to be called once, before other threads
    /// and processes are started.
    ///
    /// # Errors
    /// Fails if the predecessor has ended, or is of a version that speaks otherwise.
    pub fn take() -> anyhow::Result<Option<Self>> {
        if env::var_os(SUCCESSOR).is_none() {
            return Ok(None);
        }
        let control = ControlEnd::from(io::stdin().as_fd().try_clone_to_owned()?);
        // Other processes that this one starts must not hold the connection.
        dup2_stdin(File::open("/dev/null")?)?;
        let other = "the running relay is of a version that cannot be upgraded to this one: restart it";
        let (ToSuccessor::Begin(inheritance), _) = receive(&control).context(other)? else { bail!(other) };
        ensure!(inheritance.version == VERSION, other);
        let mut taken = Self { control, inheritance, sockets: Vec::new(), http: None };
        for _ in 0..taken.inheritance.sockets {
            let (message, descriptors) = receive(&taken.control).context(other)?;
            let mut descriptors = descriptors.into_iter();
            match (message, descriptors.next(), descriptors.next()) {
                (ToSuccessor::Socket { listen }, Some(socket), Some(channel)) => {
                    let pair = (socket.into(), channel);
                    match taken.sockets.last_mut().filter(|(last, _)| *last == listen) {
                        Some((_, pairs)) => pairs.push(pair),
                        None => taken.sockets.push((listen, vec![pair])),
                    }
                }
                (ToSuccessor::Http { addr }, Some(socket), None) => taken.http = Some((addr, socket)),
                _ => bail!(other),
            }
        }
        Ok(Some(taken))
    }

    /// Returns the generation of this process.
    pub fn next_generation(&self) -> u8 {
        self.inheritance.generation.wrapping_add(1)
    }

    /// Returns the predecessor's hop ID in its cluster.
    pub fn hop(&self) -> Option<HopId> {
        self.inheritance.hop.map(HopId)
    }

    /// Returns the secret of the predecessor's connection IDs and resets.
    pub fn secret(&self) -> LastingSecret {
        LastingSecret::from_bytes(self.inheritance.secret)
    }

    /// Takes the listening sockets for these addresses.
    ///
    /// # Errors
    /// Fails if the predecessor listens on other addresses.
    pub fn take_sockets(&mut self, listen: &[SocketAddr]) -> anyhow::Result<Vec<InheritedSockets>> {
        let there: Vec<_> = self.sockets.iter().map(|(addr, ..)| *addr).collect();
        ensure!(
            there == listen,
            "listen: the running relay listens on {there:?}, and an upgrade cannot change that: restart it, or keep these addresses"
        );
        let generation = self.inheritance.generation;
        let secret = self.secret();
        let inherited = self.sockets.drain(..).map(|(_, pairs)| {
            let (sockets, channels) = pairs.into_iter().unzip();
            let predecessor = Predecessor { secret: secret.clone(), generation, channels };
            InheritedSockets { sockets, predecessor }
        });
        Ok(inherited.collect())
    }

    /// Tells the predecessor that this process is ready, and whether it has taken the socket of the HTTP server. Waits
    /// until this process may serve.
    ///
    /// # Errors
    /// Fails if the predecessor has ended, or goes on by itself.
    pub fn until_go(&self, has_http: bool) -> anyhow::Result<()> {
        self.control.send(&ToPredecessor::Ready { has_http }, &[])?;
        match receive(&self.control)? {
            (ToSuccessor::Go, _) => Ok(()),
            _ => bail!("the running relay has not let this one begin"),
        }
    }

    /// Tells the predecessor why this process cannot start.
    pub fn failed(&self, mut reason: String) {
        const LONGEST: usize = 2000; // what fits into a record even if each byte is escaped
        let end = (0..=LONGEST.min(reason.len())).rev().find(|at| reason.is_char_boundary(*at));
        reason.truncate(end.unwrap_or(0));
        let _ = self.control.send(&ToPredecessor::Failed(reason), &[]); // fails only if nobody listens any more
    }

    /// Reports whether the predecessor still serves clients.
    pub fn is_alive(&self) -> bool {
        matches!(self.control.receive::<ToSuccessor>(), ControlReceived::Nothing)
    }

    /// Takes the HTTP server's socket, if it listens on this address. Otherwise the socket stays the predecessor's.
    pub fn take_http(&mut self, addr: Option<SocketAddr>) -> Option<OwnedFd> {
        let (there, socket) = self.http.take()?;
        // With port 0, the kernel has chosen the port.
        let is_same = |addr: SocketAddr| there.ip() == addr.ip() && [0, there.port()].contains(&addr.port());
        addr.is_some_and(is_same).then_some(socket)
    }

    /// Connects the relay to the predecessor, so that each gets media from the other.
    ///
    /// # Errors
    /// Fails if the private link cannot be used.
    pub fn join(&self, server: &RunningServer) -> anyhow::Result<()> {
        let Inheritance { link, certificate, key, .. } = &self.inheritance;
        server.join(*link, &link_certificate(certificate, key)?)
    }
}

/// Waits for the next message.
fn receive<T: serde::de::DeserializeOwned>(control: &ControlEnd) -> anyhow::Result<(T, Vec<OwnedFd>)> {
    loop {
        control.wait();
        match control.receive() {
            ControlReceived::Record(record, descriptors) => return Ok((record, descriptors)),
            ControlReceived::Malformed(error) => bail!("the other process speaks otherwise: {error}"),
            ControlReceived::Nothing => {}
            ControlReceived::End => bail!("the other process has ended"),
        }
    }
}

fn link_certificate(certificate: &[u8], key: &[u8]) -> anyhow::Result<LinkCertificate> {
    let certificate = rustls::pki_types::CertificateDer::from(certificate.to_vec());
    let mut root = RootCertStore::empty();
    root.add(certificate.clone())?;
    let key = PrivatePkcs8KeyDer::from(key.to_vec());
    let pair = CertifiedKey::from_der(vec![certificate], key.into(), &ring::default_provider())?;
    Ok(LinkCertificate { pair: Arc::new(pair), root: Arc::new(root) })
}
