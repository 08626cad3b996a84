//! `millrace graft`: runs the graft daemon, and sends requests to a running one.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use clap::Subcommand;
use millrace_daemon::{
    daemon::PartProcess,
    expect_answer,
    render::{print, width},
};
use millrace_graft::{GraftPool, PoolGraft};
use millrace_graft_daemon::{
    agreements, broker,
    confine::{BpfUse, confine},
    control::{self, AGREEMENTS, DEFAULT_SOCKET, GRAFTS, GraftAnswer, GraftRequest, PEERS, SESSIONS, TUNNEL},
    daemon::GraftSetup,
    packets, peers,
    probe::ProbeTarget,
    serve, supervisor, text, tunnel,
    usable::usable,
};
use millrace_graft_kernel::{PinDirectory, gateway};
use millrace_graft_tls as tls;
use millrace_graft_tunnel::watchdog;
use millrace_messages::DEFAULT_SOCKET as DEFAULT_MESSAGES_SOCKET;

use super::{daemon, hook, parse, screen, sessions, why};

#[derive(Debug, clap::Args)]
pub struct GraftCommandArgs {
    #[command(subcommand)]
    verb: GraftVerb,
}

#[derive(Debug, Subcommand)]
enum GraftVerb {
    /// Run the graft daemon: load grafts into the kernel, and let TCP connections and sessions of datagrams use them as
    /// a settings file says
    Run(GraftRunArgs),
    /// Run the graft daemon as a gateway, which also tunnels connections of the hosts behind its interfaces
    Gateway(GraftGatewayArgs),
    /// Remove the rules and routes of a gateway that was killed. Started by the daemon
    #[command(hide = true)]
    GatewayKeep { run: u16, interfaces: Vec<String> },
    /// Run one of the daemon's child processes, such as the one for TCP. Started by the daemon
    #[command(hide = true)]
    Part(GraftPartArgs),
    /// Keep copies of the sockets that the daemon has passed to applications, and shut them down when the daemon is
    /// gone. Started by the daemon
    #[command(hide = true)]
    SessionsKeep,
    /// Check a graft: its manifest, the hash that identifies it, and whether this kernel accepts it
    Check(GraftCheckArgs),
    /// List the grafts that are built into millrace, and those in the given directories
    List(PoolArgs),
    /// Write built-in grafts (object and manifest) into a directory, where they can be changed
    Export(GraftExportArgs),
    /// Make the running daemon load one more graft
    Load(GraftLoadArgs),
    /// Make the running daemon unload a graft; connections that use it keep it until they close
    Unload {
        /// Name of the graft
        graft: String,
        #[command(flatten)]
        socket: GraftSocketArg,
    },
    /// Remove the grafts and rules that a daemon with --persist has left in the kernel; open connections keep their
    /// grafts
    Clean {
        #[command(flatten)]
        pins: PinsArg,
    },
    /// Move live TCP connections from one graft to another
    Swap(Swap),
    /// Show the running daemon's child processes, grafts, rules and sessions, and counts of what happened to
    /// connections
    Status {
        #[command(flatten)]
        socket: GraftSocketArg,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Explain which congestion control or tunnel connections with a peer use, or what the learned model would choose
    /// under given conditions
    Why(why::WhyArgs),
    /// Show round-trip times, rates and losses that TCP has measured on the paths to its peers
    Monitor {
        #[command(flatten)]
        socket: GraftSocketArg,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
        /// Show the measurements again every second
        #[arg(long, conflicts_with = "json")]
        watch: bool,
    },
    /// Measure the path to a peer with probe packets at regular intervals
    Probe(GraftProbeArgs),
    /// Show the identity by which peers know this host: the SHA-256 of its public key
    Key(GraftKeyArgs),
    /// Run a command, and tunnel its TCP connections to peers with which the daemon has an established tunnel
    Hook(hook::HookArgs),
    /// Show and change sessions of datagrams, to which grafts apply functions such as repair or pacing
    Sessions(sessions::SessionsCommandArgs),
    /// A former command, which ran a separate daemon for sessions; prints the command that replaces it
    #[command(hide = true)]
    Packets {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Make the running daemon read its settings again
    Reload {
        #[command(flatten)]
        socket: GraftSocketArg,
    },
}

#[derive(Debug, clap::Args)]
#[command(
    mut_arg("socket", |arg| arg.default_value(DEFAULT_SOCKET)),
    mut_arg("http", |arg| arg.default_value("127.0.0.1:9186"))
)]
struct GraftRunArgs {
    /// TOML file with the daemon's grafts, rules and sessions
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Check the settings and exit
    #[arg(long)]
    check: bool,
    /// Leave grafts and rules in the kernel when the daemon ends; the next daemon takes them over
    #[arg(long)]
    persist: bool,
    #[command(flatten)]
    pins: PinsArg,
    /// Unix socket where applications ask for sessions with the peers that the settings name; all users may connect,
    /// and the settings say who gets a session
    #[arg(long, value_name = "PATH", default_value = DEFAULT_MESSAGES_SOCKET)]
    messages_socket: PathBuf,
    #[command(flatten)]
    daemon: daemon::DaemonFlags,
}

