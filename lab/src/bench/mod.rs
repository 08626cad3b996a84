//! `millrace-lab bench`: measurements, each as a command.

mod adapt;
mod arrivals;
mod at_once;
mod chain;
mod compare;
mod contender;
mod cost;
mod crowd;
mod engine;
mod failover;
mod fairness;
mod fanout;
mod figures;
mod gate;
mod graft;
mod hostile;
mod isolation;
mod matrix;
mod max_rate;
mod memory;
mod moves;
mod newcomers;
mod owed;
mod plot;
mod process;
mod profile;
mod relay;
mod replay;
mod restarts;
mod rounds;
mod run;
mod site;
mod storm;
mod table;
mod thesis;
mod traffic;
mod udp;
mod upgrade;
mod upstreams;
mod usage;
mod viewer;
mod watch;
mod wire;

use anyhow::ensure;

pub use cost::{ContextNames, names_by_load};

pub(crate) use contender::ContenderIdentity;
pub(crate) use process::{BenchProcess, listens};
pub(crate) use site::device;
pub(crate) use table::{columns, write_json};

#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, clap::Subcommand)]
enum BenchCommand {
    /// Compare relays: latency, CPU, system calls, memory
    Relay(relay::RelayBenchArgs),
    /// RTP to many receivers: in the kernel, by a process, and as encrypted MoQ
    Fanout(fanout::FanoutArgs),
    /// Share of a bottleneck that a relay's flow gets against TCP CUBIC
    Fairness(fairness::FairnessArgs),
    /// The same video with and without the kernel's fast path: delay, system calls by name, CPU over time
    Thesis(thesis::ThesisArgs),
    /// Picture and sound of a viewer while a link loses most of its bandwidth and gets it back
    Adapt(adapt::AdaptArgs),
    /// Picture and sound of a viewer in a browser, which plays from the relay's own page
    Watch(watch::WatchArgs),
    /// Matrix of publishers and players at the relay: which pairs work, and whether media arrive unchanged
    Matrix(matrix::MatrixArgs),
    /// Memory of a relay per session, idle and active, beside a bare quinn server's, and CPU time of idle sessions
    Memory(memory::MemoryArgs),
    /// The bare quinn server of the benchmark `memory`
    #[command(name = "quinn-server", hide = true)]
    QuinnServer(memory::bare::QuinnServe),
    /// Effect of one subscriber's bad link on another subscriber
    Isolation(isolation::IsolationArgs),
    /// Effect of a hostile client on another client's media and on the relay
    Hostile(hostile::HostileArgs),
    /// Time until the kernel forwards to viewers again after their addresses have changed
    Moves(moves::MoveArgs),
    /// Time until the first object when many established sessions subscribe at once, and delay of the other viewers
    Storm(storm::StormArgs),
    /// Time that viewers are without media when a publisher or the relay is killed and restarted
    Restarts(restarts::RestartArgs),
    /// Gap and losses of a viewer when one of two publishers of the same media is killed
    Failover(failover::FailoverArgs),
    /// Gap and losses of viewers while a relay is replaced by its successor
    Upgrade(upgrade::UpgradeArgs),
    /// Gap and losses of viewers when a relay's upstream relay is killed, cut off or stopped, or leaves
    Upstreams(upstreams::UpstreamArgs),
    /// False alarms of a relay whose upstream relay works, behind a bad link or with pauses
    Alarms(upstreams::alarms::AlarmArgs),
    /// A viewer program of the benchmarks `restarts` and `failover`
    #[command(hide = true)]
    Viewer(viewer::ViewerArgs),
    /// Compare defences of a QUIC server: answered requests under attack, cost of refused packets
    Gate(gate::GateArgs),
    /// Transport grafts (congestion controls and packet functions in BPF): time to load and to swap, effect on TCP
    /// transfers, and fairness
    Graft(graft::GraftBenchArgs),
    /// The attacked server of the benchmark `gate`
    #[command(name = "http3-server", hide = true)]
    Http3Server(gate::http3::Http3Serve),
    /// The flood generator of the benchmark `gate`
    #[command(hide = true)]
    Flood(gate::flood::Send),
    /// Accuracy and overhead of `millrace cost`, which observes the CPU cost of the kernel's networking
    Cost(cost::CostArgs),
    /// Publisher, forwarder and subscribers of the plain UDP reference that `relay` measures beside the relays
    #[command(subcommand, hide = true)]
    Udp(udp::UdpArgs),
}

pub fn run(args: BenchArgs) -> anyhow::Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "benchmarks need root: they make network namespaces and load BPF programs"
    );
    match args.command {
        BenchCommand::Relay(args) => relay::run(args),
        BenchCommand::Fairness(args) => fairness::run(args),
        BenchCommand::Fanout(args) => fanout::run(args),
        BenchCommand::Thesis(args) => thesis::run(args),
        BenchCommand::Adapt(args) => adapt::run(args),
        BenchCommand::Watch(args) => watch::run(args),
        BenchCommand::Matrix(args) => matrix::run(args),
        BenchCommand::Memory(args) => memory::run(args),
        BenchCommand::QuinnServer(args) => memory::bare::serve(&args),
        BenchCommand::Isolation(args) => isolation::run(args),
        BenchCommand::Hostile(args) => hostile::run(args),
        BenchCommand::Moves(args) => moves::run(args),
        BenchCommand::Storm(args) => storm::run(args),
        BenchCommand::Restarts(args) => restarts::run(args),
        BenchCommand::Failover(args) => failover::run(args),
        BenchCommand::Upgrade(args) => upgrade::run(args),
        BenchCommand::Upstreams(args) => upstreams::run(args),
        BenchCommand::Alarms(args) => upstreams::alarms::run(args),
        BenchCommand::Viewer(args) => viewer::run(&args),
        BenchCommand::Gate(args) => gate::run(args),
        BenchCommand::Graft(args) => graft::run(args),
        BenchCommand::Http3Server(args) => gate::http3::serve(args),
        BenchCommand::Flood(args) => gate::flood::send(args),
        BenchCommand::Cost(args) => cost::run(args),
        BenchCommand::Udp(args) => udp::run(args),
    }
}
