//! Control sockets of daemons: a file that only its owner, and perhaps a group, may use, and one line of JSON each way.
//!
//! The answer to a request is `{"ok":true}`, with one more field if the request asks for something: the variant of the daemon's `Answer`, an
//! enum whose variants have a value each. A refusal is `{"ok":false,"error":"..."}`.

use std::{
    convert::Infallible,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::Shutdown,
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use tokio::net::UnixListener;

use crate::closer::Closer;

/// Of the commands with an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Of a request, bytes.
const LINE_MAX: u64 = 64 * 1024;
/// Connections at once.
const CONVERSATIONS_MAX: usize = 64;
/// After an error of accept, mostly for want of descriptors, and while there are many to close.
const PAUSE: Duration = Duration::from_millis(100);

/// Asks a daemon, called `who` in errors, one thing. `None`: it is done.
pub fn ask<A: DeserializeOwned>(
    path: &Path,
    who: &'static str,
    request: &impl Serialize,
) -> anyhow::Result<Option<A>> {
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
    pub fn ask<A: DeserializeOwned>(&mut self, request: &impl Serialize) -> anyhow::Result<Option<A>> {
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
        let Line::<Map<String, Value>> { error, answer, .. } =
            serde_json::from_str(&answer).with_context(no_answer)?;
        match error {
            Some(error) => bail!("{error}"),
            None if answer.is_empty() => Ok(None),
            None => serde_json::from_value(Value::Object(answer)).map(Some).with_context(no_answer),
        }
    }
}

/// Takes the value of one variant out of an answer: `expect_answer!(ask(path, who, &Request::Status)?, Answer::Status)?`.
#[macro_export]
macro_rules! expect_answer {
    ($answer:expr, $variant:path) => {
        match $answer {
            Some($variant(value)) => Ok(value),
            _ => Err($crate::socket::another_answer()),
        }
    };
}

#[doc(hidden)]
pub fn another_answer() -> anyhow::Error {
    anyhow::anyhow!("the daemon answers something else than was asked: is it of another version?")
}

/// A daemon's answer to a request.
#[derive(Serialize, Deserialize)]
struct Line<A> {
    ok: bool,
    /// Why it has not done what it was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(flatten)]
    answer: A,
}

impl<A> From<anyhow::Result<Option<A>>> for Line<Option<A>> {
    fn from(done: anyhow::Result<Option<A>>) -> Self {
        match done {
            Ok(answer) => Self { ok: true, error: None, answer },
            Err(error) => Self { ok: false, error: Some(format!("{error:#}")), answer: None },
        }
    }
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
    closer: Closer,
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
        Ok(Self { path: path.to_owned(), listener, closer: Closer::start()? })
    }

    /// Answers all who ask, until it is dropped, which ends their connections. `answerer` makes what answers one connection, and may keep what was
    /// said on it.
    pub async fn serve<A, F>(&self, answerer: impl Fn() -> F) -> Infallible
    where
        A: Serialize,
        F: FnMut(&[u8]) -> anyhow::Result<Option<A>> + Send + 'static,
    {
        let mut conversations = Conversations { closer: &self.closer, live: Vec::new() };
        loop {
            let stream = self.accept().await;
            conversations.begin(stream, answerer());
            while self.closer.is_full() {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    /// The next connection.
    async fn accept(&self) -> tokio::net::UnixStream {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => return stream,
                Err(error) => {
                    tracing::warn!(%error, "control socket");
                    tokio::time::sleep(PAUSE).await;
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

/// Connections to a control socket, each with a thread of its own. Whoever may connect may pass descriptors, too, and the kernel closes them in
/// the thread that reads: to close a TCP socket that lingers takes as long as its owner likes, and others need the threads of the runtime.
struct Conversations<'a> {
    closer: &'a Closer,
    /// A connection is its thread's, which closes it.
    live: Vec<(Weak<UnixStream>, JoinHandle<()>)>,
}

impl Conversations<'_> {
    /// Answers a connection, if there is a place for it.
    fn begin<A: Serialize>(
        &mut self,
        stream: tokio::net::UnixStream,
        answer: impl FnMut(&[u8]) -> anyhow::Result<Option<A>> + Send + 'static,
    ) {
        let stream = match stream.into_std() {
            Ok(stream) => Arc::new(stream),
            Err(error) => return tracing::warn!(%error, "control socket"),
        };
        self.live.retain(|(_, thread)| !thread.is_finished());
        let weak = Arc::downgrade(&stream);
        let begun = match self.live.len() < CONVERSATIONS_MAX {
            true => begin(&stream, answer),
            false => Err(io::Error::other("a connection is one too many")),
        };
        match begun {
            Ok(thread) => self.live.push((weak, thread)),
            Err(error) => tracing::warn!(%error, "control socket"),
        }
        // Its thread may be over already.
        self.closer.close(stream);
    }
}

/// When it is over, nothing of what was said on them is left.
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
    let (stream, runtime) = (stream.clone(), tokio::runtime::Handle::current());
    thread::Builder::new().name("control".into()).spawn(move || {
        let _inside = runtime.enter();
        converse(&stream, answer);
    })
}

/// Answers the requests of one connection, a line each, until it ends.
fn converse<A: Serialize>(stream: &UnixStream, mut answer: impl FnMut(&[u8]) -> anyhow::Result<Option<A>>) {
    let (mut read, mut write) = (BufReader::new(stream), stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        let got = (&mut read).take(LINE_MAX).read_until(b'\n', &mut line);
        if !matches!(got, Ok(1..)) {
            return;
        }
        let is_whole = line.ends_with(b"\n");
        let answer = match is_whole {
            true => answer(&line),
            false => Err(anyhow::anyhow!("a request is a line of at most {LINE_MAX} bytes")),
        };
        let Ok(mut text) = serde_json::to_vec(&Line::from(answer)) else { return };
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
    let group = found.with_context(|| format!("there is no group {name}"))?;
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
    enum Answer {
        Sum(BTreeMap<u32, f64>),
    }

    #[test]
    fn answers_are_what_was_asked_for_or_a_refusal() {
        let line = |done: anyhow::Result<Option<Answer>>| serde_json::to_string(&Line::from(done)).unwrap();
        assert_eq!(line(Ok(None)), r#"{"ok":true}"#);
        assert_eq!(line(Ok(Some(Answer::Sum([(1, 0.5)].into())))), r#"{"ok":true,"sum":{"1":0.5}}"#);
        let refused = anyhow::anyhow!("no file").context("no");
        assert_eq!(line(Err(refused)), r#"{"ok":false,"error":"no: no file"}"#);
    }

    /// Counts connections that are answered.
    struct Counted(Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Relaxed);
        }
    }

    fn serve(socket: Socket) -> (tokio::task::JoinHandle<()>, Arc<AtomicUsize>) {
        let live = Arc::new(AtomicUsize::new(0));
        let count = live.clone();
        let serving = tokio::spawn(async move {
            let answerer = || {
                count.fetch_add(1, Relaxed);
                let counted = Counted(count.clone());
                move |line: &[u8]| {
                    let _counted = &counted;
                    Ok(serde_json::from_slice::<Option<BTreeMap<u32, f64>>>(line)?.map(Answer::Sum))
                }
            };
            match socket.serve(answerer).await {}
        });
        (serving, live)
    }

    /// Descriptors that members of the socket's group pass take an hour to close. There are more of them than threads of the runtime.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn lingering_sockets_hold_up_their_own_connections_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let socket = Socket::bind(&path, "daemon", None).unwrap();
        let mut kept = Vec::new();
        for _ in 0..8 {
            let (near, far) = lingering();
            let stream = UnixStream::connect(&path).unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut beside = SendAncillaryBuffer::new(&mut space);
            let passed = [near.as_fd()];
            assert!(beside.push(SendAncillaryMessage::ScmRights(&passed)));
            sendmsg(&stream, &[IoSlice::new(b"{}\n")], &mut beside, SendFlags::empty()).unwrap();
            // What is on its way is the last descriptor: this one would linger else.
            drop(near);
            kept.push((stream, far));
        }
        let (serving, live) = serve(socket);
        let asking = tokio::task::spawn_blocking(move || {
            for _ in 0..3 {
                let sum = ask(&path, "daemon", &json!({"7": 0.25})).unwrap();
                assert_eq!(expect_answer!(sum, Answer::Sum).unwrap(), [(7, 0.25)].into());
                assert_eq!(ask::<Answer>(&path, "daemon", &json!(null)).unwrap(), None);
            }
        });
        asking.await.unwrap();
        // Nor is the daemon's end held up.
        serving.abort();
        assert!(serving.await.unwrap_err().is_cancelled());
        assert_eq!(live.load(Relaxed), 0);
        drop(kept);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn connections_are_bounded_and_make_room() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let (_serving, live) = serve(Socket::bind(&path, "daemon", None).unwrap());
        let asking = tokio::task::spawn_blocking(move || {
            let open = || Conversation::open(&path, "daemon").unwrap();
            let mut all: Vec<_> = (0..CONVERSATIONS_MAX).map(|_| open()).collect();
            all.iter_mut().for_each(|one| drop(one.ask::<Answer>(&json!({})).unwrap()));
            let error = open().ask::<Answer>(&json!({})).unwrap_err();
            assert!(error.to_string().contains("does not answer"), "{error}");
            drop(all.pop());
            wait_for("room", || open().ask::<Answer>(&json!({})).is_ok());
            drop(all);
            wait_until("the end of all", || live.load(Relaxed), |live| *live == 0);
        });
        asking.await.unwrap();
    }
}