#[derive(Debug, clap::Args)]
struct GraftPartArgs {
    #[command(flatten)]
    gateway: GraftGatewayArgs,
    name: String,
}

#[derive(Debug, clap::Args)]
struct GraftGatewayArgs {
    /// Network interface that leads to the hosts behind this gateway, in addition to those of [gateway] in the
    /// settings, repeatable
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    interface: Vec<String>,
    #[command(flatten)]
    run: GraftRunArgs,
}

#[derive(Debug, clap::Args)]
struct GraftSocketArg {
    /// Socket of the running daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
}

#[derive(Debug, clap::Args)]
struct PinsArg {
    /// Directory in a BPF file system for grafts and rules that outlive the daemon [default: /sys/fs/bpf/millrace-graft
    /// with the default --socket, otherwise none]
    #[arg(long, value_name = "DIR")]
    pins: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct PoolArgs {
    /// Directory with grafts, in addition to the built-in ones, repeatable
    #[arg(long, value_name = "DIR")]
    pool: Vec<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct GraftCheckArgs {
    /// Graft to check: a name, a manifest (.toml), or an object file (.o) that has no manifest yet
    #[arg(required = true)]
    graft: Vec<String>,
    #[command(flatten)]
    pool: PoolArgs,
    #[command(flatten)]
    values: Values,
}

#[derive(Debug, clap::Args)]
struct GraftExportArgs {
    /// Directory to write to, created if it does not exist
    directory: PathBuf,
    /// Grafts to write; all of them by default
    graft: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct GraftProbeArgs {
    /// Address of the peer
    peer: IpAddr,
    /// Send UDP probes to this port instead of ICMP: to an echo service, or to a port where nobody listens
    #[arg(long, value_name = "PORT")]
    udp: Option<u16>,
    /// Time between two probes; use a second or more if nobody listens on the port, since hosts limit the rate of ICMP
    /// errors
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = parse::time)]
    period: Duration,
    /// Time for which probes are sent
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse::time)]
    duration: Duration,
    #[command(flatten)]
    socket: GraftSocketArg,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct GraftKeyArgs {
    /// File with the private key of this host, PEM
    file: PathBuf,
    /// Create the key file (ECDSA P-256), readable only by its owner
    #[arg(long)]
    new: bool,
}

#[derive(Debug, clap::Args)]
struct GraftLoadArgs {
    /// Name of a graft that is built in or in the daemon's directories of grafts
    graft: String,
    #[command(flatten)]
    values: Values,
    #[command(flatten)]
    socket: GraftSocketArg,
}

#[derive(Debug, clap::Args)]
struct Swap {
    /// Graft that connections use now
    from: String,
    /// Graft that connections move to; if it is the same as FROM, the files of the graft are loaded again first
    to: String,
    #[command(flatten)]
    values: Values,
    #[command(flatten)]
    socket: GraftSocketArg,
}

