//! The commands, one file each: their flags, and the functions that run them. Other crates contain the logic: those of
//! the relay, the gate, the cost observer, the grafts and the RTP fan-out.

pub mod cluster;
mod connect;
pub mod cost;
mod daemon;
pub mod fanout;
pub mod gate;
pub mod graft;
mod hook;
pub mod parse;
pub mod privilege;
pub mod publish;
pub mod relay;
mod screen;
mod sessions;
pub mod status;
pub mod subscribe;
pub mod token;
pub mod trace;
mod why;

use millrace_daemon::render::print;

#[derive(Debug, clap::Subcommand)]
#[allow(clippy::large_enum_variant, reason = "a process has one value of this type")]
pub enum ProgramCommand {
    /// Relay Media over QUIC between publishers and subscribers
    Relay(relay::RelayCommandArgs),
    /// Publish fragmented MP4 or generated objects
    Publish(publish::PublishArgs),
    /// Subscribe to a track: write its media, or print its latency and loss
    Subscribe(subscribe::SubscribeArgs),
    /// Show the sessions, tracks and counters of a running relay
    Status(status::StatusArgs),
    /// Show the relays of a running relay's cluster, and the routes to namespaces
    Cluster(cluster::ClusterArgs),
    /// Trace single packets through a running relay
    Trace(trace::RelayTraceArgs),
    /// Show what networking in the kernel costs: share of each CPU, by part of the stack and by process
    Cost(cost::CostCommandArgs),
    /// Guard QUIC servers of this machine: drop floods and excess clients at XDP
    Gate(gate::GateCommandArgs),
    /// Forward the RTP stream of one sender to many receivers, in the kernel
    Fanout(fanout::FanoutCommandArgs),
    /// Load transport functions (grafts) into the kernel at run time, for TCP connections and datagrams to use
    Graft(graft::GraftCommandArgs),
    /// Make and check tokens, which grant rights to publish and subscribe
    Token(token::TokenArgs),
    /// Print a script that completes these commands in a shell
    Completions {
        /// The shell; for example: millrace completions bash > /etc/bash_completion.d/millrace
        shell: clap_complete::Shell,
    },
    /// Print the version
    Version,
}

/// Returns the faults that the command itself finds in its flags. Flags whose values clap could not parse are missing
/// in the command, and `flags` names them.
pub fn problems(command: ProgramCommand, flags: &[String]) -> Vec<String> {
    let found = match command {
        ProgramCommand::Relay(args) => relay::problems(args),
        _ => Vec::new(),
    };
    // A flag that clap could not parse was left out, which may cause a further fault whose text names that flag. Such a
    // fault is not reported.
    found.into_iter().filter(|problem| !flags.iter().any(|flag| problem.contains(flag.as_str()))).collect()
}

/// Runs a command. `whole` is clap's definition of all commands, from which the shell completions are generated.
pub fn run(command: ProgramCommand, mut whole: clap::Command) -> anyhow::Result<()> {
    match command {
        ProgramCommand::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut whole, "millrace", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
        ProgramCommand::Version => print(&format!("millrace {}\n", env!("CARGO_PKG_VERSION"))),
        ProgramCommand::Relay(args) => relay::run(args),
        ProgramCommand::Publish(args) => publish::run(args),
        ProgramCommand::Subscribe(args) => subscribe::run(args),
        ProgramCommand::Status(args) => status::run(args),
        ProgramCommand::Cluster(args) => cluster::run(args),
        ProgramCommand::Trace(args) => trace::run(args),
        ProgramCommand::Cost(args) => cost::run(args),
        ProgramCommand::Gate(args) => gate::run(args),
        ProgramCommand::Fanout(args) => fanout::run(args),
        ProgramCommand::Graft(args) => graft::run(args),
        ProgramCommand::Token(args) => token::run(args),
    }
}
