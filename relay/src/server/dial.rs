//! Connects to another relay by its name. All addresses of the name are tried, staggered, and the first that answers is
//! used (RFC 8305).

use std::{collections::VecDeque, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context as _;
use millrace_transport::{Connection, Endpoint};
use millrace_webtransport as webtransport;
use millrace_webtransport::Tunnel;
use tokio::{task::JoinSet, time};
use url::Url;

use super::ServerShared;

/// The port of moqt:// and https:// URLs that name none (draft-22, "MOQT URI Scheme").
const DEFAULT_PORT: u16 = 443;
/// The delay after which the next address is tried while an attempt is under way (RFC 8305, "Connection Attempt
/// Delay").
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// The most addresses of one host name to which the relay tries to connect.
const MAX_ADDRESSES: usize = 8;
/// The longest time that all connection attempts together may take.
const TIMEOUT: Duration = Duration::from_secs(5);

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
    let late = |_| anyhow::anyhow!("the relay did not answer within {} s", TIMEOUT.as_secs());
    time::timeout(TIMEOUT, connected).await.map_err(late)?
}

async fn first_connection(shared: &Arc<ServerShared>, url: &Url) -> anyhow::Result<Arc<Connection>> {
    let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let port = url.port().unwrap_or(DEFAULT_PORT);
    let found = time::timeout(TIMEOUT, tokio::net::lookup_host((host, port))).await??;
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
    let connected = first_success(attempts, ATTEMPT_DELAY, |error| failure = error).await;
    connected.ok_or(failure)
}

/// Starts attempts one after the other: each after `delay`, or as soon as an earlier one fails. Returns the first
/// success and aborts the rest. Calls `failed` for each attempt that failed before the success.
pub async fn first_success<T: Send + 'static, E: Send + 'static>(
    attempts: impl IntoIterator<Item = impl Future<Output = Result<T, E>> + Send + 'static>,
    delay: Duration,
    mut failed: impl FnMut(E),
) -> Option<T> {
    let mut waiting = attempts.into_iter().peekable();
    let mut running = JoinSet::new();
    loop {
        if let Some(attempt) = waiting.next() {
            running.spawn(attempt);
        }
        let delay = if waiting.peek().is_some() { delay } else { Duration::MAX };
        match time::timeout(delay, running.join_next()).await {
            Ok(Some(Ok(Ok(done)))) => return Some(done),
            Ok(Some(Ok(Err(error)))) => failed(error),
            Ok(None) if waiting.peek().is_none() => return None,
            // An attempt that panicked was logged by the panic hook. After a timeout, the next attempt starts.
            Ok(Some(Err(_)) | None) | Err(_) => {}
        }
    }
}

/// Returns the addresses in an order in which IPv4 and IPv6 alternate. The first one, which the resolver prefers, stays
/// first.
fn interleaved(addresses: impl Iterator<Item = SocketAddr>) -> VecDeque<SocketAddr> {
    let mut addresses = addresses.peekable();
    let Some(preferred) = addresses.peek().map(SocketAddr::is_ipv4) else { return VecDeque::new() };
    let (mut one, mut other): (VecDeque<_>, VecDeque<_>) =
        addresses.partition(|addr| addr.is_ipv4() == preferred);
    let mut all = VecDeque::new();
    while !one.is_empty() || !other.is_empty() {
        all.extend(one.pop_front());
        all.extend(other.pop_front());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dialled_ip_families_alternate_beginning_with_the_first_resolved() {
        let addresses = |all: &[&str]| all.iter().map(|addr| addr.parse().unwrap()).collect::<Vec<_>>();
        let resolved = addresses(&["[::1]:1", "[::2]:1", "[::3]:1", "192.0.2.1:1"]);
        let tried = addresses(&["[::1]:1", "192.0.2.1:1", "[::2]:1", "[::3]:1"]);
        assert_eq!(interleaved(resolved.into_iter()), tried);
        assert!(interleaved(std::iter::empty()).is_empty());
    }
}
