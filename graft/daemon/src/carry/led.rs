//! Connections of this host's applications that the kernel has led here.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use millrace_graft_kernel::hook::{Arrival, Owner};
use millrace_graft_proto::{
    carry::frame::{Frame, Open, Reason},
    select::kind::Kind,
};
use tokio::{
    io::{AsyncWriteExt as _, copy_bidirectional},
    net::TcpStream,
    time::timeout,
};
use tracing::debug;

use super::{
    carrier::Carrier,
    context::Context,
    listeners::Listeners,
    meter::Meter,
    owner::socket_of,
    pump::{Ended, Pump, Role, prepare},
    stream::Stream,
    table::Place,
    watch::{Seen, Watched},
};

/// So long a server that has refused a carried connection is asked in place: its refusal is the application's then.
const AVOID: Duration = Duration::from_secs(2);
/// For a stream: the peer says how many there may be, and a pool has so many that are free.
const ROOM: Duration = Duration::from_millis(50);
/// For a server that is asked in place.
const PATIENCE: Duration = Duration::from_secs(30);

/// For as long as the broker runs.
pub async fn accept(context: Arc<Context>, listeners: Listeners) {
    loop {
        let (local, from) = listeners.next().await;
        let context = context.clone();
        tokio::spawn(async move { begin(&context, local, from).await });
    }
}

async fn begin(context: &Context, mut local: TcpStream, from: SocketAddr) {
    if prepare(&local).is_err() {
        return;
    }
    let Some((arrival, place)) = enter(context, from) else { return };
    let carrier = context.carriers.to(arrival.far.ip());
    let meter = meter(context, &arrival);
    let watched = watch(context, &arrival, (from, carrier.as_deref()), &meter);
    let mut seen = None;
    let ended = carry(context, &mut local, (from, carrier, meter), (arrival, &mut seen)).await;
    context.watch.end(&watched, seen);
    leave(context, place, &ended);
}

pub fn watch(
    context: &Context,
    arrival: &Arrival,
    (from, carrier): (SocketAddr, Option<&Carrier>),
    meter: &Meter,
) -> Watched {
    let carrier = carrier.map(|carrier| carrier.way.to_string());
    context.watch.begin(arrival, from.port(), (carrier, meter.expected().clone()))
}

/// What was led here, and a place for it. Why not is counted.
pub fn enter(context: &Context, from: SocketAddr) -> Option<(Arrival, Place<'_>)> {
    let Some(arrival) = context.hooks.arrival(from) else {
        debug!(%from, "it was not led here");
        context.table.count("stranger");
        return None;
    };
    Some((arrival, place(context)?))
}

/// `None`: there is no room, which is counted.
pub fn place(context: &Context) -> Option<Place<'_>> {
    let Some(place) = context.table.enter() else {
        context.table.count(Reason::Busy.name());
        return None;
    };
    if context.table.note_room() {
        context.carriers.refresh();
    }
    Some(place)
}

pub fn leave(context: &Context, place: Place<'_>, ended: &Ended) {
    drop(place);
    context.table.count(ended.name());
    if context.table.note_room() {
        context.carriers.refresh();
    }
}

async fn carry(
    context: &Context,
    local: &mut TcpStream,
    (from, carrier, meter): (SocketAddr, Option<Arc<Carrier>>, Meter),
    (arrival, seen): (Arrival, &mut Option<Seen>),
) -> Ended {
    let Some(carrier) = carrier else {
        // It was there a moment ago.
        return in_place(context, local, &arrival, Vec::new()).await;
    };
    let client = SocketAddr::new(arrival.near, from.port());
    if !context.openings.let_out((client, arrival.far), arrival.owner).await {
        context.hooks.avoid(arrival.far, AVOID);
        return in_place(context, local, &arrival, Vec::new()).await;
    }
    let open = Open { id: context.table.next_id(), server: arrival.far, client };
    let _counted = context.carriers.count(&carrier.far.peer);
    let refused = match by(context, local, (open, carrier, meter), seen).await {
        Ok((Ended::Refused(reason), given)) => Some((reason, given)),
        Ok((ended, _)) => return ended,
        Err(NoStream) => None,
    };
    match refused {
        None => in_place(context, local, &arrival, Vec::new()).await,
        Some((reason, given)) if reason.is_brokers() => {
            debug!(server = %arrival.far, "the peer does not carry it: {}", reason.name());
            context.hooks.avoid(arrival.far, AVOID);
            in_place(context, local, &arrival, given).await
        }
        Some((reason, _)) => {
            context.hooks.avoid(arrival.far, AVOID);
            Ended::Refused(reason)
        }
    }
}

/// Of an application of this host.
pub fn meter(context: &Context, arrival: &Arrival) -> Meter {
    let (command, cgroup) = (arrival.command.clone(), arrival.cgroup);
    let kind = Kind { is_client: true, port: arrival.far.port(), command, cgroup };
    Meter::new(&context.purposes, kind, arrival.far.ip())
}

struct NoStream;

/// Returns also what the application has given, of which nothing has reached the server if it was refused.
async fn by(
    context: &Context,
    local: &TcpStream,
    (open, carrier, meter): (Open, Arc<Carrier>, Meter),
    seen: &mut Option<Seen>,
) -> Result<(Ended, Vec<Bytes>), NoStream> {
    let stream = stream(&carrier).await.ok_or(NoStream)?;
    let mut pump = Pump::new(context, local, stream, (Role::Client { open, carrier }, meter));
    let ended = pump.run().await;
    let given = match ended {
        Ended::Refused(_) => given(&mut pump),
        _ => {
            *seen = Some(pump.seen());
            Vec::new()
        }
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
async fn in_place(context: &Context, local: &mut TcpStream, arrival: &Arrival, given: Vec<Bytes>) -> Ended {
    let mut remote = match connect(context, (arrival.far, arrival.owner)).await {
        Ok(remote) => remote,
        Err(error) => {
            debug!(server = %arrival.far, "in place: {error}");
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

/// Connects to the server with the application's owner and mark, so that firewalls see no difference.
pub async fn connect(context: &Context, (server, owner): (SocketAddr, Owner)) -> io::Result<TcpStream> {
    let socket = socket_of(owner, || context.hooks.socket(server))?;
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
