//! The secret that a user's own programs have in common: a file that nobody else may read.

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

/// Characters of a token that is made here: 256 bits.
const DIGITS: usize = 64;
const LEAST: usize = 32;
const MOST: usize = 1024;

/// Where the token is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TokenFile {
    /// One for all programs of this user.
    #[default]
    Default,
    At(PathBuf),
    /// Whoever reaches the address is answered.
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

    /// For a server: the token that is there, or a new one.
    ///
    /// # Errors
    /// There is none and none can be written, or others may read it.
    pub fn read_or_make(&self) -> Result<Option<Token>, Error> {
        let Some(path) = self.path()? else { return Ok(None) };
        match Token::read(&path) {
            Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Token::make(&path).map(Some)
            }
            done => done.map(Some),
        }
    }

    /// For a client: the token, or nothing where there is none, as no server has been asked for one.
    ///
    /// # Errors
    /// A file that was named cannot be read.
    pub fn read(&self) -> Result<Option<Token>, Error> {
        let Some(path) = self.path()? else { return Ok(None) };
        match (Token::read(&path), self) {
            (Err(Error::File { .. }), Self::Default) => Ok(None),
            (done, _) => done.map(Some),
        }
    }
}

/// Of what a service manager made for this service, of the system's or of the user's own.
fn directory(root: bool, env: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    // systemd names several with colons between.
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

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is neither XDG_RUNTIME_DIR nor HOME for a token: name a file with --http-token-file")]
    NoPlace,
    #[error("the token in {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("{path} may be read by everyone: chmod o= {path}", path = .0.display())]
    Public(PathBuf),
    #[error("{path} belongs to user {owner}", path = .path.display())]
    Foreign { path: PathBuf, owner: u32 },
    #[error("{path} holds no token: {LEAST} to {MOST} characters without space; remove it and it is made anew", path = .0.display())]
    Malformed(PathBuf),
}

/// Its text is shown to nobody but those it is made for.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    text: String,
    path: PathBuf,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({})", self.path.display())
    }
}

impl Token {
    fn read(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::File { path: path.to_owned(), source };
        let file = fs::File::open(path).map_err(failed)?;
        let about = file.metadata().map_err(failed)?;
        if about.mode() & 0o007 != 0 {
            return Err(Error::Public(path.to_owned()));
        }
        let own = nix::unistd::geteuid();
        if about.uid() != 0 && about.uid() != own.as_raw() && !own.is_root() {
            return Err(Error::Foreign { path: path.to_owned(), owner: about.uid() });
        }
        let mut text = String::new();
        file.take(MOST as u64 + 2).read_to_string(&mut text).map_err(failed)?;
        let text = text.trim_end().to_owned();
        let is_token = (LEAST..=MOST).contains(&text.len()) && text.bytes().all(|it| it.is_ascii_graphic());
        if is_token {
            Ok(Self { text, path: path.to_owned() })
        } else {
            Err(Error::Malformed(path.to_owned()))
        }
    }

    /// Of two that make one at once, both go on with the first.
    fn make(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::File { path: path.to_owned(), source };
        let directory = path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(failed)?;
        let mut random = [0; DIGITS / 2];
        SystemRandom::new().fill(&mut random).map_err(|_| failed(io::Error::other("no randomness")))?;
        let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        // Its mode is 0600 from the beginning.
        let mut file = tempfile::NamedTempFile::new_in(directory).map_err(failed)?;
        writeln!(file, "{text}").map_err(failed)?;
        match file.persist_noclobber(path) {
            Ok(_) => Ok(Self { text, path: path.to_owned() }),
            Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Self::read(path),
            Err(error) => Err(failed(error.error)),
        }
    }

    pub fn is(&self, other: &str) -> bool {
        is_same(&self.text, other)
    }

    /// Derives what a browser shows to the server of this port. Nothing else can be had by it, nor can the token be computed of it.
    pub fn cookie(&self, port: u16) -> Secret {
        let key = hmac::Key::new(hmac::HMAC_SHA256, self.text.as_bytes());
        let tag = hmac::sign(&key, format!("cookie of port {port}").as_bytes());
        Secret(tag.as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A secret that is derived from a token for one purpose.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn is(&self, other: &str) -> bool {
        is_same(&self.0, other)
    }

    pub fn text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Compares two texts, and tells nothing by the time that takes.
fn is_same(one: &str, other: &str) -> bool {
    let of = |text: &str| digest::digest(&digest::SHA256, text.as_bytes());
    of(one).as_ref() == of(other).as_ref()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn it_is_made_once_and_for_its_owner_only() {
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
    fn what_is_no_secret_is_refused() {
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
    fn each_user_has_a_place() {
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
