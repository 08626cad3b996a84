//! `millrace-lab`: see `millrace-lab --help`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use millrace::{
    commands::privilege::CommandNeeds,
    program::{self, Program},
};
use millrace_lab::{bench, interfaces, lab, lookups, mesh, train};

/// Networks of namespaces and emulated links, and measurements of Millrace and other programs in them.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct LabCli {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one of it per process")]
enum LabCommand {
    /// Make networks of namespaces and emulated links
    Lab(lab::LabArgs),
    /// Measure Millrace and other relays
    Bench(bench::BenchArgs),
    /// Show how much of a publisher's media the kernel forwards, by kind of interface, with and without offloads and
    /// the packet gate (XDP)
    Interfaces(interfaces::InterfaceArgs),
    /// Simulate a cluster of relays: how long routes take to settle, how many relays media pass, and how long a relay's
    /// failure interrupts media
    Mesh(mesh::MeshArgs),
    /// Train the choice of a connection's congestion control or tunnel from measured transfers
    Train(train::TrainArgs),
}

impl Program for LabCli {
    const NAME: &'static str = "millrace-lab";

    fn needs(&self) -> Option<CommandNeeds> {
        let needs_root = !matches!(self.command, LabCommand::Train(_) | LabCommand::Mesh(_));
        needs_root.then_some(CommandNeeds(&[("", "it needs root: try sudo")]))
    }

    fn problems(self, _: &[String]) -> Vec<String> {
        Vec::new()
    }

    fn run(self) -> anyhow::Result<()> {
        match self.command {
            LabCommand::Lab(args) => lab::run(args),
            LabCommand::Bench(args) => bench::run(args),
            LabCommand::Interfaces(args) => interfaces::run(args),
            LabCommand::Mesh(args) => match args.routing {
                mesh::MeshRouting::Mesh => mesh::run(&args),
                mesh::MeshRouting::Lookup => lookups::run(&args),
            },
            LabCommand::Train(args) => train::run(&args),
        }
    }
}

fn main() -> ExitCode {
    program::main::<LabCli>()
}
