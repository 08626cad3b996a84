//! The gate: admits or drops QUIC traffic at XDP, before the stack, for any QUIC server on the machine.
//!
//! 1. [`Gate::load`], [`Gate::apply`] with the [`Rules`], [`Gate::attach`] to each interface that clients come in by.
//! 2. For scopes with [`Live::Tracked`], [`Gate::watch`] each interface that answers leave by.
//! 3. [`Gate::maintain`] about once a second.
//! 4. The application, if it takes part, gets its [`Scope`]: it publishes connection IDs and counts connections.
//!
//! All methods take `&self` and may be called from many threads. Nothing is pinned: everything is detached when the
//! gate is dropped, and when the process ends, however it does.

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
pub use reason::{Event, Kind, Pass, Reason, Rule};
pub use rules::{Counting, Entry, Live, Modes, Place, Policy, Rate, Rates, Rules, VERSION_1, VERSION_2};
pub use scope::Scope;
pub use trace::{Trace, Traced, Tracer};

use maps::Maps;
use millrace_kernel::Error;
use millrace_kernel::clock;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{Loaded, embedded};
pub use millrace_kernel::tc::Position;
use millrace_kernel::tc::{self, Hook};
use millrace_kernel::{stack, xdp};
use settings::Settings;

const OBJECT: &str = "gate.bpf.o";
/// A client may take this part of the room for tracked connections.
const IDS_PER_CLIENT: u32 = 16;
/// Of the table of rates, the part that is made within the time that rates take to fill, or twice that, and begins full: what is lost for it
/// was not used for as long, and is full by then.
const FRESH_RATES: u32 = 4;
const NETWORK_TIMES_MAX: u32 = 1 << 20;

/// What cannot change while the gate is loaded. Memory is taken when loading, except for lists: some 150 bytes for each
/// connection, 130 for each of the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Bits of an IPv4 address that make a client, and then those that make the wider networks that it is in, at most two. Each of these
    /// has limits of its own, so that whoever has many addresses is not many clients.
    pub client_prefix_v4: Vec<u8>,
    /// The same of an IPv6 address.
    pub client_prefix_v6: Vec<u8>,
    /// How many times as much as one client the first of the wider networks may have, and the second.
    pub network_times: [u32; intf::LEVELS - 1],
    /// Live connection IDs, of all scopes. A connection whose IDs are published has several, a tracked one has one. Of tracked
    /// ones a client has a sixteenth at most, or as many as its quota allows if that is more.
    pub max_ids: u32,
    /// Clients that have connections. There is room for as many networks of each size.
    pub max_clients: u32,
    /// Handshakes that are under way.
    pub max_handshakes: u32,
    /// Clients and networks whose rates are remembered.
    pub max_rates: u32,
    /// Prefixes in all lists; they take twice that for a moment when rules are applied.
    pub max_prefixes: u32,
    /// Samples of refused packets per scope, at most. 0: none.
    pub samples_per_second: u32,
    /// Where among the programs at TC egress answers are [watched](Gate::watch): behind one that ends the chain nothing is
    /// seen, and in front of one that changes addresses not what the client sees.
    pub watch: Position,
    /// Whether a run may begin in the middle of another on the same CPU, which then has nothing to work with: with
    /// PREEMPT_RT.
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
            watch: Position::Last,
            nests: is_realtime(),
        }
    }
}

/// A packet that a rule refused, or would have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// `CLOCK_MONOTONIC`.
    pub time_ns: u64,
    pub scope: String,
    pub reason: Reason,
    /// Rules in mode "monitor" that would have refused it.
    pub monitored: Vec<Rule>,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    /// UDP payload.
    pub bytes: u32,
    /// Of the QUIC packet; `None`: the rule objected before it was read, or it is too short to say.
    pub kind: Option<Kind>,
    /// Of long headers.
    pub version: Option<u32>,
    /// Destination connection ID of long headers.
    pub id: Vec<u8>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counter {
    pub packets: u64,
    /// UDP payload; whole frames where that cannot be told.
    pub bytes: u64,
    /// Packets that the rule would have refused if it had been enforced.
    pub monitored: u64,
}

