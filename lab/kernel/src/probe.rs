//! The wire probe: a BPF program that records when each UDP packet passes an interface.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use libbpf_rs::RingBufferBuilder;
use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{LoadedObject, embedded};
use millrace_kernel::tc::{KernelHook, Mechanism, TcAttachment, TcPosition};

use crate::intf::{ProbeConfig, ProbeSample};

/// Settings of the wire probe.
#[derive(Debug, Clone)]
pub struct Config {
    /// Smallest UDP payload that is sampled (per segment of a super-packet), bytes. Media packets are larger,
    /// acknowledgements are smaller.
    pub min_payload_bytes: u32,
    /// Number of samples that may wait to be read. Any further samples are dropped and counted in
    /// [`ProbeCounters::ring_full`].
    pub capacity: u32,
    /// Mechanism by which the programs are attached. With `None`, the probe uses TCX if the kernel has it, else clsact.
    pub mechanism: Option<Mechanism>,
}

impl Default for Config {
    fn default() -> Self {
        Self { min_payload_bytes: 0, capacity: 1 << 16, mechanism: None }
    }
}

/// One UDP packet, or one GSO/GRO super-packet, as it passed an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacketSample {
    /// Time of `CLOCK_MONOTONIC`, which is the same in every network namespace.
    pub time_ns: u64,
    /// Index of the interface.
    pub ifindex: u32,
    /// Direction of the packet: ingress or egress.
    pub hook: KernelHook,
    /// Source address and UDP port.
    pub source: SocketAddr,
    /// Destination address and UDP port.
    pub destination: SocketAddr,
    /// UDP payload of the whole frame, all segments together.
    pub payload_bytes: u32,
    /// UDP payload per segment, if the frame is a super-packet.
    pub segment_bytes: Option<u32>,
    /// ID of the outermost VLAN tag.
    pub vlan: Option<u16>,
}

impl PacketSample {
    /// Returns how many packets of at least `min_payload_bytes` the frame contains. All segments have the first one's
    /// length, but the last may be shorter.
    pub fn packets(&self, min_payload_bytes: u32) -> u32 {
        let segment = self.segment_bytes.unwrap_or(self.payload_bytes);
        if segment == 0 {
            return 0;
        }
        let full = if segment >= min_payload_bytes { self.payload_bytes / segment } else { 0 };
        let rest = self.payload_bytes % segment;
        full + u32::from(rest > 0 && rest >= min_payload_bytes)
    }
}

/// Number of packets that the wire probe recorded, and of those that it skipped, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProbeCounters {
    /// Packets that were recorded.
    pub sampled: u64,
    /// Packets that were not recorded because the ring buffer was full: userspace did not read it in time.
    pub ring_full: u64,
    /// UDP packets with a smaller payload than `min_payload_bytes`, which are not recorded.
    pub small: u64,
    /// Packets of another protocol than UDP.
    pub not_udp: u64,
    /// Fragments of IP packets, which are not recorded.
    pub fragment: u64,
    /// Packets whose headers could not be parsed.
    pub malformed: u64,
}

/// The wire probe's BPF program, loaded. It records packets from [`attach`](Self::attach) until it is dropped.
pub struct PacketProbe {
    object: LoadedObject,
    attachments: Vec<TcAttachment>,
    mechanism: Option<Mechanism>,
}

impl PacketProbe {
    /// Loads the probe, which records nothing before [`attach`](Self::attach).
    pub fn load(config: &Config) -> Result<Self, Error> {
        let mut open = embedded!("probe.bpf.o").open()?;
        open.configure(&ProbeConfig { min_payload_bytes: config.min_payload_bytes })?;
        let bytes = ring_bytes(config.capacity);
        open.map("samples")?
            .set_max_entries(bytes)
            .map_err(|source| Error::Open { object: "probe.bpf.o", source })?;
        Ok(Self { object: open.load()?, attachments: Vec::new(), mechanism: config.mechanism })
    }

    /// Samples both directions of an interface in the calling thread's network namespace. At ingress the probe runs
    /// before all programs attached so far, at egress after them.
    pub fn attach(&mut self, ifindex: i32) -> Result<Mechanism, Error> {
        let ingress = TcAttachment::new(
            &self.object.program("probe_ingress")?,
            ifindex,
            KernelHook::Ingress,
            TcPosition::First,
            self.mechanism,
        )?;
        let egress = TcAttachment::new(
            &self.object.program("probe_egress")?,
            ifindex,
            KernelHook::Egress,
            TcPosition::Last,
            self.mechanism,
        )?;
        let mechanism = ingress.mechanism();
        self.attachments.extend([ingress, egress]);
        Ok(mechanism)
    }

    /// Detaches the probe from every interface. Samples that the ring buffer already holds can still be read.
    pub fn detach(&mut self) {
        self.attachments.clear();
    }

    /// Reads all samples from the ring buffer. Samples of one CPU are in the order of time. Samples of different CPUs
    /// may be out of order, by at most the time that it takes to record one sample.
    pub fn read(&mut self) -> Result<Vec<PacketSample>, Error> {
        let mut samples = Vec::new();
        let map = self.object.map("samples")?;
        let error = |source| Error::Read { what: "samples", source };
        let mut builder = RingBufferBuilder::new();
        builder
            .add(&map, |bytes| {
                samples.extend(ProbeSample::from_bytes(bytes).map(PacketSample::from));
                0
            })
            .map_err(error)?;
        let ring = builder.build().map_err(error)?;
        ring.consume().map_err(error)?;
        drop(ring);
        Ok(samples)
    }

    /// Returns the counters since the probe was loaded.
    pub fn counters(&mut self) -> Result<ProbeCounters, Error> {
        match self.object.counters("outcomes")?[..] {
            [sampled, ring_full, small, not_udp, fragment, malformed] => {
                Ok(ProbeCounters { sampled, ring_full, small, not_udp, fragment, malformed })
            }
            _ => Err(Error::Missing { object: "probe.bpf.o", what: "counter for each outcome" }),
        }
    }
}

/// Returns the size of the ring buffer. The kernel requires a power of two of whole pages, and each record has an
/// 8-byte header.
fn ring_bytes(capacity: u32) -> u32 {
    const MAX: u32 = 1 << 30;
    let record = size_of::<ProbeSample>() as u32 + 8;
    capacity.saturating_mul(record).clamp(64 * 1024, MAX).next_power_of_two()
}

impl From<ProbeSample> for PacketSample {
    fn from(raw: ProbeSample) -> Self {
        Self {
            time_ns: raw.time_ns,
            ifindex: raw.ifindex,
            hook: if raw.direction == 0 { KernelHook::Ingress } else { KernelHook::Egress },
            source: SocketAddr::new(address(raw.family, raw.source), u16::from_be_bytes(raw.source_port)),
            destination: SocketAddr::new(
                address(raw.family, raw.destination),
                u16::from_be_bytes(raw.destination_port),
            ),
            payload_bytes: raw.payload_bytes,
            segment_bytes: (raw.segment_bytes != 0).then_some(raw.segment_bytes),
            vlan: (raw.vlan != 0).then_some(raw.vlan),
        }
    }
}

fn address(family: u8, bytes: [u8; 16]) -> IpAddr {
    match (family, bytes) {
        (4, [a, b, c, d, ..]) => Ipv4Addr::new(a, b, c, d).into(),
        _ => Ipv6Addr::from(bytes).into(),
    }
}

#[cfg(test)]
mod tests;
