//! The socket of a running gate: what may be asked, who may ask, and what becomes of what a server told when it is
//! gone. `docs/gate.md` documents it.

use std::{
    collections::{
        HashMap,
        hash_map::Entry::{Occupied, Vacant},
    },
    fmt,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, bail};
use millrace_daemon::{
    daemon::{self, Daemon as _, Observed as _, Reloads},
    socket::Conversation,
};
use millrace_gate::{
    Entry, Prefix, Scope, Tracer, hex,
    status::{Listed, Status},
};
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    daemon::Daemon,
    trace::{Follow, Seen},
    watch,
};

pub const DEFAULT_SOCKET: &str = "/run/millrace/gate.sock";

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    Inc {
        scope: String,
        client: IpAddr,
    },
    Dec {
        scope: String,
        client: IpAddr,
    },
    Publish {
        scope: String,
        id: String,
    },
    Retire {
        scope: String,
        id: String,
    },
    CheckToken {
        scope: String,
        client: SocketAddr,
        token: String,
    },
    Block(List),
    Allow(List),
    Unlist(List),
    Status,
    Policy,
    Reload,
    /// Packets that are refused are kept for this connection from now on, for [`Traced`](Self::Traced).
    Trace(Follow),
    Traced,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {
    pub prefix: Prefixes,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
    /// After which it is taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Prefixes {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Connections(u32),
    OriginalId(String),
    /// What decides otherwise about parts of what was listed; there is some.
    Exceptions(Vec<Listed>),
    Status(Box<Status>),
    Policy(String),
    Traced(Seen),
}

/// Asks a running gate one thing.
pub fn ask(socket: &Path, request: &Request) -> anyhow::Result<Option<Answer>> {
    ask_more(&mut open(socket)?, request)
}

/// A connection to a running gate.
pub fn open(socket: &Path) -> anyhow::Result<Conversation> {
    Conversation::open(socket, "gate")
}

/// Asks on a connection.
pub fn ask_more(gate: &mut Conversation, request: &Request) -> anyhow::Result<Option<Answer>> {
    gate.ask(request)
}

impl daemon::Daemon for Daemon {
    type Request = Request;
    type Answer = Answer;
    type Caller = Told;

    const TICK: Duration = watch::TICK;

    fn caller(&self) -> Told {
        Told { places: self.places.clone(), connections: HashMap::new(), ids: HashMap::new(), trace: None }
    }

    fn answer(&self, told: &mut Told, request: Request) -> anyhow::Result<Option<Answer>> {
        answer(self, told, request)
    }

    fn read_settings(&self) -> anyhow::Result<()> {
        self.read_policy()
    }

    fn reloads(&self) -> &Reloads {
        &self.reloads
    }

    fn tick(&self) -> anyhow::Result<()> {
        self.tick();
        Ok(())
    }
}

/// What one connection to the socket told; undone when it ends, since the server that told it has.
pub struct Told {
    /// Places for clients, shared by all connections to the socket.
    places: Arc<Semaphore>,
    connections: HashMap<(String, IpAddr), Counted>,
    /// No more than the gate has room for.
    ids: HashMap<(String, Vec<u8>), Id>,
    trace: Option<Tracer>,
}

/// Connections of a client that count; when it is dropped they do not any more.
struct Counted {
    scope: Scope,
    client: IpAddr,
    count: u32,
    _place: OwnedSemaphorePermit,
}

impl Drop for Counted {
    fn drop(&mut self) {
        for _ in 0..self.count {
            // Where it fails the kernel's map is gone, or has forgotten the client.
            let _ = self.scope.dec(self.client);
        }
    }
}

/// A published connection ID; retired when dropped.
struct Id {
    scope: Scope,
    bytes: Vec<u8>,
}

impl Drop for Id {
    fn drop(&mut self) {
        if let Err(error) = self.scope.retire(&self.bytes) {
            tracing::warn!(%error, "a connection ID was not retired");
        }
    }
}

