//! Connects streams of carriers to servers of this host: only at ports that the settings list, and only for client
//! addresses that the peer's key may use. A server that only this host itself can reach stays unreachable for peers.
//! Its address must be one to which the peer makes carriers, and its listener must be in a cgroup with a hook, unless a
//! rule names the address.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use millrace_graft::RuleSetting;
use millrace_graft_kernel::{
    ListeningSocket,
    hook::{Guest, SocketOwner},
    listener,
};
use millrace_graft_proto::{
    carry::frame::{CarryFrame, CarryReason, OpenFrame},
    select::kind::TrafficClass,
};
use tokio::{
    net::{TcpSocket, TcpStream},
    time::{Instant, interval_at, timeout},
};
use tracing::{debug, warn};

use super::{
    carrier::CarrierPeer,
    context::CarryContext,
    gatewayed,
    hooks::ShownClient,
    meter::TransferMeter,
    pump::{PumpEnd, PumpRole, TunnelPump, prepare},
    stream::CarrierStream,
    table::TunnelLookup,
    warm,
};

/// Time limit for a server to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time limit for connecting to a server on this host, whose firewall may block the connection.
const PATIENCE_ON_LO: Duration = Duration::from_secs(2);

/// Limit of local ports that are tried for one connection, if each tried port already has a connection to the same
/// server.
const PORT_TRIES: usize = 256;

/// Serves one stream of a QUIC carrier.
pub async fn serve(context: Arc<CarryContext>, peer: Arc<CarrierPeer>, mut stream: CarrierStream) {
    match stream.first().await {
        Ok(CarryFrame::Data(bytes)) => warm::discard(stream, bytes.len() as u64).await,
        // With an empty stream the peer asks whether the carrier still works, so an answer is sent.
        Ok(CarryFrame::End) => stream.finish(),
        Ok(first) => begin(&context, &peer, stream, first).await,
        Err(error) => {
            debug!(peer = peer.name, "a stream of a carrier ended before its first frame: {error}");
            stream.reset();
        }
    }
}

/// Waits until the peer opens a tunnelled connection on a pool connection, and serves it. Before that, the peer may
/// once exchange filler bytes that open the congestion window. If it could do so repeatedly, it could make this host
/// send without limit.
pub async fn wait(context: Arc<CarryContext>, peer: Arc<CarrierPeer>, mut stream: CarrierStream) {
    let mut is_warm = false;
    loop {
        match stream.receiver.next().await {
            Ok(CarryFrame::Data(bytes)) if !std::mem::replace(&mut is_warm, true) => {
                if warm::answer(&mut stream, bytes.len() as u64, context.warm).await.is_err() {
                    return;
                }
            }
            // The frame is a late `Ask` or `Answer` that belongs to the tunnelled connection that used this pool
            // connection before.
            Ok(CarryFrame::Ask | CarryFrame::Answer) if stream.asked.is_some() => {}
            Ok(first) => return begin(&context, &peer, stream, first).await,
            Err(_) => return,
        }
    }
}

async fn begin(context: &CarryContext, peer: &CarrierPeer, mut stream: CarrierStream, first: CarryFrame) {
    match first {
        CarryFrame::Open(open) => {
            let ended = match host(context, peer, stream, open).await {
                Ok(ended) => ended.name(),
                Err(reason) => reason.name(),
            };
            context.table.count(ended);
        }
        CarryFrame::Resume { id, received } => resume(context, peer, stream, id, received).await,
        other => {
            debug!(
                peer = peer.name,
                "a stream of a carrier was reset, since its first frame does not open a connection: {other:?}"
            );
            stream.reset();
        }
    }
}

async fn resume(context: &CarryContext, peer: &CarrierPeer, stream: CarrierStream, id: u64, received: u64) {
    match context.table.find(&(peer.name.clone(), peer.run, id)) {
        TunnelLookup::Live(streams) => drop(streams.send((stream, received)).await),
        // All bytes were delivered to the server. The peer may have missed the frame that acknowledges the last of
        // them, so it is sent again.
        TunnelLookup::Finished(received) => {
            answer(stream, &[CarryFrame::Accepted { received }, CarryFrame::Confirm { delivered: received }])
                .await;
        }
        TunnelLookup::Nothing => answer(stream, &[CarryFrame::Refused(CarryReason::Unknown)]).await,
    }
}

async fn answer(mut stream: CarrierStream, frames: &[CarryFrame]) {
    frames.iter().for_each(|frame| stream.sender.push(frame));
    if stream.sender.flush().await.is_ok() {
        stream.finish();
    }
}

