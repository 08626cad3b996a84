//! Rights that are in use, and when they end.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};

use millrace_base::networks;
use millrace_moq::token::Credential;
use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant as Clock, sleep, sleep_until},
};

use super::{
    Access,
    budget::{self, BudgetUsage},
    client::AccessClient,
    grant::{Action, Resource},
    policy::{AccessPolicy, Basis, Presented, RightHolder, SessionStanding},
    refusal::AccessRefusal,
    rules::SessionPeer,
    unproven,
};

/// Requests of a session whose tokens may be bad before it is closed.
const MAX_BAD_TOKENS: u32 = 16;
/// Timers are set no further ahead, for clocks that are set.
const LONGEST_TIMER: Duration = Duration::from_secs(3600);

/// One session before the authoriser: who it is, and what it uses.
pub struct SessionSubject {
    access: Arc<Access>,
    peer: SessionPeer,
    /// Tokens of its URL and its SETUP.
    tokens: Vec<Arc<Presented>>,
    /// True for the configured upstream relay.
    trusted: bool,
    session: Arc<BudgetUsage>,
    client: Arc<AccessClient>,
    /// Tokens of requests that were not good.
    bad_tokens: AtomicU32,
    /// Requests, and what follows from them, that have a right.
    held: AtomicUsize,
    /// The first right that a request showed, in a session that had shown none before.
    proof: watch::Sender<Option<Proof>>,
}

/// Something that a request was allowed, and what allowed it.
struct Proof {
    tokens: Vec<Arc<Presented>>,
    asked: AskedRight,
    until: Option<SystemTime>,
}

/// The right to one thing, as long as something allows it. What was asked for changes by [`Self::move_to`] only; whatever else
/// follows from a request has a right of its own, by [`Self::derive`].
pub struct Rights {
    subject: Arc<SessionSubject>,
    bearer: Arc<Bearer>,
    /// Never what is not decided yet: [`Self::ended`] looks at it from another task.
    asked: Mutex<AskedRight>,
    identity: Mutex<RightHolder>,
    /// Tells of another thing that is asked for, and of the end.
    changed: watch::Sender<()>,
    over: OnceLock<AccessRefusal>,
}

/// The tokens that a request has brought.
struct Bearer {
    tokens: Mutex<Vec<Arc<Presented>>>,
    /// The request's that this follows from, whose tokens serve too.
    parent: Option<Arc<Bearer>>,
    /// Tells all that follows from one request of new tokens.
    renewed: Arc<watch::Sender<()>>,
}

impl Bearer {
    fn new(tokens: Vec<Arc<Presented>>) -> Arc<Self> {
        Arc::new(Self { tokens: Mutex::new(tokens), parent: None, renewed: Arc::default() })
    }

    fn derive(self: &Arc<Self>) -> Arc<Self> {
        let renewed = Arc::clone(&self.renewed);
        Arc::new(Self { tokens: Mutex::default(), parent: Some(Arc::clone(self)), renewed })
    }

    fn all(&self) -> Vec<Arc<Presented>> {
        let mut all = self.tokens.lock().clone();
        all.extend(self.inherited());
        all
    }

    fn inherited(&self) -> Vec<Arc<Presented>> {
        self.parent.as_ref().map(|parent| parent.all()).unwrap_or_default()
    }
}

#[derive(Clone)]
enum AskedRight {
    Session,
    Nothing,
    Action(Action, Resource),
}

impl SessionSubject {
    /// Makes the subject of a session, with the tokens of its SETUP. A trusted one, such as the upstream relay, is
    /// bound by no client's budget.
    pub fn new(
        access: &Arc<Access>,
        peer: SessionPeer,
        tokens: Vec<Credential>,
        trusted: bool,
        session: Arc<BudgetUsage>,
    ) -> Arc<Self> {
        let client = if trusted { AccessClient::unlimited() } else { access.client(peer.address) };
        let access = Arc::clone(access);
        let tokens = tokens.into_iter().map(Presented::new).collect();
        Arc::new(Self {
            access,
            peer,
            tokens,
            trusted,
            session,
            client,
            bad_tokens: AtomicU32::new(0),
            held: AtomicUsize::new(0),
            proof: watch::Sender::new(None),
        })
    }