#[derive(Debug, clap::Args)]
struct Values {
    /// Value of a parameter of the graft, repeatable
    #[arg(long = "set", value_delimiter = ',', value_name = "NAME=NUMBER", value_parser = value)]
    set: Vec<(String, u64)>,
}

impl Values {
    fn all(self) -> BTreeMap<String, u64> {
        self.set.into_iter().collect()
    }
}

fn value(text: &str) -> Result<(String, u64), String> {
    let (name, value) = text.split_once('=').ok_or("must be NAME=NUMBER")?;
    let value = value.parse().map_err(|error| format!("{value:?}: {error}"))?;
    Ok((name.to_owned(), value))
}

pub fn run(args: GraftCommandArgs) -> anyhow::Result<()> {
    match args.verb {
        GraftVerb::Run(args) => run_daemon(args, Vec::new()),
        GraftVerb::Gateway(args) => run_daemon(args.run, args.interface),
        GraftVerb::GatewayKeep { run, interfaces } => watchdog::run(run, &interfaces),
        GraftVerb::Part(args) => run_part(args),
        GraftVerb::SessionsKeep => broker::watchdog::run(),
        GraftVerb::Check(args) => check(args),
        GraftVerb::List(args) => print(&text::pool(&GraftPool::read(&args.pool, &[])?, width())),
        GraftVerb::Export(args) => export(&args),
        GraftVerb::Load(GraftLoadArgs { graft, values, socket }) => load(&socket.socket, graft, values.all()),
        GraftVerb::Unload { graft, socket } => {
            control::ask(&socket.socket, &GraftRequest::Unload { graft: graft.clone() })?;
            print(&format!("{graft}: unloaded\n"))
        }
        GraftVerb::Clean { pins } => clean(&pins.pins.unwrap_or_else(|| PinDirectory::DEFAULT.into())),
        GraftVerb::Swap(args) => swap(args),
        GraftVerb::Status { socket, json } => {
            let status =
                expect_answer!(control::ask(&socket.socket, &GraftRequest::Status)?, GraftAnswer::Status)?;
            print(&if json { serde_json::to_string_pretty(&status)? + "\n" } else { whole_status(&status) })
        }
        GraftVerb::Why(args) => why::run(&args),
        GraftVerb::Probe(args) => probe(&args),
        GraftVerb::Key(GraftKeyArgs { file, new }) => {
            let identity = if new { tls::make_key(&file)? } else { tls::fingerprint(&file)? };
            print(&format!("{identity}\n"))
        }
        GraftVerb::Monitor { socket, json, watch } => monitor(&socket.socket, json, watch),
        GraftVerb::Hook(args) => hook::run(args),
        GraftVerb::Sessions(args) => sessions::run(args),
        GraftVerb::Packets { arguments } => bail!("{}", replacement(&arguments)),
        GraftVerb::Reload { socket } => {
            control::ask(&socket.socket, &GraftRequest::Reload)?;
            print("the settings were read again\n")
        }
    }
}

fn run_daemon(args: GraftRunArgs, interfaces: Vec<String>) -> anyhow::Result<()> {
    if args.check {
        return check_settings(&args.config, &interfaces);
    }
    pins(&args)?;
    // Each process that runs a part of the daemon gets the daemon's own flags: all arguments after `millrace graft run`
    // or `millrace graft gateway`.
    let arguments = ["graft", "part"].map(OsString::from).into_iter().chain(std::env::args_os().skip(3));
    let arguments = arguments.collect();
    let front = args.daemon.front();
    let setup = supervisor::SupervisorSetup { config: args.config, interfaces, arguments, front };
    args.daemon.run(supervisor::run(setup))
}

