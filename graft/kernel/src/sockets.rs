//! The TCP sockets that live: what they have measured, and other settings for them.

use std::io::Read as _;
use std::net::SocketAddr;

use libbpf_rs::Iter;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{Loaded, embedded, write};

use super::rule::{Rule, address, name, text};
use super::{Error, intf};

const LISTEN: u32 = 10;

/// What TCP knows of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Socket {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// The same as long as the socket lives.
    pub cookie: u64,
    pub congestion: String,
    pub bytes_acked: u64,
    /// Of late; `None` before the first sample.
    pub rtt_min_us: Option<u32>,
    pub srtt_us: u32,
    pub rttvar_us: u32,
    pub cwnd_packets: u32,
    pub delivered_packets: u32,
    pub lost_packets: u32,
    /// How far packets were found out of order, at least 3.
    pub reordering_packets: u32,
    /// Bytes per second at which the path delivered, of payload.
    pub delivery_rate: Option<u64>,
}

/// Which sockets are changed, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Listeners that fit are changed as well: what they accept inherits it.
    pub rule: Rule,
    /// Only those with this congestion control.
    pub from: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Changed {
    pub connections: u64,
    pub listeners: u64,
    /// What the kernel refused.
    pub refused: u64,
}

/// The programs, loaded. They run when they are asked to, over the sockets of the calling thread's network namespace.
pub struct Sockets {
    object: Loaded,
}

impl Sockets {
    pub fn load() -> Result<Self, Error> {
        Ok(Self { object: embedded!("graft_sockets.bpf.o").open()?.load()? })
    }

    /// All but listeners.
    pub fn read(&self) -> Result<Vec<Socket>, Error> {
        Ok(self.walk::<intf::Socket>("sockets_read")?.into_iter().map(Socket::from).collect())
    }

    pub fn set(&mut self, change: &Change) -> Result<Changed, Error> {
        let raw =
            intf::Change { rule: change.rule.raw(0), from: name(change.from.as_deref().unwrap_or_default()) };
        write(&self.object.handle("change")?, "change", &0_u32.to_ne_bytes(), raw.as_bytes())?;
        let mut changed = Changed::default();
        for socket in self.walk::<intf::Changed>("sockets_set")? {
            match (socket.error, socket.state) {
                (0, LISTEN) => changed.listeners += 1,
                (0, _) => changed.connections += 1,
                _ => changed.refused += 1,
            }
        }
        Ok(changed)
    }

    fn walk<T: Plain>(&self, program: &'static str) -> Result<Vec<T>, Error> {
        let walk = |source: libbpf_rs::Error| Error::Walk(std::io::Error::other(source.to_string()));
        let link = self.object.program(program)?.attach().map_err(walk)?;
        let mut bytes = Vec::new();
        Iter::new(&link).map_err(walk)?.read_to_end(&mut bytes).map_err(Error::Walk)?;
        Ok(bytes.chunks_exact(size_of::<T>()).filter_map(T::from_bytes).collect())
    }
}

impl From<intf::Socket> for Socket {
    fn from(raw: intf::Socket) -> Self {
        let local = SocketAddr::new(address(raw.local), raw.local_port);
        let remote = SocketAddr::new(address(raw.remote), raw.remote_port);
        Self::of([local, remote], raw.cookie, &raw.congestion, raw.bytes_acked, &raw.figures)
    }
}

impl Socket {
    pub(super) fn of(
        [local, remote]: [SocketAddr; 2],
        cookie: u64,
        congestion: &[u8; intf::NAME_BYTES],
        bytes_acked: u64,
        figures: &intf::Figures,
    ) -> Self {
        Self {
            local,
            remote,
            cookie,
            congestion: text(congestion),
            bytes_acked,
            rtt_min_us: (figures.rtt_min_us != 0).then_some(figures.rtt_min_us),
            srtt_us: figures.srtt_us,
            rttvar_us: figures.rttvar_us,
            cwnd_packets: figures.cwnd_packets,
            delivered_packets: figures.delivered_packets,
            lost_packets: figures.lost_packets,
            reordering_packets: figures.reordering_packets,
            delivery_rate: rate(figures.rate_packets, figures.mss_bytes, figures.rate_interval_us),
        }
    }
}

/// Bytes per second of packets that were delivered in some time.
fn rate(packets: u32, mss_bytes: u32, interval_us: u32) -> Option<u64> {
    (u64::from(packets) * u64::from(mss_bytes) * 1_000_000).checked_div(u64::from(interval_us))
}
