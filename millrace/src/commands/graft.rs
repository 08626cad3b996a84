//! `millrace graft`.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use clap::Subcommand;
use millrace_daemon::{
    expect_answer,
    render::{print, width},
};
use millrace_graft::{Graft, Pool};
use millrace_graft_daemon::{
    carry::keeper,
    control::{self, Answer, DEFAULT_SOCKET, Request},
    daemon::{Setup, usable},
    probe::Target,
    serve, text, tls,
};
use millrace_graft_kernel::{Pins, gateway};

use super::{daemon, hook, packets, parse, screen, why};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Hold grafts in the kernel and have connections use them, as a settings file says
    Run(Run),
    /// As `run`, with interfaces behind which are hosts whose connections are carried
    Gateway(Gateway),
    /// Takes back what a gateway that was killed has left
    #[command(hide = true)]
    GatewayKeep { run: u16, interfaces: Vec<String> },
    /// Check a graft: manifest, identity, and whether this kernel takes it
    Check(Check),
    /// Show the grafts that there are
    List(PoolArgs),
    /// Write grafts that are compiled in into a directory, to be changed
    Export(Export),
    /// Load one more graft into a running daemon
    Load(Load),
    /// Take a graft back; connections that use it keep it until they close
    Unload {
        graft: String,
        #[command(flatten)]
        socket: SocketArg,
    },
    /// Take back what a daemon with --persist has left; connections keep what they have
    Clean {
        #[command(flatten)]
        pins: PinsArg,
    },
    /// Have live connections go from one graft to another
    Swap(Swap),
    /// Show grafts, rules and what became of connections
    Status {
        #[command(flatten)]
        socket: SocketArg,
        #[arg(long)]
        json: bool,
    },
    /// Say why connections with a peer are as they are, or what a model would choose if
    Why(why::Args),
    /// Show what TCP has measured of the paths to its peers
    Monitor {
        #[command(flatten)]
        socket: SocketArg,
        #[arg(long)]
        json: bool,
        /// Again every second
        #[arg(long, conflicts_with = "json")]
        watch: bool,
    },
    /// Send packets to a peer at even times, and show what their answers say of the path
    Probe(Probe),
    /// Show what peers know this host by: the SHA-256 of its public key
    Key(Key),
    /// Run a command whose TCP connections are carried, where a carrier is warm
    Hook(hook::Args),
    /// Functions on datagrams, as lists that are changed while they pass
    Packets(packets::Args),
    /// Have the settings read again
    Reload {
        #[command(flatten)]
        socket: SocketArg,
    },
}

#[derive(Debug, clap::Args)]
#[command(
    mut_arg("socket", |arg| arg.default_value(DEFAULT_SOCKET)),
    mut_arg("http", |arg| arg.default_value("127.0.0.1:9186"))
)]
struct Run {
    /// TOML file with grafts and rules
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Check the settings and exit
    #[arg(long)]
    check: bool,
    /// Leave grafts and rules in the kernel when it ends; the next one takes them over
    #[arg(long)]
    persist: bool,
    #[command(flatten)]
    pins: PinsArg,
    #[command(flatten)]
    daemon: daemon::Flags,
}

#[derive(Debug, clap::Args)]
struct Gateway {
    /// By which hosts behind this one are reached, besides those of [gateway] in the settings, repeatable
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    interface: Vec<String>,
    #[command(flatten)]
    run: Run,
}

#[derive(Debug, clap::Args)]
struct SocketArg {
    /// Socket of the running daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
}

#[derive(Debug, clap::Args)]
struct PinsArg {
    /// Where they are left, in a BPF file system; /sys/fs/bpf/millrace-graft for the daemon with the usual --socket
    #[arg(long, value_name = "DIR")]
    pins: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct PoolArgs {
    /// Directories with grafts, besides those that are compiled in, repeatable
    #[arg(long, value_name = "DIR")]
    pool: Vec<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct Check {
    /// A name, a manifest (.toml), or an object file (.o) that has none yet
    #[arg(required = true)]
    graft: Vec<String>,
    #[command(flatten)]
    pool: PoolArgs,
    #[command(flatten)]
    values: Values,
}

#[derive(Debug, clap::Args)]
struct Export {
    directory: PathBuf,
    /// Only these
    graft: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct Probe {
    peer: IpAddr,
    /// By UDP to this port instead of ICMP: somebody echoes there, or nobody listens
    #[arg(long, value_name = "PORT")]
    udp: Option<u16>,
    /// Time between two packets; a second or more where nobody listens, since hosts answer that rarely
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = parse::time)]
    period: Duration,
    /// For so long
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse::time)]
    duration: Duration,
    #[command(flatten)]
    socket: SocketArg,
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct Key {
    /// Private key, PEM
    file: PathBuf,
    /// Make one (ECDSA P-256); only its owner may read it
    #[arg(long)]
    new: bool,
}