/// What becomes of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    Pass,
    Drop,
    /// Goes back in place of the one that came: a Retry or Version Negotiation.
    Answer(Vec<u8>),
}

/// Totals since the gate was loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statistics {
    /// The first is "interface".
    pub scopes: Vec<ScopeStatistics>,
    events: [u64; Event::ALL.len()],
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopeStatistics {
    pub name: String,
    rules: [Counter; Rule::ALL.len()],
    passes: [Counter; Pass::ALL.len()],
}

impl Statistics {
    pub fn event(&self, event: Event) -> u64 {
        self.events[event as usize]
    }

    pub fn scope(&self, name: &str) -> Option<&ScopeStatistics> {
        self.scopes.iter().find(|scope| scope.name == name)
    }
}

impl ScopeStatistics {
    /// Packets that the rule decided on.
    pub fn rule(&self, rule: Rule) -> Counter {
        self.rules[rule as usize]
    }

    /// Packets that passed for this reason.
    pub fn pass(&self, pass: Pass) -> Counter {
        self.passes[pass as usize]
    }
}

/// An entry of a list: its scope, or `None` for all of them; the prefix; and what becomes of it.
pub type Listing = (Option<String>, Prefix, Entry);

/// How full a table is that can fill up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Table {
    /// `connections`, `paths`, `clients`, `prefixes`; where what is full only forgets the oldest, `handshakes`, `openings`.
    pub name: &'static str,
    /// As [`Gate::maintain`] last found it.
    pub entries: u64,
    pub room: u64,
}

/// A client with connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Client {
    pub prefix: Prefix,
    pub connections: u32,
}

/// The gate, loaded. It decides from [`attach`](Self::attach) on and until it is dropped.
pub struct Gate {
    attachments: Mutex<Vec<(i32, xdp::root::Attachment)>>,
    rests: rests::Rests,
    watches: Mutex<Vec<(i32, tc::Attachment)>>,
    object: Mutex<Loaded>,
    settings: Arc<Mutex<Settings>>,
    maps: Arc<Maps>,
    traces: Arc<trace::Traces>,
    position: Position,
}

