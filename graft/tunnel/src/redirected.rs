//! Connections of this host's applications that the kernel has redirected to the tunnel broker.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use millrace_graft_kernel::hook::{RedirectedConnection, SocketOwner};
use millrace_graft_proto::{
    carry::frame::{CarryFrame, CarryReason, OpenFrame},
    select::kind::TrafficClass,
};
use tokio::{
    io::{AsyncWriteExt as _, copy_bidirectional},
    net::TcpStream,
    time::timeout,
};
use tracing::debug;

use super::{
    carrier::PeerCarrier,
    context::CarryContext,
    listeners::Listeners,
    meter::TransferMeter,
    owner::socket_of,
    pump::{PumpEnd, PumpRole, TunnelPump, prepare},
    stream::CarrierStream,
    table::TunnelPlace,
    watch::{TunnelRecord, WatchedTunnel},
};

/// Time for which connections to a server are not redirected after a tunnelled one was refused, so that applications
/// get the server's refusals directly.
const AVOID: Duration = Duration::from_secs(2);
/// Time limit for getting a stream: the peer limits their number, and a pool may have no idle connection.
const ROOM: Duration = Duration::from_millis(50);
/// Time limit for connecting to a server by plain TCP.
const PATIENCE: Duration = Duration::from_secs(30);

/// Accepts the connections that are redirected here, for as long as the tunnel broker runs.
pub async fn accept(context: Arc<CarryContext>, listeners: Listeners) {
    loop {
        let (local, from) = listeners.next().await;
        let context = context.clone();
        tokio::spawn(async move { begin(&context, local, from).await });
    }
}

async fn begin(context: &CarryContext, mut local: TcpStream, from: SocketAddr) {
    if prepare(&local).is_err() {
        return;
    }
    let Some((arrival, place)) = enter(context, from) else { return };
    let carrier = context.carriers.carrier_to(arrival.server.ip());
    let meter = meter(context, &arrival);
    let watched = watch(context, &arrival, from, carrier.as_deref(), &meter);
    let mut seen = None;
    let ended = carry(context, &mut local, from, carrier, meter, arrival, &mut seen).await;
    context.watch.end(&watched, seen);
    leave(context, place, &ended);
}

pub fn watch(
    context: &CarryContext,
    arrival: &RedirectedConnection,
    from: SocketAddr,
    carrier: Option<&PeerCarrier>,
    meter: &TransferMeter,
) -> WatchedTunnel {
    let carrier = carrier.map(|carrier| carrier.way.to_string());
    context.watch.begin(arrival, from.port(), carrier, meter.expected().clone())
}

/// Returns the original addresses and owner of a connection that the kernel has redirected to the tunnel broker, and a
/// place in the table of tunnelled connections. Returns `None`, and counts the refusal, if there is no place.
pub fn enter(context: &CarryContext, from: SocketAddr) -> Option<(RedirectedConnection, TunnelPlace<'_>)> {
    let Some(arrival) = context.hooks.arrival(from) else {
        debug!(%from, "refused a connection at the broker's port that the kernel has not redirected there");
        context.table.count("stranger");
        return None;
    };
    Some((arrival, place(context)?))
}

/// Reserves a place in the table of tunnelled connections, or counts a refusal and returns `None` if the table is full.
pub fn place(context: &CarryContext) -> Option<TunnelPlace<'_>> {
    let Some(place) = context.table.enter() else {
        context.table.count(CarryReason::Busy.name());
        return None;
    };
    // As soon as the table of tunnelled connections is almost full, the kernel is told to redirect no more connections.
    if context.table.note_room() {
        context.carriers.refresh();
    }
    Some(place)
}

/// Ends a redirected connection: gives its place in the table back, and counts how it ended.
pub fn leave(context: &CarryContext, place: TunnelPlace<'_>, ended: &PumpEnd) {
    drop(place);
    context.table.count(ended.name());
    if context.table.note_room() {
        context.carriers.refresh();
    }
}

