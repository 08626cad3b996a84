//! `millrace gate`: runs the packet gate (XDP), and sends requests to a running one, such as for its counters or to
//! block addresses.

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
use millrace_gate::{Prefix, XdpMode, policy};
use millrace_gate_daemon::{
    control::{self, DEFAULT_SOCKET, GateReply, GateRequest, Prefixes},
    daemon::{GateSetup, PolicySource},
    serve, text,
};

use super::{daemon, parse, screen};

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct GateCommandArgs {
    #[command(subcommand)]
    verb: Option<GateVerb>,
    #[command(flatten)]
    guard: GateGuardArgs,
}

#[derive(Debug, clap::Args)]
#[command(
    mut_arg("socket", |arg| arg.default_value(DEFAULT_SOCKET)),
    mut_arg("http", |arg| arg.default_value("127.0.0.1:9185")),
    mut_arg("log_level", |arg| arg.help(
        "Log level (error, warn, info, debug, trace) or directives (info,millrace::gate::sample=off)"
    ))
)]
struct GateGuardArgs {
    /// Network interface that clients' packets arrive on, repeatable
    #[arg(long, value_delimiter = ',', required_unless_present = "check", value_name = "IF")]
    interface: Vec<String>,
    /// UDP port of a QUIC server to guard, with the rules that work without configured limits, repeatable
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = clap::value_parser!(u16).range(1..),
        required_unless_present = "policy",
        conflicts_with = "policy"
    )]
    port: Vec<u16>,
    /// Limit of connections from one client to the ports given with --port
    #[arg(long, value_name = "N", conflicts_with = "policy")]
    connections: Option<u32>,
    /// TOML file with the gate's policy: scopes (groups of guarded UDP ports) and the rules of each
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Count packets that the rules would refuse, but refuse none
    #[arg(long)]
    dry_run: bool,
    /// Check the policy and exit
    #[arg(long)]
    check: bool,
    /// XDP mode in which the gate attaches to the interface: in the driver (native), in the network stack (generic), or
    /// whichever of the two works (auto)
    #[arg(long, value_enum, default_value_t = AttachMode::Auto)]
    mode: AttachMode,
    #[command(flatten)]
    daemon: daemon::DaemonFlags,
}

