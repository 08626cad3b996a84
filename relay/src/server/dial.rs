//! Connects to another relay by its name. All addresses of the name are tried, staggered, and the first that answers is
//! used (RFC 8305).

use std::{net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use millrace_transport::{Connection, Endpoint};
use millrace_webtransport as webtransport;
use millrace_webtransport::Tunnel;
use millrace_webtransport::attempts::{
    ADDRESS_DELAY, MAX_ADDRESSES, SERVER_TIMEOUT, first_success, interleaved,
};
use tokio::time;
use url::Url;

use super::ServerShared;

/// The port of moqt:// and https:// URLs that name none (draft-22, "MOQT URI Scheme").
const DEFAULT_PORT: u16 = 443;

/// Connects to a relay. A URL with `https` asks for a WebTransport session on the connection.
///
/// # Errors
/// Returns an error if the name has no usable address, or if no address answered in time. In the latter case, returns
/// the error of the last attempt.
pub async fn connect(
    shared: &Arc<ServerShared>,
    url: &Url,
) -> anyhow::Result<(Arc<Connection>, Option<Tunnel>)> {
    let connected = async {
        let connection = first_connection(shared, url).await?;
        if url.scheme() != "https" {
            return Ok((connection, None));
        }
        let protocols: Vec<_> = shared.config.drafts.iter().map(|draft| draft.protocol()).collect();
        let tunnel = webtransport::connect(&connection.quic, url.clone(), &protocols).await?;
        connection.bind(tunnel.binding(), Tunnel::STREAMS);
        Ok((connection, Some(tunnel)))
    };
    let late = |_| anyhow::anyhow!("the relay did not answer within {} s", SERVER_TIMEOUT.as_secs());
    time::timeout(SERVER_TIMEOUT, connected).await.map_err(late)?
}

async fn first_connection(shared: &Arc<ServerShared>, url: &Url) -> anyhow::Result<Arc<Connection>> {
    let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let port = url.port().unwrap_or(DEFAULT_PORT);
    let found = time::timeout(SERVER_TIMEOUT, tokio::net::lookup_host((host, port))).await??;
    let is_web = url.scheme() == "https";
    let attempt = |addr: SocketAddr| {
        let same_family = |endpoint: &Endpoint| endpoint.local_addr().is_ipv4() == addr.is_ipv4();
        let index = shared.outgoing.iter().position(same_family)?;
        let shared = Arc::clone(shared);
        let host = host.to_owned();
        Some(async move {
            let endpoint = &shared.outgoing[index];
            match is_web {
                true => endpoint.connect_as(addr, &host, webtransport::ALPN).await,
                false => endpoint.connect(addr, &host).await,
            }
            .with_context(|| addr.to_string())
        })
    };
    let attempts = interleaved(found).into_iter().filter_map(attempt).take(MAX_ADDRESSES);
    // A failed attempt does not end the others. The last error is returned if all fail.
    let mut failure = anyhow::anyhow!("{host} has no address of a family that this relay listens on");
    let connected = first_success(attempts, ADDRESS_DELAY, |error| failure = error).await;
    connected.ok_or(failure)
}