async fn carry(
    context: &CarryContext,
    local: &mut TcpStream,
    from: SocketAddr,
    carrier: Option<Arc<PeerCarrier>>,
    meter: TransferMeter,
    arrival: RedirectedConnection,
    seen: &mut Option<TunnelRecord>,
) -> PumpEnd {
    let Some(carrier) = carrier else {
        // The carrier has ended since the kernel redirected the connection.
        return connect_in_place(context, local, &arrival, Vec::new()).await;
    };
    let client = SocketAddr::new(arrival.local, from.port());
    if !context.openings.let_out(client, arrival.server, arrival.owner).await {
        // For the time `AVOID`, connections to this server are not redirected, so that test packets through the
        // firewall are not needed for each of them.
        context.hooks.avoid(arrival.server, AVOID);
        return connect_in_place(context, local, &arrival, Vec::new()).await;
    }
    // The peer finds the connection by this ID if it is resumed on another carrier.
    let open = OpenFrame { id: context.table.next_id(), server: arrival.server, client };
    let _counted = context.carriers.count(&carrier.peer.name);
    let refused = match carry_over(context, local, open, carrier, meter, seen).await {
        Ok((PumpEnd::Refused(reason), given)) => Some((reason, given)),
        Ok((ended, _)) => return ended,
        Err(NoStream) => None,
    };
    match refused {
        None => connect_in_place(context, local, &arrival, Vec::new()).await,
        Some((reason, given)) if reason.is_brokers() => {
            debug!(server = %arrival.server, "the peer's broker refuses the connection: {}", reason.name());
            context.hooks.avoid(arrival.server, AVOID);
            connect_in_place(context, local, &arrival, given).await
        }
        Some((reason, _)) => {
            context.hooks.avoid(arrival.server, AVOID);
            PumpEnd::Refused(reason)
        }
    }
}

/// Returns the counter of bytes, and of requests after an answer, for a connection of an application on this host.
pub fn meter(context: &CarryContext, arrival: &RedirectedConnection) -> TransferMeter {
    let command = arrival.command.clone();
    let cgroup = arrival.cgroup;
    let kind = TrafficClass { is_client: true, port: arrival.server.port(), command, cgroup };
    TransferMeter::new(&context.purposes, kind, arrival.server.ip())
}

struct NoStream;

/// Tunnels the connection. If the peer refuses it, also returns the bytes that the application has sent: none of them
/// has reached the server.
async fn carry_over(
    context: &CarryContext,
    local: &TcpStream,
    open: OpenFrame,
    carrier: Arc<PeerCarrier>,
    meter: TransferMeter,
    seen: &mut Option<TunnelRecord>,
) -> Result<(PumpEnd, Vec<Bytes>), NoStream> {
    let stream = stream(&carrier).await.ok_or(NoStream)?;
    let mut pump = TunnelPump::new(context, local, stream, PumpRole::Client { open, carrier }, meter);
    let ended = pump.run().await;
    let given = match ended {
        PumpEnd::Refused(_) => take_unacked(&mut pump),
        _ => {
            *seen = Some(pump.tunnel_record());
            Vec::new()
        }
    };
    Ok((ended, given))
}

/// Opens a stream for one tunnelled connection. Waits up to `ROOM` if the peer permits no more streams, or if the pool
/// has to make another connection first.
pub async fn stream(carrier: &PeerCarrier) -> Option<CarrierStream> {
    timeout(ROOM, carrier.open()).await.ok()?.ok()
}

/// Returns every byte read from the application so far. None was acknowledged, so all of them can be sent again by
/// plain TCP.
fn take_unacked(pump: &mut TunnelPump<'_>) -> Vec<Bytes> {
    let mut given = Vec::new();
    if pump.out.rewind(0).is_ok() {
        while let Some(CarryFrame::Data(bytes)) = pump.out.give(usize::MAX) {
            given.push(bytes);
        }
    }
    given
}

/// Connects to the server by plain TCP and copies the bytes, since the application's socket stays connected to the
/// broker.
async fn connect_in_place(
    context: &CarryContext,
    local: &mut TcpStream,
    arrival: &RedirectedConnection,
    given: Vec<Bytes>,
) -> PumpEnd {
    let mut remote = match connect(context, arrival.server, arrival.owner).await {
        Ok(remote) => remote,
        Err(error) => {
            debug!(server = %arrival.server, "cannot connect to the server of a redirected connection by plain TCP: {error}");
            return PumpEnd::Reset;
        }
    };
    for bytes in given {
        if remote.write_all(&bytes).await.is_err() {
            return PumpEnd::Reset;
        }
    }
    join(local, &mut remote).await
}

/// Connects to the server with the application's owner and mark, so that firewalls treat the connection like the
/// application's own.
pub async fn connect(
    context: &CarryContext,
    server: SocketAddr,
    owner: SocketOwner,
) -> io::Result<TcpStream> {
    let socket = socket_of(owner, || context.hooks.socket(server))?;
    let remote = timeout(PATIENCE, socket.connect(server)).await??;
    prepare(&remote)?;
    Ok(remote)
}

/// Copies bytes in both directions until both ends have sent everything.
pub async fn join(local: &mut TcpStream, remote: &mut TcpStream) -> PumpEnd {
    if copy_bidirectional(local, remote).await.is_err() {
        return PumpEnd::Reset;
    }
    // All bytes were copied, so closing the sockets must not reset the connections: the linger time of zero is removed.
    for socket in [&*local, remote] {
        let _ = socket2::SockRef::from(socket).set_linger(None);
    }
    PumpEnd::Done
}
