//! Daemons that are gone in mid-transfer, and come again.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, ensure};

use super::Case;
use super::outcome::Outcome;
use super::pair::{Pair, Setting, another_build, count, counted, flowing};
use super::traffic::{Load, Traffic, all_reset, all_whole};
use crate::bench::graft::host::{Host, LIMIT};
use crate::bench::process::Process;
use crate::program::product;

/// Whose daemon.
#[derive(Clone, Copy, PartialEq)]
pub enum End {
    Client,
    Server,
}

#[derive(Clone, Copy, PartialEq)]
pub enum By {
    /// SIGKILL, and it is away for a while.
    Kill,
    /// SIGTERM, and it comes again at once.
    Signal,
}

const BYTES: u64 = 300_000;

pub fn gone(case: &Case<'_>, end: End, by: By) -> anyhow::Result<Outcome> {
    let (mut outcome, kinds) = (case.outcome(), [case.kind]);
    let pair = Pair::new(&case.site, &Setting::of(&kinds))?;
    let [near, far] = pair.start()?;
    let traffic = Traffic::new(&pair)?;
    let before = traffic.begin(Load::steady(3))?;
    flowing(&pair, 1 << 20)?;
    let (host, gone, _stays) = match end {
        End::Client => (&pair.client, near, far),
        End::Server => (&pair.server, far, near),
    };
    let mut all = Vec::new();
    let mut unaware = None;
    match by {
        By::Signal => drop(gone),
        By::Kill => {
            gone.kill()?;
            // The other daemon may not know it yet: these are carried, in vain, or go in place.
            unaware = Some(traffic.begin(Load::of(2, BYTES))?);
            if end == End::Server {
                pair.wait("a cold carrier", || Ok(pair.state()? == "cold"))?;
            }
            let meanwhile = traffic.whole(Load::of(3, BYTES))?;
            outcome.check(all_whole(&meanwhile), || "a connection was not whole while it was away".into());
            all.push(meanwhile);
        }
    }
    let _again = host.start()?;
    pair.wait_warm()?;
    let before = before.ended()?;
    outcome.check(all_reset(&before), || "a connection that was carried was not reset at the client".into());
    all.push(before);
    all.extend(unaware.map(super::traffic::Batch::end).transpose()?);
    all.push(carried(&pair, &traffic, &mut outcome)?);
    traffic.end(all, &mut outcome)?;
    note(&pair, &mut outcome)?;
    Ok(outcome)
}

/// New connections are carried again, and whole. A pool has to be as large as they want first: those that it has no room for soon enough go in place.
fn carried(
    pair: &Pair<'_>,
    traffic: &Traffic<'_>,
    outcome: &mut Outcome,
) -> anyhow::Result<super::end::Reports> {
    let (start, mut all) = (Instant::now(), super::end::Reports::new());
    loop {
        let before = count(&pair.server, "ended/done")?;
        let after = traffic.whole(Load::of(3, BYTES))?;
        outcome.check(all_whole(&after), || "a connection was not whole afterwards".into());
        all.extend(after);
        pair.wait("the end", || Ok(count(&pair.server, "connections")? == 0))?;
        let carried = count(&pair.server, "ended/done")? - before;
        if carried == 3 || start.elapsed() > LIMIT {
            outcome.check(carried == 3, || format!("{carried} of 3 connections were carried afterwards"));
            return Ok(all);
        }
    }
}

pub fn note(pair: &Pair<'_>, outcome: &mut Outcome) -> anyhow::Result<()> {
    for (name, host) in [("client", &pair.client), ("server", &pair.server)] {
        outcome.counted.insert(name.to_owned(), counted(host)?);
    }
    Ok(())
}

/// Each daemon by another file of the program, which takes over what the one before has left in the kernel.
pub fn upgraded(case: &Case<'_>) -> anyhow::Result<Outcome> {
    let (mut outcome, kinds) = (case.outcome(), [case.kind]);
    let pair = Pair::new(&case.site, &Setting::of(&kinds))?;
    let (old, new) = (product()?, another_build(case.site.directory())?);
    let _pins = [Pins::new(&pair.client)?, Pins::new(&pair.server)?];
    let start = |host: &Host<'_>, program: &Path| {
        let pins = Pins::of(host).join("graft");
        host.start_of(program, &["--persist", "--pins", &pins.to_string_lossy()])
    };
    let far = start(&pair.server, &old)?;
    let near = start(&pair.client, &old)?;
    pair.wait_warm()?;
    let traffic = Traffic::new(&pair)?;
    let mut all = Vec::new();
    let mut running: Vec<Process> = Vec::new();
    for (host, before) in [(&pair.server, far), (&pair.client, near)] {
        let carried_before = traffic.begin(Load::steady(3))?;
        flowing(&pair, 1 << 20)?;
        drop(before);
        running.push(start(host, &new).context("the other build does not start")?);
        pair.wait_warm()?;
        let ended = carried_before.ended()?;
        outcome
            .check(all_reset(&ended), || "a connection that was carried was not reset at the client".into());
        all.push(ended);
        all.push(carried(&pair, &traffic, &mut outcome)?);
    }
    outcome.runs = 2;
    traffic.end(all, &mut outcome)?;
    note(&pair, &mut outcome)?;
    drop(running);
    Ok(outcome)
}

/// A BPF file system of a host's own: what a daemon has left there goes with it.
struct Pins(PathBuf);

impl Pins {
    fn of(host: &Host<'_>) -> PathBuf {
        host.directory.join("bpf")
    }

    fn new(host: &Host<'_>) -> anyhow::Result<Self> {
        let path = Self::of(host);
        std::fs::create_dir(&path)?;
        let done = Command::new("mount").args(["-t", "bpf", "bpf"]).arg(&path).output()?;
        ensure!(done.status.success(), "mount: {}", String::from_utf8_lossy(&done.stderr).trim());
        Ok(Self(path))
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
