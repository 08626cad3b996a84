//! Reads the files of access rights and watches them for changes: token keys, revocations and root certificates for
//! client certificates.
//!
//! A file that cannot be read grants no access: its keys verify no token, and its IDs that were revoked stay revoked.
//! No client certificate is trusted without root certificates. The other files keep their effect.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, bail};
use millrace_daemon::pem;
use millrace_moq::token::Credential;
use millrace_relay::access::{
    AccessPolicy, Requirements, UnreadSetting,
    keys::{self, AccessKey},
    token,
};
use rustls::RootCertStore;
use tracing::warn;

use super::{
    config::{AccessConfig, KeyFile, RevokedFile},
    tls::{Stamp, stamp},
};

/// The contents of all files of access rights.
pub struct AccessFileContents {
    /// Access rules, and the keys that verify tokens.
    pub policy: AccessPolicy,
    /// Root certificates for clients' certificates; `None` without `client-ca`.
    pub client_roots: Option<Arc<RootCertStore>>,
    /// Files of access rights that could not be read or parsed, each with the reason.
    pub unread: Vec<UnreadSetting>,
}

/// Reads the files that the settings name.
///
/// # Errors
/// Fails if one of the files cannot be read or parsed.
pub fn read(access: &AccessConfig) -> anyhow::Result<AccessFileContents> {
    let loaded = load(access, &Requirements::default());
    match loaded.unread.first() {
        Some(UnreadSetting { what, reason }) => bail!("{what}: {reason}"),
        None => Ok(loaded),
    }
}

/// Reads every file that can be read. `known` has the token requirements from the last reading. Its revocations stay in
/// force if the revocation file cannot be read now.
fn load(access: &AccessConfig, known: &Requirements) -> AccessFileContents {
    let mut unread = Vec::new();
    let mut or_unread = |what: String, error: anyhow::Error| {
        unread.push(UnreadSetting { what, reason: format!("{error:#}") });
    };
    let mut tokens = Requirements {
        wants_keys: !access.keys.is_empty(),
        audience: access.audience.clone(),
        issuers: access.issuers.clone(),
        // An issuer stays bound to its own keys even if none of them can be read, so that no other key can sign for it.
        bound: access.keys.iter().filter_map(|file| file.issuer.clone()).collect(),
        ..Requirements::default()
    };
    for file in &access.keys {
        match read_keys(file) {
            Ok(keys) => tokens.keys.extend(keys),
            // A key file that cannot be read verifies no token, and the keys of other files stay in use.
            Err(error) => or_unread(file.to_string(), error),
        }
    }
    for file in &access.revoked {
        let (own, before) = match &file.issuer {
            Some(issuer) => {
                (tokens.revoked_of.entry(issuer.clone()).or_default(), known.revoked_of.get(issuer))
            }
            None => (&mut tokens.revoked, Some(&known.revoked)),
        };
        match read_ids(file) {
            Ok(ids) => *own = ids,
            Err(error) => {
                // A revocation file that is missing must not make revoked tokens valid again.
                own.extend(before.into_iter().flatten().cloned());
                or_unread(file.to_string(), error);
            }
        }
    }
    let client_roots = match client_roots(access) {
        Ok(roots) => roots,
        Err(error) => {
            let path = access.client_ca.as_deref().unwrap_or(Path::new(""));
            or_unread(format!("client-ca {}", path.display()), error);
            None
        }
    };
    let mut policy = AccessPolicy::new(access.rules.clone(), tokens, access.client_ca.is_some());
    // Without usable root certificates, the client certificates of open sessions grant no access either.
    policy.doubts_certificates = access.client_ca.is_some() && client_roots.is_none();
    AccessFileContents { policy, client_roots, unread }
}

fn read_keys(file: &KeyFile) -> anyhow::Result<Vec<AccessKey>> {
    let bytes = std::fs::read(&file.path)?;
    let keys = if file.is_secret { vec![keys::read_secret(&bytes)?] } else { keys::read(&bytes)? };
    Ok(match &file.issuer {
        Some(issuer) => keys.into_iter().map(|key| key.bound_to(issuer.as_str().into())).collect(),
        None => keys,
    })
}

fn client_roots(access: &AccessConfig) -> anyhow::Result<Option<Arc<RootCertStore>>> {
    let roots = access.client_ca.as_ref().map(|path| pem::roots(path)).transpose()?;
    Ok(roots.map(Arc::new))
}

