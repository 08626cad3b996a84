//! `millrace gate`.

mod trace;

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

use clap::{Subcommand, ValueEnum};
use millrace_daemon::{
    expect_answer,
    render::{self, print},
};
use millrace_gate::{Mode, Prefix, policy};
use millrace_gate_daemon::{
    control::{self, Answer, DEFAULT_SOCKET, Prefixes, Request},
    daemon::{Setup, Source},
    serve, text,
};

use super::{daemon, parse, screen};

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
    #[command(flatten)]
    guard: Guard,
}

#[derive(Debug, clap::Args)]
#[command(
    mut_arg("socket", |arg| arg.default_value(DEFAULT_SOCKET)),
    mut_arg("http", |arg| arg.default_value("127.0.0.1:9185")),
    mut_arg("log_level", |arg| arg.help(
        "A level (error, warn, info, debug, trace) or directives (info,millrace::gate::sample=off)"
    ))
)]
struct Guard {
    /// Interfaces that clients come in by, repeatable
    #[arg(long, value_delimiter = ',', required_unless_present = "check", value_name = "IF")]
    interface: Vec<String>,
    /// UDP ports to guard, by what needs no numbers
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = clap::value_parser!(u16).range(1..),
        required_unless_present = "policy",
        conflicts_with = "policy"
    )]
    port: Vec<u16>,
    /// With --port: connections that one client may have
    #[arg(long, value_name = "N", conflicts_with = "policy")]
    connections: Option<u32>,
    /// TOML file with scopes and rules
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Count what would be refused, and refuse nothing
    #[arg(long)]
    dry_run: bool,
    /// Check the policy and exit
    #[arg(long)]
    check: bool,
    /// How to attach: in the driver (native), in the stack (generic), or whichever works (auto)
    #[arg(long, value_enum, default_value_t = AttachMode::Auto)]
    mode: AttachMode,
    #[command(flatten)]
    daemon: daemon::Flags,
}