#[derive(Debug, clap::Args)]
struct Load {
    graft: String,
    #[command(flatten)]
    values: Values,
    #[command(flatten)]
    socket: SocketArg,
}

#[derive(Debug, clap::Args)]
struct Swap {
    from: String,
    /// The same: loads it anew, from its files as they are now
    to: String,
    #[command(flatten)]
    values: Values,
    #[command(flatten)]
    socket: SocketArg,
}

#[derive(Debug, clap::Args)]
struct Values {
    /// Values of parameters, repeatable
    #[arg(long = "set", value_delimiter = ',', value_name = "NAME=NUMBER", value_parser = value)]
    set: Vec<(String, u64)>,
}

impl Values {
    fn all(self) -> BTreeMap<String, u64> {
        self.set.into_iter().collect()
    }
}

fn value(text: &str) -> Result<(String, u64), String> {
    let (name, value) = text.split_once('=').ok_or("is NAME=NUMBER")?;
    let value = value.parse().map_err(|error| format!("{value:?}: {error}"))?;
    Ok((name.to_owned(), value))
}

pub fn run(args: Args) -> anyhow::Result<()> {
    match args.verb {
        Verb::Run(args) => run_daemon(args, Vec::new()),
        Verb::Gateway(args) => run_daemon(args.run, args.interface),
        Verb::GatewayKeep { run, interfaces } => keeper::run(run, &interfaces),
        Verb::Check(args) => check(args),
        Verb::List(args) => print(&text::pool(&Pool::read(&args.pool, &[])?, width())),
        Verb::Export(args) => export(&args),
        Verb::Load(Load { graft, values, socket }) => load(&socket.socket, graft, values.all()),
        Verb::Unload { graft, socket } => {
            control::ask(&socket.socket, &Request::Unload { graft: graft.clone() })?;
            print(&format!("{graft}: unloaded\n"))
        }
        Verb::Clean { pins } => clean(&pins.pins.unwrap_or_else(|| Pins::DEFAULT.into())),
        Verb::Swap(args) => swap(args),
        Verb::Status { socket, json } => {
            let status = expect_answer!(control::ask(&socket.socket, &Request::Status)?, Answer::Status)?;
            print(&if json {
                serde_json::to_string_pretty(&status)? + "\n"
            } else {
                text::status(&status, width())
            })
        }
        Verb::Why(args) => why::run(&args),
        Verb::Probe(args) => probe(&args),
        Verb::Key(Key { file, new }) => {
            let identity = if new { tls::make_key(&file)? } else { tls::fingerprint(&file)? };
            print(&format!("{identity}\n"))
        }
        Verb::Monitor { socket, json, watch } => monitor(&socket.socket, json, watch),
        Verb::Hook(args) => hook::run(args),
        Verb::Packets(args) => packets::run(args),
        Verb::Reload { socket } => {
            control::ask(&socket.socket, &Request::Reload)?;
            print("the settings were read again\n")
        }
    }
}

fn run_daemon(args: Run, interfaces: Vec<String>) -> anyhow::Result<()> {
    if args.check {
        let settings = usable(&args.config, &interfaces)?;
        let pool = Pool::read(&settings.pool, &settings.trusted_keys)?;
        let mut needed = settings.needed();
        needed.retain(|name, _| !settings.fetches(name));
        needed.keys().try_for_each(|name| pool.find(name).map(drop))?;
        return print("the settings are usable\n");
    }
    let usual = (args.daemon.socket() == Path::new(DEFAULT_SOCKET)).then(|| Pins::DEFAULT.into());
    let pins = args.pins.pins.or(usual);
    if args.persist && pins.is_none() {
        bail!("with another --socket, --persist wants --pins: daemons must not take over each other's");
    }
    let setup = Setup { config: args.config, interfaces, persist: args.persist, pins };
    args.daemon.run(serve::run(setup, args.daemon.front()))
}

