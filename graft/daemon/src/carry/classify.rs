//! What the first bytes of carried connections are: a confined process looks at them, by nDPI. Connections never wait for it.
//!
//! It is asked about one at a time. Where it is slower than they come, they are dropped; where it has ended, or says nothing, it is started anew,
//! each time later. What it says counts for the next connections of the kind, so that nothing that a stranger makes it say steers his own.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, bail};
use millrace_base::control::{Control, Received};
use millrace_daemon::confine::{self, Bounds, CPU_IDLE, Confined, Hello};
use millrace_graft::status;
use millrace_graft_kernel::ndpi::Ndpi;
use millrace_graft_proto::select::kind::Kind;
use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, poll},
    net::{RecvFlags, SendFlags, recv, send},
};
use serde::{Deserialize, Serialize};
use tokio::{
    io::unix::AsyncFd,
    sync::mpsc,
    task::AbortHandle,
    time::{Instant, sleep, timeout},
};
use tracing::{info, warn};

use super::{
    asking::register,
    sample::{RECORD_MAX, Sample, parse},
};

/// That wait for it.
const QUEUE: usize = 64;
/// For it to be ready: the library takes most of a second on an idle host.
const START: Duration = Duration::from_secs(60);
/// For an answer, which takes some 50 us.
const ANSWER: Duration = Duration::from_secs(10);
/// CPU time that an answer is worth.
const ANSWER_CPU: Duration = Duration::from_millis(10);
const PAUSE_LEAST: Duration = Duration::from_millis(500);
const PAUSE_MOST: Duration = Duration::from_secs(60);
/// After so long without a fault it is as if there had been none.
const WELL: Duration = Duration::from_secs(60);
const BOUNDS: Bounds = Bounds { memory: 128 << 20, descriptors: 16 };
/// Of the name of a protocol.
const NAME_MAX: usize = 64;
/// As the command line has it; not for people.
pub const VERB: &str = "classify";

/// What it says of a connection.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Said {
    /// Empty: not known.
    protocol: String,
    carrier: String,
    category: String,
}

impl Said {
    fn is_usable(&self) -> bool {
        [&self.protocol, &self.carrier, &self.category].iter().all(|name| name.len() <= NAME_MAX)
    }
}

/// What becomes of the names of a kind's first bytes, from the most special to the most general. Returns whether any says what it is for.
pub type Hears = Box<dyn Fn(Kind, [&str; 3]) -> bool + Send + Sync>;

/// The process, as long as this is there.
pub struct Classifier {
    sender: mpsc::Sender<(Kind, Sample)>,
    shared: Arc<Shared>,
    task: AbortHandle,
}

struct Shared {
    counts: Mutex<BTreeMap<&'static str, u64>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    name: &'static str,
    detail: String,
    pid: Option<u32>,
    without: Vec<String>,
}

impl Drop for Classifier {
    fn drop(&mut self) {
        // The process is its, and is killed.
        self.task.abort();
    }
}

/// Counts, of which each connection that was offered has one; the last is of the process.
pub const COUNTS: [&str; 5] = ["classified", "unknown", "dropped", "failed", "restarted"];

impl Classifier {
    /// Has to be called from the runtime of tasks.
    pub fn start(hears: Hears) -> Self {
        let (sender, jobs) = mpsc::channel(QUEUE);
        let counts = COUNTS.iter().map(|name| (*name, 0)).collect();
        let state = State { name: "starting", ..State::default() };
        let shared = Arc::new(Shared { counts: Mutex::new(counts), state: Mutex::new(state) });
        let task = tokio::spawn(keep(hears, shared.clone(), jobs)).abort_handle();
        Self { sender, shared, task }
    }

    pub fn look(&self, kind: Kind, sample: Sample) {
        if !sample.is_empty() && self.sender.try_send((kind, sample)).is_err() {
            self.shared.count("dropped");
        }
    }

    pub fn status(&self) -> status::Classify {
        let state = self.shared.state.lock();
        let counts = self.shared.counts.lock();
        status::Classify {
            state: state.name.to_owned(),
            detail: state.detail.clone(),
            pid: state.pid,
            without: state.without.clone(),
            counts: counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(),
        }
    }
}

impl Shared {
    fn count(&self, name: &'static str) {
        *self.counts.lock().entry(name).or_default() += 1;
    }
}

