//! Who may do what, from files: keys of tokens, revocations and roots of clients, read again when they change.

use std::{collections::HashSet, path::PathBuf, sync::Arc};

use anyhow::Context;
use millrace_proto::moq::token::Credential;
use millrace_relay::access::{Policy, Requirements, keys, token};
use rustls::RootCertStore;
use tracing::warn;

use super::{
    config::Access,
    tls::{self, Stamp, stamp},
};

/// Reads the files that the settings name.
///
/// # Errors
/// One cannot be read, or has no keys.
pub fn read(access: &Access) -> anyhow::Result<Policy> {
    let mut tokens = Requirements {
        audience: access.audience.clone(),
        issuers: access.issuers.clone(),
        ..Requirements::default()
    };
    for path in &access.keys {
        let name = || format!("token-keys: {}", path.display());
        let bytes = std::fs::read(path).with_context(name)?;
        tokens.keys.extend(keys::read(&bytes).with_context(name)?);
    }
    if let Some(path) = &access.revoked {
        let text = std::fs::read_to_string(path);
        tokens.revoked = ids(&text.with_context(|| format!("token-revoked: {}", path.display()))?);
    }
    Ok(Policy::new(access.rules.clone(), tokens, access.client_ca.is_some()))
}

/// Reads the roots of clients' certificates, if there are any.
///
/// # Errors
/// They cannot be read.
pub fn client_roots(access: &Access) -> anyhow::Result<Option<Arc<RootCertStore>>> {
    let roots = access.client_ca.as_ref().map(|path| tls::roots(path)).transpose();
    Ok(roots.context("client-ca")?.map(Arc::new))
}

/// One a line; `#` begins a comment.
fn ids(text: &str) -> HashSet<String> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// What the files say now.
pub struct Changed {
    pub policy: Policy,
    pub client_roots: Option<Arc<RootCertStore>>,
}

/// Notices when the files change. What cannot be used is an error once, not at every look.
pub struct Watch {
    access: Access,
    seen: Vec<Option<Stamp>>,
}

impl Watch {
    /// Starts from the files as they are.
    pub fn new(access: &Access) -> Self {
        let mut watch = Self { access: access.clone(), seen: Vec::new() };
        watch.seen = watch.stamps();
        watch
    }

    fn stamps(&self) -> Vec<Option<Stamp>> {
        let files = self.access.keys.iter().chain(&self.access.revoked).chain(&self.access.client_ca);
        files.map(|path| stamp(path)).collect()
    }

    /// `Some` if the files have changed since the last look, or `always`.
    pub fn look(&mut self, always: bool) -> Option<anyhow::Result<Changed>> {
        let now = self.stamps();
        if now == self.seen && !always {
            return None;
        }
        self.seen = now;
        let changed =
            || Ok(Changed { policy: read(&self.access)?, client_roots: client_roots(&self.access)? });
        Some(changed())
    }
}

/// What a relay shows its upstream: the token that is in a file at the time.
pub fn token_file(path: PathBuf) -> Arc<dyn Fn() -> Option<Credential> + Send + Sync> {
    Arc::new(move || match std::fs::read(&path) {
        Ok(bytes) => Some(token::of_bytes(&bytes)),
        Err(error) => {
            warn!(path = %path.display(), %error, "no token for the upstream relay");
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_of_clients_are_read_again_when_they_change() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("clients.pem");
        let put = |text: &str| {
            let beside = dir.path().join("new");
            std::fs::write(&beside, text).unwrap();
            std::fs::rename(beside, &path).unwrap();
        };
        let root = || rcgen::generate_simple_self_signed(["clients".to_owned()]).unwrap().cert.pem();
        put(&root());
        let access = Access { client_ca: Some(path.clone()), ..Access::default() };
        let mut watch = Watch::new(&access);
        assert!(watch.look(false).is_none());
        put(&(root() + &root()));
        let changed = watch.look(false).unwrap().unwrap();
        assert_eq!(changed.client_roots.map(|roots| roots.len()), Some(2));
        put("nothing of the kind");
        assert!(watch.look(false).unwrap().is_err());
        assert!(watch.look(false).is_none(), "reported once");
        let none = Watch::new(&Access::default()).look(true).unwrap().unwrap();
        assert!(none.client_roots.is_none());
    }
}
