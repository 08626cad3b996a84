//! A gate and the thread that maintains it.

use std::{
    sync::{
        Arc,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use millrace_kernel::{prefix::Prefix, xdp::XdpMode};

use crate::kernel::{
    Config, GateRules, GateTotals, GateTrace, KernelClient, ListEntry, Listing, PacketTracer, RefusedPacket,
    TableFill, rules::INTERFACE, token,
};
use nix::sys::signal::{SigSet, SigmaskHow};

use crate::{
    Error, Policy, Scope,
    inner::{GateInner, lock},
    interfaces::Interface,
};

/// Time between two checks of the interfaces.
const LOOK: Duration = Duration::from_millis(500);
/// Least time between two starts of the gate's periodic work (upkeep), which forgets idle connections and tells the
/// kernel the UNIX time.
const UPKEEP: Duration = Duration::from_secs(1);
/// Least time between two starts of the gate's periodic work (upkeep, such as forgetting idle connections), as a
/// multiple of its last duration. With hundreds of thousands of connections it takes long and becomes less frequent.
const REST: u32 = 20;
/// Longest time between two starts of the gate's periodic work (upkeep, such as forgetting idle connections), however
/// long it took last.
const REST_MAX: Duration = Duration::from_secs(10);

/// A loaded gate. Until it is dropped, it decides about the packets of the interfaces that it is
/// [attached](Self::attach) to.
///
/// [`new`](Self::new) loads the programs and starts the upkeep thread. The policy can be [replaced](Self::set_policy)
/// and interfaces added or removed at any time. Dropping the gate detaches it and ends the thread; [`Scope`]s that
/// outlive it have no effect. The [crate's documentation](crate) has an example.
///
/// ```no_run
/// use std::path::Path;
/// use millrace_gate::{ListEntry, Gate, XdpMode, Policy};
///
/// let gate = Gate::new(&Policy::load(Path::new("/etc/millrace/gate.toml"))?)?;
/// let mode = gate.attach("eth0", XdpMode::Auto)?;
/// println!("attached: {mode:?}");
/// // A network that attacks, in every scope:
/// gate.list(None, "203.0.113.0/24".parse()?, ListEntry::Block)?;
/// // After the file has changed:
/// gate.set_policy(&Policy::load(Path::new("/etc/millrace/gate.toml"))?)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Gate {
    inner: Arc<GateInner>,
    /// Nothing is sent on this channel: the upkeep thread ends when the sender is dropped.
    stop: Option<Sender<()>>,
    upkeep: Option<JoinHandle<()>>,
}

impl Gate {
    /// Loads the gate with its policy. The calling thread needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, which root has.
    pub fn new(policy: &Policy) -> Result<Self, Error> {
        let inner = Arc::new(GateInner::load(&policy.load)?);
        inner.set_policy(policy)?;
        let (stop, stopped) = channel::<()>();
        let kept = inner.clone();
        let keep = move || {
            let mut due = Instant::now() + UPKEEP;
            while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                kept.look();
                let start = Instant::now();
                if start >= due {
                    kept.maintain();
                    due = start + rest_after(start.elapsed());
                }
            }
        };
        let upkeep = without_signals(|| std::thread::Builder::new().name("gate upkeep".into()).spawn(keep))
            .map_err(Error::Thread)?;
        Ok(Self { inner, stop: Some(stop), upkeep: Some(upkeep) })
    }

    /// Attaches the gate to an interface of the calling thread's network namespace. If the interface is deleted and
    /// made again under the same name, the gate attaches again. Returns the mode in which the gate is attached.
    pub fn attach(&self, interface: &str, mode: XdpMode) -> Result<XdpMode, Error> {
        self.inner.attach(interface, mode)
    }

    /// Detaches the gate from all interfaces. The state of connections and the gate's counters are kept.
    pub fn detach(&self) {
        let mut interfaces = lock(&self.inner.interfaces);
        interfaces.clear();
        self.inner.kernel.detach();
    }

    /// Detaches the gate from one interface.
    pub fn detach_from(&self, interface: &str) {
        lock(&self.inner.interfaces).remove(&self.inner.kernel, interface);
    }

    /// Returns the interfaces that the gate should be attached to. Their state is at most half a second old.
    pub fn interfaces(&self) -> Vec<Interface> {
        lock(&self.inner.interfaces).list()
    }

    /// Replaces the policy as a whole, or changes nothing if there is an error. A guarded application (scope) that
    /// keeps its name also keeps its connections and counters.
    pub fn set_policy(&self, policy: &Policy) -> Result<(), Error> {
        self.inner.set_policy(policy)
    }

    /// Returns the rules in force.
    pub fn rules(&self) -> GateRules {
        self.inner.kernel.rules()
    }

    /// Returns a handle of the policy's scope with this name, by which its application reports connections.
    pub fn scope(&self, name: &str) -> Result<Scope, Error> {
        self.inner.must_have(name)?;
        Ok(Scope::new(self.inner.clone(), name.to_owned(), self.inner.kernel.scope(name)?))
    }

    /// Blocks or allows an address prefix at once, for one guarded application (scope) or for all (`None`). The entry
    /// stays when the policy changes, and replaces the policy's entry for the same prefix.
    pub fn list(&self, scope: Option<&str>, prefix: Prefix, entry: ListEntry) -> Result<(), Error> {
        scope.map_or(Ok(()), |scope| self.inner.must_have(scope))?;
        Ok(self.inner.kernel.list(scope, prefix, entry)?)
    }

    /// Returns the entries of the block and allow lists that would override `entry`, set for `prefixes`, for some of
    /// the addresses in them or for all. Longer prefixes that apply to the same packets override shorter ones, and
    /// blocks override allows.
    pub fn exceptions(
        &self,
        scope: Option<&str>,
        prefixes: &[Prefix],
        entry: ListEntry,
    ) -> Result<Vec<Listing>, Error> {
        scope.map_or(Ok(()), |scope| self.inner.must_have(scope))?;
        Ok(self.inner.kernel.exceptions(scope, prefixes, entry)?)
    }

    /// Removes an entry that [`list`](Self::list) added.
    pub fn unlist(&self, scope: Option<&str>, prefix: Prefix) -> Result<(), Error> {
        scope.map_or(Ok(()), |scope| self.inner.must_have(scope))?;
        Ok(self.inner.kernel.unlist(scope, prefix)?)
    }

    /// Returns the block and allow list entries that [`list`](Self::list) added.
    pub fn listed(&self) -> Vec<Listing> {
        self.inner.kernel.listed()
    }

    /// Returns the settings that the gate was loaded with.
    pub fn load(&self) -> &Config {
        &self.inner.load
    }

    /// Returns the counters of packets and events since the gate was loaded.
    pub fn statistics(&self) -> Result<GateTotals, Error> {
        Ok(self.inner.kernel.statistics()?)
    }

    /// Returns the clients that have connections to a guarded application (scope), in no order.
    pub fn clients(&self, scope: &str) -> Result<Vec<KernelClient>, Error> {
        self.inner.must_have(scope)?;
        Ok(self.inner.kernel.clients(scope)?)
    }

    /// Returns the keys that Retry tokens are checked with now. Keys change by themselves unless the policy names a
    /// file.
    pub fn token_keys(&self) -> token::Keys {
        self.inner.kernel.token_keys()
    }

    /// Returns the fill levels of the gate's BPF maps at the time when idle connections were last forgotten.
    pub fn tables(&self) -> Vec<TableFill> {
        self.inner.kernel.tables()
    }

    /// Returns samples of packets that rules refused since the last call, or that monitored rules would have refused.
    pub fn drain_samples(&self) -> Result<Vec<RefusedPacket>, Error> {
        Ok(self.inner.kernel.drain_samples()?)
    }

    /// Starts a trace of packets that rules refuse, or that monitored rules would refuse. Dropping the result ends the
    /// trace. The kernel skips packets that no trace matches, so one client can be followed during floods by others.
    pub fn trace(&self, what: &GateTrace) -> Result<PacketTracer, Error> {
        // No policy has a scope with the name `INTERFACE`. The gate uses it for packets for no guarded application.
        let own = |scope: &&String| scope.as_str() != INTERFACE;
        what.scopes.iter().filter(own).try_for_each(|scope| self.inner.must_have(scope))?;
        Ok(self.inner.kernel.trace(what)?)
    }

    /// Returns the error of the gate's last periodic work (upkeep), or `None` if it succeeded. After an error, idle
    /// connections are not forgotten, and the times in tokens may be wrong.
    pub fn trouble(&self) -> Option<String> {
        lock(&self.inner.trouble).clone()
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // The application may still hold `Scope`s, which keep maps and programs loaded. The interfaces are detached
        // here, so that another gate can be attached at once.
        self.detach();
        drop(self.stop.take());
        if let Some(upkeep) = self.upkeep.take() {
            let _ = upkeep.join();
        }
    }
}

/// Returns the time from one start of the gate's periodic work (upkeep) to the next, if the work took the time `took`.
fn rest_after(took: Duration) -> Duration {
    (took * REST).clamp(UPKEEP, REST_MAX)
}

/// Calls `start` with all signals blocked, and restores the signal mask. A new thread inherits the mask, so the
/// application's signals are delivered only to its own threads.
fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK);
    let started = start();
    if let Ok(before) = before {
        let _ = before.thread_set_mask(); // Setting the mask fails only for an invalid pointer.
    }
    started
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_after_map_maintenance_is_20_run_times_within_1_to_10_seconds() {
        let after_ms = |took| rest_after(Duration::from_millis(took)).as_millis();
        assert_eq!([0, 50, 210, 1_000].map(after_ms), [1_000, 1_000, 4_200, 10_000]);
    }
}
