//! `millrace-lab interfaces`: how much of a publisher's media the kernel forwards, by kind of interface, with and
//! without offloads, and with and without the packet gate (XDP).
//!
//! Each row is a lab with publisher, relay and subscriber, in which the relay's interfaces are of one kind. Every
//! object must arrive once and unchanged. The kernel must send 95 % of the bytes, or the relay must refuse the
//! interface with a reason.

mod kind;
mod row;
mod shuttle;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::ValueEnum as _;

pub use kind::InterfaceKind;

use crate::bench::{columns, write_json};
use crate::lab;
use crate::progress::BenchProgress;
use row::{CaseSetup, InterfaceRow};

#[derive(Debug, clap::Args)]
pub struct InterfaceArgs {
    /// Kinds of network interfaces to test [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "KIND,...")]
    kinds: Vec<InterfaceKind>,
    /// Run only one test for each kind of interface, with offloads and without the packet gate (XDP)
    #[arg(long)]
    quick: bool,
    /// Time that each publisher sends, seconds
    #[arg(long, default_value_t = 6)]
    seconds: u32,
    /// Objects of 20,000 bytes that are published per second
    #[arg(long, default_value_t = 30)]
    rate_hz: u32,
    /// Share of the media's bytes that the kernel must send, percent
    #[arg(long, default_value_t = 95, value_name = "PERCENT")]
    least: u32,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const HEAD: [&str; 8] = [
    "interface",
    "offloads",
    "gate",
    "kernel's share",
    "super-packets",
    "objects",
    "intact",
    "what was said",
];

pub fn run(args: InterfaceArgs) -> anyhow::Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "this command needs root: it creates network namespaces, and the relay loads BPF programs"
    );
    ensure!(args.seconds > 0 && args.rate_hz > 0, "--seconds and --rate-hz must be at least 1");
    lab::remove_on_signal()?;
    let setups = args.setups();
    let progress = BenchProgress::with_steps(setups.len());
    let mut rows = Vec::new();
    for setup in setups {
        progress.begin(setup.label());
        let row = row::measure(&setup).with_context(|| setup.label())?;
        progress.end(&row.told())?;
        rows.push(row);
    }
    drop(progress);
    print!("{}", table(&rows));
    if let Some(path) = &args.json {
        write_json(path, &rows.iter().map(InterfaceRow::json).collect::<Vec<_>>())?;
    }
    let least = args.least;
    let failed: Vec<_> =
        rows.iter().filter(|row| !row.is_good(least.into())).map(|row| row.setup.label()).collect();
    ensure!(
        failed.is_empty(),
        "the kernel sent less than {least} %, or media were damaged: {}",
        failed.join("; ")
    );
    ensure!(rows.iter().any(InterfaceRow::is_forwarded), "this kernel supports none of these interfaces");
    Ok(())
}

impl InterfaceArgs {
    fn setups(&self) -> Vec<CaseSetup> {
        let all = InterfaceKind::value_variants();
        let kinds = if self.kinds.is_empty() { all } else { self.kinds.as_slice() };
        let duration = Duration::from_secs(self.seconds.into());
        let both = |is_quick: bool| if is_quick { &[true][..] } else { &[true, false][..] };
        let mut setups = Vec::new();
        for &kind in kinds {
            for &offloads in both(self.quick) {
                for &no_gate in both(self.quick) {
                    setups.push(CaseSetup {
                        kind,
                        offloads,
                        gate: !no_gate,
                        duration,
                        rate_hz: self.rate_hz,
                    });
                }
            }
        }
        setups
    }
}

fn table(rows: &[InterfaceRow]) -> String {
    let mut lines = vec![HEAD.map(str::to_owned).to_vec()];
    lines.extend(rows.iter().map(InterfaceRow::cells));
    columns(&lines)
}
