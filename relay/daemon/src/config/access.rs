//! Reads the settings of access control: rules, tokens, certificates and budgets.

use std::{collections::HashSet, fmt, net::SocketAddr, path::PathBuf, str::FromStr};

use millrace_relay::access::{
    AccessRule, Budget, BudgetLimits, ClientShare, Principal, RuleAuthority, pattern::Pattern,
    unproven::UnprovenBounds,
};
use millrace_relay_kernel as kernel;
use serde::Deserialize;
use toml::{
    Spanned,
    de::{DeValue, ValueDeserializer},
};

use super::{CACHE_BYTES, ConfigCheck, ConfigFile, ConfigProblem, MAX_SESSIONS, RECEIVE_BYTES, Settings};

/// The TOML key of the access rules, which only the settings file can set.
pub const ALLOW: &str = "allow";
/// The TOML key of the tables of token issuers, which only the settings file can set.
pub const ISSUER: &str = "issuer";

/// The settings of access control.
#[derive(Clone, Debug, Default)]
pub struct AccessConfig {
    /// Access rules, from the tables `[[allow]]`.
    pub rules: Vec<AccessRule>,
    /// Files with keys that verify tokens.
    pub keys: Vec<KeyFile>,
    /// Files with the IDs of revoked tokens.
    pub revoked: Vec<RevokedFile>,
    /// Names of this relay as the audience of tokens (the claim `aud`).
    pub audience: Vec<String>,
    /// Issuers whose tokens are verified by keys that are not restricted to an issuer. If the list is empty, these are
    /// all issuers without keys of their own.
    pub issuers: Vec<String>,
    /// PEM file with root certificates for clients' certificates; `None` if clients are not asked for a certificate.
    pub client_ca: Option<PathBuf>,
    /// Limits of the resources that one client or one session may use.
    pub limits: BudgetLimits,
    /// True if anyone may publish and subscribe, even on addresses that other hosts can reach.
    pub public: bool,
}

/// A file with keys that verify tokens, and the only issuer whose tokens they verify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFile {
    /// Path of the file.
    pub path: PathBuf,
    /// True if the file is a raw HMAC secret. Otherwise it is PEM, a JWK or a JWK set.
    pub is_secret: bool,
    /// The only issuer whose tokens the keys verify; `None` if they verify tokens of every issuer that has no keys of
    /// its own.
    pub issuer: Option<String>,
}

/// A file with the IDs of revoked tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevokedFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Issuer of the tokens; `None` for any issuer.
    pub issuer: Option<String>,
}

/// An issuer of tokens, and its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issuer {
    name: String,
    keys: Vec<PathBuf>,
    secrets: Vec<PathBuf>,
    revoked: Option<PathBuf>,
}

/// Writes the name of the setting, and the path of the key file that the setting names, for messages.
impl fmt::Display for KeyFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match (&self.issuer, self.is_secret) {
            (Some(issuer), false) => write!(f, "[[issuer]] {issuer}: keys {path}"),
            (Some(issuer), true) => write!(f, "[[issuer]] {issuer}: secrets {path}"),
            (None, false) => write!(f, "token-keys {path}"),
            (None, true) => write!(f, "token-secrets {path}"),
        }
    }
}

/// Writes the name of the setting, and the path of the revocation file that the setting names, for messages.
impl fmt::Display for RevokedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.issuer {
            Some(issuer) => write!(f, "[[issuer]] {issuer}: revoked {path}"),
            None => write!(f, "token-revoked {path}"),
        }
    }
}

impl Issuer {
    fn key_files(self) -> impl Iterator<Item = KeyFile> {
        let Self { name, keys, secrets, .. } = self;
        let keys = keys.into_iter().map(|path| (path, false));
        keys.chain(secrets.into_iter().map(|path| (path, true))).map(move |(path, is_secret)| KeyFile {
            path,
            is_secret,
            issuer: Some(name.clone()),
        })
    }
}

