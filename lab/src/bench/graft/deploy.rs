//! `bench graft deploy`.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use millrace_graft_kernel::{Caller, Control, Rule, SHIPPED, Settings, Side, Sockets, Tcp, everybody};
use serde_json::{Value, json};

use super::cgroup::Cgroup;
use super::micros;
use crate::bench::table::{columns, write_json};
use crate::bench::usage::warn_if_busy;
use crate::progress::Progress;
use crate::stats::Percentiles;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Times that each is loaded and taken back, interleaved
    #[arg(long, default_value_t = 200)]
    rounds: usize,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// One thing that is loaded, and the times of its steps, us.
struct Row {
    what: String,
    bytes: Option<usize>,
    /// That the verifier walks over.
    instructions: Option<u64>,
    steps: Vec<(&'static str, Vec<f64>)>,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(args.rounds > 0, "--rounds is at least 1");
    warn_if_busy()?;
    let cgroup = Cgroup::new("deploy")?;
    let mut rows: Vec<Row> = Vec::new();
    let progress = Progress::of(args.rounds);
    progress.begin("loading and taking back");
    let mut tag = u64::from(std::process::id()) << 32;
    for _ in 0..args.rounds {
        for (name, image) in SHIPPED {
            Control::prepare(image)?;
            let (steps, instructions) = deployed(name, image)?;
            let row = note(&mut rows, &format!("graft {name}"), &steps);
            (row.bytes, row.instructions) = (Some(image.len()), Some(instructions));
        }
        for (name, image) in SHIPPED {
            // What stands behind the end makes it another file, of the same graft.
            tag += 1;
            let image = [image, &u64::to_ne_bytes(tag)].concat();
            let (steps, instructions) = deployed(name, &image)?;
            let row = note(&mut rows, &format!("graft {name}, a new file"), &steps);
            (row.bytes, row.instructions) = (Some(image.len()), Some(instructions));
        }
        note(&mut rows, "TCP in place, one port", &in_place(&cgroup)?);
        let start = Instant::now();
        Sockets::load()?;
        note(&mut rows, "reading and changing sockets", &[("load", micros(start.elapsed()))]);
        progress.next("loading and taking back");
    }
    drop(progress);
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(Row::json).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))
}

/// And the instructions that the verifier has walked over. Of a program with functions of its own the JIT is a part of the
/// verifier's time.
fn deployed(name: &str, image: &[u8]) -> anyhow::Result<([(&'static str, f64); 4], u64)> {
    let timing = Control::register(image, &[]).with_context(|| name.to_owned())?.timing();
    let verification = timing.verification.unwrap_or_default();
    let steps = [
        ("read and relocate", micros(timing.open)),
        ("verify", micros(verification.time)),
        ("JIT", micros(timing.load.saturating_sub(verification.time))),
        ("register", micros(timing.attach)),
    ];
    Ok((steps, verification.instructions))
}

/// What a daemon does before a rule holds.
fn in_place(cgroup: &Cgroup) -> anyhow::Result<[(&'static str, f64); 3]> {
    let rule = Rule {
        side: Side::Client,
        peer: everybody(),
        ports: 80..=80,
        caller: Caller::default(),
        agree: true,
        bound: false,
        choice: 0,
        graft: [0; 4],
        settings: Settings { congestion: Some("cubic".to_owned()), ..Settings::default() },
    };
    let start = Instant::now();
    let mut tcp = Tcp::load()?;
    let loaded = Instant::now();
    tcp.set_rules(&[rule])?;
    let ruled = Instant::now();
    tcp.attach(cgroup.path())?;
    let attach = ruled.elapsed();
    Ok([("load", micros(loaded - start)), ("rules", micros(ruled - loaded)), ("attach", micros(attach))])
}

fn note<'a>(rows: &'a mut Vec<Row>, what: &str, steps: &[(&'static str, f64)]) -> &'a mut Row {
    let row = match rows.iter_mut().position(|row| row.what == what) {
        Some(at) => &mut rows[at],
        None => {
            let steps = steps.iter().map(|(name, _)| (*name, Vec::new())).collect();
            rows.push(Row { what: what.to_owned(), bytes: None, instructions: None, steps });
            let last = rows.len() - 1;
            &mut rows[last]
        }
    };
    row.steps.iter_mut().zip(steps).for_each(|((_, times), (_, us))| times.push(*us));
    row
}

impl Row {
    fn total(&self) -> Vec<f64> {
        let rounds = self.steps.first().map_or(0, |(_, times)| times.len());
        (0..rounds).map(|at| self.steps.iter().filter_map(|(_, times)| times.get(at)).sum()).collect()
    }

    fn json(&self) -> Value {
        let steps = self.steps.iter();
        let steps: serde_json::Map<_, _> =
            steps.map(|(name, times)| ((*name).to_owned(), json!(Percentiles::of(times.clone())))).collect();
        json!({
            "what": self.what, "object_bytes": self.bytes, "verified_instructions": self.instructions,
            "rounds": self.total().len(),
            "total_us": Percentiles::of(self.total()), "steps_us": steps,
        })
    }
}

fn render(rows: &[Row]) -> String {
    let mut lines = vec![["", "p50 ms", "p99 ms", "max ms", "steps, p50 ms"].map(str::to_owned).to_vec()];
    for row in rows {
        let Some(total) = Percentiles::of(row.total()) else { continue };
        let steps = row.steps.iter().filter_map(|(name, times)| {
            Some(format!("{name} {:.2}", Percentiles::of(times.clone())?.p50 / 1e3))
        });
        let mut line = vec![row.what.clone()];
        line.extend([total.p50, total.p99, total.max].map(|us| format!("{:.2}", us / 1e3)));
        line.push(steps.collect::<Vec<_>>().join(", "));
        lines.push(line);
    }
    columns(&lines)
}
