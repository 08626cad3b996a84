//! State that a gate, its upkeep thread and its scopes share.

use std::{
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use millrace_kernel::xdp::XdpMode;

use crate::{
    kernel,
    kernel::{
        Config, GateRules, LiveRule, Rule, rules,
        token::{self, GateKey, Token},
    },
};

use crate::{Error, Policy, interfaces::GateInterfaces, policy::TokenKeys};

/// The state that a gate, its upkeep thread and its scopes share.
///
/// Lock order: `interfaces`, `token_keys`, `rotated`, then the locks inside `kernel`. Rules change as a whole:
/// [`Self::set_policy`] writes the half of the maps that is not in use and switches to it. If the token keys cannot be
/// set afterwards, it restores the previous rules.
pub(crate) struct GateInner {
    pub kernel: kernel::LoadedGate,
    pub load: Config,
    /// Locked while interfaces or rules change, so that servers' packets are watched on every interface if the rules
    /// need it.
    pub interfaces: Mutex<GateInterfaces>,
    /// The policy's token keys that are in the kernel; `None` if the gate uses its own token keys.
    pub token_keys: Mutex<Option<TokenKeys>>,
    /// Time when the gate last made a token key of its own.
    pub rotated: Mutex<Instant>,
    /// The error of the gate's latest periodic work (upkeep), if it failed.
    pub trouble: Mutex<Option<String>>,
}

impl GateInner {
    pub fn load(load: &Config) -> Result<Self, Error> {
        Ok(Self {
            kernel: kernel::LoadedGate::load(load)?,
            load: load.clone(),
            interfaces: Mutex::default(),
            token_keys: Mutex::default(),
            rotated: Mutex::new(Instant::now()),
            trouble: Mutex::default(),
        })
    }

    pub fn attach(&self, interface: &str, mode: XdpMode) -> Result<XdpMode, Error> {
        let mut interfaces = lock(&self.interfaces);
        interfaces.add(&self.kernel, interface, mode, wants_watch(&self.kernel.rules()))
    }

    pub fn look(&self) {
        let mut interfaces = lock(&self.interfaces);
        interfaces.look(&self.kernel, wants_watch(&self.kernel.rules()));
    }

    pub fn maintain(&self) {
        let kept = self.kernel.maintain().map(drop).and(self.rotate_own_key(Instant::now()));
        *lock(&self.trouble) = kept.err().map(|error| error.to_string());
    }

    /// Makes a new token key if the present one is older than two token lifetimes. The previous key stays valid for two
    /// more lifetimes, so every token is accepted for its whole lifetime. Keys of a file are the operator's to change.
    fn rotate_own_key(&self, now: Instant) -> Result<(), millrace_kernel::Error> {
        let rules = self.kernel.rules();
        let retry =
            rules.scopes.iter().filter(|scope| scope.policy.modes.get(Rule::Retry) != rules::RuleMode::Off);
        let Some(lifetime) = retry.map(|scope| scope.policy.token_lifetime).max() else { return Ok(()) };
        let known = lock(&self.token_keys);
        let mut rotated = lock(&self.rotated);
        if known.is_some() || now.saturating_duration_since(*rotated) < 2 * lifetime {
            return Ok(());
        }
        let key = GateKey::random().map_err(|source| millrace_kernel::Error::Random { source })?;
        self.kernel.rotate_token_key(key)?;
        *rotated = now;
        Ok(())
    }

    pub fn set_policy(&self, policy: &Policy) -> Result<(), Error> {
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

    /// Starts to use the gate's own token keys. If the previous policy named a file, a key of that file stays valid
    /// until the gate has made two keys of its own.
    fn own_token_keys(&self) -> Result<(), millrace_kernel::Error> {
        let mut known = lock(&self.token_keys);
        if known.is_some() {
            self.slot_of_new_key()?;
            *lock(&self.rotated) = Instant::now();
            *known = None;
        }
        Ok(())
    }

    /// Puts both token keys into their slots, 0 and 1, in the kernel. The kernel always writes a new key into the slot
    /// that is not in use, and then uses that slot. If the present key becomes the previous one, one write is enough,
    /// and tokens of that key stay valid.
    fn set_token_keys(&self, wanted: &TokenKeys) -> Result<(), millrace_kernel::Error> {
        let mut known = lock(&self.token_keys);
        if known.as_ref() == Some(wanted) {
            return Ok(());
        }
        let used = 1 - wanted.current;
        let is_next =
            known.as_ref().is_some_and(|now| now.current == used && now.key(used) == wanted.key(used));
        if !is_next {
            *known = None;
            // It is unknown which of the two slots the kernel uses. Adding a random key shows it: the slot that then
            // holds this key is in use.
            while self.slot_of_new_key()? != Some(wanted.current) {}
            self.kernel.rotate_token_key(wanted.key(used).clone())?;
        }
        self.kernel.rotate_token_key(wanted.key(wanted.current).clone())?;
        *known = Some(wanted.clone());
        Ok(())
    }

    /// Adds a random token key and returns its slot, which is now in use.
    fn slot_of_new_key(&self) -> Result<Option<usize>, millrace_kernel::Error> {
        let key = GateKey::random().map_err(|source| millrace_kernel::Error::Random { source })?;
        self.kernel.rotate_token_key(key.clone())?;
        let keys = self.kernel.token_keys();
        Ok((0..2).find(|slot| keys.get(*slot) == Some(&key)))
    }

    pub fn must_have(&self, scope: &str) -> Result<(), Error> {
        let rules = self.kernel.rules();
        let known: Vec<_> = rules.scopes.into_iter().map(|known| known.name).collect();
        match known.iter().any(|known| known == scope) {
            true => Ok(()),
            false => Err(Error::NoScope { name: scope.to_owned(), known }),
        }
    }

    pub fn check_token(&self, scope: &str, client: SocketAddr, bytes: &[u8]) -> Result<Token, token::Error> {
        let rules = self.kernel.rules();
        let lifetime = rules.scopes.iter().find(|known| known.name == scope);
        let lifetime = lifetime.map_or(Duration::ZERO, |scope| scope.policy.token_lifetime);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        token::check(&self.kernel.token_keys(), scope, bytes, client, now.as_secs(), lifetime)
    }

    pub fn open_token(&self, scope: &str, bytes: &[u8]) -> Result<Token, token::Error> {
        token::open(&self.kernel.token_keys(), scope, bytes)
    }
}

fn wants_watch(rules: &GateRules) -> bool {
    rules.scopes.iter().any(|scope| matches!(scope.policy.live, LiveRule::Tracked { .. }))
}

/// Locks a mutex and ignores poison, since no code under these locks leaves a state half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
