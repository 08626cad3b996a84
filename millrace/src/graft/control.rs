//! The socket of a running daemon of grafts: what may be asked. `docs/graft.md` documents it.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use anyhow::{Context as _, bail};
use millrace_graft::status::{self, Status, Why};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _};

use super::daemon::{Daemon, Loaded, Swapped};
use crate::socket::{self, Socket};

pub const DEFAULT_SOCKET: &str = "/run/millrace/graft.sock";

/// Of a request, bytes.
const LINE_MAX: u64 = 64 * 1024;
/// Connections at once.
const CONVERSATIONS_MAX: usize = 64;

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    Load {
        graft: String,
        #[serde(default)]
        parameters: BTreeMap<String, u64>,
    },
    Unload {
        graft: String,
    },
    Swap {
        from: String,
        to: String,
        #[serde(default)]
        parameters: BTreeMap<String, u64>,
    },
    Status,
    Why {
        peer: IpAddr,
    },
    Monitor,
    Reload,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Answer {
    pub ok: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loaded: Option<Loaded>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swapped: Option<Swapped>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<Why>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paths: Option<Vec<status::Path>>,
}

/// Asks a running daemon one thing.
pub fn ask(socket: &Path, request: &Request) -> anyhow::Result<Answer> {
    let answer: Answer = socket::ask(socket, "daemon of grafts", request)?;
    match answer.error {
        Some(error) => bail!("{error}"),
        None => Ok(answer),
    }
}

/// Answers everybody, until the task is aborted.
pub async fn serve(socket: &Socket, daemon: Arc<Daemon>) -> std::convert::Infallible {
    let going = Arc::new(AtomicUsize::new(0));
    loop {
        let stream = socket.accept().await;
        if going.load(Ordering::Relaxed) >= CONVERSATIONS_MAX {
            tracing::warn!("a connection to the control socket is one too many");
            continue;
        }
        going.fetch_add(1, Ordering::Relaxed);
        let (daemon, going) = (daemon.clone(), going.clone());
        tokio::spawn(async move {
            converse(stream, daemon).await;
            going.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

async fn converse(stream: tokio::net::UnixStream, daemon: Arc<Daemon>) {
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
            // The verifier takes some 10 ms.
            tokio::task::block_in_place(|| answer(&daemon, &line))
        } else {
            Err(anyhow::anyhow!("a request is a line of at most {LINE_MAX} bytes"))
        };
        let answer =
            answer.unwrap_or_else(|error| Answer { error: Some(format!("{error:#}")), ..Answer::default() });
        let Ok(mut text) = serde_json::to_vec(&answer) else { return };
        text.push(b'\n');
        if write.write_all(&text).await.is_err() || !is_whole {
            return;
        }
    }
}

fn answer(daemon: &Daemon, line: &[u8]) -> anyhow::Result<Answer> {
    let ok = Answer { ok: true, ..Answer::default() };
    Ok(match serde_json::from_slice(line).context("not a request")? {
        Request::Load { graft, parameters } => {
            Answer { loaded: Some(daemon.load(&graft, parameters)?), ..ok }
        }
        Request::Unload { graft } => daemon.unload(&graft).map(|()| ok)?,
        Request::Swap { from, to, parameters } => {
            Answer { swapped: Some(daemon.swap(&from, &to, parameters)?), ..ok }
        }
        Request::Status => Answer { status: Some(daemon.status()?), ..ok },
        Request::Why { peer } => Answer { why: Some(daemon.why(peer)?), ..ok },
        Request::Monitor => Answer { paths: Some(daemon.paths()), ..ok },
        Request::Reload => daemon.reload().map(|()| ok)?,
    })
}
