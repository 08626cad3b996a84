//! The token that HTTP requests to a daemon must show. All daemons and clients of one user share the token's file,
//! which other users must not be able to read.

use std::{
    convert::Infallible,
    fmt, fs, io,
    io::{Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    str::FromStr,
};

use ring::{
    digest, hmac,
    rand::{SecureRandom as _, SystemRandom},
};

/// Length of a generated token in hexadecimal digits: 256 bits.
const DIGITS: usize = 64;
const LEAST: usize = 32;
const MOST: usize = 1024;

/// The location of the token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TokenFile {
    /// The default token file, which all Millrace programs of this user share.
    #[default]
    Default,
    /// The file at this path.
    At(PathBuf),
    /// No token: every client that reaches the address is answered.
    Off,
}

impl FromStr for TokenFile {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "off" => Self::Off,
            path => Self::At(path.into()),
        })
    }
}

impl TokenFile {
    fn path(&self) -> Result<Option<PathBuf>, Error> {
        match self {
            Self::Off => Ok(None),
            Self::At(path) => Ok(Some(path.clone())),
            Self::Default => {
                let directory = directory(nix::unistd::geteuid().is_root(), |name| {
                    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
                });
                directory.map(|path| Some(path.join("http.token"))).ok_or(Error::NoPlace)
            }
        }
    }

    /// Returns the token for a server: the token in the file, or a new token, which is written to the file.
    ///
    /// # Errors
    /// Fails if there is no token and none can be written, or if other users may read it.
    pub fn read_or_make(&self) -> Result<Option<HttpToken>, Error> {
        let Some(path) = self.path()? else { return Ok(None) };
        match HttpToken::read(&path) {
            Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                HttpToken::make(&path).map(Some)
            }
            done => done.map(Some),
        }
    }

    /// Returns the token for a client. It is `None` if the default file does not exist, because then no server requires
    /// a token.
    ///
    /// # Errors
    /// Fails if the caller has named a file that cannot be read.
    pub fn read(&self) -> Result<Option<HttpToken>, Error> {
        let Some(path) = self.path()? else { return Ok(None) };
        match (HttpToken::read(&path), self) {
            (Err(Error::File { .. }), Self::Default) => Ok(None),
            (done, _) => done.map(Some),
        }
    }
}

/// Returns the directory of the default token file. It is the runtime directory that the service manager made for this
/// service. Without such a directory, it is the system's runtime directory for root, and the user's for others.
fn directory(root: bool, env: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    // If a service has several runtime directories, systemd separates them by colons in RUNTIME_DIRECTORY.
    let service = env("RUNTIME_DIRECTORY").and_then(|paths| {
        let text = paths.to_str()?;
        text.split(':').find(|path| path.ends_with("/millrace")).map(PathBuf::from)
    });
    service.or_else(|| match root {
        true => Some("/run/millrace".into()),
        false => env("XDG_RUNTIME_DIR")
            .or_else(|| env("HOME").map(|home| home.join(".local/state")))
            .map(|path| path.join("millrace")),
    })
}

/// The reason why no token is available.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("there is neither XDG_RUNTIME_DIR nor HOME for a token: name a file with --http-token-file")]
    NoPlace,
    #[error("the HTTP token in {path} is not usable: {source}; name another file with --http-token-file")]
    File { path: PathBuf, source: io::Error },
    #[error("{path} may be read by everyone: chmod o= {path}", path = .0.display())]
    Public(PathBuf),
    #[error("{path} belongs to user {owner}", path = .path.display())]
    Foreign { path: PathBuf, owner: u32 },
    #[error("{path} holds no token: {LEAST} to {MOST} characters without space; remove it and start the server again to create one", path = .0.display())]
    Malformed(PathBuf),
}

/// A token. Its text is shown only to clients that are allowed to use it.
#[derive(Clone, PartialEq, Eq)]
pub struct HttpToken {
    text: String,
    path: PathBuf,
}

impl fmt::Debug for HttpToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({})", self.path.display())
    }
}

impl HttpToken {
    fn read(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::File { path: path.to_owned(), source };
        let file = fs::File::open(path).map_err(failed)?;
        let about = file.metadata().map_err(failed)?;
        // Members of the file's group may have access. The file is refused as public only if all other users have
        // access.
        if about.mode() & 0o007 != 0 {
            return Err(Error::Public(path.to_owned()));
        }
        // If another user owned the file, that user would choose the token.
        let own = nix::unistd::geteuid();
        if about.uid() != 0 && about.uid() != own.as_raw() && !own.is_root() {
            return Err(Error::Foreign { path: path.to_owned(), owner: about.uid() });
        }
        let mut text = String::new();
        // Two bytes more than a token are read: one for a line end, and one that reveals a text that is too long.
        file.take(MOST as u64 + 2).read_to_string(&mut text).map_err(failed)?;
        let text = text.trim_end().to_owned();
        let is_token = (LEAST..=MOST).contains(&text.len()) && text.bytes().all(|it| it.is_ascii_graphic());
        if is_token {
            Ok(Self { text, path: path.to_owned() })
        } else {
            Err(Error::Malformed(path.to_owned()))
        }
    }

