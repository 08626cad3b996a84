//! What this host says to a peer, and what it does with what they have agreed on.

use std::{fs, net::IpAddr, net::SocketAddr, sync::OnceLock, time::Duration};

use millrace_graft_kernel as kernel;
use millrace_graft_kernel::Outcome;
use millrace_graft_proto::{
    evidence::Downgrade,
    judge::{Terms, judge},
    message::{
        CONNECTIONS_MAX, Connection, Function, Hash, Host, Outcome as Told, Refusal, Rule, Side, Statement,
        VERSIONS, Verdict,
    },
};
use millrace_kernel::clock;

use super::Runtime;
use crate::{
    Agree, Error, Graft, Identity, Manifest, Source,
    agreements::State,
    replace::replace,
    settings::{self, Agreement},
    status,
};

/// Of silence, after which an agreement is over.
const HOLD_INTERVALS: u64 = 3;
/// However long the peer says.
const HOLD_MAX: Duration = Duration::from_secs(3 * 3600);

/// A statement of this host's, and what its rules are here.
#[derive(Clone, Debug)]
pub struct Own {
    pub statement: Statement,
    /// Of each of its rules, among those in the kernel.
    places: Vec<usize>,
    names: Vec<String>,
    /// Of the settings that it was made from.
    revision: u64,
}

/// Of an agreement that is in force: it goes on under this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session(u64);

impl Runtime {
    pub fn agreement(&self) -> Option<&Agreement> {
        self.settings.agreement.as_ref()
    }

    /// Another one after each change of what this host would say.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// What this host says on a control connection between these addresses.
    pub fn statement(&mut self, local: SocketAddr, remote: SocketAddr, peer: &str) -> Result<Own, Error> {
        let address = remote.ip().to_canonical();
        let mut own = Own {
            statement: Statement {
                versions: VERSIONS.to_vec(),
                epoch: epoch(),
                hold_s: self.hold_s(),
                host: host().clone(),
                local,
                remote,
                functions: self.functions(),
                rules: Vec::new(),
                connections: self.connections(address)?,
                path: self.agreements.verdict(peer),
            },
            places: Vec::new(),
            names: Vec::new(),
            revision: self.revision,
        };
        self.add_rules(&mut own, address);
        Ok(own)
    }

    fn hold_s(&self) -> u32 {
        let seconds = self.agreement().map_or(0, |it| it.interval.as_secs());
        u32::try_from(seconds * HOLD_INTERVALS).unwrap_or(u32::MAX)
    }

    fn functions(&self) -> Vec<Function> {
        let gives = self.agreement().is_some_and(|agreement| agreement.give);
        let function = |graft: &Graft| Function {
            name: graft.manifest.name.clone(),
            identity: Hash(graft.identity.bytes()),
            abi: graft.manifest.abi,
            services: graft.manifest.services.iter().take(16).map(|it| it.name().to_owned()).collect(),
            given: gives && matches!(graft.source, Source::File(_)),
        };
        self.pool.iter().take(256).map(function).collect()
    }

    /// Those that ask, and hold for this peer, in the order of the kernel's places.
    fn add_rules(&self, own: &mut Own, peer: IpAddr) {
        let mut place = 0;
        for rule in &self.settings.rules {
            for prefix in &rule.peers {
                for ports in &rule.ports {
                    if rule.agree != Agree::Nobody && kernel::covers(*prefix, peer) {
                        own.statement.rules.push(Rule {
                            side: match rule.side {
                                settings::Side::Client => Side::Client,
                                settings::Side::Server => Side::Server,
                            },
                            first_port: *ports.start(),
                            last_port: *ports.end(),
                            graft: rule.graft.as_ref().and_then(|name| self.hash_of(name)),
                            wants: rule.peer_graft.as_ref().and_then(|name| self.hash_of(name)),
                        });
                        own.places.push(place);
                        own.names.push(rule.name.clone());
                    }
                    place += 1;
                }
            }
        }
    }

    /// Also of one that is yet to come from a peer: that is said before it is there.
    fn hash_of(&self, graft: &str) -> Option<Hash> {
        let fetched = || self.agreement()?.fetch.iter().find(|it| it.graft == graft).map(|it| it.identity);
        let identity = self.pool.find(graft).ok().map(|it| it.identity).or_else(fetched)?;
        Some(Hash(identity.bytes()))
    }

