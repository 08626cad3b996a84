//! The applications' connections in one row of the fault benchmark (one fault), and the reports of client and server.

use std::cell::Cell;
use std::fs;
use std::net::SocketAddr;
use std::process::ChildStdin;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::end::{DirectionEnd, Reports};
use super::outcome::FaultOutcome;
use super::pair::{FaultPair, PORT};
use crate::bench::graft::host::{GraftHost, LIMIT};
use crate::bench::process::BenchProcess;

/// Longest wait for the reports. It is longer than the time without data after which the applications give up.
const PATIENCE: Duration = Duration::from_secs(200);
/// Pause of a sender after each block of data that it writes, us. With this pause, three connections send a few MB per
/// second in each direction.
const PAUSE_US: u64 = 25_000;
const BATCH: u64 = 1 << 20;

/// A server application, and the connections that clients have made to it so far.
pub struct FaultTraffic<'a> {
    client: &'a GraftHost<'a>,
    at: SocketAddr,
    server: BenchProcess,
    enough: ChildStdin,
    batches: Cell<u64>,
}

/// A running client process with its connections.
pub struct TrafficBatch {
    process: BenchProcess,
    enough: ChildStdin,
}

/// Load that a client process generates.
#[derive(Clone, Copy)]
pub struct TrafficLoad {
    pub connections: u64,
    /// Pause after each block of data that is written, us. A block has 32 KiB on average.
    pub pause_us: u64,
    /// Bytes in each direction; `None` to send until the load is stopped.
    pub bytes: Option<u64>,
    pub per_second: Option<u64>,
}

impl TrafficLoad {
    /// Returns a load that sends until it is stopped.
    pub const fn steady(connections: u64) -> Self {
        Self { connections, pause_us: PAUSE_US, bytes: None, per_second: None }
    }

    pub const fn with_size(connections: u64, bytes: u64) -> Self {
        Self { connections, pause_us: 0, bytes: Some(bytes), per_second: None }
    }
}

impl<'a> FaultTraffic<'a> {
    /// Starts a server on the server's host. Its clients run on the client's host, so their connections are tunnelled.
    pub fn new(pair: &'a FaultPair<'a>) -> anyhow::Result<Self> {
        Self::between(&pair.client, &pair.server, pair.at(PORT)?)
    }

    pub fn between(
        client: &'a GraftHost<'a>,
        server: &GraftHost<'_>,
        at: SocketAddr,
    ) -> anyhow::Result<Self> {
        let arguments =
            ["serve", "--at", &at.to_string(), "--pause-us", &PAUSE_US.to_string()].map(str::to_owned);
        let (server, enough) = start("ends-server", server, &arguments, &format!("server-{at}"))?;
        Ok(Self { client, at, server, enough, batches: Cell::new(0) })
    }

    pub fn begin(&self, load: TrafficLoad) -> anyhow::Result<TrafficBatch> {
        self.begin_on(self.client, load)
    }

    /// Starts a client process on the given host instead of the client's host.
    pub fn begin_on(&self, host: &GraftHost<'_>, load: TrafficLoad) -> anyhow::Result<TrafficBatch> {
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
        Ok(TrafficBatch { process, enough })
    }

    /// Starts a client process and waits until it has finished. Returns its reports.
    pub fn whole(&self, load: TrafficLoad) -> anyhow::Result<Reports> {
        self.begin(load)?.end()
    }

    /// Ends the server and compares its reports with the clients' reports.
    pub fn end(
        self,
        clients: impl IntoIterator<Item = Reports>,
        outcome: &mut FaultOutcome,
    ) -> anyhow::Result<()> {
        drop(self.enough);
        let servers: Reports = read(self.server)?;
        let clients: Reports = clients.into_iter().flatten().collect();
        judge(&clients, &servers, outcome);
        Ok(())
    }
}

impl TrafficBatch {
    /// Stops sending, waits until all connections have ended, and returns the client's reports.
    pub fn end(self) -> anyhow::Result<Reports> {
        drop(self.enough);
        read(self.process)
    }

    /// Waits until a fault has ended all connections, and returns the client's reports.
    pub fn ended(self) -> anyhow::Result<Reports> {
        let said = self.process.finish(PATIENCE);
        drop(self.enough);
        Ok(serde_json::from_str(json(&said?)?)?)
    }
}

fn start(
    name: &'static str,
    host: &GraftHost<'_>,
    arguments: &[String],
    directory: &str,
) -> anyhow::Result<(BenchProcess, ChildStdin)> {
    let directory = host.directory.join(directory);
    fs::create_dir_all(&directory)?;
    let mut command = host.node.command(std::env::current_exe()?);
    command.args(["bench", "graft", "fault-end"]).args(arguments);
    let (mut process, enough) = BenchProcess::start_fed(name, host.cgroup.command(&command), &directory)?;
    // A client with a rate of connections per second prints nothing before its end, so the caller cannot wait until it
    // is ready.
    if !arguments.iter().any(|it| it == "--per-second") {
        let mut is_ready = false;
        let out = directory.join(format!("{name}.out"));
        let ready = || {
            is_ready |= fs::read_to_string(&out).is_ok_and(|text| text.starts_with("ready"));
            is_ready
        };
        // If the client has ended already, since it had little data to send, `wait_until` returns an error.
        if process.wait_until("its start", LIMIT, ready).is_err() {
            let text = fs::read_to_string(&out)?;
            ensure!(text.starts_with("ready"), "{name} did not start: {}", process.last_words());
        }
    }
    Ok((process, enough))
}

fn read(process: BenchProcess) -> anyhow::Result<Reports> {
    Ok(serde_json::from_str(json(&process.finish(PATIENCE)?)?)?)
}

fn json(said: &str) -> anyhow::Result<&str> {
    said.lines().next_back().context("an application has printed no report")
}

/// Compares the reports of client and server, connection by connection.
fn judge(clients: &Reports, servers: &Reports, outcome: &mut FaultOutcome) {
    for (id, near) in clients {
        outcome.note(*id, near, servers.get(id));
    }
    for id in servers.keys().filter(|id| !clients.contains_key(id)) {
        outcome.wrong.push(format!("connection {id}: the server knows it and the client does not"));
    }
}

/// Reports whether all connections delivered all data to the client.
pub fn all_whole(reports: &Reports) -> bool {
    reports.values().all(|report| report.came == DirectionEnd::Whole)
}

/// Reports whether all connections were reset on the client's side.
pub fn all_reset(reports: &Reports) -> bool {
    reports.values().all(|report| report.came == DirectionEnd::Reset)
}