impl AccessConfig {
    /// Returns a listen address that other hosts can reach, if no setting restricts access and `public` is not set.
    pub fn exposed(&self, listen: &[SocketAddr]) -> Option<SocketAddr> {
        let says = !self.rules.is_empty() || !self.keys.is_empty() || self.client_ca.is_some();
        let exposed = listen.iter().find(|addr| !addr.ip().to_canonical().is_loopback());
        exposed.filter(|_| !says && !self.public).copied()
    }

    /// Returns a warning if several key files verify tokens of any issuer. The owner of each key can then issue tokens
    /// in the name of all issuers.
    pub fn shared_trust(&self) -> Option<String> {
        let unbound = self.keys.iter().filter(|file| file.issuer.is_none()).count();
        (unbound > 1).then(|| {
            format!(
                "token-keys and token-secrets are {unbound} files, and the keys of each verify tokens of the same issuers: if \
                 several parties own them, name the keys of each in an [[issuer]] table"
            )
        })
    }
}

/// Returns the problem and remedy for an address on which anyone could use the relay.
pub fn exposes(addr: &SocketAddr) -> String {
    format!(
        "whoever reaches {addr} could publish and watch everything: allow clients by `[[allow]]` in the settings file, \
         token-keys, token-secrets or client-ca, or set --public to allow anyone"
    )
}

/// An `[[allow]]` table of the settings file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Allow {
    /// Pattern of the namespaces to which the rule applies, such as `live/**`.
    namespace: TextValue<Pattern>,
    /// Clients that may publish: `anyone`, or conditions on their token, certificate or address.
    #[serde(default)]
    publish: Vec<TextValue<Principal>>,
    /// Clients that may subscribe, in the same form as for publishers.
    #[serde(default)]
    subscribe: Vec<TextValue<Principal>>,
    /// Pattern that the path of the client's URL must match.
    path: Option<TextValue<Pattern>>,
    /// Host name, with or without a port, that the client's URL must have.
    authority: Option<TextValue<RuleAuthority>>,
}

/// An `[[issuer]]` table of the settings file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct IssuerTable {
    /// Name of the issuer, the tokens' claim `iss`.
    name: String,
    /// Files with keys that verify the issuer's tokens.
    #[serde(default)]
    keys: Vec<PathBuf>,
    /// Files with HMAC secrets that verify the issuer's tokens.
    #[serde(default)]
    secrets: Vec<PathBuf>,
    /// File with IDs of the issuer's revoked tokens.
    revoked: Option<PathBuf>,
}

/// A value that the settings file contains as a string, and that is parsed with `FromStr`.
pub(super) struct TextValue<T>(pub(super) T);

impl<'de, T: FromStr<Err: std::fmt::Display>> Deserialize<'de> for TextValue<T> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(|error| serde::de::Error::custom(format!("`{text}`: {error}")))
    }
}

impl ConfigCheck {
    /// Reads the `[[allow]]` tables.
    pub(super) fn rules(
        &mut self,
        file: &ConfigFile<'_>,
        value: Spanned<DeValue<'_>>,
        settings: &mut Settings,
    ) {
        let DeValue::Array(rules) = value.get_ref() else {
            return self.problem(ALLOW, "is a list of tables: [[allow]]");
        };
        for rule in rules.iter() {
            let line = file.text[..rule.span().start].matches('\n').count() + 1;
            match Allow::deserialize(ValueDeserializer::from(rule.clone())) {
                Ok(Allow { publish, subscribe, .. }) if publish.is_empty() && subscribe.is_empty() => {
                    self.wrong(file, line, ALLOW, "allows nothing: give publish or subscribe".into());
                }
                Ok(allow) => settings.allow.push(AccessRule {
                    namespace: allow.namespace.0,
                    publish: allow.publish.into_iter().map(|text| text.0).collect(),
                    subscribe: allow.subscribe.into_iter().map(|text| text.0).collect(),
                    path: allow.path.map(|text| text.0),
                    authority: allow.authority.map(|text| text.0),
                }),
                Err(error) => self.wrong(file, line, ALLOW, error.message().to_owned()),
            }
        }
    }

