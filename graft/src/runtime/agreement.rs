//! Statements that this host sends to its peers to negotiate agreements, and the effects of agreements on the rules in
//! the kernel.

use std::{fs, net::IpAddr, net::SocketAddr, sync::OnceLock, time::Duration};

use millrace_graft_kernel as kernel;
use millrace_graft_kernel::TcpOutcome;
use millrace_graft_proto::{
    evidence::Downgrade,
    judge::{JudgeTerms, judge},
    message::{
        AgreementRefusal, CONNECTIONS_MAX, ConnectionReport, GraftOffer, Hash, HostOffer, OfferSide,
        OptionOutcome as Told, PathVerdict, RuleOffer, Statement, VERSIONS,
    },
};
use millrace_kernel::clock;

use super::GraftRuntime;
use crate::{
    Agree, Error, GraftManifest, ObjectIdentity, PoolGraft, PoolSource,
    agreements::{AgreedPeer, NegotiationState},
    replace::replace,
    settings::{self, AgreementSettings},
    status,
};

/// Number of renewal intervals without a message from the peer after which an agreement ends.
const HOLD_INTERVALS: u64 = 3;
/// Longest time for which an agreement holds without renewal, even if the peer's statement has a longer time.
const HOLD_MAX: Duration = Duration::from_secs(3 * 3600);

/// A statement of this host for one peer, and the indices of the statement's rules in the kernel.
#[derive(Clone, Debug)]
pub struct OwnStatement {
    /// The statement that is sent to the peer: this host's properties, its rules, and its view of the path.
    pub statement: Statement,
    /// Index of each rule of the statement in the kernel's list of rules.
    places: Vec<usize>,
    names: Vec<String>,
    /// Revision of the settings from which the statement was made.
    revision: u64,
}

/// The result of a negotiation: both statements, and the terms on which both ends agree.
#[derive(Clone, Copy, Debug)]
pub struct AgreedStatements<'a> {
    /// This host's statement.
    pub own: &'a OwnStatement,
    /// The peer's statement.
    pub theirs: &'a Statement,
    /// The rules and functions on which both ends agree.
    pub terms: &'a JudgeTerms,
    /// The time in seconds for which the agreement holds unless it is renewed.
    pub hold_s: u32,
}

/// The ID of an agreement in force. It is needed to renew the agreement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AgreementSession(u64);

impl GraftRuntime {
    /// Returns the settings of agreements, if the settings file has them.
    pub fn agreement(&self) -> Option<&AgreementSettings> {
        self.settings.agreement.as_ref()
    }

