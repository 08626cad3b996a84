//! Connections of this host's applications that the kernel has led here.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use bytes::Bytes;
use millrace_bpf::graft::hook::{Arrival, Ports};
use millrace_proto::graft::carry::frame::{Frame, Open, Reason};
use tokio::{
    io::{AsyncWriteExt as _, copy_bidirectional},
    net::{TcpListener, TcpSocket, TcpStream},
    time::timeout,
};
use tracing::{debug, warn};

use super::{
    carrier::Carrier,
    context::Context,
    pump::{Ended, Pump, Role, prepare},
    stream::Stream,
    table::Place,
};

const BACKLOG: u32 = 4096;
/// So long a server that has refused a carried connection is asked in place: its refusal is the application's then.
const AVOID: Duration = Duration::from_secs(2);
/// For a stream: the peer says how many there may be, and a pool has so many that are free.
const ROOM: Duration = Duration::from_millis(50);
/// For a server that is asked in place.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where the kernel leads to: on loopback, IPv6 where there is any.
pub struct Listeners {
    v4: TcpListener,
    v6: Option<TcpListener>,
}

impl Listeners {
    pub fn bind() -> anyhow::Result<Self> {
        let v4 = listen(([127, 0, 0, 1], 0).into()).context("cannot listen on 127.0.0.1: is lo up?")?;
        Ok(Self { v4, v6: listen((std::net::Ipv6Addr::LOCALHOST, 0).into()).ok() })
    }

    pub fn ports(&self) -> io::Result<Ports> {
        let v6 = self.v6.as_ref().map(TcpListener::local_addr).transpose()?;
        Ok(Ports { v4: self.v4.local_addr()?.port(), v6: v6.map(|at| at.port()) })
    }

