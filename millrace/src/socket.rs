//! Control sockets of daemons: a file that only its owner, and perhaps a group, may use, and one line of JSON each way.

use std::{
    convert::Infallible,
    io::{self, BufRead as _, BufReader, Write as _},
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixListener,
    sync::Semaphore,
};

/// Of the commands with an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Of a request, bytes.
const LINE_MAX: u64 = 64 * 1024;
/// Connections at once.
const CONVERSATIONS_MAX: usize = 64;

/// Asks a daemon, called `who` in errors, one thing.
pub fn ask<A: DeserializeOwned>(
    path: &Path,
    who: &'static str,
    request: &impl Serialize,
) -> anyhow::Result<A> {
    Conversation::open(path, who)?.ask(request)
}

/// A connection to a daemon, for several questions.
pub struct Conversation {
    stream: BufReader<UnixStream>,
    who: &'static str,
}

impl Conversation {
    pub fn open(path: &Path, who: &'static str) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| absent(path, who))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { stream: BufReader::new(stream), who })
    }

    /// # Errors
    /// Nothing that is an answer comes, or it is a refusal: then in its words.
    pub fn ask<A: DeserializeOwned>(&mut self, request: &impl Serialize) -> anyhow::Result<A> {
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        let who = self.who;
        let ended = || format!("the {who} does not answer any more");
        self.stream.get_mut().write_all(&line).map_err(|_| anyhow::Error::msg(ended()))?;
        let mut answer = String::new();
        if self.stream.read_line(&mut answer).with_context(ended)? == 0 {
            bail!("{}", ended());
        }
        let no_answer = || format!("the {who}'s answer");
        let Refusal { error } = serde_json::from_str(&answer).with_context(no_answer)?;
        match error {
            Some(error) => bail!("{error}"),
            None => serde_json::from_str(&answer).with_context(no_answer),
        }
    }
}

/// What every daemon says that does not do what it was asked.
#[derive(Deserialize)]
struct Refusal {
    error: Option<String>,
}

/// Why nobody may answer.
fn absent(path: &Path, who: &str) -> String {
    let path = path.display();
    match nix::unistd::geteuid().is_root() {
        true => format!("no {who} answers on {path}; is it running, with this --socket?"),
        false => format!(
            "no {who} answers on {path}; is it running, and may you use its socket? Run this as root, or as a member of its \
             --socket-group"
        ),
    }
}

/// Puts a socket there, in the place of any before. It is made under a name that nobody knows until its permissions are right.
pub fn put<S>(path: &Path, make: impl FnOnce(&Path) -> anyhow::Result<S>) -> anyhow::Result<S> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let new = path.with_extension(format!("{}.new", std::process::id()));
    let made = make(&new).and_then(|socket| {
        std::fs::rename(&new, path)?;
        Ok(socket)
    });
    if made.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    made
}

/// A listening socket; its file goes when it is dropped.
pub struct Socket {
    path: PathBuf,
    listener: UnixListener,
}

impl Socket {
    /// Inside of a runtime. `group`, if given, may use it, too.
    pub fn bind(path: &Path, who: &str, group: Option<&str>) -> anyhow::Result<Self> {
        Self::try_bind(path, who, group).with_context(|| format!("socket {}", path.display()))
    }

    fn try_bind(path: &Path, who: &str, group: Option<&str>) -> anyhow::Result<Self> {
        match UnixStream::connect(path) {
            Ok(_) => bail!("another {who} answers on it; choose another with --socket"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // Of a daemon that died. It is replaced below.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(error.into()),
        }
        let listener = put(path, |new| {
            let listener = UnixListener::bind(new)?;
            permit(new, group)?;
            Ok(listener)
        })?;
        Ok(Self { path: path.to_owned(), listener })
    }

    /// Answers all who ask, until it is dropped. `answer` may take some 10 ms.
    pub async fn serve<A>(
        &self,
        answer: impl Fn(&[u8]) -> anyhow::Result<A> + Clone + Send + 'static,
    ) -> Infallible
    where
        A: Serialize + From<anyhow::Error> + Send,
    {
        let places = Arc::new(Semaphore::new(CONVERSATIONS_MAX));
        loop {
            let stream = self.accept().await;
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                tracing::warn!("a connection to the control socket is one too many");
                continue;
            };
            let answer = answer.clone();
            tokio::spawn(async move {
                converse(stream, answer).await;
                drop(place);
            });
        }
    }

    /// The next connection.
    pub async fn accept(&self) -> tokio::net::UnixStream {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => return stream,
                Err(error) => {
                    tracing::warn!(%error, "control socket");
                    // Mostly for want of descriptors.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Answers the requests of one connection, a line each, until it ends. `answer` may take some 10 ms.
pub async fn converse<A: Serialize + From<anyhow::Error>>(
    stream: tokio::net::UnixStream,
    mut answer: impl FnMut(&[u8]) -> anyhow::Result<A>,
) {
    let (read, mut write) = stream.into_split();
    let mut read = tokio::io::BufReader::new(read);
    let mut line = Vec::new();
    loop {
        line.clear();
        let got = (&mut read).take(LINE_MAX).read_until(b'\n', &mut line).await;
        if !matches!(got, Ok(1..)) {
            return;
        }
        let is_whole = line.ends_with(b"\n");
        let answer = if is_whole {
            tokio::task::block_in_place(|| answer(&line))
        } else {
            Err(anyhow::anyhow!("a request is a line of at most {LINE_MAX} bytes"))
        };
        let Ok(mut text) = serde_json::to_vec(&answer.unwrap_or_else(A::from)) else { return };
        text.push(b'\n');
        if write.write_all(&text).await.is_err() || !is_whole {
            return;
        }
    }
}

fn permit(path: &Path, group: Option<&str>) -> anyhow::Result<()> {
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    let Some(name) = group else { return Ok(()) };
    let found = nix::unistd::Group::from_name(name)?;
    let group = found.with_context(|| format!("there is no group {name}"))?;
    Ok(nix::unistd::chown(path, None, Some(group.gid))?)
}
