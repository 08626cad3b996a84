//! The handle of the gate's programs. They admit or drop QUIC packets at XDP, before the network stack, for any QUIC
//! server on the machine.
//!
//! 1. Call [`LoadedGate::load`], [`LoadedGate::apply`] with the [`GateRules`], and [`LoadedGate::attach`] for each
//!    interface on which clients' packets arrive.
//! 2. If the rules of a guarded application (scope) have [`LiveRule::Tracked`], call [`LoadedGate::watch`] for each
//!    interface by which servers' packets leave.
//! 3. Call [`LoadedGate::maintain`] about once a second.
//! 4. An application that reports its connections gets a [`KernelScope`], with which it publishes connection IDs and
//!    counts connections.
//!
//! All methods take `&self` and may be called from many threads. Nothing is pinned, so the programs are detached when
//! the gate is dropped, and when the process ends, in whatever way.

mod intf;
mod maps;
mod reason;
mod rests;
pub mod rules;
mod scope;
mod settings;
pub mod token;
mod trace;

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use libbpf_rs::{MapCore, ProgramInput, RingBufferBuilder};

pub use millrace_kernel::prefix::{ParseError, Prefix};
pub use reason::{Event, GateReason, Kind, Pass, Rule};
pub use rules::{
    Counting, GateRules, ListEntry, LiveRule, Modes, PolicyRules, Rates, RulePlace, RuleRate, VERSION_1,
    VERSION_2,
};
pub use scope::KernelScope;
pub use trace::{GateTrace, PacketTracer, Traced};

use maps::GateMaps;
use millrace_kernel::Error;
use millrace_kernel::clock;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{LoadedObject, embedded};
pub use millrace_kernel::tc::TcPosition;
use millrace_kernel::tc::{self, KernelHook};
use millrace_kernel::{stack, xdp};
use settings::Settings;

const OBJECT: &str = "gate.bpf.o";
/// Divisor of the size of the table of live connections: one client may have at most a sixteenth of the table as
/// tracked connections.
const IDS_PER_CLIENT: u32 = 16;
/// Divisor of the size of the kernel's table of token buckets. In the time in which a client's buckets fill, new
/// clients whose buckets begin full may take at most a quarter of the table. If few new clients came before, they may
/// take half of it. The entries that they evict had been unused for longer than the buckets take to fill, so their
/// buckets were full.
const FRESH_RATES: u32 = 4;
const NETWORK_TIMES_MAX: u32 = 1 << 20;

/// Settings that cannot change while the gate is loaded. The maps' memory is allocated at loading, except that of block
/// and allow lists. A connection takes some 150 bytes, each other entry 130.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// IPv4 prefix lengths: the first is a client's, and up to two shorter ones are those of wider networks that
    /// contain the client. Networks of each length have limits of their own, so that an attacker gains nothing by using
    /// many addresses.
    pub client_prefix_v4: Vec<u8>,
    /// IPv6 prefix lengths: first that of a client, then those of wider networks, as for IPv4.
    pub client_prefix_v6: Vec<u8>,
    /// Limits of the wider networks, as multiples of a client's limits: first for the longer prefix length, then for
    /// the shorter.
    pub network_times: [u32; intf::LEVELS - 1],
    /// Largest number of live connection IDs of all guarded applications. A connection whose IDs the application
    /// publishes has several, a connection that the gate tracks has one. Of the latter, one client has at most a
    /// sixteenth of this number, or its quota if that is more.
    pub max_ids: u32,
    /// Largest number of clients with connections. The map `clients` also has room for this number of networks of each
    /// prefix length.
    pub max_clients: u32,
    /// Largest number of handshakes in progress.
    pub max_handshakes: u32,
    /// Largest number of clients and networks whose token buckets are remembered.
    pub max_rates: u32,
    /// Largest number of prefixes in all block and allow lists together. The map is twice as large, since it holds old
    /// and new rules while they change.
    pub max_prefixes: u32,
    /// Largest number of refused packets per second that are sampled for the log, for each guarded application (scope);
    /// 0 for none.
    pub samples_per_second: u32,
    /// Position of the [watching](LoadedGate::watch) program among the programs at TC egress. It sees no packets if an
    /// earlier program ends the chain. It sees addresses other than the clients' if a later program changes addresses.
    pub watch: TcPosition,
    /// True on kernels with PREEMPT_RT, where a run of the XDP program may interrupt another one on the same CPU. The
    /// gate then passes the packet unchecked, because the scratch memory is in use.
    pub nests: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            client_prefix_v4: vec![32, 24],
            client_prefix_v6: vec![64, 56, 48],
            network_times: [8, 64],
            max_ids: 1 << 17,
            max_clients: 1 << 16,
            max_handshakes: 1 << 16,
            max_rates: 1 << 16,
            max_prefixes: 1 << 18,
            samples_per_second: 10,
            watch: TcPosition::Last,
            nests: is_realtime(),
        }
    }
}