    /// Creates a token file. If two processes create the same file at once, both use the token that was written first.
    fn make(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::File { path: path.to_owned(), source };
        let directory = path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(failed)?;
        let mut random = [0; DIGITS / 2];
        SystemRandom::new().fill(&mut random).map_err(|_| failed(io::Error::other("no randomness")))?;
        let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        // The file is created with mode 0600, so it is never readable by others.
        let mut file = tempfile::NamedTempFile::new_in(directory).map_err(failed)?;
        writeln!(file, "{text}").map_err(failed)?;
        match file.persist_noclobber(path) {
            Ok(_) => Ok(Self { text, path: path.to_owned() }),
            Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Self::read(path),
            Err(error) => Err(failed(error.error)),
        }
    }

    /// Reports whether a text is the token, in constant time.
    pub fn is(&self, other: &str) -> bool {
        is_same(&self.text, other)
    }

    /// Derives the cookie for a server on this port. The cookie is valid for this port only, and the token cannot be
    /// computed from it.
    pub fn cookie(&self, port: u16) -> DerivedSecret {
        let key = hmac::Key::new(hmac::HMAC_SHA256, self.text.as_bytes());
        let tag = hmac::sign(&key, format!("cookie of port {port}").as_bytes());
        DerivedSecret(tag.as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Returns the token's text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the path of the token's file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A secret that is derived from a token for one purpose.
#[derive(Clone, PartialEq, Eq)]
pub struct DerivedSecret(String);

impl DerivedSecret {
    /// Reports whether a text is the secret, in constant time.
    pub fn is(&self, other: &str) -> bool {
        is_same(&self.0, other)
    }

    /// Returns the secret's text.
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for DerivedSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Compares two texts in constant time.
fn is_same(one: &str, other: &str) -> bool {
    // The comparison uses digests, so its duration reveals nothing about the texts.
    let of = |text: &str| digest::digest(&digest::SHA256, text.as_bytes());
    of(one).as_ref() == of(other).as_ref()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn token_file_is_created_once_and_readable_by_its_owner_only() {
        let directory = tempfile::tempdir().unwrap();
        let file = TokenFile::At(directory.path().join("a/token"));
        assert!(matches!(file.read(), Err(Error::File { .. })));
        let token = file.read_or_make().unwrap().unwrap();
        assert_eq!(token.text().len(), DIGITS);
        assert_eq!(fs::metadata(token.path()).unwrap().mode() & 0o777, 0o600);
        assert_eq!(file.read_or_make().unwrap(), Some(token.clone()));
        assert_eq!(file.read().unwrap(), Some(token.clone()));
        assert!(token.is(token.text()) && !token.is("") && !token.is(&token.text()[1..]));
        assert!(!format!("{token:?}").contains(token.text()));
        assert_eq!(TokenFile::Off.read_or_make().unwrap(), None);
    }

    #[test]
    fn token_file_readable_by_others_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let file = TokenFile::At(path.clone());
        let put = |text: &str, mode| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        };
        put(&"a".repeat(32), 0o644);
        assert!(matches!(file.read_or_make(), Err(Error::Public(_))));
        put(&"a".repeat(32), 0o640);
        assert!(file.read_or_make().unwrap().is_some());
        for malformed in ["", "short", &"a".repeat(MOST + 1), &format!("{} {}", "a".repeat(32), "b")] {
            put(malformed, 0o600);
            assert!(matches!(file.read_or_make(), Err(Error::Malformed(_))), "{malformed:?}");
        }
    }

    #[test]
    fn http_token_directory_depends_on_root_xdg_and_systemd_variables() {
        let none = |_: &str| None;
        let given = |name: &'static str, value: &'static str| {
            move |asked: &str| (asked == name).then(|| PathBuf::from(value))
        };
        assert_eq!(directory(true, none), Some("/run/millrace".into()));
        assert_eq!(directory(false, none), None);
        assert_eq!(
            directory(false, given("XDG_RUNTIME_DIR", "/run/user/7")),
            Some("/run/user/7/millrace".into())
        );
        assert_eq!(directory(false, given("HOME", "/home/u")), Some("/home/u/.local/state/millrace".into()));
        let systemd = given("RUNTIME_DIRECTORY", "/run/other:/run/millrace");
        assert_eq!(directory(false, systemd), Some("/run/millrace".into()));
    }
}