impl Gate {
    /// Until rules are applied, everything passes.
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
        let maps = Arc::new(Maps::new(&mut object, config)?);
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
        let key = token::Key::random().map_err(|source| Error::Random { source })?;
        gate.rotate_token_key(key)?;
        gate.maintain()?;
        Ok(gate)
    }

    /// Decides about what arrives on an interface of the calling thread's network namespace. Returns how it is
    /// attached, never [`xdp::Mode::Auto`]. An interface has room for one XDP program, which is shared with grafts; another
    /// one's, or another gate, is an error. To join where grafts are already needs CAP_SYS_ADMIN. Interfaces without an Ethernet header
    /// (tun, WireGuard, PPP) are read as they are; ends of tunnels, whose packets may have been merged, are an error.
    pub fn attach(&self, ifindex: i32, mode: xdp::Mode) -> Result<xdp::Mode, Error> {
        let object = lock(&self.object);
        self.look_how_frames_begin(ifindex)?;
        let attachment = xdp::root::Attachment::new(
            &object.program("gate_xdp")?,
            xdp::root::Turn::Gate,
            (ifindex, mode),
            |rest| self.rests.put(ifindex, rest),
        )?;
        let mode = attachment.mode();
        self.hides_tags(ifindex)?;
        lock(&self.settings).look_anew(&self.maps)?;
        lock(&self.attachments).push((ifindex, attachment));
        Ok(mode)
    }

    /// Whether the interface, of the calling thread's network namespace, has VLANs whose tags its driver takes off before the gate
    /// sees the packets (`ethtool -K IF rxvlan off` ends that). An answer would leave without its tag, so nothing that comes
    /// in there is answered from now on, or it is again. [`attach`](Self::attach) asks, too; VLANs come later.
    pub fn hides_tags(&self, ifindex: i32) -> Result<bool, Error> {
        let hides = stack::hides_tags(ifindex)
            .map_err(|source| Error::Read { what: "the interfaces", source: source.into() })?;
        self.set_untagged(ifindex, hides)?;
        Ok(hides)
    }

    fn look_how_frames_begin(&self, ifindex: i32) -> Result<(), Error> {
        let begin = stack::begin(ifindex)
            .map_err(|source| Error::Read { what: "the interfaces", source: source.into() })?;
        self.set_bare(ifindex, begin == stack::Begin::Ip)
    }

    /// Whether frames of an interface begin with their IP header, as [`attach`](Self::attach) and [`watch`](Self::watch) find out.
    pub fn set_bare(&self, ifindex: i32, bare: bool) -> Result<(), Error> {
        lock(&self.settings).set_bare(&self.maps, ifindex, bare)
    }

    /// Whether packets of an interface may have lost their VLAN tags, as [`hides_tags`](Self::hides_tags) finds out: then they get
    /// no answer.
    pub fn set_untagged(&self, ifindex: i32, untagged: bool) -> Result<(), Error> {
        self.maps.set_untagged(ifindex, untagged)
    }

    /// Watches what servers answer by an interface of the calling thread's network namespace, at TC egress. Only scopes
    /// with [`Live::Tracked`] need it. An interface that is watched already stays so.
    pub fn watch(&self, ifindex: i32) -> Result<(), Error> {
        let object = lock(&self.object);
        let mut watches = lock(&self.watches);
        watches.retain(|(_, attachment)| attachment.is_in_place());
        if watches.iter().any(|(watched, _)| *watched == ifindex) {
            return Ok(());
        }
        self.look_how_frames_begin(ifindex)?;
        let program = object.program("gate_egress")?;
        let attachment = tc::Attachment::new(&program, ifindex, Hook::Egress, self.position, None)?;
        watches.push((ifindex, attachment));
        Ok(())
    }

    /// Whether it still decides there: somebody may have detached it, or the interface may be gone.
    pub fn is_attached(&self, ifindex: i32) -> bool {
        lock(&self.attachments)
            .iter()
            .any(|(index, attachment)| *index == ifindex && attachment.is_in_place())
    }

    /// Whether it still [watches](Self::watch) there.
    pub fn is_watching(&self, ifindex: i32) -> bool {
        lock(&self.watches).iter().any(|(index, attachment)| *index == ifindex && attachment.is_in_place())
    }

    /// Detaches from the interface: neither decides nor watches there any more.
    pub fn detach_from(&self, ifindex: i32) {
        lock(&self.attachments).retain(|(index, _)| *index != ifindex);
        self.rests.remove(ifindex);
        lock(&self.watches).retain(|(index, _)| *index != ifindex);
    }

    /// Detaches from every interface. What is known of connections stays.
    pub fn detach(&self) {
        for (ifindex, attachment) in lock(&self.attachments).drain(..) {
            drop(attachment);
            self.rests.remove(ifindex);
        }
        lock(&self.watches).clear();
    }

    /// Replaces all rules at once, or changes nothing. What [`list`](Self::list) put in stays.
    pub fn apply(&self, rules: &Rules) -> Result<(), Error> {
        lock(&self.settings).apply(&self.maps, rules)
    }

    /// The rules in force.
    pub fn rules(&self) -> Rules {
        lock(&self.settings).rules().clone()
    }

    /// Blocks or allows a prefix at once, in a scope or in all (`None`). The entry holds until [`unlist`](Self::unlist), also
    /// when the rules change, and replaces one of theirs for the same prefix.
    pub fn list(&self, scope: Option<&str>, prefix: Prefix, entry: Entry) -> Result<(), Error> {
        lock(&self.settings).list(&self.maps, scope, prefix, Some(entry))
    }

    /// Takes back what [`list`](Self::list) did; the rules' entry, if there is one, is in force again.
    pub fn unlist(&self, scope: Option<&str>, prefix: Prefix) -> Result<(), Error> {
        lock(&self.settings).list(&self.maps, scope, prefix, None)
    }

    /// What [`list`](Self::list) has put in: scope, prefix and entry.
    pub fn listed(&self) -> Vec<Listing> {
        lock(&self.settings).listed()
    }

    /// The entries that prevail over this one, for all or a part of its prefix: longer prefixes in the same list or in one that
    /// counts where this one does, and blocks of the same prefix.
    pub fn exceptions(
        &self,
        scope: Option<&str>,
        prefixes: &[Prefix],
        entry: Entry,
    ) -> Result<Vec<Listing>, Error> {
        lock(&self.settings).exceptions(scope, prefixes, entry)
    }

    /// For the application behind a scope. Valid as long as the rules have the scope, and harmless afterwards.
    pub fn scope(&self, name: &str) -> Result<Scope, Error> {
        // Held, so that the index does not become another scope's meanwhile.
        let settings = lock(&self.settings);
        let index = settings.index(name).ok_or(Error::Config("there is no scope of that name"))?;
        Ok(Scope::new(self.maps.clone(), index))
    }

    /// To be called about once a second: forgets what has been idle, and follows the system's clock, for tokens.
    /// Returns how many connections were forgotten.
    pub fn maintain(&self) -> Result<u64, Error> {
        lock(&self.settings).follow_clock(&self.maps)?;
        let expired = self.expire_after(Duration::ZERO)?;
        lock(&self.settings).age_marks(&self.maps)?;
        Ok(expired)
    }

    /// Forgets what would be idle if nothing happened for `time`. Returns how many connections were forgotten.
    pub fn expire_after(&self, time: Duration) -> Result<u64, Error> {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.maps.expire(clock::monotonic_ns().saturating_add(time_ns))
    }

    /// Makes tokens with this key from now on. Those of the key before are still accepted, older ones are not.
    pub fn rotate_token_key(&self, key: token::Key) -> Result<(), Error> {
        lock(&self.settings).rotate_token_key(&self.maps, key)
    }

    /// What an application needs to check tokens.
    pub fn token_keys(&self) -> token::Keys {
        lock(&self.settings).token_keys().clone()
    }

    /// Decides about an Ethernet frame as if it had arrived, with all that follows for counters and state, but without a
    /// network.
    pub fn run(&self, frame: &[u8]) -> Result<Action, Error> {
        let object = lock(&self.object);
        let mut after = vec![0; frame.len()];
        let input =
            ProgramInput { data_in: Some(frame), data_out: Some(&mut after), ..ProgramInput::default() };
        let output = object
            .program("gate_xdp")?
            .test_run(input)
            .map_err(|source| Error::Read { what: "the verdict", source })?;
        match output.return_value {
            libbpf_sys::XDP_PASS => Ok(Action::Pass),
            libbpf_sys::XDP_DROP => Ok(Action::Drop),
            libbpf_sys::XDP_TX => Ok(Action::Answer(output.data.unwrap_or_default().to_vec())),
            _ => Err(Error::Config("the program returned what it never should")),
        }
    }

    /// How long a decision about a frame takes: the mean of so many in a row, so with everything in the caches. Not for frames
    /// that get an answer, since that takes the frame's place.
    pub fn time(&self, frame: &[u8], runs: u32) -> Result<Duration, Error> {
        let object = lock(&self.object);
        let input = ProgramInput { data_in: Some(frame), repeat: runs, ..ProgramInput::default() };
        let output = object.program("gate_xdp")?.test_run(input);
        output.map(|output| output.duration).map_err(|source| Error::Read { what: "the time", source })
    }

    /// Watches an Ethernet frame as if a server had sent it.
    pub fn run_egress(&self, frame: &[u8]) -> Result<(), Error> {
        let input = ProgramInput { data_in: Some(frame), ..ProgramInput::default() };
        let object = lock(&self.object);
        let output = object.program("gate_egress")?.test_run(input);
        output.map(|_| ()).map_err(|source| Error::Read { what: "what was watched", source })
    }

    pub fn statistics(&self) -> Result<Statistics, Error> {
        let names = lock(&self.settings).names();
        self.maps.statistics(&names, &lock(&self.object).counters("events")?)
    }

    /// How full the tables are.
    pub fn tables(&self) -> Vec<Table> {
        let prefixes = lock(&self.settings).prefixes();
        let room = self.maps.room_for_prefixes();
        self.maps.tables().chain([Table { name: "prefixes", entries: prefixes, room }]).collect()
    }

    /// The clients of a scope that have connections, in no order.
    pub fn clients(&self, scope: &str) -> Result<Vec<Client>, Error> {
        self.scope(scope)?.clients()
    }

    /// Takes the samples that wait.
    pub fn drain_samples(&self) -> Result<Vec<Sample>, Error> {
        let names = lock(&self.settings).names();
        let mut object = lock(&self.object);
        let mut samples = Vec::new();
        drain(&object.map("samples")?, |raw| samples.extend(sample(raw, &names)))?;
        Ok(samples)
    }

    /// Follows refused packets, and those that would be refused, until the result is dropped: beside the samples, and
    /// undisturbed by what nobody follows, which the program passes over. Up to [`Trace::TRACERS`] at the same time.
    pub fn trace(&self, what: &Trace) -> Result<Tracer, Error> {
        Tracer::new(what, &self.settings, &self.maps, &self.traces)
    }
}

