//! `millrace bench`: measurements as commands.

mod contender;
mod engine;
mod figures;
mod max_rate;
mod plot;
mod process;
mod relay;
mod run;
mod stats;
mod table;
mod traffic;
mod udp;
mod usage;
mod wire;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Compare relays: latency, CPU, system calls, memory
    Relay(relay::Args),
    /// The parts of the plain UDP reference
    #[command(subcommand, hide = true)]
    Udp(udp::Args),
}

pub fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Relay(args) => relay::run(args),
        Command::Udp(args) => udp::run(args),
    }
}