/// A packet that a rule refused, or would have refused in mode "enforce".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedPacket {
    /// Time of `CLOCK_MONOTONIC` in ns.
    pub time_ns: u64,
    /// Name of the guarded application (scope) to which the packet was sent.
    pub scope: String,
    /// The rule that refused the packet, or the reason why it passed.
    pub reason: GateReason,
    /// Rules in mode "monitor" that would have refused the packet.
    pub monitored: Vec<Rule>,
    /// The sender's address.
    pub source: SocketAddr,
    /// The receiver's address.
    pub destination: SocketAddr,
    /// UDP payload in bytes.
    pub bytes: u32,
    /// Type of the QUIC packet; `None` if a rule refused the packet before its type was read, or if it is too short.
    pub kind: Option<Kind>,
    /// Version of a long header.
    pub version: Option<u32>,
    /// Destination connection ID of a long header.
    pub id: Vec<u8>,
}

/// Numbers of packets and bytes that one rule refused, or that passed for one reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PacketCounter {
    /// Number of packets.
    pub packets: u64,
    /// Bytes of UDP payload, or of whole frames if the payload is unknown.
    pub bytes: u64,
    /// Number of packets that the rule would have refused in mode "enforce".
    pub monitored: u64,
}

/// The gate's decision about a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FrameAction {
    /// The frame goes on to the stack.
    Pass,
    /// The frame is dropped.
    Drop,
    /// The frame is replaced by this answer, a Retry or Version Negotiation.
    Answer(Vec<u8>),
}

/// Counters of packets and events since the gate was loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GateTotals {
    /// Counters of each guarded application (scope). The first element, "interface", counts packets for none of them.
    pub scopes: Vec<ScopeStatistics>,
    events: [u64; Event::ALL.len()],
}

/// Counters of a guarded application (scope): packets by the rule that refused them, or the reason why they passed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopeStatistics {
    /// The name of the guarded application (scope).
    pub name: String,
    rules: [PacketCounter; Rule::ALL.len()],
    passes: [PacketCounter; Pass::ALL.len()],
}

impl GateTotals {
    /// Returns how often an event happened.
    pub fn event(&self, event: Event) -> u64 {
        self.events[event as usize]
    }

    /// Returns the counters of the guarded application (scope) with this name.
    pub fn scope(&self, name: &str) -> Option<&ScopeStatistics> {
        self.scopes.iter().find(|scope| scope.name == name)
    }
}

impl ScopeStatistics {
    /// Returns the counts of packets that the rule refused or would have refused.
    pub fn rule(&self, rule: Rule) -> PacketCounter {
        self.rules[rule as usize]
    }

    /// Returns the counts of packets that passed for this reason.
    pub fn pass(&self, pass: Pass) -> PacketCounter {
        self.passes[pass as usize]
    }
}

/// An entry of the block and allow lists: the application (scope) for which it applies (`None` for all), its address
/// prefix, and whether it blocks or allows.
pub type Listing = (Option<String>, Prefix, ListEntry);

