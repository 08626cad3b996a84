//! Permissions (rights) that sessions and requests use, and the times at which these permissions end.

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

/// Largest number of requests with bad tokens in one session. The next such request closes the session.
const MAX_BAD_TOKENS: u32 = 16;
/// Longest sleep before the wall clock is read again, since an operator or NTP may set the clock meanwhile.
const LONGEST_TIMER: Duration = Duration::from_secs(3600);

/// The state by which access is decided for one session: its peer, its tokens, and its budgets.
pub struct SessionSubject {
    access: Arc<Access>,
    peer: SessionPeer,
    /// Tokens of the session's URL and SETUP.
    tokens: Vec<Arc<Presented>>,
    /// True if the peer is the configured upstream relay, which may do everything.
    trusted: bool,
    session: Arc<BudgetUsage>,
    client: Arc<AccessClient>,
    /// Number of requests whose tokens were not valid.
    bad_tokens: AtomicU32,
    /// Number of permissions in use: those of requests, and those of actions that follow from a request.
    held: AtomicUsize,
    /// The permission that lasts longest among those that requests have got by their own tokens.
    proof: watch::Sender<Option<Proof>>,
}

/// A permission that a request has got by its own tokens, with these tokens.
struct Proof {
    tokens: Vec<Arc<Presented>>,
    asked: AskedRight,
    until: Option<SystemTime>,
}

/// The permission (right) for a session, or for one action on one namespace or track. It lasts for as long as the
/// policy allows. Only [`Self::move_to`] changes the namespace or track. Other actions that follow from a request have
/// permissions of their own, from [`Self::derive`].
pub struct Rights {
    subject: Arc<SessionSubject>,
    bearer: Arc<Bearer>,
    /// The session, or the action and its namespace or track, that was allowed last. What is not decided yet is never
    /// stored here, since [`Self::ended`] reads this field from another task.
    asked: Mutex<AskedRight>,
    identity: Mutex<RightHolder>,
    /// Notification that the namespace or track has changed, or that the permission has ended.
    changed: watch::Sender<()>,
    over: OnceLock<AccessRefusal>,
}

/// The tokens that a request has brought.
struct Bearer {
    tokens: Mutex<Vec<Arc<Presented>>>,
    /// The tokens of the request from which this action follows. They count in addition to `tokens`.
    parent: Option<Arc<Bearer>>,
    /// Notification to all permissions ([`Rights`]) of one request that the request has new tokens.
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
    /// Makes the state by which access is decided for a session. `tokens` are those of its URL and SETUP. A trusted
    /// peer, such as the upstream relay, needs no permission, and its requests count against no client's budget.
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

    /// Returns the session's permission to stay open.
    ///
    /// # Errors
    /// Fails if the session may not stay open.
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

