//! Decisions: reports whether rules, tokens and certificates allow a peer to have a session or to do an action.

use std::{
    fmt::{self, Write as _},
    net::IpAddr,
    sync::Arc,
    time::SystemTime,
};

use millrace_base::networks;
use millrace_moq::token::Credential;
use parking_lot::Mutex;

use super::{
    grant::{Action, Grant, Resource},
    pattern::{self, Pattern},
    refusal::{AccessRefusal, TokenError},
    rules::{AccessRule, CertificateName, Principal, SessionPeer},
    token::{self, Requirements},
};

/// Largest number of tokens of one SETUP or request. The limit is small, since each token costs the check of a
/// signature.
const MAX_TOKENS: usize = 8;

/// Rules and requirements that decide about requests.
#[derive(Clone, Debug, Default)]
pub struct AccessPolicy {
    rules: Vec<AccessRule>,
    /// Requirements that tokens have to meet.
    pub tokens: Requirements,
    /// True if the root certificates for clients' certificates cannot be read. Then no client certificate gives a
    /// right.
    pub doubts_certificates: bool,
    /// Number of the policy, which grows with each new policy of the relay. A token whose signature was checked with
    /// one policy's keys is checked again after the policy has changed.
    pub(super) version: u64,
}

/// The identity to which a permission was given. All publishers of a track must have the same identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RightHolder {
    /// The configured upstream relay.
    Upstream,
    /// The relays of the cluster, which count as one publisher.
    Cluster,
    /// The holder of a token.
    Token {
        /// The issuer of the token (`iss`).
        issuer: Option<String>,
        /// The peer that the token identifies.
        holder: TokenHolder,
    },
    /// A name in the client's certificate.
    Certificate(CertificateName),
    /// A client's IPv4 address or IPv6 /64.
    Client(IpAddr),
}

/// The peer that a token identifies: the token's subject or, without a subject, whoever presents this token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenHolder {
    /// The token's subject.
    Subject(String),
    /// The token's ID, if it names no subject.
    Id(String),
    /// The token's SHA-256, if it has neither a subject nor an ID.
    Digest([u8; 32]),
}

impl fmt::Display for RightHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Upstream => f.write_str("upstream"),
            Self::Cluster => f.write_str("cluster"),
            Self::Token { issuer: Some(issuer), holder } => write!(f, "token:{issuer}/{holder}"),
            Self::Token { issuer: None, holder } => write!(f, "token:{holder}"),
            Self::Certificate(name) => write!(f, "cert:{name}"),
            Self::Client(address) => write!(f, "{address}"),
        }
    }
}

/// Writes the peer that a token identifies. Different peers have different texts: `#` begins a token's ID, `##` its
/// digest, and a subject begins with neither, since `#` is escaped.
impl fmt::Display for TokenHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Subject(subject) => escaped(subject, f),
            Self::Id(id) => {
                f.write_str("#")?;
                escaped(id, f)
            }
            Self::Digest(digest) => {
                f.write_str("##")?;
                digest.iter().take(8).try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
    }
}

/// Writes a name from a token, with `/` as `%2F`, `#` as `%23` and `%` as `%25`.
fn escaped(name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    name.chars().try_for_each(|letter| match letter {
        '/' | '#' | '%' => write!(f, "%{:02X}", u32::from(letter)),
        other => f.write_char(other),
    })
}

/// The result of an access decision: who was given the permission, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Basis {
    /// The identity to which the permission was given.
    pub identity: RightHolder,
    /// The latest time at which the permission ends. `None`: it does not expire.
    pub until: Option<SystemTime>,
}

/// Whether a session's peer has shown that it may publish or subscribe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionStanding {
    /// The peer has shown, by a token, its certificate or its address, that it may publish or subscribe.
    Proven,
    /// The peer has not shown yet that it may publish or subscribe, but its requests may have tokens that do.
    Unproven,
}

/// A token as a peer has sent it, and its content as last verified with the keys of a policy.
#[derive(Debug)]
pub struct Presented {
    credential: Credential,
    opened: Mutex<Option<OpenedToken>>,
}

/// The version of a policy, and the content of a token whose signature was checked with this policy's keys.
type OpenedToken = (u64, Result<Arc<Grant>, TokenError>);

impl Presented {
    /// Stores a token. Its signature is checked when the token is first used.
    pub fn new(credential: Credential) -> Arc<Self> {
        Arc::new(Self { credential, opened: Mutex::new(None) })
    }

    /// Returns the token as the peer has sent it.
    pub fn credential(&self) -> &Credential {
        &self.credential
    }

