//! Runs the relay's packet gate: an XDP program that drops packets before they reach the relay's ports.
//!
//! The gate is on by default, so it must not drop packets of real clients. It refuses only packets that no QUIC client
//! ever sends. That needs no state of connections, which could be wrong, and no view of outgoing packets.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Weak,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::JoinHandle,
};

use millrace_base::networks::{NetworkFull, NetworkPlaces};
use millrace_gate::{
    Gate, Policy, Rule, Scope, XdpMode,
    rules::{self, RulePlace},
    status as gate_status,
    status::Status,
};
use millrace_gate_daemon::watch::{self as gate_watch, GateWatch};
use millrace_relay::{Admission, Permit, TooManySessions};
use millrace_transport::interfaces;
use parking_lot::Mutex;
use tracing::{info, warn};

use super::{
    config::{Config, GateChoice},
    status,
};

const SCOPE: &str = "relay";
/// Number of ticks, each of [`gate_watch::TICK`], between two checks of the interfaces' addresses.
const LOOK: u32 = 2;

/// The reason why the relay's ports cannot be guarded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no interface is named, and only loopback has a listen address")]
    NoInterface,
    #[error("cannot list the network interfaces and their addresses: {0}")]
    Interfaces(#[source] io::Error),
    #[error("cannot start the thread that follows interface addresses: {0}")]
    Thread(#[source] io::Error),
    #[error(transparent)]
    Gate(#[from] millrace_gate::Error),
    #[error("the gate needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON: {0}")]
    Denied(millrace_gate::Error),
}

/// The gate (XDP packet filter) that guards the relay's ports, if it runs, and the number of sessions of each client.
pub struct RelayGuard {
    this: Weak<Self>,
    /// Listen addresses with the ports that the kernel chose.
    listen: Vec<SocketAddr>,
    /// State of the packet gate. This lock is held while programs are attached, which takes seconds with some network
    /// cards, so code that accepts sessions must lock only `counts`. `state` is locked before `counts`.
    state: Mutex<GuardState>,
    counts: Mutex<SessionCounts>,
}

#[derive(Default)]
struct GuardState {
    gate: Option<RunningGuard>,
    /// The reasons why there is no packet gate, or why some interfaces are not guarded.
    why_not: Vec<String>,
    /// Settings of the packet gate if it is attached to all interfaces on which packets arrive. `None` if the settings
    /// name the interfaces.
    followed: Option<Followed>,
}

struct Followed {
    config: Config,
    /// Interfaces on which packets arrive, as of the last check.
    names: Vec<String>,
}

/// The thread that attaches a [`RelayGuard`] to the interfaces on which packets arrive, as addresses come and go, and
/// logs the packet gate's events. Dropping this value ends the thread.
pub struct InterfaceFollower {
    /// The channel to the thread. Dropping it ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct RunningGuard {
    gate: Gate,
    watch: GateWatch,
}

/// The number of open sessions of each client.
struct SessionCounts {
    taken: NetworkPlaces,
    /// The relay's own scope of the packet gate: the rules and counters for the relay's ports. The gate counts each
    /// client's sessions there, too. `None` without a gate.
    scope: Option<Scope>,
}

impl Default for SessionCounts {
    fn default() -> Self {
        Self { taken: NetworkPlaces::new(usize::MAX, usize::MAX), scope: None }
    }
}

/// A session that counts against its client's limit. Dropping it subtracts the session.
struct CountedSession {
    guard: Weak<RelayGuard>,
    client: IpAddr,
}

impl RelayGuard {
    /// Starts the packet gate that the settings choose. `listen` has the listen addresses with their real ports.
    ///
    /// # Errors
    /// Fails if the settings require a gate that cannot be loaded or attached.
    pub fn start(config: &Config, listen: Vec<SocketAddr>) -> Result<Arc<Self>, Error> {
        let guard = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            listen,
            state: Mutex::default(),
            counts: Mutex::default(),
        });
        guard.change(config)?;
        Ok(guard)
    }

    /// Applies new settings of the packet gate.
    ///
    /// # Errors
    /// Fails if the settings require a gate that cannot run. The gate is then unchanged.
    pub fn change(&self, config: &Config) -> Result<(), Error> {
        let mut state = self.state.lock();
        if config.gate == GateChoice::Off {
            *state = GuardState { why_not: vec!["as configured".to_owned()], ..GuardState::default() };
            return self.settle(&mut state, config);
        }
        let names = match config.interfaces.as_slice() {
            [] => {
                interfaces::list_interfaces(&self.listen).map_err(|errno| Error::Interfaces(errno.into()))?
            }
            named => named.to_vec(),
        };
        state.guard(config, &self.listen, &names, config.gate != GateChoice::Auto)?;
        state.followed = config.interfaces.is_empty().then(|| Followed { config: config.clone(), names });
        self.settle(&mut state, config)
    }

    /// Attaches the packet gate to interfaces that have begun to receive the relay's packets since the last check, and
    /// detaches it from interfaces that no longer receive them. Works in the calling thread's network namespace, which
    /// must be that of [`start`](Self::start).
    fn look(&self) {
        let mut state = self.state.lock();
        let Some(Followed { config, names }) = state.followed.take() else { return };
        let now = match interfaces::list_interfaces(&self.listen) {
            Ok(now) => now,
            Err(error) => {
                warn!(%error, "cannot list the network interfaces and their addresses: the gate keeps guarding the same interfaces");
                names.clone()
            }
        };
        if now != names {
            info!(
                interfaces = now.join(", "),
                "packets arrive on other interfaces now: the gate follows them"
            );
            // An interface that cannot be guarded does not stop a running relay, so this passes `false` for `must`.
            let done = state.guard(&config, &self.listen, &now, false);
            if let Err(error) = done.and_then(|()| self.settle(&mut state, &config)) {
                warn!(%error, "the gate cannot guard the interfaces that packets arrive on now");
            }
        }
        state.followed = Some(Followed { config, names: now });
    }

    /// Completes a change of the packet gate: gives it the session counts and the session limit, reads its new events,
    /// and logs on which interfaces it runs.
    fn settle(&self, state: &mut GuardState, config: &Config) -> Result<(), Error> {
        let scope = state.gate.as_ref().map(|running| running.gate.scope(SCOPE)).transpose()?;
        // The lock of the counts is held for this call only, so sessions can begin while BPF programs are attached.
        self.counts.lock().tell(scope, config.gate_sessions);
        if let Some(running) = &mut state.gate {
            running.watch.tick(&running.gate);
        }
        if config.gate != GateChoice::Off {
            state.why_not.iter().for_each(|reason| info!(reason, "the relay runs without the gate"));
        }
        Ok(())
    }

    /// Logs the new events of the packet gate, such as floods.
    fn tick(&self) {
        if let Some(running) = &mut self.state.lock().gate {
            running.watch.tick(&running.gate);
        }
    }

    pub fn describe(&self) -> status::GateStatusReport {
        let state = self.state.lock();
        // An error is ignored: it only leaves the gate's counters out of the status.
        let said = state.gate.as_ref().and_then(|running| gate_status::read_status(&running.gate).ok());
        let Status { interfaces, scopes, events, tables, .. } = said.unwrap_or_default();
        let attached = interfaces.iter().filter(|it| it.attached);
        let attached: Vec<_> = attached.map(|it| format!("{} by XDP, {}", it.name, it.mode)).collect();
        let trouble =
            interfaces.iter().filter_map(|it| Some(format!("{}: {}", it.name, it.trouble.as_ref()?)));
        let why_not: Vec<_> = state.why_not.iter().cloned().chain(trouble).collect();
        let reason = match (attached.is_empty(), why_not.is_empty()) {
            (true, _) => why_not.join("; "),
            (false, true) => format!("attached to {}", attached.join(", ")),
            (false, false) => format!("attached to {}; {}", attached.join(", "), why_not.join("; ")),
        };
        let of_relay = scopes.iter().filter(|scope| scope.name == SCOPE).flat_map(|scope| &scope.rules);
        let refused = of_relay.filter(|rule| rule.packets > 0).map(|it| (it.rule.clone(), it.packets));
        status::GateStatusReport {
            on: !attached.is_empty(),
            reason,
            refused: refused.collect(),
            interfaces,
            scopes,
            events,
            tables,
        }
    }
}

