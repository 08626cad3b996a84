//! Parses arguments, and reports all refused values at once. clap alone stops at the first one.

use std::{ffi::OsString, time::Duration};

use clap::{
    Parser,
    error::{ContextKind, ContextValue, ErrorKind},
};
use millrace_daemon::render::in_words;

/// Parses the arguments of a process. Each refused value is recorded and removed, and the rest is parsed again until
/// clap accepts it.
///
/// # Errors
/// Fails if an argument was refused: with clap's own error, or with a list of problems.
pub fn parse<C: Parser>(arguments: impl IntoIterator<Item = OsString>) -> Result<C, RefusedArguments<C>> {
    let mut arguments: Vec<OsString> = arguments.into_iter().collect();
    let mut problems = Vec::new();
    let mut flags = Vec::new();
    loop {
        let error = match C::try_parse_from(&arguments) {
            Ok(command) if problems.is_empty() => return Ok(command),
            Ok(rest) => {
                return Err(RefusedArguments::Problems { problems, flags, rest: Some(Box::new(rest)) });
            }
            Err(error) => error,
        };
        match problem(&error, &arguments) {
            // After this argument is removed, clap reports the next refused one.
            Some((problem, at)) => {
                problems.push(problem);
                let flag = arguments[at.start].to_string_lossy().into_owned();
                flags.extend(
                    flag.strip_prefix("--").and_then(|flag| flag.split('=').next()).map(str::to_owned),
                );
                arguments.drain(at);
            }
            None if problems.is_empty() => return Err(RefusedArguments::ByClap(Box::new(error))),
            // clap's error may be a consequence: a required argument is missing because it was refused above.
            None => return Err(RefusedArguments::Problems { problems, flags, rest: None }),
        }
    }
}

/// The reason why arguments were refused.
#[derive(Debug)]
pub enum RefusedArguments<C> {
    /// An error of clap, or the text that a flag such as `--help` asks for.
    ByClap(Box<clap::Error>),
    Problems {
        /// A description of each refused value.
        problems: Vec<String>,
        /// The names of the flags with refused values, without `--`.
        flags: Vec<String>,
        /// The command parsed from the other arguments, which may have problems that only the command itself finds.
        /// `None` if a required argument is missing.
        rest: Option<Box<C>>,
    },
}

impl<C> RefusedArguments<C> {
    /// Formats the refused values as lines for standard error.
    pub fn describe(problems: &[String]) -> String {
        let lines: String = problems.iter().map(|problem| format!("error: {problem}\n")).collect();
        format!("{lines}\nFor more information, try '--help'.\n")
    }
}

/// Parses a time: a plain number of seconds, or a number with its unit. All flags accept both.
///
/// # Errors
/// Fails if the text is neither.
pub fn time(text: &str) -> Result<Duration, String> {
    const MAX_S: f64 = 365.0 * 86_400.0;
    let plain = text.parse().ok().filter(|seconds| (0.0..=MAX_S).contains(seconds));
    plain.map_or_else(
        || millrace_daemon::duration::parse(text),
        |seconds| Ok(Duration::from_secs_f64(seconds)),
    )
}

/// Returns a description of the refused value in clap's error, and the indices of the arguments to remove. `None` if
/// the error is about something else than a value.
fn problem(error: &clap::Error, arguments: &[OsString]) -> Option<(String, std::ops::Range<usize>)> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let given = text(ContextKind::InvalidArg)?;
    match error.kind() {
        ErrorKind::ValueValidation | ErrorKind::InvalidValue => {
            let value = text(ContextKind::InvalidValue).filter(|value| !value.is_empty())?;
            let at = place(arguments, given.split([' ', '=', '[']).next()?, &value)?;
            // clap's text ends with usage and hints, which are printed once for all problems.
            let rendered = error.to_string();
            let first = rendered.strip_prefix("error: ").unwrap_or(&rendered);
            let end = first
                .find("\n\nFor more information")
                .or_else(|| first.find("\n\nUsage"))
                .unwrap_or(first.len());
            Some((in_words(first[..end].trim_end()), at))
        }
        // clap parses a negative number as an unknown flag.
        ErrorKind::UnknownArgument
            if given.starts_with('-') && given[1..].starts_with(|c: char| c.is_ascii_digit()) =>
        {
            let at = arguments.iter().position(|argument| argument.to_str() == Some(given.as_str()))?;
            let flag = arguments.get(at.checked_sub(1)?)?.to_str().filter(|flag| flag.starts_with("--"))?;
            // Without the negative number, the flag before it would have no value, so both arguments are removed.
            Some((format!("invalid value '{given}' for '{flag}': less than 0"), at - 1..at + 1))
        }
        _ => None,
    }
}

