//! Parts of a daemon: processes with rights of their own that serve one control socket and one HTTP port together.
//!
//! A supervisor starts each part as the same program, with a socket pair as its standard input. For each request, the
//! supervisor passes one end of a new connection, and the part serves it as daemons serve their control sockets. A part
//! reports once that it is ready, or why it cannot start.
//!
//! ```text
//!          start             Report::Ready          the process ends
//! Off ------------> Starting ------------> Serving ------------------> Ended --- a pause ---> Starting
//!                                           |    ^
//!                          no answer to pings    an answer
//!                                           v    |
//!                                          Silent
//! ```
//!
//! Only the thread [`SupervisedPart::keep`] changes the state of a part. When the supervisor is killed, the kernel
//! kills its parts, even if they are stopped (SIGSTOP).

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt as _},
    },
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Weak,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use millrace_base::control::{ControlEnd, ControlReceived};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tracing::{info, warn};

use crate::{
    inherited::{PING, PartConnection, PartMessage},
    socket::Conversation,
};

/// Time between two pings that the supervisor sends to a part (child process).
const PING_EVERY: Duration = Duration::from_millis(500);
/// Longest time for the answer to a ping. A part (child process) that takes longer counts as not answering.
const SILENCE: Duration = Duration::from_millis(1500);
/// Longest time that the supervisor waits for a message of a part before it checks the pings, in milliseconds.
const LOOK: u16 = 250;
/// Shortest and longest pause between the end of a part (child process) and its next start.
const PAUSE: Duration = Duration::from_millis(500);
const PAUSE_MOST: Duration = Duration::from_secs(30);
/// Time for which a part (child process) has to serve before the pause until its next start is the shortest again.
const STEADY: Duration = Duration::from_secs(60);
/// Longest time for a part (child process) to end after the supervisor has closed the connection to it.
const END: Duration = Duration::from_secs(15);
/// Longest time that a new supervisor waits until the parts (child processes) of a killed supervisor have ended.
const OTHERS_END: Duration = Duration::from_secs(20);

/// The state of a part (child process) of a daemon, for status and metrics.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PartStatus {
    /// Name of the part (child process) in commands and logs.
    pub name: String,
    /// State of the part (child process): `off`, `starting`, `serving`, `not-answering` or `ended`.
    pub state: String,
    /// Process ID of the part; `None` while the part has no process.
    pub pid: Option<u32>,
    /// Number of times that the supervisor has restarted the part's process.
    pub restarts: u64,
    /// Reason why the part's process last ended.
    pub error: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartState {
    Off,
    Starting,
    Serving,
    Silent,
    Ended,
}

impl PartState {
    fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Silent => "not-answering",
            Self::Ended => "ended",
        }
    }
}

struct PartShared {
    state: PartState,
    /// Whether the part's process should be running: [`SupervisedPart::start`] was called, but not
    /// [`SupervisedPart::stop`].
    is_wanted: bool,
    control: Option<Arc<ControlEnd>>,
    pid: Option<u32>,
    restarts: u64,
    error: Option<String>,
}

/// A part (child process) of a daemon, as its supervisor process sees it.
pub struct SupervisedPart {
    /// Name of the part (child process) in commands and logs.
    pub name: &'static str,
    arguments: Vec<OsString>,
    lock: Arc<Lock>,
    shared: Mutex<PartShared>,
    changed: Condvar,
    partners: Mutex<Vec<(Weak<Self>, PartnerLink)>>,
    kept: Arc<KeptDescriptors>,
    is_keeper: bool,
}

/// The kind of a connection between two parts (child processes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartnerLink {
    /// A stream, for requests of any length and their answers.
    Stream,
    /// Records, as a [`ControlEnd`] has them.
    Records,
}

impl PartnerLink {
    fn pair(self) -> io::Result<(OwnedFd, OwnedFd)> {
        Ok(match self {
            Self::Stream => UnixStream::pair().map(|(one, other)| (one.into(), other.into()))?,
            Self::Records => ControlEnd::pair().map(|(one, other)| (one.into(), other.into()))?,
        })
    }
}

