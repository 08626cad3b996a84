//! Probes of the path to a peer: whether UDP passes, and up to which packet size. The connecting end probes. The
//! listening end answers every sender that shows the token of a running negotiation.

use std::{
    collections::{HashMap, HashSet},
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Context as _;
use millrace_graft::status::PathVerdict;
use millrace_graft_proto::probe::{ProbeKind, ProbePacket, ProbeToken, TOKEN_LABEL};
use tokio::{net::UdpSocket, task::JoinSet, time::Instant};
use tracing::warn;

use crate::sockets::udp;

/// Sizes of the probes as IP packets, in bytes: those of common links and tunnels.
const SIZES: [u16; 9] = [1280, 1380, 1400, 1420, 1450, 1480, 1492, 1500, 9000];
/// Number of times that each probe is sent, so that one lost packet does not make a size or protocol count as blocked.
const TIMES: u32 = 3;
/// Time to wait for answers before the probes are sent again.
const BETWEEN: Duration = Duration::from_millis(20);
/// Time to wait for answers after the last probe was sent.
const PATIENCE: Duration = Duration::from_secs(2);
const DATAGRAM_MAX: usize = 1 << 14;

/// Returns the probe token, a secret that only the two ends of this TLS connection can derive.
pub fn token<Data>(tls: &rustls::ConnectionCommon<Data>) -> Option<ProbeToken> {
    tls.export_keying_material(ProbeToken::default(), TOKEN_LABEL, None).ok()
}

/// Probes the path to the address of a control connection. The peer answers probes on the same port number
/// over UDP.
pub async fn probe(to: SocketAddr, token: ProbeToken) -> PathVerdict {
    let (udp, mtu) = match ask_udp(to, token).await {
        Ok(found) => found,
        Err(error) => {
            warn!(%to, "the network path to the peer cannot be probed by UDP: {error}");
            (None, None)
        }
    };
    PathVerdict { udp, mtu, ..PathVerdict::default() }
}

async fn ask_udp(to: SocketAddr, token: ProbeToken) -> io::Result<(Option<bool>, Option<u16>)> {
    let socket = udp(to)?;
    // Bytes of the IP and UDP headers around the payload.
    let around = if to.is_ipv4() { 28 } else { 48 };
    let answered = ask(&socket, to, token, &SIZES.map(|size| size - around)).await?;
    let mtu = answered.iter().max().map(|bytes| bytes + around);
    Ok((Some(!answered.is_empty()), mtu))
}

/// Sends probes of all `sizes` repeatedly, and returns the sizes of those that the peer answered.
async fn ask(
    socket: &UdpSocket,
    to: SocketAddr,
    token: ProbeToken,
    sizes: &[u16],
) -> io::Result<HashSet<u16>> {
    let mut answered = HashSet::new();
    let mut buffer = vec![0; DATAGRAM_MAX];
    for time in 0..TIMES {
        for bytes in sizes.iter().filter(|bytes| !answered.contains(*bytes)) {
            // Sending fails if the probe is longer than the first link's MTU. The probe then stays unanswered, and its
            // size counts as too large for the path.
            let _ = socket.send_to(&ProbePacket::ask(token, time, *bytes), to).await;
        }
        let patience = if time + 1 == TIMES { PATIENCE } else { BETWEEN };
        let until = Instant::now() + patience;
        while answered.len() < sizes.len() {
            let Ok(got) = tokio::time::timeout_at(until, socket.recv_from(&mut buffer)).await else { break };
            let (length, _) = got?;
            let probe = ProbePacket::read(&buffer[..length]);
            let ours = probe.filter(|it| it.kind == ProbeKind::Answer && it.token == token);
            answered.extend(ours.map(|it| it.bytes).filter(|bytes| sizes.contains(bytes)));
        }
    }
    Ok(answered)
}

/// Answers probes that contain the token of a running negotiation.
#[derive(Clone)]
pub struct Reflector {
    known: Arc<Mutex<HashMap<ProbeToken, usize>>>,
    at: SocketAddr,
}

/// Registration of a negotiation's probe token. Probes with the token are answered until this value is dropped.
pub struct Answered(Reflector, ProbeToken);

impl Reflector {
    pub fn bind(at: SocketAddr) -> anyhow::Result<Self> {
        Ok(Self { known: Arc::default(), at })
    }

    /// # Errors
    /// The UDP port is in use.
    pub fn serve(&self, tasks: &mut JoinSet<()>) -> anyhow::Result<()> {
        let socket = std::net::UdpSocket::bind(self.at)
            .and_then(|socket| {
                socket.set_nonblocking(true)?;
                UdpSocket::from_std(socket)
            })
            .with_context(|| format!("cannot answer probes on UDP {}", self.at))?;
        tasks.spawn(self.clone().answer(socket));
        Ok(())
    }

    pub fn know(&self, token: ProbeToken) -> Answered {
        *self.lock().entry(token).or_default() += 1;
        Answered(self.clone(), token)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<ProbeToken, usize>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer(self, socket: UdpSocket) {
        let mut buffer = vec![0; DATAGRAM_MAX];
        loop {
            let Ok((length, from)) = socket.recv_from(&mut buffer).await else {
                // The socket may report an ICMP error that an earlier answer has caused. A lasting error must not keep
                // a CPU busy, so there is a pause.
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            };
            let Some(probe) = ProbePacket::read(&buffer[..length]) else { continue };
            if probe.kind == ProbeKind::Ask && self.lock().contains_key(&probe.token) {
                let _ = socket.send_to(&probe.answer(), from).await;
            }
        }
    }
}

impl Drop for Answered {
    fn drop(&mut self) {
        let mut known = self.0.lock();
        if let Some(count) = known.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                known.remove(&self.1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn answering() -> (Reflector, SocketAddr, JoinSet<()>) {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let at = socket.local_addr().unwrap();
        let reflector = Reflector::bind(at).unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(reflector.clone().answer(socket));
        (reflector, at, tasks)
    }

    #[tokio::test]
    async fn probe_with_an_unknown_token_is_not_answered() {
        let (reflector, at, _tasks) = answering().await;
        let known = reflector.know([7; 16]);
        let (udp, mtu) = ask_udp(at, [7; 16]).await.unwrap();
        assert_eq!((udp, mtu), (Some(true), Some(9000)), "loopback takes more");
        let socket = super::udp(at).unwrap();
        assert!(ask(&socket, at, [8; 16], &[64]).await.unwrap().is_empty());
        drop(known);
        assert!(ask(&socket, at, [7; 16], &[64]).await.unwrap().is_empty());
        assert!(reflector.lock().is_empty());
    }
}
