//! Attempts to connect that overlap (RFC 8305): all addresses of a name, and all servers of a list, are tried until one
//! answers.

use std::{collections::VecDeque, future::poll_fn, net::SocketAddr, task::Poll, time::Duration};

use tokio::time;

/// The delay after which the next address is tried while an attempt is under way (RFC 8305, "Connection Attempt
/// Delay").
pub const ADDRESS_DELAY: Duration = Duration::from_millis(250);
/// The delay after which the next server is tried while an attempt at the previous one is under way. A preferred server
/// that takes less than this for a handshake is still preferred.
pub const SERVER_DELAY: Duration = Duration::from_secs(1);
/// The most addresses of one host name to which a connection is tried.
pub const MAX_ADDRESSES: usize = 8;
/// The longest time that attempts at all addresses of a server of a list may take together.
pub const SERVER_TIMEOUT: Duration = Duration::from_secs(5);

/// Starts attempts one after the other: each after `delay`, or as soon as an earlier one fails. Returns the first
/// success and drops the rest. Calls `failed` for each attempt that failed before the success. All attempts run in the
/// calling task, so sockets belong to the network namespace of its thread.
pub async fn first_success<T, E>(
    attempts: impl IntoIterator<Item = impl Future<Output = Result<T, E>>>,
    delay: Duration,
    mut failed: impl FnMut(E),
) -> Option<T> {
    let mut waiting = attempts.into_iter().peekable();
    let mut running = Vec::new();
    loop {
        running.extend(waiting.next().map(Box::pin));
        let has_more = waiting.peek().is_some();
        let first = poll_fn(|context| {
            for at in 0..running.len() {
                if let Poll::Ready(done) = running[at].as_mut().poll(context) {
                    drop(running.swap_remove(at));
                    return Poll::Ready(Some(done));
                }
            }
            if running.is_empty() { Poll::Ready(None) } else { Poll::Pending }
        });
        match time::timeout(if has_more { delay } else { Duration::MAX }, first).await {
            Ok(Some(Ok(done))) => return Some(done),
            Ok(Some(Err(error))) => failed(error),
            Ok(None) if !has_more => return None,
            // After a timeout, the next attempt starts.
            Ok(None) | Err(_) => {}
        }
    }
}

/// Returns the addresses in an order in which IPv4 and IPv6 alternate. The first one, which the resolver prefers, stays
/// first.
pub fn interleaved(addresses: impl Iterator<Item = SocketAddr>) -> VecDeque<SocketAddr> {
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