#[derive(Debug, clap::Args)]
struct GateSocketArg {
    /// Control socket of the running gate
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
enum GateVerb {
    /// Show the counters of a running gate
    Status {
        #[command(flatten)]
        socket: GateSocketArg,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the gate's rates and refused clients every second, until q is pressed
    Top {
        #[command(flatten)]
        socket: GateSocketArg,
    },
    /// Trace packets that the gate refuses, or that its rules in mode `monitor` would refuse
    Trace(trace::GateTraceArgs),
    /// Block address prefixes immediately, until `gate unblock`, the time of --for, or the gate's end
    Block(GateListArgs),
    /// Allow address prefixes immediately, until `gate unblock`, the time of --for, or the gate's end
    Allow(GateListArgs),
    /// Remove prefixes that `gate block` or `gate allow` added to the gate's lists; the lists in the policy apply again
    Unblock(Unlist),
    /// Print the gate's policy that is in force
    Policy {
        #[command(flatten)]
        socket: GateSocketArg,
    },
    /// Make the running gate read its policy file again
    Reload {
        #[command(flatten)]
        socket: GateSocketArg,
    },
}

#[derive(Debug, clap::Args)]
struct GateListArgs {
    #[command(flatten)]
    list: Unlist,
    /// Remove the prefixes from the list after this time: 90s, 10m, 2h, 7d
    #[arg(long = "for", value_name = "TIME", value_parser = seconds)]
    seconds: Option<u64>,
    /// Remove the prefixes that this command added earlier, instead of adding them; the same as `gate unblock`
    #[arg(long, conflicts_with = "seconds")]
    remove: bool,
}

#[derive(Debug, clap::Args)]
struct Unlist {
    /// Address prefix: 192.0.2.0/24, 2001:db8::1; "-" reads a list from standard input, one prefix per line
    #[arg(required = true)]
    prefix: Vec<String>,
    /// Scope (group of guarded ports) whose list changes; without it, the lists of all scopes
    #[arg(long)]
    scope: Option<String>,
    #[command(flatten)]
    socket: GateSocketArg,
}

pub fn run(args: GateCommandArgs) -> anyhow::Result<()> {
    match args.verb {
        None => guard(args.guard),
        Some(GateVerb::Status { socket, json }) => status(&socket.socket, json),
        Some(GateVerb::Top { socket }) => watch(&socket.socket),
        Some(GateVerb::Trace(args)) => trace::run(args),
        Some(GateVerb::Block(args)) => list(args, GateRequest::Block, "blocked"),
        Some(GateVerb::Allow(args)) => list(args, GateRequest::Allow, "allowed"),
        Some(GateVerb::Unblock(args)) => change(&args, None, GateRequest::Unlist, TAKEN_BACK),
        Some(GateVerb::Policy { socket }) => {
            print(&expect_answer!(control::ask(&socket.socket, &GateRequest::Policy)?, GateReply::Policy)?)
        }
        Some(GateVerb::Reload { socket }) => {
            control::ask(&socket.socket, &GateRequest::Reload)?;
            print("the policy was read again\n")
        }
    }
}

fn guard(args: GateGuardArgs) -> anyhow::Result<()> {
    let source = match args.policy {
        Some(path) => PolicySource::File(path),
        None => PolicySource::Text(policy_of_flags(&args.port, args.connections)),
    };
    if args.check {
        let (policy, _) = source.read()?;
        let warnings: String = policy.warnings().iter().map(|it| format!("warning: {it}\n")).collect();
        return print(&format!("{warnings}the policy is usable\n"));
    }
    let setup = GateSetup {
        source,
        dry_run: args.dry_run,
        interfaces: args.interface,
        mode: match args.mode {
            AttachMode::Auto => XdpMode::Auto,
            AttachMode::Native => XdpMode::Native,
            AttachMode::Generic => XdpMode::Generic,
        },
    };
    args.daemon.run(serve::run(&setup, args.daemon.front()))
}

/// Returns the text of a policy file with one scope (group of guarded ports): the ports and the limit of connections
/// per client that the command line gives.
fn policy_of_flags(ports: &[u16], connections: Option<u32>) -> String {
    let mut text = format!("[[scope]]\nname = \"default\"\nport = {ports:?}\n");
    if let Some(connections) = connections {
        let _ = writeln!(text, "rules.quota = {{ connections = {connections} }}");
    }
    text
}

fn status(socket: &Path, json: bool) -> anyhow::Result<()> {
    let status = expect_answer!(control::ask(socket, &GateRequest::Status)?, GateReply::Status)?;
    print(&if json {
        serde_json::to_string_pretty(&status)? + "\n"
    } else {
        text::status(&status, render::width())
    })
}

fn watch(socket: &Path) -> anyhow::Result<()> {
    let mut before = None;
    screen::every_second(|room| {
        let status = *expect_answer!(control::ask(socket, &GateRequest::Status)?, GateReply::Status)?;
        let text = text::top(&status, before.as_ref().unwrap_or(&status), room.columns, room.rows);
        before = Some(status);
        Ok(text)
    })
}

/// Text with which [`describe_change`] reports that address prefixes were removed from the block and allow lists.
const TAKEN_BACK: &str = "removed from the lists";

fn list(args: GateListArgs, entry: fn(control::PrefixList) -> GateRequest, done: &str) -> anyhow::Result<()> {
    match args {
        GateListArgs { list, remove: true, .. } => change(&list, None, GateRequest::Unlist, TAKEN_BACK),
        GateListArgs { list, seconds, .. } => change(&list, seconds, entry, done),
    }
}

/// Returns a line that says what was done with which prefixes, in which scope and for how long.
fn describe_change(prefixes: &[Prefix], args: &Unlist, seconds: Option<u64>, done: &str) -> String {
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
    request: fn(control::PrefixList) -> GateRequest,
    done: &str,
) -> anyhow::Result<()> {
    let prefixes = prefixes(&args.prefix)?;
    let mut exceptions = Vec::new();
    for some in prefixes.chunks(PREFIXES_AT_ONCE) {
        let prefix = Prefixes::Many(some.iter().map(ToString::to_string).collect());
        let list = control::PrefixList { prefix, scope: args.scope.clone(), seconds };
        if let Some(GateReply::Exceptions(some)) = control::ask(&args.socket.socket, &request(list))? {
            exceptions.extend(some);
        }
    }
    for it in exceptions.iter().take(EXCEPTIONS_SHOWN) {
        let list = it.scope.as_ref().map_or("for all".to_owned(), |scope| format!("of scope {scope}"));
        eprintln!("note: {} is unaffected: the list {list} overrides it with {}", it.prefix, it.entry);
    }
    if exceptions.len() > EXCEPTIONS_SHOWN {
        eprintln!("note: {} more entries of the lists override it", exceptions.len() - EXCEPTIONS_SHOWN);
    }
    print(&describe_change(&prefixes, args, seconds, done))
}

/// Largest number of prefixes in one request, which keeps the request's line within the control socket's limit.
const PREFIXES_AT_ONCE: usize = 1000;
/// A block or allow request can be overridden by other entries of the policy's lists. The message to the user names at
/// most this many of these entries, and only counts the rest.
const EXCEPTIONS_SHOWN: usize = 5;

/// Parses all prefixes, also those on standard input. If one of them is not a prefix, none is sent, so the gate's lists
/// stay unchanged.
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
    whole.ok_or_else(|| "must be whole seconds, from 1s to 365d".to_owned())
}