fn run_part(args: GraftPartArgs) -> anyhow::Result<()> {
    let GraftPartArgs { gateway: GraftGatewayArgs { interface: interfaces, run }, name } = args;
    let pins = pins(&run)?;
    let GraftRunArgs { config, persist, messages_socket, daemon, .. } = run;
    let part = PartProcess::take()?;
    match name.as_str() {
        GRAFTS => {
            let setup = GraftSetup { config, interfaces, persist, pins };
            daemon.run(part.clone().run(|frame| serve::run(setup, part, frame)))
        }
        // Three parts drop capabilities before any other thread is started, since each thread has its own.
        AGREEMENTS => {
            part.expect(confine(agreements::KEPT, BpfUse::None));
            let setup = agreements::AgreementPartSetup { config, interfaces };
            daemon.run(part.run(|frame| agreements::run(setup, frame)))
        }
        TUNNEL => {
            let setup = tunnel::TunnelSetup { config, interfaces };
            let confined = part.expect(tunnel::ConfinedTunnel::load(setup, part.take_kept()));
            daemon.run(part.run(|frame| confined.run(frame)))
        }
        SESSIONS => {
            let setup = packets::PacketSetup { config, messages: messages_socket };
            daemon.run(part.run(|frame| packets::run(setup, frame)))
        }
        PEERS => {
            part.expect(confine(peers::KEPT, BpfUse::None));
            daemon.run(part.run(|frame| peers::run(config, frame)))
        }
        _ => bail!("the daemon has no part named {name}"),
    }
}

/// Returns the directory where grafts and rules are pinned. The default one belongs to the daemon with the default
/// control socket, so other daemons have none unless `--pins` names one.
fn pins(args: &GraftRunArgs) -> anyhow::Result<Option<PathBuf>> {
    let usual = (args.daemon.socket() == Path::new(DEFAULT_SOCKET)).then(|| PinDirectory::DEFAULT.into());
    let pins = args.pins.pins.clone().or(usual);
    if args.persist && pins.is_none() {
        bail!(
            "--persist with another --socket needs --pins, so that daemons do not take over each other's grafts"
        );
    }
    Ok(pins)
}

fn check_settings(config: &Path, interfaces: &[String]) -> anyhow::Result<()> {
    let settings = usable(config, interfaces)?;
    let in_place = &settings.in_place;
    let pool = GraftPool::read(&in_place.pool, &in_place.trusted_keys)?;
    let mut needed = in_place.needed();
    needed.retain(|name, _| !in_place.fetches(name));
    needed.keys().try_for_each(|name| pool.find(name).map(drop))?;
    let Some(sessions) = settings.sessions else { return print("the settings are usable\n") };
    let room = sessions.room;
    let memory = sessions::memory(sessions.memory()?);
    print(&format!(
        "the settings are usable: {memory} in the kernel for {} sessions; {} of them may keep packets\n",
        room.sessions, room.storing_sessions
    ))
}

/// Returns the error for a former command, which ran or asked a separate daemon for sessions. The error names the
/// command that replaces it.
fn replacement(arguments: &[OsString]) -> String {
    let now = match arguments.first().and_then(|verb| verb.to_str()) {
        Some("status") => "millrace graft sessions status",
        Some("swap") => "millrace graft sessions swap SESSION GRAFT",
        Some("reload") => "millrace graft reload",
        _ => {
            "millrace graft run --config FILE. Put its settings of sessions into the file of all grafts: `interface`, \
             `mode`, `pool`, `memory-mib` and `max-sessions` (formerly `sessions`) under `[sessions]`, `[parameters.NAME]` as \
             `[sessions.parameters.NAME]`, and all keys of `[[peer]]` but `name`, `key` and `host` under `[peer.sessions]`"
        }
    };
    format!("one daemon does what `millrace graft packets` did: use {now}")
}

/// Formats the status of the daemon and of all its child processes.
fn whole_status(status: &control::Status) -> String {
    let mut out = text::status(status, width());
    if let Some(sessions) = &status.sessions {
        out += &sessions::text(sessions, width());
    }
    out
}

fn clean(directory: &Path) -> anyhow::Result<()> {
    let mut names = PinDirectory::at(directory).clean();
    match gateway::remove_leftovers(None).context("rules and routes of a gateway")? {
        0 => {}
        count => names.push(format!("{count} rules and routes of a gateway")),
    }
    match names.as_slice() {
        [] => print("nothing to remove\n"),
        names => print(&format!("removed: {}\n", names.join(", "))),
    }
}

