//! Faults in which a daemon ends during transfers and is started again.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, ensure};

use super::FaultCase;
use super::outcome::FaultOutcome;
use super::pair::{FaultPair, Setting, another_build, count, counted, flowing};
use super::traffic::{FaultTraffic, TrafficLoad, all_reset, all_whole};
use crate::bench::graft::host::{GraftHost, LIMIT};
use crate::bench::process::BenchProcess;
use crate::program::product;

/// The host whose daemon the fault ends.
#[derive(Clone, Copy, PartialEq)]
pub enum FaultedHost {
    Client,
    Server,
}

#[derive(Clone, Copy, PartialEq)]
pub enum EndMethod {
    /// SIGKILL. The daemon is started again after a while.
    Kill,
    /// SIGTERM. The daemon is started again at once.
    Signal,
}

const BYTES: u64 = 300_000;

pub fn gone(case: &FaultCase<'_>, end: FaultedHost, by: EndMethod) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [case.kind];
    let pair = FaultPair::new(&case.site, &Setting::from_kinds(&kinds))?;
    let [near, far] = pair.start()?;
    let traffic = FaultTraffic::new(&pair)?;
    let before = traffic.begin(TrafficLoad::steady(3))?;
    flowing(&pair, 1 << 20)?;
    let (host, gone, _stays) = match end {
        FaultedHost::Client => (&pair.client, near, far),
        FaultedHost::Server => (&pair.server, far, near),
    };
    let mut all = Vec::new();
    let mut unaware = None;
    match by {
        EndMethod::Signal => drop(gone),
        EndMethod::Kill => {
            gone.kill()?;
            // The other host's daemon may not have noticed yet that the faulted daemon has ended. Connections of
            // applications that begin now may fail, or stay outside of the tunnel.
            unaware = Some(traffic.begin(TrafficLoad::with_size(2, BYTES))?);
            if end == FaultedHost::Server {
                pair.wait("a cold carrier", || Ok(pair.state()? == "cold"))?;
            }
            let meanwhile = traffic.whole(TrafficLoad::with_size(3, BYTES))?;
            outcome.check(all_whole(&meanwhile), || {
                "a connection did not deliver all data while the daemon was down".into()
            });
            all.push(meanwhile);
        }
    }
    let _again = host.start()?;
    pair.wait_warm()?;
    let before = before.ended()?;
    outcome.check(all_reset(&before), || "a tunnelled connection was not reset at the client".into());
    all.push(before);
    all.extend(unaware.map(super::traffic::TrafficBatch::end).transpose()?);
    all.push(carried(&pair, &traffic, &mut outcome)?);
    traffic.end(all, &mut outcome)?;
    note(&pair, &mut outcome)?;
    Ok(outcome)
}

/// Checks that new connections are tunnelled again and deliver all data. The check is repeated, since the tunnel's pool
/// of connections must grow first: application connections that find none free in time stay outside of the tunnel.
fn carried(
    pair: &FaultPair<'_>,
    traffic: &FaultTraffic<'_>,
    outcome: &mut FaultOutcome,
) -> anyhow::Result<super::end::Reports> {
    let start = Instant::now();
    let mut all = super::end::Reports::new();
    loop {
        let before = count(&pair.server, "ended/done")?;
        let after = traffic.whole(TrafficLoad::with_size(3, BYTES))?;
        outcome.check(all_whole(&after), || "a connection did not deliver all data after the restart".into());
        all.extend(after);
        pair.wait("the end of all connections", || Ok(count(&pair.server, "connections")? == 0))?;
        let carried = count(&pair.server, "ended/done")? - before;
        if carried == 3 || start.elapsed() > LIMIT {
            outcome.check(carried == 3, || {
                format!("{carried} of 3 connections were tunnelled after the restart")
            });
            return Ok(all);
        }
    }
}

pub fn note(pair: &FaultPair<'_>, outcome: &mut FaultOutcome) -> anyhow::Result<()> {
    for (name, host) in [("client", &pair.client), ("server", &pair.server)] {
        outcome.counted.insert(name.to_owned(), counted(host)?);
    }
    Ok(())
}

/// Replaces each daemon by another build of the program, which takes over the former daemon's kernel objects.
pub fn upgraded(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [case.kind];
    let pair = FaultPair::new(&case.site, &Setting::from_kinds(&kinds))?;
    let old = product()?;
    let new = another_build(case.site.directory())?;
    let _pins = [HostPins::new(&pair.client)?, HostPins::new(&pair.server)?];
    let start = |host: &GraftHost<'_>, program: &Path| {
        let pins = HostPins::path_on_host(host).join("graft");
        host.start_of(program, &["--persist", "--pins", &pins.to_string_lossy()])
    };
    let far = start(&pair.server, &old)?;
    let near = start(&pair.client, &old)?;
    pair.wait_warm()?;
    let traffic = FaultTraffic::new(&pair)?;
    let mut all = Vec::new();
    let mut running: Vec<BenchProcess> = Vec::new();
    for (host, before) in [(&pair.server, far), (&pair.client, near)] {
        let carried_before = traffic.begin(TrafficLoad::steady(3))?;
        flowing(&pair, 1 << 20)?;
        drop(before);
        running.push(start(host, &new).context("the other build does not start")?);
        pair.wait_warm()?;
        let ended = carried_before.ended()?;
        outcome.check(all_reset(&ended), || "a tunnelled connection was not reset at the client".into());
        all.push(ended);
        all.push(carried(&pair, &traffic, &mut outcome)?);
    }
    outcome.runs = 2;
    traffic.end(all, &mut outcome)?;
    note(&pair, &mut outcome)?;
    drop(running);
    Ok(outcome)
}

/// A BPF file system for one host. Dropping it removes everything that a daemon has pinned there.
struct HostPins(PathBuf);

impl HostPins {
    fn path_on_host(host: &GraftHost<'_>) -> PathBuf {
        host.directory.join("bpf")
    }

    fn new(host: &GraftHost<'_>) -> anyhow::Result<Self> {
        let path = Self::path_on_host(host);
        std::fs::create_dir(&path)?;
        let done = Command::new("mount").args(["-t", "bpf", "bpf"]).arg(&path).output()?;
        ensure!(done.status.success(), "mount: {}", String::from_utf8_lossy(&done.stderr).trim());
        Ok(Self(path))
    }
}

impl Drop for HostPins {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
