//! `millrace`: see `millrace --help`.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser};
use millrace::{
    commands::{
        self, Command,
        privilege::{self, Needs},
    },
    program::{self, Program},
};

/// A Media over QUIC relay that forwards inside the Linux kernel, and its tools.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

impl Program for Cli {
    const NAME: &'static str = "millrace";

    fn needs(&self) -> Option<Needs> {
        privilege::needs(&self.command)
    }

    fn problems(self, flags: &[String]) -> Vec<String> {
        commands::problems(self.command, flags)
    }

    fn run(self) -> anyhow::Result<()> {
        commands::run(self.command, Cli::command())
    }
}

fn main() -> ExitCode {
    program::main::<Cli>()
}
