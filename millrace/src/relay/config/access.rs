//! Settings about who may do what.

use std::{collections::HashSet, net::SocketAddr, path::PathBuf, str::FromStr};

use millrace_relay::access::{Authority, Budget, Limits, Principal, Rule, Share, pattern::Pattern};
use serde::Deserialize;
use toml::{
    Spanned,
    de::{DeValue, ValueDeserializer},
};

use super::{Check, File, Problem, Settings};

/// The key of the rules, in the file only.
pub const ALLOW: &str = "allow";

/// Who may do what.
#[derive(Clone, Debug, Default)]
pub struct Access {
    pub rules: Vec<Rule>,
    pub keys: Vec<PathBuf>,
    pub revoked: Option<PathBuf>,
    pub audience: Vec<String>,
    pub issuers: Vec<String>,
    pub client_ca: Option<PathBuf>,
    pub limits: Limits,
    /// Anyone is meant, wherever the relay listens.
    pub public: bool,
}

impl Access {
    /// An address that anyone can reach, if nothing says who may do what and nobody said that anyone may.
    pub fn exposed(&self, listen: &[SocketAddr]) -> Option<SocketAddr> {
        let says = !self.rules.is_empty() || !self.keys.is_empty() || self.client_ca.is_some();
        let exposed = listen.iter().find(|addr| !addr.ip().to_canonical().is_loopback());
        exposed.filter(|_| !says && !self.public).copied()
    }
}

/// What to do about such an address.
pub fn exposes(addr: SocketAddr) -> String {
    format!(
        "whoever reaches {addr} could publish and watch everything: say who may (`[[allow]]` in the settings file, \
         token-keys, client-ca), or --public if anyone is meant"
    )
}

/// `[[allow]]` as it stands in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Allow {
    namespace: Text<Pattern>,
    #[serde(default)]
    publish: Vec<Text<Principal>>,
    #[serde(default)]
    subscribe: Vec<Text<Principal>>,
    path: Option<Text<Pattern>>,
    authority: Option<Text<Authority>>,
}

/// What is written as text.
pub(super) struct Text<T>(pub(super) T);

impl<'de, T: FromStr<Err: std::fmt::Display>> Deserialize<'de> for Text<T> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(|error| serde::de::Error::custom(format!("`{text}`: {error}")))
    }
}

impl Check {
    /// Reads `[[allow]]`.
    pub(super) fn rules(&mut self, file: &File<'_>, value: Spanned<DeValue<'_>>, settings: &mut Settings) {
        let DeValue::Array(rules) = value.get_ref() else {
            return self.problem(ALLOW, "is a list of tables: [[allow]]");
        };
        for rule in rules.iter() {
            let line = file.text[..rule.span().start].matches('\n').count() + 1;
            match Allow::deserialize(ValueDeserializer::from(rule.clone())) {
                Ok(Allow { publish, subscribe, .. }) if publish.is_empty() && subscribe.is_empty() => {
                    self.wrong_rule(file, line, "allows nothing: give publish or subscribe".into());
                }
                Ok(allow) => settings.allow.push(Rule {
                    namespace: allow.namespace.0,
                    publish: allow.publish.into_iter().map(|text| text.0).collect(),
                    subscribe: allow.subscribe.into_iter().map(|text| text.0).collect(),
                    path: allow.path.map(|text| text.0),
                    authority: allow.authority.map(|text| text.0),
                }),
                Err(error) => self.wrong_rule(file, line, error.message().to_owned()),
            }
        }
    }

    fn wrong_rule(&mut self, file: &File<'_>, line: usize, message: String) {
        self.problems.push(Problem { place: format!("{}:{line}: {ALLOW}", file.name), message });
    }

    pub(super) fn access(&mut self, settings: &mut Settings) -> Access {
        let defaults = Limits::default();
        let mut some = |key, given: Option<u64>, default| {
            if given == Some(0) {
                self.problem(key, "must be at least 1");
            }
            given.unwrap_or(default)
        };
        let limits = Limits {
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
            share: Share {
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
            },
            token_cache: settings.token_cache_bytes.map_or(defaults.token_cache, |count| count.0),
        };
        let access = Access {
            rules: std::mem::take(&mut settings.allow),
            keys: settings.token_keys.take().unwrap_or_default(),
            revoked: settings.token_revoked.take(),
            audience: settings.token_audience.take().unwrap_or_default(),
            issuers: settings.token_issuer.take().unwrap_or_default(),
            client_ca: settings.client_ca.take(),
            limits,
            public: settings.public.unwrap_or(false),
        };
        self.without_effect(&access);
        access
    }

    /// What could never allow anything, or is never looked at, was meant otherwise.
    fn without_effect(&mut self, access: &Access) {
        let all = || access.rules.iter().flat_map(|rule| rule.publish.iter().chain(&rule.subscribe));
        if access.keys.is_empty() {
            let given = [
                ("token-revoked", access.revoked.is_some()),
                ("token-audience", !access.audience.is_empty()),
                ("token-issuer", !access.issuers.is_empty()),
                (ALLOW, all().any(|one| *one == Principal::Token)),
            ];
            for (key, _) in given.into_iter().filter(|(_, given)| *given) {
                self.problem(key, "needs token-keys as well");
            }
        }
        if access.client_ca.is_none() && all().any(|one| matches!(one, Principal::Certificate(_))) {
            self.problem(ALLOW, "`cert:` needs client-ca as well");
        }
        let mut seen = HashSet::new();
        if let Some(twice) = access.keys.iter().find(|file| !seen.insert(*file)) {
            self.problem("token-keys", format!("{} is given twice", twice.display()));
        }
    }
}