/// Descriptors that a supervisor keeps for its parts, so that they outlive the part that has made them. A part gets
/// them when it starts: see [`PartProcess::take_kept`](crate::daemon::PartProcess::take_kept).
#[derive(Default)]
pub struct KeptDescriptors(Mutex<Vec<OwnedFd>>);

/// A file lock that a supervisor and its parts (child processes) hold. A new supervisor thus waits until the parts of a
/// killed supervisor have ended.
pub struct Lock(Flock<File>);

impl Lock {
    /// Takes the lock of the daemon that uses this control socket.
    ///
    /// # Errors
    /// Fails if another supervisor or its parts keep the lock.
    pub fn take(socket: &Path) -> anyhow::Result<Self> {
        let path = socket.with_extension("lock");
        let mut file = File::create(&path).with_context(|| path.display().to_string())?;
        let began = Instant::now();
        loop {
            file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(Self(lock)),
                Err((file, Errno::EAGAIN)) if began.elapsed() < OTHERS_END => file,
                Err((_, error)) => {
                    bail!("{}: parts of another daemon hold it: {error}", path.display())
                }
            };
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl SupervisedPart {
    /// Makes a part (child process) of the daemon, which will run the same program as the supervisor with these
    /// arguments. It gets the descriptors in `kept`, and may replace them if it `is_keeper`.
    pub fn new(
        name: &'static str,
        arguments: Vec<OsString>,
        lock: Arc<Lock>,
        kept: Arc<KeptDescriptors>,
        is_keeper: bool,
    ) -> Arc<Self> {
        let shared = PartShared {
            state: PartState::Off,
            is_wanted: false,
            control: None,
            pid: None,
            restarts: 0,
            error: None,
        };
        let shared = Mutex::new(shared);
        let changed = Condvar::new();
        let partners = Mutex::default();
        Arc::new(Self { name, arguments, lock, shared, changed, partners, kept, is_keeper })
    }

    /// Makes two parts (child processes) partners. Whenever one of them is ready and the other one runs, both get an
    /// end of a new connection to each other: see [`Daemon::linked`](crate::daemon::Daemon::linked).
    pub fn link(one: &Arc<Self>, other: &Arc<Self>, by: PartnerLink) {
        one.partners.lock().push((Arc::downgrade(other), by));
        other.partners.lock().push((Arc::downgrade(one), by));
    }

    /// Passes new connections to this part (child process) and to those of its partners that run.
    fn join_partners(&self) -> io::Result<()> {
        let Some(own) = self.shared.lock().control.clone() else { return Ok(()) };
        for (partner, by) in self.partners.lock().iter() {
            let Some(partner) = partner.upgrade() else { continue };
            let Some(theirs) = partner.shared.lock().control.clone() else { continue };
            let (one, other) = by.pair()?;
            own.send(&PartConnection::Partner(partner.name.to_owned()), &[one.as_fd()])?;
            theirs.send(&PartConnection::Partner(self.name.to_owned()), &[other.as_fd()])?;
        }
        Ok(())
    }

    /// Starts the part (child process) and waits until it is ready. From then on the part is restarted whenever it
    /// ends.
    ///
    /// # Errors
    /// Fails if the part cannot start, with the reason that it has reported.
    pub fn start(self: &Arc<Self>) -> anyhow::Result<()> {
        let (first, started) = sync_channel(1);
        self.shared.lock().is_wanted = true;
        let part = self.clone();
        // The kernel kills the child process when the thread that started it ends, so this thread has to live as long
        // as the child.
        thread::Builder::new().name(self.name.into()).spawn(move || part.keep(first))?;
        started.recv().unwrap_or_else(|_| Err(anyhow!("the part {} was stopped", self.name)))
    }

    /// Ends the part's process, and waits until it has ended.
    pub fn stop(&self) {
        let mut shared = self.shared.lock();
        shared.is_wanted = false;
        self.changed.notify_all();
        while shared.state != PartState::Off {
            self.changed.wait(&mut shared);
        }
    }

    /// Reports whether the part's process should be running: it was started, and not stopped since.
    pub fn is_wanted(&self) -> bool {
        self.shared.lock().is_wanted
    }

    /// Returns the state of the part (child process).
    pub fn status(&self) -> PartStatus {
        let shared = self.shared.lock();
        PartStatus {
            name: self.name.to_owned(),
            state: shared.state.name().to_owned(),
            pid: shared.pid,
            restarts: shared.restarts,
            error: shared.error.clone(),
        }
    }

    /// Returns a status line if the part (child process) should be serving requests but is not.
    pub fn trouble(&self) -> Option<String> {
        let shared = self.shared.lock();
        let error = || shared.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
        match shared.state {
            PartState::Off | PartState::Serving => None,
            PartState::Starting => Some(format!("the part {} is starting{}", self.name, error())),
            PartState::Silent => Some(self.silent()),
            PartState::Ended => {
                Some(format!("the part {} has ended, and is started again{}", self.name, error()))
            }
        }
    }

    fn silent(&self) -> String {
        format!("the part {} is not answering", self.name)
    }

    /// Sends a request to the part (child process), and waits for the answer. Stops waiting after `patience`, or when
    /// the part no longer answers pings.
    ///
    /// # Errors
    /// Fails if the part is not serving, or refuses the request.
    pub fn ask(
        &self,
        request: &impl Serialize,
        patience: Duration,
    ) -> anyhow::Result<Option<Map<String, Value>>> {
        if let Some(trouble) = self.trouble() {
            bail!("{trouble}");
        }
        let control = self.shared.lock().control.clone();
        let control =
            control.with_context(|| format!("the settings want nothing of the part {}", self.name))?;
        let (ours, theirs) = UnixStream::pair()?;
        control.send(&PartConnection::Requests, &[theirs.as_fd()]).map_err(|_| anyhow!(self.silent()))?;
        drop(theirs);
        let began = Instant::now();
        let goes_on = || began.elapsed() < patience && self.shared.lock().state == PartState::Serving;
        let mut conversation = Conversation::over(ours, self.name);
        match conversation.ask_while(request, goes_on) {
            // The state of the child process explains more than the error that the connection to it has ended.
            Err(_) if conversation.has_ended() => {
                bail!(
                    "{}",
                    self.trouble().unwrap_or_else(|| format!("the part {} has not answered", self.name))
                )
            }
            answer => answer,
        }
    }

    /// Starts the part's process again whenever it ends, until the part is no longer wanted. `first` receives the
    /// outcome of the first start.
    fn keep(&self, first: SyncSender<anyhow::Result<()>>) {
        let mut first = Some(first);
        let mut pause = PAUSE;
        loop {
            let began = Instant::now();
            let reason =
                self.run(&mut first).unwrap_or_else(|error| format!("it cannot be started: {error}"));
            let mut shared = self.shared.lock();
            (shared.control, shared.pid) = (None, None);
            // A child process that was never ready is not restarted: the caller of `start` gets the reason.
            if let Some(first) = first.take() {
                shared.is_wanted = false;
                let _ = first.send(Err(anyhow!(reason.clone())));
            }
            if shared.is_wanted {
                pause = if began.elapsed() > STEADY { PAUSE } else { pause };
                warn!("the part {} has ended, and is started again in {pause:?}: {reason}", self.name);
                shared.state = PartState::Ended;
                shared.error = Some(reason);
                shared.restarts += 1;
                let until = Instant::now() + pause;
                while shared.is_wanted && !self.changed.wait_until(&mut shared, until).timed_out() {}
                pause = (pause * 2).min(PAUSE_MOST);
            }
            if !shared.is_wanted {
                shared.state = PartState::Off;
                self.changed.notify_all();
                return;
            }
        }
    }

    /// Runs the part's process once. Returns the reason why it ended.
    fn run(&self, first: &mut Option<SyncSender<anyhow::Result<()>>>) -> io::Result<String> {
        let (control, theirs) = ControlEnd::pair()?;
        let mut command = Command::new("/proc/self/exe");
        command.args(&self.arguments).env_remove("NOTIFY_SOCKET").stdin(OwnedFd::from(theirs));
        // The child process prints nothing. Its standard output is therefore free to carry the lock file, so the child
        // holds the lock as long as it lives.
        command.stdout(Stdio::from(self.lock.0.try_clone()?));
        // A signal from the terminal, such as SIGINT, is for the supervisor alone. The child process therefore has its
        // own process group.
        let mut child = command.process_group(0).spawn()?;
        // The value `command` holds a copy of the child process's end of the connection. While this copy is open, the
        // supervisor cannot notice that the child has closed its own.
        drop(command);
        let control = Arc::new(control);
        {
            let kept = self.kept.0.lock();
            let kept: Vec<BorrowedFd<'_>> = kept.iter().map(OwnedFd::as_fd).collect();
            if let Err(error) = control.send(&PartConnection::Kept, &kept) {
                end(&mut child, Duration::ZERO)?;
                return Err(error);
            }
        }
        {
            let mut shared = self.shared.lock();
            (shared.state, shared.pid) = (PartState::Starting, Some(child.id()));
        }
        let mut failure = None;
        let mut pings: Option<PartPings> = None;
        loop {
            match control.receive::<PartMessage>() {
                ControlReceived::Record(PartMessage::Ready, _) => {
                    pings = Some(PartPings::over(&control)?);
                    {
                        let mut shared = self.shared.lock();
                        (shared.state, shared.control) = (PartState::Serving, Some(control.clone()));
                    }
                    if let Err(error) = self.join_partners() {
                        warn!("the part {} cannot be connected to its partners: {error}", self.name);
                    }
                    if let Some(first) = first.take() {
                        let _ = first.send(Ok(()));
                    } else {
                        info!("the part {} serves again", self.name);
                    }
                }
                ControlReceived::Record(PartMessage::Failed(reason), _) => failure = Some(reason),
                ControlReceived::Record(PartMessage::Keep, descriptors) => {
                    if self.is_keeper {
                        *self.kept.0.lock() = descriptors;
                    }
                }
                ControlReceived::Malformed(_) => {}
                ControlReceived::Nothing => {
                    // If poll fails, the next receive call reports the error.
                    let _ =
                        poll(&mut [PollFd::new(control.as_fd(), PollFlags::POLLIN)], PollTimeout::from(LOOK));
                }
                ControlReceived::End => break,
            }
            if let Some(answers) = pings.as_mut().map(PartPings::step) {
                self.note(answers);
            }
            if !self.is_wanted() {
                control.end();
                break;
            }
        }
        // A child process that does not answer pings would not end by itself either, so it is killed at once.
        let patience = if self.shared.lock().state == PartState::Silent { Duration::ZERO } else { END };
        let status = end(&mut child, patience)?;
        Ok(failure.unwrap_or_else(|| status.to_string()))
    }

    fn note(&self, answers: bool) {
        let mut shared = self.shared.lock();
        match (shared.state, answers) {
            (PartState::Serving, false) => {
                warn!("{}", self.silent());
                shared.state = PartState::Silent;
            }
            (PartState::Silent, true) => {
                info!("the part {} answers again", self.name);
                shared.state = PartState::Serving;
            }
            _ => {}
        }
    }
}

/// Waits for the end of a process whose connection to the supervisor is closed. Kills the process after `patience`.
fn end(child: &mut Child, patience: Duration) -> io::Result<std::process::ExitStatus> {
    let until = Instant::now() + patience;
    while Instant::now() < until {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.kill()?;
    child.wait()
}

/// A connection to a part (child process), on which the supervisor sends pings at intervals.
struct PartPings {
    stream: UnixStream,
    /// Time when the latest ping was sent or the latest answer received.
    since: Instant,
    is_asked: bool,
}

impl PartPings {
    fn over(control: &ControlEnd) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        control.send(&PartConnection::Requests, &[theirs.as_fd()])?;
        ours.set_nonblocking(true)?;
        Ok(Self { stream: ours, since: Instant::now(), is_asked: false })
    }

    /// Sends a ping to the child process if a ping is due, and receives the answer to the last ping if it has arrived.
    /// Returns false if an answer is overdue.
    fn step(&mut self) -> bool {
        if self.is_asked && matches!(self.stream.read(&mut [0; 256]), Ok(1..)) {
            (self.is_asked, self.since) = (false, Instant::now());
        }
        if !self.is_asked && self.since.elapsed() >= PING_EVERY {
            // All earlier pings were answered, so the socket's buffer has space for this ping.
            let _ = self.stream.write_all(PING);
            (self.is_asked, self.since) = (true, Instant::now());
        }
        !self.is_asked || self.since.elapsed() < SILENCE
    }
}
