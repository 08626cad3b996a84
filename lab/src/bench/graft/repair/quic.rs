//! Sends the messages of the delay benchmark as QUIC datagrams (RFC 9221), for comparison with packet grafts:
//! encrypted, congestion-controlled, and without retransmission.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Instant;

use anyhow::anyhow;
use quinn::{ClientConfig, Connection, Endpoint, EndpointConfig, ServerConfig, TokioRuntime};
use rustls::RootCertStore;
use tokio::time::sleep_until;

use super::datagrams::{DatagramRun, ReceiverState, RepairOutcome, message};
use crate::bench::site::BenchSite;
use crate::lab::LabNode;

const NAME: &str = "localhost";

/// Sends the messages of a run from one node to the other with quinn.
pub fn measure(site: &BenchSite, run: &DatagramRun) -> anyhow::Result<RepairOutcome> {
    let near = site.relay()?;
    let far = site.subscribers()?;
    let (client, server) = configs()?;
    let from = socket(near)?;
    let to = socket(far)?;
    let at = to.local_addr()?;
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(async {
        let mut from = endpoint(from, None)?;
        from.set_default_client_config(client);
        let to = endpoint(to, Some(server))?;
        traffic(run, &from, &to, at).await
    })
}

fn socket(node: &LabNode) -> anyhow::Result<UdpSocket> {
    Ok(node.enter(|| UdpSocket::bind((node.addr_v4(), 0)))??)
}

fn endpoint(socket: UdpSocket, server: Option<ServerConfig>) -> anyhow::Result<Endpoint> {
    Ok(Endpoint::new(EndpointConfig::default(), server, socket, Arc::new(TokioRuntime))?)
}

fn configs() -> anyhow::Result<(ClientConfig, ServerConfig)> {
    let made = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
    let certificate = made.cert.der().clone();
    let key = made.signing_key.into();
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone())?;
    Ok((
        ClientConfig::with_root_certificates(Arc::new(roots))?,
        ServerConfig::with_single_cert(vec![certificate], key)?,
    ))
}

async fn traffic(
    run: &DatagramRun,
    from: &Endpoint,
    to: &Endpoint,
    at: SocketAddr,
) -> anyhow::Result<RepairOutcome> {
    let accept = async {
        to.accept().await.ok_or_else(|| anyhow!("the QUIC endpoint is closed"))?.await.map_err(Into::into)
    };
    let connect = async { Ok::<_, anyhow::Error>(from.connect(at, NAME)?.await?) };
    let (near, far) = tokio::try_join!(connect, accept)?;
    let base = Instant::now();
    let receiving = tokio::spawn(receive(far, base, run.bytes));
    let sent = send(run, &near, base).await?;
    tokio::time::sleep(run.grace).await;
    // Closing the endpoint ends the receiver's loop.
    to.close(0_u32.into(), b"");
    Ok(RepairOutcome { sent, ..receiving.await? })
}

async fn send(run: &DatagramRun, near: &Connection, base: Instant) -> anyhow::Result<u64> {
    let mut number = 0;
    while let Some(due) = run.due(number, base) {
        sleep_until((base + due).into()).await;
        // The call waits while the congestion window has no room for another datagram.
        near.send_datagram_wait(message(number, due, run.bytes).into()).await?;
        number += 1;
    }
    Ok(number)
}

async fn receive(far: Connection, base: Instant, bytes: usize) -> RepairOutcome {
    let mut receiving = ReceiverState::default();
    while let Ok(got) = far.read_datagram().await {
        receiving.take(&got, base, bytes);
    }
    receiving.outcome
}