fn clean(directory: &Path) -> anyhow::Result<()> {
    let mut names = Pins::at(directory).clean();
    match gateway::remove_leftovers(None).context("rules and routes of a gateway")? {
        0 => {}
        count => names.push(format!("{count} rules and routes of a gateway")),
    }
    match names.as_slice() {
        [] => print("nothing was left there\n"),
        names => print(&format!("taken back: {}\n", names.join(", "))),
    }
}

fn check(args: Check) -> anyhow::Result<()> {
    let values = args.values.all();
    for name in &args.graft {
        let path = Path::new(name);
        let failed = |error: String| anyhow::anyhow!("{name}: {error}");
        let graft = match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => Graft::read(path, &[]).map_err(failed)?,
            Some("o") => Graft::without_manifest(path).map_err(failed)?,
            _ => Pool::read(&args.pool.pool, &[])?.find(name)?.clone(),
        };
        let asked =
            nix::unistd::geteuid().is_root().then(|| millrace_graft::check(&graft, &values)).transpose()?;
        let ms = asked.map(|timing| (timing.open + timing.load).as_secs_f64() * 1e3);
        print(&text::checked(&graft, ms))?;
    }
    Ok(())
}

fn export(args: &Export) -> anyhow::Result<()> {
    std::fs::create_dir_all(&args.directory)?;
    let pool = Pool::read(&[], &[])?;
    // All are known before any is written.
    args.graft.iter().try_for_each(|name| pool.find(name).map(drop))?;
    let mut names = Vec::new();
    for graft in pool.iter().filter(|it| args.graft.is_empty() || args.graft.contains(&it.manifest.name)) {
        graft.export(&args.directory)?;
        names.push(graft.manifest.name.as_str());
    }
    print(&format!("{}: exported to {}\n", names.join(", "), args.directory.display()))
}

fn load(socket: &Path, graft: String, parameters: BTreeMap<String, u64>) -> anyhow::Result<()> {
    let loaded = expect_answer!(control::ask(socket, &Request::Load { graft, parameters })?, Answer::Loaded)?;
    let ms = |us: u64| us as f64 / 1e3;
    let (open, load, attach) = (ms(loaded.open_us), ms(loaded.load_us), ms(loaded.attach_us));
    print(&format!("loaded: read in {open:.1} ms, verified in {load:.1} ms, registered in {attach:.1} ms\n"))
}

fn swap(args: Swap) -> anyhow::Result<()> {
    let request = Request::Swap { from: args.from, to: args.to, parameters: args.values.all() };
    let done = expect_answer!(control::ask(&args.socket.socket, &request)?, Answer::Swapped)?;
    let (connections, ms) = (done.connections, done.walk_us as f64 / 1e3);
    print(&format!("{connections} live connections changed in {ms:.1} ms, {} refused\n", done.refused))
}

/// The daemon does it; this waits.
fn probe(args: &Probe) -> anyhow::Result<()> {
    let (target, socket) = (Target { peer: args.peer, udp_port: args.udp }, &args.socket.socket);
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let (period_ms, duration_ms) = (ms(args.period), ms(args.duration));
    let request = Request::Probe { peer: target.peer, udp_port: target.udp_port, period_ms, duration_ms };
    control::ask(socket, &request)?;
    let done = loop {
        let probed = expect_answer!(control::ask(socket, &Request::Probes)?, Answer::Probed)?;
        let found = probed.into_iter().find(|it| it.target == target);
        let found = found.context("the daemon has forgotten it")?;
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
        let paths = expect_answer!(control::ask(socket, &Request::Monitor)?, Answer::Paths)?;
        Ok(if json { serde_json::to_string_pretty(&paths)? + "\n" } else { text::paths(&paths, width) })
    };
    if watch { screen::every_second(|room| ask(room.columns)) } else { print(&ask(width())?) }
}