/// The fill level of a kernel table: its number of entries and the largest number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableFill {
    /// Name of the table: `connections`, `paths`, `clients` or `prefixes`, or one of those that forget old entries when
    /// full: `handshakes` and `openings`.
    pub name: &'static str,
    /// Number of entries at the last [`LoadedGate::maintain`].
    pub entries: u64,
    /// Largest number of entries.
    pub room: u64,
}

/// A client with connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelClient {
    /// The client's prefix.
    pub prefix: Prefix,
    /// The client's number of connections.
    pub connections: u32,
}

/// The loaded gate. Once [attached](Self::attach), it decides about packets until it is dropped.
pub struct LoadedGate {
    attachments: Mutex<Vec<(i32, xdp::root::XdpTurn)>>,
    rests: rests::Rests,
    watches: Mutex<Vec<(i32, tc::TcAttachment)>>,
    object: Mutex<LoadedObject>,
    settings: Arc<Mutex<Settings>>,
    maps: Arc<GateMaps>,
    traces: Arc<trace::Traces>,
    position: TcPosition,
}

impl LoadedGate {
    /// Loads the programs. All packets pass until rules are applied.
    pub fn load(config: &Config) -> Result<Self, Error> {
        let mut open = embedded!("gate.bpf.o").open()?;
        open.configure(&intf::Config { mark_seed: random()?, ..encode(config)? })?;
        for (map, entries) in [
            ("connections", config.max_ids),
            ("paths", config.max_ids),
            ("clients", config.max_clients.saturating_mul(sizes(config))),
            ("handshakes", config.max_handshakes),
            ("openings", config.max_handshakes),
            ("buckets", config.max_rates),
            ("prefixes", config.max_prefixes.saturating_mul(2)),
        ] {
            open.map(map)?
                .set_max_entries(entries.max(1))
                .map_err(|source| Error::Open { object: OBJECT, source })?;
        }
        let mut object = open.load()?;
        let maps = Arc::new(GateMaps::new(&mut object, config)?);
        let rests = rests::Rests::new(&mut object)?;
        let settings = Settings::new(&maps)?;
        let traces = Arc::new(trace::Traces::new(object.handle("traces")?));
        let gate = Self {
            attachments: Mutex::default(),
            rests,
            watches: Mutex::default(),
            object: Mutex::new(object),
            settings: Arc::new(Mutex::new(settings)),
            maps,
            traces,
            position: config.watch,
        };
        let key = token::GateKey::random().map_err(|source| Error::Random { source })?;
        gate.rotate_token_key(key)?;
        gate.maintain()?;
        Ok(gate)
    }

    /// Attaches the gate to an interface of the calling thread's network namespace. Returns the mode, which is never
    /// [`xdp::XdpMode::Auto`]. The kernel allows one XDP program for each interface. The gate shares that program with
    /// grafts; if another program or another gate is attached, this is an error. Joining existing grafts needs
    /// CAP_SYS_ADMIN. Interfaces without an Ethernet header (tun, WireGuard, PPP) are supported. Interfaces whose
    /// tunnel may have merged packets are an error.
    pub fn attach(&self, ifindex: i32, mode: xdp::XdpMode) -> Result<xdp::XdpMode, Error> {
        let object = lock(&self.object);
        self.look_how_frames_begin(ifindex)?;
        let attachment = xdp::root::XdpTurn::new(
            &object.program("gate_xdp")?,
            xdp::root::RootProduct::Gate,
            ifindex,
            mode,
            |rest| self.rests.put(ifindex, rest),
        )?;
        let mode = attachment.mode();
        self.hides_tags(ifindex)?;
        lock(&self.settings).look_anew(&self.maps)?;
        lock(&self.attachments).push((ifindex, attachment));
        Ok(mode)
    }