    /// Returns the session's right to exist.
    ///
    /// # Errors
    /// The session has no such right.
    pub fn admit(self: &Arc<Self>) -> Result<Arc<Rights>, AccessRefusal> {
        let rights = Rights::new(self, Bearer::new(Vec::new()), AskedRight::Session);
        let policy = self.access.policy();
        let checked = match self.trusted {
            true => Ok(()),
            false => policy.check_tokens(&self.tokens, SystemTime::now()),
        };
        self.counted(checked)?;
        self.counted(rights.decide(&policy))?;
        Ok(rights)
    }

    /// Admits a request with its tokens. It has asked for nothing yet. `cost`: number of requests that it counts as. `holds_track`:
    /// whether a track is made for it.
    ///
    /// # Errors
    /// There were too many requests, or a token is not good.
    pub fn request(
        self: &Arc<Self>,
        tokens: Vec<Credential>,
        cost: u64,
        holds_track: bool,
    ) -> Result<(Arc<Rights>, Option<budget::BudgetPlace>), AccessRefusal> {
        let tokens: Vec<_> = tokens.into_iter().map(Presented::new).collect();
        if self.trusted {
            return Ok((Rights::new(self, Bearer::new(tokens), AskedRight::Nothing), None));
        }
        let now = Instant::now();
        self.counted(self.session.request(now, cost))?;
        self.counted(self.client.request(now, cost))?;
        self.check_tokens(&self.access.policy(), &tokens)?;
        let place = match holds_track {
            true => Some(self.counted(self.client.track(&self.session))?),
            false => None,
        };
        Ok((Rights::new(self, Bearer::new(tokens), AskedRight::Nothing), place))
    }

    /// Tokens are costly to check: who goes on with bad ones has to go.
    fn check_tokens(&self, policy: &AccessPolicy, tokens: &[Arc<Presented>]) -> Result<(), AccessRefusal> {
        let checked = self.counted(policy.check_tokens(tokens, SystemTime::now()));
        match checked {
            Err(_) if self.bad_tokens.fetch_add(1, Relaxed) >= MAX_BAD_TOKENS => {
                self.counted(Err(AccessRefusal::Hopeless))
            }
            checked => checked,
        }
    }

    /// Waits until the session has had no right for as long as it may, or another session needs its place. `place` is the place that it
    /// has while it has no right: it is given back and taken again as rights come and go. Calls `proven` when it has shown its first
    /// right.
    pub async fn without_right(
        &self,
        mut place: Option<unproven::UnprovenPlace>,
        proven: impl Fn(),
    ) -> AccessRefusal {
        let mut versions = self.access.versions();
        let mut proofs = self.proof.subscribe();
        let bounds = &self.access.unproven;
        let mut deadline = None;
        let mut is_proven = false;
        loop {
            versions.borrow_and_update();
            proofs.borrow_and_update();
            let until_next = match self.standing() {
                Ok(until) => {
                    (place, deadline) = (None, None);
                    if !std::mem::replace(&mut is_proven, true) {
                        proven();
                    }
                    until
                }
                Err(_) => {
                    place.get_or_insert_with(|| bounds.enter(self.peer.address));
                    deadline.get_or_insert(Clock::now() + bounds.patience());
                    None
                }
            };
            let refusal = tokio::select! {
                () = wait_until(until_next) => continue,
                changed = versions.changed() => match changed {
                    Ok(()) => continue,
                    Err(_) => std::future::pending().await,
                },
                _ = proofs.changed() => continue, // the sender is in `self`
                () = sleep_until(deadline.unwrap_or_else(Clock::now)), if deadline.is_some() => AccessRefusal::Unproven,
                refusal = unproven::displaced(place.as_ref()) => refusal,
            };
            self.access.count(refusal);
            return refusal;
        }
    }

    /// Returns until when the session has a right for sure.
    ///
    /// # Errors
    /// It has none now.
    fn standing(&self) -> Result<Option<SystemTime>, AccessRefusal> {
        if self.trusted {
            return Ok(None);
        }
        let policy = self.access.policy();
        let now = SystemTime::now();
        if let (basis, SessionStanding::Proven) = policy.decide_session(&self.peer, &self.tokens, now)? {
            return Ok(basis.until);
        }
        let shown = match &*self.proof.borrow() {
            Some(proof) => self.decide(&policy, &proof.tokens, &proof.asked).map(|basis| basis.until),
            None => Err(AccessRefusal::NotAllowed),
        };
        if shown.is_err() && self.held.load(Relaxed) > 0 {
            return Ok(Some(now + self.access.unproven.patience()));
        }
        shown
    }

