//! The peer before the authoriser: its SETUP, its requests, what follows from them.

use std::{
    sync::{Arc, OnceLock},
    time::Instant,
};

use millrace_moq::{
    Message, Namespace, Parameters, TrackName,
    message::{FetchKind, RequestError, RequestUpdate, Setup},
    token::Registered,
    tracks::account::Account,
};
use millrace_transport::Connection;
use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;

use super::bounds::{cost, parameters};
use crate::{
    access::{
        self, Access, Peer, Refusal,
        budget::{Place, Usage},
        certificate,
        client::Client,
        grant::{Action, Resource},
        rights::{Rights, Subject},
        unproven,
    },
    wire::SessionError,
};

/// Who the peer of one session is, and what it uses.
pub struct Authority {
    access: Arc<Access>,
    usage: Arc<Usage>,
    registered: Mutex<Registered>,
    /// What the peer publishes, in the cache.
    account: OnceLock<Arc<Account>>,
    /// Once SETUP has come.
    admitted: OnceLock<(Arc<Subject>, Arc<Rights>)>,
    /// Namespaces that it publishes, each with the right to.
    namespaces: Mutex<Vec<(Namespace, Arc<Rights>)>>,
}

/// A request that was let in.
pub struct Admitted {
    pub rights: Arc<Rights>,
    _place: Option<Place>,
}

/// A namespace that the peer may publish, until this is dropped.
pub struct Publishing<'a> {
    authority: &'a Authority,
    rights: Arc<Rights>,
}

impl Drop for Publishing<'_> {
    fn drop(&mut self) {
        self.authority.namespaces.lock().retain(|(_, rights)| !Arc::ptr_eq(rights, &self.rights));
    }
}

impl Authority {
    pub fn new(access: &Arc<Access>) -> Self {
        Self {
            access: Arc::clone(access),
            usage: access.session(),
            registered: Mutex::new(Registered::new(access.limits().token_cache)),
            account: OnceLock::new(),
            admitted: OnceLock::new(),
            namespaces: Mutex::default(),
        }
    }

    /// MAX_AUTH_TOKEN_CACHE_SIZE.
    pub fn token_cache(&self) -> u64 {
        self.access.limits().token_cache
    }

    /// How many subscriptions the session may have to one track at a time.
    pub fn same_track(&self) -> u64 {
        self.access.limits().same_track
    }

    /// Takes what counts as `cost` requests from the budgets of the peer. Returns when they have room for it.
    pub fn reserve(&self, cost: u64) -> Instant {
        self.admitted.get().map_or_else(Instant::now, |(subject, _)| subject.reserve(cost))
    }

    /// What the session uses.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// Whose session it is; `None` before its SETUP.
    pub fn client(&self) -> Option<&Arc<Client>> {
        self.admitted.get().map(|(subject, _)| subject.client())
    }

    /// What the peer's groups take up in the cache.
    pub fn account(&self) -> &Arc<Account> {
        self.account.get_or_init(|| {
            let account = self.client().map(|client| Account::of(Arc::clone(&client.cache)));
            Arc::new(account.unwrap_or_default())
        })
    }

    /// As whom it was let in; `None` before its SETUP.
    pub fn identity(&self) -> Option<access::policy::Identity> {
        self.admitted.get().map(|(_, rights)| rights.identity())
    }

    /// The peer's SETUP has come: whether it may have a session, and for how long.
    ///
    /// # Errors
    /// What to close the session with.
    pub fn admit(
        &self,
        connection: &Connection,
        is_upstream: bool,
        setup: &Setup,
    ) -> Result<Arc<Rights>, SessionError> {
        let mut tokens = self.registered.lock().of_setup(&setup.authorization_tokens)?;
        let (path, in_url) = access::token::of_url(setup.path.as_deref().unwrap_or_default());
        tokens.extend(in_url);
        let quic = &connection.quic;
        let peer = Peer {
            address: quic.remote_address().ip().to_canonical(),
            certificate: quic.peer_identity().and_then(|identity| {
                let chain = identity.downcast::<Vec<CertificateDer<'static>>>().ok()?;
                chain.first().map(certificate::read)
            }),
            path: path.to_owned(),
            authority: setup.authority.clone(),
        };
        let usage = Arc::clone(&self.usage);
        let subject = Subject::new(&self.access, peer, tokens, is_upstream, usage);
        let rights = subject.admit().map_err(refused)?;
        let _ = self.admitted.set((subject, Arc::clone(&rights))); // there is one SETUP
        Ok(rights)
    }

