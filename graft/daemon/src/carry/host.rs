//! Connections to servers of this host, which come by carriers: to listed ports only, from clients that the peer's key
//! stands for. What is to be reached from this host alone stays so: addresses are those to which the peer's carriers come, and listeners those
//! of the daemon's cgroup and of commands, unless a rule names the address.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use millrace_graft::Rule;
use millrace_graft_kernel::{
    Listener,
    hook::{Guest, Owner},
    listener,
};
use millrace_graft_proto::{
    carry::frame::{Frame, Open, Reason},
    select::kind::Kind,
};
use tokio::{
    net::{TcpSocket, TcpStream},
    time::{Instant, interval_at, timeout},
};
use tracing::{debug, warn};

use super::{
    behind,
    carrier::Far,
    context::Context,
    hooks::Shown,
    meter::Meter,
    pump::{Ended, Pump, Role, prepare},
    stream::Stream,
    table::Found,
    warm,
};

/// For a server to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time to connect to a server on this host, where a firewall may keep the host from itself.
const PATIENCE_ON_LO: Duration = Duration::from_secs(2);

/// Ports that turn out to have a connection to the same server.
const PORT_TRIES: usize = 256;

/// A stream of a QUIC carrier.
pub async fn serve(context: Arc<Context>, far: Arc<Far>, mut stream: Stream) {
    match stream.first().await {
        Ok(Frame::Data(bytes)) => warm::discard(stream, bytes.len() as u64).await,
        // It is asked whether anything comes back.
        Ok(Frame::End) => stream.finish(),
        Ok(first) => begin(&context, &far, stream, first).await,
        Err(error) => {
            debug!(peer = far.peer, "a stream that says nothing: {error}");
            stream.reset();
        }
    }
}

/// A connection of a pool, until it carries something. Its window is opened once before that, and not as often as the other end likes.
pub async fn wait(context: Arc<Context>, far: Arc<Far>, mut stream: Stream) {
    let mut is_warm = false;
    loop {
        match stream.receiver.next().await {
            Ok(Frame::Data(bytes)) if !std::mem::replace(&mut is_warm, true) => {
                if warm::answer(&mut stream, bytes.len() as u64, context.warm).await.is_err() {
                    return;
                }
            }
            // Of what it carried before.
            Ok(Frame::Ask | Frame::Answer) if stream.asked.is_some() => {}
            Ok(first) => return begin(&context, &far, stream, first).await,
            Err(_) => return,
        }
    }
}

async fn begin(context: &Context, far: &Far, mut stream: Stream, first: Frame) {
    match first {
        Frame::Open(open) => {
            let ended = match host(context, far, stream, open).await {
                Ok(ended) => ended.name(),
                Err(reason) => reason.name(),
            };
            context.table.count(ended);
        }
        Frame::Resume { id, received } => resume(context, far, stream, (id, received)).await,
        other => {
            debug!(peer = far.peer, "it says nothing of a connection: {other:?}");
            stream.reset();
        }
    }
}

