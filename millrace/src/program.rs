//! The entry point that the project's programs share. It parses arguments and reports all faults in them at once,
//! prints errors with their causes, and exits quietly when the reader of its output has closed the pipe.

use std::{
    io::{self, Write as _},
    panic,
    process::{self, ExitCode},
};

use clap::Parser;
use millrace_daemon::log;

use crate::causes::chain;
use crate::commands::{
    parse::{RefusedArguments, parse},
    privilege::{self, CommandNeeds},
};

/// Exit code for wrong arguments, the same as clap's.
const BAD_USAGE: u8 = 2;

/// A program: its parsed arguments, and the command that they select.
pub trait Program: Parser {
    /// The program's name, which is printed in front of errors.
    const NAME: &'static str;

    /// Returns the privileges that the command needs, such as root or Linux capabilities. An error caused by a missing
    /// privilege names them.
    fn needs(&self) -> Option<CommandNeeds>;

    /// Returns the faults that the command itself finds in its flags. Flags whose values clap could not parse are
    /// missing in the command, and `flags` names them.
    fn problems(self, flags: &[String]) -> Vec<String>;

    /// Runs the command.
    ///
    /// # Errors
    /// Fails if the command fails.
    fn run(self) -> anyhow::Result<()>;
}

/// Runs a program with the arguments of this process.
pub fn main<P: Program>() -> ExitCode {
    // The panic hook for a closed pipe is installed first, since clap also prints help to a pipe that may be closed.
    leave_with_the_reader();
    let program = match parse::<P>(std::env::args_os()) {
        Ok(program) => program,
        Err(RefusedArguments::ByClap(error)) => error.exit(),
        Err(RefusedArguments::Problems { mut problems, flags, rest }) => {
            problems.extend(rest.into_iter().flat_map(|program| program.problems(&flags)));
            let _ = io::stderr().write_all(RefusedArguments::<P>::describe(&problems).as_bytes());
            return ExitCode::from(BAD_USAGE);
        }
    };
    let needs = program.needs();
    match program.run() {
        Err(error) if !reader_left(&error) => {
            // `eprintln!` would panic if standard error is closed. The exit code still reports the failure.
            let said = log::printable(&privilege::explained(chain(&error), needs));
            let _ = writeln!(io::stderr(), "{}: {said}", P::NAME);
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Reports whether the error is a broken pipe: the reader of the output has exited, as in `millrace status | head`.
fn reader_left(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Makes `println!` and `eprintln!` exit with code 0 when the reader of their output has closed the pipe. By default
/// they panic.
fn leave_with_the_reader() {
    let others = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        // The panic's message is formatted, so the payload is a `String` and never a `&str`.
        let said = info.payload().downcast_ref::<String>().map(String::as_str).unwrap_or_default();
        if said.starts_with("failed printing to std") && said.contains("Broken pipe") {
            process::exit(0);
        }
        others(info);
    }));
}