    /// Notes that a request was allowed something by its own tokens. The right that lasts longest is kept.
    fn prove(&self, tokens: Vec<Arc<Presented>>, asked: &AskedRight, until: Option<SystemTime>) {
        if self.trusted {
            return;
        }
        self.proof.send_if_modified(|proof| {
            let lasts = |known: &Proof| match (known.until, until) {
                (Some(known), Some(until)) => known >= until && known > SystemTime::now(),
                (known, _) => known.is_none(),
            };
            let is_newer = !proof.as_ref().is_some_and(lasts);
            if is_newer {
                *proof = Some(Proof { tokens, asked: asked.clone(), until });
            }
            is_newer
        });
    }

    /// Decides on what is asked for with these tokens, and those of the session.
    fn decide(
        &self,
        policy: &AccessPolicy,
        tokens: &[Arc<Presented>],
        asked: &AskedRight,
    ) -> Result<Basis, AccessRefusal> {
        let address = networks::client(self.peer.address);
        match asked {
            _ if self.trusted => Ok(Basis { identity: RightHolder::Upstream, until: None }),
            AskedRight::Nothing => Ok(Basis { identity: RightHolder::Client(address), until: None }),
            AskedRight::Session => {
                policy.decide_session(&self.peer, &self.tokens, SystemTime::now()).map(|(basis, _)| basis)
            }
            AskedRight::Action(action, resource) => {
                let all: Vec<_> = tokens.iter().chain(&self.tokens).cloned().collect();
                policy.decide(&self.peer, &all, *action, resource, SystemTime::now())
            }
        }
    }

    /// Takes what counts as `cost` requests from the budgets of the session, of its client and of its networks. Returns when all have
    /// room for it.
    pub fn reserve(&self, cost: u64) -> Instant {
        let now = Instant::now();
        match self.trusted {
            true => now,
            false => self.session.reserve(now, cost).max(self.client.reserve(now, cost)),
        }
    }

    /// Returns the use by all sessions of its client.
    pub fn client(&self) -> &Arc<AccessClient> {
        &self.client
    }

    /// Returns the peer, as far as its connection tells.
    pub fn peer(&self) -> &SessionPeer {
        &self.peer
    }

    fn counted<T>(&self, result: Result<T, AccessRefusal>) -> Result<T, AccessRefusal> {
        result.inspect_err(|refusal| self.access.count(*refusal))
    }
}

impl Rights {
    fn new(subject: &Arc<SessionSubject>, bearer: Arc<Bearer>, asked: AskedRight) -> Arc<Self> {
        let address = networks::client(subject.peer.address);
        let identity = if subject.trusted { RightHolder::Upstream } else { RightHolder::Client(address) };
        Arc::new(Self {
            subject: Arc::clone(subject),
            bearer,
            asked: Mutex::new(asked),
            identity: Mutex::new(identity),
            changed: watch::Sender::default(),
            over: OnceLock::new(),
        })
    }

