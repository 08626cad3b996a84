//! `millrace subscribe`: plays a broadcast to standard output, or prints figures about a track.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use millrace_proto::moq::message::FetchKind;
use millrace_proto::moq::{Filter, GroupOrder, Location, Namespace, Parameters, TrackName, code};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::media::{CATALOG, Catalog, INIT, playable};
use crate::object::ObjectStream;
use crate::order::Sequencer;
use crate::receive::{Receiver, Sink, Step, Subscription};
use crate::session::{ConnectArgs, Session};
use crate::stats::{Figures, Report};

/// Objects that a player holds for one track.
const QUEUE: usize = 256;
/// How long a player waits for a group that does not come.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Name of the broadcast: a namespace, its fields divided by /
    #[arg(long)]
    pub name: String,
    /// Write the payloads of this track only, or print figures about it (then "objects" without it)
    #[arg(long, value_name = "T")]
    pub track: Option<String>,
    /// Take the names of the tracks from the catalog
    #[arg(long, conflicts_with = "track")]
    pub catalog: bool,
    /// Begin this many groups before the current one
    #[arg(long, value_name = "K")]
    pub join_groups: Option<u64>,
    /// Fetch from START (GROUP:OBJECT) to before END (GROUP:OBJECT; object 0 for the whole group), and end
    #[arg(long, num_args = 2, value_names = ["START", "END"], conflicts_with = "join_groups")]
    pub fetch: Option<Vec<Place>>,
    /// Objects to ask for: next-group, largest, GROUP:OBJECT, or GROUP:OBJECT..GROUP
    #[arg(long)]
    pub filter: Option<FilterArg>,
    /// Priority of the subscription; lower goes first
    #[arg(long)]
    pub priority: Option<u8>,
    /// Order of the groups
    #[arg(long, value_enum)]
    pub group_order: Option<OrderArg>,
    /// Print running figures each second, to standard error
    #[arg(long)]
    pub stats: bool,
    /// Print figures as one JSON object at the end, to standard output
    #[arg(long)]
    pub json: bool,
    /// End after so many seconds
    #[arg(long, value_name = "S")]
    pub duration: Option<f64>,
    /// End after so many objects (each subscriber)
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// Subscribers to be, each with its own connection; for figures only
    #[arg(long, default_value_t = 1, value_name = "K")]
    pub subscribers: usize,
}

/// GROUP:OBJECT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(pub Location);

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
pub struct FilterArg(pub Filter);

impl FromStr for FilterArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self(match (text, text.split_once("..")) {
            ("next-group", _) => Filter::NextGroupStart,
            ("largest", _) => Filter::LargestObject,
            (_, Some((start, end))) => {
                let Place(start) = start.parse()?;
                let end_group = end.parse().map_err(|_| format!("{end:?} is not a number"))?;
                if end_group < start.group {
                    return Err("the filter ends before it starts".into());
                }
                Filter::AbsoluteRange { start, end_group }
            }
            (start, None) => Filter::AbsoluteStart(start.parse::<Place>()?.0),
        }))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OrderArg {
    Ascending,
    Descending,
}

impl Args {
    fn parameters(&self) -> Parameters {
        let joining = self.join_groups.map(|_| Filter::LargestObject);
        Parameters {
            subscriber_priority: self.priority,
            filter: self.filter.map(|FilterArg(filter)| filter).or(joining),
            group_order: self.group_order.map(|_| self.order()),
            ..Parameters::default()
        }
    }

    fn order(&self) -> GroupOrder {
        match self.group_order {
            Some(OrderArg::Descending) => GroupOrder::Descending,
            _ => GroupOrder::Ascending,
        }
    }

    fn track(&self, name: &str) -> anyhow::Result<TrackName> {
        let namespace = Namespace::from_path(&self.name).context("--name is not a namespace")?;
        Ok(TrackName::new(namespace, name.to_owned())?)
    }

