//! A gate with what keeps it going.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use millrace_bpf::{
    gate::{
        self as kernel, Client, Config, Entry, Listing, Live, Prefix, Rule, Rules, Sample, Statistics, Table,
        rules,
        token::{self, Key, Token},
    },
    xdp::Mode,
};
use nix::sys::signal::{SigSet, SigmaskHow};

use crate::{
    Error, Policy, Scope,
    interfaces::{Interface, Interfaces},
    policy::TokenKeys,
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

pub(crate) struct Inner {
    kernel: kernel::Gate,
    load: Config,
    /// Held while interfaces or rules change, so that answers are watched wherever rules want it.
    interfaces: Mutex<Interfaces>,
    /// As they are in the kernel; `None`: its own.
    token_keys: Mutex<Option<TokenKeys>>,
    /// When the gate's own key was made last.
    rotated: Mutex<Instant>,
    /// Of the latest upkeep.
    trouble: Mutex<Option<String>>,
}

impl Gate {
    /// Loads the gate with its policy. It needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, as root has.
    pub fn new(policy: &Policy) -> Result<Self, Error> {
        let inner = Arc::new(Inner {
            kernel: kernel::Gate::load(&policy.load)?,
            load: policy.load.clone(),
            interfaces: Mutex::default(),
            token_keys: Mutex::default(),
            rotated: Mutex::new(Instant::now()),
            trouble: Mutex::default(),
        });
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

impl Inner {
    fn attach(&self, interface: &str, mode: Mode) -> Result<Mode, Error> {
        let mut interfaces = lock(&self.interfaces);
        interfaces.add(&self.kernel, interface, mode, wants_watch(&self.kernel.rules()))
    }

    fn look(&self) {
        let mut interfaces = lock(&self.interfaces);
        interfaces.look(&self.kernel, wants_watch(&self.kernel.rules()));
    }

    fn maintain(&self) {
        let kept = self.kernel.maintain().map(drop).and(self.rotate_own_key(Instant::now()));
        *lock(&self.trouble) = kept.err().map(|error| error.to_string());
    }

    /// Makes tokens with a new key after each two lifetimes; the key before is accepted for as long again, so no token
    /// that was given out is lost. Keys of a file are its owner's business.
    fn rotate_own_key(&self, now: Instant) -> Result<(), millrace_bpf::Error> {
        let rules = self.kernel.rules();
        let retry =
            rules.scopes.iter().filter(|scope| scope.policy.modes.get(Rule::Retry) != rules::Mode::Off);
        let Some(lifetime) = retry.map(|scope| scope.policy.token_lifetime).max() else { return Ok(()) };
        let known = lock(&self.token_keys);
        let mut rotated = lock(&self.rotated);
        if known.is_some() || now.saturating_duration_since(*rotated) < 2 * lifetime {
            return Ok(());
        }
        let key = Key::random().map_err(|source| millrace_bpf::Error::Random { source })?;
        self.kernel.rotate_token_key(key)?;
        *rotated = now;
        Ok(())
    }

    fn set_policy(&self, policy: &Policy) -> Result<(), Error> {
        if policy.load != self.load {
            return Err(Error::Load);
        }
        let interfaces = lock(&self.interfaces);
        if wants_watch(&policy.rules) {
            interfaces.watch(&self.kernel)?;
        }
        let before = self.kernel.rules();
        self.kernel.apply(&policy.rules)?;
        let keys = match &policy.token_keys {
            Some(keys) => self.set_token_keys(keys),
            None => self.own_token_keys(),
        };
        if let Err(error) = keys {
            self.kernel.apply(&before)?;
            return Err(error.into());
        }
        Ok(())
    }

    /// The keys of a file that is named no more are accepted until the gate has made two of its own.
    fn own_token_keys(&self) -> Result<(), millrace_bpf::Error> {
        let mut known = lock(&self.token_keys);
        if known.is_some() {
            self.slot_of_new_key()?;
            *lock(&self.rotated) = Instant::now();
            *known = None;
        }
        Ok(())
    }

    /// Brings both keys into their slots. The kernel puts a new key into the slot that is not in use, so that one new
    /// key beside the one in use takes one step, which costs no token.
    fn set_token_keys(&self, wanted: &TokenKeys) -> Result<(), millrace_bpf::Error> {
        let mut known = lock(&self.token_keys);
        if known.as_ref() == Some(wanted) {
            return Ok(());
        }
        let used = 1 - wanted.current;
        let is_next =
            known.as_ref().is_some_and(|now| now.current == used && now.key(used) == wanted.key(used));
        if !is_next {
            *known = None;
            // Whichever slot the kernel is at: after a key that is nobody else's, it can be told.
            while self.slot_of_new_key()? != Some(wanted.current) {}
            self.kernel.rotate_token_key(wanted.key(used).clone())?;
        }
        self.kernel.rotate_token_key(wanted.key(wanted.current).clone())?;
        *known = Some(wanted.clone());
        Ok(())
    }

    fn slot_of_new_key(&self) -> Result<Option<usize>, millrace_bpf::Error> {
        let key = Key::random().map_err(|source| millrace_bpf::Error::Random { source })?;
        self.kernel.rotate_token_key(key.clone())?;
        let keys = self.kernel.token_keys();
        Ok((0..2).find(|slot| keys.get(*slot) == Some(&key)))
    }

    fn must_have(&self, scope: &str) -> Result<(), Error> {
        let rules = self.kernel.rules();
        let known = rules.scopes.iter().any(|known| known.name == scope);
        if known { Ok(()) } else { Err(Error::NoScope(scope.to_owned())) }
    }

    pub(crate) fn check_token(
        &self,
        scope: &str,
        client: SocketAddr,
        bytes: &[u8],
    ) -> Result<Token, token::Error> {
        let rules = self.kernel.rules();
        let lifetime = rules.scopes.iter().find(|known| known.name == scope);
        let lifetime = lifetime.map_or(Duration::ZERO, |scope| scope.policy.token_lifetime);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        token::check(&self.kernel.token_keys(), bytes, client, now.as_secs(), lifetime)
    }

    pub(crate) fn open_token(&self, bytes: &[u8]) -> Result<Token, token::Error> {
        token::open(&self.kernel.token_keys(), bytes)
    }
}

fn wants_watch(rules: &Rules) -> bool {
    rules.scopes.iter().any(|scope| matches!(scope.policy.live, Live::Tracked { .. }))
}

/// Nothing that is done under these locks leaves a state half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