    /// Returns the token's content, if the token is valid at `now`. The signature is checked once for each policy, and
    /// the claims at each call, since time passes.
    pub fn grant(&self, policy: &AccessPolicy, now: SystemTime) -> Result<Arc<Grant>, TokenError> {
        let mut opened = self.opened.lock();
        let known = opened.as_ref().filter(|(version, _)| *version == policy.version);
        let grant = match known {
            Some((_, grant)) => grant.clone(),
            None => {
                let grant = token::open(&self.credential, &policy.tokens.keys).map(Arc::new);
                *opened = Some((policy.version, grant.clone()));
                grant
            }
        }?;
        drop(opened);
        policy.tokens.check_claims(&grant, now)?;
        Ok(grant)
    }

    fn identity(&self, grant: &Grant) -> RightHolder {
        let holder = match (&grant.subject, &grant.id) {
            (Some(subject), _) => TokenHolder::Subject(subject.clone()),
            (None, Some(id)) => TokenHolder::Id(id.clone()),
            (None, None) => {
                let digest = ring::digest::digest(&ring::digest::SHA256, &self.credential.value);
                TokenHolder::Digest(digest.as_ref().try_into().unwrap_or_default()) // SHA-256 has 32 bytes
            }
        };
        RightHolder::Token { issuer: grant.issuer.clone(), holder }
    }
}

impl AccessPolicy {
    /// Makes a policy. `certificates` is true if the settings name root certificates for clients' certificates.
    ///
    /// Without `rules`, a token allows what it says if there are keys, and any verified certificate allows everything
    /// if `certificates` is true. Without rules, keys and certificates, the relay is open. A relay whose settings name
    /// files of keys or root certificates stays closed even if these files are missing.
    pub fn new(rules: Vec<AccessRule>, tokens: Requirements, certificates: bool) -> Self {
        let mut policy = Self { rules, tokens, doubts_certificates: false, version: 0 };
        if policy.rules.is_empty() {
            let certificate = certificates.then_some(Principal::Certificate(None));
            let token = policy.reads_tokens().then_some(Principal::Token);
            let all: Vec<_> = token.into_iter().chain(certificate).collect();
            if !all.is_empty() {
                let publish = all.clone();
                let subscribe = all;
                let namespace = Pattern::any();
                policy.rules.push(AccessRule { namespace, publish, subscribe, path: None, authority: None });
            }
        }
        policy
    }

    /// Reports whether every client may do everything.
    pub fn is_open(&self) -> bool {
        self.rules.is_empty()
    }

    /// Returns the number of rules.
    pub fn rule_count(&self) -> usize {
        self.rules.len()
    }

    /// Reports whether the relay reads clients' tokens: only if the settings name keys.
    pub fn reads_tokens(&self) -> bool {
        self.tokens.wants_keys || !self.tokens.keys.is_empty()
    }

    /// Returns `Some` if the rule's `principal` includes the peer without regard to tokens. The value is the name in
    /// the peer's certificate that matched, or `None` if no certificate was needed.
    fn is(
        &self,
        principal: &Principal,
        peer: &SessionPeer,
        now: SystemTime,
    ) -> Option<Option<CertificateName>> {
        match principal {
            Principal::Certificate(_) if self.doubts_certificates => None,
            other => other.is(peer, now),
        }
    }

    /// Checks that all of `tokens` are valid, and that none is repeated.
    ///
    /// # Errors
    /// Fails if there are too many tokens, or if one is repeated or not valid. The error is that of the first such
    /// token.
    pub fn check_tokens(&self, tokens: &[Arc<Presented>], now: SystemTime) -> Result<(), AccessRefusal> {
        if tokens.len() > MAX_TOKENS {
            return Err(AccessRefusal::Many);
        }
        for (nth, token) in tokens.iter().enumerate() {
            if tokens[..nth].iter().any(|before| before.credential == token.credential) {
                return Err(AccessRefusal::Repeated);
            }
            if self.reads_tokens() {
                token.grant(self, now)?;
            }
        }
        Ok(())
    }

