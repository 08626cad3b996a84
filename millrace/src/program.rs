//! What each program of the project does around its commands: it reads arguments and says everything that is wrong with them, reports errors
//! with their causes, and ends quietly when whoever reads its output has left.

use std::{
    io::{self, Write as _},
    panic,
    process::{self, ExitCode},
};

use clap::Parser;
use millrace_daemon::log;

use crate::commands::{
    parse::{Refused, parse},
    privilege::{self, Needs},
};

/// What clap exits with.
const BAD_USAGE: u8 = 2;

/// A program: its arguments, and what becomes of them.
pub trait Program: Parser {
    /// The name in front of errors.
    const NAME: &'static str;

    /// Returns the rights that the command wants, for errors of whoever lacks them.
    fn needs(&self) -> Option<Needs>;

    /// Returns what else the command has against its flags, of which those called `flags` were of no use.
    fn problems(self, flags: &[String]) -> Vec<String>;

    /// Runs the command.
    ///
    /// # Errors
    /// It has failed.
    fn run(self) -> anyhow::Result<()>;
}

/// Runs a program with the arguments of this process.
pub fn main<P: Program>() -> ExitCode {
    leave_with_the_reader();
    let program = match parse::<P>(std::env::args_os()) {
        Ok(program) => program,
        Err(Refused::ByClap(error)) => error.exit(),
        Err(Refused::Problems { mut problems, flags, rest }) => {
            problems.extend(rest.into_iter().flat_map(|program| program.problems(&flags)));
            let _ = io::stderr().write_all(Refused::<P>::describe(&problems).as_bytes());
            return ExitCode::from(BAD_USAGE);
        }
    };
    let needs = program.needs();
    match program.run() {
        Err(error) if !reader_left(&error) => {
            // Nobody may be there to hear it.
            let said = log::printable(&privilege::explained(chain(&error), needs));
            let _ = writeln!(io::stderr(), "{}: {said}", P::NAME);
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