    /// Reports whether an interface has VLANs whose tags its driver strips before the gate sees the packets. A Retry or
    /// Version Negotiation would then be sent without its tag. This call also stops the gate from sending these on the
    /// interface, or allows them again. `ethtool -K IF rxvlan off` stops the stripping. [`attach`](Self::attach) checks
    /// this too, but VLANs may be added later. The interface must be in the calling thread's network namespace.
    pub fn hides_tags(&self, ifindex: i32) -> Result<bool, Error> {
        let hides = stack::hides_tags(ifindex)
            .map_err(|source| Error::Read { what: "the interfaces", source: source.into() })?;
        self.set_untagged(ifindex, hides)?;
        Ok(hides)
    }

    fn look_how_frames_begin(&self, ifindex: i32) -> Result<(), Error> {
        let begin = stack::begin(ifindex)
            .map_err(|source| Error::Read { what: "the interfaces", source: source.into() })?;
        self.set_bare(ifindex, begin == stack::FrameStart::Ip)
    }

    /// Sets whether frames of an interface begin with their IP header. [`attach`](Self::attach) and
    /// [`watch`](Self::watch) find this out by themselves.
    pub fn set_bare(&self, ifindex: i32, bare: bool) -> Result<(), Error> {
        lock(&self.settings).set_bare(&self.maps, ifindex, bare)
    }

    /// Sets whether packets of an interface may have lost their VLAN tags. The gate answers such packets with no Retry
    /// or Version Negotiation. [`hides_tags`](Self::hides_tags) finds this out by itself.
    pub fn set_untagged(&self, ifindex: i32, untagged: bool) -> Result<(), Error> {
        self.maps.set_untagged(ifindex, untagged)
    }

    /// Attaches the program at TC egress that reads servers' handshake packets, to an interface of the calling thread's
    /// network namespace. Only guarded applications (scopes) with [`LiveRule::Tracked`] need it. If the program is
    /// attached already, nothing changes.
    pub fn watch(&self, ifindex: i32) -> Result<(), Error> {
        let object = lock(&self.object);
        let mut watches = lock(&self.watches);
        watches.retain(|(_, attachment)| attachment.is_in_place());
        if watches.iter().any(|(watched, _)| *watched == ifindex) {
            return Ok(());
        }
        self.look_how_frames_begin(ifindex)?;
        let program = object.program("gate_egress")?;
        let attachment = tc::TcAttachment::new(&program, ifindex, KernelHook::Egress, self.position, None)?;
        watches.push((ifindex, attachment));
        Ok(())
    }

    /// Reports whether the gate is still attached to the interface. Others may have detached it, or deleted the
    /// interface.
    pub fn is_attached(&self, ifindex: i32) -> bool {
        lock(&self.attachments)
            .iter()
            .any(|(index, attachment)| *index == ifindex && attachment.is_in_place())
    }

    /// Reports whether the egress program of [`watch`](Self::watch) is still attached to the interface.
    pub fn is_watching(&self, ifindex: i32) -> bool {
        lock(&self.watches).iter().any(|(index, attachment)| *index == ifindex && attachment.is_in_place())
    }

    /// Detaches the XDP program and the egress program from the interface.
    pub fn detach_from(&self, ifindex: i32) {
        lock(&self.attachments).retain(|(index, _)| *index != ifindex);
        self.rests.remove(ifindex);
        lock(&self.watches).retain(|(index, _)| *index != ifindex);
    }

    /// Detaches the XDP program and the egress program from every interface. The state of connections is kept.
    pub fn detach(&self) {
        for (ifindex, attachment) in lock(&self.attachments).drain(..) {
            drop(attachment);
            self.rests.remove(ifindex);
        }
        lock(&self.watches).clear();
    }

    /// Replaces all rules at once, or changes nothing. Entries that [`list`](Self::list) added stay.
    pub fn apply(&self, rules: &GateRules) -> Result<(), Error> {
        lock(&self.settings).apply(&self.maps, rules)
    }

    /// Returns the rules in force.
    pub fn rules(&self) -> GateRules {
        lock(&self.settings).rules().clone()
    }

