//! Decisions: whether rules and tokens let somebody do something.

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
    refusal::{Refusal, TokenError},
    rules::{CertificateName, Peer, Principal, Rule},
    token::{self, Requirements},
};

/// Tokens of one SETUP or request: each is a signature to check.
const MAX_TOKENS: usize = 8;

/// Who may do what.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    rules: Vec<Rule>,
    pub tokens: Requirements,
    /// The roots of clients' certificates cannot be read: no certificate makes anybody anything.
    pub doubts_certificates: bool,
    /// Tells policies of a relay apart.
    pub(super) version: u64,
}

/// Who a right is given to; what publishers of one track have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// The configured upstream relay.
    Upstream,
    Token {
        issuer: Option<String>,
        holder: Holder,
    },
    Certificate(CertificateName),
    /// A client's address, or its /64.
    Client(IpAddr),
}

/// The party that a token of an issuer was made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    Subject(String),
    /// The token's ID, if it names no subject.
    Id(String),
    /// The token's SHA-256, if it has neither.
    Digest([u8; 32]),
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Upstream => f.write_str("upstream"),
            Self::Token { issuer: Some(issuer), holder } => write!(f, "token:{issuer}/{holder}"),
            Self::Token { issuer: None, holder } => write!(f, "token:{holder}"),
            Self::Certificate(name) => write!(f, "cert:{name}"),
            Self::Client(address) => write!(f, "{address}"),
        }
    }
}

/// Writes what comes behind the last `/` of an identity: of two that differ, the texts differ.
impl fmt::Display for Holder {
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

/// Writes a name of a token, `%2F` for `/`, `%23` for `#` and `%25` for `%`.
fn escaped(name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    name.chars().try_for_each(|letter| match letter {
        '/' | '#' | '%' => write!(f, "%{:02X}", u32::from(letter)),
        other => f.write_char(other),
    })
}

/// What a right rests on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Basis {
    pub identity: Identity,
    pub until: Option<SystemTime>,
}

/// Whether a session has shown a right to something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It has.
    Proven,
    /// Its requests may yet, by tokens of their own.
    Unproven,
}

/// A token as a peer has presented it, and what it says under the policy that was asked last.
#[derive(Debug)]
pub struct Presented {
    credential: Credential,
    opened: Mutex<Option<Opened>>,
}

/// What a token says under the policy of this version.
type Opened = (u64, Result<Arc<Grant>, TokenError>);

impl Presented {
    pub fn new(credential: Credential) -> Arc<Self> {
        Arc::new(Self { credential, opened: Mutex::new(None) })
    }

    pub fn credential(&self) -> &Credential {
        &self.credential
    }

    /// What it allows now. Its signature is checked once for each policy.
    pub fn grant(&self, policy: &Policy, now: SystemTime) -> Result<Arc<Grant>, TokenError> {
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

    fn identity(&self, grant: &Grant) -> Identity {
        let holder = match (&grant.subject, &grant.id) {
            (Some(subject), _) => Holder::Subject(subject.clone()),
            (None, Some(id)) => Holder::Id(id.clone()),
            (None, None) => {
                let digest = ring::digest::digest(&ring::digest::SHA256, &self.credential.value);
                Holder::Digest(digest.as_ref().try_into().unwrap_or_default()) // SHA-256 has 32 bytes
            }
        };
        Identity::Token { issuer: grant.issuer.clone(), holder }
    }
}

impl Policy {
    /// Without `rules`, keys leave everything to tokens and `certificates` to whoever has one; without any of these the
    /// relay is open. It is not open because keys or roots that the settings name are gone.
    pub fn new(rules: Vec<Rule>, tokens: Requirements, certificates: bool) -> Self {
        let mut policy = Self { rules, tokens, doubts_certificates: false, version: 0 };
        if policy.rules.is_empty() {
            let certificate = certificates.then_some(Principal::Certificate(None));
            let token = policy.reads_tokens().then_some(Principal::Token);
            let all: Vec<_> = token.into_iter().chain(certificate).collect();
            if !all.is_empty() {
                let (publish, subscribe) = (all.clone(), all);
                let namespace = Pattern::any();
                policy.rules.push(Rule { namespace, publish, subscribe, path: None, authority: None });
            }
        }
        policy
    }

    /// Anyone may do anything.
    pub fn is_open(&self) -> bool {
        self.rules.is_empty()
    }

    pub fn rule_count(&self) -> usize {
        self.rules.len()
    }

    /// Whether tokens are looked at.
    pub fn reads_tokens(&self) -> bool {
        self.tokens.wants_keys || !self.tokens.keys.is_empty()
    }

    /// Reports whether the connection alone makes the peer one of these; the certificate's name, if it is by that.
    fn is(&self, principal: &Principal, peer: &Peer, now: SystemTime) -> Option<Option<CertificateName>> {
        match principal {
            Principal::Certificate(_) if self.doubts_certificates => None,
            other => other.is(peer, now),
        }
    }