/// Runs `work`, which connects to a server and may take long. Frames from the peer are not read meanwhile, so a frame
/// `Answer` is sent at intervals to show that this broker is alive.
async fn telling<T>(stream: &mut CarrierStream, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    // QUIC itself tells the peer that the carrier is alive, so nothing needs to be sent.
    let Some(patience) = stream.asked else { return work.await };
    let mut ticks = interval_at(Instant::now() + patience / 4, patience / 4);
    loop {
        tokio::select! {
            done = &mut work => return done,
            _ = ticks.tick() => {
                if stream.sender.is_empty() {
                    stream.sender.push(&CarryFrame::Answer);
                }
            }
            sent = stream.sender.send(), if !stream.sender.is_empty() => {
                // If the carrier has failed, the peer resumes the connection on another stream, so `work` still
                // connects to the server.
                if sent.is_err() {
                    return work.await;
                }
            }
        }
    }
}

async fn host(
    context: &CarryContext,
    peer: &CarrierPeer,
    mut stream: CarrierStream,
    open: OpenFrame,
) -> Result<PumpEnd, CarryReason> {
    let place = context.table.enter().ok_or(CarryReason::Busy);
    let key = (peer.name.clone(), peer.run, open.id);
    // A peer that resumes the connection before the server was reached waits on this channel, so that the server gets
    // only one connection.
    let streams = context.table.host(key.clone());
    let reached = match &place {
        Ok(_) => telling(&mut stream, reach(context, peer, &open)).await,
        Err(reason) => Err(*reason),
    };
    let (local, _shown) = match reached {
        Ok(reached) => reached,
        Err(reason) => {
            context.table.finish(key, None);
            debug!(peer = peer.name, server = %open.server, "a tunnelled connection of the peer was refused: {}", reason.name());
            answer(stream, &[CarryFrame::Refused(reason)]).await;
            return Err(reason);
        }
    };
    let _counted = context.carriers.count(&peer.name);
    let kind = TrafficClass { is_client: false, port: open.server.port(), command: String::new(), cgroup: 0 };
    let meter = TransferMeter::new(&context.purposes, kind, open.client.ip());
    let mut pump = TunnelPump::new(context, &local, stream, PumpRole::Server { streams }, meter);
    let ended = pump.run().await;
    // If a connection ended without an error, the table of tunnelled connections remembers how many bytes arrived,
    // which are acknowledged again if the peer resumes the connection.
    let received = matches!(ended, PumpEnd::Done).then_some(pump.received());
    context.table.finish(key, received);
    Ok(ended)
}

/// Connects to the server, which sees the client's address as its peer.
async fn reach<'a>(
    context: &'a CarryContext,
    peer: &CarrierPeer,
    open: &OpenFrame,
) -> Result<(TcpStream, Option<ShownClient<'a>>), CarryReason> {
    let client = client_of(context, peer, open)?;
    let server = open.server;
    if !is_listed(context, server.port(), client.ip()) {
        return Err(CarryReason::NotListed);
    }
    if !is_here(server.ip()) {
        return Ok((reach_behind(context, peer, open).await?, None));
    }
    let is_named = is_named(context, server, client.ip());
    if !is_named && !context.carriers.reach(&peer.name, server.ip()) {
        return Err(CarryReason::NotHere);
    }
    let listener = find_listener(client.ip(), server)?;
    let owner = listener.map(|it| SocketOwner { uid: it.uid, gid: 0, mark: it.mark });
    // If the listener's cgroup has no hook, the server would see this host's address as its client.
    if !is_named && listener.is_some_and(|it| !is_inside(context, it)) {
        return Err(CarryReason::NotListed);
    }
    // This host's firewall is asked, by test packets, whether it would accept the connection if it came from the
    // network.
    if !context.openings.let_in(client, server, owner).await {
        return Err(CarryReason::NotListed);
    }
    let is_judged = listener.is_some() && context.openings.has_firewall();
    let patience = if is_judged { PATIENCE_ON_LO } else { PATIENCE };
    for _ in 0..PORT_TRIES {
        let (socket, shown) = bound(context, server, client).map_err(|error| {
            warn!(%server, "cannot prepare a connection to the server: {error:#}");
            CarryReason::Unreachable
        })?;
        let error = match timeout(patience, socket.connect(server)).await {
            Ok(Ok(stream)) if prepare(&stream).is_ok() => return Ok((stream, Some(shown))),
            Ok(Err(error)) => error.kind(),
            _ => io::ErrorKind::TimedOut,
        };
        match error {
            // The local port already has a connection to this server, perhaps another program's, so the next port is
            // tried.
            io::ErrorKind::AddrNotAvailable => {}
            // A listener exists but has not received the SYN, so this host's firewall has dropped it.
            _ if is_judged => {
                context.openings.note_unreached(server);
                return Err(CarryReason::NotListed);
            }
            io::ErrorKind::ConnectionRefused => return Err(CarryReason::Refused),
            _ => return Err(CarryReason::Unreachable),
        }
    }
    warn!(%server, "cannot connect to the server: no local port is free");
    Err(CarryReason::Unreachable)
}