/// Whether the kernel has PREEMPT_RT.
fn is_realtime() -> bool {
    std::fs::read_to_string("/sys/kernel/realtime").is_ok_and(|text| text.trim() == "1")
}

fn random() -> Result<u64, Error> {
    let key = token::Key::random().map_err(|source| Error::Random { source })?;
    Ok(key.words()[0])
}

/// Returns how many networks an address is in: of each size one.
fn sizes(config: &Config) -> u32 {
    config.client_prefix_v4.len().max(config.client_prefix_v6.len()) as u32
}

impl Config {
    /// Whether these make a client and wider networks: bits of an address of `bits`.
    ///
    /// # Errors
    /// What is wrong with them, for an operator.
    pub fn check_prefixes(prefixes: &[u8], bits: u8) -> Result<(), String> {
        if prefixes.is_empty() || prefixes.len() > intf::LEVELS {
            return Err(format!("is one number, or a list of up to {}", intf::LEVELS));
        }
        if prefixes.iter().any(|prefix| *prefix > bits) {
            return Err(format!("an address has {bits} bits"));
        }
        if !prefixes.is_sorted_by(|narrow, wide| narrow > wide) {
            return Err("begins with what makes a client; each that follows has fewer bits".to_owned());
        }
        Ok(())
    }

    /// Whether these are multiples.
    ///
    /// # Errors
    /// What is wrong with them, for an operator.
    pub fn check_times(times: [u32; intf::LEVELS - 1]) -> Result<(), String> {
        let valid = times.iter().all(|times| (2..=NETWORK_TIMES_MAX).contains(times)) && times.is_sorted();
        valid.then_some(()).ok_or_else(|| {
            format!("is two numbers from 2 to {NETWORK_TIMES_MAX}, the second no less than the first")
        })
    }