    /// Blocks or allows an address prefix at once, for one guarded application (scope) or for all (`None`). The entry
    /// stays when the rules change, until [`unlist`](Self::unlist), and replaces the rules' entry for the same prefix.
    pub fn list(&self, scope: Option<&str>, prefix: Prefix, entry: ListEntry) -> Result<(), Error> {
        lock(&self.settings).list(&self.maps, scope, prefix, Some(entry))
    }

    /// Removes an entry that [`list`](Self::list) added. If the rules have an entry for the same prefix, that entry
    /// applies again.
    pub fn unlist(&self, scope: Option<&str>, prefix: Prefix) -> Result<(), Error> {
        lock(&self.settings).list(&self.maps, scope, prefix, None)
    }

    /// Returns the block and allow list entries that [`list`](Self::list) added.
    pub fn listed(&self) -> Vec<Listing> {
        lock(&self.settings).listed()
    }

    /// Returns the block and allow list entries that would override `entry`, set for `prefixes`, for some of the
    /// addresses in them or for all. Longer prefixes that apply to the same packets override shorter ones, and blocks
    /// override allows.
    pub fn exceptions(
        &self,
        scope: Option<&str>,
        prefixes: &[Prefix],
        entry: ListEntry,
    ) -> Result<Vec<Listing>, Error> {
        lock(&self.settings).exceptions(scope, prefixes, entry)
    }

    /// Returns the handle with which a guarded application reports its connections. The handle is valid as long as the
    /// rules have the application's scope. Afterwards its methods fail, or have no effect on packets.
    pub fn scope(&self, name: &str) -> Result<KernelScope, Error> {
        // Under this lock, the scope's index in the kernel's maps cannot be given to another scope before the handle
        // exists.
        let settings = lock(&self.settings);
        let index = settings.index(name).ok_or(Error::Config("there is no scope of that name"))?;
        Ok(KernelScope::new(self.maps.clone(), index))
    }

    /// Forgets idle connections, tells the programs the UNIX time for tokens, and clears old bits of the Bloom filter
    /// of connections (`gate_marks.h`). Call it about once a second. Returns how many connections were forgotten.
    pub fn maintain(&self) -> Result<u64, Error> {
        lock(&self.settings).follow_clock(&self.maps)?;
        let expired = self.expire_after(Duration::ZERO)?;
        lock(&self.settings).age_marks(&self.maps)?;
        Ok(expired)
    }

    /// Forgets the connections that would be idle for too long after `time` has passed without packets. Returns how
    /// many connections were forgotten.
    pub fn expire_after(&self, time: Duration) -> Result<u64, Error> {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.maps.expire(clock::monotonic_ns().saturating_add(time_ns))
    }

    /// Sets the key that new tokens are made with. Tokens of the previous key are still accepted, those of older keys
    /// are not.
    pub fn rotate_token_key(&self, key: token::GateKey) -> Result<(), Error> {
        lock(&self.settings).rotate_token_key(&self.maps, key)
    }

    /// Returns the keys that an application needs to check Retry tokens.
    pub fn token_keys(&self) -> token::Keys {
        lock(&self.settings).token_keys().clone()
    }

    /// Runs the gate on an Ethernet frame as if it had arrived, with all changes of counters and state. No interface is
    /// needed.
    pub fn run(&self, frame: &[u8]) -> Result<FrameAction, Error> {
        let object = lock(&self.object);
        let mut after = vec![0; frame.len()];
        let input =
            ProgramInput { data_in: Some(frame), data_out: Some(&mut after), ..ProgramInput::default() };
        let output = object
            .program("gate_xdp")?
            .test_run(input)
            .map_err(|source| Error::Read { what: "the verdict", source })?;
        match output.return_value {
            libbpf_sys::XDP_PASS => Ok(FrameAction::Pass),
            libbpf_sys::XDP_DROP => Ok(FrameAction::Drop),
            libbpf_sys::XDP_TX => Ok(FrameAction::Answer(output.data.unwrap_or_default().to_vec())),
            _ => Err(Error::Config("the program returned an unknown verdict")),
        }
    }

