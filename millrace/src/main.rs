//! `millrace`: see `millrace --help`.

use std::{io, process::ExitCode};

use clap::Parser;
use millrace::commands;

/// A Media over QUIC relay that forwards inside the Linux kernel, and its tools.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

fn main() -> ExitCode {
    match commands::run(Cli::parse().command) {
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
