//! `millrace`: see `millrace --help`.

use std::{
    io::{self, Write as _},
    panic,
    process::{self, ExitCode},
};

use clap::{CommandFactory as _, Parser};
use millrace::commands::{
    self,
    parse::{Refused, parse},
    privilege,
};
use millrace::log;

/// What clap exits with.
const BAD_USAGE: u8 = 2;

/// A Media over QUIC relay that forwards inside the Linux kernel, and its tools.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

fn main() -> ExitCode {
    leave_with_the_reader();
    let command = match parse::<Cli>(std::env::args_os()) {
        Ok(cli) => cli.command,
        Err(Refused::ByClap(error)) => error.exit(),
        Err(Refused::Problems { mut problems, flags, rest }) => {
            problems.extend(rest.into_iter().flat_map(|cli| commands::problems(cli.command, &flags)));
            let _ = io::stderr().write_all(Refused::<Cli>::describe(&problems).as_bytes());
            return ExitCode::from(BAD_USAGE);
        }
    };
    let needs = privilege::needs(&command);
    match commands::run(command, Cli::command()) {
        Err(error) if !reader_left(&error) => {
            // Nobody may be there to hear it.
            let said = log::printable(&privilege::explained(chain(&error), needs));
            let _ = writeln!(io::stderr(), "millrace: {said}");
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
    // A command that was run by this one says so itself.
    said.replace(": millrace: ", ": ")
}

/// `millrace status | head`: whoever read our output has enough of it.
fn reader_left(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// What `println!` and `eprintln!` do where nobody reads any more is to panic: that is the end of the command, and no fault.
fn leave_with_the_reader() {
    let others = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        // Formatted, so never a `&str`.
        let said = info.payload().downcast_ref::<String>().map(String::as_str).unwrap_or_default();
        if said.starts_with("failed printing to std") && said.contains("Broken pipe") {
            process::exit(0);
        }
        others(info);
    }));
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
