//! Plays a broadcast, or measures how it arrives.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_proto::moq::message::FetchKind;
use millrace_proto::moq::name::NameError;
use millrace_proto::moq::{Filter, GroupOrder, Location, Namespace, Parameters, TrackName, code};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::media::{self, CATALOG, Catalog, INIT, playable};
use crate::object::ObjectStream;
use crate::order::Sequencer;
use crate::receive::{Receiver, Sink, Step, Subscription};
use crate::session::{self, ConnectError, Remote, Session};
use crate::stats::{Arrival, Figures, Report};

/// Objects that a player holds for one track.
const QUEUE: usize = 256;
/// How long a player waits for a group that does not come.
const PATIENCE: Duration = Duration::from_secs(1);
/// The track that is measured if no other is named.
const MEASURED_TRACK: &str = "objects";

/// What to ask for, and where.
#[derive(Clone, Debug)]
pub struct Options {
    pub remote: Remote,
    /// The broadcast's name.
    pub namespace: Namespace,
    /// This track only.
    pub track: Option<String>,
    /// Take the names of the tracks from the catalog.
    pub catalog: bool,
    /// Begin this many groups before the current one.
    pub join_groups: Option<u64>,
    /// Fetch from the first to before the second (object 0: the whole group), and end.
    pub fetch: Option<(Location, Location)>,
    pub filter: Option<Filter>,
    /// Lower goes first.
    pub priority: Option<u8>,
    pub group_order: Option<GroupOrder>,
    /// End after so many objects (each subscriber).
    pub count: Option<u64>,
    /// Remember each object: [`Measured::series`].
    pub series: bool,
}

impl Options {
    /// What is there now and what comes, of a whole broadcast.
    pub fn new(remote: Remote, namespace: Namespace) -> Self {
        Self {
            remote,
            namespace,
            track: None,
            catalog: false,
            join_groups: None,
            fetch: None,
            filter: None,
            priority: None,
            group_order: None,
            count: None,
            series: false,
        }
    }

    fn parameters(&self) -> Parameters {
        let joining = self.join_groups.map(|_| Filter::LargestObject);
        Parameters {
            subscriber_priority: self.priority,
            filter: self.filter.or(joining),
            group_order: self.group_order,
            ..Parameters::default()
        }
    }

    fn order(&self) -> GroupOrder {
        self.group_order.unwrap_or(GroupOrder::Ascending)
    }

    fn track(&self, name: &str) -> Result<TrackName, NameError> {
        TrackName::new(self.namespace.clone(), name.to_owned())
    }

    fn fetch_kind(&self, track: TrackName) -> Option<FetchKind> {
        self.fetch.map(|(start, end)| FetchKind::Standalone { track, start, end })
    }
}

