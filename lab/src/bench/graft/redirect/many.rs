//! Many thousands of connections at once: how fast they are made, and the daemons' memory while they exist and
//! afterwards.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};

use crate::bench::graft::carrying::Carrying;
use crate::bench::graft::host::LIMIT;
use crate::bench::process::BenchProcess;
use crate::bench::usage::rss_bytes;

const MESSAGE: usize = 64;
/// Time after the end of the last connection in which the daemons release resources.
const SETTLED: Duration = Duration::from_secs(12);
/// Number of file descriptors that this process needs in addition to one for each connection.
const OTHER_DESCRIPTORS: u64 = 256;

/// Resident memory of the client's and of the server's daemon, bytes.
#[derive(Debug, Clone, Copy)]
struct DaemonsMemory {
    client: u64,
    server: u64,
}

struct ConnectionWave {
    per_second: f64,
    during: DaemonsMemory,
    after: DaemonsMemory,
}

pub struct Many {
    count: usize,
    before: DaemonsMemory,
    waves: Vec<ConnectionWave>,
}

impl Many {
    /// Measures waves of connections, one wave after the other. Each connection carries one message, and stays open
    /// until all connections of its wave have carried their messages.
    pub fn measure(
        pair: &Carrying<'_>,
        [server, client]: [&BenchProcess; 2],
        at: SocketAddr,
        count: usize,
        waves: usize,
    ) -> anyhow::Result<Self> {
        let memory =
            || anyhow::Ok(DaemonsMemory { client: rss_bytes(client.id())?, server: rss_bytes(server.id())? });
        let before = memory()?;
        let mut measured = Vec::new();
        for _ in 0..waves {
            let start = Instant::now();
            let held = hold(pair, at, count)?;
            let per_second = count as f64 / start.elapsed().as_secs_f64();
            let during = memory()?;
            drop(held);
            pair.client.wait_for("the end of all connections", |status| {
                status.pointer("/status/carry/connections").and_then(Value::as_u64) == Some(0)
            })?;
            std::thread::sleep(SETTLED);
            measured.push(ConnectionWave { per_second, during, after: memory()? });
        }
        Ok(Self { count, before, waves: measured })
    }

    pub fn json(&self) -> Value {
        let memory = |it: DaemonsMemory| json!({ "client_bytes": it.client, "server_bytes": it.server });
        let wave = |it: &ConnectionWave| {
            let during = memory(it.during);
            let after = memory(it.after);
            json!({ "connections_per_second": it.per_second, "rss_during": during, "rss_after": after })
        };
        let waves: Vec<_> = self.waves.iter().map(wave).collect();
        json!({ "connections": self.count, "rss_before": memory(self.before), "waves": waves })
    }

    pub fn render(&self) -> String {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let both = |it: DaemonsMemory| format!("{:.0} and {:.0} MiB", mib(it.client), mib(it.server));
        let mut text = format!(
            "{} connections at once; memory of the client's and the server's daemon: {} before\n",
            self.count,
            both(self.before)
        );
        for (number, it) in self.waves.iter().enumerate() {
            let during = both(it.during);
            let after = both(it.after);
            text += &format!(
                "wave {}: {:.0} a second, {during} with them, {after} after\n",
                number + 1,
                it.per_second
            );
        }
        text
    }
}

/// Raises the limit of descriptors to one for each connection and some more. Child processes inherit the limit.
pub fn make_room(count: usize) -> anyhow::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let wanted = (count as u64 + OTHER_DESCRIPTORS).max(hard);
    let room = hard.saturating_sub(OTHER_DESCRIPTORS);
    setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).with_context(|| {
        format!("--connections {count}: the limit of descriptors (RLIMIT_NOFILE, {hard}) allows only {room}, and may not be raised")
    })
}

/// Makes `count` connections, one after the other, and passes a message in both directions of each.
fn hold(pair: &Carrying<'_>, at: SocketAddr, count: usize) -> anyhow::Result<Vec<TcpStream>> {
    let connect = || {
        let one = |_| {
            let mut near = TcpStream::connect_timeout(&at, LIMIT)?;
            near.set_read_timeout(Some(LIMIT))?;
            near.write_all(&[7; MESSAGE])?;
            near.read_exact(&mut [0; MESSAGE])?;
            Ok(near)
        };
        (0..count).map(one).collect::<std::io::Result<Vec<_>>>()
    };
    let held = pair.client.cgroup.enter(|| pair.client.node.enter(connect))??;
    held.context("one of the many connections")
}