/// Reads the IDs of revoked tokens, one a line; `#` begins a comment. Invalid UTF-8 in one line does not affect other
/// lines.
fn read_ids(file: &RevokedFile) -> anyhow::Result<HashSet<String>> {
    let bytes = std::fs::read(&file.path).context("its earlier IDs stay revoked")?;
    let text = String::from_utf8_lossy(&bytes);
    // Some editors put a byte order mark first, which would otherwise become part of the first ID.
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    Ok(lines.filter(|line| !line.is_empty()).map(str::to_owned).collect())
}

/// The watch over the files of access rights.
pub struct AccessFileWatch {
    access: AccessConfig,
    /// The token requirements from the last reading. Their revocations stay in force while a revocation file cannot be
    /// read.
    tokens: Requirements,
    /// Modification times and sizes (stamps) of the access files when they were last read. A different stamp means that
    /// a file has changed.
    seen: Vec<Option<Stamp>>,
    /// The reason why the settings could not be used when they were last read; `None` if they could.
    settings: Option<UnreadSetting>,
}

impl AccessFileWatch {
    /// Starts watching the access files. `policy` is the access policy that was just read from them.
    pub fn new(access: &AccessConfig, policy: &AccessPolicy) -> Self {
        let tokens = policy.tokens.clone();
        let mut watch = Self { access: access.clone(), tokens, seen: Vec::new(), settings: None };
        watch.seen = watch.stamps();
        watch
    }

    /// Records the result of reading the settings again: the access files that they name, or the error that makes them
    /// unusable.
    pub fn change(&mut self, settings: anyhow::Result<AccessConfig>) {
        match settings {
            Ok(access) => (self.access, self.settings) = (access, None),
            Err(error) => {
                let reason = format!("{error:#}");
                self.settings = Some(UnreadSetting { what: "settings".to_owned(), reason });
            }
        }
    }

    fn stamps(&self) -> Vec<Option<Stamp>> {
        let keys = self.access.keys.iter().map(|file| &file.path);
        let revoked = self.access.revoked.iter().map(|file| &file.path);
        keys.chain(revoked).chain(&self.access.client_ca).map(|path| stamp(path)).collect()
    }

    /// Reads the access files again if one has changed since the last call, or if `always` is set. Otherwise returns
    /// `None`.
    pub fn look(&mut self, always: bool) -> Option<AccessFileContents> {
        // Stamps are taken before the files are read, so that a change during the reading is noticed at the next check.
        let now = self.stamps();
        if now == self.seen && !always {
            return None;
        }
        self.seen = now;
        let mut loaded = load(&self.access, &self.tokens);
        self.tokens = loaded.policy.tokens.clone();
        loaded.unread.extend(self.settings.clone());
        Some(loaded)
    }
}