fn answer(daemon: &Daemon, told: &mut Told, request: Request) -> anyhow::Result<Option<Answer>> {
    let gate = &daemon.gate;
    let answer = match request {
        Request::Inc { scope, client } => Answer::Connections(told.inc(daemon, scope, client)?),
        Request::Dec { scope, client } => Answer::Connections(told.dec(daemon, scope, client)?),
        Request::Publish { scope, id } => return told.publish(daemon, scope, id_of(&id)?).map(|()| None),
        Request::Retire { scope, id } => return told.retire(scope, id_of(&id)?).map(|()| None),
        Request::CheckToken { scope, client, token } => {
            let token = hex::decode(&token).context("the token is not hexadecimal")?;
            let token = gate.scope(&scope)?.check_token(client, &token)?;
            Answer::OriginalId(hex::encode(token.original_id()))
        }
        Request::Block(request) => return list(daemon, &request, Entry::Block, "blocked"),
        Request::Allow(request) => return list(daemon, &request, Entry::Allow, "allowed"),
        Request::Unlist(List { seconds: Some(_), .. }) => bail!("`seconds` means nothing here"),
        Request::Unlist(List { prefix, scope, .. }) => {
            let absent = daemon.lists.unlist(gate, scope.as_deref(), &prefix.parse()?)?;
            tracing::info!(%prefix, scope, "neither blocked nor allowed any more");
            let list = scope.map_or("for all".to_owned(), |scope| format!("in scope {scope}"));
            match absent.as_slice() {
                [] => return Ok(None),
                [one] => bail!("{one} was neither blocked nor allowed {list}"),
                [one, ..] => {
                    bail!("{one} and {} others were neither blocked nor allowed {list}", absent.len() - 1)
                }
            }
        }
        Request::Status => Answer::Status(daemon.status()?.into()),
        Request::Policy => Answer::Policy(daemon.policy_text()),
        Request::Reload => return daemon.reload().map(|()| None),
        Request::Trace(follow) => {
            // Its place may be the one that is needed.
            told.trace = None;
            told.trace = Some(gate.trace(&follow.read()?)?);
            return Ok(None);
        }
        Request::Traced => {
            let tracer = told.trace.as_ref().context("nothing is followed on this socket")?;
            Answer::Traced(Seen::new(tracer.take()?))
        }
    };
    Ok(Some(answer))
}

impl Told {
    fn inc(&mut self, daemon: &Daemon, scope: String, client: IpAddr) -> anyhow::Result<u32> {
        let handle = daemon.gate.scope(&scope)?;
        match self.connections.entry((scope, client)) {
            Occupied(mut counted) => {
                let has = handle.inc(client)?;
                counted.get_mut().count += 1;
                Ok(has)
            }
            Vacant(entry) => {
                let _place = Arc::clone(&self.places).try_acquire_owned().context(
                    "connections of as many clients are counted as there is room for: raise `max_clients` in the policy's `[load]`, and \
                     restart the gate",
                )?;
                let has = handle.inc(client)?;
                entry.insert(Counted { scope: handle, client, count: 1, _place });
                Ok(has)
            }
        }
    }

    fn dec(&mut self, daemon: &Daemon, scope: String, client: IpAddr) -> anyhow::Result<u32> {
        let handle = daemon.gate.scope(&scope)?;
        let key = (scope, client);
        let counted = self.connections.get_mut(&key).filter(|counted| counted.count > 0);
        let counted = counted.context("this client was not counted on this socket")?;
        counted.count -= 1;
        let is_last = counted.count == 0;
        let has = handle.dec(client);
        if is_last {
            self.connections.remove(&key);
        }
        Ok(has?)
    }

    fn publish(&mut self, daemon: &Daemon, scope: String, id: Vec<u8>) -> anyhow::Result<()> {
        let handle = daemon.gate.scope(&scope)?;
        handle.publish(&id)?;
        // Not made where there is one: dropping it would retire the ID.
        self.ids.entry((scope, id.clone())).or_insert_with(|| Id { scope: handle, bytes: id });
        Ok(())
    }

    fn retire(&mut self, scope: String, id: Vec<u8>) -> anyhow::Result<()> {
        self.ids.remove(&(scope, id)).context("this ID was not published on this socket")?;
        Ok(())
    }
}

fn id_of(text: &str) -> anyhow::Result<Vec<u8>> {
    let id = hex::decode(text).filter(|id| (1..=20).contains(&id.len()));
    id.context("a connection ID is 1 to 20 bytes, in hexadecimal")
}

/// All of them, or none if one is no prefix.
fn list(daemon: &Daemon, request: &List, entry: Entry, done: &str) -> anyhow::Result<Option<Answer>> {
    let List { prefix, scope, seconds } = request;
    let time = seconds.map(Duration::from_secs);
    let exceptions = daemon.lists.list(&daemon.gate, scope.as_deref(), &prefix.parse()?, entry, time)?;
    tracing::info!(%prefix, scope, seconds, "{done}");
    Ok((!exceptions.is_empty()).then_some(Answer::Exceptions(exceptions)))
}

impl Prefixes {
    fn all(&self) -> &[String] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }

    fn parse(&self) -> anyhow::Result<Vec<Prefix>> {
        self.all().iter().map(|text| Ok(text.parse::<Prefix>()?)).collect()
    }
}

impl fmt::Display for Prefixes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.all() {
            [one] => f.write_str(one),
            many => write!(f, "{} prefixes", many.len()),
        }
    }
}