    fn fetch_kind(&self, track: TrackName) -> Option<FetchKind> {
        match self.fetch.as_deref() {
            Some([Place(start), Place(end)]) => {
                Some(FetchKind::Standalone { track, start: *start, end: *end })
            }
            _ => None,
        }
    }
}

pub fn run(args: Args) -> anyhow::Result<()> {
    crate::log();
    ensure!(args.subscribers > 0, "--subscribers must be 1 or more");
    let runtime = tokio::runtime::Runtime::new()?;
    let end =
        args.duration.map(Duration::try_from_secs_f64).transpose().context("--duration is not a time")?;
    if args.stats || args.json {
        let result = runtime.block_on(measure(&args, end))?;
        if args.json {
            println!("{}", serde_json::to_string(&result)?);
        }
        return Ok(());
    }
    ensure!(args.subscribers == 1, "--subscribers is for figures: add --stats or --json");
    let played = runtime.block_on(async {
        let play = play(&args, tokio::io::stdout());
        match end {
            Some(end) => tokio::time::timeout(end, play).await.unwrap_or(Ok(())),
            None => play.await,
        }
    });
    // A thread may be in a write to standard output that nobody reads.
    runtime.shutdown_background();
    played
}

/// Figures of all subscribers, and of each.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    #[serde(flatten)]
    pub total: Report,
    pub subscribers: Vec<Report>,
}