fn check(args: GraftCheckArgs) -> anyhow::Result<()> {
    let values = args.values.all();
    for name in &args.graft {
        let path = Path::new(name);
        let failed = |error: String| anyhow::anyhow!("{name}: {error}");
        let graft = match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => PoolGraft::read(path, &[]).map_err(failed)?,
            Some("o") => PoolGraft::without_manifest(path).map_err(failed)?,
            _ => GraftPool::read(&args.pool.pool, &[])?.find(name)?.clone(),
        };
        // The verifier runs only for root, since loading a graft needs privileges. For other users, only the graft's
        // files are checked.
        let asked =
            nix::unistd::geteuid().is_root().then(|| millrace_graft::check(&graft, &values)).transpose()?;
        let ms = asked.map(|timing| (timing.open + timing.load).as_secs_f64() * 1e3);
        print(&text::checked(&graft, ms))?;
    }
    Ok(())
}

fn export(args: &GraftExportArgs) -> anyhow::Result<()> {
    std::fs::create_dir_all(&args.directory)?;
    let pool = GraftPool::read(&[], &[])?;
    // All names are checked before the first file is written, so that a typo leaves no partial export.
    args.graft.iter().try_for_each(|name| pool.find(name).map(drop))?;
    let mut names = Vec::new();
    for graft in pool.iter().filter(|it| args.graft.is_empty() || args.graft.contains(&it.manifest.name)) {
        graft.export(&args.directory)?;
        names.push(graft.manifest.name.as_str());
    }
    print(&format!("{}: exported to {}\n", names.join(", "), args.directory.display()))
}

fn load(socket: &Path, graft: String, parameters: BTreeMap<String, u64>) -> anyhow::Result<()> {
    let loaded = expect_answer!(
        control::ask(socket, &GraftRequest::Load { graft, parameters })?,
        GraftAnswer::Loaded
    )?;
    let ms = |us: u64| us as f64 / 1e3;
    let open = ms(loaded.open_us);
    let load = ms(loaded.load_us);
    let attach = ms(loaded.attach_us);
    print(&format!("loaded: read in {open:.1} ms, verified in {load:.1} ms, registered in {attach:.1} ms\n"))
}

fn swap(args: Swap) -> anyhow::Result<()> {
    let request = GraftRequest::Swap { from: args.from, to: args.to, parameters: args.values.all() };
    let done = expect_answer!(control::ask(&args.socket.socket, &request)?, GraftAnswer::Swapped)?;
    let connections = done.connections;
    let ms = done.walk_us as f64 / 1e3;
    print(&format!("{connections} live connections changed in {ms:.1} ms, {} refused\n", done.refused))
}

/// Asks the daemon to send probes, waits until it has finished, and prints the result.
fn probe(args: &GraftProbeArgs) -> anyhow::Result<()> {
    let target = ProbeTarget { peer: args.peer, udp_port: args.udp };
    let socket = &args.socket.socket;
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let period_ms = ms(args.period);
    let duration_ms = ms(args.duration);
    let request =
        GraftRequest::Probe { peer: target.peer, udp_port: target.udp_port, period_ms, duration_ms };
    control::ask(socket, &request)?;
    let done = loop {
        let probed = expect_answer!(control::ask(socket, &GraftRequest::Probes)?, GraftAnswer::Probed)?;
        let found = probed.into_iter().find(|it| it.target == target);
        let found = found.context("the daemon no longer lists this probe: start it again")?;
        if !found.runs {
            break found;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let text =
        if args.json { serde_json::to_string_pretty(&done)? + "\n" } else { text::probed(&done, width()) };
    print(&text)?;
    done.error.map_or(Ok(()), |error| bail!("{error}"))
}

fn monitor(socket: &Path, json: bool, watch: bool) -> anyhow::Result<()> {
    let ask = |width| {
        let paths = expect_answer!(control::ask(socket, &GraftRequest::Monitor)?, GraftAnswer::Paths)?;
        Ok(if json { serde_json::to_string_pretty(&paths)? + "\n" } else { text::paths(&paths, width) })
    };
    if watch { screen::every_second(|room| ask(room.columns)) } else { print(&ask(width())?) }
}