/// One process after the other.
async fn keep(hears: Hears, shared: Arc<Shared>, mut jobs: mpsc::Receiver<(Kind, Sample)>) {
    let mut pause = PAUSE_LEAST;
    loop {
        *shared.state.lock() = State { name: "starting", ..State::default() };
        let since = Instant::now();
        let Err(error) = run(&hears, &shared, &mut jobs).await else { return };
        if since.elapsed() > WELL {
            pause = PAUSE_LEAST;
        }
        warn!("first bytes are not looked at for {pause:?}: {error:#}");
        let detail = format!("{error:#}");
        *shared.state.lock() = State { name: "ended", detail, ..State::default() };
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MOST);
        shared.count("restarted");
    }
}

/// Until it fails, or nobody asks any more.
async fn run(
    hears: &Hears,
    shared: &Shared,
    jobs: &mut mpsc::Receiver<(Kind, Sample)>,
) -> anyhow::Result<()> {
    let started = tokio::task::block_in_place(|| Confined::start(["graft", VERB], CPU_IDLE));
    let (process, control) = started.context("the confined process cannot be started")?;
    let child = Child::new(process, control)?;
    match timeout(START, child.hello()).await.context("the confined process does not become ready")?? {
        Hello::Yes { without } => {
            let pid = Some(child.process.pid());
            info!(?pid, "first bytes are looked at");
            *shared.state.lock() = State { name: "ready", pid, without, ..State::default() };
        }
        Hello::No { why } => bail!("{why}"),
    }
    loop {
        let (kind, sample) = tokio::select! {
            job = jobs.recv() => match job {
                Some(job) => job,
                None => return Ok(()),
            },
            said = child.next::<Said>() => match said {
                Ok(_) => bail!("the confined process speaks without being asked"),
                Err(error) => return Err(error),
            },
        };
        let asked = child.ask(sample.record()).await;
        if asked.is_err() {
            shared.count("failed");
        }
        let said = asked?;
        child.process.earn(ANSWER_CPU);
        let names = [said.protocol.as_str(), said.carrier.as_str(), said.category.as_str()];
        let is_known = !said.protocol.is_empty() && hears(kind, names);
        shared.count(if is_known { "classified" } else { "unknown" });
    }
}

struct Child {
    process: Confined,
    control: Control,
    ready: AsyncFd<OwnedFd>,
}

impl Child {
    fn new(process: Confined, control: Control) -> io::Result<Self> {
        let ready = register(control.as_fd().try_clone_to_owned()?)?;
        Ok(Self { process, control, ready })
    }

    async fn hello(&self) -> anyhow::Result<Hello> {
        loop {
            if let Some(hello) = confine::hello(&self.control)? {
                return Ok(hello);
            }
            self.ready.readable().await?.clear_ready();
        }
    }

    async fn next<T: serde::de::DeserializeOwned>(&self) -> anyhow::Result<T> {
        loop {
            match self.control.receive() {
                Received::Record(record, _) => return Ok(record),
                Received::Malformed(_) => bail!("the confined process says what is no answer"),
                Received::End => {
                    let why = self.process.ended().map(|why| format!(": {why}")).unwrap_or_default();
                    bail!("the confined process has ended{why}")
                }
                Received::Nothing => self.ready.readable().await?.clear_ready(),
            }
        }
    }

    async fn ask(&self, record: &[u8]) -> anyhow::Result<Said> {
        send(&self.control, record, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
            .context("the confined process does not read")?;
        let said: Said =
            timeout(ANSWER, self.next()).await.context("the confined process does not answer")??;
        match said.is_usable() {
            true => Ok(said),
            false => bail!("the confined process says what is no answer"),
        }
    }
}

/// The confined process itself.
///
/// # Errors
/// There is no usable nDPI, or no confinement: the daemon has been told.
pub fn child() -> anyhow::Result<()> {
    let (ndpi, control) = confine::enter(BOUNDS, || Ok(Ndpi::load()?))?;
    let mut record = vec![0; RECORD_MAX + 1];
    loop {
        poll(&mut [PollFd::new(&control, PollFlags::IN)], None)?;
        let length = match recv(&control, &mut record[..], RecvFlags::DONTWAIT) {
            // The daemon is gone.
            Ok((0, _)) => return Ok(()),
            Ok((length, _)) => length,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        let (port, segments) = record.get(..length).and_then(parse).context("no record")?;
        let said = ndpi.look(port, segments).map_or_else(Said::default, |found| Said {
            protocol: found.protocol,
            carrier: found.carrier.unwrap_or_default(),
            category: found.category,
        });
        confine::say(&control, &said)?;
    }
}
