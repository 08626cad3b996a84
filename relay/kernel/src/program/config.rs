//! Configuration of the BPF program that is set before it is loaded.

use millrace_kernel::Error;
use millrace_kernel::tc::Mechanism;

use super::intf;

/// The size of the event ring in bytes. It holds some 5000 events: 20 ms at 250,000 events per second.
pub(super) const EVENTS_BYTES: u32 = 1 << 19;

/// The sizes of the program's tables. Their memory is allocated when the program is loaded.
#[derive(Debug, Clone)]
pub struct Config {
    /// UDP ports that the relay listens on; the program supports at most 4.
    pub ports: Vec<u16>,
    /// The length in bytes of connection IDs that the relay chooses, at most 20.
    pub id_len: usize,
    /// The most connections on which media may arrive.
    pub max_upstreams: u32,
    /// The most connections on which media may be sent.
    pub max_downstreams: u32,
    /// The most streams of publishers that are forwarded at the same time.
    pub max_slots: u32,
    /// The most streams to subscribers that are delegated at the same time.
    pub max_egresses: u32,
    /// The most tracks for whose streams the program may open subscribers' streams.
    pub max_tracks: u32,
    /// The most copies of a received packet that one run makes, at some 2 microseconds each. A packet with more copies
    /// is queued again for another run.
    pub max_copies_per_run: u32,
    /// The most program runs for one received packet. Userspace sends the copies that these runs have not made.
    pub max_runs: u32,
    /// The most reports about sent packets that the ring buffer to userspace holds. Userspace sends the copies for
    /// which the ring has no room.
    pub max_waiting: u32,
    /// Memory for precomputed keystreams, in bytes. The keystream of one packet takes 1616 bytes.
    pub keystream_bytes: u64,
    /// The kernel mechanism by which the program is attached. `None` means TCX if the kernel supports it, and clsact
    /// otherwise.
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
    /// Returns the configuration in the form of the program's constant `config`.
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

    /// Returns the number of entries for each map whose size is set before loading, or the size in bytes for a ring
    /// buffer.
    pub(super) fn map_sizes(&self) -> [(&'static str, u32); 13] {
        // Each connection uses up to 8 connection IDs at a time. RFC 9000, section 5.1.1, leaves that number to the
        // endpoint.
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
            ("supers", cpus()),
        ]
    }

    pub(super) fn keystream_entries(&self) -> u32 {
        let entries = self.keystream_bytes / size_of::<intf::Keystream>() as u64;
        u32::try_from(entries).unwrap_or(u32::MAX)
    }

    /// Returns the size in bytes of the ring buffer in which the program reports sent packets: a power of two, as the
    /// kernel requires. Each report has a header of 8 bytes.
    pub(super) fn forwarded_bytes(&self) -> u32 {
        const MAX: u32 = 1 << 30;
        let record = size_of::<intf::Forwarded>() as u32 + 8;
        self.max_waiting.saturating_mul(record).clamp(64 * 1024, MAX).next_power_of_two()
    }
}

/// Returns the number of CPUs that the machine may have.
fn cpus() -> u32 {
    libbpf_rs::num_possible_cpus().unwrap_or(1) as u32
}