impl Admission for RelayGuard {
    fn may_connect(&self, client: IpAddr) -> Result<(), TooManySessions> {
        self.counts.lock().taken.full(client).map_or(Ok(()), |full| Err(crowded(full)))
    }

    fn admit(&self, client: IpAddr) -> Result<Permit, TooManySessions> {
        self.counts.lock().take(client).map_err(crowded)?;
        Ok(Box::new(CountedSession { guard: Weak::clone(&self.this), client }))
    }
}

fn crowded(full: NetworkFull) -> TooManySessions {
    match full {
        NetworkFull::Wider(_) => TooManySessions::Network,
        NetworkFull::Client(_) | NetworkFull::All => TooManySessions::Client,
    }
}

impl SessionCounts {
    fn take(&mut self, address: IpAddr) -> Result<(), NetworkFull> {
        // The relay's own count decides, so the limit holds even if the gate's count in the kernel is wrong.
        self.taken.enter(address)?;
        if let Some(scope) = &self.scope {
            warn_on_error(scope.inc(address));
        }
        Ok(())
    }

    fn leave(&mut self, address: IpAddr) {
        self.taken.leave(address);
        if let Some(scope) = &self.scope {
            warn_on_error(scope.dec(address));
        }
    }

    /// Sets the session limit of a client, and the scope of the packet gate (its counters for the relay's ports) in
    /// which sessions are counted. A new gate gets the session counts of all clients.
    fn tell(&mut self, scope: Option<Scope>, limit: Option<u32>) {
        self.taken.set_of_client(limit.map_or(usize::MAX, |limit| limit as usize));
        // Sessions that began without a gate are added to a new one, since each of them is subtracted when it ends.
        if let (None, Some(scope)) = (&self.scope, &scope) {
            for (client, count) in self.taken.clients() {
                (0..count).for_each(|_| warn_on_error(scope.inc(client)));
            }
        }
        self.scope = scope;
    }
}