    fn connections(&mut self, peer: IpAddr) -> Result<Vec<Connection>, Error> {
        let known = self.tcp.connections()?;
        let with = known.iter().rev().filter(|it| it.peer == peer).filter_map(told).take(CONNECTIONS_MAX);
        let mut newest: Vec<_> = with.collect();
        newest.reverse();
        Ok(newest)
    }

    /// Whether what the peer says will do. Returns also what both saw differently, as far as that is new.
    pub fn consider(
        &mut self,
        peer: &str,
        own: &Own,
        theirs: &Statement,
    ) -> (Result<Terms, Refusal>, Vec<(Downgrade, u16)>) {
        let wants = self.agreement().and_then(|it| it.peer(peer)).map(|it| it.wants.clone());
        let terms = judge(&own.statement, &wants.unwrap_or_default(), theirs);
        let now_ns = clock::monotonic_ns();
        let (mine, other) = (&own.statement.connections, &theirs.connections);
        let found = self.agreements.compare(peer, mine, other, now_ns);
        if let Ok(Terms { nat, .. }) = &terms {
            self.agreements.note(peer, &Verdict { nat: Some(*nat), ..Verdict::default() }, now_ns);
        }
        // The caller probes; who is called learns it from there, seen from the other side.
        let learned = Verdict { options: None, nat: None, ..theirs.path.clone() };
        if learned != Verdict::default() {
            self.agreements.note(peer, &learned, now_ns);
        }
        (terms, found)
    }

    /// From now on both are bound, for as long as the caller says that it holds. `None`: the settings have changed meanwhile, or another conversation has
    /// taken its place; what was agreed on does not hold.
    pub fn bind(
        &mut self,
        (peer, calls): (&str, bool),
        session: Option<Session>,
        (own, theirs): (&Own, &Statement),
        (terms, hold_s): (&Terms, u32),
        timing: status::Negotiated,
    ) -> Result<Option<Session>, Error> {
        if own.revision != self.revision {
            return Ok(None);
        }
        let address = own.statement.remote.ip().to_canonical();
        let of = |list: &[usize]| terms.rules.iter().filter_map(|(at, _)| list.get(*at).copied()).collect();
        let places: Vec<usize> = of(&own.places);
        let mut names: Vec<String> =
            terms.rules.iter().filter_map(|(at, _)| own.names.get(*at).cloned()).collect();
        names.dedup();
        let session = match session {
            Some(session) if self.agreements.renewed(peer, session.0, theirs, names.clone()) => session,
            Some(_) => return Ok(None),
            None => {
                let now_ns = clock::monotonic_ns();
                let made = self.agreements.agreed((peer, calls), theirs, names, (address, timing), now_ns);
                let Some((session, before)) = made else { return Ok(None) };
                before.map_or(Ok(()), |before| self.tcp.unbind(before))?;
                Session(session)
            }
        };
        let time = Duration::from_secs(u64::from(hold_s)).min(HOLD_MAX);
        self.tcp.bind(address, &places, time)?;
        Ok(Some(session))
    }

    /// A conversation has ended, or none was had.
    pub fn ended(&mut self, peer: &str, session: Option<Session>, state: State) -> Result<(), Error> {
        let session = session.map(|it| it.0);
        let bound = self.agreements.ended(peer, session, state, clock::monotonic_ns());
        Ok(bound.map_or(Ok(()), |address| self.tcp.unbind(address))?)
    }

    pub fn is_agreed(&self, peer: &str) -> bool {
        self.agreements.is_agreed(peer)
    }

    /// See [`Agreements::has_called`](crate::agreements::Agreements::has_called).
    pub fn has_called(&self, peer: &str, epoch: u64) -> bool {
        self.agreements.has_called(peer, epoch)
    }

    /// Nobody is bound any more: keys or addresses have changed.
    pub fn release_all(&mut self) -> Result<(), Error> {
        let bound = self.agreements.end_all(clock::monotonic_ns());
        bound.into_iter().try_for_each(|address| self.tcp.unbind(address))?;
        Ok(())
    }

    /// Somebody called who showed no key that is known.
    pub fn count_stranger(&mut self) {
        self.agreements.count_stranger();
    }

    /// What was found out about the path to a peer.
    pub fn note_path(&mut self, peer: &str, verdict: &Verdict) {
        self.agreements.note(peer, verdict, clock::monotonic_ns());
    }

