//! `bench graft faults`: TCP connections through a tunnel between two daemons, while the tunnel fails. Each result row
//! is one fault in its own lab. A client and a server that know nothing of tunnel and fault check every byte in both
//! directions.

mod callers;
mod crowd;
mod daemons;
pub mod end;
mod options;
mod outcome;
mod pair;
mod recorded;
mod strangers;
mod traffic;
mod ways;

use std::path::PathBuf;

use anyhow::{Context as _, ensure};

use self::outcome::{FaultOutcome, render};
use crate::bench::at_once::at_once;
use crate::bench::site::BenchSite;
use crate::bench::table::write_json;
use crate::progress::BenchProgress;

/// Protocol of the tunnel connections (carriers) between the daemons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum FaultedCarrier {
    Quic,
    Tcp,
    Mptcp,
}

impl FaultedCarrier {
    fn name(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::Tcp => "tcp",
            Self::Mptcp => "mptcp",
        }
    }
}

const ALL: &[FaultedCarrier] = &[FaultedCarrier::Quic, FaultedCarrier::Tcp, FaultedCarrier::Mptcp];
const QUIC: &[FaultedCarrier] = &[FaultedCarrier::Quic];

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum InjectedFault {
    /// The client's daemon is killed (SIGKILL), and started again
    ClientKilled,
    /// The server's daemon is killed (SIGKILL), and started again
    ServerKilled,
    /// The client's daemon is stopped (SIGTERM), and started again
    ClientRestarted,
    /// The server's daemon is stopped (SIGTERM), and started again
    ServerRestarted,
    /// Both daemons keep their kernel objects, and are replaced by another build of the program
    Upgraded,
    /// The tunnel's connections are cut --cuts times, each time after a random number of bytes
    Cut,
    /// Every packet of the tunnel is dropped for a while
    Blackhole,
    /// Every packet of the tunnel is dropped for good
    Lost,
    /// UDP is blocked: the tunnel must use another protocol
    UdpBlocked,
    /// The client's address is removed while the client has another route to the server
    PathChange,
    /// The server's address that the tunnel connects to is removed while the server has a second one
    AddressChange,
    /// A NAT between the hosts loses its state
    NatRebinding,
    /// A middlebox removes TCP options, including MPTCP's
    OptionsStripped,
    /// A middlebox rewrites TCP options
    OptionsForged,
    /// A middlebox sends recorded SYN packets again
    OptionsReplayed,
    /// The peer speaks another version of the tunnel's protocol
    OtherVersion,
    /// --connects new connections per second, for --seconds
    Connects,
    /// A host without a known key sends handshakes, garbage, and the recorded beginning of a tunnel connection
    Stranger,
}

impl InjectedFault {
    fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self)
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn kinds(self) -> &'static [FaultedCarrier] {
        match self {
            Self::UdpBlocked => QUIC,
            _ => ALL,
        }
    }

    fn make(self, case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
        match self {
            Self::ClientKilled => daemons::gone(case, daemons::FaultedHost::Client, daemons::EndMethod::Kill),
            Self::ServerKilled => daemons::gone(case, daemons::FaultedHost::Server, daemons::EndMethod::Kill),
            Self::ClientRestarted => {
                daemons::gone(case, daemons::FaultedHost::Client, daemons::EndMethod::Signal)
            }
            Self::ServerRestarted => {
                daemons::gone(case, daemons::FaultedHost::Server, daemons::EndMethod::Signal)
            }
            Self::Upgraded => daemons::upgraded(case),
            Self::Cut => ways::cut(case),
            Self::Blackhole => ways::blackhole(case),
            Self::Lost => ways::lost(case),
            Self::UdpBlocked => ways::udp_blocked(case),
            Self::PathChange => ways::path_change(case),
            Self::AddressChange => ways::address_change(case),
            Self::NatRebinding => ways::nat_rebinding(case),
            Self::OptionsStripped => options::stripped(case),
            Self::OptionsForged => options::forged(case),
            Self::OptionsReplayed => options::replayed(case),
            Self::OtherVersion => strangers::other_version(case),
            Self::Connects => crowd::connects(case),
            Self::Stranger => strangers::stranger(case),
        }
    }
}

