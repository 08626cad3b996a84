//! `bench graft faults`: what becomes of carried connections when what carries them fails. Each row is one fault in a lab of its own, with a client and a server that
//! know nothing of it, and bytes both ways of which each is looked at.

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

use self::outcome::{Outcome, render};
use crate::bench::at_once::at_once;
use crate::bench::site::Site;
use crate::bench::table::write_json;
use crate::progress::Progress;

/// What a carrier is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    Quic,
    Tcp,
    Mptcp,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::Tcp => "tcp",
            Self::Mptcp => "mptcp",
        }
    }
}

const ALL: &[Kind] = &[Kind::Quic, Kind::Tcp, Kind::Mptcp];
const QUIC: &[Kind] = &[Kind::Quic];

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Fault {
    /// The client's daemon is killed, and started again
    ClientKilled,
    /// The server's daemon is killed, and started again
    ServerKilled,
    /// The client's daemon is ended, and started again
    ClientRestarted,
    /// The server's daemon is ended, and started again
    ServerRestarted,
    /// Both daemons persist, and are exchanged for another file of the program
    Upgraded,
    /// Carriers are cut, --cuts times, after a random number of bytes
    Cut,
    /// Nothing passes for a while, but what is not a carrier
    Blackhole,
    /// Nothing passes any more, but what is not a carrier
    Lost,
    /// UDP does not pass any more: another kind of carrier has to
    UdpBlocked,
    /// The client's address goes, and another way is there
    PathChange,
    /// The server's address goes that its broker is called by, and its other one is there
    AddressChange,
    /// A translator of addresses forgets what it knew
    NatRebinding,
    /// Something on the way takes options of TCP off, MPTCP's too
    OptionsStripped,
    /// Something on the way puts others in their place
    OptionsForged,
    /// Something on the way sends first packets once more
    OptionsReplayed,
    /// The peer speaks another version of carriers
    OtherVersion,
    /// --connects connections a second, for --seconds
    Connects,
    /// Somebody without a known key: handshakes, garbage, and a recorded carrier's beginning
    Stranger,
}

impl Fault {
    fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self)
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn kinds(self) -> &'static [Kind] {
        match self {
            Self::UdpBlocked => QUIC,
            _ => ALL,
        }
    }

    fn make(self, case: &Case<'_>) -> anyhow::Result<Outcome> {
        match self {
            Self::ClientKilled => daemons::gone(case, daemons::End::Client, daemons::By::Kill),
            Self::ServerKilled => daemons::gone(case, daemons::End::Server, daemons::By::Kill),
            Self::ClientRestarted => daemons::gone(case, daemons::End::Client, daemons::By::Signal),
            Self::ServerRestarted => daemons::gone(case, daemons::End::Server, daemons::By::Signal),
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
pub struct Args {
    /// Faults; without, all
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME")]
    only: Vec<Fault>,
    /// Kinds of carriers; without, all
    #[arg(long, value_enum, value_delimiter = ',', value_name = "KIND")]
    carriers: Vec<Kind>,
    /// Times that carriers are cut, of each kind
    #[arg(long, default_value_t = 200)]
    cuts: u64,
    /// New connections a second
    #[arg(long, default_value_t = 1000)]
    connects: u64,
    /// Of such connections
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Of what is random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Rows at once, each in a lab of its own
    #[arg(long, default_value_t = 1)]
    labs: usize,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// One row that is to be made.
struct Case<'a> {
    args: &'a Args,
    site: Site,
    fault: Fault,
    kind: Kind,
}

impl Case<'_> {
    fn outcome(&self) -> Outcome {
        Outcome::new(&self.fault.name(), self.kind.name())
    }
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.cuts > 0 && args.labs > 0, "--cuts and --labs are at least 1");
    ensure!(args.connects > 0 && args.seconds > 0, "--connects and --seconds are at least 1");
    let wanted = |kind: &Kind| args.carriers.is_empty() || args.carriers.contains(kind);
    let faults = clap::ValueEnum::value_variants().iter().copied();
    let faults = faults.filter(|fault| args.only.is_empty() || args.only.contains(fault));
    let rows = |fault: Fault| fault.kinds().iter().copied().filter(wanted).map(move |kind| (fault, kind));
    let jobs: Vec<(Fault, Kind)> = faults.flat_map(rows).collect();
    ensure!(!jobs.is_empty(), "none of these faults has such a carrier");
    let progress = Progress::of_lanes(jobs.len(), args.labs);
    let rows = at_once(args.labs, &jobs, |job| made(args, *job, &progress))?;
    drop(progress);
    print!("{}", render(&rows));
    let json = rows.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    let wrong: Vec<_> = rows.iter().filter(|row| !row.wrong.is_empty()).map(Outcome::label).collect();
    ensure!(wrong.is_empty(), "not as it should be: {}", wrong.join("; "));
    Ok(())
}

/// A fault that could not be made is a row as well: it has shown nothing.
fn made(args: &Args, (fault, kind): (Fault, Kind), progress: &Progress) -> anyhow::Result<Outcome> {
    let what = format!("{}, {}", fault.name(), kind.name());
    let told = |row: Result<&Outcome, &anyhow::Error>| match row {
        Ok(row) if row.wrong.is_empty() => format!("{} whole, {} reset", row.whole, row.reset),
        Ok(row) => row.wrong.join("; "),
        Err(error) => format!("{error:#}"),
    };
    let work = || -> anyhow::Result<Outcome> {
        let site = Site::new(&pair::topology(fault == Fault::NatRebinding)).context("no lab")?;
        let case = Case { args, site, fault, kind };
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