/// Returns a function that reads the token for the upstream relay from the file at each call.
pub fn token_file(path: PathBuf) -> Arc<dyn Fn() -> Option<Credential> + Send + Sync> {
    Arc::new(move || match std::fs::read(&path) {
        Ok(bytes) => Some(token::credential_from_bytes(&bytes)),
        Err(error) => {
            warn!(path = %path.display(), %error, "cannot read the token for the upstream relay: connecting without one");
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The access settings of a relay, which name its files of keys, revocations and root certificates.
    struct AccessFiles(tempfile::TempDir);

    impl AccessFiles {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        /// Replaces a file by writing a new one and renaming it, as careful tools do.
        fn put(&self, name: &str, text: &str) {
            std::fs::write(self.path("new"), text).unwrap();
            std::fs::rename(self.path("new"), self.path(name)).unwrap();
        }

        fn remove(&self, name: &str) {
            std::fs::remove_file(self.path(name)).unwrap();
        }

        fn secret(&self, name: &str, issuer: Option<&str>) -> KeyFile {
            KeyFile { path: self.path(name), is_secret: true, issuer: issuer.map(str::to_owned) }
        }
    }

    /// Returns how many keys, revoked IDs and root certificates were read, and the files that could not be read.
    fn said(loaded: &AccessFileContents) -> (usize, usize, Option<usize>, Vec<&str>) {
        let tokens = &loaded.policy.tokens;
        let unread = loaded.unread.iter().map(|unread| unread.what.split(' ').next().unwrap_or_default());
        let roots = loaded.client_roots.as_ref().map(|roots| roots.len());
        (tokens.keys.len(), tokens.revoked_count(), roots, unread.collect())
    }

    fn root() -> String {
        rcgen::generate_simple_self_signed(["clients".to_owned()]).unwrap().cert.pem()
    }

    #[test]
    fn unreadable_access_file_grants_no_access() {
        let files = AccessFiles::new();
        files.put("one", &"1".repeat(32));
        files.put("two", &"2".repeat(32));
        files.put("revoked", "a # a thief\n");
        files.put("revoked-x", "b\n");
        files.put("roots", &root());
        let access = AccessConfig {
            keys: vec![files.secret("one", None), files.secret("two", Some("x"))],
            revoked: vec![
                RevokedFile { path: files.path("revoked"), issuer: None },
                RevokedFile { path: files.path("revoked-x"), issuer: Some("x".to_owned()) },
            ],
            client_ca: Some(files.path("roots")),
            ..AccessConfig::default()
        };
        let first = read(&access).unwrap();
        assert_eq!(said(&first), (2, 2, Some(1), vec![]));
        let mut watch = AccessFileWatch::new(&access, &first.policy);
        assert!(watch.look(false).is_none());
        // A missing key file verifies no token, and does not open the relay to everyone.
        files.remove("one");
        let loaded = watch.look(false).unwrap();
        assert_eq!(said(&loaded), (1, 2, Some(1), vec!["token-secrets"]));
        assert!(watch.look(false).is_none(), "said once");
        // A revocation takes effect while the key file is missing.
        files.put("revoked", "a\nc\n");
        assert_eq!(said(&watch.look(false).unwrap()), (1, 3, Some(1), vec!["token-secrets"]));
        files.put("two", "");
        let loaded = watch.look(false).unwrap();
        assert_eq!(said(&loaded), (0, 3, Some(1), vec!["token-secrets", "[[issuer]]"]));
        assert!(!loaded.policy.is_open() && loaded.policy.reads_tokens());
        assert!(loaded.policy.tokens.bound.contains("x"), "nobody else speaks for it");
        // IDs stay revoked when their files are missing.
        files.remove("revoked");
        files.remove("revoked-x");
        let loaded = watch.look(false).unwrap();
        assert_eq!((said(&loaded).1, loaded.unread.len()), (3, 4));
        assert!(!loaded.policy.doubts_certificates);
        // No client certificate is trusted without usable root certificates.
        files.put("roots", "nothing of the kind");
        let loaded = watch.look(false).unwrap();
        assert!(loaded.policy.doubts_certificates);
        assert_eq!((said(&loaded).2, loaded.unread.len()), (None, 5));
        // Each file takes effect again when it can be read.
        files.put("roots", &(root() + &root()));
        files.put("one", &"1".repeat(32));
        files.put("revoked-x", "b\n");
        let loaded = watch.look(false).unwrap();
        assert_eq!(said(&loaded), (1, 3, Some(2), vec!["[[issuer]]", "token-revoked"]));
        assert!(!loaded.policy.doubts_certificates);
        assert!(read(&access).is_err(), "a start needs all files");
    }

    #[test]
    fn unreadable_token_keys_or_client_cas_do_not_open_the_relay_to_anyone() {
        let files = AccessFiles::new();
        let tokens = AccessConfig { keys: vec![files.secret("none", None)], ..AccessConfig::default() };
        let certificates = AccessConfig { client_ca: Some(files.path("none")), ..AccessConfig::default() };
        for access in [tokens, certificates] {
            let loaded = AccessFileWatch::new(&access, &AccessPolicy::default()).look(true).unwrap();
            assert!(!loaded.policy.is_open(), "{access:?}");
            assert_eq!(loaded.unread.len(), 1);
        }
        let open =
            AccessFileWatch::new(&AccessConfig::default(), &AccessPolicy::default()).look(true).unwrap();
        assert!(open.policy.is_open() && open.unread.is_empty() && open.client_roots.is_none());
    }

    #[test]
    fn revocations_with_comments_and_invalid_utf8_are_read() {
        let files = AccessFiles::new();
        std::fs::write(files.path("revoked"), b"\xef\xbb\xbfa\r\n# gr\xfc\xdfe\nb\xff\n  c # why\n\n")
            .unwrap();
        let ids = read_ids(&RevokedFile { path: files.path("revoked"), issuer: None }).unwrap();
        assert!(["a", "b\u{fffd}", "c"].iter().all(|id| ids.contains(*id)), "{ids:?}");
    }

    #[test]
    fn unusable_access_settings_are_reported_at_each_check_until_fixed() {
        let mut watch = AccessFileWatch::new(&AccessConfig::default(), &AccessPolicy::default());
        watch.change(Err(anyhow::anyhow!("line 3")));
        for _ in 0..2 {
            assert_eq!(said(&watch.look(true).unwrap()).3, ["settings"]);
        }
        watch.change(Ok(AccessConfig::default()));
        assert!(watch.look(true).unwrap().unread.is_empty());
    }
}