/// Connects to a server behind this host, always from the client's own address: the kernel would not route answers to
/// any other address back to the tunnel broker.
async fn reach_behind(
    context: &CarryContext,
    peer: &CarrierPeer,
    open: &OpenFrame,
) -> Result<TcpStream, CarryReason> {
    if !context.gateway.as_ref().is_some_and(|it| it.has_behind(open.server.ip())) {
        return Err(CarryReason::NotHere);
    }
    if !context.carriers.stands_for(&peer.name, open.client.ip()) {
        return Err(CarryReason::Client);
    }
    let connect = gatewayed::connect(&context.hooks, open.client, open.server);
    match timeout(PATIENCE, connect).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Err(CarryReason::Refused),
        Ok(Err(error)) => {
            debug!(server = %open.server, "cannot connect to a server behind this gateway: {error}");
            Err(CarryReason::Unreachable)
        }
        Err(_) => Err(CarryReason::Unreachable),
    }
}

/// Returns the address that the server sees as the client: the claimed one if the peer's key may speak for it, and
/// otherwise the address that the peer's carrier comes from, as with NAT.
fn client_of(context: &CarryContext, peer: &CarrierPeer, ask: &OpenFrame) -> Result<SocketAddr, CarryReason> {
    let said = ask.client.ip();
    let remote = peer.remote;
    if said == remote || context.carriers.stands_for(&peer.name, said) {
        return Ok(ask.client);
    }
    match remote.is_ipv4() == ask.server.is_ipv4() {
        true => Ok(SocketAddr::new(remote, ask.client.port())),
        false => Err(CarryReason::Client),
    }
}

fn is_listed(context: &CarryContext, port: u16, client: IpAddr) -> bool {
    context.servers.read().iter().any(|rule| rule.is_for(port, client)) || context.hooks.serves(port, client)
}

/// Reports whether a rule of the settings names the server's address.
fn is_named(context: &CarryContext, server: SocketAddr, client: IpAddr) -> bool {
    let names =
        |rule: &RuleSetting| rule.is_for(server.port(), client) && rule.addresses.contains(&server.ip());
    context.servers.read().iter().any(names)
}

/// Returns the server's listening socket, or `None` if nobody listens at this address, so that the kernel will refuse
/// the connection.
fn find_listener(client: IpAddr, server: SocketAddr) -> Result<Option<ListeningSocket>, CarryReason> {
    // With client port 0 the kernel finds the listener, and never an established connection.
    listener(SocketAddr::new(client, 0), server).map_err(|error| {
        warn!(%server, "cannot connect: the kernel does not report the server's listener: {error}");
        CarryReason::NotListed
    })
}

/// Reports whether the listener's cgroup has a hook. Without one the server would see this host as its client.
fn is_inside(context: &CarryContext, listener: ListeningSocket) -> bool {
    listener.cgroup.is_none_or(|id| tokio::task::block_in_place(|| context.hooks.have(id)))
}

/// Reports whether the address is on one of this host's interfaces. Binding a socket would be no reliable test, since a
/// host may permit binding to foreign addresses.
fn is_here(address: IpAddr) -> bool {
    let Ok(all) = nix::ifaddrs::getifaddrs() else { return false };
    all.filter_map(|interface| interface.address).any(|storage| {
        let v4 = storage.as_sockaddr_in().map(|it| IpAddr::from(it.ip()));
        let v6 = storage.as_sockaddr_in6().map(|it| IpAddr::from(it.ip()));
        v4.or(v6) == Some(address)
    })
}

/// Returns a socket that is bound to the server's own address. The kernel learns the client's address before
/// the socket connects.
fn bound<'a>(
    context: &'a CarryContext,
    server: SocketAddr,
    client: SocketAddr,
) -> anyhow::Result<(TcpSocket, ShownClient<'a>)> {
    let socket = context.hooks.socket(server)?;
    let is_shown = |broker| context.hooks.is_shown(Guest { broker, server_port: server.port() });
    // A connection from the server's own port would connect to itself if nobody listens.
    context.ports.bind(&socket, server.ip(), |at| at == server || is_shown(at)).context("no port")?;
    let guest = Guest { broker: socket.local_addr()?, server_port: server.port() };
    let shown = context.hooks.show(guest, client)?;
    Ok((socket, shown))
}
