//! Existing TCP sockets: reads their measurements, and changes their settings (BPF iterator `tcp`).

use std::io::Read as _;
use std::net::SocketAddr;

use libbpf_rs::Iter;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{LoadedObject, embedded, write};

use super::rule::{TcpRule, address, name, text};
use super::{Error, intf};

// TCP_LISTEN of the kernel's socket states.
const LISTEN: u32 = 10;

/// A TCP connection's state, as the kernel keeps it in the socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketState {
    /// This host's address and port.
    pub local: SocketAddr,
    /// The peer's address and port.
    pub remote: SocketAddr,
    /// The kernel's cookie of the socket, which does not change while the socket exists.
    pub cookie: u64,
    /// Name of the socket's congestion control.
    pub congestion: String,
    /// Bytes that the peer has acknowledged.
    pub bytes_acked: u64,
    /// Minimum round-trip time in the period that the sysctl tcp_min_rtt_wlen sets, microseconds; `None` before the
    /// first sample.
    pub rtt_min_us: Option<u32>,
    /// Smoothed round-trip time, microseconds.
    pub srtt_us: u32,
    /// Variation of the round-trip time, microseconds.
    pub rttvar_us: u32,
    /// Congestion window, packets.
    pub cwnd_packets: u32,
    /// Number of packets that the peer has received.
    pub delivered_packets: u32,
    /// Number of packets that TCP considered lost.
    pub lost_packets: u32,
    /// Packets that may arrive out of order before TCP assumes a loss; at least 3.
    pub reordering_packets: u32,
    /// Delivery rate of the path, in payload bytes per second; `None` before the first sample.
    pub delivery_rate: Option<u64>,
}

/// A change of existing sockets: a rule that selects them, and settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketChange {
    /// Selects the sockets to change. Listeners that match are changed as well, since accepted sockets inherit the
    /// settings.
    pub rule: TcpRule,
    /// Congestion control that a socket must have at present to be changed; `None`: any.
    pub from: Option<String>,
}

/// Results of one change of existing sockets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChangeCounts {
    /// Connected sockets that were changed.
    pub connections: u64,
    /// Listening sockets that were changed.
    pub listeners: u64,
    /// Sockets whose change the kernel refused.
    pub refused: u64,
}

/// The loaded BPF iterator programs. Each call runs one of the programs over the TCP sockets of the calling thread's
/// network namespace.
pub struct SocketPrograms {
    object: LoadedObject,
}

impl SocketPrograms {
    /// Loads the iterator programs.
    pub fn load() -> Result<Self, Error> {
        Ok(Self { object: embedded!("graft_sockets.bpf.o").open()?.load()? })
    }

    /// Returns the state of all TCP sockets except listeners.
    pub fn read(&self) -> Result<Vec<SocketState>, Error> {
        Ok(self.walk::<intf::Socket>("sockets_read")?.into_iter().map(SocketState::from).collect())
    }

    /// Changes all sockets that the rule matches, in one iteration.
    pub fn set(&mut self, change: &SocketChange) -> Result<ChangeCounts, Error> {
        let raw =
            intf::Change { rule: change.rule.raw(0), from: name(change.from.as_deref().unwrap_or_default()) };
        write(&self.object.handle("change")?, "change", &0_u32.to_ne_bytes(), raw.as_bytes())?;
        let mut changed = ChangeCounts::default();
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
        // The kernel runs the BPF program once for each socket while the iterator is read.
        let link = self.object.program(program)?.attach().map_err(walk)?;
        let mut bytes = Vec::new();
        Iter::new(&link).map_err(walk)?.read_to_end(&mut bytes).map_err(Error::Walk)?;
        // The BPF program writes whole records, all of one type.
        Ok(bytes.chunks_exact(size_of::<T>()).filter_map(T::from_bytes).collect())
    }
}

impl From<intf::Socket> for SocketState {
    fn from(raw: intf::Socket) -> Self {
        let local = SocketAddr::new(address(raw.local), raw.local_port);
        let remote = SocketAddr::new(address(raw.remote), raw.remote_port);
        Self::from_parts([local, remote], raw.cookie, &raw.congestion, raw.bytes_acked, &raw.figures)
    }
}

impl SocketState {
    pub(super) fn from_parts(
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

/// Returns the delivery rate in payload bytes per second; `None` if the measuring interval is 0.
fn rate(packets: u32, mss_bytes: u32, interval_us: u32) -> Option<u64> {
    (u64::from(packets) * u64::from(mss_bytes) * 1_000_000).checked_div(u64::from(interval_us))
}