#[derive(Debug, clap::Args)]
pub struct FaultArgs {
    /// Faults to measure; all of them by default
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME")]
    only: Vec<InjectedFault>,
    /// Tunnel protocols to measure; all of them by default
    #[arg(long, value_enum, value_delimiter = ',', value_name = "KIND")]
    carriers: Vec<FaultedCarrier>,
    /// Number of times that tunnels of each protocol are cut
    #[arg(long, default_value_t = 200)]
    cuts: u64,
    /// New connections per second, in the fault `connects`
    #[arg(long, default_value_t = 1000)]
    connects: u64,
    /// Length of the fault `connects`, seconds
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Seed of the random numbers of bytes after which tunnel connections are cut
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of rows measured at the same time, each in its own lab
    #[arg(long, default_value_t = 1)]
    labs: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A result row to measure: a fault, a tunnel protocol, and the lab network in which the fault is produced.
struct FaultCase<'a> {
    args: &'a FaultArgs,
    site: BenchSite,
    fault: InjectedFault,
    kind: FaultedCarrier,
}

impl FaultCase<'_> {
    fn outcome(&self) -> FaultOutcome {
        FaultOutcome::new(&self.fault.name(), self.kind.name())
    }
}

pub fn run(args: &FaultArgs) -> anyhow::Result<()> {
    ensure!(args.cuts > 0 && args.labs > 0, "--cuts and --labs must be at least 1");
    ensure!(args.connects > 0 && args.seconds > 0, "--connects and --seconds must be at least 1");
    let wanted = |kind: &FaultedCarrier| args.carriers.is_empty() || args.carriers.contains(kind);
    let faults = clap::ValueEnum::value_variants().iter().copied();
    let faults = faults.filter(|fault| args.only.is_empty() || args.only.contains(fault));
    let rows =
        |fault: InjectedFault| fault.kinds().iter().copied().filter(wanted).map(move |kind| (fault, kind));
    let jobs: Vec<(InjectedFault, FaultedCarrier)> = faults.flat_map(rows).collect();
    ensure!(!jobs.is_empty(), "none of the faults in --only applies to the kinds in --carriers");
    let progress = BenchProgress::with_lanes(jobs.len(), args.labs);
    let rows = at_once(args.labs, &jobs, |(fault, kind)| made(args, *fault, *kind, &progress))?;
    drop(progress);
    print!("{}", render(&rows));
    let json = rows.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    let wrong: Vec<_> = rows.iter().filter(|row| !row.wrong.is_empty()).map(FaultOutcome::label).collect();
    ensure!(wrong.is_empty(), "faults with errors: {}", wrong.join("; "));
    Ok(())
}

/// Measures one result row. A fault that could not be produced gives a row without a result.
fn made(
    args: &FaultArgs,
    fault: InjectedFault,
    kind: FaultedCarrier,
    progress: &BenchProgress,
) -> anyhow::Result<FaultOutcome> {
    let what = format!("{}, {}", fault.name(), kind.name());
    let told = |row: Result<&FaultOutcome, &anyhow::Error>| match row {
        Ok(row) if row.wrong.is_empty() => format!("{} whole, {} reset", row.whole, row.reset),
        Ok(row) => row.wrong.join("; "),
        Err(error) => format!("{error:#}"),
    };
    let work = || -> anyhow::Result<FaultOutcome> {
        let site = BenchSite::new(&pair::topology(fault == InjectedFault::NatRebinding)).context("no lab")?;
        let case = FaultCase { args, site, fault, kind };
        match fault.make(&case) {
            Ok(row) => Ok(row),
            Err(error) => {
                let mut row = case.outcome();
                row.wrong.push(format!("{error:#}"));
                Ok(row)
            }
        }
    };
    progress.step(&what, work, |it| told(it.as_ref()))?
}
