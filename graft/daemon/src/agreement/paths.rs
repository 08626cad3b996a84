//! What the path to a peer lets through: UDP, IP protocol 253, and packets of which size. Who calls asks, who is called answers
//! whoever shows the token of a conversation that goes on.

use std::{
    collections::{HashMap, HashSet},
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Context as _;
use millrace_graft::status::Verdict;
use millrace_graft_proto::probe::{HEADER_BYTES, Kind, Probe, TOKEN_LABEL, Token};
use tokio::{net::UdpSocket, task::JoinSet, time::Instant};
use tracing::warn;

use crate::sockets::{PROTOCOL_253, payload, raw, send_whole, udp};

/// Sizes of IP packets that are tried: those that links and tunnels have.
const SIZES: [u16; 9] = [1280, 1380, 1400, 1420, 1450, 1480, 1492, 1500, 9000];
/// Times that each goes out, so that a loss is not taken for a verdict.
const TIMES: u32 = 3;
const BETWEEN: Duration = Duration::from_millis(20);
/// For what was sent last.
const PATIENCE: Duration = Duration::from_secs(2);
const DATAGRAM_MAX: usize = 1 << 14;

/// What only the two ends of a TLS connection know.
pub fn token<Data>(tls: &rustls::ConnectionCommon<Data>) -> Option<Token> {
    tls.export_keying_material(Token::default(), TOKEN_LABEL, None).ok()
}

/// To the address of a control connection, whose port the peer answers probes on, too.
pub async fn probe(to: SocketAddr, token: Token) -> Verdict {
    let (udp, mtu) = match ask_udp(to, token).await {
        Ok(found) => found,
        Err(error) => {
            warn!(%to, "UDP cannot be probed: {error}");
            (None, None)
        }
    };
    let protocol_253 = match ask_253(to.ip(), token).await {
        Ok(passes) => Some(passes),
        Err(error) => {
            warn!(%to, "IP protocol 253 cannot be probed: {error}");
            None
        }
    };
    Verdict { udp, mtu, protocol_253, ..Verdict::default() }
}

async fn ask_udp(to: SocketAddr, token: Token) -> io::Result<(Option<bool>, Option<u16>)> {
    let socket = udp(to)?;
    let around = if to.is_ipv4() { 28 } else { 48 };
    let answered = ask(&socket, to, token, &SIZES.map(|size| size - around)).await?;
    let mtu = answered.iter().max().map(|bytes| bytes + around);
    Ok((Some(!answered.is_empty()), mtu))
}

async fn ask_253(to: IpAddr, token: Token) -> io::Result<bool> {
    let to = SocketAddr::new(to, 0);
    let socket = raw(to, PROTOCOL_253)?;
    Ok(!ask(&socket, to, token, &[HEADER_BYTES as u16]).await?.is_empty())
}

/// Sizes of those that were answered.
async fn ask(socket: &UdpSocket, to: SocketAddr, token: Token, sizes: &[u16]) -> io::Result<HashSet<u16>> {
    let mut answered = HashSet::new();
    let mut buffer = vec![0; DATAGRAM_MAX];
    for time in 0..TIMES {
        for bytes in sizes.iter().filter(|bytes| !answered.contains(*bytes)) {
            // More than the first link takes is a verdict, too.
            let _ = socket.send_to(&Probe::ask(token, time, *bytes), to).await;
        }
        let patience = if time + 1 == TIMES { PATIENCE } else { BETWEEN };
        let until = Instant::now() + patience;
        while answered.len() < sizes.len() {
            let Ok(got) = tokio::time::timeout_at(until, socket.recv_from(&mut buffer)).await else { break };
            let (length, _) = got?;
            let probe = Probe::read(payload(to.ip(), to.port() == 0, &buffer[..length]));
            let ours = probe.filter(|it| it.kind == Kind::Answer && it.token == token);
            answered.extend(ours.map(|it| it.bytes).filter(|bytes| sizes.contains(bytes)));
        }
    }
    Ok(answered)
}

/// Answers probes, of those that are known.
#[derive(Clone)]
pub struct Reflector {
    known: Arc<Mutex<HashMap<Token, usize>>>,
    at: SocketAddr,
}

/// While it lives, probes with its token are answered.
pub struct Answered(Reflector, Token);

impl Reflector {
    pub fn bind(at: SocketAddr) -> anyhow::Result<Self> {
        Ok(Self { known: Arc::default(), at })
    }

    /// # Errors
    /// The UDP port is taken. That there is no raw socket is no error: then protocol 253 does not pass.
    pub fn serve(&self, tasks: &mut JoinSet<()>) -> anyhow::Result<()> {
        let socket = std::net::UdpSocket::bind(self.at)
            .and_then(|socket| {
                socket.set_nonblocking(true)?;
                UdpSocket::from_std(socket)
            })
            .with_context(|| format!("cannot answer probes on UDP {}", self.at))?;
        tasks.spawn(self.clone().answer(socket, false));
        match raw(SocketAddr::new(self.at.ip(), 0), PROTOCOL_253).and_then(|socket| {
            send_whole(&socket, self.at.ip())?;
            Ok(socket)
        }) {
            Ok(socket) => {
                tasks.spawn(self.clone().answer(socket, true));
            }
            Err(error) => warn!("probes of IP protocol 253 are not answered: {error}"),
        }
        Ok(())
    }

    pub fn know(&self, token: Token) -> Answered {
        *self.lock().entry(token).or_default() += 1;
        Answered(self.clone(), token)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Token, usize>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer(self, socket: UdpSocket, is_raw: bool) {
        let mut buffer = vec![0; DATAGRAM_MAX];
        loop {
            let Ok((length, from)) = socket.recv_from(&mut buffer).await else {
                // An ICMP error of an earlier answer; or worse, which is not to keep a CPU busy.
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            };
            let Some(probe) = Probe::read(payload(self.at.ip(), is_raw, &buffer[..length])) else { continue };
            if probe.kind == Kind::Ask && self.lock().contains_key(&probe.token) {
                let to = if is_raw { SocketAddr::new(from.ip(), 0) } else { from };
                let _ = socket.send_to(&probe.answer(), to).await;
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
        tasks.spawn(reflector.clone().answer(socket, false));
        (reflector, at, tasks)
    }

    #[tokio::test]
    async fn only_who_is_known_is_answered() {
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