    /// Measures how long a decision about a frame takes. The result is the mean of `runs` decisions in a row, so the
    /// CPU's caches are warm. A frame that the gate answers with Retry or Version Negotiation cannot be measured, since
    /// the answer replaces it after the first decision.
    pub fn time(&self, frame: &[u8], runs: u32) -> Result<Duration, Error> {
        let object = lock(&self.object);
        let input = ProgramInput { data_in: Some(frame), repeat: runs, ..ProgramInput::default() };
        let output = object.program("gate_xdp")?.test_run(input);
        output.map(|output| output.duration).map_err(|source| Error::Read { what: "the time", source })
    }

    /// Runs the egress program on an Ethernet frame, as if a server had sent it.
    pub fn run_egress(&self, frame: &[u8]) -> Result<(), Error> {
        let input = ProgramInput { data_in: Some(frame), ..ProgramInput::default() };
        let object = lock(&self.object);
        let output = object.program("gate_egress")?.test_run(input);
        output.map(|_| ()).map_err(|source| Error::Read { what: "what was watched", source })
    }

    /// Returns the counters of packets and events since the gate was loaded.
    pub fn statistics(&self) -> Result<GateTotals, Error> {
        let names = lock(&self.settings).names();
        self.maps.statistics(&names, &lock(&self.object).counters("events")?)
    }

    /// Returns how many entries the gate's tables in the kernel have, and how many they may have.
    pub fn tables(&self) -> Vec<TableFill> {
        let prefixes = lock(&self.settings).prefixes();
        let room = self.maps.room_for_prefixes();
        self.maps.tables().chain([TableFill { name: "prefixes", entries: prefixes, room }]).collect()
    }

    /// Returns the clients that have connections to a guarded application (scope), in no particular order.
    pub fn clients(&self, scope: &str) -> Result<Vec<KernelClient>, Error> {
        self.scope(scope)?.clients()
    }

    /// Reads the samples of refused packets that wait in the log's ring buffer.
    pub fn drain_samples(&self) -> Result<Vec<RefusedPacket>, Error> {
        let names = lock(&self.settings).names();
        let mut object = lock(&self.object);
        let mut samples = Vec::new();
        drain(&object.map("samples")?, |raw| samples.extend(sample(raw, &names)))?;
        Ok(samples)
    }

    /// Traces packets that rules refuse, or that monitored rules would refuse, until the result is dropped. Samples for
    /// the log and packets that no trace matches take nothing from a trace's rate. Up to [`GateTrace::TRACERS`] traces
    /// may run at the same time.
    pub fn trace(&self, what: &GateTrace) -> Result<PacketTracer, Error> {
        PacketTracer::new(what, &self.settings, &self.maps, &self.traces)
    }
}

/// Reports whether the kernel has PREEMPT_RT.
fn is_realtime() -> bool {
    std::fs::read_to_string("/sys/kernel/realtime").is_ok_and(|text| text.trim() == "1")
}

fn random() -> Result<u64, Error> {
    let key = token::GateKey::random().map_err(|source| Error::Random { source })?;
    Ok(key.words()[0])
}

/// Returns the number of configured prefix lengths. Each address is in one network of each length.
fn sizes(config: &Config) -> u32 {
    config.client_prefix_v4.len().max(config.client_prefix_v6.len()) as u32
}

impl Config {
    /// Checks the prefix lengths of a client and its wider networks, for addresses of `bits` bits.
    ///
    /// # Errors
    /// Describes the fault for an operator.
    pub fn check_prefixes(prefixes: &[u8], bits: u8) -> Result<(), String> {
        if prefixes.is_empty() || prefixes.len() > intf::LEVELS {
            return Err(format!("must be one number, or a list of up to {}", intf::LEVELS));
        }
        if prefixes.iter().any(|prefix| *prefix > bits) {
            return Err(format!("an address has {bits} bits"));
        }
        if !prefixes.is_sorted_by(|narrow, wide| narrow > wide) {
            return Err("must begin with a client's prefix length; further ones are shorter".to_owned());
        }
        Ok(())
    }