/// Runs the subscribers until their tracks end, they have enough, or it is `end`.
pub async fn measure(args: &Args, end: Option<Duration>) -> anyhow::Result<Measured> {
    let figures: Vec<_> = (0..args.subscribers).map(|_| Arc::new(Mutex::new(Figures::new()))).collect();
    let mut running = JoinSet::new();
    for figures in &figures {
        running.spawn(count(args.clone(), figures.clone()));
    }
    let mut ended = 0;
    let deadline = async {
        match end {
            Some(end) => tokio::time::sleep(end).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(deadline);
    let mut second = tokio::time::interval(Duration::from_secs(1));
    second.tick().await;
    let mut previous = 0;
    while ended < args.subscribers {
        tokio::select! {
            Some(result) = running.join_next() => {
                result??;
                ended += 1;
            }
            _ = second.tick(), if args.stats => print_running(&figures, &mut previous),
            () = &mut deadline => break,
        }
    }
    let is_end = ended == args.subscribers && args.count.is_none();
    let reports: Vec<_> = figures
        .iter()
        .map(|figures| figures.lock())
        .map(|figures| (figures.report(is_end), figures.latency().clone()))
        .collect();
    let total = Figures::merge(&reports);
    Ok(Measured { total, subscribers: reports.into_iter().map(|(report, _)| report).collect() })
}

fn print_running(figures: &[Arc<Mutex<Figures>>], previous: &mut u64) {
    let reports: Vec<_> = figures
        .iter()
        .map(|figures| figures.lock())
        .map(|figures| (figures.report(false), figures.latency().clone()))
        .collect();
    let total = Figures::merge(&reports);
    let (latency, per_second) = (total.latency_us, total.delivered - *previous);
    *previous = total.delivered;
    eprintln!(
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
    );
}

/// One subscriber that counts.
async fn count(args: Args, figures: Arc<Mutex<Figures>>) -> anyhow::Result<()> {
    let track = args.track(args.track.as_deref().unwrap_or("objects"))?;
    let session = Session::connect(&args.connect).await?;
    let receiver = Receiver::new(session.clone());
    let work = async {
        if let Some(kind) = args.fetch_kind(track.clone()) {
            let objects = receiver.fetch(kind, args.order()).await?;
            return count_fetch(objects, &figures).await;
        }
        let sink = Sink::Figures(figures.clone());
        let mut subscription = receiver.subscribe(track, args.parameters(), sink).await?;
        if let Some(groups_back) = args.join_groups
            && let Some(objects) = receiver.join(&subscription, groups_back).await?
        {
            count_fetch(objects, &figures).await?;
        }
        tokio::select! {
            done = subscription.done() => {
                let done = done?;
                tracing::debug!(code = %done.code, streams = done.stream_count, "the track is done");
            }
            () = enough(&figures, args.count) => subscription.cancel(),
        }
        anyhow::Ok(())
    };
    receive_during(session, receiver.clone(), work).await
}

async fn count_fetch(mut objects: ObjectStream, figures: &Mutex<Figures>) -> anyhow::Result<()> {
    while let Some(object) = objects.next().await? {
        // Subgroups are interleaved here, so order within one says nothing.
        figures.lock().object(&object.payload, &mut Default::default());
    }
    figures.lock().stream(false);
    Ok(())
}

/// Returns when `count` objects have arrived.
async fn enough(figures: &Mutex<Figures>, count: Option<u64>) {
    let Some(count) = count else { return std::future::pending().await };
    let mut tick = tokio::time::interval(Duration::from_millis(10));
    while figures.lock().delivered() < count {
        tick.tick().await;
    }
}

/// Writes a broadcast's media, or one track's payloads, in order.
pub async fn play(args: &Args, out: impl AsyncWrite + Send + Unpin + 'static) -> anyhow::Result<()> {
    let session = Session::connect(&args.connect).await?;
    let receiver = Receiver::new(session.clone());
    let player = Player {
        args: args.clone(),
        receiver: receiver.clone(),
        out: Arc::new(tokio::sync::Mutex::new(out)),
    };
    let work = async {
        match &args.track {
            Some(track) => player.track(track.clone()).await,
            None => player.media().await,
        }
    };
    receive_during(session, receiver, work).await
}

/// Has `receiver` take what comes on the session for as long as `work` takes; closes the session then.
async fn receive_during(
    session: Arc<Session>,
    receiver: Arc<Receiver>,
    work: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    let serving = tokio::spawn(session.clone().run(receiver));
    tokio::select! {
        result = work => result?,
        error = serving => return Err(error?).context("the session ended"),
    }
    session.close(code::Session::NO_ERROR, "");
    session.closed().await;
    Ok(())
}

struct Player<O> {
    args: Args,
    receiver: Arc<Receiver>,
    out: Arc<tokio::sync::Mutex<O>>,
}

impl<O> Clone for Player<O> {
    fn clone(&self) -> Self {
        Self { args: self.args.clone(), receiver: self.receiver.clone(), out: self.out.clone() }
    }
}

impl<O: AsyncWrite + Send + Unpin + 'static> Player<O> {
    async fn media(&self) -> anyhow::Result<()> {
        let catalog = match self.args.catalog {
            true => {
                let catalog = self.first_object(CATALOG).await?;
                Some(serde_json::from_slice::<Catalog>(&catalog).context("cannot read the catalog")?)
            }
            false => None,
        };
        let described = |position: usize| catalog.as_ref().and_then(|catalog| catalog.tracks.get(position));
        let init = described(0).and_then(|track| track.init_track.as_deref()).unwrap_or(INIT);
        let init = self.first_object(init).await?;
        let tracks = playable(&init)?;
        ensure!(!tracks.is_empty(), "nothing to play: neither video nor audio");
        self.write(&init).await?;
        let mut playing = JoinSet::new();
        for (position, id) in tracks {
            let name = described(position).map_or_else(|| format!("{id}.m4s"), |track| track.name.clone());
            playing.spawn(self.clone().track(name));
        }
        while let Some(result) = playing.join_next().await {
            result??;
        }
        Ok(())
    }

    async fn write(&self, payload: &[u8]) -> anyhow::Result<()> {
        let mut out = self.out.lock().await;
        out.write_all(payload).await.context("cannot write the media")?;
        out.flush().await.context("cannot write the media")
    }

    /// The first object of a track that has only one.
    async fn first_object(&self, name: &str) -> anyhow::Result<Bytes> {
        let (queue, mut steps) = mpsc::channel(QUEUE);
        let track = self.args.track(name)?;
        let subscribed = self.receiver.subscribe(track, Parameters::default(), Sink::Queue(queue));
        let mut subscription = subscribed.await.with_context(|| format!("no track {name}"))?;
        let mut over = std::pin::pin!(subscription.done());
        let mut is_over = false;
        let payload = loop {
            tokio::select! {
                biased;
                step = steps.recv() => match step {
                    Some(Step::Object { object, .. } | Step::Datagram(object)) => break Some(object.payload),
                    Some(_) => {}
                    None => break None,
                },
                done = &mut over, if !is_over => {
                    done?;
                    is_over = true;
                    steps.close();
                }
            }
        };
        payload.with_context(|| format!("track {name} is empty"))
    }

    /// Writes one track to its end.
    async fn track(self, name: String) -> anyhow::Result<()> {
        let track = self.args.track(&name)?;
        if let Some(kind) = self.args.fetch_kind(track.clone()) {
            let objects = self.receiver.fetch(kind, self.args.order()).await;
            let objects = objects.with_context(|| format!("cannot fetch {name}"))?;
            return self.write_all(objects).await;
        }
        let (queue, steps) = mpsc::channel(QUEUE);
        let subscribed = self.receiver.subscribe(track, self.args.parameters(), Sink::Queue(queue));
        let subscription = subscribed.await.with_context(|| format!("no track {name}"))?;
        let mut sequencer = Sequencer::default();
        if let Some(groups_back) = self.args.join_groups {
            let joined = self.receiver.join(&subscription, groups_back).await;
            if let Some(objects) = joined.with_context(|| format!("cannot join {name}"))? {
                self.write_all(objects).await?;
                subscription
                    .ok
                    .parameters
                    .largest_object
                    .into_iter()
                    .for_each(|last| sequencer.skip_to(last));
            }
        }
        self.follow(subscription, steps, sequencer).await.with_context(|| format!("cannot play {name}"))
    }

    /// Writes what a FETCH gives.
    async fn write_all(&self, mut objects: ObjectStream) -> anyhow::Result<()> {
        while let Some(object) = objects.next().await? {
            self.write(&object.payload).await?;
        }
        Ok(())
    }

    async fn follow(
        &self,
        mut subscription: Subscription,
        mut steps: mpsc::Receiver<Step>,
        mut sequencer: Sequencer,
    ) -> anyhow::Result<()> {
        let mut written = 0;
        let mut over = std::pin::pin!(subscription.done());
        let mut is_over = false;
        loop {
            let mut force = false;
            tokio::select! {
                biased;
                step = steps.recv() => match step {
                    Some(step) => sequencer.push(step),
                    None => {
                        while let Some(payload) = sequencer.pop(true) {
                            self.write(&payload).await?;
                        }
                        return Ok(());
                    }
                },
                done = &mut over, if !is_over => {
                    done?;
                    is_over = true;
                    // What is queued still comes out.
                    steps.close();
                }
                () = tokio::time::sleep(PATIENCE), if sequencer.is_waiting() => force = true,
            }
            while let Some(payload) = sequencer.pop(force) {
                force = false;
                self.write(&payload).await?;
                written += 1;
                if self.args.count.is_some_and(|count| written >= count) {
                    return Ok(());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_as_they_are_written() {
        let table = [
            ("next-group", Filter::NextGroupStart),
            ("largest", Filter::LargestObject),
            ("3:1", Filter::AbsoluteStart(Location::new(3, 1))),
            ("3:1..9", Filter::AbsoluteRange { start: Location::new(3, 1), end_group: 9 }),
        ];
        for (text, filter) in table {
            assert_eq!(text.parse(), Ok(FilterArg(filter)));
        }
        for bad in ["", "3", "3:", "3:1..", "3:1..2", "a:b"] {
            assert!(bad.parse::<FilterArg>().is_err(), "{bad}");
        }
    }
}
