//! The commands, one file each: flags, and what they become. What they run is in the other modules and crates.

mod connect;
pub mod cost;
mod daemon;
pub mod fanout;
pub mod gate;
pub mod graft;
mod hook;
mod packets;
pub mod parse;
pub mod privilege;
pub mod publish;
pub mod relay;
mod screen;
pub mod status;
pub mod subscribe;
pub mod token;
pub mod trace;
mod why;

use millrace_daemon::render::print;

#[derive(Debug, clap::Subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one of it per process")]
pub enum Command {
    /// Relay Media over QUIC between publishers and subscribers
    Relay(relay::Args),
    /// Publish fragmented MP4 or generated objects
    Publish(publish::Args),
    /// Subscribe to a track; write its media or print running figures
    Subscribe(subscribe::Args),
    /// Show the state of a running relay
    Status(status::Args),
    /// Show what happens to single packets in a running relay
    Trace(trace::Args),
    /// Show what the kernel's networking costs: which share of each CPU, which part of the stack, for whom
    Cost(cost::Args),
    /// Guard QUIC servers of this machine at XDP
    Gate(gate::Args),
    /// Send the RTP of one sender to many receivers, in the kernel
    Fanout(fanout::Args),
    /// Load transport functions into the kernel while TCP runs, and have connections use them
    Graft(graft::Args),
    /// Make and check tokens that say who may do what
    Token(token::Args),
    /// Print what completes these commands in a shell
    Completions {
        /// For example: millrace completions bash > /etc/bash_completion.d/millrace
        shell: clap_complete::Shell,
    },
    /// Print the version
    Version,
}

/// What else a command has against its flags, of which those called `flags` were of no use.
pub fn problems(command: Command, flags: &[String]) -> Vec<String> {
    let found = match command {
        Command::Relay(args) => relay::problems(args),
        _ => Vec::new(),
    };
    // What is only said since a flag was left out names it.
    found.into_iter().filter(|problem| !flags.iter().any(|flag| problem.contains(flag.as_str()))).collect()
}

/// `whole`: the command that these are part of.
pub fn run(command: Command, mut whole: clap::Command) -> anyhow::Result<()> {
    match command {
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut whole, "millrace", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
        Command::Version => print(&format!("millrace {}\n", env!("CARGO_PKG_VERSION"))),
        Command::Relay(args) => relay::run(args),
        Command::Publish(args) => publish::run(args),
        Command::Subscribe(args) => subscribe::run(args),
        Command::Status(args) => status::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Cost(args) => cost::run(args),
        Command::Gate(args) => gate::run(args),
        Command::Fanout(args) => fanout::run(args),
        Command::Graft(args) => graft::run(args),
        Command::Token(args) => token::run(args),
    }
}
