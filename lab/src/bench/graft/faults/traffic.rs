//! Connections of the applications in a row of the matrix, and what both ends of each say.

use std::cell::Cell;
use std::fs;
use std::net::SocketAddr;
use std::process::ChildStdin;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::end::{Came, Reports};
use super::outcome::Outcome;
use super::pair::{PORT, Pair};
use crate::bench::graft::host::{Host, LIMIT};
use crate::bench::process::Process;

/// For ends to say what came of them: longer than they are patient.
const PATIENCE: Duration = Duration::from_secs(200);
/// A few MB a second by three connections, each way.
const PAUSE_US: u64 = 25_000;
const BATCH: u64 = 1 << 20;

/// A server, and the connections that were made to it so far.
pub struct Traffic<'a> {
    client: &'a Host<'a>,
    at: SocketAddr,
    server: Process,
    enough: ChildStdin,
    batches: Cell<u64>,
}

/// Connections that one client has made.
pub struct Batch {
    process: Process,
    enough: ChildStdin,
}

/// How a client sends.
#[derive(Clone, Copy)]
pub struct Load {
    pub connections: u64,
    /// Behind each piece of 32 KiB on average.
    pub pause_us: u64,
    /// Each way; without, until it is told to end.
    pub bytes: Option<u64>,
    pub per_second: Option<u64>,
}

impl Load {
    /// Until it is told to end.
    pub const fn steady(connections: u64) -> Self {
        Self { connections, pause_us: PAUSE_US, bytes: None, per_second: None }
    }

    pub const fn of(connections: u64, bytes: u64) -> Self {
        Self { connections, pause_us: 0, bytes: Some(bytes), per_second: None }
    }
}

impl<'a> Traffic<'a> {
    /// From the client's host to the server's, carried.
    pub fn new(pair: &'a Pair<'a>) -> anyhow::Result<Self> {
        Self::between(&pair.client, &pair.server, pair.at(PORT)?)
    }

    pub fn between(client: &'a Host<'a>, server: &Host<'_>, at: SocketAddr) -> anyhow::Result<Self> {
        let arguments =
            ["serve", "--at", &at.to_string(), "--pause-us", &PAUSE_US.to_string()].map(str::to_owned);
        let (server, enough) = start("ends-server", server, &arguments, &format!("server-{at}"))?;
        Ok(Self { client, at, server, enough, batches: Cell::new(0) })
    }

    pub fn begin(&self, load: Load) -> anyhow::Result<Batch> {
        self.begin_on(self.client, load)
    }

    /// By a client on another host.
    pub fn begin_on(&self, host: &Host<'_>, load: Load) -> anyhow::Result<Batch> {
        let number = self.batches.get() + 1;
        self.batches.set(number);
        let mut arguments = vec!["connect".to_owned(), "--to".to_owned(), self.at.to_string()];
        let mut more = |name: &str, value: u64| arguments.extend([name.to_owned(), value.to_string()]);
        more("--connections", load.connections);
        more("--first", number * BATCH);
        more("--pause-us", load.pause_us);
        load.bytes.into_iter().for_each(|bytes| more("--bytes", bytes));
        load.per_second.into_iter().for_each(|rate| more("--per-second", rate));
        let (process, enough) =
            start("ends-client", host, &arguments, &format!("client-{}-{number}", self.at))?;
        Ok(Batch { process, enough })
    }

    /// A batch from its beginning to its end.
    pub fn whole(&self, load: Load) -> anyhow::Result<Reports> {
        self.begin(load)?.end()
    }

    /// Ends the server. What the clients have said of their ends, with what the server says of its.
    pub fn end(
        self,
        clients: impl IntoIterator<Item = Reports>,
        outcome: &mut Outcome,
    ) -> anyhow::Result<()> {
        drop(self.enough);
        let servers: Reports = read(self.server)?;
        let clients: Reports = clients.into_iter().flatten().collect();
        judge(&clients, &servers, outcome);
        Ok(())
    }
}

impl Batch {
    /// What the client says of its ends, when the last of them is over.
    pub fn end(self) -> anyhow::Result<Reports> {
        drop(self.enough);
        read(self.process)
    }

    /// The same, of connections that nobody has told to end: others do.
    pub fn ended(self) -> anyhow::Result<Reports> {
        let said = self.process.finish(PATIENCE);
        drop(self.enough);
        Ok(serde_json::from_str(json(&said?)?)?)
    }
}

fn start(
    name: &'static str,
    host: &Host<'_>,
    arguments: &[String],
    directory: &str,
) -> anyhow::Result<(Process, ChildStdin)> {
    let directory = host.directory.join(directory);
    fs::create_dir_all(&directory)?;
    let mut command = host.node.command(std::env::current_exe()?);
    command.args(["bench", "graft", "fault-end"]).args(arguments);
    let (mut process, enough) = Process::start_fed(name, host.cgroup.command(&command), &directory)?;
    // One that makes connections at a rate has nothing to say before its end.
    if !arguments.iter().any(|it| it == "--per-second") {
        let mut is_ready = false;
        let out = directory.join(format!("{name}.out"));
        let ready = || {
            is_ready |= fs::read_to_string(&out).is_ok_and(|text| text.starts_with("ready"));
            is_ready
        };
        // A client with few bytes may have ended already.
        if process.wait_until("its start", LIMIT, ready).is_err() {
            let text = fs::read_to_string(&out)?;
            ensure!(text.starts_with("ready"), "{name} did not start: {}", process.last_words());
        }
    }
    Ok((process, enough))
}

fn read(process: Process) -> anyhow::Result<Reports> {
    Ok(serde_json::from_str(json(&process.finish(PATIENCE)?)?)?)
}

fn json(said: &str) -> anyhow::Result<&str> {
    said.lines().next_back().context("an end has said nothing")
}

/// Both ends' words, connection by connection.
fn judge(clients: &Reports, servers: &Reports, outcome: &mut Outcome) {
    for (id, near) in clients {
        outcome.note(*id, near, servers.get(id));
    }
    for id in servers.keys().filter(|id| !clients.contains_key(id)) {
        outcome.wrong.push(format!("connection {id}: the server has it and the client has not"));
    }
}

/// All of these were whole at the client's end.
pub fn all_whole(reports: &Reports) -> bool {
    reports.values().all(|report| report.came == Came::Whole)
}

/// All of these were reset at the client's end.
pub fn all_reset(reports: &Reports) -> bool {
    reports.values().all(|report| report.came == Came::Reset)
}
