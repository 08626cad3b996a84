//! What the relay program is loaded with.

use millrace_kernel::Error;
use millrace_kernel::tc::Mechanism;

use super::intf;

/// Some 5000 events: what 250,000 per second need for 20 ms.
pub(super) const EVENTS_BYTES: u32 = 1 << 19;

/// What the fast path is sized for. It takes the memory when it is loaded.
#[derive(Debug, Clone)]
pub struct Config {
    /// UDP ports that the relay listens on, at most 4.
    pub ports: Vec<u16>,
    /// Length of the connection IDs that the relay hands out, at most 20 bytes.
    pub id_len: usize,
    /// Connections that media arrives on.
    pub max_upstreams: u32,
    /// Connections that media leaves on.
    pub max_downstreams: u32,
    /// Upstream streams that are forwarded at the same time.
    pub max_slots: u32,
    /// Subscribers' streams that they are forwarded to.
    pub max_egresses: u32,
    /// Tracks whose streams the program may open.
    pub max_tracks: u32,
    /// Copies that one run of the program makes of a received packet, some 2 microseconds each. If there are more to make,
    /// the packet is put back into the queue of packets that wait for the stack, for another run.
    pub max_copies_per_run: u32,
    /// Runs that one received packet may take. What is left then is userspace's to send.
    pub max_runs: u32,
    /// Registrations that may wait to be drained.
    pub max_waiting: u32,
    /// Memory for precomputed keystreams, 1616 bytes for each packet.
    pub keystream_bytes: u64,
    /// `None` takes TCX where the kernel has it.
    pub mechanism: Option<Mechanism>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            ports: Vec::new(),
            id_len: 8,
            max_upstreams: 1 << 8,
            max_downstreams: 1 << 12,
            max_slots: 1 << 12,
            max_egresses: 1 << 15,
            max_tracks: 1 << 10,
            max_copies_per_run: 64,
            max_runs: 64,
            max_waiting: 1 << 16,
            keystream_bytes: 32 << 20,
            mechanism: None,
        }
    }
}

impl Config {
    /// The program's `const volatile` configuration.
    pub(super) fn raw(&self) -> Result<intf::Config, Error> {
        if self.ports.len() > intf::PORTS {
            return Err(Error::Config("the fast path watches 4 ports at most"));
        }
        if self.id_len > intf::ID_MAX {
            return Err(Error::Config("connection IDs have 20 bytes at most"));
        }
        let mut ports = [[0; 2]; intf::PORTS];
        ports.iter_mut().zip(&self.ports).for_each(|(to, port)| *to = port.to_be_bytes());
        Ok(intf::Config {
            max_copies_per_run: self.max_copies_per_run,
            max_runs: self.max_runs,
            id_bytes: self.id_len as u32,
            ports,
        })
    }

    /// Entries of each map whose size is set before loading; of ring buffers, bytes.
    pub(super) fn map_sizes(&self) -> [(&'static str, u32); 12] {
        // A connection has up to 8 IDs at a time (RFC 9000, section 5.1.1, leaves it to the endpoint).
        let ids = self.max_upstreams.saturating_add(self.max_downstreams).saturating_mul(8);
        [
            ("ids", ids),
            ("upstreams", self.max_upstreams),
            ("open_keys", self.max_upstreams.saturating_mul(2)),
            ("slots", self.max_slots.saturating_add(self.max_tracks)),
            ("tracks", self.max_tracks),
            ("ingresses", self.max_slots),
            ("egresses", self.max_egresses),
            ("downstreams", self.max_downstreams),
            ("seal_keys", self.max_downstreams.saturating_mul(2)),
            ("keystreams", self.keystream_entries()),
            ("forwarded", self.forwarded_bytes()),
            ("events", EVENTS_BYTES),
        ]
    }

    pub(super) fn keystream_entries(&self) -> u32 {
        let entries = self.keystream_bytes / size_of::<intf::Keystream>() as u64;
        u32::try_from(entries).unwrap_or(u32::MAX)
    }

    /// The kernel wants a power of two of whole pages; each record has an 8-byte header.
    pub(super) fn forwarded_bytes(&self) -> u32 {
        const MAX: u32 = 1 << 30;
        let record = size_of::<intf::Forwarded>() as u32 + 8;
        self.max_waiting.saturating_mul(record).clamp(64 * 1024, MAX).next_power_of_two()
    }
}
