//! What a gate, its upkeep and its scopes share.

use std::{
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use millrace_kernel::xdp::Mode;

use crate::{
    kernel,
    kernel::{
        Config, Live, Rule, Rules, rules,
        token::{self, Key, Token},
    },
};

use crate::{Error, Policy, interfaces::Interfaces, policy::TokenKeys};

pub(crate) struct Inner {
    pub kernel: kernel::Gate,
    pub load: Config,
    /// Held while interfaces or rules change, so that answers are watched wherever rules want it.
    pub interfaces: Mutex<Interfaces>,
    /// As they are in the kernel; `None`: its own.
    pub token_keys: Mutex<Option<TokenKeys>>,
    /// When the gate's own key was made last.
    pub rotated: Mutex<Instant>,
    /// Of the latest upkeep.
    pub trouble: Mutex<Option<String>>,
}

impl Inner {
    pub fn load(load: &Config) -> Result<Self, Error> {
        Ok(Self {
            kernel: kernel::Gate::load(load)?,
            load: load.clone(),
            interfaces: Mutex::default(),
            token_keys: Mutex::default(),
            rotated: Mutex::new(Instant::now()),
            trouble: Mutex::default(),
        })
    }

    pub fn attach(&self, interface: &str, mode: Mode) -> Result<Mode, Error> {
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

    /// Makes tokens with a new key after each two lifetimes; the key before is accepted for as long again, so no token
    /// that was given out is lost. Keys of a file are its owner's business.
    fn rotate_own_key(&self, now: Instant) -> Result<(), millrace_kernel::Error> {
        let rules = self.kernel.rules();
        let retry =
            rules.scopes.iter().filter(|scope| scope.policy.modes.get(Rule::Retry) != rules::Mode::Off);
        let Some(lifetime) = retry.map(|scope| scope.policy.token_lifetime).max() else { return Ok(()) };
        let known = lock(&self.token_keys);
        let mut rotated = lock(&self.rotated);
        if known.is_some() || now.saturating_duration_since(*rotated) < 2 * lifetime {
            return Ok(());
        }
        let key = Key::random().map_err(|source| millrace_kernel::Error::Random { source })?;
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

    /// The keys of a file that is named no more are accepted until the gate has made two of its own.
    fn own_token_keys(&self) -> Result<(), millrace_kernel::Error> {
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
            // Whichever slot the kernel is at: after a key that is nobody else's, it can be told.
            while self.slot_of_new_key()? != Some(wanted.current) {}
            self.kernel.rotate_token_key(wanted.key(used).clone())?;
        }
        self.kernel.rotate_token_key(wanted.key(wanted.current).clone())?;
        *known = Some(wanted.clone());
        Ok(())
    }

    fn slot_of_new_key(&self) -> Result<Option<usize>, millrace_kernel::Error> {
        let key = Key::random().map_err(|source| millrace_kernel::Error::Random { source })?;
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

fn wants_watch(rules: &Rules) -> bool {
    rules.scopes.iter().any(|scope| matches!(scope.policy.live, Live::Tracked { .. }))
}

/// Nothing that is done under these locks leaves a state half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