#[derive(Debug, clap::Args)]
struct SocketArg {
    /// Socket of the running gate
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum AttachMode {
    Auto,
    Native,
    Generic,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Show what a running gate has counted
    Status {
        #[command(flatten)]
        socket: SocketArg,
        #[arg(long)]
        json: bool,
    },
    /// Show rates, and who is refused, every second, until q
    Top {
        #[command(flatten)]
        socket: SocketArg,
    },
    /// Follow packets that are refused, or that rules in mode `monitor` would refuse
    Trace(trace::Args),
    /// Block prefixes now, for a time, or until `unblock` or the gate's end
    Block(List),
    /// Allow prefixes now, for a time, or until `unblock` or the gate's end
    Allow(List),
    /// Take back what `block` or `allow` did: what the policy says counts again
    Unblock(Unlist),
    /// Print the policy in force
    Policy {
        #[command(flatten)]
        socket: SocketArg,
    },
    /// Have the policy file read again
    Reload {
        #[command(flatten)]
        socket: SocketArg,
    },
}

#[derive(Debug, clap::Args)]
struct List {
    #[command(flatten)]
    list: Unlist,
    /// Take it back after this time, such as 90s, 10m, 2h, 7d
    #[arg(long = "for", value_name = "TIME", value_parser = seconds)]
    seconds: Option<u64>,
    /// The same as `unblock`
    #[arg(long, conflicts_with = "seconds")]
    remove: bool,
}

#[derive(Debug, clap::Args)]
struct Unlist {
    /// 192.0.2.0/24, 2001:db8::1; "-" reads a list, one prefix per line
    #[arg(required = true)]
    prefix: Vec<String>,
    /// In this scope only
    #[arg(long)]
    scope: Option<String>,
    #[command(flatten)]
    socket: SocketArg,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    match args.verb {
        None => guard(args.guard),
        Some(Verb::Status { socket, json }) => status(&socket.socket, json),
        Some(Verb::Top { socket }) => watch(&socket.socket),
        Some(Verb::Trace(args)) => trace::run(args),
        Some(Verb::Block(args)) => list(args, Request::Block, "blocked"),
        Some(Verb::Allow(args)) => list(args, Request::Allow, "allowed"),
        Some(Verb::Unblock(args)) => change(&args, None, Request::Unlist, TAKEN_BACK),
        Some(Verb::Policy { socket }) => {
            print(&expect_answer!(control::ask(&socket.socket, &Request::Policy)?, Answer::Policy)?)
        }
        Some(Verb::Reload { socket }) => {
            control::ask(&socket.socket, &Request::Reload)?;
            print("the policy was read again\n")
        }
    }
}

fn guard(args: Guard) -> anyhow::Result<()> {
    let source = match args.policy {
        Some(path) => Source::File(path),
        None => Source::Text(policy_of_flags(&args.port, args.connections)),
    };
    if args.check {
        let (policy, _) = source.read()?;
        let warnings: String = policy.warnings().iter().map(|it| format!("warning: {it}\n")).collect();
        return print(&format!("{warnings}the policy is usable\n"));
    }
    let setup = Setup {
        source,
        dry_run: args.dry_run,
        interfaces: args.interface,
        mode: match args.mode {
            AttachMode::Auto => Mode::Auto,
            AttachMode::Native => Mode::Native,
            AttachMode::Generic => Mode::Generic,
        },
    };
    args.daemon.run(serve::run(&setup, args.daemon.front()))
}

/// What the flags say, as a policy file says it.
fn policy_of_flags(ports: &[u16], connections: Option<u32>) -> String {
    let mut text = format!("[[scope]]\nname = \"default\"\nport = {ports:?}\n");
    if let Some(connections) = connections {
        let _ = writeln!(text, "rules.quota = {{ connections = {connections} }}");
    }
    text
}

fn status(socket: &Path, json: bool) -> anyhow::Result<()> {
    let status = expect_answer!(control::ask(socket, &Request::Status)?, Answer::Status)?;
    print(&if json {
        serde_json::to_string_pretty(&status)? + "\n"
    } else {
        text::status(&status, render::width())
    })
}

fn watch(socket: &Path) -> anyhow::Result<()> {
    let mut before = None;
    screen::every_second(|room| {
        let status = *expect_answer!(control::ask(socket, &Request::Status)?, Answer::Status)?;
        let text = text::top(&status, before.as_ref().unwrap_or(&status), room.columns, room.rows);
        before = Some(status);
        Ok(text)
    })
}

const TAKEN_BACK: &str = "neither blocked nor allowed any more";

fn list(args: List, entry: fn(control::List) -> Request, done: &str) -> anyhow::Result<()> {
    match args {
        List { list, remove: true, .. } => change(&list, None, Request::Unlist, TAKEN_BACK),
        List { list, seconds, .. } => change(&list, seconds, entry, done),
    }
}

/// What was done, in one line.
fn told(prefixes: &[Prefix], args: &Unlist, seconds: Option<u64>, done: &str) -> String {
    let what = match prefixes {
        [one] => one.to_string(),
        many => format!("{} prefixes", many.len()),
    };
    let scope = args.scope.as_ref().map_or(String::new(), |scope| format!(" in scope {scope}"));
    let time = seconds.map_or(String::new(), |seconds| format!(" for {}", render::span(seconds as f64)));
    format!("{what}: {done}{scope}{time}\n")
}

fn change(
    args: &Unlist,
    seconds: Option<u64>,
    request: fn(control::List) -> Request,
    done: &str,
) -> anyhow::Result<()> {
    let prefixes = prefixes(&args.prefix)?;
    let mut exceptions = Vec::new();
    for some in prefixes.chunks(PREFIXES_AT_ONCE) {
        let prefix = Prefixes::Many(some.iter().map(ToString::to_string).collect());
        let list = control::List { prefix, scope: args.scope.clone(), seconds };
        if let Some(Answer::Exceptions(some)) = control::ask(&args.socket.socket, &request(list))? {
            exceptions.extend(some);
        }
    }
    for it in exceptions.iter().take(EXCEPTIONS_SHOWN) {
        let list = it.scope.as_ref().map_or("for all".to_owned(), |scope| format!("of scope {scope}"));
        eprintln!("note: not for {}: the list {list} says {}, which goes before", it.prefix, it.entry);
    }
    if exceptions.len() > EXCEPTIONS_SHOWN {
        eprintln!("note: and not for {} others", exceptions.len() - EXCEPTIONS_SHOWN);
    }
    print(&told(&prefixes, args, seconds, done))
}

/// In one request, whose line has room for more.
const PREFIXES_AT_ONCE: usize = 1000;
const EXCEPTIONS_SHOWN: usize = 5;

/// All are prefixes before any is listed.
fn prefixes(args: &[String]) -> anyhow::Result<Vec<Prefix>> {
    let mut all = Vec::new();
    for arg in args {
        if arg == "-" {
            let text = std::io::read_to_string(std::io::stdin())?;
            all.extend(policy::prefix_list(&text, "standard input").map_err(anyhow::Error::msg)?);
        } else {
            all.push(arg.parse()?);
        }
    }
    Ok(all)
}

fn seconds(text: &str) -> Result<u64, String> {
    const YEAR: u64 = 365 * 86_400;
    let time = parse::time(text)?;
    let whole =
        Some(time.as_secs()).filter(|seconds| time.subsec_nanos() == 0 && (1..=YEAR).contains(seconds));
    whole.ok_or_else(|| "is whole seconds, from 1s to 365d".to_owned())
}
