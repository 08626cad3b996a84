//! The relay's own gate. It drops packets at XDP, before they come to the relay's ports.
//!
//! By default it guards wherever it can, so it must not hurt anybody. It refuses only packets that no QUIC client
//! sends, whatever happened before. This needs no knowledge of connections, so none can be wrong, and packets on the
//! way out are not watched.

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
/// How often addresses are looked at: every so many ticks, each of [`gate_watch::TICK`].
const LOOK: u32 = 2;

/// Why the relay's ports cannot be guarded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no interface is named, and none has an address that is listened on but loopback")]
    NoInterface,
    #[error("interfaces and their addresses cannot be listed: {0}")]
    Interfaces(#[source] io::Error),
    #[error("cannot start the thread that follows interface addresses: {0}")]
    Thread(#[source] io::Error),
    #[error(transparent)]
    Gate(#[from] millrace_gate::Error),
    #[error("the gate needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON: {0}")]
    Denied(millrace_gate::Error),
}

/// The gate, if there is one, and the sessions that count for clients.
pub struct RelayGuard {
    this: Weak<Self>,
    /// Addresses that are served, ports filled in.
    listen: Vec<SocketAddr>,
    /// Held while it is attached, which takes some network cards seconds: no session waits for it.
    state: Mutex<GuardState>,
    seats: Mutex<Seats>,
}

#[derive(Default)]
struct GuardState {
    gate: Option<RunningGuard>,
    /// Why there is none, or not everywhere.
    why_not: Vec<String>,
    /// Settings of a gate that follows the interfaces where packets arrive. `None` if an operator has named the
    /// interfaces.
    followed: Option<Followed>,
}

struct Followed {
    config: Config,
    /// Interfaces that packets arrived on when last looked.
    names: Vec<String>,
}

/// Keeps a [`RelayGuard`] where packets arrive, as addresses come and go, and logs what it does, until it is dropped.
pub struct InterfaceFollower {
    /// Dropping it ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct RunningGuard {
    gate: Gate,
    watch: GateWatch,
}

/// Sessions of clients.
struct Seats {
    taken: NetworkPlaces,
    /// Scope of the gate that sessions are counted in.
    scope: Option<Scope>,
}

impl Default for Seats {
    fn default() -> Self {
        Self { taken: NetworkPlaces::new(usize::MAX, usize::MAX), scope: None }
    }
}

/// A session's place among those of its client, until it is dropped.
struct CountedSession {
    guard: Weak<RelayGuard>,
    client: IpAddr,
}

impl RelayGuard {
    /// `listen`: what is served, ports filled in.
    ///
    /// # Errors
    /// The gate that was asked for cannot be loaded or attached.
    pub fn start(config: &Config, listen: Vec<SocketAddr>) -> Result<Arc<Self>, Error> {
        let guard = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            listen,
            state: Mutex::default(),
            seats: Mutex::default(),
        });
        guard.change(config)?;
        Ok(guard)
    }

    /// Guards as `config` says now.
    ///
    /// # Errors
    /// The gate that is asked for cannot be; then nothing has changed.
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

    /// Guards interfaces that packets arrive on since the last look, and leaves those that they do not any more. In the
    /// calling thread's network namespace, which has to be that of [`start`](Self::start).
    fn look(&self) {
        let mut state = self.state.lock();
        let Some(Followed { config, names }) = state.followed.take() else { return };
        let now = match interfaces::list_interfaces(&self.listen) {
            Ok(now) => now,
            Err(error) => {
                warn!(%error, "cannot list the interfaces and their addresses: the gate stays on those of before");
                names.clone()
            }
        };
        if now != names {
            info!(
                interfaces = now.join(", "),
                "packets arrive on other interfaces now: the gate follows them"
            );
            let done = state.guard(&config, &self.listen, &now, false);
            if let Err(error) = done.and_then(|()| self.settle(&mut state, &config)) {
                warn!(%error, "the gate cannot guard the interfaces that packets arrive on now");
            }
        }
        state.followed = Some(Followed { config, names: now });
    }

    /// Tells those who have to know how it is guarded now.
    fn settle(&self, state: &mut GuardState, config: &Config) -> Result<(), Error> {
        let scope = state.gate.as_ref().map(|running| running.gate.scope(SCOPE)).transpose()?;
        self.seats.lock().tell(scope, config.gate_sessions);
        if let Some(running) = &mut state.gate {
            running.watch.tick(&running.gate);
        }
        if config.gate != GateChoice::Off {
            state.why_not.iter().for_each(|reason| info!(reason, "the relay runs without the gate"));
        }
        Ok(())
    }

    /// Logs what is new.
    fn tick(&self) {
        if let Some(running) = &mut self.state.lock().gate {
            running.watch.tick(&running.gate);
        }
    }

    pub fn describe(&self) -> status::GateStatusReport {
        let state = self.state.lock();
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
        self.seats.lock().taken.full(client).map_or(Ok(()), |full| Err(crowded(full)))
    }

    fn admit(&self, client: IpAddr) -> Result<Permit, TooManySessions> {
        self.seats.lock().take(client).map_err(crowded)?;
        Ok(Box::new(CountedSession { guard: Weak::clone(&self.this), client }))
    }
}

