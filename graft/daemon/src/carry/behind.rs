//! Connections of hosts behind this one, which know nothing of it. Their SYNs wait in the kernel until the server was reached by a carrier,
//! so that they hear what a connection in place would hear. What is not carried is forwarded, as if this was no gateway.
//!
//! At the other end, connections to servers behind it are made with the client's own address.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use millrace_graft_kernel::gateway::{Ask, Flow};
use millrace_graft_proto::{carry::frame::Reason, select::kind::Kind};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::TcpStream;
use tracing::debug;

use super::{
    asking::Asking,
    context::Context,
    gateway::{Gateway, Waiting},
    hooks::Hooks,
    led,
    meter::Meter,
    pump::{Ended, prepare},
    strict::{self, Tried},
};

/// And all others to a server that the peer's broker does not connect to.
const AVOID: Duration = Duration::from_secs(30);
/// For a peer that is busy, or a carrier that takes no more.
const AVOID_BUSY: Duration = Duration::from_secs(2);

/// SYNs that were let in, for as long as the broker runs.
pub async fn accept(context: Arc<Context>, gateway: Arc<Gateway>) {
    loop {
        let (local, client, waits) = gateway.next().await;
        if prepare(&local).is_err() {
            continue;
        }
        match waits {
            Some(waits) => drop(waits.send(local)),
            None => {
                debug!(%client, "it was not let in");
                context.table.count("stranger");
            }
        }
    }
}

/// Those that ask, for as long as the broker runs.
pub async fn answer(context: Arc<Context>, gateway: Arc<Gateway>, mut asks: Asking<Ask>) {
    while let Some(come) = asks.next().await {
        for ask in come {
            let (context, gateway) = (context.clone(), gateway.clone());
            tokio::spawn(async move { begin(&context, &gateway, &ask).await });
        }
    }
}

async fn begin(context: &Context, gateway: &Gateway, ask: &Ask) {
    // In place or carried, it wants the room.
    if ask.is_old {
        gateway.end_old(ask.flow);
    }
    let Some(waiting) = gateway.wait(ask.flow) else { return };
    let Some(place) = led::place(context) else {
        gateway.forward(ask.flow);
        return;
    };
    let ended = carry(context, gateway, ask, waiting).await;
    led::leave(context, place, &ended);
}

async fn carry(context: &Context, gateway: &Gateway, ask: &Ask, waiting: Waiting<'_>) -> Ended {
    let Flow { client, server } = ask.flow;
    let Some(carrier) = context.carriers.to(server.ip()) else {
        // It was there a moment ago.
        gateway.forward(ask.flow);
        return Ended::Refused(Reason::Busy);
    };
    match strict::attempt(context, (client, server), &carrier).await {
        Tried::Opened(mut opened) => {
            let local = gateway.admit(ask).await;
            drop(waiting);
            match local {
                Some(local) => {
                    let meter = Meter::new(&context.purposes, kind(server), server.ip());
                    opened.join(context, &local, (carrier, meter)).await.0
                }
                None => Ended::Reset,
            }
        }
        Tried::Refused(Reason::Refused) => {
            gateway.refuse(ask);
            Ended::Refused(Reason::Refused)
        }
        Tried::Refused(reason) if reason.is_brokers() => {
            debug!(%server, "the peer does not carry it: {}", reason.name());
            gateway.forward(ask.flow);
            match reason {
                Reason::Busy => gateway.avoid(server, AVOID_BUSY),
                // That is about this client, and not about others.
                Reason::Client => {}
                _ => gateway.avoid(server, AVOID),
            }
            Ended::Refused(reason)
        }
        Tried::Refused(reason) => {
            // Its SYN comes again, until the client gives up.
            gateway.forget(ask.flow);
            Ended::Refused(reason)
        }
        Tried::Nothing => {
            gateway.forward(ask.flow);
            gateway.avoid(server, AVOID_BUSY);
            Ended::Refused(Reason::Busy)
        }
    }
}

/// Which application of the host behind it is, nobody here knows.
fn kind(server: SocketAddr) -> Kind {
    Kind { is_client: true, port: server.port(), command: String::new(), cgroup: 0 }
}

/// To a server behind this host, from the client's address, and from its port if that is free here: one of a connection before is not, for
/// a minute.
pub async fn connect(hooks: &Hooks, client: SocketAddr, server: SocketAddr) -> io::Result<TcpStream> {
    let is_taken = |kind| matches!(kind, io::ErrorKind::AddrNotAvailable | io::ErrorKind::AddrInUse);
    match connect_from(hooks, client, server).await {
        Err(error) if is_taken(error.kind()) => {
            connect_from(hooks, SocketAddr::new(client.ip(), 0), server).await
        }
        done => done,
    }
}

async fn connect_from(hooks: &Hooks, client: SocketAddr, server: SocketAddr) -> io::Result<TcpStream> {
    let socket = hooks.socket(server)?;
    setsockopt(&socket, sockopt::IpTransparent, &true)?;
    // The client's port may be that of several connections, to different servers.
    socket.set_reuseaddr(true)?;
    socket.bind(client)?;
    let stream = socket.connect(server).await?;
    prepare(&stream)?;
    Ok(stream)
}
