//! The socket of a running daemon of grafts: what may be asked. `docs/graft.md` documents it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use millrace_daemon::{
    daemon::{self, Observed as _, Reloads},
    socket,
};
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

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Loaded(Loaded),
    Swapped(Swapped),
    Status(Box<Status>),
    Why(Box<Why>),
    Connection(Box<status::Connection>),
    Paths(Vec<status::Path>),
    Probed(Vec<Probed>),
}

/// Asks a running daemon one thing.
pub fn ask(socket: &Path, request: &Request) -> anyhow::Result<Option<Answer>> {
    socket::ask(socket, WHO, request)
}

impl daemon::Daemon for Daemon {
    type Request = Request;
    type Answer = Answer;
    type Caller = ();

    fn caller(&self) {}

    fn answer(&self, (): &mut (), request: Request) -> anyhow::Result<Option<Answer>> {
        let done = |()| None;
        Ok(Some(match request {
            Request::Load { graft, parameters } => Answer::Loaded(self.load(&graft, parameters)?),
            Request::Unload { graft } => return self.unload(&graft).map(done),
            Request::Swap { from, to, parameters } => Answer::Swapped(self.swap(&from, &to, parameters)?),
            Request::Status => Answer::Status(self.status()?.into()),
            Request::Why { peer } => Answer::Why(self.why(peer)?.into()),
            Request::WhyConnection { local, remote } => {
                Answer::Connection(self.why_connection([local, remote])?.into())
            }
            Request::Monitor => Answer::Paths(self.paths()),
            Request::Probe { peer, udp_port, period_ms, duration_ms } => {
                let ms = Duration::from_millis;
                return self.probe(Target { peer, udp_port }, ms(period_ms), ms(duration_ms)).map(done);
            }
            Request::Probes => Answer::Probed(self.probed()),
            Request::Hook { cgroup, side, ports, peers, strict } => {
                return self.hook(&cgroup, side, leads(&ports, &peers, strict)?).map(done);
            }
            Request::Reload => return self.reload().map(done),
        }))
    }

    fn read_settings(&self) -> anyhow::Result<()> {
        self.read_settings()
    }

    fn reloads(&self) -> &Reloads {
        &self.reloads
    }

    fn tick(&self) -> anyhow::Result<()> {
        self.tick();
        Ok(())
    }
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