/// Returns the indices of the flag that has this value, or of the positional argument that is this value.
fn place(arguments: &[OsString], flag: &str, value: &str) -> Option<std::ops::Range<usize>> {
    let joined = format!("{flag}={value}");
    let is =
        |at: usize, text: &str| arguments.get(at).and_then(|it| it.to_str()).is_some_and(|it| it == text);
    (0..arguments.len()).find_map(|at| match flag.starts_with('-') {
        true if is(at, &joined) => Some(at..at + 1),
        true if is(at, flag) && is(at + 1, value) => Some(at..at + 2),
        // The refused value may be one element of a list with commas.
        true if is(at, flag) && arguments.get(at + 1)?.to_str()?.split(',').any(|it| it == value) => {
            Some(at..at + 2)
        }
        // A positional argument has a name such as `<URL>` or `[FILE]`.
        false if (flag.starts_with('<') || flag.is_empty()) && at > 0 && is(at, value) => Some(at..at + 1),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Parser)]
    struct TestFlags {
        #[arg(long)]
        rate: Option<f64>,
        #[arg(long)]
        listen: Option<std::net::SocketAddr>,
        #[arg(long, value_parser = ["auto", "user"])]
        engine: Option<String>,
        #[arg(long, value_delimiter = ',')]
        count: Vec<u16>,
        name: Option<String>,
        size: Option<u16>,
    }

    fn problems(arguments: &str) -> Vec<String> {
        let arguments = std::iter::once("x").chain(arguments.split_whitespace()).map(OsString::from);
        match parse::<TestFlags>(arguments) {
            Err(RefusedArguments::Problems { problems, .. }) => problems,
            Err(RefusedArguments::ByClap(error)) => vec![format!("by clap: {:?}", error.kind())],
            Ok(_) => Vec::new(),
        }
    }

    #[test]
    fn times_are_seconds_or_have_a_unit() {
        for (text, millis) in [("2", 2000), ("0.5", 500), ("250ms", 250), ("1.5s", 1500), ("2m", 120_000)] {
            assert_eq!(time(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "-1", "1y", "inf", "NaN", "1e99"] {
            assert!(time(text).is_err(), "{text}");
        }
    }

    /// Every repeatable flag also accepts a list separated by commas, except flags whose values may contain commas,
    /// such as paths.
    #[test]
    fn repeatable_flags_take_commas() {
        /// Placeholders in the help for values that may contain commas. `T` stands for the name of a track.
        const WITH_COMMAS: [&str; 5] = ["FILE", "DIR", "PATH", "SETTINGS", "T"];
        fn look(command: &clap::Command, wrong: &mut Vec<String>) {
            for argument in command.get_arguments() {
                let value =
                    argument.get_value_names().and_then(|names| names.first()).map(|name| name.as_str());
                // A flag such as `--fetch START END`, which takes several values at a time, is not a list.
                let several = matches!(argument.get_action(), clap::ArgAction::Append)
                    && argument.get_num_args().is_none_or(|count| count.min_values() <= 1);
                let is_flag = argument.get_long().is_some();
                let may_have_commas = value.is_some_and(|value| WITH_COMMAS.contains(&value));
                if is_flag && several && may_have_commas == (argument.get_value_delimiter() == Some(',')) {
                    wrong.push(format!("{} --{}", command.get_name(), argument.get_id()));
                }
            }
            command.get_subcommands().for_each(|command| look(command, wrong));
        }
        #[derive(Parser)]
        struct All {
            #[command(subcommand)]
            _command: crate::commands::ProgramCommand,
        }
        let mut wrong = Vec::new();
        look(&<All as clap::CommandFactory>::command(), &mut wrong);
        assert_eq!(wrong, Vec::<String>::new());
    }

    #[test]
    fn several_argument_errors_are_reported_at_once() {
        assert!(problems("--rate 2 --listen 127.0.0.1:1 --engine auto --count 1,2 a").is_empty());
        let all = problems("--rate abc --listen=:4443 a --engine warp --count -4");
        assert_eq!(all.len(), 4, "{all:#?}");
        for part in [
            "'abc' for '--rate <RATE>': not a number",
            "127.0.0.1:4443",
            "possible values: auto, user",
            "'-4' for '--count'",
        ] {
            assert!(all.iter().any(|said| said.contains(part)), "{part} is not in {all:#?}");
        }
        assert_eq!(problems("--count 1,x,3 --rate y").len(), 2);
        let all = problems("a x --rate y");
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all.iter().any(|said| said.contains("'x' for '[SIZE]': not a whole number")), "{all:?}");
        let Err(RefusedArguments::Problems { flags, rest: Some(rest), .. }) =
            parse::<TestFlags>(["x", "--rate=abc", "--count", "-4", "a"].map(OsString::from))
        else {
            panic!("nothing is wrong")
        };
        assert_eq!((flags, rest.name.as_deref()), (vec!["rate".into(), "count".into()], Some("a")));
        assert_eq!(problems("--nothing"), ["by clap: UnknownArgument"]);
        assert_eq!(problems("--help"), ["by clap: DisplayHelp"]);
    }
}
