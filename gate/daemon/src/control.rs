//! The control socket of a running gate: requests, permissions, and the cleanup after a server that disconnects.
//! `docs/guide/gate.md` documents it.

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
    ListEntry, PacketTracer, Prefix, Scope, hex,
    status::{ListedStatus, Status},
};
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    daemon::GateDaemon,
    trace::{GateTraceFilter, TraceUpdate},
    watch,
};

/// Path of the control socket, if no other is configured.
pub const DEFAULT_SOCKET: &str = "/run/millrace/gate.sock";

/// A request, one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum GateRequest {
    /// Counts one more connection of a client with the server that sends this request.
    Inc {
        /// Name of the policy's scope (an application with rules of its own) to which the server belongs.
        scope: String,
        /// The client's address.
        client: IpAddr,
    },
    /// Stops counting one connection of a client with the server that sends this request.
    Dec {
        /// Name of the policy's scope (an application with rules of its own) to which the server belongs.
        scope: String,
        /// The client's address.
        client: IpAddr,
    },
    /// Tells the gate a connection ID of the server, so that packets with this ID count as packets of a live
    /// connection.
    Publish {
        /// Name of the policy's scope (an application with rules of its own) to which the server belongs.
        scope: String,
        /// The ID, in hexadecimal.
        id: String,
    },
    /// Tells the gate that a published connection ID is no longer in use.
    Retire {
        /// Name of the policy's scope (an application with rules of its own) to which the server belongs.
        scope: String,
        /// The ID, in hexadecimal.
        id: String,
    },
    /// Checks a token of a Retry packet.
    CheckToken {
        /// Name of the policy's scope (an application with rules of its own) to which the server belongs.
        scope: String,
        /// The client's address and port.
        client: SocketAddr,
        /// The token of the client's Initial packet, in hexadecimal.
        token: String,
    },
    /// Adds address prefixes to the block list.
    Block(PrefixList),
    /// Adds address prefixes to the allow list.
    Allow(PrefixList),
    /// Removes list entries that `Block` or `Allow` added.
    Unlist(PrefixList),
    /// Asks for the status.
    Status,
    /// Asks for the text of the policy.
    Policy,
    /// Reads the policy file again and applies it.
    Reload,
    /// Starts a trace on this connection: refused packets are kept from now on, for [`Traced`](Self::Traced).
    Trace(GateTraceFilter),
    /// Asks for the packets that the trace has kept since the last `Traced` request.
    Traced,
}

/// Address prefixes to add to the block or allow list, or to remove from it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefixList {
    /// The prefixes.
    pub prefix: Prefixes,
    /// Name of the policy's scope (an application with rules of its own) for whose packets the entries apply; `None` if
    /// they apply for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
    /// Seconds after which the entries are removed; `None` if they stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<u64>,
}

/// One or more prefixes.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Prefixes {
    /// One prefix.
    One(String),
    /// A list of prefixes.
    Many(Vec<String>),
}

/// An answer to a request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GateReply {
    /// The number of the client's connections after the request.
    Connections(u32),
    /// The original destination connection ID of a token, in hexadecimal.
    OriginalId(String),
    /// Block or allow list entries that override the entries which the request added, for a whole prefix or a part of
    /// it. Never empty.
    Exceptions(Vec<ListedStatus>),
    /// The status.
    Status(Box<Status>),
    /// The text of the policy.
    Policy(String),
    /// The packets of the trace.
    Traced(TraceUpdate),
}

/// Sends one request to a running gate and returns its answer.
pub fn ask(socket: &Path, request: &GateRequest) -> anyhow::Result<Option<GateReply>> {
    ask_more(&mut open(socket)?, request)
}

/// Opens a connection to a running gate.
pub fn open(socket: &Path) -> anyhow::Result<Conversation> {
    Conversation::open(socket, "gate")
}

/// Sends a further request on a connection.
pub fn ask_more(gate: &mut Conversation, request: &GateRequest) -> anyhow::Result<Option<GateReply>> {
    gate.ask(request)
}

