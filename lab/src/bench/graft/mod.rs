//! `millrace-lab bench graft`: what it takes to load and to swap transport functions, and what they do for TCP.

mod apps;
mod carried_paths;
mod carrying;
mod cgroup;
mod choice;
mod crowded;
mod daemon;
mod deploy;
mod faults;
mod fct;
mod fct_plot;
mod fct_rows;
mod flow;
mod gateway;
mod host;
mod instances;
mod negotiate;
mod network;
mod packets;
mod paths;
mod peers;
mod reconfigure;
mod redirect;
mod repair;
mod select;
mod sessions;
mod swap;
mod two_links;

use millrace_graft_kernel::{Control, SHIPPED};

use super::fairness;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Applications as they are, by plain TCP and carried, by loss and round trip
    Apps(apps::Args),
    /// What is carried by two paths, and what happens when one is cut
    CarriedPaths(carried_paths::Args),
    /// Connections for which the model is wrong, and how many it takes until they go by something better
    Choice(choice::Args),
    /// How long a peer waits for a carrier while strangers stall
    Crowded(crowded::Args),
    /// Time to load a graft, and TCP in place, by steps
    Deploy(deploy::Args),
    /// What becomes of carried connections when what carries them fails
    Faults(faults::Args),
    /// An application of the faults' matrix
    #[command(hide = true)]
    FaultEnd(faults::end::Args),
    /// Time that transfers take with each congestion control, by size, loss and round trip
    Fct(fct::Args),
    /// The receiving end of `carried-paths`
    #[command(hide = true)]
    Drain(carried_paths::drain::Args),
    /// Share of a bottleneck that a flow with a graft gets beside TCP CUBIC
    Fairness(Fairness),
    /// One daemon for a host, for each cgroup, or for each connection: memory, CPU and delay
    Instances(instances::Args),
    /// Hosts with nothing installed behind two gateways: what these add on a good link, and gain on a bad one
    Gateway(gateway::Args),
    /// Time until two daemons have agreed, by steps, and what that costs TCP's handshakes
    Negotiate(negotiate::Args),
    /// The viewer of a film in segments
    #[command(hide = true)]
    Play(apps::video::Args),
    /// What a session of packet grafts carries by two paths, and what happens when one is cut
    Paths(paths::Args),
    /// A transfer whose path becomes long for a while, and what another graft for that while gains
    Reconfigure(reconfigure::Args),
    /// What it costs a connection on a good link to be carried, beside haproxy
    Redirect(redirect::Args),
    /// Lost packets, sent again or made out of others: by window, loss and round trip
    Repair(repair::Args),
    /// What a choice among arms is learned from: transfers on many networks, as lines of a file
    Select(select::Args),
    /// The far end of `redirect`'s many connections
    #[command(hide = true)]
    Echo(redirect::echo::Args),
    /// The receiving end of a transfer
    #[command(hide = true)]
    Fetch(select::fetch::Args),
    /// Delay and jitter of packets by graft, and memory, with one session and with many
    Sessions(sessions::Args),
    /// Time to swap grafts under a live transfer, of which nothing may be lost
    Swap(swap::Args),
}

#[derive(Debug, clap::Args)]
struct Fairness {
    /// Congestion controls, grafts or the kernel's; `congestion`: datagrams by the packet function; `carried`: TCP, carried
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "mr_hybla,mr_longhaul,mr_pcc,mr_westwood,cubic,bbr,congestion,carried",
        value_name = "NAME"
    )]
    controls: Vec<String>,
    #[command(flatten)]
    bottleneck: fairness::Bottleneck,
}

/// What `fairness` has beside TCP's congestion controls.
const OTHERS: [(&str, fairness::Other); 2] = [
    (
        "congestion",
        fairness::Other {
            label: "datagrams (congestion)",
            kind: "packet-graft",
            control: "congestion",
            send: repair::saturate,
        },
    ),
    ("carried", fairness::Other { label: "carried", kind: "carried", control: "bbr", send: apps::saturate }),
];

pub fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Apps(args) => apps::run(args),
        Command::CarriedPaths(args) => carried_paths::run(args),
        Command::Choice(args) => choice::run(args),
        Command::Crowded(args) => crowded::run(args),
        Command::Deploy(args) => deploy::run(args),
        Command::Faults(args) => faults::run(&args),
        Command::FaultEnd(args) => faults::end::run(&args),
        Command::Drain(args) => carried_paths::drain::run(&args),
        Command::Echo(args) => redirect::echo::run(&args),
        Command::Fct(args) => fct::run(args),
        Command::Fairness(Fairness { controls, bottleneck }) => {
            let others = OTHERS.iter().filter(|(name, _)| controls.iter().any(|control| control == name));
            let others = others.map(|(_, other)| *other).collect();
            let is_tcp = |control: &String| !OTHERS.iter().any(|(name, _)| control == name);
            let controls: Vec<_> = controls.iter().filter(|control| is_tcp(control)).cloned().collect();
            let _grafts = register(&controls)?;
            fairness::run(fairness::Args::of_grafts(controls, others, bottleneck))
        }
        Command::Instances(args) => instances::run(args),
        Command::Negotiate(args) => negotiate::run(args),
        Command::Paths(args) => paths::run(args),
        Command::Play(args) => apps::video::run(&args),
        Command::Reconfigure(args) => reconfigure::run(args),
        Command::Gateway(args) => gateway::run(args),
        Command::Redirect(args) => redirect::run(args),
        Command::Repair(args) => repair::run(args),
        Command::Select(args) => select::run(args),
        Command::Fetch(args) => select::fetch::run(&args),
        Command::Sessions(args) => sessions::run(args),
        Command::Swap(args) => swap::run(args),
    }
}

/// Those of the names that are shipped grafts, in TCP while this lives. Another process may have them there already.
fn register(controls: &[String]) -> anyhow::Result<Vec<Control>> {
    let there = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control")?;
    let is_there = |control: &str| there.split_whitespace().any(|known| known == control);
    let ours = SHIPPED.iter().filter(|(name, _)| {
        let control = format!("mr_{name}");
        controls.contains(&control) && !is_there(&control)
    });
    ours.map(|(_, image)| Ok(Control::register(image, &[])?)).collect()
}

fn micros(time: std::time::Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
