//! Tunnelled connections of hosts behind this gateway, which do not know of the tunnel. The kernel holds a client's
//! SYN until a carrier has reached the server, so the client gets the answer that it would get without a tunnel. A
//! connection that is not tunnelled is forwarded as any router would.
//!
//! The tunnel broker at the server's end connects from the client's own address to servers behind its host.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use millrace_graft_kernel::gateway::{GatewayConnection, GatewaySyn};
use millrace_graft_proto::{carry::frame::CarryReason, select::kind::TrafficClass};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::TcpStream;
use tracing::debug;

use super::{
    context::CarryContext,
    gateway::{CarryGateway, HeldSyn},
    hooks::Hooks,
    kernel_events::KernelEvents,
    meter::TransferMeter,
    pump::{PumpEnd, prepare},
    redirected,
    strict::{self, TunnelAttempt},
};

/// Time for which connections to a server are forwarded after the peer's tunnel broker has refused one.
const AVOID: Duration = Duration::from_secs(30);
/// Time for which connections to a server are forwarded if the peer is busy, or the carrier permits no further
/// connection.
const AVOID_BUSY: Duration = Duration::from_secs(2);

/// Passes connections whose SYNs were admitted to the tasks that wait for them, for as long as the tunnel broker runs.
pub async fn accept(context: Arc<CarryContext>, gateway: Arc<CarryGateway>) {
    loop {
        let (local, client, waits) = gateway.next().await;
        if prepare(&local).is_err() {
            continue;
        }
        match waits {
            Some(waits) => drop(waits.send(local)),
            None => {
                debug!(%client, "a connection at the gateway's listener was dropped, since no held SYN belongs to it");
                context.table.count("stranger");
            }
        }
    }
}

/// Handles the SYNs that the kernel reports, for as long as the tunnel broker runs.
pub async fn answer(
    context: Arc<CarryContext>,
    gateway: Arc<CarryGateway>,
    mut asks: KernelEvents<GatewaySyn>,
) {
    while let Some(come) = asks.next().await {
        for ask in come {
            let context = context.clone();
            let gateway = gateway.clone();
            tokio::spawn(async move { begin(&context, &gateway, &ask).await });
        }
    }
}

async fn begin(context: &CarryContext, gateway: &CarryGateway, ask: &GatewaySyn) {
    // The kernel may still have a socket of an earlier connection between these addresses. That old socket must be
    // removed, whether the new connection is tunnelled or forwarded.
    if ask.is_old {
        gateway.end_old(ask.flow);
    }
    let Some(waiting) = gateway.wait(ask.flow) else { return };
    let Some(place) = redirected::place(context) else {
        gateway.forward(ask.flow);
        return;
    };
    let ended = carry(context, gateway, ask, waiting).await;
    redirected::leave(context, place, &ended);
}

async fn carry(
    context: &CarryContext,
    gateway: &CarryGateway,
    ask: &GatewaySyn,
    waiting: HeldSyn<'_>,
) -> PumpEnd {
    let GatewayConnection { client, server } = ask.flow;
    let Some(carrier) = context.carriers.carrier_to(server.ip()) else {
        // The carrier has ended since the kernel held the SYN back.
        gateway.forward(ask.flow);
        return PumpEnd::Refused(CarryReason::Busy);
    };
    match strict::attempt(context, client, server, &carrier).await {
        TunnelAttempt::Opened(mut opened) => {
            let local = gateway.admit(ask).await;
            drop(waiting);
            match local {
                Some(local) => {
                    let meter = TransferMeter::new(&context.purposes, kind(server), server.ip());
                    opened.join(context, &local, carrier, meter).await.0
                }
                None => PumpEnd::Reset,
            }
        }
        TunnelAttempt::Refused(CarryReason::Refused) => {
            gateway.refuse(ask);
            PumpEnd::Refused(CarryReason::Refused)
        }
        TunnelAttempt::Refused(reason) if reason.is_brokers() => {
            debug!(%server, "the peer's broker refuses the connection: {}", reason.name());
            gateway.forward(ask.flow);
            match reason {
                CarryReason::Busy => gateway.avoid(server, AVOID_BUSY),
                // The reason for the refusal concerns this client only, so connections of other clients may still be
                // tunnelled.
                CarryReason::Client => {}
                _ => gateway.avoid(server, AVOID),
            }
            PumpEnd::Refused(reason)
        }
        TunnelAttempt::Refused(reason) => {
            // The client repeats its SYN until its own time limit.
            gateway.forget(ask.flow);
            PumpEnd::Refused(reason)
        }
        TunnelAttempt::Nothing => {
            gateway.forward(ask.flow);
            gateway.avoid(server, AVOID_BUSY);
            PumpEnd::Refused(CarryReason::Busy)
        }
    }
}

/// Returns the traffic class of a connection that a host behind this one makes. Its application is not known here.
fn kind(server: SocketAddr) -> TrafficClass {
    TrafficClass { is_client: true, port: server.port(), command: String::new(), cgroup: 0 }
}

/// Connects to a server behind this host, from the client's address. The client's port is used if it is free on this
/// host. The port of an earlier connection stays in use for a minute.
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
    // IP_TRANSPARENT permits binding to the client's address, which is not this host's.
    setsockopt(&socket, sockopt::IpTransparent, &true)?;
    // The client's port may be in use for connections to other servers.
    socket.set_reuseaddr(true)?;
    socket.bind(client)?;
    let stream = socket.connect(server).await?;
    prepare(&stream)?;
    Ok(stream)
}
