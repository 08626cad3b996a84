//! `millrace-lab bench graft`: the cost of loading, swapping and negotiating grafts, and their gain for TCP.

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
mod line;
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

use millrace_graft_kernel::{CongestionProgram, SHIPPED};

use super::fairness;

#[derive(Debug, clap::Args)]
pub struct GraftBenchArgs {
    #[command(subcommand)]
    command: GraftBenchCommand,
}

#[derive(Debug, clap::Subcommand)]
enum GraftBenchCommand {
    /// Unmodified applications over plain TCP and tunnelled, by loss and round-trip time
    Apps(apps::AppArgs),
    /// Throughput of a tunnel over two paths, and the longest time without data when one path is cut
    CarriedPaths(carried_paths::CarriedPathArgs),
    /// Number of connections until the daemon corrects a wrong congestion control that its learned model chose, by
    /// network
    Choice(choice::ChoiceArgs),
    /// Time until a known peer's tunnel is set up while unknown hosts hold unfinished handshakes
    Crowded(crowded::CrowdedArgs),
    /// Time to load a graft and to attach TCP rules, by steps
    Deploy(deploy::DeployArgs),
    /// Behaviour of tunnelled connections while the tunnel fails
    Faults(faults::FaultArgs),
    /// Client or server application of the benchmark `faults`
    #[command(hide = true)]
    FaultEnd(faults::end::EndArgs),
    /// Completion time of transfers with each congestion control, by size, loss and round-trip time
    Fct(fct::FctArgs),
    /// The receiver of the benchmark `carried-paths`
    #[command(hide = true)]
    Drain(carried_paths::drain::DrainArgs),
    /// Share of a bottleneck that a flow with a graft gets against TCP CUBIC
    Fairness(Fairness),
    /// One daemon for a host, for each cgroup, or for each connection: memory, CPU and latency
    Instances(instances::InstanceArgs),
    /// Two gateways for hosts with nothing installed: their cost on a good link, and their gain on a bad one
    Gateway(gateway::GatewayArgs),
    /// Time until two daemons have agreed on grafts, by steps, and its effect on TCP handshakes
    Negotiate(negotiate::NegotiateArgs),
    /// The player of a film in segments, for the benchmark `apps`
    #[command(hide = true)]
    Play(apps::video::VideoArgs),
    /// Throughput of a session of packet grafts over two paths, and the longest time without data when one path is cut
    Paths(paths::PathArgs),
    /// A transfer whose round-trip time grows for a while, and its gain from another graft during that time
    Reconfigure(reconfigure::ReconfigureArgs),
    /// Cost of tunnelling a connection on a good link, compared with haproxy
    Redirect(redirect::RedirectArgs),
    /// Repair of lost packets by retransmission or parity, by send window, loss and round-trip time
    Repair(repair::RepairArgs),
    /// Training data for the choice of a congestion control: transfers on many networks, as lines of a file
    Select(select::SelectArgs),
    /// The echo server for the many connections of the benchmark `redirect`
    #[command(hide = true)]
    Echo(redirect::echo::EchoArgs),
    /// The receiver of a transfer, for the benchmark `select`
    #[command(hide = true)]
    Fetch(select::fetch::FetchArgs),
    /// Delay and jitter that each packet graft adds, and the daemons' memory, with one session and with many
    Sessions(sessions::SessionArgs),
    /// Time to swap grafts during a live transfer that must lose no data
    Swap(swap::SwapArgs),
}

#[derive(Debug, clap::Args)]
struct Fairness {
    /// TCP congestion controls, loaded as grafts or built into the kernel; `congestion` measures datagrams with a
    /// packet graft, `carried` measures TCP through a tunnel
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "mr_longhaul,mr_pcc,cubic,bbr,congestion,carried",
        value_name = "NAME"
    )]
    controls: Vec<String>,
    #[command(flatten)]
    bottleneck: fairness::Bottleneck,
}

/// Flows that `fairness` can measure in addition to TCP flows.
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

pub fn run(args: GraftBenchArgs) -> anyhow::Result<()> {
    match args.command {
        GraftBenchCommand::Apps(args) => apps::run(args),
        GraftBenchCommand::CarriedPaths(args) => carried_paths::run(args),
        GraftBenchCommand::Choice(args) => choice::run(args),
        GraftBenchCommand::Crowded(args) => crowded::run(args),
        GraftBenchCommand::Deploy(args) => deploy::run(args),
        GraftBenchCommand::Faults(args) => faults::run(&args),
        GraftBenchCommand::FaultEnd(args) => faults::end::run(&args),
        GraftBenchCommand::Drain(args) => carried_paths::drain::run(&args),
        GraftBenchCommand::Echo(args) => redirect::echo::run(&args),
        GraftBenchCommand::Fct(args) => fct::run(args),
        GraftBenchCommand::Fairness(Fairness { controls, bottleneck }) => {
            let others = OTHERS.iter().filter(|(name, _)| controls.iter().any(|control| control == name));
            let others = others.map(|(_, other)| *other).collect();
            let is_tcp = |control: &String| !OTHERS.iter().any(|(name, _)| control == name);
            let controls: Vec<_> = controls.iter().filter(|control| is_tcp(control)).cloned().collect();
            let _grafts = register(&controls)?;
            fairness::run(fairness::FairnessArgs::from_grafts(controls, others, bottleneck))
        }
        GraftBenchCommand::Instances(args) => instances::run(args),
        GraftBenchCommand::Negotiate(args) => negotiate::run(args),
        GraftBenchCommand::Paths(args) => paths::run(args),
        GraftBenchCommand::Play(args) => apps::video::run(&args),
        GraftBenchCommand::Reconfigure(args) => reconfigure::run(args),
        GraftBenchCommand::Gateway(args) => gateway::run(args),
        GraftBenchCommand::Redirect(args) => redirect::run(args),
        GraftBenchCommand::Repair(args) => repair::run(args),
        GraftBenchCommand::Select(args) => select::run(args),
        GraftBenchCommand::Fetch(args) => select::fetch::run(&args),
        GraftBenchCommand::Sessions(args) => sessions::run(args),
        GraftBenchCommand::Swap(args) => swap::run(args),
    }
}

/// Registers the shipped grafts among `controls` with TCP, until the result is dropped. Grafts that another process has
/// registered already are left alone.
fn register(controls: &[String]) -> anyhow::Result<Vec<CongestionProgram>> {
    let there = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control")?;
    let is_there = |control: &str| there.split_whitespace().any(|known| known == control);
    let ours = SHIPPED.iter().filter(|graft| {
        let control = format!("mr_{}", graft.name);
        controls.contains(&control) && !is_there(&control)
    });
    ours.map(|graft| Ok(CongestionProgram::register(graft.image, &[])?)).collect()
}

fn micros(time: std::time::Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
