//! `millrace subscribe`: plays a broadcast to standard output, or prints figures about a track.

use std::{
    fmt::Write as _,
    io::{self, IsTerminal as _, Write as _},
    path::PathBuf,
    str::FromStr,
};

use anyhow::{Context, anyhow, ensure};
use millrace_client::{
    media::Choice,
    session::Remote,
    stats::{Arrival, Report},
    subscribe::{self, OnSecond, Options, measure, play},
};
use millrace_daemon::{log, render::print};
use millrace_moq::{Filter, GroupOrder, Location, Namespace};
use millrace_relay_daemon::config::Seconds;

use super::connect::{ConnectArgs, until_stopped};

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    connect: ConnectArgs,
    /// Name of the broadcast: a namespace, its fields divided by /
    #[arg(long)]
    name: String,
    /// Write the payloads of this track only, or print figures about it (then "objects" without it); given twice or more, play
    /// these tracks together
    #[arg(long, value_name = "T")]
    track: Vec<String>,
    /// Play the sound in this language (a tag such as de or pt-BR), and subtitles in it, instead of the first sound and none
    #[arg(long, value_name = "TAG", conflicts_with_all = ["track", "catalog"])]
    language: Option<String>,
    /// Take the names of the tracks from the catalog
    #[arg(long, conflicts_with = "track")]
    catalog: bool,
    /// Have the relay send each group of the rendition that the path has room for: all that the catalog (track "catalog") has of
    /// the same; needs a relay with switching-sets
    #[arg(long, conflicts_with_all = ["join_groups", "fetch"])]
    adaptive: bool,
    /// Begin this many groups before the current one
    #[arg(long, value_name = "K")]
    join_groups: Option<u64>,
    /// Fetch from START (GROUP:OBJECT) to before END (GROUP:OBJECT; object 0 for the whole group), and end
    #[arg(long, num_args = 2, value_names = ["START", "END"], conflicts_with = "join_groups")]
    fetch: Option<Vec<Place>>,
    /// Objects to ask for: next-group, largest, GROUP:OBJECT, or GROUP:OBJECT..GROUP
    #[arg(long)]
    filter: Option<FilterArg>,
    /// Priority of the subscription; lower goes first
    #[arg(long)]
    priority: Option<u8>,
    /// Order of the groups
    #[arg(long, value_enum)]
    group_order: Option<OrderArg>,
    /// Print running figures each second, to standard error
    #[arg(long)]
    stats: bool,
    /// Print figures as one JSON object at the end, to standard output
    #[arg(long)]
    json: bool,
    /// Write a line of CSV for each object to this file at the end: subscriber, sequence number, when it was sent, and its
    /// latency, ns
    #[arg(long, value_name = "FILE", requires = "json")]
    series: Option<PathBuf>,
    /// End after this time: 90s, 10m, or a number of seconds
    #[arg(long, value_name = "TIME")]
    duration: Option<Seconds>,
    /// End after so many objects (each subscriber)
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Subscribers to be, each with its own connection; for figures only
    #[arg(long, default_value_t = 1, value_name = "K")]
    subscribers: usize,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    log::to_stderr();
    let (stats, json, subscribers) = (args.stats, args.json, args.subscribers);
    let series = args.series.clone();
    ensure!(subscribers > 0, "--subscribers must be 1 or more");
    ensure!(args.track.len() <= 1 || !(stats || json), "--stats and --json are about one --track");
    let runtime = tokio::runtime::Runtime::new()?;
    let end = args.duration.map(|Seconds(time)| time);
    let options = args.options()?;
    if stats || json {
        let mut previous = 0;
        let mut print_second = |total: &Report| print_running(total, &mut previous);
        let on_second: Option<OnSecond<'_>> = if stats { Some(&mut print_second) } else { None };
        let measured = runtime.block_on(async {
            let stop = until_stopped(end)?;
            let measured = measure(&options, subscribers, stop, on_second).await;
            measured.map_err(|error| failed(error, options.reconnect))
        })?;
        if let Some(path) = series {
            let written = std::fs::write(&path, as_csv(&measured.series));
            written.with_context(|| format!("--series: cannot write {}", path.display()))?;
        }
        if json {
            print(&(serde_json::to_string(&measured)? + "\n"))?;
        }
        return Ok(());
    }
    ensure!(subscribers == 1, "--subscribers is for figures: add --stats or --json");
    ensure!(
        !io::stdout().is_terminal(),
        "media is nothing for a terminal: write it to a file (>live.mp4), to a player (| ffplay -), or add --stats for figures"
    );
    let played = runtime.block_on(async {
        let stop = until_stopped(end)?;
        let played = play(&options, tokio::io::stdout(), stop).await;
        played.map_err(|error| failed(error, options.reconnect))
    });
    // A thread may be in a write to standard output that nobody reads.
    runtime.shutdown_background();
    played
}

fn as_csv(subscribers: &[Vec<Arrival>]) -> String {
    let mut text = "subscriber,sequence,sent_ns,latency_ns\n".to_owned();
    for (subscriber, series) in subscribers.iter().enumerate() {
        for Arrival { sequence, sent, latency } in series {
            let _ = writeln!(text, "{subscriber},{sequence},{},{}", sent.as_nanos(), latency.as_nanos());
        }
    }
    text
}

