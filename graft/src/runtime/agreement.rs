//! Statements that this host sends to its peers to negotiate agreements, and the effects of agreements on the rules in
//! the kernel.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    sync::OnceLock,
    time::Duration,
};

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
use serde::{Deserialize, Serialize};

use super::GraftRuntime;
use crate::{
    Agree, Error, PoolGraft, PoolSource,
    agreements::{AgreedPeer, NegotiationState},
    settings::{self, AgreementSettings},
    status,
};

/// Number of renewal intervals without a message from the peer after which an agreement ends.
const HOLD_INTERVALS: u64 = 3;
/// Longest time for which an agreement holds without renewal, even if the peer's statement has a longer time.
const HOLD_MAX: Duration = Duration::from_secs(3 * 3600);

/// The connection over which two daemons negotiate an agreement.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NegotiationEnds {
    /// The peer's name in the settings.
    pub peer: String,
    /// This host's address and port.
    pub local: SocketAddr,
    /// The peer's address and port.
    pub remote: SocketAddr,
    /// True if this host opened the connection.
    pub calls: bool,
}

/// The result of comparing the statements of both hosts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ComparedStatements {
    /// The terms of an agreement, or the reason why there can be none.
    pub terms: Result<JudgeTerms, AgreementRefusal>,
    /// Newly detected changes that middleboxes made to the TCP options of connections, with the servers' ports.
    pub downgrades: Vec<(Downgrade, u16)>,
}

/// This host's statement, with the rules that it contains.
struct OwnStatement {
    statement: Statement,
    /// Index of each rule of the statement in the kernel's list of rules.
    places: Vec<usize>,
    names: Vec<String>,
}

/// The ID of an agreement in force. It is needed to renew the agreement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

    /// Returns this host's statement to the peer, for a connection over which the daemons negotiate an agreement.
    pub fn statement(&mut self, ends: &NegotiationEnds) -> Result<Statement, Error> {
        Ok(self.own_statement(ends)?.statement)
    }

    fn own_statement(&mut self, ends: &NegotiationEnds) -> Result<OwnStatement, Error> {
        let address = ends.remote.ip().to_canonical();
        let mut own = OwnStatement {
            statement: Statement {
                versions: VERSIONS.to_vec(),
                epoch: epoch(),
                hold_s: self.hold_s(),
                host: host().clone(),
                local: ends.local,
                remote: ends.remote,
                functions: self.functions(),
                rules: Vec::new(),
                connections: self.connections(address)?,
                path: self.agreements.verdict(&ends.peer),
            },
            places: Vec::new(),
            names: Vec::new(),
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

    /// Compares the peer's statement with this host's.
    pub fn consider(
        &mut self,
        ends: &NegotiationEnds,
        theirs: &Statement,
    ) -> Result<ComparedStatements, Error> {
        let own = self.own_statement(ends)?.statement;
        Ok(self.compare(&ends.peer, &own, theirs))
    }

    fn compare(&mut self, peer: &str, own: &Statement, theirs: &Statement) -> ComparedStatements {
        let wants = self.agreement().and_then(|it| it.peer(peer)).map(|it| it.wants.clone());
        let terms = judge(own, &wants.unwrap_or_default(), theirs);
        let now_ns = clock::monotonic_ns();
        let found = self.agreements.compare(peer, &own.connections, &theirs.connections, now_ns);
        if let Ok(JudgeTerms { nat, .. }) = &terms {
            self.agreements.note(peer, &PathVerdict { nat: Some(*nat), ..PathVerdict::default() }, now_ns);
        }
        // Only the connecting end sends probes. The other end learns the results from the connecting end's statement.
        let learned = PathVerdict { options: None, nat: None, ..theirs.path.clone() };
        if learned != PathVerdict::default() {
            self.agreements.note(peer, &learned, now_ns);
        }
        ComparedStatements { terms, downgrades: found }
    }

    /// Puts the agreement in force at this end, for as long as the connecting end's statement says. `revision` is that
    /// of this host's statement to which the peer has agreed. Returns `None` if this statement is obsolete, since the
    /// settings have changed.
    ///
    /// # Errors
    /// The hosts do not agree, or another negotiation with the peer has replaced the one with this `session`, or takes
    /// precedence over this one.
    pub fn bind(
        &mut self,
        ends: &NegotiationEnds,
        session: Option<AgreementSession>,
        revision: u64,
        theirs: &Statement,
        timing: status::Negotiated,
    ) -> Result<Option<AgreementSession>, Error> {
        // A statement that was made from earlier settings must not be used.
        if revision != self.revision {
            return Ok(None);
        }
        let failed = |why: String| Error::Settings(format!("no agreement with {}: {why}", ends.peer));
        let own = self.own_statement(ends)?;
        let compared = self.compare(&ends.peer, &own.statement, theirs);
        let terms = compared.terms.map_err(|refusal| failed(refusal.detail))?;
        let hold_s = if ends.calls { own.statement.hold_s } else { theirs.hold_s };
        let address = ends.remote.ip().to_canonical();
        let of = |list: &[usize]| terms.rules.iter().filter_map(|(at, _)| list.get(*at).copied()).collect();
        let places: Vec<usize> = of(&own.places);
        let mut names: Vec<String> =
            terms.rules.iter().filter_map(|(at, _)| own.names.get(*at).cloned()).collect();
        names.dedup();
        let session = match session {
            Some(session) if self.agreements.renewed(&ends.peer, session.0, theirs, names.clone()) => session,
            Some(_) => return Err(failed("another negotiation has replaced this one".to_owned())),
            None => {
                let own_epoch = own.statement.epoch;
                if self.agreements.is_superfluous(&ends.peer, ends.calls, theirs.epoch, own_epoch) {
                    return Err(failed("another connection already maintains it".to_owned()));
                }
                let now_ns = clock::monotonic_ns();
                let peer = AgreedPeer { name: &ends.peer, calls: ends.calls, address };
                let made = self.agreements.agreed(peer, theirs, names, timing, now_ns);
                let (session, before) =
                    made.ok_or_else(|| failed("the settings have no such peer".to_owned()))?;
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

    /// Counts refused TLS connections of other hosts, whose keys are not in the settings, or which did not complete the
    /// handshake.
    pub fn count_strangers(&mut self, count: u64) {
        self.agreements.count("stranger", count);
    }

    /// Records which kinds of packets (graft TCP option, UDP) pass the path to a peer, according to
    /// probes and connections.
    pub fn note_path(&mut self, peer: &str, verdict: &PathVerdict) {
        self.agreements.note(peer, verdict, clock::monotonic_ns());
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