    pub fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [Some(&self.v4), self.v6.as_ref()].into_iter().flatten().map(AsFd::as_fd)
    }

    /// Where connections from there arrive.
    pub fn at(&self, from: SocketAddr) -> io::Result<SocketAddr> {
        match &self.v6 {
            Some(v6) if from.is_ipv6() => v6.local_addr(),
            _ => self.v4.local_addr(),
        }
    }

    /// The next one, whatever goes wrong with those before.
    pub async fn next(&self) -> (TcpStream, SocketAddr) {
        loop {
            match self.accept().await {
                Ok((local, from)) => return (local, canonical(from)),
                Err(error) => {
                    warn!("an application's connection cannot be taken: {error}");
                    // Mostly for want of descriptors.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        match &self.v6 {
            Some(v6) => tokio::select! {
                accepted = self.v4.accept() => accepted,
                accepted = v6.accept() => accepted,
            },
            None => self.v4.accept().await,
        }
    }
}

fn listen(at: SocketAddr) -> io::Result<TcpListener> {
    let socket = if at.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.bind(at)?;
    socket.listen(BACKLOG)
}

/// For as long as the broker runs.
pub async fn accept(context: Arc<Context>, listeners: Listeners) {
    loop {
        let (local, from) = listeners.next().await;
        let context = context.clone();
        tokio::spawn(async move { begin(&context, local, from).await });
    }
}

/// As the kernel knows it.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

async fn begin(context: &Context, mut local: TcpStream, from: SocketAddr) {
    if prepare(&local).is_err() {
        return;
    }
    let Some((arrival, place)) = enter(context, from) else { return };
    let ended = carry(context, &mut local, from, arrival).await;
    leave(context, place, &ended);
}

/// What was led here, and a place for it. Why not is counted.
pub fn enter(context: &Context, from: SocketAddr) -> Option<(Arrival, Place<'_>)> {
    let Some(arrival) = context.hooks.arrival(from) else {
        debug!(%from, "it was not led here");
        context.table.count("stranger");
        return None;
    };
    let Some(place) = context.table.enter() else {
        context.table.count(Reason::Busy.name());
        return None;
    };
    if context.table.note_room() {
        context.carriers.refresh();
    }
    Some((arrival, place))
}

pub fn leave(context: &Context, place: Place<'_>, ended: &Ended) {
    drop(place);
    context.table.count(ended.name());
    if context.table.note_room() {
        context.carriers.refresh();
    }
}

async fn carry(context: &Context, local: &mut TcpStream, from: SocketAddr, arrival: Arrival) -> Ended {
    let Some(carrier) = context.carriers.to(arrival.far.ip()) else {
        // It was there a moment ago.
        return in_place(context, local, arrival.far, Vec::new()).await;
    };
    let client = SocketAddr::new(arrival.near, from.port());
    let open = Open { id: context.table.next_id(), server: arrival.far, client };
    let _counted = context.carriers.count(&carrier.far.peer);
    let refused = match by(context, local, open, carrier).await {
        Ok((Ended::Refused(reason), given)) => Some((reason, given)),
        Ok((ended, _)) => return ended,
        Err(NoStream) => None,
    };
    match refused {
        None => in_place(context, local, arrival.far, Vec::new()).await,
        Some((reason, given)) if reason.is_brokers() => {
            debug!(server = %arrival.far, "the peer does not carry it: {}", reason.name());
            context.hooks.avoid(arrival.far, AVOID);
            in_place(context, local, arrival.far, given).await
        }
        Some((reason, _)) => {
            context.hooks.avoid(arrival.far, AVOID);
            Ended::Refused(reason)
        }
    }
}

struct NoStream;

/// Returns also what the application has given, of which nothing has reached the server if it was refused.
async fn by(
    context: &Context,
    local: &TcpStream,
    open: Open,
    carrier: Arc<Carrier>,
) -> Result<(Ended, Vec<Bytes>), NoStream> {
    let stream = stream(&carrier).await.ok_or(NoStream)?;
    let mut pump = Pump::new(context, local, stream, Role::Client { open, carrier });
    let ended = pump.run().await;
    let given = match ended {
        Ended::Refused(_) => given(&mut pump),
        _ => Vec::new(),
    };
    Ok((ended, given))
}

/// It waits only where the peer takes no more, or a pool is to have another connection first.
pub async fn stream(carrier: &Carrier) -> Option<Stream> {
    timeout(ROOM, carrier.open()).await.ok()?.ok()
}

/// All that was taken: nothing was confirmed.
fn given(pump: &mut Pump<'_>) -> Vec<Bytes> {
    let mut given = Vec::new();
    if pump.out.rewind(0).is_ok() {
        while let Some(Frame::Data(bytes)) = pump.out.give(usize::MAX) {
            given.push(bytes);
        }
    }
    given
}

/// By plain TCP, from here: the application's socket is led, and stays so.
async fn in_place(context: &Context, local: &mut TcpStream, server: SocketAddr, given: Vec<Bytes>) -> Ended {
    let mut remote = match connect(context, server).await {
        Ok(remote) => remote,
        Err(error) => {
            debug!(%server, "in place: {error}");
            return Ended::Reset;
        }
    };
    for bytes in given {
        if remote.write_all(&bytes).await.is_err() {
            return Ended::Reset;
        }
    }
    join(local, &mut remote).await
}

pub async fn connect(context: &Context, server: SocketAddr) -> io::Result<TcpStream> {
    let socket = if server.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    context.hooks.exempt(socket.as_fd()).map_err(io::Error::other)?;
    let remote = timeout(PATIENCE, socket.connect(server)).await??;
    prepare(&remote)?;
    Ok(remote)
}

/// Until both have said all.
pub async fn join(local: &mut TcpStream, remote: &mut TcpStream) -> Ended {
    if copy_bidirectional(local, remote).await.is_err() {
        return Ended::Reset;
    }
    for socket in [&*local, remote] {
        let _ = socket2::SockRef::from(socket).set_linger(None);
    }
    Ended::Done
}
