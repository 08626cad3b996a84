//! Connections to servers of this host, which come by carriers: to listed ports only, from clients that the peer's key
//! stands for.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use millrace_bpf::graft::hook::Guest;
use millrace_proto::graft::carry::frame::{Frame, Open, Reason};
use tokio::{
    net::{TcpSocket, TcpStream},
    time::timeout,
};
use tracing::{debug, warn};

use super::{
    carriers::Carrier,
    context::Context,
    hooks::Shown,
    pump::{Ended, Pump, Role, prepare},
    stream::Stream,
    table::Found,
    warm,
};

/// For a server to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Streams of a carrier, until it is gone.
pub async fn serve(context: Arc<Context>, carrier: Arc<Carrier>) {
    // They are as many as the transport lets the peer open.
    while let Ok(stream) = carrier.connection.accept_bi().await {
        let (context, carrier) = (context.clone(), carrier.clone());
        tokio::spawn(async move { begin(&context, &carrier, Stream::new(stream)).await });
    }
    let why = carrier.connection.close_reason().map_or(String::new(), |reason| reason.to_string());
    context.carriers.remove(&carrier, why);
}

async fn begin(context: &Context, carrier: &Arc<Carrier>, mut stream: Stream) {
    match stream.first().await {
        Ok(Frame::Open(open)) => {
            let ended = match host(context, carrier, stream, open).await {
                Ok(ended) => ended.name(),
                Err(reason) => reason.name(),
            };
            context.table.count(ended);
        }
        Ok(Frame::Resume { id, received }) => resume(context, carrier, stream, (id, received)).await,
        Ok(Frame::Data(bytes)) => warm::discard(stream, bytes.len() as u64).await,
        other => {
            debug!(peer = carrier.peer, "a stream that says nothing of a connection: {other:?}");
            stream.reset();
        }
    }
}

async fn resume(context: &Context, carrier: &Carrier, stream: Stream, (id, received): (u64, u64)) {
    match context.table.find(&(carrier.peer.clone(), carrier.run, id)) {
        Found::Live(streams) => drop(streams.send((stream, received)).await),
        // All of it was delivered, and the confirmation of that may not have arrived.
        Found::Finished(received) => {
            answer(stream, &[Frame::Accepted { received }, Frame::Confirm { delivered: received }]).await;
        }
        Found::Nothing => answer(stream, &[Frame::Refused(Reason::Unknown)]).await,
    }
}

async fn answer(mut stream: Stream, frames: &[Frame]) {
    frames.iter().for_each(|frame| stream.sender.push(frame));
    if stream.sender.flush().await.is_ok() {
        stream.finish();
    }
}

async fn host(
    context: &Context,
    carrier: &Arc<Carrier>,
    stream: Stream,
    open: Open,
) -> Result<Ended, Reason> {
    let place = context.table.enter().ok_or(Reason::Busy);
    let reached = match &place {
        Ok(_) => reach(context, carrier, &open).await,
        Err(reason) => Err(*reason),
    };
    let (local, _shown) = match reached {
        Ok(reached) => reached,
        Err(reason) => {
            debug!(peer = carrier.peer, server = %open.server, "not carried: {}", reason.name());
            answer(stream, &[Frame::Refused(reason)]).await;
            return Err(reason);
        }
    };
    let _counted = context.carriers.count(&carrier.peer);
    let key = (carrier.peer.clone(), carrier.run, open.id);
    let streams = context.table.host(key.clone());
    let mut pump = Pump::new(context, &local, stream, Role::Server { streams });
    let ended = pump.run().await;
    let received = matches!(ended, Ended::Done).then_some(pump.received());
    context.table.finish(key, received);
    Ok(ended)
}

/// A connection to the server, that has the client at its other end as far as the server can see.
async fn reach<'a>(
    context: &'a Context,
    carrier: &Carrier,
    open: &Open,
) -> Result<(TcpStream, Shown<'a>), Reason> {
    let client = client_of(context, carrier, open)?;
    let server = open.server;
    if !is_listed(context, server.port(), client.ip()) {
        return Err(Reason::NotListed);
    }
    if !is_here(server.ip()) {
        return Err(Reason::NotHere);
    }
    let (socket, shown) = bound(context, server, client).map_err(|error| {
        warn!(%server, "no connection to the server: {error:#}");
        Reason::Unreachable
    })?;
    match timeout(PATIENCE, socket.connect(server)).await {
        Ok(Ok(stream)) if prepare(&stream).is_ok() => Ok((stream, shown)),
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Err(Reason::Refused),
        _ => Err(Reason::Unreachable),
    }
}

/// As whom the server sees the client: the address that it says it has, if its key stands for that one, else the one that its
/// carrier comes from, as with any translation of addresses.
fn client_of(context: &Context, carrier: &Carrier, open: &Open) -> Result<SocketAddr, Reason> {
    let (said, remote) = (open.client.ip(), carrier.connection.remote_address().ip().to_canonical());
    if said == remote || context.carriers.stands_for(&carrier.peer, said) {
        return Ok(open.client);
    }
    match remote.is_ipv4() == open.server.is_ipv4() {
        true => Ok(SocketAddr::new(remote, open.client.port())),
        false => Err(Reason::Client),
    }
}

fn is_listed(context: &Context, port: u16, client: IpAddr) -> bool {
    context.servers.read().iter().any(|rule| rule.is_for(port, client)) || context.hooks.serves(port, client)
}

/// Not by binding to it: a host may be set to allow that for addresses of others.
fn is_here(address: IpAddr) -> bool {
    let Ok(all) = nix::ifaddrs::getifaddrs() else { return false };
    all.filter_map(|interface| interface.address).any(|storage| {
        let v4 = storage.as_sockaddr_in().map(|it| IpAddr::from(it.ip()));
        let v6 = storage.as_sockaddr_in6().map(|it| IpAddr::from(it.ip()));
        v4.or(v6) == Some(address)
    })
}

/// From the server's own address, and known to the kernel before there is a connection.
fn bound<'a>(
    context: &'a Context,
    server: SocketAddr,
    client: SocketAddr,
) -> anyhow::Result<(TcpSocket, Shown<'a>)> {
    let socket = if server.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    context.hooks.exempt(std::os::fd::AsFd::as_fd(&socket))?;
    socket.bind(SocketAddr::new(server.ip(), 0)).context("no port")?;
    let guest = Guest { broker: socket.local_addr()?, server_port: server.port() };
    let shown = context.hooks.show(guest, client)?;
    Ok((socket, shown))
}