    /// Counts `refusal`, which no request has met with.
    pub fn count(&self, refusal: Refusal) {
        self.access.count(refusal);
    }

    /// Waits until the session is to be closed because it has no right: see [`Subject::without_right`]. Calls `proven` as soon as it has
    /// shown one.
    pub async fn without_right(
        &self,
        connection: &Connection,
        place: Option<unproven::Place>,
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

    /// A request of the peer; asked before anything is made for it. The inner error is what it is refused with.
    ///
    /// # Errors
    /// What to close the session with.
    pub fn request(&self, message: &Message) -> Result<Result<Admitted, RequestError>, SessionError> {
        let none = Parameters::default();
        let tokens = &parameters(message).unwrap_or(&none).authorization_tokens;
        // Registered whatever becomes of the request.
        let tokens = self.registered.lock().of_request(tokens)?;
        let Some((subject, _)) = self.admitted.get() else {
            return Err(SessionError::violation("a request before SETUP"));
        };
        let asked = asked(message);
        let holds_track = matches!(message, Message::Fetch(_))
            || asked.as_ref().is_some_and(|(_, resource)| resource.track.is_some());
        let admitted = subject.request(tokens, cost(message), holds_track).and_then(|(rights, place)| {
            if let Some((action, resource)) = asked {
                rights.ask(action, resource)?;
            }
            Ok(Admitted { rights, _place: place })
        });
        match admitted {
            Err(Refusal::Hopeless) => Err(refused(Refusal::Hopeless)),
            admitted => Ok(admitted.map_err(request_error)),
        }
    }

    /// REQUEST_UPDATE of a request that has `rights`.
    pub fn update(&self, rights: &Rights, update: &RequestUpdate) -> Result<(), SessionError> {
        let tokens = self.registered.lock().of_request(&update.parameters.authorization_tokens)?;
        rights.update(tokens).map_err(|refusal| {
            rights.end(refusal);
            SessionError::Lost(format!("the update is refused: {refusal}"))
        })
    }

    /// The peer publishes `namespace`.
    pub fn publishing(&self, namespace: &Namespace, rights: &Arc<Rights>) -> Publishing<'_> {
        self.namespaces.lock().push((namespace.clone(), Arc::clone(rights)));
        Publishing { authority: self, rights: Arc::clone(rights) }
    }

    /// The right to be asked for a track.
    ///
    /// # Errors
    /// The peer publishes no namespace in which it may publish this.
    pub fn may_serve(&self, track: &TrackName) -> Result<Arc<Rights>, RequestError> {
        let below: Vec<_> = {
            let namespaces = self.namespaces.lock();
            let above = namespaces.iter().filter(|(namespace, _)| namespace.is_prefix_of(track.namespace()));
            above.map(|(_, rights)| Arc::clone(rights)).collect()
        };
        // The upstream relay is asked for everything.
        let own = self.admitted.get().map(|(_, rights)| rights);
        let own = own.filter(|rights| rights.identity() == access::policy::Identity::Upstream);
        let resource = Resource::track(track);
        let mut refusal = Refusal::NotAllowed;
        for rights in below.iter().chain(own) {
            match rights.derive(Action::PublishNamespace, resource.clone()) {
                Ok(derived) => return Ok(derived),
                Err(refused) => refusal = refused,
            }
        }
        Err(request_error(refusal))
    }
}

/// What becomes of a request that is refused.
pub fn request_error(refusal: Refusal) -> RequestError {
    RequestError::new(refusal.request_code(), refusal.to_string())
}

fn refused(refusal: Refusal) -> SessionError {
    SessionError::Refused { code: refusal.session_code(), reason: refusal.to_string() }
}

/// The session's right is over.
pub fn session_over(refusal: Refusal) -> SessionError {
    refused(refusal)
}

/// What a request is about; `None` for a joining FETCH, which says so by its subscription.
fn asked(message: &Message) -> Option<(Action, Resource)> {
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
