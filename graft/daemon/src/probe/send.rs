//! Sends the packets of a probe, and recognises their answers.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use millrace_graft_proto::measure::{PathReport, PathSample};
use millrace_kernel::checksum::checksum;
use tokio::{
    net::UdpSocket,
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, timeout, timeout_at},
};

use super::ProbeTarget;
use crate::sockets::{payload, raw};

/// Time to wait for answers after the last request. Later answers count as lost.
const PATIENCE: Duration = Duration::from_secs(3);
const DATA: &[u8; 16] = b"millrace probe..";
const ECHO_HEADER: usize = 8;

pub async fn probe(target: ProbeTarget, period: Duration, duration: Duration) -> io::Result<PathReport> {
    let count = (duration.as_nanos() / period.as_nanos()).max(1) as usize;
    let samples = match target.udp_port {
        None => icmp(target.peer, period, count).await?,
        Some(port) => udp(SocketAddr::new(target.peer, port), period, count).await?,
    };
    Ok(PathReport::from_samples(&samples))
}

fn micros(since: Instant) -> u64 {
    since.elapsed().as_micros().try_into().unwrap_or(u64::MAX)
}

/// The constants in which echo requests of ICMP and ICMPv6 differ.
struct Echo {
    protocol: i32,
    ask: u8,
    answer: u8,
}

impl Echo {
    fn from_peer(peer: IpAddr) -> Self {
        match peer {
            IpAddr::V4(_) => Self { protocol: 1, ask: 8, answer: 0 },
            IpAddr::V6(_) => Self { protocol: 58, ask: 128, answer: 129 },
        }
    }

    fn packet(&self, id: u16, sequence: u16) -> Vec<u8> {
        let [id0, id1] = id.to_be_bytes();
        let [sequence0, sequence1] = sequence.to_be_bytes();
        let mut packet = vec![self.ask, 0, 0, 0, id0, id1, sequence0, sequence1];
        packet.extend(DATA);
        // The kernel computes the checksum of ICMPv6 itself.
        let sum = checksum(&packet).to_be_bytes();
        if let Some(place) = packet.get_mut(2..4) {
            place.copy_from_slice(&sum);
        }
        packet
    }

    /// Returns the sequence number of the echo request that a packet answers, or `None` if the packet is no answer to
    /// this probe.
    fn read(&self, packet: &[u8], id: u16) -> Option<u16> {
        let header: &[u8; ECHO_HEADER] = packet.first_chunk()?;
        let is_ours = header[0] == self.answer && header[4..6] == id.to_be_bytes();
        let data = packet.get(ECHO_HEADER..)?;
        (is_ours && data == DATA).then(|| u16::from_be_bytes([header[6], header[7]]))
    }
}

async fn icmp(peer: IpAddr, period: Duration, count: usize) -> io::Result<Vec<PathSample>> {
    let echo = Echo::from_peer(peer);
    let to = SocketAddr::new(peer, 0);
    let socket = raw(to, echo.protocol)?;
    socket.connect(to).await?;
    let id = identifier()?;
    let start = Instant::now();
    let mut samples: Vec<PathSample> = Vec::with_capacity(count);
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut buffer = [0; 2048];
    // Time at which the wait for answers ends. This first value is an estimate, which is replaced when the last request
    // is sent.
    let mut last = start + period * u32::try_from(count).unwrap_or(u32::MAX) + PATIENCE;
    let mut answered = 0;
    while answered < count {
        tokio::select! {
            _ = ticks.tick(), if samples.len() < count => {
                let sequence = u16::try_from(samples.len()).unwrap_or(u16::MAX);
                let sent_us = micros(start);
                // A request that cannot be sent counts as lost. Either all requests fail for the same reason, or the
                // reason is temporary.
                let _ = socket.send(&echo.packet(id, sequence)).await;
                samples.push(PathSample { sent_us, answered_us: None });
                if samples.len() == count {
                    last = Instant::now() + PATIENCE;
                }
            }
            got = timeout_at(last, socket.recv(&mut buffer)) => {
                let Ok(got) = got else { break };
                let packet = got.map(|length| payload(peer, &buffer[..length]));
                let sequence = packet.ok().and_then(|packet| echo.read(packet, id));
                let sample = sequence.and_then(|sequence| samples.get_mut(usize::from(sequence)));
                if let Some(sample) = sample.filter(|sample| sample.answered_us.is_none()) {
                    sample.answered_us = Some(micros(start));
                    answered += 1;
                }
            }
        }
    }
    Ok(samples)
}

fn identifier() -> io::Result<u16> {
    let mut bytes = [0; 2];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes)
        .map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(u16::from_ne_bytes(bytes))
}

/// Probes by UDP. Each packet is sent on a socket of its own, so that an ICMP error of a closed port can be assigned to
/// that packet.
async fn udp(to: SocketAddr, period: Duration, count: usize) -> io::Result<Vec<PathSample>> {
    let start = Instant::now();
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut asked = JoinSet::new();
    let mut samples = vec![PathSample { sent_us: 0, answered_us: None }; count];
    for at in 0..count {
        ticks.tick().await;
        asked.spawn(async move { (at, ask(to, start).await) });
        while let Some(done) = asked.try_join_next() {
            take(&mut samples, done)?;
        }
    }
    while let Some(done) = asked.join_next().await {
        take(&mut samples, done)?;
    }
    Ok(samples)
}

fn take(
    samples: &mut [PathSample],
    done: Result<(usize, io::Result<PathSample>), tokio::task::JoinError>,
) -> io::Result<()> {
    let (at, sample) = done.map_err(io::Error::other)?;
    if let Some(place) = samples.get_mut(at) {
        *place = sample?;
    }
    Ok(())
}

async fn ask(to: SocketAddr, start: Instant) -> io::Result<PathSample> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(to).await?;
    let sent_us = micros(start);
    let lost = PathSample { sent_us, answered_us: None };
    if socket.send(DATA).await.is_err() {
        return Ok(lost);
    }
    let mut buffer = [0; 64];
    Ok(match timeout(PATIENCE, socket.recv(&mut buffer)).await {
        Ok(Ok(_)) => PathSample { answered_us: Some(micros(start)), ..lost },
        // The peer itself sends the ICMP error "port unreachable", so the error is an answer.
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
            PathSample { answered_us: Some(micros(start)), ..lost }
        }
        Ok(Err(_)) | Err(_) => lost,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn icmp_echo_replies_with_another_identifier_are_ignored() {
        let echo = Echo::from_peer(Ipv4Addr::LOCALHOST.into());
        let mut packet = echo.packet(0x1234, 7);
        assert_eq!(checksum(&packet), 0, "with its checksum in it");
        assert_eq!(echo.read(&packet, 0x1234), None, "it asks");
        packet[0] = echo.answer;
        assert_eq!(echo.read(&packet, 0x1234), Some(7));
        assert_eq!(echo.read(&packet, 0x1235), None);
        assert_eq!(echo.read(&packet[..9], 0x1234), None);
        assert_eq!(echo.read(&[], 0x1234), None);
    }

    #[tokio::test]
    async fn closed_udp_port_counts_as_an_answer() {
        let taken = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let at = taken.local_addr().unwrap();
        drop(taken);
        let target = ProbeTarget { peer: at.ip(), udp_port: Some(at.port()) };
        let report = probe(target, Duration::from_millis(10), Duration::from_millis(50)).await.unwrap();
        assert_eq!((report.sent, report.answered), (5, 5), "{report:?}");
    }
}
