//! `millrace`: see `millrace --help`.

use std::{io, process::ExitCode};

use clap::{Parser, Subcommand};
use millrace::{cost, gate, relay, status, trace};
use millrace_client as client;
use millrace_lab::{bench, lab};

/// A Media over QUIC relay that forwards inside the Linux kernel, and its tools.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one of it per process")]
enum Command {
    /// Relay Media over QUIC between publishers and subscribers
    Relay(relay::cli::Args),
    /// Publish fragmented MP4 or generated objects
    Publish(client::publish::Args),
    /// Subscribe to a track; write its media or print running figures
    Subscribe(client::subscribe::Args),
    /// Show the state of a running relay
    Status(status::Args),
    /// Show what happens to single packets in a running relay
    Trace(trace::Args),
    /// Show what the kernel's networking costs: which share of each CPU, which part of the stack, for whom
    Cost(cost::Args),
    /// Guard QUIC servers of this machine at XDP
    Gate(gate::cli::Args),
    /// Make networks out of namespaces and emulated links
    Lab(lab::Args),
    /// Measure Millrace and other relays
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Relay(args) => relay::cli::run(args),
        Command::Publish(args) => client::publish::run(args),
        Command::Subscribe(args) => client::subscribe::run(args),
        Command::Status(args) => status::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Cost(args) => cost::run(args),
        Command::Gate(args) => gate::cli::run(args),
        Command::Lab(args) => lab::run(args),
        Command::Bench(args) => bench::run(args, cost::loopback_dashboard),
    };
    match done {
        Err(error) if !reader_left(&error) => {
            eprintln!("millrace: {}", chain(&error));
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

/// An error and its causes, each said once: libraries' errors are whole without their causes, which logs do not show.
fn chain(error: &anyhow::Error) -> String {
    let mut said = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !said.contains(&cause) {
            said.push_str(": ");
            said.push_str(&cause);
        }
    }
    said
}

/// `millrace status | head`: whoever read our output has enough of it.
fn reader_left(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{path}: {source}")]
    struct Whole {
        path: &'static str,
        source: io::Error,
    }

    #[test]
    fn causes_are_said_once() {
        let whole = Whole { path: "/file", source: io::Error::other("full") };
        assert_eq!(chain(&anyhow::Error::from(whole).context("cannot log")), "cannot log: /file: full");
        assert_eq!(chain(&anyhow::Error::from(io::Error::other("full")).context("/file")), "/file: full");
    }
}