    /// Admits a request with its tokens. The returned [`Rights`] allow no action until [`Rights::ask`] is called. The
    /// budgets count the request as `cost` requests. `holds_track` is true if the request uses a track, which counts
    /// against the budgets.
    ///
    /// # Errors
    /// Fails if a budget for requests or tracks is used up, or if a token is not valid.
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
        // The session's budget comes first, so that a session over its own limit takes nothing from its client's
        // budget.
        self.counted(self.session.request(now, cost))?;
        self.counted(self.client.request(now, cost))?;
        // Signatures are checked only within the rate limit, because a check costs far more than a count.
        self.check_tokens(&self.access.policy(), &tokens)?;
        let place = match holds_track {
            true => Some(self.counted(self.client.track(&self.session))?),
            false => None,
        };
        Ok((Rights::new(self, Bearer::new(tokens), AskedRight::Nothing), place))
    }

    /// Checks the tokens of a request. Such a check is costly, so if a session sends bad tokens too often, the error is
    /// [`AccessRefusal::Hopeless`], which closes the session.
    fn check_tokens(&self, policy: &AccessPolicy, tokens: &[Arc<Presented>]) -> Result<(), AccessRefusal> {
        let checked = self.counted(policy.check_tokens(tokens, SystemTime::now()));
        match checked {
            Err(_) if self.bad_tokens.fetch_add(1, Relaxed) >= MAX_BAD_TOKENS => {
                self.counted(Err(AccessRefusal::Hopeless))
            }
            checked => checked,
        }
    }

    /// Waits until the session must be closed. The reason is that its peer has been allowed nothing for too long, or
    /// that there are too many such sessions. `place` is the session's entry in the register of such sessions. It is
    /// removed when the peer gets a permission, and made again when the last permission has ended. Calls `proven` once,
    /// when the peer gets its first permission.
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
            // The present values of the watch channels are marked as seen before the decision, so that a change during
            // the decision wakes the loop again.
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
                _ = proofs.changed() => continue, // never an error, since `self` has the sender of `proofs`
                () = sleep_until(deadline.unwrap_or_else(Clock::now)), if deadline.is_some() => AccessRefusal::Unproven,
                refusal = unproven::displaced(place.as_ref()) => refusal,
            };
            self.access.count(refusal);
            return refusal;
        }
    }

    /// Returns the time until which the session's peer certainly has a permission, or `None` if the permission does not
    /// end by itself.
    ///
    /// # Errors
    /// Fails if the peer has no permission now.
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
        // The peer has no other permission any more, but some of its requests are still allowed. Each of these
        // permissions ends by itself, so the session is checked again later.
        if shown.is_err() && self.held.load(Relaxed) > 0 {
            return Ok(Some(now + self.access.unproven.patience()));
        }
        shown
    }

    /// Records a permission that a request has got by its own tokens. Only the permission that lasts longest is stored.
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

    /// Decides whether `asked` (the session, or an action on a resource) is allowed by the given tokens, by the tokens
    /// of the session, or by the peer's address or certificate.
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

    /// Charges `cost` requests to the budgets of the session, of its client and of its networks. Returns the time at
    /// which all of these budgets allow the requests.
    pub fn reserve(&self, cost: u64) -> Instant {
        let now = Instant::now();
        match self.trusted {
            true => now,
            false => self.session.reserve(now, cost).max(self.client.reserve(now, cost)),
        }
    }

    /// Returns the client of the session, with the usage of all the client's sessions.
    pub fn client(&self) -> &Arc<AccessClient> {
        &self.client
    }

    /// Returns the peer, as its connection describes it.
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

    /// Asks for the permission to do `action` on `resource`. A request calls this once.
    ///
    /// # Errors
    /// Fails if the action is not allowed, or if this was called for the request before.
    pub fn ask(&self, action: Action, resource: Resource) -> Result<(), AccessRefusal> {
        let asked = AskedRight::Action(action, resource);
        if !matches!(*self.asked.lock(), AskedRight::Nothing) {
            return Err(AccessRefusal::NotAllowed);
        }
        self.settle(asked)?;
        self.subject.held.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Changes the namespace or track that the permission is for, when the request changes to another one.
    ///
    /// # Errors
    /// Fails if the action is not allowed on the new resource. The right to the previous resource stays.
    pub fn move_to(&self, resource: Resource) -> Result<(), AccessRefusal> {
        let AskedRight::Action(action, _) = *self.asked.lock() else { return Err(AccessRefusal::NotAllowed) };
        self.settle(AskedRight::Action(action, resource))
    }

    /// Decides whether `asked` (the session, or an action on a resource) is allowed, and if so, stores `asked`, so that
    /// [`Self::ended`] decides on it again later.
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

    /// Reports whether the tokens of the request also allow `action` on `resource` at present.
    pub fn permit(&self, action: Action, resource: &Resource) -> bool {
        let policy = self.subject.access.policy();
        let asked = AskedRight::Action(action, resource.clone());
        self.subject.decide(&policy, &self.bearer.all(), &asked).is_ok()
    }

    /// Returns the permission for a further action that follows from this request. The request's tokens count for that
    /// action, too, and so do tokens of later updates of the request.
    ///
    /// # Errors
    /// Fails if the action is not allowed.
    pub fn derive(&self, action: Action, resource: Resource) -> Result<Arc<Self>, AccessRefusal> {
        let derived = Self::new(&self.subject, self.bearer.derive(), AskedRight::Nothing);
        derived.ask(action, resource)?;
        Ok(derived)
    }

    /// Adds the tokens of a REQUEST_UPDATE.
    ///
    /// # Errors
    /// Fails if a token is not valid, or if the request may not be updated.
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
        // New tokens replace the previous ones, so that a request that lives long does not collect tokens.
        *self.bearer.tokens.lock() = tokens;
        self.bearer.renewed.send_replace(());
        Ok(())
    }

    /// Ends the permission now, for the given reason.
    pub fn end(&self, refusal: AccessRefusal) {
        let _ = self.over.set(refusal); // no effect if the right has ended before: the first reason stays
        self.changed.send_replace(());
    }

    /// Returns the identity to which the permission was given.
    pub fn identity(&self) -> RightHolder {
        self.identity.lock().clone()
    }

    /// Returns the reason why the permission has ended, or `None` while it lasts.
    pub fn expiry_refusal(&self) -> Option<AccessRefusal> {
        self.over.get().copied()
    }

    /// Counts a refusal that the caller has decided on by itself.
    pub fn count(&self, refusal: AccessRefusal) {
        self.subject.access.count(refusal);
    }

    /// Waits until the permission ends, and returns the reason.
    pub async fn ended(&self) -> AccessRefusal {
        let mut versions = self.subject.access.versions();
        let mut renewed = self.bearer.renewed.subscribe();
        let mut changed = self.changed.subscribe();
        loop {
            // The present values of the watch channels are marked as seen before the decision, so that a change during
            // the decision wakes the loop again.
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
                // `changed()` returns no error, since `self` has the senders of both channels.
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

/// Waits until a time of the wall clock, but at most for [`LONGEST_TIMER`]. The caller then decides again, and waits
/// again if needed.
async fn wait_until(time: Option<SystemTime>) {
    match time {
        Some(time) => {
            let left = time.duration_since(SystemTime::now()).unwrap_or_default();
            sleep(left.min(LONGEST_TIMER)).await;
        }
        None => std::future::pending().await,
    }
}
