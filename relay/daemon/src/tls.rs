//! Reads the relay's certificate from PEM files and watches them for changes, or makes a self-signed certificate.

use std::{
    fmt::Write as _,
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use base64::Engine as _;
use millrace_daemon::pem;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use parking_lot::Mutex;
use rustls::{crypto::ring, pki_types::PrivatePkcs8KeyDer, sign::CertifiedKey};

use super::config::IdentityConfig;

/// The reason why a certificate cannot be read, made or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A PEM file cannot be read, or its contents are not usable.
    #[error(transparent)]
    File(#[from] pem::Error),
    /// The self-signed certificate cannot be written to its file.
    #[error("{}: {source}", path.display())]
    #[allow(missing_docs, reason = "the path of the file, and the error of the file system")]
    Write { path: PathBuf, source: io::Error },
    /// Another running relay has written its certificate to this file.
    #[error(
        "{}: it holds the certificate of another relay that runs and whose clients need it; name another file, or end that relay",
        .0.display()
    )]
    Held(PathBuf),
    /// A self-signed certificate cannot be made.
    #[error("cannot make a self-signed certificate: {0}")]
    SelfSigned(#[from] rcgen::Error),
    /// The TLS library does not accept the self-signed certificate.
    #[error("the certificate just made is not usable: {0}")]
    SelfSignedPair(rustls::Error),
}

/// Reads the relay's certificate from its files, or makes a self-signed one. `names` has the host names and addresses
/// for which a self-signed one is valid.
pub fn identity(identity: &IdentityConfig, names: Vec<String>) -> Result<Arc<CertifiedKey>, Error> {
    Ok(Arc::new(match identity {
        IdentityConfig::Files { cert, key } => pem::pair(cert, key)?,
        IdentityConfig::SelfSigned { .. } => self_signed(names)?,
    }))
}

/// The file with the relay's self-signed certificate. The file stays locked while this value exists, so that another
/// relay with the same settings does not replace the certificate.
#[derive(Debug, Default)]
pub struct WrittenCertificate(Option<Flock<File>>);

impl WrittenCertificate {
    /// Writes the certificate to the file that the settings name, if any. The certificate is first written to a new
    /// file, which is then renamed, so that no reader sees half of a certificate. Call this only after the relay has
    /// bound its addresses: a relay that fails to start must leave no certificate.
    ///
    /// # Errors
    /// Fails if the file cannot be written, or belongs to another running relay.
    pub fn write(&mut self, identity: &IdentityConfig, certified: &CertifiedKey) -> Result<(), Error> {
        let IdentityConfig::SelfSigned { out: Some(path) } = identity else { return Ok(()) };
        let Some(leaf) = certified.cert.first() else { return Ok(()) };
        if self.0.is_none() && is_held(path) {
            return Err(Error::Held(path.clone()));
        }
        // The process ID keeps two relays that start at the same time from writing to one temporary file.
        let beside = path.with_extension(format!("{}.new", std::process::id()));
        let write = || -> io::Result<Flock<File>> {
            let mut file = File::create(&beside)?;
            file.write_all(as_pem(leaf).as_bytes())?;
            // The lock is taken before the rename, so that no other relay finds the file in its place without a lock.
            let file = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| error)?;
            std::fs::rename(&beside, path)?;
            Ok(file)
        };
        let written = write().map_err(|source| {
            // An error is ignored: the temporary file may not exist, and the error of the write is returned.
            let _ = std::fs::remove_file(&beside);
            Error::Write { path: path.clone(), source }
        })?;
        self.0 = Some(written);
        Ok(())
    }
}

/// Reports whether a running relay has written the file and holds its lock.
fn is_held(path: &Path) -> bool {
    // A file that does not exist cannot be locked by another relay.
    let Ok(file) = File::open(path) else { return false };
    matches!(Flock::lock(file, FlockArg::LockExclusiveNonblock), Err((_, Errno::EWOULDBLOCK)))
}

fn as_pem(certificate: &[u8]) -> String {
    let mut text = "-----BEGIN CERTIFICATE-----\n".to_owned();
    let base64 = base64::engine::general_purpose::STANDARD.encode(certificate);
    for line in base64.as_bytes().chunks(64) {
        text.push_str(&String::from_utf8_lossy(line));
        text.push('\n');
    }
    text.push_str("-----END CERTIFICATE-----\n");
    text
}

/// Age at which a new self-signed certificate is made, about half of its validity.
const RENEWAL: Duration = Duration::from_secs(6 * 86_400);