    /// Sizes of networks, for the program.
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
    checked.map_err(|_| {
        Error::Config("client_prefix_v4, client_prefix_v6 or network_times: not the sizes of networks, or not multiples")
    })?;
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

/// Takes what waits in a ring buffer of samples.
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

/// `None`: made by a program that knows other reasons.
fn sample(raw: intf::Sample, names: &[String]) -> Option<Sample> {
    let address = |bytes, port: [u8; 2]| -> SocketAddr {
        let address: IpAddr = millrace_kernel::prefix::unmapped(bytes);
        SocketAddr::new(address, u16::from_be_bytes(port))
    };
    let version = u32::from_be_bytes(raw.version);
    Some(Sample {
        time_ns: raw.time_ns,
        scope: names.get(usize::from(raw.scope)).cloned().unwrap_or_default(),
        reason: Reason::new(raw.reason)?,
        monitored: Rule::ALL.into_iter().filter(|rule| raw.monitored & 1 << *rule as u32 != 0).collect(),
        source: address(raw.source, raw.source_port),
        destination: address(raw.destination, raw.destination_port),
        bytes: raw.bytes,
        kind: Kind::new(raw.kind),
        version: (raw.first & 0x80 != 0).then_some(version),
        id: raw.id.get(..usize::from(raw.id_len)).unwrap_or_default().to_vec(),
    })
}

/// Nothing that is done under these locks leaves a state half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
