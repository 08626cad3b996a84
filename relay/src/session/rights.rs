//! Authorises the peer of a session: its SETUP, its requests, and their updates.

use std::{
    sync::{Arc, OnceLock},
    time::Instant,
};

use millrace_moq::{
    Message, Namespace, Parameters, TrackName,
    message::{FetchKind, RequestError, RequestUpdate, SetupOptions},
    token::RegisteredTokens,
    tracks::account::Account,
};
use millrace_transport::Connection;
use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;

use super::bounds::{cost, parameters};
use crate::wire::SessionError;
use millrace_access::{
    self, Access, AccessRefusal, SessionPeer,
    budget::{BudgetPlace, BudgetUsage},
    certificate,
    client::AccessClient,
    grant::{Action, Resource},
    rights::{Rights, SessionSubject},
    unproven,
};

/// The identity of one session's peer, its access rights, and its use of the request budgets.
pub struct SessionRights {
    access: Arc<Access>,
    usage: Arc<BudgetUsage>,
    registered: Mutex<RegisteredTokens>,
    /// The account that the cache charges with the groups that the peer publishes.
    account: OnceLock<Arc<Account>>,
    /// The identity and access rights of the session's peer, once SETUP has arrived.
    admitted: OnceLock<(Arc<SessionSubject>, Arc<Rights>)>,
    /// The namespaces that the peer publishes, each with the access right that allows it.
    namespaces: Mutex<Vec<(Namespace, Arc<Rights>)>>,
}

/// A request that was admitted, with its access rights and its reservation in the request budgets.
pub struct Admitted {
    pub rights: Arc<Rights>,
    _place: Option<BudgetPlace>,
}

/// The peer's right to publish a namespace. Dropping it removes the right.
pub struct PublishingRight<'a> {
    authority: &'a SessionRights,
    rights: Arc<Rights>,
}

impl Drop for PublishingRight<'_> {
    fn drop(&mut self) {
        self.authority.namespaces.lock().retain(|(_, rights)| !Arc::ptr_eq(rights, &self.rights));
    }
}

impl SessionRights {
    pub fn new(access: &Arc<Access>) -> Self {
        Self {
            access: Arc::clone(access),
            usage: access.session(),
            registered: Mutex::new(RegisteredTokens::new(access.limits().token_cache)),
            account: OnceLock::new(),
            admitted: OnceLock::new(),
            namespaces: Mutex::default(),
        }
    }

    /// Returns the size that our SETUP announces as MAX_AUTH_TOKEN_CACHE_SIZE, in bytes.
    pub fn token_cache(&self) -> u64 {
        self.access.limits().token_cache
    }

    /// Returns how many subscriptions of the session to one track may be open at a time.
    pub fn same_track(&self) -> u64 {
        self.access.limits().same_track
    }

    /// Reserves `cost` requests in the peer's request budgets. Returns the time from which the budgets admit these
    /// requests.
    pub fn reserve(&self, cost: u64) -> Instant {
        self.admitted.get().map_or_else(Instant::now, |(subject, _)| subject.reserve(cost))
    }

    /// Returns the counters of the session's use of its request budgets.
    pub fn usage(&self) -> &BudgetUsage {
        &self.usage
    }

    /// Returns the client that the session belongs to. `None` before SETUP has arrived.
    pub fn client(&self) -> Option<&Arc<AccessClient>> {
        self.admitted.get().map(|(subject, _)| subject.client())
    }

    /// Returns the account that the cache charges with the groups that the peer publishes.
    pub fn account(&self) -> &Arc<Account> {
        self.account.get_or_init(|| {
            let account = self.client().map(|client| Account::from_share(Arc::clone(&client.cache)));
            Arc::new(account.unwrap_or_default())
        })
    }

    /// Returns the identity of the peer. `None` before SETUP has arrived.
    pub fn identity(&self) -> Option<millrace_access::policy::RightHolder> {
        self.admitted.get().map(|(_, rights)| rights.identity())
    }

    /// Decides by its SETUP whether the peer may have a session. The returned rights contain the time at which the
    /// peer's session has to end.
    ///
    /// # Errors
    /// Returns an error with which the session has to be closed.
    pub fn admit(
        &self,
        connection: &Connection,
        is_upstream: bool,
        setup: &SetupOptions,
    ) -> Result<Arc<Rights>, SessionError> {
        // Tokens are in options of SETUP, or in the query of the URL path that SETUP contains.
        let mut tokens = self.registered.lock().resolve_setup_tokens(&setup.authorization_tokens)?;
        let (path, in_url) =
            millrace_access::token::credentials_from_url(setup.path.as_deref().unwrap_or_default());
        tokens.extend(in_url);
        let quic = &connection.quic;
        let peer = SessionPeer {
            // Rules match IPv4 addresses that are mapped into IPv6 as IPv4 addresses.
            address: quic.remote_address().ip().to_canonical(),
            certificate: quic.peer_identity().and_then(|identity| {
                let chain = identity.downcast::<Vec<CertificateDer<'static>>>().ok()?;
                // The first certificate of the chain is the client's own.
                chain.first().map(certificate::read)
            }),
            path: path.to_owned(),
            authority: setup.authority.clone(),
        };
        let usage = Arc::clone(&self.usage);
        let subject = SessionSubject::new(&self.access, peer, tokens, is_upstream, usage);
        let rights = subject.admit().map_err(refused)?;
        let _ = self.admitted.set((subject, Arc::clone(&rights))); // SETUP arrives only once, so no earlier value is replaced.
        Ok(rights)
    }