    /// Checks the numbers by which a client's limits are multiplied for wider networks.
    ///
    /// # Errors
    /// Describes the fault for an operator.
    pub fn check_times(times: [u32; intf::LEVELS - 1]) -> Result<(), String> {
        let valid = times.iter().all(|times| (2..=NETWORK_TIMES_MAX).contains(times)) && times.is_sorted();
        valid.then_some(()).ok_or_else(|| {
            format!("must be two numbers from 2 to {NETWORK_TIMES_MAX}, the second no less than the first")
        })
    }

    /// Returns the prefix lengths and the multiples of the limits in the BPF program's format.
    fn levels(&self) -> intf::Levels {
        let times: [u64; intf::LEVELS] = std::array::from_fn(|level| {
            level.checked_sub(1).map_or(1, |wider| self.network_times[wider].into())
        });
        let of_family = |prefixes: &[u8], mapping: u8| {
            let mut levels = [intf::Level::default(); intf::LEVELS];
            for ((to, prefix), times) in levels.iter_mut().zip(prefixes).zip(times) {
                *to = intf::Level {
                    mask: millrace_kernel::prefix::bits(mapping + prefix).to_be_bytes(),
                    times,
                };
            }
            levels
        };
        intf::Levels { v4: of_family(&self.client_prefix_v4, 96), v6: of_family(&self.client_prefix_v6, 0) }
    }
}

fn encode(config: &Config) -> Result<intf::Config, Error> {
    let checked = Config::check_prefixes(&config.client_prefix_v4, 32)
        .and(Config::check_prefixes(&config.client_prefix_v6, 128))
        .and(Config::check_times(config.network_times));
    checked.map_err(|_| Error::Config("client_prefix_v4, client_prefix_v6 or network_times is not valid"))?;
    const SECOND: u64 = 1_000_000_000 * intf::TICKS;
    Ok(intf::Config {
        levels: config.levels(),
        sample_ticks: SECOND.checked_div(u64::from(config.samples_per_second)).unwrap_or(0),
        mark_seed: 0,
        client_ids: u64::from(config.max_ids / IDS_PER_CLIENT).max(1),
        ids: config.max_ids.into(),
        fresh_rates: u64::from(config.max_rates / FRESH_RATES).max(1),
        nests: config.nests.into(),
    })
}

/// Reads the samples of refused packets that wait in a ring buffer.
fn drain(map: &dyn MapCore, mut each: impl FnMut(intf::Sample)) -> Result<(), Error> {
    let error = |source| Error::Read { what: "samples", source };
    let mut builder = RingBufferBuilder::new();
    builder
        .add(map, |bytes| {
            intf::Sample::from_bytes(bytes).into_iter().for_each(&mut each);
            0
        })
        .map_err(error)?;
    builder.build().map_err(error)?.consume().map_err(error)
}

/// Converts a sample of a refused packet from the BPF program's format. Returns `None` if its reason is unknown.
fn sample(raw: intf::Sample, names: &[String]) -> Option<RefusedPacket> {
    let address = |bytes, port: [u8; 2]| -> SocketAddr {
        let address: IpAddr = millrace_kernel::prefix::unmapped(bytes);
        SocketAddr::new(address, u16::from_be_bytes(port))
    };
    let version = u32::from_be_bytes(raw.version);
    Some(RefusedPacket {
        time_ns: raw.time_ns,
        scope: names.get(usize::from(raw.scope)).cloned().unwrap_or_default(),
        reason: GateReason::new(raw.reason)?,
        monitored: Rule::ALL.into_iter().filter(|rule| raw.monitored & 1 << *rule as u32 != 0).collect(),
        source: address(raw.source, raw.source_port),
        destination: address(raw.destination, raw.destination_port),
        bytes: raw.bytes,
        kind: Kind::new(raw.kind),
        version: (raw.first & 0x80 != 0).then_some(version),
        id: raw.id.get(..usize::from(raw.id_len)).unwrap_or_default().to_vec(),
    })
}

/// Locks a mutex and ignores poison, since no code under these locks leaves a state half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
