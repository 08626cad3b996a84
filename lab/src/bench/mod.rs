//! `millrace-lab bench`: measurements as commands.

mod adapt;
mod at_once;
mod compare;
mod contender;
mod cost;
mod engine;
mod fairness;
mod fanout;
mod figures;
mod gate;
mod graft;
mod hostile;
mod isolation;
mod matrix;
mod max_rate;
mod moves;
mod newcomers;
mod owed;
mod plot;
mod process;
mod profile;
mod relay;
mod replay;
mod restarts;
mod run;
mod site;
mod table;
mod thesis;
mod traffic;
mod udp;
mod usage;
mod viewer;
mod watch;
mod wire;

use anyhow::ensure;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Compare relays: latency, CPU, system calls, memory
    Relay(relay::Args),
    /// RTP to many receivers: in the kernel, by a process, and beside MoQ with encryption
    Fanout(fanout::Args),
    /// Share of a bottleneck that a relay's flow gets beside TCP CUBIC
    Fairness(fairness::Args),
    /// With and without the fast path: delay of the same video, system calls by name, CPU over time
    Thesis(thesis::Args),
    /// What a viewer sees while a link loses most of its room and gets it back
    Adapt(adapt::Args),
    /// What a viewer sees in a browser, which plays from the relay's own page
    Watch(watch::Args),
    /// Which publishers and players meet at the relay, and whether what is played is what was published
    Matrix(matrix::Args),
    /// What one subscriber's bad link costs another one
    Isolation(isolation::Args),
    /// What a bystander's media suffer from a hostile client, and what it costs the relay
    Hostile(hostile::Args),
    /// How soon the kernel serves viewers again whose addresses have changed
    Moves(moves::Args),
    /// How long viewers are without media when a publisher or the relay is killed and comes back
    Restarts(restarts::Args),
    /// One of those viewers
    #[command(hide = true)]
    Viewer(viewer::Args),
    /// Compare defences of a QUIC server: requests under attack, cost of what is refused
    Gate(gate::Args),
    /// Grafts: time to load and to swap, what they do for TCP's transfers, and how they share
    Graft(graft::Args),
    /// The server that is attacked
    #[command(name = "http3-server", hide = true)]
    Http3Server(gate::http3::Serve),
    /// The flood
    #[command(hide = true)]
    Flood(gate::flood::Send),
    /// The observer of networking's cost: its accuracy and what it takes itself
    Cost(cost::Args),
    /// The parts of the plain UDP reference
    #[command(subcommand, hide = true)]
    Udp(udp::Args),
}

pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "benchmarks need root: they make network namespaces and load BPF programs"
    );
    match args.command {
        Command::Relay(args) => relay::run(args),
        Command::Fairness(args) => fairness::run(args),
        Command::Fanout(args) => fanout::run(args),
        Command::Thesis(args) => thesis::run(args),
        Command::Adapt(args) => adapt::run(args),
        Command::Watch(args) => watch::run(args),
        Command::Matrix(args) => matrix::run(args),
        Command::Isolation(args) => isolation::run(args),
        Command::Hostile(args) => hostile::run(args),
        Command::Moves(args) => moves::run(args),
        Command::Restarts(args) => restarts::run(args),
        Command::Viewer(args) => viewer::run(&args),
        Command::Gate(args) => gate::run(args),
        Command::Graft(args) => graft::run(args),
        Command::Http3Server(args) => gate::http3::serve(args),
        Command::Flood(args) => gate::flood::send(args),
        Command::Cost(args) => cost::run(args),
        Command::Udp(args) => udp::run(args),
    }
}
