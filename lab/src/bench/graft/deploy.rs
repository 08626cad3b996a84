//! `bench graft deploy`: how long each step takes when grafts are loaded and TCP rules are attached.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use millrace_graft_kernel::{
    CallerRule, CongestionProgram, RuleSide, SHIPPED, Settings, ShippedObject, SocketPrograms, Tcp, TcpRule,
    everybody,
};
use serde_json::{Value, json};

use super::cgroup::HostCgroup;
use super::micros;
use crate::bench::table::{columns, write_json};
use crate::bench::usage::warn_if_busy;
use crate::progress::BenchProgress;
use crate::stats::Percentiles;

#[derive(Debug, clap::Args)]
pub struct DeployArgs {
    /// Number of interleaved rounds, in which each graft is loaded and removed once
    #[arg(long, default_value_t = 200)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A loaded graft or TCP rule, and the durations of each step of loading over all rounds, us.
struct DeployRow {
    what: String,
    bytes: Option<usize>,
    /// Number of instructions that the BPF verifier processed.
    instructions: Option<u64>,
    steps: Vec<(&'static str, Vec<f64>)>,
}

pub fn run(args: DeployArgs) -> anyhow::Result<()> {
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    warn_if_busy()?;
    let cgroup = HostCgroup::new("deploy")?;
    let mut rows: Vec<DeployRow> = Vec::new();
    let progress = BenchProgress::with_steps(args.rounds);
    progress.begin("loading and removal");
    let mut tag = u64::from(std::process::id()) << 32;
    for _ in 0..args.rounds {
        for &ShippedObject { name, image, .. } in SHIPPED {
            CongestionProgram::prepare(image)?;
            let (steps, instructions) = deployed(name, image)?;
            let row = note(&mut rows, &format!("graft {name}"), &steps);
            (row.bytes, row.instructions) = (Some(image.len()), Some(instructions));
        }
        for &ShippedObject { name, image, .. } in SHIPPED {
            // Bytes appended to the ELF data make each file different, so that the runtime takes it for a new graft.
            // The bytes do not change the graft.
            tag += 1;
            let image = [image, &u64::to_ne_bytes(tag)].concat();
            let (steps, instructions) = deployed(name, &image)?;
            let row = note(&mut rows, &format!("graft {name}, a new file"), &steps);
            (row.bytes, row.instructions) = (Some(image.len()), Some(instructions));
        }
        note(&mut rows, "TCP in place, one port", &in_place(&cgroup)?);
        let start = Instant::now();
        SocketPrograms::load()?;
        note(&mut rows, "reading and changing sockets", &[("load", micros(start.elapsed()))]);
        progress.next("loading and removal");
    }
    drop(progress);
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(DeployRow::json).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))
}

/// Loads a graft. Returns the durations of the steps, and the number of instructions that the verifier processed. For a
/// program with subprograms, the verifier's time includes the JIT.
fn deployed(name: &str, image: &[u8]) -> anyhow::Result<([(&'static str, f64); 4], u64)> {
    let timing = CongestionProgram::register(image, &[]).with_context(|| name.to_owned())?.timing();
    let verification = timing.verification.unwrap_or_default();
    let steps = [
        ("read and relocate", micros(timing.open)),
        ("verify", micros(verification.time)),
        ("JIT", micros(timing.load.saturating_sub(verification.time))),
        ("register", micros(timing.attach)),
    ];
    Ok((steps, verification.instructions))
}

/// Measures how long each step takes from the start of a daemon until its TCP rule is in force.
fn in_place(cgroup: &HostCgroup) -> anyhow::Result<[(&'static str, f64); 3]> {
    let rule = TcpRule {
        side: RuleSide::Client,
        peer: everybody(),
        ports: 80..=80,
        caller: CallerRule::default(),
        agree: true,
        bound: false,
        choice: 0,
        graft: [0; 4],
        settings: Settings { congestion: Some("cubic".to_owned()), ..Settings::default() },
    };
    let start = Instant::now();
    let mut tcp = Tcp::load(None)?;
    let loaded = Instant::now();
    tcp.set_rules(&[rule])?;
    let ruled = Instant::now();
    tcp.attach(cgroup.path())?;
    let attach = ruled.elapsed();
    Ok([("load", micros(loaded - start)), ("rules", micros(ruled - loaded)), ("attach", micros(attach))])
}

fn note<'a>(rows: &'a mut Vec<DeployRow>, what: &str, steps: &[(&'static str, f64)]) -> &'a mut DeployRow {
    let row = match rows.iter_mut().position(|row| row.what == what) {
        Some(at) => &mut rows[at],
        None => {
            let steps = steps.iter().map(|(name, _)| (*name, Vec::new())).collect();
            rows.push(DeployRow { what: what.to_owned(), bytes: None, instructions: None, steps });
            let last = rows.len() - 1;
            &mut rows[last]
        }
    };
    row.steps.iter_mut().zip(steps).for_each(|((_, times), (_, us))| times.push(*us));
    row
}

impl DeployRow {
    fn total(&self) -> Vec<f64> {
        let rounds = self.steps.first().map_or(0, |(_, times)| times.len());
        (0..rounds).map(|at| self.steps.iter().filter_map(|(_, times)| times.get(at)).sum()).collect()
    }

    fn json(&self) -> Value {
        let steps = self.steps.iter();
        let steps: serde_json::Map<_, _> = steps
            .map(|(name, times)| ((*name).to_owned(), json!(Percentiles::from_samples(times.clone()))))
            .collect();
        json!({
            "what": self.what, "object_bytes": self.bytes, "verified_instructions": self.instructions,
            "rounds": self.total().len(),
            "total_us": Percentiles::from_samples(self.total()), "steps_us": steps,
        })
    }
}

fn render(rows: &[DeployRow]) -> String {
    let mut lines = vec![["", "p50 ms", "p99 ms", "max ms", "steps, p50 ms"].map(str::to_owned).to_vec()];
    for row in rows {
        let Some(total) = Percentiles::from_samples(row.total()) else { continue };
        let steps = row.steps.iter().filter_map(|(name, times)| {
            Some(format!("{name} {:.2}", Percentiles::from_samples(times.clone())?.p50 / 1e3))
        });
        let mut line = vec![row.what.clone()];
        line.extend([total.p50, total.p99, total.max].map(|us| format!("{:.2}", us / 1e3)));
        line.push(steps.collect::<Vec<_>>().join(", "));
        lines.push(line);
    }
    columns(&lines)
}