    /// Whether all of `tokens` are good.
    ///
    /// # Errors
    /// The first that is not.
    pub fn check_tokens(&self, tokens: &[Arc<Presented>], now: SystemTime) -> Result<(), Refusal> {
        if tokens.len() > MAX_TOKENS {
            return Err(Refusal::Many);
        }
        for (nth, token) in tokens.iter().enumerate() {
            if tokens[..nth].iter().any(|before| before.credential == token.credential) {
                return Err(Refusal::Repeated);
            }
            if self.reads_tokens() {
                token.grant(self, now)?;
            }
        }
        Ok(())
    }

    /// Whether `peer` with `tokens` may have a session, and whether it has shown that it may do something in it.
    ///
    /// # Errors
    /// Nothing is there that it could ever do; or its tokens, which it relies on, are not good.
    pub fn decide_session(
        &self,
        peer: &Peer,
        tokens: &[Arc<Presented>],
        now: SystemTime,
    ) -> Result<(Basis, Standing), Refusal> {
        let client = || Basis { identity: Identity::Client(networks::client(peer.address)), until: None };
        if self.is_open() {
            return Ok((client(), Standing::Proven));
        }
        let resource = Resource::session();
        let by_token = self.by_token(peer, tokens, Action::ClientSetup, &resource, now);
        let rules = || self.rules.iter().filter(|rule| rule.is_for(peer));
        let mut principals = rules().flat_map(|rule| rule.publish.iter().chain(&rule.subscribe));
        let takes_tokens = self.reads_tokens() && principals.clone().any(|one| *one == Principal::Token);
        if takes_tokens && let Ok(basis) = by_token {
            return Ok((basis, Standing::Proven));
        }
        if let Some(name) = principals.find_map(|one| self.is(one, peer, now)) {
            return Ok((self.of_connection(peer, name), Standing::Proven));
        }
        match by_token {
            // Requests may bring their own.
            Err(Refusal::NotAllowed) if takes_tokens && tokens.is_empty() => {
                Ok((client(), Standing::Unproven))
            }
            Err(refusal) if takes_tokens => Err(refusal),
            _ => Err(Refusal::NotAllowed),
        }
    }

    /// Whether `peer` with `tokens` may do this.
    ///
    /// # Errors
    /// It may not.
    pub fn decide(
        &self,
        peer: &Peer,
        tokens: &[Arc<Presented>],
        (action, resource): (Action, &Resource),
        now: SystemTime,
    ) -> Result<Basis, Refusal> {
        if self.is_open() {
            return Ok(Basis { identity: Identity::Client(networks::client(peer.address)), until: None });
        }
        let applies = |rule: &&Rule| rule.is_for(peer) && rule.namespace.matches(&resource.namespace);
        let principals: Vec<&Principal> = match action {
            // What a rule allows it allows to change.
            Action::RequestUpdate => {
                let rules = self.rules.iter().filter(applies);
                rules.flat_map(|rule| rule.publish.iter().chain(&rule.subscribe)).collect()
            }
            _ => self.rules.iter().filter(applies).flat_map(|rule| rule.principals(action)).collect(),
        };
        let mut refusal = Refusal::NotAllowed;
        if principals.contains(&&Principal::Token) {
            match self.by_token(peer, tokens, action, resource, now) {
                Ok(basis) => return Ok(basis),
                Err(refused) => refusal = refused,
            }
        }
        // A name says more than an address.
        let mut found: Vec<_> = principals.iter().filter_map(|one| self.is(one, peer, now)).collect();
        found.sort_by_key(Option::is_none);
        found.into_iter().next().map(|name| self.of_connection(peer, name)).ok_or(refusal)
    }

    fn of_connection(&self, peer: &Peer, name: Option<CertificateName>) -> Basis {
        match name {
            Some(name) => {
                let until = peer.certificate.as_ref().and_then(|certificate| certificate.not_after);
                Basis { identity: Identity::Certificate(name), until }
            }
            None => Basis { identity: Identity::Client(networks::client(peer.address)), until: None },
        }
    }

    /// The token that allows it for longest.
    fn by_token(
        &self,
        peer: &Peer,
        tokens: &[Arc<Presented>],
        action: Action,
        resource: &Resource,
        now: SystemTime,
    ) -> Result<Basis, Refusal> {
        let mut refusal = Refusal::NotAllowed;
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

/// Whether the connection's path and a JWT's `root` overlap.
fn is_at_root(grant: &Grant, peer: &Peer) -> bool {
    let Some(root) = &grant.root else { return true };
    let path = pattern::path(&peer.path);
    path.iter().zip(root).all(|(one, other)| one == other)
}