/// Why a broadcast cannot be had any further.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the session ended: {0}")]
    Ended(#[source] session::Error),
    #[error(transparent)]
    Request(#[from] session::Error),
    #[error("no track {name}: {source}")]
    NoTrack { name: String, source: session::Error },
    #[error("track {0} is empty")]
    Empty(String),
    #[error("cannot fetch {name}: {source}")]
    Fetch { name: String, source: session::Error },
    #[error("cannot join {name}: {source}")]
    Join { name: String, source: session::Error },
    #[error("cannot play {name}: {source}")]
    Play { name: String, source: Box<Error> },
    #[error("cannot read the catalog: {0}")]
    Catalog(#[source] serde_json::Error),
    #[error("nothing to play: neither video nor audio")]
    NothingToPlay,
    #[error(transparent)]
    Media(#[from] media::Error),
    #[error("cannot write the media: {0}")]
    Write(#[source] io::Error),
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("a task failed: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// Figures of all subscribers, and of each.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    #[serde(flatten)]
    pub total: Report,
    pub subscribers: Vec<Report>,
    /// Objects of each subscriber, with [`Options::series`].
    #[serde(skip)]
    pub series: Vec<Vec<Arrival>>,
}

/// Hears the totals so far, each second.
pub type OnSecond<'a> = &'a mut dyn FnMut(&Report);

/// Runs so many subscribers, each with a connection of its own, until their tracks end, they have enough, or `end` is
/// over.
///
/// # Errors
/// One of them cannot connect or subscribe, or its session ends.
pub async fn measure(
    options: &Options,
    subscribers: usize,
    end: Option<Duration>,
    mut on_second: Option<OnSecond<'_>>,
) -> Result<Measured, Error> {
    let new = || if options.series { Figures::new().with_series() } else { Figures::new() };
    let figures: Vec<_> = (0..subscribers).map(|_| Arc::new(Mutex::new(new()))).collect();
    let mut running = JoinSet::new();
    for figures in &figures {
        running.spawn(count(options.clone(), figures.clone()));
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
    while ended < subscribers {
        tokio::select! {
            Some(result) = running.join_next() => {
                result??;
                ended += 1;
            }
            _ = second.tick(), if on_second.is_some() => {
                if let Some(on_second) = &mut on_second {
                    on_second(&Figures::total(&now(&figures), false));
                }
            }
            () = &mut deadline => break,
        }
    }
    let is_end = ended == subscribers && options.count.is_none();
    let figures = now(&figures);
    let subscribers = figures.iter().map(|figures| figures.report(is_end)).collect();
    let series = figures.iter().map(|figures| figures.series().to_vec()).collect();
    Ok(Measured { total: Figures::total(&figures, is_end), subscribers, series })
}

fn now(figures: &[Arc<Mutex<Figures>>]) -> Vec<Figures> {
    figures.iter().map(|figures| figures.lock().clone()).collect()
}

/// One subscriber that counts.
async fn count(options: Options, figures: Arc<Mutex<Figures>>) -> Result<(), Error> {
    let track = options.track(options.track.as_deref().unwrap_or(MEASURED_TRACK))?;
    let session = Session::connect(&options.remote).await?;
    let receiver = Receiver::new(session.clone());
    let work = async {
        if let Some(kind) = options.fetch_kind(track.clone()) {
            let objects = receiver.fetch(kind, options.order()).await?;
            return count_fetch(objects, &figures).await;
        }
        let sink = Sink::Figures(figures.clone());
        let mut subscription = receiver.subscribe(track, options.parameters(), sink).await?;
        if let Some(groups_back) = options.join_groups
            && let Some(objects) = receiver.join(&subscription, groups_back).await?
        {
            count_fetch(objects, &figures).await?;
        }
        tokio::select! {
            done = subscription.done() => {
                let done = done?;
                tracing::debug!(code = %done.code, streams = done.stream_count, "the track is done");
            }
            () = enough(&figures, options.count) => subscription.cancel(),
        }
        Ok(())
    };
    receive_during(session, receiver.clone(), work).await
}

async fn count_fetch(mut objects: ObjectStream, figures: &Mutex<Figures>) -> Result<(), Error> {
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

/// Writes a broadcast's media, or one track's payloads, in order, until its end.
///
/// # Errors
/// It cannot be had, is not understood, or cannot be written.
pub async fn play(options: &Options, out: impl AsyncWrite + Send + Unpin + 'static) -> Result<(), Error> {
    let session = Session::connect(&options.remote).await?;
    let receiver = Receiver::new(session.clone());
    let player = Player {
        options: options.clone(),
        receiver: receiver.clone(),
        out: Arc::new(tokio::sync::Mutex::new(out)),
    };
    let work = async {
        match &options.track {
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
    work: impl Future<Output = Result<(), Error>>,
) -> Result<(), Error> {
    let serving = tokio::spawn(session.clone().run(receiver));
    tokio::select! {
        result = work => result?,
        error = serving => return Err(Error::Ended(error?)),
    }
    session.close(code::Session::NO_ERROR, "");
    session.closed().await;
    Ok(())
}

struct Player<O> {
    options: Options,
    receiver: Arc<Receiver>,
    out: Arc<tokio::sync::Mutex<O>>,
}

impl<O> Clone for Player<O> {
    fn clone(&self) -> Self {
        Self { options: self.options.clone(), receiver: self.receiver.clone(), out: self.out.clone() }
    }
}

impl<O: AsyncWrite + Send + Unpin + 'static> Player<O> {
    async fn media(&self) -> Result<(), Error> {
        let catalog = match self.options.catalog {
            true => {
                let catalog = self.first_object(CATALOG).await?;
                Some(serde_json::from_slice::<Catalog>(&catalog).map_err(Error::Catalog)?)
            }
            false => None,
        };
        let described = |position: usize| catalog.as_ref().and_then(|catalog| catalog.tracks.get(position));
        let init = described(0).and_then(|track| track.init_track.as_deref()).unwrap_or(INIT);
        let init = self.first_object(init).await?;
        let tracks = playable(&init)?;
        if tracks.is_empty() {
            return Err(Error::NothingToPlay);
        }
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

    async fn write(&self, payload: &[u8]) -> Result<(), Error> {
        let mut out = self.out.lock().await;
        out.write_all(payload).await.map_err(Error::Write)?;
        out.flush().await.map_err(Error::Write)
    }

    /// The first object of a track that has only one.
    async fn first_object(&self, name: &str) -> Result<Bytes, Error> {
        let (queue, mut steps) = mpsc::channel(QUEUE);
        let track = self.options.track(name)?;
        let subscribed = self.receiver.subscribe(track, Parameters::default(), Sink::Queue(queue));
        let mut subscription = subscribed.await.map_err(|source| no_track(name, source))?;
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
        payload.ok_or_else(|| Error::Empty(name.to_owned()))
    }

    /// Writes one track to its end.
    async fn track(self, name: String) -> Result<(), Error> {
        let track = self.options.track(&name)?;
        if let Some(kind) = self.options.fetch_kind(track.clone()) {
            let objects = self.receiver.fetch(kind, self.options.order()).await;
            let objects = objects.map_err(|source| Error::Fetch { name, source })?;
            return self.write_all(objects).await;
        }
        let (queue, steps) = mpsc::channel(QUEUE);
        let subscribed = self.receiver.subscribe(track, self.options.parameters(), Sink::Queue(queue));
        let subscription = subscribed.await.map_err(|source| no_track(&name, source))?;
        let mut sequencer = Sequencer::default();
        if let Some(groups_back) = self.options.join_groups {
            let joined = self.receiver.join(&subscription, groups_back).await;
            let joined = joined.map_err(|source| Error::Join { name: name.clone(), source })?;
            if let Some(objects) = joined {
                self.write_all(objects).await?;
                subscription
                    .ok
                    .parameters
                    .largest_object
                    .into_iter()
                    .for_each(|last| sequencer.skip_to(last));
            }
        }
        let followed = self.follow(subscription, steps, sequencer).await;
        followed.map_err(|source| Error::Play { name, source: Box::new(source) })
    }

    /// Writes what a FETCH gives.
    async fn write_all(&self, mut objects: ObjectStream) -> Result<(), Error> {
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
    ) -> Result<(), Error> {
        let mut written = 0;
        // Until when what is missing is waited for.
        let mut patience = None;
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
                () = until(patience) => force = true,
            }
            while let Some(payload) = sequencer.pop(force) {
                (force, patience) = (false, None);
                self.write(&payload).await?;
                written += 1;
                if self.options.count.is_some_and(|count| written >= count) {
                    return Ok(());
                }
            }
            if sequencer.is_waiting() {
                patience.get_or_insert_with(|| Instant::now() + PATIENCE);
            } else {
                patience = None;
            }
        }
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn no_track(name: &str, source: session::Error) -> Error {
    Error::NoTrack { name: name.to_owned(), source }
}