impl daemon::Daemon for GateDaemon {
    type Request = GateRequest;
    type Answer = GateReply;
    type Caller = ConnectionState;

    const TICK: Duration = watch::TICK;

    fn caller(&self) -> ConnectionState {
        ConnectionState {
            places: self.places.clone(),
            connections: HashMap::new(),
            ids: HashMap::new(),
            trace: None,
        }
    }

    fn answer(&self, told: &mut ConnectionState, request: GateRequest) -> anyhow::Result<Option<GateReply>> {
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

/// The state that one connection to the control socket added to the gate. It is removed when the connection ends,
/// because the server that opened the connection has then ended.
pub struct ConnectionState {
    /// Limits for how many client addresses servers can count connections over the control socket. This connection to
    /// the socket holds a permit of the semaphore for each address in `connections`.
    places: Arc<Semaphore>,
    connections: HashMap<(String, IpAddr), CountedClient>,
    /// The QUIC connection IDs that the server has told the gate. The size of the gate's table of connection IDs bounds
    /// their number.
    ids: HashMap<(String, Vec<u8>), PublishedId>,
    trace: Option<PacketTracer>,
}

/// The counted connections of a client. Dropping this value stops counting them.
struct CountedClient {
    scope: Scope,
    client: IpAddr,
    count: u32,
    _place: OwnedSemaphorePermit,
}

impl Drop for CountedClient {
    fn drop(&mut self) {
        for _ in 0..self.count {
            // Removing the count fails only if the kernel's map is gone, or has no entry of the client.
            let _ = self.scope.dec(self.client);
        }
    }
}

/// A QUIC connection ID that a server has told the gate. When this is dropped, the gate forgets the ID.
struct PublishedId {
    scope: Scope,
    bytes: Vec<u8>,
}

impl Drop for PublishedId {
    fn drop(&mut self) {
        if let Err(error) = self.scope.retire(&self.bytes) {
            tracing::warn!(%error, "cannot retire a connection ID of a server that left the gate");
        }
    }
}

fn answer(
    daemon: &GateDaemon,
    told: &mut ConnectionState,
    request: GateRequest,
) -> anyhow::Result<Option<GateReply>> {
    let gate = &daemon.gate;
    let answer = match request {
        GateRequest::Inc { scope, client } => GateReply::Connections(told.inc(daemon, scope, client)?),
        GateRequest::Dec { scope, client } => GateReply::Connections(told.dec(daemon, scope, client)?),
        GateRequest::Publish { scope, id } => return told.publish(daemon, scope, id_of(&id)?).map(|()| None),
        GateRequest::Retire { scope, id } => return told.retire(scope, id_of(&id)?).map(|()| None),
        GateRequest::CheckToken { scope, client, token } => {
            let token = hex::decode(&token).context("the token is not hexadecimal")?;
            let token = gate.scope(&scope)?.check_token(client, &token)?;
            GateReply::OriginalId(hex::encode(token.original_id()))
        }
        GateRequest::Block(request) => return list(daemon, &request, ListEntry::Block, "blocked a prefix"),
        GateRequest::Allow(request) => return list(daemon, &request, ListEntry::Allow, "allowed a prefix"),
        GateRequest::Unlist(PrefixList { seconds: Some(_), .. }) => {
            bail!("`seconds` is not allowed in `unlist`")
        }
        GateRequest::Unlist(PrefixList { prefix, scope, .. }) => {
            // Prefixes on the list are removed even if others are absent, and the error is about the absent ones.
            let absent = daemon.lists.unlist(gate, scope.as_deref(), &prefix.parse()?)?;
            tracing::info!(%prefix, scope, "removed an entry from the gate's block or allow list");
            let list = scope.map_or("for all".to_owned(), |scope| format!("in scope {scope}"));
            match absent.as_slice() {
                [] => return Ok(None),
                [one] => bail!("{one} was neither blocked nor allowed {list}"),
                [one, ..] => {
                    bail!("{one} and {} others were neither blocked nor allowed {list}", absent.len() - 1)
                }
            }
        }
        GateRequest::Status => GateReply::Status(daemon.status()?.into()),
        GateRequest::Policy => GateReply::Policy(daemon.policy_text()),
        GateRequest::Reload => return daemon.reload().map(|()| None),
        GateRequest::Trace(follow) => {
            // The old trace ends first: the gate has few slots for traces, and the new trace may need the slot of the
            // old one.
            told.trace = None;
            told.trace = Some(gate.trace(&follow.read()?)?);
            return Ok(None);
        }
        GateRequest::Traced => {
            let tracer = told.trace.as_ref().context("this connection has no trace: send `trace` first")?;
            GateReply::Traced(TraceUpdate::new(tracer.take()?))
        }
    };
    Ok(Some(answer))
}

impl ConnectionState {
    fn inc(&mut self, daemon: &GateDaemon, scope: String, client: IpAddr) -> anyhow::Result<u32> {
        let handle = daemon.gate.scope(&scope)?;
        match self.connections.entry((scope, client)) {
            Occupied(mut counted) => {
                // The kernel counts first, so that a failed call leaves no count here that would be subtracted later.
                let has = handle.inc(client)?;
                counted.get_mut().count += 1;
                Ok(has)
            }
            Vacant(entry) => {
                // The permit is taken before the kernel counts, so that the number of addresses in this map stays
                // bounded.
                let _place = Arc::clone(&self.places).try_acquire_owned().context(
                    "the table of clients is full: raise `max_clients` in the policy's `[load]`, and \
                     restart the gate",
                )?;
                let has = handle.inc(client)?;
                entry.insert(CountedClient { scope: handle, client, count: 1, _place });
                Ok(has)
            }
        }
    }

    fn dec(&mut self, daemon: &GateDaemon, scope: String, client: IpAddr) -> anyhow::Result<u32> {
        let handle = daemon.gate.scope(&scope)?;
        let key = (scope, client);
        // A server may subtract only connections that it has counted itself, so it cannot lower another server's
        // counts.
        let counted = self.connections.get_mut(&key).filter(|counted| counted.count > 0);
        let counted = counted.context("this client has no connection that was counted on this connection")?;
        // This count is lowered even if the kernel's call fails, so that no connection is subtracted twice.
        counted.count -= 1;
        let is_last = counted.count == 0;
        let has = handle.dec(client);
        if is_last {
            self.connections.remove(&key);
        }
        Ok(has?)
    }

    fn publish(&mut self, daemon: &GateDaemon, scope: String, id: Vec<u8>) -> anyhow::Result<()> {
        let handle = daemon.gate.scope(&scope)?;
        handle.publish(&id)?;
        // A second `PublishedId` of the same ID would retire the ID when it is dropped, so none is made.
        self.ids.entry((scope, id.clone())).or_insert_with(|| PublishedId { scope: handle, bytes: id });
        Ok(())
    }

    fn retire(&mut self, scope: String, id: Vec<u8>) -> anyhow::Result<()> {
        self.ids.remove(&(scope, id)).context("this ID was not published on this connection")?;
        Ok(())
    }
}

fn id_of(text: &str) -> anyhow::Result<Vec<u8>> {
    let id = hex::decode(text).filter(|id| (1..=20).contains(&id.len()));
    id.context("a connection ID must be 1 to 20 bytes, in hexadecimal")
}

/// Adds the request's prefixes to a list. If one of them cannot be parsed, none is added.
fn list(
    daemon: &GateDaemon,
    request: &PrefixList,
    entry: ListEntry,
    done: &str,
) -> anyhow::Result<Option<GateReply>> {
    let PrefixList { prefix, scope, seconds } = request;
    let time = seconds.map(Duration::from_secs);
    let exceptions = daemon.lists.list(&daemon.gate, scope.as_deref(), &prefix.parse()?, entry, time)?;
    tracing::info!(%prefix, scope, seconds, "the gate {done}");
    Ok((!exceptions.is_empty()).then_some(GateReply::Exceptions(exceptions)))
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