    /// A graft that the settings want from peers, that is not there, and that this one gives.
    pub fn wanted_from(&self, theirs: &Statement) -> Option<settings::Fetch> {
        let fetch = &self.agreement()?.fetch;
        let given = |identity: Identity| {
            theirs.functions.iter().any(|it| it.given && it.identity == Hash(identity.bytes()))
        };
        fetch.iter().find(|it| self.pool.find(&it.graft).is_err() && given(it.identity)).cloned()
    }

    /// Manifest and object, for a peer.
    pub fn give(&self, identity: Hash) -> Option<(String, Vec<u8>)> {
        self.agreement().filter(|agreement| agreement.give)?;
        // The same object may be compiled in under another name.
        let files = self.pool.iter().filter_map(|graft| match &graft.source {
            Source::File(path) => Some((graft, path)),
            Source::Shipped => None,
        });
        let mut fitting = files.filter(|(graft, _)| graft.identity.bytes() == identity.0);
        let (graft, path) = fitting.next()?;
        Some((fs::read_to_string(path).ok()?, graft.image.clone()))
    }

    /// What a peer gave is put where fetched grafts lie, if it is what was asked for and signed by a key that counts.
    pub fn keep(&self, wanted: &settings::Fetch, manifest: &str, image: &[u8]) -> Result<(), Error> {
        let refused = |message: String| Error::Graft { name: wanted.graft.clone(), message };
        if Identity::of(image) != wanted.identity {
            return Err(refused(format!("a peer gave {}, which was not asked for", Identity::of(image))));
        }
        let parsed = Manifest::parse(manifest).map_err(refused)?;
        if self.settings.trusted_keys.is_empty() || parsed.name != wanted.graft {
            return Err(refused(format!("a peer gave {}, which was not asked for", parsed.name)));
        }
        parsed.check_signature(manifest, &self.settings.trusted_keys).map_err(refused)?;
        parsed.check_identity(wanted.identity).map_err(refused)?;
        let Some(directory) = self.agreement().and_then(|it| it.fetch_to.clone()) else {
            return Err(refused("there is no fetch-to".to_owned()));
        };
        let write = |name: &str, bytes: &[u8]| {
            let path = directory.join(name);
            let failed = |error: std::io::Error| Error::File {
                path: path.display().to_string(),
                message: error.to_string(),
            };
            replace(&path, bytes, 0o666).map_err(failed)
        };
        write(&parsed.object, image)?;
        write(&format!("{}.toml", parsed.name), manifest.as_bytes())
    }
}

/// Of this run.
fn epoch() -> u64 {
    static EPOCH: OnceLock<u64> = OnceLock::new();
    *EPOCH.get_or_init(|| {
        let mut bytes = [0; 8];
        let made = ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes);
        // Without randomness there is no TLS either; then the time will do.
        if made.is_ok() { u64::from_ne_bytes(bytes) } else { clock::unix_ns().unsigned_abs() }
    })
}

fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total_kib = memory.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let total_kib = total_kib.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Host {
            program: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: release.trim().chars().take(60).collect(),
            abi: kernel::ABI,
            cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
            memory_mib: total_kib.unwrap_or_default() / 1024,
        }
    })
}

fn told(connection: &kernel::Connection) -> Option<Connection> {
    let outcome = match connection.outcome {
        Outcome::Agreed => Told::Agreed,
        Outcome::Absent | Outcome::Stripped | Outcome::Unconfirmed => Told::Silent,
        Outcome::Resent => Told::Resent,
        Outcome::Refused => Told::Refused,
        Outcome::Malformed => Told::Malformed,
        Outcome::OneSided | Outcome::NoRoom | Outcome::Withheld | Outcome::Unbound | Outcome::NoMemory => {
            Told::NotAsked
        }
        // Of packets, or of what came after.
        Outcome::Cookies | Outcome::Answered | Outcome::NoCongestion | Outcome::NotSet | Outcome::Untold => {
            return None;
        }
    };
    Some(Connection {
        sequence: connection.first,
        side: match connection.side {
            kernel::Side::Client => Side::Client,
            kernel::Side::Server => Side::Server,
        },
        port: connection.port,
        outcome,
        spoke: connection.spoke,
        own: u32::from_be_bytes(connection.own),
        heard: u32::from_be_bytes(connection.heard),
    })
}
