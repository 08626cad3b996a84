//! A gate with what keeps it going.

use std::{
    sync::{
        Arc,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use millrace_kernel::{prefix::Prefix, xdp::Mode};

use crate::kernel::{
    Client, Config, Entry, Listing, Rules, Sample, Statistics, Table, Trace, Tracer, rules::INTERFACE, token,
};
use nix::sys::signal::{SigSet, SigmaskHow};

use crate::{
    Error, Policy, Scope,
    inner::{Inner, lock},
    interfaces::Interface,
};

/// How often interfaces are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// From one upkeep to the next: idle connections are forgotten, the clock is followed.
const UPKEEP: Duration = Duration::from_secs(1);
/// And at least so many times what the upkeep took: with tables full of hundreds of thousands it comes more seldom.
const REST: u32 = 20;
/// For which it never waits, however long it took.
const REST_MAX: Duration = Duration::from_secs(10);

/// A loaded gate. It decides about what arrives on the interfaces that it is [attached](Self::attach) to, until it
/// is dropped.
pub struct Gate {
    inner: Arc<Inner>,
    /// Dropping it ends the upkeep.
    stop: Option<Sender<()>>,
    upkeep: Option<JoinHandle<()>>,
}

impl Gate {
    /// Loads the gate with its policy. It needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, as root has.
    pub fn new(policy: &Policy) -> Result<Self, Error> {
        let inner = Arc::new(Inner::load(&policy.load)?);
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

    /// Decides about what arrives on an interface of the calling thread's network namespace from now on, also when it
    /// is made anew under the same name. Returns how it is attached.
    pub fn attach(&self, interface: &str, mode: Mode) -> Result<Mode, Error> {
        self.inner.attach(interface, mode)
    }

    /// Detaches from all interfaces. Connections and counts stay known.
    pub fn detach(&self) {
        let mut interfaces = lock(&self.inner.interfaces);
        interfaces.clear();
        self.inner.kernel.detach();
    }

    /// Detaches from one interface.
    pub fn detach_from(&self, interface: &str) {
        lock(&self.inner.interfaces).remove(&self.inner.kernel, interface);
    }

    /// The interfaces that it is to be attached to, as they were half a second ago.
    pub fn interfaces(&self) -> Vec<Interface> {
        lock(&self.inner.interfaces).list()
    }

    /// Replaces the policy as a whole, or changes nothing. Connections and counts of scopes that keep their name
    /// stay.
    pub fn set_policy(&self, policy: &Policy) -> Result<(), Error> {
        self.inner.set_policy(policy)
    }

    /// The rules in force.
    pub fn rules(&self) -> Rules {
        self.inner.kernel.rules()
    }

    /// What the application behind that scope tells about itself.
    pub fn scope(&self, name: &str) -> Result<Scope, Error> {
        self.inner.must_have(name)?;
        Ok(Scope::new(self.inner.clone(), name.to_owned(), self.inner.kernel.scope(name)?))
    }

    /// Blocks or allows a prefix at once, in one scope or in all (`None`); beyond changes of the policy, and in place
    /// of its entry for the same prefix.
    pub fn list(&self, scope: Option<&str>, prefix: Prefix, entry: Entry) -> Result<(), Error> {
        scope.map_or(Ok(()), |scope| self.inner.must_have(scope))?;
        Ok(self.inner.kernel.list(scope, prefix, entry)?)
    }

    /// What decides otherwise about a part of prefixes, or all of it, than this entry of a list does or would: longer
    /// prefixes in the lists that count where this one does, and blocks of the same.
    pub fn exceptions(
        &self,
        scope: Option<&str>,
        prefixes: &[Prefix],
        entry: Entry,
    ) -> Result<Vec<Listing>, Error> {
        scope.map_or(Ok(()), |scope| self.inner.must_have(scope))?;
        Ok(self.inner.kernel.exceptions(scope, prefixes, entry)?)
    }

    /// Takes back what [`list`](Self::list) did.
    pub fn unlist(&self, scope: Option<&str>, prefix: Prefix) -> Result<(), Error> {
        scope.map_or(Ok(()), |scope| self.inner.must_have(scope))?;
        Ok(self.inner.kernel.unlist(scope, prefix)?)
    }

    /// What [`list`](Self::list) did: scope, prefix, entry.
    pub fn listed(&self) -> Vec<Listing> {
        self.inner.kernel.listed()
    }

    /// The settings that the gate was loaded with.
    pub fn load(&self) -> &Config {
        &self.inner.load
    }

    pub fn statistics(&self) -> Result<Statistics, Error> {
        Ok(self.inner.kernel.statistics()?)
    }

    /// The clients of a scope that have connections, in no order.
    pub fn clients(&self, scope: &str) -> Result<Vec<Client>, Error> {
        self.inner.must_have(scope)?;
        Ok(self.inner.kernel.clients(scope)?)
    }

    /// What Retry tokens are checked with at the moment: keys change by themselves unless the policy names a file.
    pub fn token_keys(&self) -> token::Keys {
        self.inner.kernel.token_keys()
    }

    /// How full its tables are, as they were a second ago.
    pub fn tables(&self) -> Vec<Table> {
        self.inner.kernel.tables()
    }

    /// Samples of packets that were refused, or would have been, since the last call.
    pub fn drain_samples(&self) -> Result<Vec<Sample>, Error> {
        Ok(self.inner.kernel.drain_samples()?)
    }

    /// Follows packets that are refused, or would be, until the result is dropped. What nobody follows the kernel passes
    /// over, so a client is followed through the floods of others.
    pub fn trace(&self, what: &Trace) -> Result<Tracer, Error> {
        // The gate's own, for what cannot be told apart.
        let own = |scope: &&String| scope.as_str() != INTERFACE;
        what.scopes.iter().filter(own).try_for_each(|scope| self.inner.must_have(scope))?;
        Ok(self.inner.kernel.trace(what)?)
    }

    /// What keeps idle connections from being forgotten and tokens from being dated right, if anything does.
    pub fn trouble(&self) -> Option<String> {
        lock(&self.inner.trouble).clone()
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // Scopes may live on; the interface is free at once.
        self.detach();
        drop(self.stop.take());
        if let Some(upkeep) = self.upkeep.take() {
            let _ = upkeep.join();
        }
    }
}

/// From the start of one upkeep to the start of the next.
fn rest_after(took: Duration) -> Duration {
    (took * REST).clamp(UPKEEP, REST_MAX)
}

/// A thread that `start` starts gets no signals: they are the application's, whose own threads may wait for them.
fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK);
    let started = start();
    if let Ok(before) = before {
        let _ = before.thread_set_mask(); // fails for a wrong address only
    }
    started
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upkeep_takes_a_twentieth_of_a_cpu_at_most() {
        let after_ms = |took| rest_after(Duration::from_millis(took)).as_millis();
        assert_eq!([0, 50, 210, 1_000].map(after_ms), [1_000, 1_000, 4_200, 10_000]);
    }
}
