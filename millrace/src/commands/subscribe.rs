//! `millrace subscribe`: writes a broadcast's media to standard output, or prints latency, loss and rate of a track.

use std::{
    fmt::Write as _,
    io::{self, IsTerminal as _, Write as _},
    path::PathBuf,
    str::FromStr,
};

use anyhow::{Context, anyhow, ensure};
use millrace_client::{
    media::TrackChoice,
    session::Remote,
    stats::{ObjectArrival, StatsReport},
    subscribe::{self, OnSecond, SubscribeOptions, measure, play},
};
use millrace_daemon::{log, render::print};
use millrace_moq::{Filter, GroupOrder, Location, Namespace};
use millrace_relay_daemon::config::DurationValue;

use super::connect::{ConnectArgs, wait_until_stopped};

#[derive(Clone, Debug, clap::Args)]
pub struct SubscribeArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    /// Name of the broadcast: a namespace with fields separated by /
    #[arg(long)]
    name: String,
    /// Write only the payloads of this track; with --stats or --json, print the track's latency, loss and rate instead
    /// [default with --stats or --json: objects]; given more than once, play the tracks together
    #[arg(long, value_name = "T")]
    track: Vec<String>,
    /// Play sound and subtitles in this language (a tag such as de or pt-BR); without it, the first sound track is
    /// played, and no subtitles
    #[arg(long, value_name = "TAG", conflicts_with_all = ["track", "catalog"])]
    language: Option<String>,
    /// Take the names of the tracks to play from the broadcast's catalog
    #[arg(long, conflicts_with = "track")]
    catalog: bool,
    /// Let the relay choose for each group the rendition that the path has capacity for, among the alternates in the
    /// catalog (track "catalog"); needs a relay with switching-sets
    #[arg(long, conflicts_with_all = ["join_groups", "fetch"])]
    adaptive: bool,
    /// Begin K groups before the current group
    #[arg(long, value_name = "K")]
    join_groups: Option<u64>,
    /// Fetch earlier objects from START (GROUP:OBJECT) to before END (GROUP:OBJECT; object 0 for the whole group), and
    /// stop
    #[arg(long, num_args = 2, value_names = ["START", "END"], conflicts_with = "join_groups")]
    fetch: Option<Vec<LocationArg>>,
    /// Objects to ask for: next-group, largest, GROUP:OBJECT, or GROUP:OBJECT..GROUP
    #[arg(long)]
    filter: Option<FilterArg>,
    /// Priority of the subscription; a lower value is sent first
    #[arg(long)]
    priority: Option<u8>,
    /// Order in which the relay sends groups
    #[arg(long, value_enum)]
    group_order: Option<OrderArg>,
    /// Print latency, loss and rate each second, to standard error
    #[arg(long)]
    stats: bool,
    /// Print latency, loss and rate as one JSON object at the end, to standard output
    #[arg(long)]
    json: bool,
    /// Write a line of CSV for each object to this file at the end: subscriber, sequence number, time of sending,
    /// latency (times in ns)
    #[arg(long, value_name = "FILE", requires = "json")]
    series: Option<PathBuf>,
    /// Stop after this time: 90s, 10m, or a number of seconds
    #[arg(long, value_name = "TIME")]
    duration: Option<DurationValue>,
    /// Stop after each subscriber has received this number of objects
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Leave out a group that is missing for this time after a later one has come: 500ms, 2s, or a number of seconds
    #[arg(long, value_name = "TIME", default_value = "1s")]
    skip_after: DurationValue,
    /// Number of subscribers, each with its own connection; only with --stats or --json
    #[arg(long, default_value_t = 1, value_name = "K")]
    subscribers: usize,
}

