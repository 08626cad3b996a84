//! Connections of this host's applications that the kernel has led here.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context as _;
use bytes::Bytes;
use millrace_bpf::graft::hook::{Arrival, Config};
use millrace_proto::graft::carry::frame::{Frame, Open, Reason};
use tokio::{
    io::{AsyncWriteExt as _, copy_bidirectional},
    net::{TcpListener, TcpSocket, TcpStream},
    time::timeout,
};
use tracing::{debug, warn};

use super::{
    carriers::Carrier,
    context::Context,
    pump::{Ended, Pump, Role, prepare},
    stream::Stream,
};

const BACKLOG: u32 = 4096;
/// So long a server that has refused a carried connection is asked in place: its refusal is the application's then.
const AVOID: Duration = Duration::from_secs(2);
/// For a stream. The peer says how many there may be.
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

    pub fn config(&self) -> io::Result<Config> {
        let port6 = self.v6.as_ref().map(TcpListener::local_addr).transpose()?;
        Ok(Config { port4: self.v4.local_addr()?.port(), port6: port6.map(|at| at.port()) })
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
        match listeners.accept().await {
            Ok((local, from)) => {
                let context = context.clone();
                tokio::spawn(async move { begin(&context, local, canonical(from)).await });
            }
            Err(error) => {
                warn!("an application's connection cannot be taken: {error}");
                // Mostly for want of descriptors.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// As the kernel knows it.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

async fn begin(context: &Context, mut local: TcpStream, from: SocketAddr) {
    if prepare(&local).is_err() {
        return;
    }
    let Some(arrival) = context.hooks.arrival(from) else {
        debug!(%from, "it was not led here");
        context.table.count("stranger");
        return;
    };
    let ended = {
        let Some(_place) = context.table.enter() else {
            context.table.count(Reason::Busy.name());
            return;
        };
        if context.table.note_room() {
            context.carriers.refresh();
        }
        carry(context, &mut local, from, arrival).await
    };
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
    let _counted = context.carriers.count(&carrier.peer);
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
    // It waits only where the peer takes no more.
    let stream = timeout(ROOM, carrier.connection.open_bi()).await.map_err(|_| NoStream)?;
    let stream = stream.map_err(|_| NoStream)?;
    let mut pump = Pump::new(context, local, Stream::new(stream), Role::Client { open, carrier });
    let ended = pump.run().await;
    let given = match ended {
        Ended::Refused(_) => given(&mut pump),
        _ => Vec::new(),
    };
    Ok((ended, given))
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
    match try_in_place(context, local, server, given).await {
        Ok(()) => Ended::Done,
        Err(error) => {
            debug!(%server, "in place: {error:#}");
            Ended::Reset
        }
    }
}

async fn try_in_place(
    context: &Context,
    local: &mut TcpStream,
    server: SocketAddr,
    given: Vec<Bytes>,
) -> anyhow::Result<()> {
    let socket = if server.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    context.hooks.exempt(std::os::fd::AsFd::as_fd(&socket))?;
    let mut remote = timeout(PATIENCE, socket.connect(server)).await??;
    prepare(&remote)?;
    for bytes in given {
        remote.write_all(&bytes).await?;
    }
    copy_bidirectional(local, &mut remote).await?;
    for socket in [&*local, &remote] {
        socket2::SockRef::from(socket).set_linger(None)?;
    }
    Ok(())
}
