//! Reads from a relay's status how many sessions, streams and other objects it holds, and checks that the relay
//! releases them.

use std::{
    fmt, fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use millrace_daemon::http::fetch;
use millrace_relay::status::Status;
use serde::Serialize;

/// Longest wait until a relay has released the state of clients that are gone. Idle time-outs and the lifetime of
/// cached groups are shorter.
const PATIENCE: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(200);

/// Numbers of sessions, handshakes, streams and other objects that a relay holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LeftObjects {
    pub sessions: u64,
    pub handshakes: u64,
    pub tracks: u64,
    pub cache_bytes: u64,
    pub cache_groups: u64,
    /// Streams to subscribers that the kernel sends.
    pub kernel_streams: u64,
    /// Tasks of the relay's async runtime.
    pub tasks: u64,
}

impl LeftObjects {
    fn from_status(status: &Status) -> Self {
        Self {
            sessions: status.sessions.len() as u64,
            handshakes: status.handshakes,
            tracks: status.tracks.len() as u64,
            cache_bytes: status.cache.bytes,
            cache_groups: status.cache.groups,
            kernel_streams: status.engine.streams,
            tasks: status.tasks,
        }
    }

    fn is_within(&self, other: &Self) -> bool {
        self.sessions <= other.sessions
            && self.handshakes <= other.handshakes
            && self.tracks <= other.tracks
            && self.cache_bytes <= other.cache_bytes
            && self.cache_groups <= other.cache_groups
            && self.kernel_streams <= other.kernel_streams
            && self.tasks <= other.tasks
    }
}

impl fmt::Display for LeftObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sessions, handshakes, tracks, cache_bytes, cache_groups, kernel_streams, tasks } = self;
        write!(
            f,
            "{sessions} sessions, {handshakes} handshakes, {tracks} tracks, {cache_bytes} bytes in {cache_groups} groups, \
             {kernel_streams} streams in the kernel, {tasks} tasks"
        )
    }
}

/// Address of a relay's `/status`, and the token that the relay requires.
#[derive(Clone)]
pub struct Http {
    pub addr: SocketAddr,
    pub token: Option<String>,
}

impl Http {
    /// Builds the access to a relay's status, with the token from a file. Without a file, the token of this user's
    /// relay is used, if there is one.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read.
    pub fn from_address(addr: Option<SocketAddr>, token_file: Option<&Path>) -> Result<Option<Self>> {
        let Some(addr) = addr else { return Ok(None) };
        let token = match token_file {
            Some(file) => {
                Some(fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?)
            }
            None => fs::read_to_string(default_token_file()).ok(),
        };
        Ok(Some(Self { addr, token: token.map(|token| token.trim_end().to_owned()) }))
    }

    /// Fetches the relay's status.
    ///
    /// # Errors
    ///
    /// Fails if the relay cannot be reached, or answers with an error or an unknown format.
    pub fn status(&self) -> Result<Status> {
        let (code, body) = fetch(self.addr, "/status", self.token.as_deref())?;
        if code != 200 {
            bail!("the relay answered /status with HTTP {code}");
        }
        serde_json::from_str(&body).context("cannot parse the relay's /status: it may be of another version")
    }
}

/// Returns the path of the token file of this user's relay.
fn default_token_file() -> PathBuf {
    let directory = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(directory) if !nix::unistd::geteuid().is_root() => directory.into(),
        _ => PathBuf::from("/run"),
    };
    directory.join("millrace/http.token")
}

/// Returns the numbers of sessions, streams and other objects that the relay holds now.
///
/// # Errors
///
/// Fails if the relay does not answer.
pub fn look(http: &Http) -> Result<LeftObjects> {
    Ok(LeftObjects::from_status(&http.status()?))
}

/// Waits until the relay holds no more objects than `before`. Returns the numbers of objects that the relay holds then.
///
/// # Errors
///
/// Fails if the relay still holds more after two minutes.
pub fn settle(http: &Http, before: &LeftObjects) -> Result<LeftObjects> {
    let began = Instant::now();
    loop {
        let now = look(http)?;
        if now.is_within(before) {
            return Ok(now);
        }
        if began.elapsed() > PATIENCE {
            bail!("the relay did not release everything: it held {before}, and now holds {now}");
        }
        std::thread::sleep(LOOK);
    }
}