    /// Decides whether `peer` with `tokens` may have a session, and whether it has already shown that it may publish or
    /// subscribe.
    ///
    /// # Errors
    /// Fails if the peer could never do anything in the session, or if the tokens that it relies on are not valid.
    pub fn decide_session(
        &self,
        peer: &SessionPeer,
        tokens: &[Arc<Presented>],
        now: SystemTime,
    ) -> Result<(Basis, SessionStanding), AccessRefusal> {
        let client = || Basis { identity: RightHolder::Client(networks::client(peer.address)), until: None };
        if self.is_open() {
            return Ok((client(), SessionStanding::Proven));
        }
        let resource = Resource::session();
        let by_token = self.token_basis(peer, tokens, Action::ClientSetup, &resource, now);
        let rules = || self.rules.iter().filter(|rule| rule.is_for(peer));
        let mut principals = rules().flat_map(|rule| rule.publish.iter().chain(&rule.subscribe));
        let takes_tokens = self.reads_tokens() && principals.clone().any(|one| *one == Principal::Token);
        if takes_tokens && let Ok(basis) = by_token {
            return Ok((basis, SessionStanding::Proven));
        }
        if let Some(name) = principals.find_map(|one| self.is(one, peer, now)) {
            return Ok((self.connection_basis(peer, name), SessionStanding::Proven));
        }
        match by_token {
            // The peer has sent no token yet, and its requests may bring some.
            Err(AccessRefusal::NotAllowed) if takes_tokens && tokens.is_empty() => {
                Ok((client(), SessionStanding::Unproven))
            }
            Err(refusal) if takes_tokens => Err(refusal),
            _ => Err(AccessRefusal::NotAllowed),
        }
    }

    /// Decides whether `peer` with `tokens` may do `action` on `resource`.
    ///
    /// # Errors
    /// Fails if no rule, token or certificate allows the action.
    pub fn decide(
        &self,
        peer: &SessionPeer,
        tokens: &[Arc<Presented>],
        action: Action,
        resource: &Resource,
        now: SystemTime,
    ) -> Result<Basis, AccessRefusal> {
        if self.is_open() {
            return Ok(Basis { identity: RightHolder::Client(networks::client(peer.address)), until: None });
        }
        let applies = |rule: &&AccessRule| rule.is_for(peer) && rule.namespace.matches(&resource.namespace);
        let principals: Vec<&Principal> = match action {
            // A rule that allows an action also allows updates of its request.
            Action::RequestUpdate => {
                let rules = self.rules.iter().filter(applies);
                rules.flat_map(|rule| rule.publish.iter().chain(&rule.subscribe)).collect()
            }
            _ => self.rules.iter().filter(applies).flat_map(|rule| rule.principals(action)).collect(),
        };
        let mut refusal = AccessRefusal::NotAllowed;
        if principals.contains(&&Principal::Token) {
            match self.token_basis(peer, tokens, action, resource, now) {
                Ok(basis) => return Ok(basis),
                Err(refused) => refusal = refused,
            }
        }
        // A certificate's name identifies a peer better than an address, so rules for certificates are preferred.
        let mut found: Vec<_> = principals.iter().filter_map(|one| self.is(one, peer, now)).collect();
        found.sort_by_key(Option::is_none);
        found.into_iter().next().map(|name| self.connection_basis(peer, name)).ok_or(refusal)
    }

    fn connection_basis(&self, peer: &SessionPeer, name: Option<CertificateName>) -> Basis {
        match name {
            Some(name) => {
                let until = peer.certificate.as_ref().and_then(|certificate| certificate.not_after);
                Basis { identity: RightHolder::Certificate(name), until }
            }
            None => Basis { identity: RightHolder::Client(networks::client(peer.address)), until: None },
        }
    }

    /// Returns the decision based on the token that allows the action for longest.
    fn token_basis(
        &self,
        peer: &SessionPeer,
        tokens: &[Arc<Presented>],
        action: Action,
        resource: &Resource,
        now: SystemTime,
    ) -> Result<Basis, AccessRefusal> {
        let mut refusal = AccessRefusal::NotAllowed;
        let mut best: Option<Basis> = None;
        for token in tokens {
            match token.grant(self, now) {
                Ok(grant) if grant.allows(action, resource) && is_at_root(&grant, peer) => {
                    let basis = Basis { identity: token.identity(&grant), until: grant.expires };
                    let longer = |best: &Basis| {
                        best.until.is_some_and(|until| basis.until.is_none_or(|other| other > until))
                    };
                    if best.as_ref().is_none_or(longer) {
                        best = Some(basis);
                    }
                }
                Ok(_) => {}
                Err(error) => refusal = error.into(),
            }
        }
        best.ok_or(refusal)
    }
}

/// Reports whether the connection's path is equal to the JWT's `root`, below it or above it.
fn is_at_root(grant: &Grant, peer: &SessionPeer) -> bool {
    let Some(root) = &grant.root else { return true };
    let path = pattern::path(&peer.path);
    // `zip` ends with the shorter of the two, so the path may be above or below the root.
    path.iter().zip(root).all(|(one, other)| one == other)
}
