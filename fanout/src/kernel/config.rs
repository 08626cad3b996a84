//! Configuration that the fan-out is loaded with.

use std::net::SocketAddr;

use millrace_kernel::Error;
use millrace_kernel::fan;
use millrace_kernel::tc::Mechanism;

/// Size of the event ring, in bytes. It has room for some 10,000 events: 20 ms at 500,000 events per second.
pub(super) const EVENTS_BYTES: u32 = 1 << 19;

/// Sizes and limits of the program's tables. Their memory is allocated when the program is loaded.
#[derive(Debug, Clone)]
pub struct Config {
    /// Streams that are open from the beginning.
    pub streams: Vec<StreamConfig>,
    /// Number of entries in the table of streams, if `streams` has fewer. The free entries are for
    /// [`Fanout::open`](super::Fanout::open).
    pub streams_max: u32,
    /// Number of entries in the table of receivers, for all streams together.
    pub receivers_max: u32,
    /// Largest number of copies that one run of the program makes of a received packet. A copy takes some half a
    /// microsecond. If copies remain, the packet is queued on the CPU's backlog again, and a further run makes them.
    pub max_copies_per_run: u32,
    /// Largest number of runs for one received packet. Copies that remain after the last run are lost.
    pub max_runs: u32,
    /// Hook that the BPF program is attached to. `None` uses TCX if the kernel has it.
    pub mechanism: Option<Mechanism>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            streams: Vec::new(),
            streams_max: 0,
            receivers_max: 0,
            max_copies_per_run: 128,
            max_runs: 64,
            mechanism: None,
        }
    }
}

/// One sender's stream: where its packets arrive, and how many receivers it may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamConfig {
    /// Address of this host that the stream's packets arrive at. Copies have it as their source.
    pub listen: SocketAddr,
    /// Port that the sender's RTCP arrives at, if it differs from the port for RTP.
    pub listen_rtcp_port: Option<u16>,
    /// Address and port of the sender. Only its packets are fanned out.
    pub sender: SocketAddr,
    /// Source port of the sender's RTCP, if it differs from that of RTP.
    pub sender_rtcp_port: Option<u16>,
    /// The SSRC whose packets are forwarded, or the rule that selects it.
    pub ssrc: Ssrc,
    /// Largest number of receivers that the stream has at a time.
    pub max_receivers: u32,
}

/// The synchronisation source of a sender that is forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ssrc {
    /// Packets of every SSRC are forwarded.
    Any,
    /// The SSRC of the first packet that arrives is forwarded.
    First,
    /// Only packets with this SSRC are forwarded.
    Is(u32),
}

impl Config {
    /// Checks that addresses and sizes are consistent, which the program cannot check.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.streams.iter().try_for_each(StreamConfig::check)
    }

    pub(super) fn receivers(&self) -> u32 {
        self.streams.iter().fold(0, |sum: u32, stream| sum.saturating_add(stream.max_receivers))
    }

    /// Returns the number of entries of each map that is sized before loading; for ring buffers, the bytes.
    pub(super) fn map_sizes(&self) -> [(&'static str, u32); 4] {
        let streams = u32::try_from(self.streams.len()).unwrap_or(u32::MAX).max(self.streams_max);
        [
            ("places", streams.saturating_mul(2)),
            ("streams", streams),
            ("receivers", self.receivers().max(self.receivers_max)),
            ("events", EVENTS_BYTES),
        ]
    }
}

impl StreamConfig {
    /// Returns the stream without its number of receivers, to compare streams by everything else.
    pub fn without_room(self) -> Self {
        Self { max_receivers: 0, ..self }
    }

    /// Returns the addresses that the stream's packets arrive at.
    pub(super) fn places(&self) -> impl Iterator<Item = SocketAddr> {
        let ports = [Some(self.listen.port()), self.listen_rtcp_port];
        ports.into_iter().flatten().map(|port| SocketAddr::new(self.listen.ip(), port))
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        if fan::bytes(self.listen.ip()).0 != fan::bytes(self.sender.ip()).0 {
            return Err(Error::Config("a stream arrives at an address of its sender's family"));
        }
        match self.listen.ip().is_unspecified() {
            true => Err(Error::Config("a stream arrives at one address of this host")),
            false => Ok(()),
        }
    }
}
