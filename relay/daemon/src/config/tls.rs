//! Settings about certificates, whom they are shown to, and how connections are encrypted.

use std::{fmt, path::PathBuf};

use clap::ValueEnum;
use millrace_moq::Draft;
use millrace_relay::Origins;
use url::Url;

use super::{
    Check, repeated,
    values::{DraftNumber, RelayUrl, deserialize, name},
};

/// Drafts as the relay prefers them: the newest first, but for draft-20. Who knows nothing newer is `@moq/net` 0.3.4, which writes
/// LARGEST_OBJECT of that draft with a length that it does not have, and leaves it out of older ones.
pub(super) const PREFERRED: [Draft; 5] = [Draft::D22, Draft::D21, Draft::D19, Draft::D18, Draft::D20];

/// The certificate that the relay shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// PEM files, read again when they change.
    Files { cert: PathBuf, key: PathBuf },
    /// Made at start-up, gone at exit; and the certificate written here.
    SelfSigned { out: Option<PathBuf> },
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Files { cert, .. } => write!(f, "the certificate in {}", cert.display()),
            Self::SelfSigned { .. } => f.write_str("the certificate that was made"),
        }
    }
}

/// Another relay that is asked for what nobody here publishes.
#[derive(Clone, Debug)]
pub struct Upstream {
    pub url: Url,
    /// PEM file of trusted roots; `None`: the upstream's certificate is not verified.
    pub tls_root: Option<PathBuf>,
    /// Shown there: a file, read again for each connection.
    pub token: Option<PathBuf>,
    /// Certificate chain and key that are shown there.
    pub identity: Option<(PathBuf, PathBuf)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CipherSuite {
    Chacha20Poly1305,
    #[value(name = "aes-128-gcm")]
    Aes128Gcm,
    #[value(name = "aes-256-gcm")]
    Aes256Gcm,
}

deserialize!(chosen: CipherSuite);

/// Root certificates of Debian and Ubuntu, the default for `upstream-tls-root`.
const SYSTEM_ROOTS: &str = "/etc/ssl/certs/ca-certificates.crt";

impl Check {
    pub(super) fn identity(
        &mut self,
        (cert, key): (Option<PathBuf>, Option<PathBuf>),
        self_signed: Option<bool>,
        out: Option<PathBuf>,
    ) -> Identity {
        if out.is_some() && (cert.is_some() || key.is_some()) {
            self.problem("tls-self-signed-out", "means nothing with tls-cert: no certificate is made");
        }
        match (cert, key) {
            (Some(cert), Some(key)) => {
                if self_signed == Some(true) {
                    self.problem(
                        "tls-self-signed",
                        "contradicts tls-cert: a certificate is read or made, not both",
                    );
                }
                return Identity::Files { cert, key };
            }
            (Some(_), None) => self.problem("tls-cert", "needs tls-key as well"),
            (None, Some(_)) => self.problem("tls-key", "needs tls-cert as well"),
            (None, None) if self_signed == Some(false) => {
                self.problem("tls-self-signed", "is off, so tls-cert and tls-key are needed");
            }
            (None, None) => {}
        }
        Identity::SelfSigned { out }
    }

    pub(super) fn web(&mut self, webtransport: bool, given: Option<Vec<String>>) -> Option<Origins> {
        if !webtransport && given.is_some() {
            self.problem("web-origin", "means nothing without webtransport");
        }
        let is_origin =
            |text: &str| Url::parse(text).is_ok_and(|url| url.origin().ascii_serialization() == text);
        for origin in given.iter().flatten().filter(|origin| !is_origin(origin)) {
            self.problem("web-origin", format!("{origin:?} is no origin, such as https://example.org"));
        }
        webtransport.then(|| given.map_or(Origins::Any, Origins::Only))
    }

    /// In our order of preference, whatever the order that they were given in.
    pub(super) fn drafts(&mut self, given: Option<Vec<DraftNumber>>) -> Vec<Draft> {
        let Some(given) = given else { return PREFERRED.to_vec() };
        if given.is_empty() {
            self.problem("drafts", "needs at least one draft");
        }
        if let Some(DraftNumber(twice)) = repeated(&given) {
            self.problem("drafts", format!("{} is given twice", twice.number()));
        }
        PREFERRED.into_iter().filter(|draft| given.contains(&DraftNumber(*draft))).collect()
    }

    pub(super) fn cipher_suites(&mut self, given: Option<Vec<CipherSuite>>) -> Vec<CipherSuite> {
        let suites = given.unwrap_or_else(|| CipherSuite::value_variants().to_vec());
        if suites.is_empty() {
            self.problem("cipher-suites", "needs at least one suite");
        }
        if let Some(twice) = repeated(&suites) {
            self.problem("cipher-suites", format!("{} is given twice", name(&twice)));
        }
        suites
    }

    pub(super) fn upstream(
        &mut self,
        url: Option<RelayUrl>,
        root: Option<PathBuf>,
        disable_verify: bool,
        token: Option<PathBuf>,
        (cert, key): (Option<PathBuf>, Option<PathBuf>),
    ) -> Option<Upstream> {
        if root.is_some() && disable_verify {
            self.problem("upstream-tls-root", "means nothing with upstream-tls-disable-verify");
        }
        if url.is_none() && root.is_some() {
            self.problem("upstream-tls-root", "needs upstream as well");
        }
        if url.is_none() && disable_verify {
            self.problem("upstream-tls-disable-verify", "needs upstream as well");
        }
        if cert.is_some() != key.is_some() {
            let given = if cert.is_some() { "upstream-tls-cert" } else { "upstream-tls-key" };
            self.problem(given, "upstream-tls-cert and upstream-tls-key need each other");
        }
        for (name, given) in [("upstream-token", token.is_some()), ("upstream-tls-cert", cert.is_some())] {
            if url.is_none() && given {
                self.problem(name, "needs upstream as well");
            }
        }
        let tls_root = (!disable_verify).then(|| root.unwrap_or_else(|| SYSTEM_ROOTS.into()));
        url.map(|url| Upstream { url: url.0, tls_root, token, identity: cert.zip(key) })
    }
}
