//! Plays a broadcast, or measures how it arrives.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_moq::message::{FetchKind, PublishDone};
use millrace_moq::name::NameError;
use millrace_moq::{Filter, GroupOrder, Location, Namespace, Parameters, TrackName, code, msf};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::again::{Pause, successor};
use crate::alternates::{self, Alternates, Subscribed};
use crate::media::{self, CATALOG, Catalog, Choice, INIT, Part, Playlist, Wrap, playable};
use crate::object::{Object, ObjectStream};
use crate::order::Sequencer;
use crate::receive::{Receiver, Sink, Step};
use crate::session::{self, ConnectError, Remote, Session};
use crate::stats::{Arrival, Figures, Report};

/// Objects that a player holds for one track.
const QUEUE: usize = 256;
/// How long a player waits for a group that does not come.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long it waits for one after a silence that was longer than that: what has not come by now was published meanwhile.
const PATIENCE_AFTER_SILENCE: Duration = Duration::from_millis(200);
/// How long a session may take to be closed when it is time to leave.
const LEAVING: Duration = Duration::from_secs(3);
/// How long a track may be missing where GOAWAY has sent its subscriber: the publisher was sent there as well, and may come later.
const ARRIVAL: Duration = Duration::from_secs(10);
/// How long the names of a broadcast's tracks are waited for, to say them with an error.
const CATALOG_WAIT: Duration = Duration::from_secs(2);
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
    /// Which tracks to play.
    pub choice: Choice,
    /// Subscribe to all tracks that the catalog has for the same content, of which the relay sends each group of one: the one
    /// that the path has room for (draft-wilaw-moq-moqt-ssts).
    pub adaptive: bool,
    /// Begin this many groups before the current one.
    pub join_groups: Option<u64>,
    /// Fetch from the first to the second (the largest object ID: all of its group), and end.
    pub fetch: Option<(Location, Location)>,
    pub filter: Option<Filter>,
    /// Lower goes first.
    pub priority: Option<u8>,
    pub group_order: Option<GroupOrder>,
    /// End after so many objects (each subscriber).
    pub count: Option<u64>,
    /// Remember each object: [`Measured::series`].
    pub series: bool,
    /// Connect again when the session ends, and go on trying when there is none or the track is not there.
    pub reconnect: bool,
}

impl Options {
    /// What is there now and what comes, of a whole broadcast.
    pub fn new(remote: Remote, namespace: Namespace) -> Self {
        Self {
            remote,
            namespace,
            track: None,
            catalog: false,
            choice: Choice::default(),
            adaptive: false,
            join_groups: None,
            fetch: None,
            filter: None,
            priority: None,
            group_order: None,
            count: None,
            series: false,
            reconnect: false,
        }
    }

    /// What is to come, after a session has ended: with whole groups, so that a decoder can go on.
    fn to_go_on(&self) -> Self {
        let filter = self.filter.or(Some(Filter::NEXT_GROUP));
        Self { join_groups: None, filter, ..self.clone() }
    }

    /// A session that is there already, or a new one.
    async fn session(&self, moved: Option<Arc<Session>>) -> Result<Arc<Session>, ConnectError> {
        match moved {
            Some(session) => Ok(session),
            None => Session::connect(&self.remote).await,
        }
    }

    fn parameters(&self, receiver: &Receiver) -> Parameters {
        let parameters = Parameters {
            subscriber_priority: self.priority,
            filter: self.filter,
            group_order: self.group_order,
            ..Parameters::default()
        };
        match self.join_groups {
            Some(groups_back) => receiver.joining(groups_back, parameters),
            None => parameters,
        }
    }

    fn order(&self) -> GroupOrder {
        self.group_order.unwrap_or(GroupOrder::Ascending)
    }

    fn track(&self, name: &str) -> Result<TrackName, NameError> {
        TrackName::new(self.namespace.clone(), name.to_owned())
    }

    fn fetch_kind(&self, track: TrackName) -> Option<FetchKind> {
        self.fetch.map(|(start, last)| FetchKind::Standalone { track, range: Filter::range(start, last) })
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
    #[error("no track {name}: {source}{}", hint(source, others, *is_named))]
    NoTrack {
        name: String,
        source: session::Error,
        /// Those that the broadcast has, as far as is known.
        others: Vec<String>,
        /// It was asked for by name.
        is_named: bool,
    },
    #[error("track {name} ended early: {reason}")]
    Early { name: String, reason: String },
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
    #[error(
        "the relay does not switch between tracks for --adaptive: it is not set to (millrace relay --switching-sets), or cannot"
    )]
    NoSwitching,
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

