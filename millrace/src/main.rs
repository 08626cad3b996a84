//! The program `millrace`: the relay, the gate, the cost observer, the grafts, the RTP fan-out and their tools as
//! subcommands.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser};
use millrace::{
    commands::{
        self, ProgramCommand,
        privilege::{self, CommandNeeds},
    },
    program::{self, Program},
};

/// A Media over QUIC relay that forwards inside the Linux kernel, and its tools.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct MillraceCli {
    #[command(subcommand)]
    command: ProgramCommand,
}

impl Program for MillraceCli {
    const NAME: &'static str = "millrace";

    fn needs(&self) -> Option<CommandNeeds> {
        privilege::needs(&self.command)
    }

    fn problems(self, flags: &[String]) -> Vec<String> {
        commands::problems(self.command, flags)
    }

    fn run(self) -> anyhow::Result<()> {
        commands::run(self.command, MillraceCli::command())
    }
}

fn main() -> ExitCode {
    program::main::<MillraceCli>()
}
