//! What the fan-out is loaded with.

use std::net::SocketAddr;

use millrace_kernel::Error;
use millrace_kernel::fan;
use millrace_kernel::tc::Mechanism;

/// Some 10000 events: what 500,000 per second need for 20 ms.
pub(super) const EVENTS_BYTES: u32 = 1 << 19;

/// It takes the memory when it is loaded.
#[derive(Debug, Clone)]
pub struct Config {
    pub streams: Vec<StreamConfig>,
    /// So many streams and receivers there is room for, if those are fewer: for [`Fanout::open`](super::Fanout::open).
    pub streams_max: u32,
    pub receivers_max: u32,
    /// Copies that one run of the program makes of a received packet, some half a microsecond each. If there are more to
    /// make, the packet is put back into the queue of packets that wait for the stack, for another run.
    pub max_copies_per_run: u32,
    /// Runs that one received packet may take. What is left then is lost.
    pub max_runs: u32,
    /// `None` takes TCX where the kernel has it.
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

/// One sender's packets, where they arrive, and how many receivers there may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamConfig {
    /// Where its packets arrive, an address of this host; copies come from there.
    pub listen: SocketAddr,
    /// Where its RTCP arrives, if that is another port.
    pub listen_rtcp_port: Option<u16>,
    /// Whose packets are fanned out.
    pub sender: SocketAddr,
    /// Where its RTCP comes from, if that is another port.
    pub sender_rtcp_port: Option<u16>,
    pub ssrc: Ssrc,
    pub max_receivers: u32,
}

/// Which synchronisation source of a sender is forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ssrc {
    Any,
    /// Whatever comes first.
    First,
    Is(u32),
}

impl Config {
    /// The program has no way to tell what does not fit together.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.streams.iter().try_for_each(StreamConfig::check)
    }

    pub(super) fn legs(&self) -> u32 {
        self.streams.iter().fold(0, |sum: u32, stream| sum.saturating_add(stream.max_receivers))
    }

    /// Entries of each map whose size is set before loading; of ring buffers, bytes.
    pub(super) fn map_sizes(&self) -> [(&'static str, u32); 4] {
        let streams = u32::try_from(self.streams.len()).unwrap_or(u32::MAX).max(self.streams_max);
        [
            ("places", streams.saturating_mul(2)),
            ("streams", streams),
            ("legs", self.legs().max(self.receivers_max)),
            ("events", EVENTS_BYTES),
        ]
    }
}

impl StreamConfig {
    /// What it is, however many receive it.
    pub fn without_room(self) -> Self {
        Self { max_receivers: 0, ..self }
    }

    /// Where its packets arrive.
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