impl Error {
    /// Whether a track has ended before its time.
    fn is_early(&self) -> bool {
        match self {
            Self::Early { .. } => true,
            Self::Play { source, .. } => source.is_early(),
            _ => false,
        }
    }

    /// What ended the session, if that is what it came from.
    fn session(&self) -> Option<&session::Error> {
        match self {
            Self::Ended(error) | Self::Request(error) => Some(error),
            Self::NoTrack { source, .. } | Self::Fetch { source, .. } | Self::Join { source, .. } => {
                Some(source)
            }
            Self::Play { source, .. } => source.session(),
            _ => None,
        }
    }

    /// Whether nobody publishes the track now.
    fn is_without_publisher(&self) -> bool {
        matches!(self, Self::NoTrack { source, .. } if is_absent(source))
    }

    /// Whether another session may do better.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Connect(error) => error.may_pass(),
            Self::Ended(error) | Self::Request(error) => error.may_pass(),
            Self::NoTrack { source, .. } | Self::Fetch { source, .. } | Self::Join { source, .. } => {
                source.may_pass() || is_absent(source)
            }
            Self::Play { source, .. } => source.may_pass(),
            Self::Empty(_) | Self::Early { .. } => true,
            _ => false,
        }
    }
}

/// Nobody publishes it now.
fn is_absent(error: &session::Error) -> bool {
    matches!(error, session::Error::Refused(refused) if refused.code == code::Request::DOES_NOT_EXIST)
}