/// An error with what may help, or as `main` knows that whoever read the media has enough of it.
fn failed(error: subscribe::Error, is_patient: bool) -> anyhow::Error {
    let may_pass = error.may_pass() && !is_patient;
    let error = anyhow::Error::from(error);
    let is_broken_pipe = |cause: &io::Error| cause.kind() == io::ErrorKind::BrokenPipe;
    match error.chain().filter_map(|cause| cause.downcast_ref()).any(is_broken_pipe) {
        true => io::Error::from(io::ErrorKind::BrokenPipe).into(),
        false if may_pass => anyhow!("{error}; --reconnect goes on trying"),
        false => error,
    }
}

fn print_running(total: &Report, previous: &mut u64) -> io::Result<()> {
    let (latency, per_second) = (total.latency_us, total.delivered - *previous);
    *previous = total.delivered;
    writeln!(
        io::stderr(),
        "{per_second}/s, {} delivered, {} lost in {} gaps, {} duplicates, {} corrupted, {} resets, \
         latency p50 {:.0} p99 {:.0} max {:.0} us",
        total.delivered,
        total.lost,
        total.gaps,
        total.duplicates,
        total.corrupted,
        total.resets,
        latency.p50,
        latency.p99,
        latency.max,
    )
}

impl Args {
    fn options(self) -> anyhow::Result<Options> {
        // Of one track its payloads are written, whatever they are; several are media.
        let (track, tracks) = match self.track.len() {
            0 | 1 => (self.track.into_iter().next(), Vec::new()),
            _ => (None, self.track),
        };
        Ok(Options {
            choice: Choice { language: self.language, tracks },
            reconnect: self.connect.reconnect.unwrap_or(false),
            remote: Remote { switching_sets: self.adaptive, ..self.connect.remote() },
            namespace: Namespace::from_path(&self.name).context("--name is not a namespace")?,
            track,
            catalog: self.catalog,
            adaptive: self.adaptive,
            join_groups: self.join_groups,
            fetch: match self.fetch.as_deref() {
                Some([Place(start), Place(end)]) => Some((*start, last_before(*start, *end)?)),
                _ => None,
            },
            filter: self.filter.map(|FilterArg(filter)| filter),
            priority: self.priority,
            group_order: self.group_order.map(|order| match order {
                OrderArg::Ascending => GroupOrder::Ascending,
                OrderArg::Descending => GroupOrder::Descending,
            }),
            count: self.count,
            series: self.series.is_some(),
        })
    }
}

/// The last location of a range that ends before `end`, or with its group where that has object 0.
fn last_before(start: Location, end: Location) -> anyhow::Result<Location> {
    let last = Location::new(end.group, end.object.checked_sub(1).unwrap_or(u64::MAX));
    ensure!(start <= last, "--fetch: the range ends before it begins");
    Ok(last)
}

/// GROUP:OBJECT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place(Location);

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (group, object) = text.split_once(':').ok_or("a location is GROUP:OBJECT")?;
        let number = |text: &str| text.parse().map_err(|_| format!("{text:?} is not a number"));
        Ok(Self(Location::new(number(group)?, number(object)?)))
    }
}

/// A filter as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FilterArg(Filter);

impl FromStr for FilterArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self(match (text, text.split_once("..")) {
            ("next-group", _) => Filter::NEXT_GROUP,
            ("largest", _) => Filter::NextObject,
            (_, Some((start, end))) => {
                let Place(start) = start.parse()?;
                let end_group = end.parse().map_err(|_| format!("{end:?} is not a number"))?;
                if end_group < start.group {
                    return Err("the filter ends before it starts".into());
                }
                Filter::AbsoluteRange { start, end_group, end_object: None }
            }
            (start, None) => Filter::AbsoluteStart(start.parse::<Place>()?.0),
        }))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum OrderArg {
    Ascending,
    Descending,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_ends_before_its_end() {
        let last = |start: &str, end: &str| {
            let [Place(start), Place(end)] = [start, end].map(|text| text.parse().unwrap());
            last_before(start, end).ok()
        };
        assert_eq!(last("1:2", "3:4"), Some(Location::new(3, 3)));
        assert_eq!(last("1:2", "1:0"), Some(Location::new(1, u64::MAX)));
        assert_eq!(last("1:2", "1:2"), None);
        assert_eq!(last("2:0", "1:0"), None);
    }

    #[test]
    fn filters_as_they_are_written() {
        let table = [
            ("next-group", Filter::NEXT_GROUP),
            ("largest", Filter::NextObject),
            ("3:1", Filter::AbsoluteStart(Location::new(3, 1))),
            ("3:1..9", Filter::AbsoluteRange { start: Location::new(3, 1), end_group: 9, end_object: None }),
        ];
        for (text, filter) in table {
            assert_eq!(text.parse(), Ok(FilterArg(filter)));
        }
        for bad in ["", "3", "3:", "3:1..", "3:1..2", "a:b"] {
            assert!(bad.parse::<FilterArg>().is_err(), "{bad}");
        }
    }
}