/// Makes an ECDSA P-256 certificate for 13 days. Browsers accept a certificate by its fingerprint only if it is valid
/// for at most 14 days (WebTransport, `serverCertificateHashes`).
fn self_signed(names: Vec<String>) -> Result<CertifiedKey, Error> {
    let mut params = rcgen::CertificateParams::new(names)?;
    // The certificate is valid from an hour ago on, for clients whose clocks are slow.
    let start = SystemTime::now() - Duration::from_secs(3600);
    params.not_before = start.into();
    params.not_after = (start + Duration::from_secs(13 * 86_400)).into();
    params.distinguished_name.push(rcgen::DnType::CommonName, "millrace (self-signed)");
    let key = rcgen::KeyPair::generate()?;
    let cert = params.self_signed(&key)?;
    let private = PrivatePkcs8KeyDer::from(key.serialize_der());
    CertifiedKey::from_der(vec![cert.der().clone()], private.into(), &ring::default_provider())
        .map_err(Error::SelfSignedPair)
}

/// Returns the SHA-256 of the leaf certificate in lower-case hexadecimal.
pub fn fingerprint(certified: &CertifiedKey) -> String {
    let leaf = certified.cert.first().map(|cert| cert.as_ref()).unwrap_or_default();
    let digest = ::ring::digest::digest(&::ring::digest::SHA256, leaf);
    digest.as_ref().iter().fold(String::new(), |mut hex, byte| {
        // Writing to a `String` cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// The watch that notices when the certificate must be replaced: its files have changed (modification time, length or
/// inode), or the self-signed one is old.
///
/// A certificate and key that do not match are reported once, not at every check, since tools replace the files one
/// after the other.
pub(crate) enum CertificateWatch {
    /// The certificate comes from PEM files. `seen` has the stamps (modification time, length and inode) of both files
    /// when they were last read; `None` for a file that did not exist.
    Files { cert: PathBuf, key: PathBuf, seen: [Option<Stamp>; 2] },
    /// The certificate is self-signed. It is valid for these host names and addresses, and was made at the time `at`.
    Made { names: Vec<String>, at: SystemTime },
}

/// The modification time of a file in seconds and nanoseconds, its length, and its inode.
pub(super) type Stamp = (i64, i64, u64, u64);

impl CertificateWatch {
    /// Starts watching the present certificate files, or the age of a self-signed certificate that was just made.
    /// `names` is as for [`identity`].
    pub fn new(identity: &IdentityConfig, names: Vec<String>) -> Self {
        match identity {
            IdentityConfig::Files { cert, key } => {
                Self::Files { cert: cert.clone(), key: key.clone(), seen: [stamp(cert), stamp(key)] }
            }
            IdentityConfig::SelfSigned { .. } => Self::Made { names, at: SystemTime::now() },
        }
    }

    /// Returns the new certificate if it must be replaced, and `None` otherwise. With `always`, unchanged certificate
    /// files are read as well.
    pub fn look(&mut self, always: bool) -> Option<Result<Arc<CertifiedKey>, Error>> {
        match self {
            Self::Files { cert, key, seen } => {
                let now = [stamp(cert), stamp(key)];
                if now == *seen && !always {
                    return None;
                }
                // The stamps are stored before the files are read, so that an unusable pair of files is reported only
                // once.
                *seen = now;
                Some(pem::pair(cert, key).map(Arc::new).map_err(Error::from))
            }
            Self::Made { names, at } => at.elapsed().is_ok_and(|age| age >= RENEWAL).then(|| {
                // The time is set even if no certificate can be made, so that a failure is not repeated at every check.
                *at = SystemTime::now();
                self_signed(names.clone()).map(Arc::new)
            }),
        }
    }
}

pub(super) fn stamp(path: &Path) -> Option<Stamp> {
    let meta = path.metadata().ok()?;
    Some((meta.mtime(), meta.mtime_nsec(), meta.len(), meta.ino()))
}

/// Appends TLS secrets to a file in the NSS key log format that packet analysers read.
#[derive(Debug)]
pub struct KeyLogFile(Mutex<File>);

impl KeyLogFile {
    /// Opens the file for appending. Only its owner can read a new file.
    pub fn open(path: &Path) -> Result<Self, Error> {
        OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(path)
            .map(|file| Self(Mutex::new(file)))
            .map_err(|source| Error::Write { path: path.to_owned(), source })
    }
}

impl rustls::KeyLog for KeyLogFile {
    fn log(&self, label: &str, client_random: &[u8], secret: &[u8]) {
        // The line is written by one call under the lock, so that lines of concurrent handshakes do not mix.
        let mut line = format!("{label} ");
        for (bytes, end) in [(client_random, ' '), (secret, '\n')] {
            for byte in bytes {
                let _ = write!(line, "{byte:02x}");
            }
            line.push(end);
        }
        // Errors are ignored: the log is for debugging, and a full disk must not affect sessions.
        let _ = self.0.lock().write_all(line.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::{CertificateDer, pem::PemObject as _};

    use super::*;

    const MADE: IdentityConfig = IdentityConfig::SelfSigned { out: None };

    struct CertificateFiles {
        dir: tempfile::TempDir,
        identity: IdentityConfig,
    }

    fn files() -> CertificateFiles {
        let dir = tempfile::tempdir().unwrap();
        let identity =
            IdentityConfig::Files { cert: dir.path().join("cert.pem"), key: dir.path().join("key.pem") };
        CertificateFiles { dir, identity }
    }

    impl CertificateFiles {
        /// Replaces a file by writing a new one and renaming it, as certificate tools do.
        fn put(&self, name: &str, text: &str) {
            let beside = self.dir.path().join("new");
            std::fs::write(&beside, text).unwrap();
            std::fs::rename(beside, self.dir.path().join(name)).unwrap();
        }
    }

    fn pair() -> (String, String) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    #[test]
    fn self_signed_certificate_is_new_at_each_start() {
        let make = || fingerprint(&identity(&MADE, vec!["localhost".into(), "::1".into()]).unwrap());
        let first = make();
        assert_eq!(first.len(), 64);
        assert_ne!(first, make());
    }

    #[test]
    fn self_signed_certificate_is_renewed_before_it_expires() {
        let mut watch = CertificateWatch::new(&MADE, vec!["localhost".into()]);
        assert!(watch.look(false).is_none());
        assert!(watch.look(true).is_none(), "there is nothing to read again");
        let CertificateWatch::Made { at, .. } = &mut watch else { panic!() };
        *at -= RENEWAL;
        let made = watch.look(false).unwrap().unwrap();
        let (_, cert) = x509_parser::parse_x509_certificate(&made.cert[0]).unwrap();
        let rest = cert.validity().time_to_expiration().unwrap();
        assert!(rest.whole_seconds() as u64 > RENEWAL.as_secs(), "{rest}");
        assert!(watch.look(false).is_none());
    }

    #[test]
    fn changed_certificate_is_loaded_and_its_key_mismatch_reported_once() {
        let files = files();
        let (cert, key) = pair();
        files.put("cert.pem", &cert);
        files.put("key.pem", &key);
        let before = fingerprint(&identity(&files.identity, vec![]).unwrap());
        let mut watch = CertificateWatch::new(&files.identity, vec![]);
        assert!(watch.look(false).is_none());
        assert!(matches!(watch.look(true), Some(Ok(_))));

        let (cert, key) = pair();
        files.put("cert.pem", &cert);
        assert!(
            matches!(watch.look(false), Some(Err(Error::File(pem::Error::Pair { .. })))),
            "certificate without its key"
        );
        assert!(watch.look(false).is_none(), "reported once");
        files.put("key.pem", &key);
        let after = watch.look(false).unwrap().unwrap();
        assert_ne!(fingerprint(&after), before);

        std::fs::remove_file(files.dir.path().join("key.pem")).unwrap();
        assert!(matches!(watch.look(false), Some(Err(Error::File(pem::Error::Read { .. })))));
    }

    #[test]
    fn self_signed_certificate_is_written_for_clients() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("relay.pem");
        let made = IdentityConfig::SelfSigned { out: Some(out.clone()) };
        let certified = identity(&made, vec!["localhost".into()]).unwrap();
        WrittenCertificate::default().write(&made, &certified).unwrap();
        let read = CertificateDer::from_pem_file(&out).unwrap();
        assert_eq!(read, certified.cert[0]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
        let nowhere = IdentityConfig::SelfSigned { out: Some("/nowhere/relay.pem".into()) };
        let error = WrittenCertificate::default().write(&nowhere, &certified).unwrap_err().to_string();
        assert!(error.contains("/nowhere/relay.pem"), "{error}");
    }

    #[test]
    fn certificate_file_of_a_running_relay_is_not_overwritten_by_another() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("relay.pem");
        let made = IdentityConfig::SelfSigned { out: Some(out.clone()) };
        let [first, renewed, other] = [(); 3].map(|()| identity(&made, vec!["localhost".into()]).unwrap());
        let mut running = WrittenCertificate::default();
        running.write(&made, &first).unwrap();
        let in_file = || CertificateDer::from_pem_file(&out).unwrap();
        for mine in [first, renewed] {
            running.write(&made, &mine).unwrap();
            let refused = WrittenCertificate::default().write(&made, &other).unwrap_err();
            assert!(matches!(refused, Error::Held(_)), "{refused}");
            assert_eq!(in_file(), mine.cert[0]);
        }
        drop(running);
        WrittenCertificate::default().write(&made, &other).unwrap();
        assert_eq!(in_file(), other.cert[0], "no running relay uses the previous certificate");
    }

    #[test]
    fn key_log_file_is_private_and_in_nss_format() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        rustls::KeyLog::log(&KeyLogFile::open(&path).unwrap(), "LABEL", &[0xab, 1], &[2, 0xcd]);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "LABEL ab01 02cd\n");
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
    }
}
