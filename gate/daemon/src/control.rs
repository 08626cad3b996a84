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
use millrace_daemon::socket::{Conversation, Socket};
use millrace_gate::{
    Entry, Prefix, Scope, Tracer, hex,
    status::{Listed, Status},
};
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    daemon::Daemon,
    trace::{Follow, Seen},
};

pub const DEFAULT_SOCKET: &str = "/run/millrace/gate.sock";

/// Addresses of clients that all connections to the socket together may count connections of, for each client that the gate has room for:
/// several addresses may be one client.
const ADDRESSES_FACTOR: usize = 16;

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

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Answer {
    pub ok: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original_id: Option<String>,
    /// What decides otherwise about parts of what was listed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exceptions: Vec<Listed>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traced: Option<Seen>,
}

impl From<anyhow::Error> for Answer {
    fn from(error: anyhow::Error) -> Self {
        Self { error: Some(format!("{error:#}")), ..Self::default() }
    }
}

/// Asks a running gate one thing.
pub fn ask(socket: &Path, request: &Request) -> anyhow::Result<Answer> {
    ask_more(&mut open(socket)?, request)
}

/// A connection to a running gate.
pub fn open(socket: &Path) -> anyhow::Result<Conversation> {
    Conversation::open(socket, "gate")
}

/// Asks on a connection.
pub fn ask_more(gate: &mut Conversation, request: &Request) -> anyhow::Result<Answer> {
    gate.ask(request)
}

/// Answers everybody, until the task is aborted.
pub async fn serve(socket: &Socket, daemon: Arc<Daemon>) -> std::convert::Infallible {
    // A connection may be a server's for its whole life.
    let most = usize::try_from(daemon.gate.load().max_clients).unwrap_or(usize::MAX);
    let most = most.saturating_mul(ADDRESSES_FACTOR).min(Semaphore::MAX_PERMITS);
    let places = Arc::new(Semaphore::new(most));
    let answerer = || {
        let (daemon, mut told) = (daemon.clone(), Told::new(places.clone()));
        move |line: &[u8]| answer(&daemon, &mut told, line)
    };
    socket.serve(answerer).await
}

/// What one connection to the socket told; undone when it ends, since the server that told it has.
struct Told {
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

fn answer(daemon: &Daemon, told: &mut Told, line: &[u8]) -> anyhow::Result<Answer> {
    let ok = Answer { ok: true, ..Answer::default() };
    let gate = &daemon.gate;
    match serde_json::from_slice(line).context("not a request")? {
        Request::Inc { scope, client } => {
            let connections = told.inc(daemon, scope, client)?;
            Ok(Answer { connections: Some(connections), ..ok })
        }
        Request::Dec { scope, client } => {
            let connections = told.dec(daemon, scope, client)?;
            Ok(Answer { connections: Some(connections), ..ok })
        }
        Request::Publish { scope, id } => told.publish(daemon, scope, id_of(&id)?).map(|()| ok),
        Request::Retire { scope, id } => told.retire(scope, id_of(&id)?).map(|()| ok),
        Request::CheckToken { scope, client, token } => {
            let token = hex::decode(&token).context("the token is not hexadecimal")?;
            let token = gate.scope(&scope)?.check_token(client, &token)?;
            Ok(Answer { original_id: Some(hex::encode(token.original_id())), ..ok })
        }
        Request::Block(request) => {
            Ok(Answer { exceptions: list(daemon, &request, Entry::Block, "blocked")?, ..ok })
        }
        Request::Allow(request) => {
            Ok(Answer { exceptions: list(daemon, &request, Entry::Allow, "allowed")?, ..ok })
        }
        Request::Unlist(List { seconds: Some(_), .. }) => bail!("`seconds` means nothing here"),
        Request::Unlist(List { prefix, scope, .. }) => {
            let absent = daemon.lists.unlist(gate, scope.as_deref(), &prefix.parse()?)?;
            tracing::info!(%prefix, scope, "neither blocked nor allowed any more");
            let list = scope.map_or("for all".to_owned(), |scope| format!("in scope {scope}"));
            match absent.as_slice() {
                [] => Ok(ok),
                [one] => bail!("{one} was neither blocked nor allowed {list}"),
                [one, ..] => {
                    bail!("{one} and {} others were neither blocked nor allowed {list}", absent.len() - 1)
                }
            }
        }
        Request::Status => Ok(Answer { status: Some(daemon.status()?), ..ok }),
        Request::Policy => Ok(Answer { policy: Some(daemon.policy_text()), ..ok }),
        Request::Reload => daemon.reload().map(|()| ok),
        Request::Trace(follow) => {
            // Its place may be the one that is needed.
            told.trace = None;
            told.trace = Some(gate.trace(&follow.read()?)?);
            Ok(ok)
        }
        Request::Traced => {
            let tracer = told.trace.as_ref().context("nothing is followed on this socket")?;
            Ok(Answer { traced: Some(Seen::new(tracer.take()?)), ..ok })
        }
    }
}

impl Told {
    fn new(places: Arc<Semaphore>) -> Self {
        Self { places, connections: HashMap::new(), ids: HashMap::new(), trace: None }
    }

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
fn list(daemon: &Daemon, request: &List, entry: Entry, done: &str) -> anyhow::Result<Vec<Listed>> {
    let List { prefix, scope, seconds } = request;
    let time = seconds.map(Duration::from_secs);
    let exceptions = daemon.lists.list(&daemon.gate, scope.as_deref(), &prefix.parse()?, entry, time)?;
    tracing::info!(%prefix, scope, seconds, "{done}");
    Ok(exceptions)
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
