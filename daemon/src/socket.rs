//! Control sockets of daemons: Unix sockets that only the owner, and optionally a group, may use. Each request and each
//! answer is one line of JSON.
//!
//! The answer to a request is `{"ok":true}`. If the request asks for data, the answer has one more field: a variant of
//! the daemon's answer enum, with its value. A refusal is `{"ok":false,"error":"..."}`.

use std::{
    convert::Infallible,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::Shutdown,
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use tokio::net::UnixListener;

use crate::closer::Closer;

/// Longest time that a command waits for a daemon's answer to one request.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time between two checks whether to continue waiting for an answer.
const LOOK: Duration = Duration::from_millis(100);
/// Longest request on a control socket, in bytes.
const LINE_MAX: u64 = 64 * 1024;
/// Largest number of connections to a control socket that are open at once.
const CONVERSATIONS_MAX: usize = 64;
/// Pause after accept fails, mostly for lack of descriptors, or while too many connections wait to be closed.
const PAUSE: Duration = Duration::from_millis(100);

/// Sends one request to a daemon. `who` is the daemon's name in errors. Returns `None` if the answer has no data.
pub fn ask<A: DeserializeOwned>(
    path: &Path,
    who: &'static str,
    request: &impl Serialize,
) -> anyhow::Result<Option<A>> {
    Conversation::open(path, who)?.ask(request)
}

/// A connection to a daemon, for several requests.
pub struct Conversation {
    stream: BufReader<UnixStream>,
    who: &'static str,
    has_ended: bool,
}

impl Conversation {
    /// Connects to a daemon. `who` is the daemon's name in errors.
    pub fn open(path: &Path, who: &'static str) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| absent(path, who))?;
        Ok(Self::over(stream, who))
    }

    /// Makes a [`Conversation`] from a stream that is connected to a daemon.
    pub fn over(stream: UnixStream, who: &'static str) -> Self {
        Self { stream: BufReader::new(stream), who, has_ended: false }
    }

    /// Reports whether the other end has closed the connection, or has not answered in time.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Sends a request and waits for the answer. Returns `None` if the answer has no data.
    ///
    /// # Errors
    /// Fails if the daemon does not answer, or if it refuses the request. The text of the refusal is then the error.
    pub fn ask<A: DeserializeOwned>(&mut self, request: &impl Serialize) -> anyhow::Result<Option<A>> {
        let began = Instant::now();
        self.ask_while(request, || began.elapsed() < PATIENCE)
    }

    /// Does the same as [`ask`](Self::ask), but waits for the answer as long as `goes_on` returns true.
    ///
    /// # Errors
    /// Fails for the same reasons as [`ask`](Self::ask).
    pub fn ask_while<A: DeserializeOwned>(
        &mut self,
        request: &impl Serialize,
        goes_on: impl Fn() -> bool,
    ) -> anyhow::Result<Option<A>> {
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        let who = self.who;
        let ended = || format!("the {who} has stopped answering");
        // If this function returns before the answer has arrived, the conversation stays marked as ended.
        self.has_ended = true;
        self.stream.get_mut().write_all(&line).map_err(|_| anyhow::Error::msg(ended()))?;
        self.stream.get_mut().set_read_timeout(Some(LOOK))?;
        let mut answer = Vec::new();
        loop {
            match self.stream.read_until(b'\n', &mut answer) {
                Ok(_) if answer.ends_with(b"\n") => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && goes_on() => {}
                Ok(_) => bail!("{}", ended()),
                Err(error) => return Err(error).with_context(ended),
            }
        }
        self.has_ended = false;
        let no_answer = || format!("the {who}'s answer");
        let AnswerLine::<Map<String, Value>> { error, answer, .. } =
            serde_json::from_slice(&answer).with_context(no_answer)?;
        match error {
            Some(error) => bail!("{error}"),
            None if answer.is_empty() => Ok(None),
            None => serde_json::from_value(Value::Object(answer)).map(Some).with_context(no_answer),
        }
    }
}

/// Extracts the value of one variant from an answer: `expect_answer!(ask(path, who, &Request::Status)?,
/// Answer::Status)?`.
#[macro_export]
macro_rules! expect_answer {
    ($answer:expr, $variant:path) => {
        match $answer {
            Some($variant(value)) => Ok(value),
            _ => Err($crate::socket::another_answer()),
        }
    };
}

/// Returns the error for an answer that is another variant than expected.
#[doc(hidden)]
pub fn another_answer() -> anyhow::Error {
    anyhow::anyhow!("the daemon's answer does not fit the request: restart it with this version")
}

/// A daemon's answer to a request, as one line of JSON.
#[derive(Serialize, Deserialize)]
struct AnswerLine<A> {
    ok: bool,
    /// Reason why the request was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(flatten)]
    answer: A,
}

impl<A> From<anyhow::Result<Option<A>>> for AnswerLine<Option<A>> {
    fn from(done: anyhow::Result<Option<A>>) -> Self {
        match done {
            Ok(answer) => Self { ok: true, error: None, answer },
            Err(error) => Self { ok: false, error: Some(format!("{error:#}")), answer: None },
        }
    }
}

/// Explains why a command cannot connect to a daemon.
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

/// Creates a socket at a path, replacing any old file. The socket gets a temporary name first, so it has its final
/// permissions before it appears at the path.
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

/// A listening socket. Dropping it removes the socket's file.
pub struct ControlSocket {
    path: PathBuf,
    listener: UnixListener,
    closer: Closer,
}

impl ControlSocket {
    /// Binds the socket. Call it inside a Tokio runtime. Members of `group`, if given, may use the socket too.
    pub fn bind(path: &Path, who: &str, group: Option<&str>) -> anyhow::Result<Self> {
        Self::try_bind(path, who, group).with_context(|| format!("socket {}", path.display()))
    }

    fn try_bind(path: &Path, who: &str, group: Option<&str>) -> anyhow::Result<Self> {
        match UnixStream::connect(path) {
            Ok(_) => bail!("another {who} answers on this control socket; choose another one with --socket"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // If the daemon that owned this socket has died, the code below replaces the socket.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(error.into()),
        }
        let listener = put(path, |new| {
            let listener = UnixListener::bind(new)?;
            permit(new, group)?;
            Ok(listener)
        })?;
        Ok(Self { path: path.to_owned(), listener, closer: Closer::start()? })
    }

    /// Serves connections until the future is dropped, which closes them. `answerer` makes the per-connection function
    /// that answers requests.
    pub async fn serve<A, F>(&self, answerer: impl Fn() -> F) -> Infallible
    where
        A: Serialize,
        F: FnMut(&[u8]) -> anyhow::Result<Option<A>> + Send + 'static,
    {
        let mut conversations = Conversations::new(&self.closer);
        loop {
            match self.accept().await.into_std() {
                Ok(stream) => conversations.begin(stream, answerer()),
                Err(error) => tracing::warn!(%error, "cannot prepare an accepted control connection"),
            }
            while self.closer.is_full() {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    /// Accepts the next connection.
    async fn accept(&self) -> tokio::net::UnixStream {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => return stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection to the control socket: trying again");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The open connections to a control socket, each with its own thread. A client may pass descriptors, and the kernel
/// closes them in the thread that reads. Closing a TCP socket that lingers may block for as long as its owner likes, so
/// the async runtime's threads must not close descriptors.
pub(crate) struct Conversations<'a> {
    closer: &'a Closer,
    /// Connections and their threads. Each thread owns its connection and closes it.
    live: Vec<(Weak<UnixStream>, JoinHandle<()>)>,
}

impl<'a> Conversations<'a> {
    pub(crate) fn new(closer: &'a Closer) -> Self {
        Self { closer, live: Vec::new() }
    }

    /// Starts a thread that serves a connection, unless too many connections are open.
    pub(crate) fn begin<A: Serialize>(
        &mut self,
        stream: UnixStream,
        answer: impl FnMut(&[u8]) -> anyhow::Result<Option<A>> + Send + 'static,
    ) {
        let stream = Arc::new(stream);
        self.live.retain(|(_, thread)| !thread.is_finished());
        let weak = Arc::downgrade(&stream);
        let begun = match self.live.len() < CONVERSATIONS_MAX {
            true => begin(&stream, answer),
            false => Err(io::Error::other("refused a connection: too many are open")),
        };
        match begun {
            Ok(thread) => self.live.push((weak, thread)),
            Err(error) => tracing::warn!(%error, "cannot serve a connection to the control socket"),
        }
        // If the connection's thread has ended already, `stream` is the last reference to the connection. Dropping it
        // closes the connection, so the closer's thread drops it.
        self.closer.close(stream);
    }
}

/// Closes all connections and waits for their threads.
impl Drop for Conversations<'_> {
    fn drop(&mut self) {
        for stream in self.live.iter().filter_map(|(stream, _)| stream.upgrade()) {
            let _ = stream.shutdown(Shutdown::Both);
            self.closer.close(stream);
        }
        self.closer.end(self.live.drain(..).map(|(_, thread)| thread).collect());
    }
}

fn begin<A: Serialize>(
    stream: &Arc<UnixStream>,
    answer: impl FnMut(&[u8]) -> anyhow::Result<Option<A>> + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    stream.set_nonblocking(false)?;
    let stream = stream.clone();
    let runtime = tokio::runtime::Handle::current();
    thread::Builder::new().name("control".into()).spawn(move || {
        let _inside = runtime.enter();
        converse(&stream, LINE_MAX, answer);
    })
}

/// Answers the requests of one connection, one line of at most `line_max` bytes each, until the connection ends.
pub fn converse<A: Serialize>(
    stream: &UnixStream,
    line_max: u64,
    mut answer: impl FnMut(&[u8]) -> anyhow::Result<Option<A>>,
) {
    let mut read = BufReader::new(stream);
    let mut write = stream;
    let mut line = Vec::new();
    loop {
        line.clear();
        // A request that reaches the length limit has no line end, and is thereby recognized as too long.
        let got = (&mut read).take(line_max).read_until(b'\n', &mut line);
        if !matches!(got, Ok(1..)) {
            return;
        }
        let is_whole = line.ends_with(b"\n");
        let answer = match is_whole {
            true => answer(&line),
            false => Err(anyhow::anyhow!("a request may have at most {line_max} bytes")),
        };
        let Ok(mut text) = serde_json::to_vec(&AnswerLine::from(answer)) else { return };
        text.push(b'\n');
        if write.write_all(&text).is_err() || !is_whole {
            return;
        }
    }
}

fn permit(path: &Path, group: Option<&str>) -> anyhow::Result<()> {
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    let Some(name) = group else { return Ok(()) };
    let found = nix::unistd::Group::from_name(name)?;
    let group = found.with_context(|| format!("the group {name} does not exist"))?;
    Ok(nix::unistd::chown(path, None, Some(group.gid))?)
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        io::IoSlice,
        mem::MaybeUninit,
        os::fd::AsFd as _,
        sync::atomic::{AtomicUsize, Ordering::Relaxed},
    };

    use millrace_testkit::{lingering, wait_for, wait_until};
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use serde_json::json;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum SumAnswer {
        Sum(BTreeMap<u32, f64>),
    }

    #[test]
    fn control_socket_answer_is_json_with_ok_or_an_error() {
        let line =
            |done: anyhow::Result<Option<SumAnswer>>| serde_json::to_string(&AnswerLine::from(done)).unwrap();
        assert_eq!(line(Ok(None)), r#"{"ok":true}"#);
        assert_eq!(line(Ok(Some(SumAnswer::Sum([(1, 0.5)].into())))), r#"{"ok":true,"sum":{"1":0.5}}"#);
        let refused = anyhow::anyhow!("no file").context("no");
        assert_eq!(line(Err(refused)), r#"{"ok":false,"error":"no: no file"}"#);
    }

    /// A counter of the connections that are being served.
    struct CountedConnections(Arc<AtomicUsize>);

    impl Drop for CountedConnections {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Relaxed);
        }
    }

    fn serve(socket: ControlSocket) -> (tokio::task::JoinHandle<()>, Arc<AtomicUsize>) {
        let live = Arc::new(AtomicUsize::new(0));
        let count = live.clone();
        let serving = tokio::spawn(async move {
            let answerer = || {
                count.fetch_add(1, Relaxed);
                let counted = CountedConnections(count.clone());
                move |line: &[u8]| {
                    let _counted = &counted;
                    Ok(serde_json::from_slice::<Option<BTreeMap<u32, f64>>>(line)?.map(SumAnswer::Sum))
                }
            };
            match socket.serve(answerer).await {}
        });
        (serving, live)
    }

    /// Members of the socket's group pass more lingering descriptors than the runtime has threads. Each descriptor
    /// takes an hour to close.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn descriptor_with_so_linger_blocks_only_its_own_control_connection() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let socket = ControlSocket::bind(&path, "daemon", None).unwrap();
        let mut kept = Vec::new();
        for _ in 0..8 {
            let (near, far) = lingering();
            let stream = UnixStream::connect(&path).unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut beside = SendAncillaryBuffer::new(&mut space);
            let passed = [near.as_fd()];
            assert!(beside.push(SendAncillaryMessage::ScmRights(&passed)));
            sendmsg(&stream, &[IoSlice::new(b"{}\n")], &mut beside, SendFlags::empty()).unwrap();
            // The copy of the descriptor in the unread message keeps the socket `near` open, so dropping `near` does
            // not block.
            drop(near);
            kept.push((stream, far));
        }
        let (serving, live) = serve(socket);
        let asking = tokio::task::spawn_blocking(move || {
            for _ in 0..3 {
                let sum = ask(&path, "daemon", &json!({"7": 0.25})).unwrap();
                assert_eq!(expect_answer!(sum, SumAnswer::Sum).unwrap(), [(7, 0.25)].into());
                assert_eq!(ask::<SumAnswer>(&path, "daemon", &json!(null)).unwrap(), None);
            }
        });
        asking.await.unwrap();
        // The daemon must be able to end, although sockets that block when they are closed are still open.
        serving.abort();
        assert!(serving.await.unwrap_err().is_cancelled());
        assert_eq!(live.load(Relaxed), 0);
        drop(kept);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn control_connections_beyond_the_limit_are_refused_until_one_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let (_serving, live) = serve(ControlSocket::bind(&path, "daemon", None).unwrap());
        let asking = tokio::task::spawn_blocking(move || {
            let open = || Conversation::open(&path, "daemon").unwrap();
            let mut all: Vec<_> = (0..CONVERSATIONS_MAX).map(|_| open()).collect();
            all.iter_mut().for_each(|one| drop(one.ask::<SumAnswer>(&json!({})).unwrap()));
            let error = open().ask::<SumAnswer>(&json!({})).unwrap_err();
            assert!(error.to_string().contains("has stopped answering"), "{error}");
            drop(all.pop());
            wait_for("room", || open().ask::<SumAnswer>(&json!({})).is_ok());
            drop(all);
            wait_until("the end of all", || live.load(Relaxed), |live| *live == 0);
        });
        asking.await.unwrap();
    }
}