    /// Asks for this, in the name of a request that has asked for nothing yet.
    ///
    /// # Errors
    /// It is not allowed, or something was asked for already.
    pub fn ask(&self, action: Action, resource: Resource) -> Result<(), AccessRefusal> {
        let asked = AskedRight::Action(action, resource);
        if !matches!(*self.asked.lock(), AskedRight::Nothing) {
            return Err(AccessRefusal::NotAllowed);
        }
        self.settle(asked)?;
        self.subject.held.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Asks for the same with another resource from now on, as a request does that moves.
    ///
    /// # Errors
    /// It is not allowed; what was asked for before still is.
    pub fn move_to(&self, resource: Resource) -> Result<(), AccessRefusal> {
        let AskedRight::Action(action, _) = *self.asked.lock() else { return Err(AccessRefusal::NotAllowed) };
        self.settle(AskedRight::Action(action, resource))
    }

    /// Decides on `asked`, and only then has [`Self::ended`] see it.
    fn settle(&self, asked: AskedRight) -> Result<(), AccessRefusal> {
        let policy = self.subject.access.policy();
        let tokens = self.bearer.all();
        let basis = self.subject.counted(self.subject.decide(&policy, &tokens, &asked))?;
        self.subject.prove(tokens, &asked, basis.until);
        *self.identity.lock() = basis.identity;
        *self.asked.lock() = asked;
        self.changed.send_replace(());
        Ok(())
    }

    /// Reports whether the same request may do this too, now.
    pub fn permit(&self, action: Action, resource: &Resource) -> bool {
        let policy = self.subject.access.policy();
        let asked = AskedRight::Action(action, resource.clone());
        self.subject.decide(&policy, &self.bearer.all(), &asked).is_ok()
    }

    /// Returns the right to something that follows from this request, for which the request's tokens serve as they are renewed.
    ///
    /// # Errors
    /// It is not allowed.
    pub fn derive(&self, action: Action, resource: Resource) -> Result<Arc<Self>, AccessRefusal> {
        let derived = Self::new(&self.subject, self.bearer.derive(), AskedRight::Nothing);
        derived.ask(action, resource)?;
        Ok(derived)
    }

    /// Adds the tokens of a REQUEST_UPDATE.
    ///
    /// # Errors
    /// A token is not good, or the request may not be updated.
    pub fn update(&self, tokens: Vec<Credential>) -> Result<(), AccessRefusal> {
        let mut tokens: Vec<_> = tokens.into_iter().map(Presented::new).collect();
        let policy = self.subject.access.policy();
        if !self.subject.trusted {
            self.subject.check_tokens(&policy, &tokens)?;
        }
        if tokens.is_empty() {
            tokens.clone_from(&self.bearer.tokens.lock());
        }
        let asked = self.asked.lock().clone();
        if let AskedRight::Action(_, resource) = &asked {
            let update = AskedRight::Action(Action::RequestUpdate, resource.clone());
            let all = [tokens.clone(), self.bearer.inherited()].concat();
            let basis = self.subject.counted(self.subject.decide(&policy, &all, &update))?;
            self.subject.prove(all, &asked, basis.until);
        }
        // The newest instead of all of a long life.
        *self.bearer.tokens.lock() = tokens;
        self.bearer.renewed.send_replace(());
        Ok(())
    }

    /// Ends it now.
    pub fn end(&self, refusal: AccessRefusal) {
        let _ = self.over.set(refusal); // it was over before
        self.changed.send_replace(());
    }

    /// Returns the identity that holds the right.
    pub fn identity(&self) -> RightHolder {
        self.identity.lock().clone()
    }

    /// Returns why the right is over, if it is.
    pub fn expiry_refusal(&self) -> Option<AccessRefusal> {
        self.over.get().copied()
    }

    /// Counts `refusal`, which is not by a rule.
    pub fn count(&self, refusal: AccessRefusal) {
        self.subject.access.count(refusal);
    }

    /// Waits until nothing allows it any more.
    pub async fn ended(&self) -> AccessRefusal {
        let mut versions = self.subject.access.versions();
        let mut renewed = self.bearer.renewed.subscribe();
        let mut changed = self.changed.subscribe();
        loop {
            versions.borrow_and_update();
            renewed.borrow_and_update();
            changed.borrow_and_update();
            if let Some(refusal) = self.expiry_refusal() {
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
                () = wait_until(basis.until) => {}
                changed = versions.changed() => if changed.is_err() {
                    std::future::pending::<()>().await;
                },
                // The senders of both are in `self`.
                _ = renewed.changed() => {}
                _ = changed.changed() => {}
            }
        }
    }

    fn decide(&self, policy: &AccessPolicy) -> Result<Basis, AccessRefusal> {
        let asked = self.asked.lock().clone();
        let basis = self.subject.decide(policy, &self.bearer.all(), &asked)?;
        if !matches!(asked, AskedRight::Nothing) {
            *self.identity.lock() = basis.identity.clone();
        }
        Ok(basis)
    }
}

impl Drop for Rights {
    fn drop(&mut self) {
        if matches!(self.asked.get_mut(), AskedRight::Action(..)) {
            self.subject.held.fetch_sub(1, Relaxed);
        }
    }
}

/// Waits for a time of the wall clock, or a while on the way there.
async fn wait_until(time: Option<SystemTime>) {
    match time {
        Some(time) => {
            let left = time.duration_since(SystemTime::now()).unwrap_or_default();
            sleep(left.min(LONGEST_TIMER)).await;
        }
        None => std::future::pending().await,
    }
}