    /// Counts an access refusal that was not sent as the answer to a request.
    pub fn count(&self, refusal: AccessRefusal) {
        self.access.count(refusal);
    }

    /// Waits until the session has to be closed because it has not proved an access right in time
    /// ([`SessionSubject::without_right`]). Calls `proven` when it has proved one.
    pub async fn without_right(
        &self,
        connection: &Connection,
        place: Option<unproven::UnprovenPlace>,
        proven: impl Fn(),
    ) -> SessionError {
        let Some((subject, _)) = self.admitted.get() else { return SessionError::violation("no SETUP") };
        let proven = || {
            connection.share_receive_window(Arc::clone(&subject.client().receive));
            let shares = self.access.kernel_streams(subject.client());
            connection.offload(|offload| offload.set_shares(shares));
            proven();
        };
        refused(subject.without_right(place, proven).await)
    }

    /// Admits a request of the peer, before any state is created for it. An error in the inner `Result` is the answer
    /// that refuses the request.
    ///
    /// # Errors
    /// Returns an error if the session has to be closed.
    pub fn request(&self, message: &Message) -> Result<Result<Admitted, RequestError>, SessionError> {
        let none = Parameters::default();
        let tokens = &parameters(message).unwrap_or(&none).authorization_tokens;
        // A token is registered even if its request is refused, since later requests may refer to it by its alias.
        let tokens = self.registered.lock().resolve_request_tokens(tokens)?;
        let Some((subject, _)) = self.admitted.get() else {
            return Err(SessionError::violation("a request before SETUP"));
        };
        let asked = asked_action(message);
        let holds_track = matches!(message, Message::Fetch(_))
            || asked.as_ref().is_some_and(|(_, resource)| resource.track.is_some());
        let admitted = subject.request(tokens, cost(message), holds_track).and_then(|(rights, place)| {
            if let Some((action, resource)) = asked {
                rights.ask(action, resource)?;
            }
            Ok(Admitted { rights, _place: place })
        });
        match admitted {
            Err(AccessRefusal::Hopeless) => Err(refused(AccessRefusal::Hopeless)),
            admitted => Ok(admitted.map_err(request_error)),
        }
    }

    /// Checks the tokens of a REQUEST_UPDATE for a request with `rights`. If they are refused, the request ends.
    pub fn update(&self, rights: &Rights, update: &RequestUpdate) -> Result<(), SessionError> {
        let tokens =
            self.registered.lock().resolve_request_tokens(&update.parameters.authorization_tokens)?;
        rights.update(tokens).map_err(|refusal| {
            rights.end(refusal);
            SessionError::Lost(format!("the update is refused: {refusal}"))
        })
    }

    /// Records that the peer publishes `namespace` with the access rights `rights`.
    pub fn publishing(&self, namespace: &Namespace, rights: &Arc<Rights>) -> PublishingRight<'_> {
        self.namespaces.lock().push((namespace.clone(), Arc::clone(rights)));
        PublishingRight { authority: self, rights: Arc::clone(rights) }
    }

    /// Returns the peer's right to publish a track that the relay subscribes to.
    ///
    /// # Errors
    /// Returns an error if the peer publishes no namespace that covers the track.
    pub fn may_serve(&self, track: &TrackName) -> Result<Arc<Rights>, RequestError> {
        let below: Vec<_> = {
            let namespaces = self.namespaces.lock();
            let above = namespaces.iter().filter(|(namespace, _)| namespace.is_prefix_of(track.namespace()));
            above.map(|(_, rights)| Arc::clone(rights)).collect()
        };
        // The upstream relay may publish every track.
        let own = self.admitted.get().map(|(_, rights)| rights);
        let own = own.filter(|rights| rights.identity() == millrace_access::policy::RightHolder::Upstream);
        let resource = Resource::track(track);
        let mut refusal = AccessRefusal::NotAllowed;
        for rights in below.iter().chain(own) {
            match rights.derive(Action::PublishNamespace, resource.clone()) {
                Ok(derived) => return Ok(derived),
                Err(refused) => refusal = refused,
            }
        }
        Err(request_error(refusal))
    }
}

/// Converts an access refusal into the error that a request is answered with.
pub fn request_error(refusal: AccessRefusal) -> RequestError {
    RequestError::new(refusal.request_code(), refusal.to_string())
}

fn refused(refusal: AccessRefusal) -> SessionError {
    SessionError::Refused { code: refusal.session_code(), reason: refusal.to_string() }
}

/// Returns the error that closes a session whose right has expired or was revoked.
pub fn session_over(refusal: AccessRefusal) -> SessionError {
    refused(refusal)
}

/// Returns the action and the resource that a request needs a right for. `None` for a joining FETCH, whose subscription
/// names the track.
fn asked_action(message: &Message) -> Option<(Action, Resource)> {
    Some(match message {
        Message::Subscribe(message) => (Action::Subscribe, Resource::track(&message.track)),
        Message::Publish(message) => (Action::Publish, Resource::track(&message.track)),
        Message::TrackStatus(message) => (Action::TrackStatus, Resource::track(&message.track)),
        Message::Fetch(message) => match &message.kind {
            FetchKind::Standalone { track, .. } => (Action::Fetch, Resource::track(track)),
            _ => return None,
        },
        Message::PublishNamespace(message) => {
            (Action::PublishNamespace, Resource::namespace(&message.namespace))
        }
        Message::SubscribeNamespace(message) => {
            (Action::SubscribeNamespace, Resource::namespace(&message.prefix))
        }
        Message::SubscribeTracks(message) => (Action::SubscribeTracks, Resource::namespace(&message.prefix)),
        _ => return None,
    })
}