fn crowded(full: NetworkFull) -> TooManySessions {
    match full {
        NetworkFull::Wider(_) => TooManySessions::Network,
        NetworkFull::Client(_) | NetworkFull::All => TooManySessions::Client,
    }
}

impl Seats {
    fn take(&mut self, address: IpAddr) -> Result<(), NetworkFull> {
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

    /// Sets the scope and the limit. A new gate gets the counts of all clients.
    fn tell(&mut self, scope: Option<Scope>, limit: Option<u32>) {
        self.taken.set_of_client(limit.map_or(usize::MAX, |limit| limit as usize));
        if let (None, Some(scope)) = (&self.scope, &scope) {
            for (client, count) in self.taken.clients() {
                (0..count).for_each(|_| warn_on_error(scope.inc(client)));
            }
        }
        self.scope = scope;
    }
}

impl InterfaceFollower {
    /// Starts to follow, in the calling thread's network namespace.
    ///
    /// # Errors
    /// No thread can be started.
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
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl GuardState {
    /// Guards there and nowhere else. Where it cannot is an error if it `must`; else it goes without, and
    /// [`why_not`](Self::why_not) says so.
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

    /// Returns where it cannot be, and why.
    fn try_guard(
        &mut self,
        config: &Config,
        listen: &[SocketAddr],
        names: &[String],
        must: bool,
    ) -> Result<Vec<Error>, Error> {
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

/// Attaches where it is not yet; returns where it cannot be. That is an error if it `must` be everywhere, or if it is
/// nowhere.
fn attach(gate: &Gate, names: &[String], choice: GateChoice, must: bool) -> Result<Vec<Error>, Error> {
    let before: Vec<_> = gate.interfaces().into_iter().map(|interface| interface.name).collect();
    let new: Vec<_> = names.iter().filter(|name| !before.contains(name)).collect();
    let mode = if choice == GateChoice::Generic { XdpMode::Auto } else { XdpMode::Native };
    let mut failed = Vec::new();
    for name in &new {
        match gate.attach(name, mode) {
            Ok(_) => {}
            Err(error) if must => {
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

/// The relay itself keeps to the limit; what the gate does not know, it does not refuse.
fn warn_on_error(result: Result<u32, millrace_gate::Error>) {
    if let Err(error) = result {
        warn!(%error, "cannot tell the gate that a client's session began or ended: its count of sessions is wrong");
    }
}

fn policy(config: &Config, listen: &[SocketAddr]) -> Policy {
    let place = |addr: &SocketAddr| RulePlace {
        address: Some(addr.ip()).filter(|ip| !ip.is_unspecified()),
        port: Some(addr.port()),
    };
    let mut places: Vec<_> = listen.iter().map(place).collect();
    // The wildcards of both address families are one.
    places.sort_unstable();
    places.dedup();
    let mut modes = rules::Modes::default();
    // Tunnels with a small MTU fragment what QUIC must not send smaller, and the stack puts it together again.
    modes.set(Rule::Fragment, rules::RuleMode::Off);
    modes.set(
        Rule::Quota,
        if config.gate_sessions.is_some() { rules::RuleMode::Enforce } else { rules::RuleMode::Off },
    );
    let policy = rules::PolicyRules {
        modes,
        live: rules::LiveRule::Unknown,
        counting: rules::Counting::Application,
        // A NAT may give a client any port but 0.
        reflectors: Vec::new(),
        quota: config.gate_sessions,
        ..rules::PolicyRules::default()
    };
    let scope = rules::ScopeRules { name: SCOPE.to_owned(), places, policy, prefixes: Vec::new() };
    // Packets to other ports than the relay's are left alone.
    let rules = rules::GateRules { scopes: vec![scope], interface: rules::Modes::OFF, prefixes: Vec::new() };
    Policy { rules, load: room(config), token_keys: None }
}

/// Returns the sizes that the policy needs. They are fixed at the start, since `gate-sessions` may change.
fn room(config: &Config) -> millrace_gate::Config {
    const HANDSHAKES: u32 = 1 << 14;
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
        if let Some(guard) = self.guard.upgrade() {
            guard.seats.lock().leave(self.client);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_of_a_network_are_bounded_as_well() {
        let mut seats = Seats::default();
        seats.tell(None, Some(2));
        let address = |n: u32| IpAddr::from([192, 0, 2, n as u8]);
        let taken = (0..300).filter(|n| seats.take(address(n / 2)).is_ok()).count();
        assert_eq!(taken, 16);
        assert_eq!(crowded(seats.take(address(0)).unwrap_err()), TooManySessions::Client);
        assert_eq!(crowded(seats.take(address(200)).unwrap_err()), TooManySessions::Network);
        assert!(seats.take([198, 51, 100, 1].into()).is_ok());
        // The limit goes up, and is taken away.
        seats.tell(None, Some(3));
        assert!(seats.take(address(200)).is_ok());
        seats.tell(None, None);
        assert!((0..1000).all(|_| seats.take(address(1)).is_ok()));
    }
}