    /// Reads the `[[issuer]]` tables.
    pub(super) fn issuers(
        &mut self,
        file: &ConfigFile<'_>,
        value: Spanned<DeValue<'_>>,
        settings: &mut Settings,
    ) {
        let DeValue::Array(issuers) = value.get_ref() else {
            return self.problem(ISSUER, "is a list of tables: [[issuer]]");
        };
        for issuer in issuers.iter() {
            let line = file.text[..issuer.span().start].matches('\n').count() + 1;
            match IssuerTable::deserialize(ValueDeserializer::from(issuer.clone())) {
                Ok(IssuerTable { name, .. }) if name.is_empty() => {
                    self.wrong(
                        file,
                        line,
                        ISSUER,
                        "name is empty: give what its tokens have as `iss`".into(),
                    );
                }
                Ok(IssuerTable { keys, secrets, .. }) if keys.is_empty() && secrets.is_empty() => {
                    self.wrong(file, line, ISSUER, "has no key: give keys or secrets".into());
                }
                Ok(IssuerTable { name, .. }) if settings.issuer.iter().any(|other| other.name == name) => {
                    self.wrong(file, line, ISSUER, format!("{name} is given twice"));
                }
                Ok(IssuerTable { name, keys, secrets, revoked }) => {
                    settings.issuer.push(Issuer { name, keys, secrets, revoked });
                }
                Err(error) => self.wrong(file, line, ISSUER, error.message().to_owned()),
            }
        }
    }

    fn wrong(&mut self, file: &ConfigFile<'_>, line: usize, key: &str, message: String) {
        self.problems.push(ConfigProblem { place: format!("{}:{line}: {key}", file.name), message });
    }

    pub(super) fn access(&mut self, settings: &mut Settings) -> AccessConfig {
        let defaults = BudgetLimits::default();
        let mut some = |key, given: Option<u64>, default| {
            if given == Some(0) {
                self.problem(key, "must be at least 1");
            }
            given.unwrap_or(default)
        };
        let kernel_streams = settings.kernel_streams.unwrap_or(kernel::KernelLimits::default().streams);
        let limits = BudgetLimits {
            session: Budget {
                requests_per_second: some(
                    "session-requests",
                    settings.session_requests,
                    defaults.session.requests_per_second,
                ),
                tracks: some("session-tracks", settings.session_tracks, defaults.session.tracks),
            },
            client: Budget {
                requests_per_second: some(
                    "client-requests",
                    settings.client_requests,
                    defaults.client.requests_per_second,
                ),
                tracks: some("client-tracks", settings.client_tracks, defaults.client.tracks),
            },
            same_track: some("session-same-track", settings.session_same_track, defaults.same_track),
            share: ClientShare {
                cache_bytes: some(
                    "client-cache-bytes",
                    settings.client_cache_bytes.map(|count| count.0),
                    defaults.share.cache_bytes,
                ),
                fetch_bytes_per_second: some(
                    "client-fetch-bytes",
                    settings.client_fetch_bytes.map(|count| count.0),
                    defaults.share.fetch_bytes_per_second,
                ),
                receive_bytes: some(
                    "client-receive-bytes",
                    settings.client_receive_bytes.map(|count| count.0),
                    defaults.share.receive_bytes,
                ),
                kernel_streams: u64::from(kernel_streams / 8).max(1),
            },
            // The clients of one network together get at most half of each shared resource. The other half is left for
            // clients of other networks.
            network: ClientShare {
                cache_bytes: settings.cache_bytes.map_or(CACHE_BYTES, |count| count.0) / 2,
                receive_bytes: settings.receive_bytes.map_or(RECEIVE_BYTES, |count| count.0) / 2,
                kernel_streams: u64::from(kernel_streams / 2).max(1),
                ..ClientShare::UNLIMITED
            },
            token_cache: settings.token_cache_bytes.map_or(defaults.token_cache, |count| count.0),
            unproven: self.unproven(settings),
        };
        let issuers = std::mem::take(&mut settings.issuer);
        let unbound = |files: Option<Vec<PathBuf>>, is_secret| {
            let files = files.unwrap_or_default().into_iter();
            files.map(move |path| KeyFile { path, is_secret, issuer: None })
        };
        let of_issuers = issuers.iter().filter_map(|issuer| {
            let path = issuer.revoked.clone()?;
            Some(RevokedFile { path, issuer: Some(issuer.name.clone()) })
        });
        let revoked = settings.token_revoked.take().map(|path| RevokedFile { path, issuer: None });
        let access = AccessConfig {
            rules: std::mem::take(&mut settings.allow),
            revoked: revoked.into_iter().chain(of_issuers).collect(),
            keys: unbound(settings.token_keys.take(), false)
                .chain(unbound(settings.token_secrets.take(), true))
                .chain(issuers.into_iter().flat_map(Issuer::key_files))
                .collect(),
            audience: settings.token_audience.take().unwrap_or_default(),
            issuers: settings.token_issuer.take().unwrap_or_default(),
            client_ca: settings.client_ca.take(),
            limits,
            public: settings.public.unwrap_or(false),
        };
        self.without_effect(&access);
        access
    }