pub fn run(args: SubscribeArgs) -> anyhow::Result<()> {
    log::to_stderr();
    let stats = args.stats;
    let json = args.json;
    let subscribers = args.subscribers;
    let series = args.series.clone();
    ensure!(subscribers > 0, "--subscribers must be 1 or more");
    ensure!(args.track.len() <= 1 || !(stats || json), "--stats and --json take one --track");
    let runtime = tokio::runtime::Runtime::new()?;
    let end = args.duration.map(|DurationValue(time)| time);
    let options = args.options()?;
    if stats || json {
        let mut previous = 0;
        let mut print_second = |total: &StatsReport| print_running(total, &mut previous);
        let on_second: Option<OnSecond<'_>> = if stats { Some(&mut print_second) } else { None };
        let measured = runtime.block_on(async {
            let stop = wait_until_stopped(end)?;
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
        "media cannot be shown on a terminal: write it to a file (>live.mp4), to a player (| ffplay -), or add --stats for figures"
    );
    let played = runtime.block_on(async {
        let stop = wait_until_stopped(end)?;
        let played = play(&options, tokio::io::stdout(), stop).await;
        played.map_err(|error| failed(error, options.reconnect))
    });
    // A thread may be blocked in a write to standard output that has no reader.
    runtime.shutdown_background();
    played
}

/// Formats each subscriber's objects as lines of CSV, with times in nanoseconds.
fn as_csv(subscribers: &[Vec<ObjectArrival>]) -> String {
    let mut text = "subscriber,sequence,sent_ns,latency_ns\n".to_owned();
    for (subscriber, series) in subscribers.iter().enumerate() {
        for ObjectArrival { sequence, sent, latency } in series {
            let _ = writeln!(text, "{subscriber},{sequence},{},{}", sent.as_nanos(), latency.as_nanos());
        }
    }
    text
}

/// Converts an error. A broken pipe becomes an I/O error, by which `main` recognises that the reader of the media has
/// exited. The text of a temporary error suggests `--reconnect`.
fn failed(error: subscribe::Error, is_patient: bool) -> anyhow::Error {
    let may_pass = error.may_pass() && !is_patient;
    let error = anyhow::Error::from(error);
    let is_broken_pipe = |cause: &io::Error| cause.kind() == io::ErrorKind::BrokenPipe;
    match error.chain().filter_map(|cause| cause.downcast_ref()).any(is_broken_pipe) {
        true => io::Error::from(io::ErrorKind::BrokenPipe).into(),
        false if may_pass => anyhow!("{error}; --reconnect keeps trying"),
        false => error,
    }
}

/// Prints the rate since the previous call, the numbers of delivered and lost objects, and the latency, as one line to
/// standard error.
fn print_running(total: &StatsReport, previous: &mut u64) -> io::Result<()> {
    let latency = total.latency_us;
    let per_second = total.delivered - *previous;
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

impl SubscribeArgs {
    fn options(self) -> anyhow::Result<SubscribeOptions> {
        // The payloads of a single track are written unchanged. Several tracks are played together, as one file of
        // media.
        let (track, tracks) = match self.track.len() {
            0 | 1 => (self.track.into_iter().next(), Vec::new()),
            _ => (None, self.track),
        };
        Ok(SubscribeOptions {
            choice: TrackChoice { language: self.language, tracks },
            reconnect: self.connect.reconnect.unwrap_or(!self.connect.url.others.is_empty()),
            remote: Remote { switching_sets: self.adaptive, ..self.connect.remote() },
            namespace: Namespace::from_path(&self.name).context("--name is not a namespace")?,
            track,
            catalog: self.catalog,
            adaptive: self.adaptive,
            join_groups: self.join_groups,
            fetch: match self.fetch.as_deref() {
                Some([LocationArg(start), LocationArg(end)]) => Some((*start, last_before(*start, *end)?)),
                _ => None,
            },
            filter: self.filter.map(|FilterArg(filter)| filter),
            priority: self.priority,
            group_order: self.group_order.map(|order| match order {
                OrderArg::Ascending => GroupOrder::Ascending,
                OrderArg::Descending => GroupOrder::Descending,
            }),
            count: self.count,
            skip_after: self.skip_after.0,
            series: self.series.is_some(),
        })
    }
}

/// Returns the last location of a range: the object before `end`, or the end of `end`'s group if the object is 0.
fn last_before(start: Location, end: Location) -> anyhow::Result<Location> {
    let last = Location::new(end.group, end.object.checked_sub(1).unwrap_or(u64::MAX));
    ensure!(start <= last, "--fetch: the range ends before it begins");
    Ok(last)
}

/// A location, written as GROUP:OBJECT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LocationArg(Location);

impl FromStr for LocationArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (group, object) = text.split_once(':').ok_or("a location is GROUP:OBJECT")?;
        let number = |text: &str| text.parse().map_err(|_| format!("{text:?} is not a number"));
        Ok(Self(Location::new(number(group)?, number(object)?)))
    }
}

/// A subscription filter, as written on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FilterArg(Filter);

impl FromStr for FilterArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self(match (text, text.split_once("..")) {
            ("next-group", _) => Filter::NEXT_GROUP,
            ("largest", _) => Filter::NextObject,
            (_, Some((start, end))) => {
                let LocationArg(start) = start.parse()?;
                let end_group = end.parse().map_err(|_| format!("{end:?} is not a number"))?;
                if end_group < start.group {
                    return Err("the filter ends before it starts".into());
                }
                Filter::AbsoluteRange { start, end_group, end_object: None }
            }
            (start, None) => Filter::AbsoluteStart(start.parse::<LocationArg>()?.0),
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
    fn fetch_range_excludes_its_end() {
        let last = |start: &str, end: &str| {
            let [LocationArg(start), LocationArg(end)] = [start, end].map(|text| text.parse().unwrap());
            last_before(start, end).ok()
        };
        assert_eq!(last("1:2", "3:4"), Some(Location::new(3, 3)));
        assert_eq!(last("1:2", "1:0"), Some(Location::new(1, u64::MAX)));
        assert_eq!(last("1:2", "1:2"), None);
        assert_eq!(last("2:0", "1:0"), None);
    }

    #[test]
    fn subscription_filters_are_parsed() {
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
