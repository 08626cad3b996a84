//! Measures the resources of a daemon with many sessions: its resident memory, the memory of its BPF maps, and the
//! memory that it reports itself. Memory is read before and after each session has passed a message. CPU time is that
//! of idle sessions.

use std::collections::BTreeMap;
use std::fs;
use std::net::UdpSocket;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::{FIRST_PORT, PORT, SessionArgs, SessionPair};
use crate::bench::site::BenchSite;
use crate::bench::table::columns;
use crate::bench::usage::UsageReading;
use crate::progress::BenchProgress;

/// Pause before an idle daemon is measured. In this time, sessions send their last control messages, and timers expire.
const CALM: Duration = Duration::from_secs(5);
const IDLE: Duration = Duration::from_secs(5);

/// Memory of a daemon, bytes.
#[derive(Clone, Copy)]
struct SessionMemory {
    resident: u64,
    maps: u64,
}

impl SessionMemory {
    fn read_process(process: u32) -> anyhow::Result<Self> {
        let status = fs::read_to_string(format!("/proc/{process}/status"))?;
        let kib = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        let mut maps = BTreeMap::new();
        for entry in fs::read_dir(format!("/proc/{process}/fdinfo"))? {
            // A descriptor may have been closed since the directory was listed.
            let text = fs::read_to_string(entry?.path()).unwrap_or_default();
            maps.extend(map_of(&text));
        }
        Ok(Self { resident: kib.context("no VmRSS")? * 1024, maps: maps.values().sum() })
    }
}

/// Parses the kernel's description of a file descriptor (fdinfo). If the descriptor refers to a BPF map, returns the
/// map's ID and its size in bytes.
fn map_of(text: &str) -> Option<(u64, u64)> {
    let field =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    Some((field("map_id:")?, field("memlock:")?))
}

pub fn run(args: &SessionArgs, site: &BenchSite) -> anyhow::Result<(Vec<Value>, String)> {
    let progress = BenchProgress::with_steps(args.memory_sessions.len());
    let head = [
        "sessions",
        "stated MiB",
        "maps MiB",
        "RSS MiB",
        "maps after traffic",
        "RSS after traffic",
        "idle CPU ms/s",
    ];
    let mut rows = Vec::new();
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for sessions in &args.memory_sessions {
        let label = format!("{sessions} sessions");
        progress.begin(label.clone());
        let pair = SessionPair::start(site, *sessions, &["number"], "")?;
        let stated = pair.near.status()?["memory_bytes"]
            .as_u64()
            .context("the daemon's status has no memory_bytes")?;
        let before = SessionMemory::read_process(pair.near.id())?;
        use_each(site, *sessions)?;
        let passed = pair.far.status()?["sessions"].as_array().map_or(0, |all| {
            all.iter().filter(|session| session["packets"]["delivered"].as_u64() >= Some(1)).count()
        });
        ensure!(passed == usize::from(*sessions), "only {passed} of {sessions} sessions passed a message");
        let after = SessionMemory::read_process(pair.near.id())?;
        ensure!(
            before.maps == after.maps,
            "{sessions} sessions: the maps grew from {} bytes to {}",
            before.maps,
            after.maps
        );
        let idle = idle_ms_s(pair.near.id())?;
        rows.push(json!({
            "part": "memory", "sessions": sessions, "functions": ["number"], "stated_bytes": stated,
            "maps_bytes": before.maps, "resident_bytes": before.resident,
            "maps_after_bytes": after.maps, "resident_after_bytes": after.resident,
            "idle_cpu_ms_s": idle,
        }));
        let mib = [stated, before.maps, before.resident, after.maps, after.resident]
            .map(|bytes| format!("{:.1}", bytes as f64 / f64::from(1 << 20)));
        let idle = format!("{idle:.1}");
        lines.push([sessions.to_string()].into_iter().chain(mib).chain([idle]).collect());
        progress.next(label);
    }
    drop(progress);
    Ok((rows, columns(&lines)))
}

/// Returns the CPU time per second of an idle daemon in ms. Before that, it waits for the time `CALM`, in which the
/// daemon finishes its work for earlier messages.
fn idle_ms_s(process: u32) -> anyhow::Result<f64> {
    thread::sleep(CALM);
    let before = UsageReading::take(process)?;
    thread::sleep(IDLE);
    Ok(10.0 * UsageReading::take(process)?.used_since(&before).process_percent())
}

/// Sends one message through each session, one after the other.
fn use_each(site: &BenchSite, sessions: u16) -> anyhow::Result<()> {
    let near = site.relay()?;
    let far = site.subscribers()?;
    let to = far.enter(|| UdpSocket::bind((far.addr_v4(), PORT)))??;
    to.set_read_timeout(Some(Duration::from_secs(5)))?;
    near.enter(|| -> anyhow::Result<()> {
        for at in 0..sessions {
            let from = UdpSocket::bind((near.addr_v4(), FIRST_PORT + at))?;
            from.send_to(b"message", (far.addr_v4(), PORT))?;
            // Messages that were sent before the other host was ready may arrive as well, so the content is not
            // compared.
            to.recv(&mut [0; 2048]).with_context(|| format!("session {at} passed no message"))?;
        }
        Ok(())
    })?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_map_is_parsed() {
        let text = "pos:\t0\nflags:\t02000002\nmap_type:\t2\nmax_entries:\t64\nmemlock:\t4096\nmap_id:\t17\n";
        assert_eq!(map_of(text), Some((17, 4096)));
        assert_eq!(map_of("pos:\t0\nprog_id:\t3\nmemlock:\t4096\n"), None);
    }
}