    fn unproven(&mut self, settings: &Settings) -> UnprovenBounds {
        let defaults = UnprovenBounds::default();
        // Sessions that are not authorized for anything yet may take at most half of all sessions. The other half is
        // left for clients that have shown that they may publish or subscribe.
        let most = (settings.max_sessions.unwrap_or(MAX_SESSIONS) / 2).max(1);
        let sessions = settings.unproven_sessions.unwrap_or(defaults.sessions.min(most));
        if !(1..=most).contains(&sessions) {
            let message = format!("must be 1 to {most}, half of max-sessions");
            self.problem("unproven-sessions", message);
        }
        UnprovenBounds { sessions, ..defaults }
    }

    /// Reports settings that can never allow anything or are never used.
    fn without_effect(&mut self, access: &AccessConfig) {
        let all = || access.rules.iter().flat_map(|rule| rule.publish.iter().chain(&rule.subscribe));
        if access.keys.is_empty() {
            let given = [
                ("token-revoked", !access.revoked.is_empty()),
                ("token-audience", !access.audience.is_empty()),
                ("token-issuer", !access.issuers.is_empty()),
                (ALLOW, all().any(|one| *one == Principal::Token)),
            ];
            for (key, _) in given.into_iter().filter(|(_, given)| *given) {
                self.problem(key, "needs token-keys or token-secrets as well");
            }
        }
        if access.client_ca.is_none() && all().any(|one| matches!(one, Principal::Certificate(_))) {
            self.problem(ALLOW, "`cert:` needs client-ca as well");
        }
        let mut seen = HashSet::new();
        if let Some(twice) = access.keys.iter().find(|file| !seen.insert((&file.path, &file.issuer))) {
            self.problem("token-keys", format!("{} is given twice", twice.path.display()));
        }
        self.unbound(access);
    }

    /// Reports ambiguous settings of issuers. Keys that are not restricted to an issuer verify tokens of every issuer
    /// in `token-issuer`, so several issuers with separate keys need `[[issuer]]` tables.
    fn unbound(&mut self, access: &AccessConfig) {
        let unbound = access.keys.iter().filter(|file| file.issuer.is_none()).count();
        if unbound > 1 && access.issuers.len() > 1 {
            let issuers = access.issuers.len();
            let message = format!(
                "each of {unbound} files of keys would verify tokens of each of {issuers} issuers: name the keys of each in an \
                 [[issuer]] table of the settings file"
            );
            self.problem("token-issuer", message);
        }
        let is_bound = |name: &&String| access.keys.iter().any(|file| file.issuer.as_ref() == Some(*name));
        if let Some(name) = access.issuers.iter().find(is_bound) {
            self.problem("token-issuer", format!("{name} has its keys in [[issuer]]: leave it out here"));
        }
        if unbound == 0 && !access.issuers.is_empty() && !access.keys.is_empty() {
            self.problem("token-issuer", "applies to token-keys and token-secrets, and neither is set");
        }
    }
}
