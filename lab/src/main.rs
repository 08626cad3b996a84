//! `millrace-lab`: see `millrace-lab --help`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use millrace::{
    commands::privilege::Needs,
    program::{self, Program},
};
use millrace_lab::{bench, lab, train};

/// Networks out of namespaces and emulated links, and measurements of Millrace and others in them.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one of it per process")]
enum Command {
    /// Make networks out of namespaces and emulated links
    Lab(lab::Args),
    /// Measure Millrace and other relays
    Bench(bench::Args),
    /// Learn from measured transfers which connection is best sent how
    Train(train::Args),
}

impl Program for Cli {
    const NAME: &'static str = "millrace-lab";

    fn needs(&self) -> Option<Needs> {
        let needs_root = !matches!(self.command, Command::Train(_));
        needs_root.then_some(Needs(&[("", "it needs root: try sudo")]))
    }

    fn problems(self, _: &[String]) -> Vec<String> {
        Vec::new()
    }

    fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Lab(args) => lab::run(args),
            Command::Bench(args) => bench::run(args),
            Command::Train(args) => train::run(&args),
        }
    }
}

fn main() -> ExitCode {
    program::main::<Cli>()
}
