//! Rights that are in use, and when they end.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};

use millrace_proto::moq::token::Credential;
use parking_lot::Mutex;
use tokio::{sync::Notify, time::sleep};

use super::{
    Access,
    budget::{Place, Usage},
    client::Client,
    grant::{Action, Resource},
    policy::{Basis, Identity, Policy, Presented},
    refusal::Refusal,
    rules::Peer,
};

/// Requests of a session whose tokens may be bad before it is closed.
const MAX_BAD_TOKENS: u32 = 16;
/// Timers are set no further ahead, for clocks that are set.
const LONGEST_TIMER: Duration = Duration::from_secs(3600);

/// One session before the authoriser: who it is, and what it uses.
pub struct Subject {
    access: Arc<Access>,
    peer: Peer,
    /// Of its URL and its SETUP.
    tokens: Vec<Arc<Presented>>,
    /// It is the configured upstream relay.
    trusted: bool,
    session: Arc<Usage>,
    client: Arc<Client>,
    /// Tokens of requests that were not good.
    bad_tokens: AtomicU32,
}

/// The right to one thing, as long as something allows it.
pub struct Rights {
    subject: Arc<Subject>,
    /// Of the request.
    tokens: Mutex<Vec<Arc<Presented>>>,
    asked: Mutex<Asked>,
    identity: Mutex<Identity>,
    renewed: Notify,
    over: OnceLock<Refusal>,
}

#[derive(Clone)]
enum Asked {
    Session,
    Nothing,
    Action(Action, Resource),
}

impl Subject {
    pub fn new(
        access: &Arc<Access>,
        peer: Peer,
        tokens: Vec<Credential>,
        trusted: bool,
        session: Arc<Usage>,
    ) -> Arc<Self> {
        let client = if trusted { Client::unlimited() } else { access.client(peer.address) };
        let access = Arc::clone(access);
        let tokens = tokens.into_iter().map(Presented::new).collect();
        Arc::new(Self { access, peer, tokens, trusted, session, client, bad_tokens: AtomicU32::new(0) })
    }

    /// The session's own right to be.
    ///
    /// # Errors
    /// It has none.
    pub fn admit(self: &Arc<Self>) -> Result<Arc<Rights>, Refusal> {
        let rights = Rights::new(self, Vec::new(), Asked::Session);
        let policy = self.access.policy();
        let checked = match self.trusted {
            true => Ok(()),
            false => policy.check_tokens(&self.tokens, SystemTime::now()),
        };
        self.counted(checked)?;
        self.counted(rights.decide(&policy))?;
        Ok(rights)
    }

    /// What a request brings: its tokens. It asks for nothing yet. `holds_track`: it has a track made for it.
    ///
    /// # Errors
    /// There were too many of them, or a token is not good.
    pub fn request(
        self: &Arc<Self>,
        tokens: Vec<Credential>,
        holds_track: bool,
    ) -> Result<(Arc<Rights>, Option<Place>), Refusal> {
        let tokens: Vec<_> = tokens.into_iter().map(Presented::new).collect();
        if self.trusted {
            return Ok((Rights::new(self, tokens, Asked::Nothing), None));
        }
        let now = Instant::now();
        self.counted(self.session.request(now))?;
        self.counted(self.client.usage.request(now))?;
        self.check_tokens(&self.access.policy(), &tokens)?;
        let place = match holds_track {
            true => Some(self.counted(Usage::track(&[&self.session, &self.client.usage]))?),
            false => None,
        };
        Ok((Rights::new(self, tokens, Asked::Nothing), place))
    }

    /// Tokens are costly to check: who goes on with bad ones has to go.
    fn check_tokens(&self, policy: &Policy, tokens: &[Arc<Presented>]) -> Result<(), Refusal> {
        let checked = self.counted(policy.check_tokens(tokens, SystemTime::now()));
        match checked {
            Err(_) if self.bad_tokens.fetch_add(1, Relaxed) >= MAX_BAD_TOKENS => {
                self.counted(Err(Refusal::Hopeless))
            }
            checked => checked,
        }
    }

    /// What all its client's sessions take up.
    pub fn client(&self) -> &Arc<Client> {
        &self.client
    }

    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    fn counted<T>(&self, result: Result<T, Refusal>) -> Result<T, Refusal> {
        result.inspect_err(|refusal| self.access.count(*refusal))
    }
}

impl Rights {
    fn new(subject: &Arc<Subject>, tokens: Vec<Arc<Presented>>, asked: Asked) -> Arc<Self> {
        let address = super::budget::client(subject.peer.address);
        let identity = if subject.trusted { Identity::Upstream } else { Identity::Client(address) };
        Arc::new(Self {
            subject: Arc::clone(subject),
            tokens: Mutex::new(tokens),
            asked: Mutex::new(asked),
            identity: Mutex::new(identity),
            renewed: Notify::new(),
            over: OnceLock::new(),
        })
    }

