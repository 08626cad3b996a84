//! The socket of a running daemon of grafts: what may be asked. `docs/graft.md` documents it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use millrace_daemon::socket::{self, Socket};
use millrace_graft::{
    Side,
    status::{self, Status, Why},
};
use millrace_graft_kernel::{Caller, hook::Lead};
use millrace_kernel::prefix::Prefix;
use serde::{Deserialize, Serialize};

use super::{
    daemon::{Daemon, Loaded, Swapped},
    probe::{Probed, Target},
};

pub const DEFAULT_SOCKET: &str = "/run/millrace/graft.sock";

/// As errors call it.
pub const WHO: &str = "daemon of grafts";

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
    /// Of one connection by its ends, in either order.
    WhyConnection {
        local: SocketAddr,
        remote: SocketAddr,
    },
    Monitor,
    Probe {
        peer: IpAddr,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        udp_port: Option<u16>,
        period_ms: u64,
        duration_ms: u64,
    },
    Probes,
    /// Of the processes of a cgroup: connections to these ports are carried, or from peers to them.
    Hook {
        cgroup: PathBuf,
        side: Side,
        /// First and last.
        ports: Vec<(u16, u16)>,
        peers: Vec<String>,
        /// Its `connect()` succeeds when the server was reached, and not before.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        strict: bool,
    },
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
    pub connection: Option<status::Connection>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paths: Option<Vec<status::Path>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probed: Option<Vec<Probed>>,
}

impl From<anyhow::Error> for Answer {
    fn from(error: anyhow::Error) -> Self {
        Self { error: Some(format!("{error:#}")), ..Self::default() }
    }
}

/// Asks a running daemon one thing.
pub fn ask(socket: &Path, request: &Request) -> anyhow::Result<Answer> {
    socket::ask(socket, WHO, request)
}

/// Answers everybody, until the task is aborted.
pub async fn serve(socket: &Socket, daemon: Arc<Daemon>) -> std::convert::Infallible {
    let answerer = || {
        let daemon = daemon.clone();
        move |line: &[u8]| answer(&daemon, line)
    };
    socket.serve(answerer).await
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
        Request::WhyConnection { local, remote } => {
            Answer { connection: Some(daemon.why_connection([local, remote])?), ..ok }
        }
        Request::Monitor => Answer { paths: Some(daemon.paths()), ..ok },
        Request::Probe { peer, udp_port, period_ms, duration_ms } => {
            let ms = Duration::from_millis;
            daemon.probe(Target { peer, udp_port }, ms(period_ms), ms(duration_ms)).map(|()| ok)?
        }
        Request::Probes => Answer { probed: Some(daemon.probed()), ..ok },
        Request::Hook { cgroup, side, ports, peers, strict } => {
            daemon.hook(&cgroup, side, leads(&ports, &peers, strict)?).map(|()| ok)?
        }
        Request::Reload => daemon.reload().map(|()| ok)?,
    })
}

fn leads(ports: &[(u16, u16)], peers: &[String], strict: bool) -> anyhow::Result<Vec<Lead>> {
    let peers: Vec<Prefix> = peers
        .iter()
        .map(|peer| peer.parse().with_context(|| format!("peer {peer:?}")))
        .collect::<Result<_, _>>()?;
    let of = |peer: &Prefix| {
        ports
            .iter()
            .map(|(first, last)| Lead {
                peer: *peer,
                ports: *first..=*last,
                caller: Caller::default(),
                strict,
                choice: 0,
                in_place: false,
            })
            .collect::<Vec<_>>()
    };
    Ok(peers.iter().flat_map(of).collect())
}