    /// Returns a number that changes whenever this host's statement would change.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns this host's statement to the peer, for a TLS connection between these addresses over which the daemons
    /// negotiate an agreement.
    pub fn statement(
        &mut self,
        local: SocketAddr,
        remote: SocketAddr,
        peer: &str,
    ) -> Result<OwnStatement, Error> {
        let address = remote.ip().to_canonical();
        let mut own = OwnStatement {
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

    fn functions(&self) -> Vec<GraftOffer> {
        let gives = self.agreement().is_some_and(|agreement| agreement.give);
        let function = |graft: &PoolGraft| GraftOffer {
            name: graft.manifest.name.clone(),
            identity: Hash(graft.identity.bytes()),
            abi: graft.manifest.abi,
            services: graft.manifest.services.iter().take(16).map(|it| it.name().to_owned()).collect(),
            given: gives && matches!(graft.source, PoolSource::File(_)),
        };
        self.pool.iter().take(256).map(function).collect()
    }

    /// Adds the rules that require an agreement with this peer. Their indices follow the order of the kernel's list.
    fn add_rules(&self, own: &mut OwnStatement, peer: IpAddr) {
        let mut place = 0;
        for rule in &self.settings.rules {
            for prefix in &rule.peers {
                for ports in &rule.ports {
                    if rule.agree != Agree::Nobody && kernel::covers(*prefix, peer) {
                        own.statement.rules.push(RuleOffer {
                            side: match rule.side {
                                settings::SideSetting::Client => OfferSide::Client,
                                settings::SideSetting::Server => OfferSide::Server,
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

    /// Returns the SHA-256 of a graft's object file. For a graft that a peer has yet to send, it is the hash in the
    /// settings.
    fn hash_of(&self, graft: &str) -> Option<Hash> {
        let fetched = || self.agreement()?.fetch.iter().find(|it| it.graft == graft).map(|it| it.identity);
        let identity = self.pool.find(graft).ok().map(|it| it.identity).or_else(fetched)?;
        Some(Hash(identity.bytes()))
    }

    fn connections(&mut self, peer: IpAddr) -> Result<Vec<ConnectionReport>, Error> {
        let known = self.tcp.connections()?;
        let with = known
            .iter()
            .rev()
            .filter(|it| it.peer == peer)
            .filter_map(connection_report)
            .take(CONNECTIONS_MAX);
        let mut newest: Vec<_> = with.collect();
        newest.reverse();
        Ok(newest)
    }

    /// Compares the peer's statement with this host's. Returns the terms or a refusal, and newly detected changes that
    /// middleboxes made to the TCP options of connections (downgrades).
    pub fn consider(
        &mut self,
        peer: &str,
        own: &OwnStatement,
        theirs: &Statement,
    ) -> (Result<JudgeTerms, AgreementRefusal>, Vec<(Downgrade, u16)>) {
        let wants = self.agreement().and_then(|it| it.peer(peer)).map(|it| it.wants.clone());
        let terms = judge(&own.statement, &wants.unwrap_or_default(), theirs);
        let now_ns = clock::monotonic_ns();
        let mine = &own.statement.connections;
        let other = &theirs.connections;
        let found = self.agreements.compare(peer, mine, other, now_ns);
        if let Ok(JudgeTerms { nat, .. }) = &terms {
            self.agreements.note(peer, &PathVerdict { nat: Some(*nat), ..PathVerdict::default() }, now_ns);
        }
        // Only the connecting end sends probes. The other end learns the results from the connecting end's statement.
        let learned = PathVerdict { options: None, nat: None, ..theirs.path.clone() };
        if learned != PathVerdict::default() {
            self.agreements.note(peer, &learned, now_ns);
        }
        (terms, found)
    }

    /// Puts the agreement in force at this end, for as long as the connecting end's statement says. `calls` is true if
    /// this host has connected. Returns `None` if the agreement is obsolete: the settings have changed since the
    /// statement, or another negotiation has replaced this one.
    pub fn bind(
        &mut self,
        peer: &str,
        calls: bool,
        session: Option<AgreementSession>,
        agreed: &AgreedStatements<'_>,
        timing: status::Negotiated,
    ) -> Result<Option<AgreementSession>, Error> {
        let AgreedStatements { own, theirs, terms, hold_s } = *agreed;
        // A statement that was made from earlier settings must not be used.
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
                let made = self.agreements.agreed(
                    AgreedPeer { name: peer, calls, address },
                    theirs,
                    names,
                    timing,
                    now_ns,
                );
                let Some((session, before)) = made else { return Ok(None) };
                // The peer's address has changed, so the agreement must no longer apply to the old one.
                before.map_or(Ok(()), |before| self.tcp.unbind(before))?;
                AgreementSession(session)
            }
        };
        let time = Duration::from_secs(u64::from(hold_s)).min(HOLD_MAX);
        self.tcp.bind(address, &places, time)?;
        Ok(Some(session))
    }

    /// Records that a negotiation has ended, or could not begin.
    pub fn ended(
        &mut self,
        peer: &str,
        session: Option<AgreementSession>,
        state: NegotiationState,
    ) -> Result<(), Error> {
        let session = session.map(|it| it.0);
        let bound = self.agreements.ended(peer, session, state, clock::monotonic_ns());
        Ok(bound.map_or(Ok(()), |address| self.tcp.unbind(address))?)
    }

    /// Reports whether an agreement with the peer is in force.
    pub fn is_agreed(&self, peer: &str) -> bool {
        self.agreements.is_agreed(peer)
    }

    /// Returns the result of [`PeerAgreements::has_called`](crate::agreements::PeerAgreements::has_called) for this
    /// runtime's agreements.
    pub fn has_called(&self, peer: &str, epoch: u64) -> bool {
        self.agreements.has_called(peer, epoch)
    }

    /// Ends all agreements, after keys or addresses of the settings have changed.
    pub fn release_all(&mut self) -> Result<(), Error> {
        let bound = self.agreements.end_all(clock::monotonic_ns());
        bound.into_iter().try_for_each(|address| self.tcp.unbind(address))?;
        Ok(())
    }

    /// Counts a refused TLS connection of another host: its key is not in the settings, or it did not complete the
    /// handshake.
    pub fn count_stranger(&mut self) {
        self.agreements.count_stranger();
    }

    /// Records which kinds of packets (graft TCP option, UDP, IP protocol 253) pass the path to a peer, according to
    /// probes and connections.
    pub fn note_path(&mut self, peer: &str, verdict: &PathVerdict) {
        self.agreements.note(peer, verdict, clock::monotonic_ns());
    }

    /// Returns a graft that the settings want to fetch, that is missing here, and that this peer offers.
    pub fn wanted_from(&self, theirs: &Statement) -> Option<settings::GraftFetch> {
        let fetch = &self.agreement()?.fetch;
        let given = |identity: ObjectIdentity| {
            theirs.functions.iter().any(|it| it.given && it.identity == Hash(identity.bytes()))
        };
        fetch.iter().find(|it| self.pool.find(&it.graft).is_err() && given(it.identity)).cloned()
    }

    /// Returns the manifest and the object of a graft for a peer, if the settings allow that.
    pub fn give(&self, identity: Hash) -> Option<(String, Vec<u8>)> {
        self.agreement().filter(|agreement| agreement.give)?;
        // Only grafts from files can be sent, because compiled-in grafts have no manifest file. The graft is found by
        // its hash, since the peer may use another name for it.
        let files = self.pool.iter().filter_map(|graft| match &graft.source {
            PoolSource::File(path) => Some((graft, path)),
            PoolSource::Shipped => None,
        });
        let mut fitting = files.filter(|(graft, _)| graft.identity.bytes() == identity.0);
        let (graft, path) = fitting.next()?;
        Some((fs::read_to_string(path).ok()?, graft.image.clone()))
    }

    /// Stores a graft that a peer has sent, if it is the requested one and is signed by a trusted key.
    pub fn keep(&self, wanted: &settings::GraftFetch, manifest: &str, image: &[u8]) -> Result<(), Error> {
        let refused = |message: String| Error::Graft { name: wanted.graft.clone(), message };
        // The hash of the received object file is computed here, so a wrong statement of the peer has no effect.
        if ObjectIdentity::from_image(image) != wanted.identity {
            return Err(refused(format!(
                "a peer sent the graft {}, which was not requested",
                ObjectIdentity::from_image(image)
            )));
        }
        let parsed = GraftManifest::parse(manifest).map_err(refused)?;
        if self.settings.trusted_keys.is_empty() || parsed.name != wanted.graft {
            return Err(refused(format!("a peer sent the graft {}, which was not requested", parsed.name)));
        }
        parsed.check_signature(manifest, &self.settings.trusted_keys).map_err(refused)?;
        parsed.check_identity(wanted.identity).map_err(refused)?;
        let Some(directory) = self.agreement().and_then(|it| it.fetch_to.clone()) else {
            return Err(refused("[agreement] has no fetch-to".to_owned()));
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

/// Returns the random number that this process has chosen at its start. A new number tells peers that the daemon has
/// restarted.
fn epoch() -> u64 {
    static EPOCH: OnceLock<u64> = OnceLock::new();
    *EPOCH.get_or_init(|| {
        let mut bytes = [0; 8];
        let made = ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes);
        // If the kernel provides no random numbers, TLS fails anyway, so the time of day suffices as a random number.
        if made.is_ok() { u64::from_ne_bytes(bytes) } else { clock::unix_ns().unsigned_abs() }
    })
}

fn host() -> &'static HostOffer {
    static HOST: OnceLock<HostOffer> = OnceLock::new();
    HOST.get_or_init(|| {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total_kib = memory.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let total_kib = total_kib.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        HostOffer {
            program: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: release.trim().chars().take(60).collect(),
            abi: kernel::ABI,
            cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
            memory_mib: total_kib.unwrap_or_default() / 1024,
        }
    })
}

fn connection_report(connection: &kernel::TcpConnection) -> Option<ConnectionReport> {
    let outcome = match connection.outcome {
        TcpOutcome::Agreed => Told::Agreed,
        TcpOutcome::Absent | TcpOutcome::Stripped | TcpOutcome::Unconfirmed => Told::Silent,
        TcpOutcome::Resent => Told::Resent,
        TcpOutcome::Refused => Told::Refused,
        TcpOutcome::Malformed => Told::Malformed,
        TcpOutcome::OneSided
        | TcpOutcome::NoRoom
        | TcpOutcome::Withheld
        | TcpOutcome::Unbound
        | TcpOutcome::NoMemory => Told::NotAsked,
        // The outcomes `Cookies` to `Untold` are not reported to the peer. They describe single packets or events after
        // the TCP handshake, and not the result of the handshake.
        TcpOutcome::Cookies
        | TcpOutcome::Answered
        | TcpOutcome::NoCongestion
        | TcpOutcome::NotSet
        | TcpOutcome::EventLost => {
            return None;
        }
    };
    Some(ConnectionReport {
        sequence: connection.first,
        side: match connection.side {
            kernel::RuleSide::Client => OfferSide::Client,
            kernel::RuleSide::Server => OfferSide::Server,
        },
        port: connection.port,
        outcome,
        spoke: connection.spoke,
        own: u32::from_be_bytes(connection.own),
        heard: u32::from_be_bytes(connection.heard),
    })
}
