//! The packets of a probe, and their answers.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use millrace_graft_proto::measure::{Report, Sample};
use tokio::{
    net::UdpSocket,
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, timeout, timeout_at},
};

use super::Target;
use crate::sockets::{checksum, payload, raw};

/// For the last answers; who answers later is lost.
const PATIENCE: Duration = Duration::from_secs(3);
const DATA: &[u8; 16] = b"millrace probe..";
const ECHO_HEADER: usize = 8;

pub async fn probe(target: Target, period: Duration, duration: Duration) -> io::Result<Report> {
    let count = (duration.as_nanos() / period.as_nanos()).max(1) as usize;
    let samples = match target.udp_port {
        None => icmp(target.peer, period, count).await?,
        Some(port) => udp(SocketAddr::new(target.peer, port), period, count).await?,
    };
    Ok(Report::of(&samples))
}

fn micros(since: Instant) -> u64 {
    since.elapsed().as_micros().try_into().unwrap_or(u64::MAX)
}

/// What differs between the versions of ICMP.
struct Echo {
    protocol: i32,
    ask: u8,
    answer: u8,
}

impl Echo {
    fn of(peer: IpAddr) -> Self {
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
        // Of ICMPv6 the kernel makes it itself.
        let sum = checksum(&packet).to_be_bytes();
        if let Some(place) = packet.get_mut(2..4) {
            place.copy_from_slice(&sum);
        }
        packet
    }

    /// Which of ours it answers.
    fn read(&self, packet: &[u8], id: u16) -> Option<u16> {
        let header: &[u8; ECHO_HEADER] = packet.first_chunk()?;
        let is_ours = header[0] == self.answer && header[4..6] == id.to_be_bytes();
        let data = packet.get(ECHO_HEADER..)?;
        (is_ours && data == DATA).then(|| u16::from_be_bytes([header[6], header[7]]))
    }
}

async fn icmp(peer: IpAddr, period: Duration, count: usize) -> io::Result<Vec<Sample>> {
    let echo = Echo::of(peer);
    let to = SocketAddr::new(peer, 0);
    let socket = raw(to, echo.protocol)?;
    socket.connect(to).await?;
    let id = identifier()?;
    let start = Instant::now();
    let mut samples: Vec<Sample> = Vec::with_capacity(count);
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut buffer = [0; 2048];
    let mut last = start + period * u32::try_from(count).unwrap_or(u32::MAX) + PATIENCE;
    let mut answered = 0;
    while answered < count {
        tokio::select! {
            _ = ticks.tick(), if samples.len() < count => {
                let sequence = u16::try_from(samples.len()).unwrap_or(u16::MAX);
                let sent_us = micros(start);
                // What does not go out is lost; the reason will be the same for all, or pass.
                let _ = socket.send(&echo.packet(id, sequence)).await;
                samples.push(Sample { sent_us, answered_us: None });
                if samples.len() == count {
                    last = Instant::now() + PATIENCE;
                }
            }
            got = timeout_at(last, socket.recv(&mut buffer)) => {
                let Ok(got) = got else { break };
                let packet = got.map(|length| payload(peer, true, &buffer[..length]));
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
        .map_err(|_| io::Error::other("no random numbers"))?;
    Ok(u16::from_ne_bytes(bytes))
}

/// Each has a socket of its own, so that a port where nobody listens answers it, too.
async fn udp(to: SocketAddr, period: Duration, count: usize) -> io::Result<Vec<Sample>> {
    let start = Instant::now();
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut asked = JoinSet::new();
    let mut samples = vec![Sample { sent_us: 0, answered_us: None }; count];
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
    samples: &mut [Sample],
    done: Result<(usize, io::Result<Sample>), tokio::task::JoinError>,
) -> io::Result<()> {
    let (at, sample) = done.map_err(io::Error::other)?;
    if let Some(place) = samples.get_mut(at) {
        *place = sample?;
    }
    Ok(())
}

async fn ask(to: SocketAddr, start: Instant) -> io::Result<Sample> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(to).await?;
    let sent_us = micros(start);
    let lost = Sample { sent_us, answered_us: None };
    if socket.send(DATA).await.is_err() {
        return Ok(lost);
    }
    let mut buffer = [0; 64];
    Ok(match timeout(PATIENCE, socket.recv(&mut buffer)).await {
        Ok(Ok(_)) => Sample { answered_us: Some(micros(start)), ..lost },
        // "Port unreachable": it came back from there.
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
            Sample { answered_us: Some(micros(start)), ..lost }
        }
        Ok(Err(_)) | Err(_) => lost,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn echoes_are_told_from_others() {
        let echo = Echo::of(Ipv4Addr::LOCALHOST.into());
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
    async fn a_port_where_nobody_listens_answers() {
        let taken = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let at = taken.local_addr().unwrap();
        drop(taken);
        let target = Target { peer: at.ip(), udp_port: Some(at.port()) };
        let report = probe(target, Duration::from_millis(10), Duration::from_millis(50)).await.unwrap();
        assert_eq!((report.sent, report.answered), (5, 5), "{report:?}");
    }
}