async fn resume(context: &Context, far: &Far, stream: Stream, (id, received): (u64, u64)) {
    match context.table.find(&(far.peer.clone(), far.run, id)) {
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

/// A server may take its time. Until it is reached nothing is read here, and who has opened the connection is told now and then that it has come.
async fn telling<T>(stream: &mut Stream, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    let Some(patience) = stream.asked else { return work.await };
    let mut ticks = interval_at(Instant::now() + patience / 4, patience / 4);
    loop {
        tokio::select! {
            done = &mut work => return done,
            _ = ticks.tick() => {
                if stream.sender.is_empty() {
                    stream.sender.push(&Frame::Answer);
                }
            }
            sent = stream.sender.send(), if !stream.sender.is_empty() => {
                // Whoever resumes it does so by another.
                if sent.is_err() {
                    return work.await;
                }
            }
        }
    }
}

async fn host(context: &Context, far: &Far, mut stream: Stream, open: Open) -> Result<Ended, Reason> {
    let place = context.table.enter().ok_or(Reason::Busy);
    let key = (far.peer.clone(), far.run, open.id);
    // Who resumes it before the server was reached waits for that, and does not have it opened once more.
    let streams = context.table.host(key.clone());
    let reached = match &place {
        Ok(_) => telling(&mut stream, reach(context, far, &open)).await,
        Err(reason) => Err(*reason),
    };
    let (local, _shown) = match reached {
        Ok(reached) => reached,
        Err(reason) => {
            context.table.finish(key, None);
            debug!(peer = far.peer, server = %open.server, "not carried: {}", reason.name());
            answer(stream, &[Frame::Refused(reason)]).await;
            return Err(reason);
        }
    };
    let _counted = context.carriers.count(&far.peer);
    let kind = Kind { is_client: false, port: open.server.port(), command: String::new(), cgroup: 0 };
    let meter = Meter::new(&context.purposes, kind, open.client.ip());
    let mut pump = Pump::new(context, &local, stream, (Role::Server { streams }, meter));
    let ended = pump.run().await;
    let received = matches!(ended, Ended::Done).then_some(pump.received());
    context.table.finish(key, received);
    Ok(ended)
}

/// A connection to the server, that has the client at its other end as far as the server can see.
async fn reach<'a>(
    context: &'a Context,
    far: &Far,
    open: &Open,
) -> Result<(TcpStream, Option<Shown<'a>>), Reason> {
    let client = client_of(context, far, open)?;
    let server = open.server;
    if !is_listed(context, server.port(), client.ip()) {
        return Err(Reason::NotListed);
    }
    if !is_here(server.ip()) {
        return Ok((reach_behind(context, far, open).await?, None));
    }
    let is_named = is_named(context, server, client.ip());
    if !is_named && !context.carriers.reach(&far.peer, server.ip()) {
        return Err(Reason::NotHere);
    }
    let listener = who_listens(client.ip(), server)?;
    let owner = listener.map(|it| Owner { uid: it.uid, gid: 0, mark: it.mark });
    if !is_named && listener.is_some_and(|it| !is_inside(context, it)) {
        return Err(Reason::NotListed);
    }
    if !context.openings.let_in((client, server), owner).await {
        return Err(Reason::NotListed);
    }
    let is_judged = listener.is_some() && context.openings.has_firewall();
    let patience = if is_judged { PATIENCE_ON_LO } else { PATIENCE };
    for _ in 0..PORT_TRIES {
        let (socket, shown) = bound(context, server, client).map_err(|error| {
            warn!(%server, "no connection to the server: {error:#}");
            Reason::Unreachable
        })?;
        let error = match timeout(patience, socket.connect(server)).await {
            Ok(Ok(stream)) if prepare(&stream).is_ok() => return Ok((stream, Some(shown))),
            Ok(Err(error)) => error.kind(),
            _ => io::ErrorKind::TimedOut,
        };
        match error {
            // The port has a connection to this server, which may be somebody else's.
            io::ErrorKind::AddrNotAvailable => {}
            // Somebody listens, and did not hear of it.
            _ if is_judged => {
                context.openings.note_unreached(server);
                return Err(Reason::NotListed);
            }
            io::ErrorKind::ConnectionRefused => return Err(Reason::Refused),
            _ => return Err(Reason::Unreachable),
        }
    }
    warn!(%server, "no connection to the server: no port is free for one");
    Err(Reason::Unreachable)
}

/// To a server behind this host, which sees the client itself: packets to any other address would not come back here.
async fn reach_behind(context: &Context, far: &Far, open: &Open) -> Result<TcpStream, Reason> {
    if !context.gateway.as_ref().is_some_and(|it| it.has_behind(open.server.ip())) {
        return Err(Reason::NotHere);
    }
    if !context.carriers.stands_for(&far.peer, open.client.ip()) {
        return Err(Reason::Client);
    }
    let connect = behind::connect(&context.hooks, open.client, open.server);
    match timeout(PATIENCE, connect).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Err(Reason::Refused),
        Ok(Err(error)) => {
            debug!(server = %open.server, "no connection to a server behind this host: {error}");
            Err(Reason::Unreachable)
        }
        Err(_) => Err(Reason::Unreachable),
    }
}

/// As whom the server sees the client: the address that it says it has, if its key stands for that one, else the one that its
/// carrier comes from, as with any translation of addresses.
fn client_of(context: &Context, far: &Far, open: &Open) -> Result<SocketAddr, Reason> {
    let (said, remote) = (open.client.ip(), far.remote);
    if said == remote || context.carriers.stands_for(&far.peer, said) {
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

/// Whether a rule names the server's address.
fn is_named(context: &Context, server: SocketAddr, client: IpAddr) -> bool {
    let names = |rule: &Rule| rule.is_for(server.port(), client) && rule.addresses.contains(&server.ip());
    context.servers.read().iter().any(names)
}

/// `None`: nobody, and the connection is refused anyway.
fn who_listens(client: IpAddr, server: SocketAddr) -> Result<Option<Listener>, Reason> {
    // From port 0 there is no connection that the kernel would find instead.
    listener(SocketAddr::new(client, 0), server).map_err(|error| {
        warn!(%server, "no connection to the server: the kernel does not say whose it is: {error}");
        Reason::NotListed
    })
}

/// Whether who listens is in a cgroup with a hook: elsewhere it would see this host as the client.
fn is_inside(context: &Context, listener: Listener) -> bool {
    listener.cgroup.is_none_or(|id| tokio::task::block_in_place(|| context.hooks.have(id)))
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
    let socket = context.hooks.socket(server)?;
    let is_shown = |broker| context.hooks.is_shown(Guest { broker, server_port: server.port() });
    // From the server's own port it would be a connection to itself where nobody listens.
    context.ports.bind(&socket, server.ip(), |at| at == server || is_shown(at)).context("no port")?;
    let guest = Guest { broker: socket.local_addr()?, server_port: server.port() };
    let shown = context.hooks.show(guest, client)?;
    Ok((socket, shown))
}
