//! A server of bare quinn connections, with the same versions of quinn and rustls as the relay, and with quinn's default
//! windows. It shows what a connection costs before a relay adds anything.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use quinn::{Endpoint, Incoming, ServerConfig, TransportConfig, crypto::rustls::QuicServerConfig};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};

use millrace_moq::Draft;

/// Idle timeout of the connections, which is the relay's default as well.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, clap::Args)]
pub struct QuinnServe {
    #[arg(long)]
    listen: SocketAddr,
    #[arg(long)]
    tls_cert: PathBuf,
    #[arg(long)]
    tls_key: PathBuf,
}

/// Accepts connections and holds them until the process is killed.
pub fn serve(args: &QuinnServe) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let endpoint = Endpoint::server(server_config(args)?, args.listen)?;
        while let Some(incoming) = endpoint.accept().await {
            tokio::spawn(hold(incoming));
        }
        Ok(())
    })
}

async fn hold(incoming: Incoming) -> Result<(), quinn::ConnectionError> {
    incoming.await?.closed().await;
    Ok(())
}

fn server_config(args: &QuinnServe) -> anyhow::Result<ServerConfig> {
    let certificate = CertificateDer::from_pem_file(&args.tls_cert).context("cannot read the certificate")?;
    let key = PrivateKeyDer::from_pem_file(&args.tls_key).context("cannot read the private key")?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)?;
    tls.alpn_protocols = vec![Draft::NEWEST.alpn().to_vec()];
    let mut config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?));
    let mut transport = TransportConfig::default();
    transport.max_idle_timeout(Some(IDLE_TIMEOUT.try_into()?));
    config.transport_config(Arc::new(transport));
    Ok(config)
}
