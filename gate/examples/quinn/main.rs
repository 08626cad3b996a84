//! A QUIC server on quinn that guards its port with the gate. The gate tracks connection IDs by itself. The server
//! counts each client's connections, and accepts the tokens of the gate's Retry packets. It answers "hello" on every
//! bidirectional stream.
//!
//!     cargo run --example quinn -- eth0 gate.toml web 192.0.2.1 4433 cert.pem key.pem

mod token;

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
};

use anyhow::Context;
use clap::Parser;
use millrace_gate::{Gate, Policy, Scope, XdpMode};
use quinn::{Endpoint, Incoming, ServerConfig, crypto::rustls::QuicServerConfig};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio::signal::unix::{SignalKind, signal};

#[derive(Parser)]
struct QuinnExampleArgs {
    interface: String,
    policy: PathBuf,
    scope: String,
    address: IpAddr,
    port: u16,
    certificate: PathBuf,
    key: PathBuf,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = QuinnExampleArgs::parse();
    let gate = Gate::new(&Policy::load(&args.policy)?)?;
    gate.attach(&args.interface, XdpMode::Auto)?;
    let scope = gate.scope(&args.scope)?;
    let mut config = server_config(&args)?;
    token::take_part(&mut config, scope.clone());
    let endpoint = Endpoint::server(config, SocketAddr::new(args.address, args.port))?;
    let mut terminate = signal(SignalKind::terminate())?;
    println!("ready");
    loop {
        tokio::select! {
            incoming = endpoint.accept() => match incoming {
                Some(incoming) => drop(tokio::spawn(serve(incoming, scope.clone()))),
                None => return Ok(()),
            },
            // Dropping the gate detaches it from the interface.
            _ = terminate.recv() => return Ok(()),
        }
    }
}

async fn serve(incoming: Incoming, scope: Scope) {
    // The handshake validates the client's address. If the policy has rule `retry`, a token may have done so before.
    let Ok(connection) = incoming.await else { return };
    let client = connection.remote_address().ip();
    // The gate counts the connection for its client until `counted` is dropped. If counting fails, the server serves
    // the client anyway.
    let counted = scope.connection(client).inspect_err(|error| eprintln!("gate: {error}"));
    while let Ok((mut send, mut recv)) = connection.accept_bi().await {
        // An error means that the client is gone: the next `accept_bi` then ends the loop.
        let _ = recv.read_to_end(64 * 1024).await;
        let _ = send.write_all(b"hello\n").await;
        let _ = send.finish();
    }
    drop(counted);
}

fn server_config(args: &QuinnExampleArgs) -> anyhow::Result<ServerConfig> {
    let certificate = CertificateDer::from_pem_file(&args.certificate).context("certificate")?;
    let key = PrivateKeyDer::from_pem_file(&args.key).context("key")?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)?;
    tls.alpn_protocols = vec![b"hello".to_vec()];
    Ok(ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?)))
}