impl InterfaceFollower {
    /// Starts the thread, in the calling thread's network namespace.
    ///
    /// # Errors
    /// Fails if no thread can be started.
    pub fn start(guard: &Arc<RelayGuard>) -> Result<Self, Error> {
        let guard = Arc::clone(guard);
        let (stop, stopped) = channel::<()>();
        let follow = move || {
            let mut ticks = 0u32;
            while stopped.recv_timeout(gate_watch::TICK) == Err(RecvTimeoutError::Timeout) {
                ticks = ticks.wrapping_add(1);
                if ticks.is_multiple_of(LOOK) {
                    guard.look();
                }
                guard.tick();
            }
        };
        let thread = std::thread::Builder::new().name("gate follower".to_owned()).spawn(follow);
        Ok(Self { stop: Some(stop), thread: Some(thread.map_err(Error::Thread)?) })
    }
}

impl Drop for InterfaceFollower {
    fn drop(&mut self) {
        // The channel is closed before the join, because the thread ends only when it finds the channel closed.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl GuardState {
    /// Runs the packet gate on the interfaces in `names` and no others. If it cannot run on one of them, this fails if
    /// `must` is set. Otherwise the relay runs without a gate there, and [`why_not`](Self::why_not) has the reason.
    fn guard(
        &mut self,
        config: &Config,
        listen: &[SocketAddr],
        names: &[String],
        must: bool,
    ) -> Result<(), Error> {
        let failed = match self.try_guard(config, listen, names, must) {
            Ok(failed) => failed,
            Err(error) if must => return Err(error),
            Err(error) => {
                self.gate = None;
                vec![error]
            }
        };
        let choice = if config.gate == GateChoice::Auto { "auto: " } else { "" };
        self.why_not = failed.iter().map(|error| format!("{choice}{error}")).collect();
        Ok(())
    }

    /// Attaches the packet gate to the interfaces in `names`. Returns the errors of those that cannot be guarded.
    fn try_guard(
        &mut self,
        config: &Config,
        listen: &[SocketAddr],
        names: &[String],
        must: bool,
    ) -> Result<Vec<Error>, Error> {
        // A gate that runs already is kept without interfaces, so that its counters remain when an interface returns.
        if names.is_empty() && (must || self.gate.is_none()) {
            return Err(Error::NoInterface);
        }
        let policy = policy(config, listen);
        let Some(running) = &self.gate else {
            let gate = Gate::new(&policy).map_err(denied)?;
            let failed = attach(&gate, names, config.gate, must)?;
            self.gate = Some(RunningGuard { gate, watch: GateWatch::default() });
            return Ok(failed);
        };
        // The packet gate is attached to new interfaces before it is detached from old ones, so the ports stay guarded
        // during the change.
        let mut failed = attach(&running.gate, names, config.gate, must)?;
        running.gate.set_policy(&policy)?;
        let before = running.gate.interfaces().into_iter().map(|interface| interface.name);
        before.filter(|name| !names.contains(name)).for_each(|name| running.gate.detach_from(&name));
        if names.is_empty() {
            failed.push(Error::NoInterface);
        }
        Ok(failed)
    }
}

/// Attaches the packet gate to those of the interfaces that do not have it yet. Returns the errors of interfaces to
/// which it cannot be attached. Fails if `must` is set and an interface has an error, or if every interface has.
fn attach(gate: &Gate, names: &[String], choice: GateChoice, must: bool) -> Result<Vec<Error>, Error> {
    let before: Vec<_> = gate.interfaces().into_iter().map(|interface| interface.name).collect();
    let new: Vec<_> = names.iter().filter(|name| !before.contains(name)).collect();
    let mode = if choice == GateChoice::Generic { XdpMode::Auto } else { XdpMode::Native };
    let mut failed = Vec::new();
    for name in &new {
        match gate.attach(name, mode) {
            Ok(_) => {}
            Err(error) if must => {
                // Undo the attachments of this call, so that a failure changes nothing.
                new.iter().for_each(|name| gate.detach_from(name));
                return Err(error.into());
            }
            Err(error) => failed.push(Error::Gate(error)),
        }
    }
    if !names.is_empty() && failed.len() == names.len() {
        return Err(failed.remove(0));
    }
    Ok(failed)
}

fn denied(error: millrace_gate::Error) -> Error {
    match error {
        millrace_gate::Error::Kernel(ref inner) if inner.is_denied() => Error::Denied(error),
        error => Error::Gate(error),
    }
}

/// Logs an error of the packet gate's count of sessions. The limit still holds, since the relay counts sessions itself.
fn warn_on_error(result: Result<u32, millrace_gate::Error>) {
    if let Err(error) = result {
        warn!(%error, "cannot tell the gate that a client's session began or ended: the gate's count of sessions is wrong");
    }
}

fn policy(config: &Config, listen: &[SocketAddr]) -> Policy {
    let place = |addr: &SocketAddr| RulePlace {
        address: Some(addr.ip()).filter(|ip| !ip.is_unspecified()),
        port: Some(addr.port()),
    };
    let mut places: Vec<_> = listen.iter().map(place).collect();
    // The packet gate has one rule for all addresses of a port, so of the listen addresses 0.0.0.0 and [::] only one is
    // kept.
    places.sort_unstable();
    places.dedup();
    let mut modes = rules::Modes::default();
    // QUIC's first packets have at least 1200 bytes (RFC 9000, section 14.1). Tunnels with a small MTU fragment them,
    // and the stack reassembles them, so fragments must pass.
    modes.set(Rule::Fragment, rules::RuleMode::Off);
    modes.set(
        Rule::Quota,
        if config.gate_sessions.is_some() { rules::RuleMode::Enforce } else { rules::RuleMode::Off },
    );
    let policy = rules::PolicyRules {
        modes,
        live: rules::LiveRule::Unknown,
        counting: rules::Counting::Application,
        // A NAT may give a client any source port, so well-known ports of reflectors are not refused.
        reflectors: Vec::new(),
        quota: config.gate_sessions,
        ..rules::PolicyRules::default()
    };
    let scope = rules::ScopeRules { name: SCOPE.to_owned(), places, policy, prefixes: Vec::new() };
    // The packet gate ignores packets to ports other than the relay's.
    let rules = rules::GateRules { scopes: vec![scope], interface: rules::Modes::OFF, prefixes: Vec::new() };
    Policy { rules, load: room(config), token_keys: None }
}

/// Returns the sizes of the packet gate's tables. They are fixed at the start and do not depend on `gate-sessions`,
/// which may change.
fn room(config: &Config) -> millrace_gate::Config {
    const HANDSHAKES: u32 = 1 << 14;
    // Tables that the relay's policy does not use get this small size.
    const NONE: u32 = 64;
    let sessions = u32::try_from(config.max_sessions).unwrap_or(u32::MAX);
    millrace_gate::Config {
        max_ids: NONE,
        max_clients: sessions.clamp(NONE, 1 << 20),
        max_handshakes: HANDSHAKES,
        max_rates: NONE,
        max_prefixes: NONE,
        ..millrace_gate::Config::default()
    }
}

impl Drop for CountedSession {
    fn drop(&mut self) {
        // The guard may be dropped before the last session, and its counts are dropped with it.
        if let Some(guard) = self.guard.upgrade() {
            guard.counts.lock().leave(self.client);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_beyond_the_limit_per_address_or_network_are_refused() {
        let mut counts = SessionCounts::default();
        counts.tell(None, Some(2));
        let address = |n: u32| IpAddr::from([192, 0, 2, n as u8]);
        let taken = (0..300).filter(|n| counts.take(address(n / 2)).is_ok()).count();
        assert_eq!(taken, 16);
        assert_eq!(crowded(counts.take(address(0)).unwrap_err()), TooManySessions::Client);
        assert_eq!(crowded(counts.take(address(200)).unwrap_err()), TooManySessions::Network);
        assert!(counts.take([198, 51, 100, 1].into()).is_ok());
        // More sessions of a client are accepted after the limit was raised, and any number after it was removed.
        counts.tell(None, Some(3));
        assert!(counts.take(address(200)).is_ok());
        counts.tell(None, None);
        assert!((0..1000).all(|_| counts.take(address(1)).is_ok()));
    }
}