    /// Asks for this from now on, instead of what was asked for before.
    ///
    /// # Errors
    /// It is not allowed; what was asked for before still is.
    pub fn ask(&self, action: Action, resource: Resource) -> Result<(), Refusal> {
        let before = std::mem::replace(&mut *self.asked.lock(), Asked::Action(action, resource));
        let policy = self.subject.access.policy();
        let decided = self.subject.counted(self.decide(&policy).map(drop));
        match decided {
            Ok(()) => self.renewed.notify_one(),
            Err(_) => *self.asked.lock() = before,
        }
        decided
    }

    /// Whether the same request may do this too.
    pub fn permit(&self, action: Action, resource: &Resource) -> bool {
        let policy = self.subject.access.policy();
        self.decide_on(&policy, &Asked::Action(action, resource.clone())).is_ok()
    }

    /// The right to something that follows from this request.
    ///
    /// # Errors
    /// It is not allowed.
    pub fn derive(&self, action: Action, resource: Resource) -> Result<Arc<Self>, Refusal> {
        let derived = Self::new(&self.subject, self.tokens.lock().clone(), Asked::Nothing);
        derived.ask(action, resource)?;
        Ok(derived)
    }

    /// REQUEST_UPDATE: with further tokens.
    ///
    /// # Errors
    /// A token is not good, or the request may not be updated.
    pub fn update(&self, tokens: Vec<Credential>) -> Result<(), Refusal> {
        let tokens: Vec<_> = tokens.into_iter().map(Presented::new).collect();
        let policy = self.subject.access.policy();
        if !self.subject.trusted {
            self.subject.check_tokens(&policy, &tokens)?;
        }
        if !tokens.is_empty() {
            // The newest instead of all of a long life.
            *self.tokens.lock() = tokens;
        }
        if let Asked::Action(_, resource) = self.asked.lock().clone() {
            let asked = Asked::Action(Action::RequestUpdate, resource);
            self.subject.counted(self.decide_on(&policy, &asked))?;
        }
        self.renewed.notify_one();
        Ok(())
    }

    /// Ends it now.
    pub fn end(&self, refusal: Refusal) {
        let _ = self.over.set(refusal); // it was over before
        self.renewed.notify_one();
    }

    /// On whose behalf.
    pub fn identity(&self) -> Identity {
        self.identity.lock().clone()
    }

    /// Why it is over, if it is.
    pub fn over(&self) -> Option<Refusal> {
        self.over.get().copied()
    }

    /// Counts `refusal`, which is not by a rule.
    pub fn count(&self, refusal: Refusal) {
        self.subject.access.count(refusal);
    }

    /// Waits until nothing allows it any more.
    pub async fn ended(&self) -> Refusal {
        let mut versions = self.subject.access.versions();
        loop {
            versions.borrow_and_update();
            if let Some(refusal) = self.over() {
                return refusal;
            }
            let policy = self.subject.access.policy();
            let basis = match self.decide(&policy) {
                Ok(basis) => basis,
                Err(refusal) => {
                    self.subject.access.count(refusal);
                    return *self.over.get_or_init(|| refusal);
                }
            };
            tokio::select! {
                () = until(basis.until) => {}
                changed = versions.changed() => if changed.is_err() {
                    std::future::pending::<()>().await;
                },
                () = self.renewed.notified() => {}
            }
        }
    }

    fn decide(&self, policy: &Policy) -> Result<Basis, Refusal> {
        let asked = self.asked.lock().clone();
        let basis = self.decide_on(policy, &asked)?;
        *self.identity.lock() = basis.identity.clone();
        Ok(basis)
    }

    fn decide_on(&self, policy: &Policy, asked: &Asked) -> Result<Basis, Refusal> {
        let Subject { peer, tokens, trusted, .. } = &*self.subject;
        if *trusted {
            return Ok(Basis { identity: Identity::Upstream, until: None });
        }
        let now = SystemTime::now();
        match asked {
            Asked::Session => policy.decide_session(peer, tokens, now),
            Asked::Nothing => Ok(Basis { identity: self.identity(), until: None }),
            Asked::Action(action, resource) => {
                let own = self.tokens.lock();
                let all: Vec<_> = own.iter().chain(tokens).cloned().collect();
                drop(own);
                policy.decide(peer, &all, (*action, resource), now)
            }
        }
    }
}

/// Waits for a time of the wall clock, or a while on the way there.
async fn until(time: Option<SystemTime>) {
    match time {
        Some(time) => {
            let left = time.duration_since(SystemTime::now()).unwrap_or_default();
            sleep(left.min(LONGEST_TIMER)).await;
        }
        None => std::future::pending().await,
    }
}