/// What to ask for instead.
fn hint(source: &session::Error, others: &[String], is_named: bool) -> String {
    match others {
        _ if !is_absent(source) => String::new(),
        [] if is_named => "; nor is there a catalog: the broadcast may not be published yet".to_owned(),
        [] => {
            "; nor is there a catalog: the broadcast may not be published yet, or its tracks have other names (--track)"
                .to_owned()
        }
        others if is_named => format!("; the broadcast has {} (name one with --track)", others.join(", ")),
        others => {
            format!(
                "; the broadcast has {} (name one with --track, or take them with --catalog)",
                others.join(", ")
            )
        }
    }
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

/// Hears the totals so far, each second once something is subscribed to; an error ends everything.
pub type OnSecond<'a> = &'a mut dyn FnMut(&Report) -> io::Result<()>;

/// Runs so many subscribers, each with a connection of its own, until their tracks end, they have enough, or `stop` is
/// over.
///
/// # Errors
/// One of them cannot connect or subscribe, or its session ends; with [`Options::reconnect`] only what another attempt will
/// not mend.
pub async fn measure(
    options: &Options,
    subscribers: usize,
    stop: impl Future<Output = ()>,
    mut on_second: Option<OnSecond<'_>>,
) -> Result<Measured, Error> {
    let new = || if options.series { Figures::new().with_series() } else { Figures::new() };
    let figures: Vec<_> = (0..subscribers).map(|_| Arc::new(Mutex::new(new()))).collect();
    let (leave, left) = watch::channel(false);
    let (subscribed, is_subscribed) = watch::channel(false);
    let mut running = JoinSet::new();
    for figures in &figures {
        let (figures, subscribed) = (figures.clone(), subscribed.clone());
        let (options, left) = (options.clone(), left.clone());
        running.spawn(async move {
            let once =
                |options, session| count(options, session, figures.clone(), subscribed.clone(), left.clone());
            again(&options, left.clone(), once).await
        });
    }
    let mut ended = 0;
    let mut stop = std::pin::pin!(stop);
    let mut second = tokio::time::interval(Duration::from_secs(1));
    second.tick().await;
    while ended < subscribers {
        tokio::select! {
            Some(result) = running.join_next() => {
                result??;
                ended += 1;
            }
            _ = second.tick(), if on_second.is_some() => {
                if let Some(on_second) = on_second.as_mut().filter(|_| *is_subscribed.borrow()) {
                    on_second(&Figures::total(&now(&figures), false)).map_err(Error::Write)?;
                }
            }
            () = &mut stop => break,
        }
    }
    let figures = now(&figures);
    let is_over = || ended == subscribers || figures.iter().all(Figures::is_published);
    let is_end = options.count.is_none() && is_over();
    leave.send_replace(true);
    while let Some(result) = running.join_next().await {
        result??;
    }
    let subscribers = figures.iter().map(|figures| figures.report(is_end)).collect();
    let series = figures.iter().map(|figures| figures.series().to_vec()).collect();
    Ok(Measured { total: Figures::total(&figures, is_end), subscribers, series })
}

/// How a session ended that did not fail.
enum End {
    /// There is nothing more to come, or it was told to leave.
    Over,
    /// The relay goes away; there is a session to go on with.
    Moved(Arc<Session>, Remote),
}

/// Runs sessions, one after the other, until one has everything. `left`: it is time to leave.
async fn again<F: Future<Output = Result<End, Error>>>(
    options: &Options,
    mut left: watch::Receiver<bool>,
    once: impl Fn(Options, Option<Arc<Session>>) -> F,
) -> Result<(), Error> {
    let mut pause = Pause::new();
    let mut now = options.clone();
    let mut moved = None;
    let mut moved_at: Option<Instant> = None;
    loop {
        let result = tokio::select! {
            result = once(now.clone(), moved.take()) => result,
            // While it connects; whoever is connected has heard it, and closes the session first.
            () = async {
                let _ = left.wait_for(|left| *left).await;
                tokio::time::sleep(LEAVING).await;
            } => return Ok(()),
        };
        let remote = now.remote;
        now = options.to_go_on();
        let next = match result {
            Ok(End::Over) => return Ok(()),
            Ok(End::Moved(session, remote)) => {
                (moved, now.remote) = (Some(session), remote);
                moved_at = Some(Instant::now());
                continue;
            }
            Err(error)
                if error.is_without_publisher() && moved_at.is_some_and(|at| at.elapsed() < ARRIVAL) =>
            {
                now.remote = remote;
                let next = pause.after();
                tracing::warn!("{error}; its publisher may still be on the way, trying again in {next:?}");
                next
            }
            // As far as it went.
            Err(error) if !options.reconnect && error.is_early() => {
                tracing::warn!("{error}");
                return Ok(());
            }
            Err(error) if !options.reconnect || !error.may_pass() => return Err(error),
            // At the first relay: where that has sent us it may not be good for ever.
            Err(error) => {
                let next = pause.after_error(error.session());
                match next.is_zero() {
                    true => tracing::warn!("{error}: the relay was restarted, connecting again"),
                    false => tracing::warn!("{error}; trying again in {next:?}"),
                }
                next
            }
        };
        tokio::select! {
            () = pause.wait_for(next) => {}
            _ = left.wait_for(|left| *left) => return Ok(()),
        }
    }
}

fn now(figures: &[Arc<Mutex<Figures>>]) -> Vec<Figures> {
    figures.iter().map(|figures| figures.lock().clone()).collect()
}

/// One session of a subscriber that counts.
async fn count(
    options: Options,
    session: Option<Arc<Session>>,
    figures: Arc<Mutex<Figures>>,
    subscribed: watch::Sender<bool>,
    left: watch::Receiver<bool>,
) -> Result<End, Error> {
    let session = options.session(session).await?;
    let receiver = Receiver::new(session.clone());
    let work = async {
        let name = measured(&receiver, &options).await?;
        let track = options.track(&name)?;
        if let Some(kind) = options.fetch_kind(track.clone()) {
            let objects = receiver.fetch(kind, options.order()).await?;
            subscribed.send_replace(true);
            return count_fetch(objects, &figures).await;
        }
        let sink = Sink::Figures(figures.clone());
        let mut subscription = subscribe(&receiver, &options, &name, sink).await?;
        subscribed.send_replace(true);
        if let (Some(groups_back), Some(first)) = (options.join_groups, subscription.first())
            && let Some(objects) = receiver.join(first, groups_back).await?
        {
            count_fetch(objects, &figures).await?;
        }
        tokio::select! {
            done = subscription.done() => if let Some(error) = early(&name, done?) {
                return Err(error);
            },
            () = enough(&figures, options.count) => subscription.cancel(),
        }
        Ok(())
    };
    receive_during(session, &options.remote, receiver.clone(), work, left).await
}

/// What is wrong with the end of a track: only its publisher or the relay may have ended it.
fn early(name: &str, done: Option<PublishDone>) -> Option<Error> {
    tracing::debug!(last = ?done, "the track is done");
    let may_go_on = [
        code::Done::INTERNAL_ERROR,
        code::Done::GOING_AWAY,
        code::Done::TOO_FAR_BEHIND,
        code::Done::EXCESSIVE_LOAD,
    ];
    let PublishDone { reason, .. } = done.filter(|done| may_go_on.contains(&done.code))?;
    Some(Error::Early { name: name.to_owned(), reason })
}

/// The track that is measured: the one that was named, the first of the catalog, or that of generated objects.
async fn measured(receiver: &Receiver, options: &Options) -> Result<String, Error> {
    if let Some(name) = &options.track {
        return Ok(name.clone());
    }
    let name = match options.catalog {
        true => {
            read_catalog(receiver, options).await?.tracks.into_iter().next().ok_or(Error::NothingToPlay)?.name
        }
        false => MEASURED_TRACK.to_owned(),
    };
    tracing::info!(track = name, "figures are of this track; --track takes another");
    Ok(name)
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

/// Writes a broadcast's media, or one track's payloads, in order, until its end, or until `stop` is over.
///
/// # Errors
/// It cannot be had, is not understood, or cannot be written; with [`Options::reconnect`] only what another attempt will
/// not mend.
pub async fn play(
    options: &Options,
    out: impl AsyncWrite + Send + Unpin + 'static,
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let (leave, left) = watch::channel(false);
    let out = Arc::new(tokio::sync::Mutex::new(out));
    let written = Arc::default();
    let once = |options: Options, session| {
        let (out, written, left) = (Arc::clone(&out), Arc::clone(&written), left.clone());
        async move {
            let session = options.session(session).await?;
            let receiver = Receiver::new(session.clone());
            let remote = options.remote.clone();
            let player = Player { options, receiver: receiver.clone(), out, written };
            let work = async {
                match player.options.track.clone() {
                    Some(track) => player.track(Part::plain(track)).await,
                    None => player.media().await,
                }
            };
            receive_during(session, &remote, receiver, work, left).await
        }
    };
    let mut playing = std::pin::pin!(again(options, left.clone(), once));
    tokio::select! {
        played = &mut playing => return played,
        () = stop => drop(leave.send_replace(true)),
    }
    playing.await
}

/// Has `receiver` take what comes on the session for as long as `work` takes, or until it is time to leave; closes the
/// session then.
async fn receive_during(
    session: Arc<Session>,
    remote: &Remote,
    receiver: Arc<Receiver>,
    work: impl Future<Output = Result<(), Error>>,
    mut left: watch::Receiver<bool>,
) -> Result<End, Error> {
    let serving = tokio::spawn(session.clone().run(receiver));
    // A publisher may have left a relay that goes away before us: what it publishes goes on elsewhere.
    let work = async {
        match work.await {
            Err(error) if error.is_early() && session.goaway().borrow().is_some() => {
                std::future::pending().await
            }
            result => result,
        }
    };
    let result = tokio::select! {
        result = work => result.map(|()| End::Over),
        error = serving => Err(Error::Ended(error?)),
        (next, remote) = successor(&session, remote) => Ok(End::Moved(next, remote)),
        _ = left.wait_for(|left| *left) => Ok(End::Over),
    };
    session.close(code::Session::NO_ERROR, "the subscriber leaves");
    session.closed().await;
    result
}

/// Subscribes to a track, or to all that can stand for it.
async fn subscribe(
    receiver: &Receiver,
    options: &Options,
    name: &str,
    sink: Sink,
) -> Result<Subscribed, Error> {
    let alternates = match options.adaptive {
        true if !receiver.session().switches().await => return Err(Error::NoSwitching),
        true => {
            let catalog = read_msf(receiver, options).await?;
            let alternates = Alternates::of(&catalog, &options.namespace, name);
            if alternates.is_none() {
                tracing::info!(track = name, "the catalog has nothing that can stand for it, with a bitrate");
            }
            alternates
        }
        false => None,
    };
    let (track, parameters) = (options.track(name)?, options.parameters(receiver));
    match alternates::subscribe(receiver, track, alternates.as_ref(), parameters, sink).await {
        Ok(subscribed) => Ok(subscribed),
        Err(source) => Err(no_track(receiver, options, name, source).await),
    }
}

/// `source` kept a track from being had; what would have been there is said too, if that can be known.
async fn no_track(receiver: &Receiver, options: &Options, name: &str, source: session::Error) -> Error {
    let mut others = Vec::new();
    if is_absent(&source) && name != CATALOG {
        let catalog = tokio::time::timeout(CATALOG_WAIT, read_catalog(receiver, options)).await;
        let catalog = catalog.ok().and_then(Result::ok);
        others = catalog.into_iter().flat_map(|catalog| catalog.tracks).map(|track| track.name).collect();
    }
    Error::NoTrack { name: name.to_owned(), source, others, is_named: options.track.is_some() }
}

async fn read_catalog(receiver: &Receiver, options: &Options) -> Result<Catalog, Error> {
    let catalog = first_object(receiver, options, CATALOG).await?;
    serde_json::from_slice(&catalog).map_err(Error::Catalog)
}

async fn read_msf(receiver: &Receiver, options: &Options) -> Result<msf::Catalog, Error> {
    let catalog = first_object(receiver, options, msf::CATALOG).await?;
    msf::Catalog::parse(&catalog).map_err(Error::Catalog)
}

/// The first object of a track that has only one.
async fn first_object(receiver: &Receiver, options: &Options, name: &str) -> Result<Bytes, Error> {
    let (queue, mut steps) = mpsc::channel(QUEUE);
    let track = options.track(name)?;
    let subscribed = receiver.subscribe(track, Parameters::default(), Sink::Queue(queue));
    let mut subscription = match subscribed.await {
        Ok(subscription) => subscription,
        // Boxed: it may be the catalog that is asked for next.
        Err(source) => return Err(Box::pin(no_track(receiver, options, name, source)).await),
    };
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

struct Player<O> {
    options: Options,
    receiver: Arc<Receiver>,
    out: Arc<tokio::sync::Mutex<O>>,
    /// The init segment that was written, by this session or another before.
    written: Arc<Mutex<Option<Bytes>>>,
}

impl<O> Clone for Player<O> {
    fn clone(&self) -> Self {
        let (receiver, out, written) = (self.receiver.clone(), self.out.clone(), self.written.clone());
        Self { options: self.options.clone(), receiver, out, written }
    }
}

impl<O: AsyncWrite + Send + Unpin + 'static> Player<O> {
    async fn media(&self) -> Result<(), Error> {
        let mut next = Some(self.playlist().await?);
        while let Some(Playlist { init, tracks }) = next {
            let is_new = self.written.lock().replace(init.clone()) != Some(init.clone());
            if is_new {
                self.write(&init).await?;
            }
            let names: Vec<_> = tracks.iter().map(|part| part.name.clone()).collect();
            let mut playing = JoinSet::new();
            for part in tracks {
                playing.spawn(self.clone().track(part));
            }
            while let Some(result) = playing.join_next().await {
                result??;
            }
            next = self.successor(&names).await;
        }
        Ok(())
    }

    /// Returns what to play once all tracks have ended: other ones, if the catalog has those by now, since the publisher's input has begun
    /// anew.
    async fn successor(&self, before: &[String]) -> Option<Playlist> {
        if self.options.fetch.is_some() || self.options.count.is_some() {
            return None;
        }
        let catalog =
            tokio::time::timeout(CATALOG_WAIT, read_msf(&self.receiver, &self.options)).await.ok()?.ok()?;
        let playlist = Playlist::of(&catalog, &self.options.choice).ok()??;
        let is_known = |part: &Part| before.contains(&part.name);
        (!playlist.tracks.iter().any(is_known)).then_some(playlist)
    }

    /// Returns what to play: by the names that moq-pub gives, or by its catalog; of a broadcast that has neither, or where something is chosen,
    /// by that of MSF.
    async fn playlist(&self) -> Result<Playlist, Error> {
        if !self.options.choice.is_default() {
            let catalog = read_msf(&self.receiver, &self.options).await?;
            return Playlist::of(&catalog, &self.options.choice)?.ok_or(Error::NothingToPlay);
        }
        let known = self.as_moq_pub_does().await;
        if !matches!(&known, Err(Error::NoTrack { source, .. }) if is_absent(source)) {
            return known;
        }
        match tokio::time::timeout(CATALOG_WAIT, read_msf(&self.receiver, &self.options)).await {
            Ok(Ok(catalog)) => Playlist::of(&catalog, &self.options.choice)?.ok_or(Error::NothingToPlay),
            _ => known,
        }
    }

    async fn as_moq_pub_does(&self) -> Result<Playlist, Error> {
        let catalog = match self.options.catalog {
            true => Some(read_catalog(&self.receiver, &self.options).await?),
            false => None,
        };
        let described = |position: usize| catalog.as_ref().and_then(|catalog| catalog.tracks.get(position));
        let init = described(0).and_then(|track| track.init_track.as_deref()).unwrap_or(INIT);
        let init = first_object(&self.receiver, &self.options, init).await?;
        let tracks = playable(&init)?;
        if tracks.is_empty() {
            return Err(Error::NothingToPlay);
        }
        let name = |(position, id): (usize, u32)| {
            Part::plain(described(position).map_or_else(|| format!("{id}.m4s"), |track| track.name.clone()))
        };
        Ok(Playlist { init, tracks: tracks.into_iter().map(name).collect() })
    }

    /// As it is, or as the fragment of MP4 that is made of it.
    async fn write_object(&self, wrap: &mut Option<Wrap>, object: &Object) -> Result<(), Error> {
        match wrap {
            Some(wrap) => self.write(&wrap.fragment(object.location.object == 0, &object.payload)?).await,
            None => self.write(&object.payload).await,
        }
    }

    async fn write(&self, payload: &[u8]) -> Result<(), Error> {
        let mut out = self.out.lock().await;
        out.write_all(payload).await.map_err(Error::Write)?;
        out.flush().await.map_err(Error::Write)
    }

    /// Writes one track to its end.
    async fn track(self, Part { name, mut wrap }: Part) -> Result<(), Error> {
        let track = self.options.track(&name)?;
        if let Some(kind) = self.options.fetch_kind(track.clone()) {
            let objects = self.receiver.fetch(kind, self.options.order()).await;
            let objects = objects.map_err(|source| Error::Fetch { name, source })?;
            return self.write_all(&mut wrap, objects).await;
        }
        let (queue, steps) = mpsc::channel(QUEUE);
        let mut subscription = subscribe(&self.receiver, &self.options, &name, Sink::Queue(queue)).await?;
        let mut sequencer = Sequencer::default();
        if let Some(first) = subscription.first() {
            // Without a filter some relays go on behind the largest object, others begin with its group.
            let filter = self.options.filter.unwrap_or(Filter::NextObject);
            sequencer.may_begin_at(filter.start(first.ok.parameters.largest_object));
        }
        if let (Some(groups_back), Some(first)) = (self.options.join_groups, subscription.first()) {
            let joined = self.receiver.join(first, groups_back).await;
            let joined = joined.map_err(|source| Error::Join { name: name.clone(), source })?;
            if let Some(objects) = joined {
                self.write_all(&mut wrap, objects).await?;
                first.ok.parameters.largest_object.into_iter().for_each(|last| sequencer.skip_to(last));
            }
        }
        let followed = self.follow(&name, wrap, subscription, steps, sequencer).await;
        followed.map_err(|source| Error::Play { name, source: Box::new(source) })
    }

    /// Writes what a FETCH gives.
    async fn write_all(&self, wrap: &mut Option<Wrap>, mut objects: ObjectStream) -> Result<(), Error> {
        while let Some(object) = objects.next().await? {
            self.write_object(wrap, &object).await?;
        }
        Ok(())
    }

    async fn follow(
        &self,
        name: &str,
        mut wrap: Option<Wrap>,
        mut subscription: Subscribed,
        mut steps: mpsc::Receiver<Step>,
        mut sequencer: Sequencer,
    ) -> Result<(), Error> {
        let mut written = 0;
        // Until when what is missing is waited for.
        let mut patience = None;
        let mut last_out = Instant::now();
        let mut over = std::pin::pin!(subscription.done());
        let (mut is_over, mut last) = (false, None);
        loop {
            let mut force = false;
            tokio::select! {
                biased;
                step = steps.recv() => match step {
                    Some(step) => sequencer.push(step),
                    None => {
                        while let Some(object) = sequencer.pop(true) {
                            self.write_object(&mut wrap, &object).await?;
                        }
                        return early(name, last).map_or(Ok(()), Err);
                    }
                },
                done = &mut over, if !is_over => {
                    (is_over, last) = (true, done?);
                    // What is queued still comes out.
                    steps.close();
                }
                () = until(patience) => force = true,
            }
            while let Some(object) = sequencer.pop(force) {
                (force, patience, last_out) = (false, None, Instant::now());
                self.write_object(&mut wrap, &object).await?;
                written += 1;
                if self.options.count.is_some_and(|count| written >= count) {
                    return Ok(());
                }
            }
            if sequencer.is_waiting() {
                patience.get_or_insert_with(|| {
                    let was_silent = last_out.elapsed() > PATIENCE;
                    Instant::now() + if was_silent { PATIENCE_AFTER_SILENCE } else { PATIENCE }
                });
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
