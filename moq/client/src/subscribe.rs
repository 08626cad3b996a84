//! Plays a broadcast, or measures how it arrives.

use std::collections::HashMap;
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

use crate::again::{Pause, RelayList};
use crate::alternates::{self, Alternates, SubscribedAlternates};
use crate::catch_up::CatchUp;
use crate::media::{self, CATALOG, INIT, MoqPubCatalog, PlayedTrack, Playlist, TrackChoice, Wrap, playable};
use crate::object::{ObjectStream, ReceivedObject};
use crate::order::Sequencer;
use crate::receive::{ObjectReceiver, ObjectSink, TrackEvent};
use crate::session::{self, Remote, Session, SessionConnectError};
use crate::stats::{ObjectArrival, ObjectFigures, StatsReport};

/// Largest number of objects that wait in a player's queue for one track.
const QUEUE: usize = 256;
/// Default of [`SubscribeOptions::skip_after`].
const SKIP_AFTER: Duration = Duration::from_secs(1);
/// Longest time that a player waits for a missing group if it has written no object for longer than
/// [`SubscribeOptions::skip_after`]. The missing group was then most likely published during that time, in which
/// nothing arrived.
const SKIP_AFTER_SILENCE: Duration = Duration::from_millis(200);
/// Longest time for closing the session after the subscriber was told to stop.
const LEAVING: Duration = Duration::from_secs(3);
/// Time after a redirection by GOAWAY, or the loss of a session, for which the next session fetches what was missed, as
/// relays keep objects for this time by default. It also waits that long for a track that its relay does not know yet:
/// the track's publisher may reach that relay later than this subscriber.
const ARRIVAL: Duration = Duration::from_secs(30);
/// Longest time to wait for the catalog, from which track names are added to an error message.
const CATALOG_WAIT: Duration = Duration::from_secs(2);
/// The track that is measured if the user specifies none.
const MEASURED_TRACK: &str = "objects";

/// The tracks to subscribe to, and the relay.
///
/// ```
/// use millrace_client::session::{Remote, parse_url};
/// use millrace_client::{subscribe::SubscribeOptions, tls::CertificateTrust};
/// use millrace_moq::Namespace;
///
/// let remote = Remote::new(parse_url("moqt://relay.example/")?, CertificateTrust::System);
/// let mut options = SubscribeOptions::new(remote, Namespace::from_path("live/bbb")?);
/// // One track, from three groups before the current one on.
/// options.track = Some("video".into());
/// options.join_groups = Some(3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct SubscribeOptions {
    /// The relay from which the broadcast is received.
    pub remote: Remote,
    /// The broadcast's name.
    pub namespace: Namespace,
    /// The only track to subscribe to. If it is `None`, `catalog` and `choice` determine the tracks.
    pub track: Option<String>,
    /// Whether to take the names of the tracks from the broadcast's catalog.
    pub catalog: bool,
    /// The user's selection of tracks to play.
    pub choice: TrackChoice,
    /// Whether to subscribe to all of a track's alternates in the catalog. The relay then sends each group from the
    /// best alternate for which the path has enough capacity (draft-wilaw-moq-moqt-ssts).
    pub adaptive: bool,
    /// Number of past groups to receive in addition to the track's current group. `None`: receive only new objects.
    pub join_groups: Option<u64>,
    /// The range to fetch, instead of subscribing. The largest object ID means the whole group.
    pub fetch: Option<(Location, Location)>,
    /// The filter of the objects to subscribe to.
    pub filter: Option<Filter>,
    /// Priority of the subscription's objects; objects with lower values are sent first.
    pub priority: Option<u8>,
    /// The order in which groups are sent.
    pub group_order: Option<GroupOrder>,
    /// Number of objects after which each subscriber stops.
    pub count: Option<u64>,
    /// Longest time that a player waits for a missing group after a later group has arrived.
    pub skip_after: Duration,
    /// Whether to keep a record of each object's arrival, in [`Measured::series`].
    pub series: bool,
    /// Whether to connect again when the session ends, and to keep trying when none can be established or the track
    /// does not exist.
    pub reconnect: bool,
}

impl SubscribeOptions {
    /// Makes options for subscribing to a whole broadcast, from its current group on.
    pub fn new(remote: Remote, namespace: Namespace) -> Self {
        Self {
            remote,
            namespace,
            track: None,
            catalog: false,
            choice: TrackChoice::default(),
            adaptive: false,
            join_groups: None,
            fetch: None,
            filter: None,
            priority: None,
            group_order: None,
            count: None,
            skip_after: SKIP_AFTER,
            series: false,
            reconnect: false,
        }
    }

    /// Returns the options for a session that replaces an earlier one. The subscription then begins with the next whole
    /// group, so that a decoder can continue, unless it goes on [where the earlier one ended](Self::may_catch_up).
    fn to_go_on(&self) -> Self {
        let filter = self.filter.or(Some(Filter::NEXT_GROUP));
        Self { join_groups: None, filter, ..self.clone() }
    }

    /// Reports whether a session that replaces an earlier one can fetch what the earlier one has left out. It cannot if
    /// the user has chosen the objects, or the relay chooses among renditions.
    fn may_catch_up(&self) -> bool {
        let is_live = matches!(self.filter, None | Some(Filter::NEXT_GROUP | Filter::NextObject));
        is_live && !self.adaptive && self.fetch.is_none()
    }

    /// Returns the parameters of a SUBSCRIBE. With `next`, the objects from there on that were published already are
    /// fetched.
    fn parameters(&self, receiver: &ObjectReceiver, next: Option<Location>) -> Parameters {
        let parameters = Parameters {
            subscriber_priority: self.priority,
            filter: next.map(|_| Filter::NextObject).or(self.filter),
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

/// The reason why a broadcast can no longer be received.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error(transparent)]
    Connect(#[from] SessionConnectError),
    #[error("the session ended: {0}")]
    Ended(#[source] session::Error),
    #[error(transparent)]
    Request(#[from] session::Error),
    #[error("no track {name}: {source}{}", hint(source, others, *is_named))]
    NoTrack {
        name: String,
        source: session::Error,
        /// Names of the broadcast's tracks, as far as the catalog is known.
        others: Vec<String>,
        /// Whether the user has specified the name of the missing track.
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
        "the relay does not support --adaptive: its switching sets are off (millrace relay --switching-sets), or it has none"
    )]
    NoSwitching,
    #[error("the broadcast has nothing to play: neither video nor audio")]
    NothingToPlay,
    #[error(transparent)]
    Media(#[from] media::Error),
    #[error("cannot write the media: {0}")]
    Write(#[source] io::Error),
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("a task of the subscriber failed: {0}")]
    Task(#[from] tokio::task::JoinError),
}

impl Error {
    /// Reports whether the error says that a track ended early.
    fn is_early(&self) -> bool {
        match self {
            Self::Early { .. } => true,
            Self::Play { source, .. } => source.is_early(),
            _ => false,
        }
    }

    /// Returns the session's error, if this error was caused by a session error.
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

    /// Reports whether the error says that the track has no publisher at present.
    fn is_without_publisher(&self) -> bool {
        matches!(self, Self::NoTrack { source, .. } if is_absent(source))
    }

    /// Reports whether a new session may succeed after this error.
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

/// Reports whether the error means that the track has no publisher at present: the relay knows none, has waited for one in
/// vain, or has lost the one that it asked.
fn is_absent(error: &session::Error) -> bool {
    let absent = [code::Request::DOES_NOT_EXIST, code::Request::TIMEOUT, code::Request::INTERNAL_ERROR];
    matches!(error, session::Error::Refused(refused) if absent.contains(&refused.code))
}

/// Returns a hint for the user about which track to specify instead.
fn hint(source: &session::Error, others: &[String], is_named: bool) -> String {
    match others {
        _ if !is_absent(source) => String::new(),
        [] if is_named => "; there is no catalog either: the broadcast may not be published yet".to_owned(),
        [] => {
            "; there is no catalog either: the broadcast may not be published yet, or its tracks have other names (--track)"
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

/// Statistics of all subscribers together, and of each one.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// Statistics of all subscribers together.
    #[serde(flatten)]
    pub total: StatsReport,
    /// Statistics of each subscriber.
    pub subscribers: Vec<StatsReport>,
    /// Records by subscriber of its objects' arrivals, if [`SubscribeOptions::series`] is set.
    #[serde(skip)]
    pub series: Vec<Vec<ObjectArrival>>,
}

/// A callback that is called each second with the statistics so far, from the first established subscription on. If the
/// callback returns an error, the measurement ends.
pub type OnSecond<'a> = &'a mut dyn FnMut(&StatsReport) -> io::Result<()>;

/// Runs `subscribers` subscribers, each with its own connection, until their tracks end, they have received the
/// configured number of objects, or `stop` completes.
///
/// # Errors
/// Fails if a subscriber cannot connect or subscribe, or its session ends. With [`SubscribeOptions::reconnect`] it
/// fails only on errors that a new session cannot resolve.
pub async fn measure(
    options: &SubscribeOptions,
    subscribers: usize,
    stop: impl Future<Output = ()>,
    mut on_second: Option<OnSecond<'_>>,
) -> Result<Measured, Error> {
    let new = || if options.series { ObjectFigures::new().with_series() } else { ObjectFigures::new() };
    let figures: Vec<_> = (0..subscribers).map(|_| Arc::new(Mutex::new(new()))).collect();
    let (leave, left) = watch::channel(false);
    let (subscribed, is_subscribed) = watch::channel(false);
    let mut running = JoinSet::new();
    for figures in &figures {
        let figures = figures.clone();
        let subscribed = subscribed.clone();
        let options = options.clone();
        let left = left.clone();
        running.spawn(async move {
            let once =
                |attempt, relays| count(attempt, relays, figures.clone(), subscribed.clone(), left.clone());
            retry_session(&options, left.clone(), once).await
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
                    on_second(&ObjectFigures::total(&now(&figures), false)).map_err(Error::Write)?;
                }
            }
            () = &mut stop => break,
        }
    }
    let figures = now(&figures);
    let is_over = || ended == subscribers || figures.iter().all(ObjectFigures::is_published);
    let is_end = options.count.is_none() && is_over();
    leave.send_replace(true);
    while let Some(result) = running.join_next().await {
        result??;
    }
    let subscribers = figures.iter().map(|figures| figures.report(is_end)).collect();
    let series = figures.iter().map(|figures| figures.series().to_vec()).collect();
    Ok(Measured { total: ObjectFigures::total(&figures, is_end), subscribers, series })
}

/// The reason why a subscriber's session ended, other than an error.
enum SubscriberEnd {
    /// All requested objects have arrived, the tracks have ended, or the subscriber was told to stop.
    Over,
    /// The relay sent GOAWAY or is silent, and the session to continue with is established.
    Moved,
}

/// The relays of a subscriber, which one session of it after the other uses.
type SharedRelays = Arc<tokio::sync::Mutex<RelayList>>;

/// How a session ended, if another one goes on after it.
#[derive(Clone, Copy, PartialEq)]
enum Departure {
    /// The relay sent GOAWAY or is silent.
    Moved,
    /// The connection was lost.
    Lost,
}

/// The options of one session of a subscriber.
struct Attempt {
    options: SubscribeOptions,
    /// How an earlier session ended within the last [`ARRIVAL`]. This session may fetch what that one has missed. `None` if
    /// there is no such session.
    after: Option<Departure>,
}

impl Attempt {
    /// Returns `next`, the location from which on objects of a track are missing, if this session can go on there.
    fn go_on_at(&self, next: Option<Location>) -> Option<Location> {
        next.filter(|_| self.after.is_some() && self.options.may_catch_up())
    }

    /// Returns `next`, or `None` if the publisher was restarted while the subscriber had no session, and numbers its groups
    /// from the beginning. `last` is the track's largest location.
    fn still_at(&self, next: Option<Location>, last: Option<Location>) -> Option<Location> {
        let is_near = |next: &Location| last.is_some_and(|last| last.group.saturating_add(1) >= next.group);
        next.filter(|next| self.after == Some(Departure::Moved) || is_near(next))
    }
}

/// Runs sessions one after the other, until all requested objects have arrived, or the subscriber is told to stop.
/// `left` becomes true when the subscriber has to stop.
async fn retry_session<F: Future<Output = Result<SubscriberEnd, Error>>>(
    options: &SubscribeOptions,
    mut left: watch::Receiver<bool>,
    once: impl Fn(Attempt, SharedRelays) -> F,
) -> Result<(), Error> {
    let mut pause = Pause::new();
    let mut now = Attempt { options: options.clone(), after: None };
    let relays = Arc::new(tokio::sync::Mutex::new(RelayList::new(&options.remote)));
    let mut gone: Option<(Departure, Instant)> = None;
    loop {
        let result = tokio::select! {
            result = once(now, Arc::clone(&relays)) => result,
            // The timeout `LEAVING` ends an attempt to connect. An established session watches `left` itself, and
            // closes before the timeout.
            () = async {
                let _ = left.wait_for(|left| *left).await;
                tokio::time::sleep(LEAVING).await;
            } => return Ok(()),
        };
        let departure = match &result {
            Ok(SubscriberEnd::Moved) => Some(Departure::Moved),
            Err(error) if matches!(error.session(), Some(session::Error::Closed(_))) => Some(Departure::Lost),
            _ => None,
        };
        gone = departure.map(|how| (how, Instant::now())).or(gone);
        let after = gone.filter(|(_, at)| at.elapsed() < ARRIVAL).map(|(how, _)| how);
        now = Attempt { options: options.to_go_on(), after };
        let next = match result {
            Ok(SubscriberEnd::Over) => return Ok(()),
            Ok(SubscriberEnd::Moved) => continue,
            Err(error) if error.is_without_publisher() && after.is_some() => {
                let next = pause.next_pause();
                tracing::warn!(
                    "cannot subscribe: {error}; the track's publisher may arrive later, trying again in {next:?}"
                );
                next
            }
            // Without reconnecting, an early end of the session is no error: the result covers what was received before
            // it.
            Err(error) if !options.reconnect && error.is_early() => {
                tracing::warn!("the subscription ended early: {error}");
                return Ok(());
            }
            Err(error) if !options.reconnect || !error.may_pass() => return Err(error),
            Err(error) => {
                if !matches!(error, Error::Connect(_)) {
                    relays.lock().await.leave(error.session());
                }
                let next = pause.after_error(error.session());
                match next.is_zero() {
                    true => tracing::warn!("the relay was restarted, connecting again: {error}"),
                    false => tracing::warn!("the subscription failed: {error}; trying again in {next:?}"),
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

fn now(figures: &[Arc<Mutex<ObjectFigures>>]) -> Vec<ObjectFigures> {
    figures.iter().map(|figures| figures.lock().clone()).collect()
}

/// Runs one session of a subscriber that counts objects.
async fn count(
    attempt: Attempt,
    relays: SharedRelays,
    figures: Arc<Mutex<ObjectFigures>>,
    subscribed: watch::Sender<bool>,
    left: watch::Receiver<bool>,
) -> Result<SubscriberEnd, Error> {
    let session = relays.lock().await.connect().await?;
    let receiver = ObjectReceiver::new(session.clone());
    let work = async {
        let options = &attempt.options;
        let name = measured(&receiver, options).await?;
        let track = options.track(&name)?;
        if let Some(kind) = options.fetch_kind(track.clone()) {
            let objects = receiver.fetch(kind, options.order()).await?;
            subscribed.send_replace(true);
            return count_fetch(objects, &figures).await;
        }
        let next = {
            // The earlier session may still deliver objects, so the state is read and changed at once.
            let received = &mut figures.lock().received;
            let next = attempt.go_on_at(received.first_missing());
            next.iter().for_each(|_| received.go_on());
            next
        };
        let sink = ObjectSink::Figures(figures.clone());
        let mut subscription = subscribe(&receiver, options, next, &name, sink).await?;
        subscribed.send_replace(true);
        let last = subscription.largest();
        let goes_on_at = attempt.still_at(next, last);
        if goes_on_at != next {
            figures.lock().received.begin_anew();
        }
        if let Some(mut missed) = CatchUp::new(&receiver, track, goes_on_at, last) {
            let next = || figures.lock().received.first_missing();
            while let Some(object) = missed.next(next()).await? {
                let mut figures = figures.lock();
                if figures.received.insert(object.location) {
                    figures.object(&object.payload, &mut Default::default());
                }
            }
        }
        if let (Some(groups_back), Some(first)) = (options.join_groups, subscription.first())
            && let Some(objects) = receiver.join(first, groups_back).await?
        {
            count_fetch(objects, &figures).await?;
        }
        tokio::select! {
            done = subscription.done() => if let Some(error) = early_end_error(&name, done?) {
                return Err(error);
            },
            () = wait_for_count(&figures, options.count) => subscription.cancel(),
        }
        Ok(())
    };
    receive_during(session, &relays, receiver.clone(), work, left).await
}

/// Returns an error if PUBLISH_DONE says that a track ended early, because its publisher or the relay failed or was
/// overloaded.
fn early_end_error(name: &str, done: Option<PublishDone>) -> Option<Error> {
    tracing::debug!(last = ?done, "a subscribed track has ended");
    let may_go_on = [
        code::Done::INTERNAL_ERROR,
        code::Done::GOING_AWAY,
        code::Done::TOO_FAR_BEHIND,
        code::Done::EXCESSIVE_LOAD,
    ];
    let PublishDone { reason, .. } = done.filter(|done| may_go_on.contains(&done.code))?;
    Some(Error::Early { name: name.to_owned(), reason })
}

/// Returns the track to measure: the one that the user specified, the first one in the catalog, or the track of
/// generated objects.
async fn measured(receiver: &ObjectReceiver, options: &SubscribeOptions) -> Result<String, Error> {
    if let Some(name) = &options.track {
        return Ok(name.clone());
    }
    let name = match options.catalog {
        true => {
            read_catalog(receiver, options).await?.tracks.into_iter().next().ok_or(Error::NothingToPlay)?.name
        }
        false => MEASURED_TRACK.to_owned(),
    };
    tracing::info!(track = name, "measuring this track; name another with --track");
    Ok(name)
}

async fn count_fetch(mut objects: ObjectStream, figures: &Mutex<ObjectFigures>) -> Result<(), Error> {
    while let Some(object) = objects.next().await? {
        let mut figures = figures.lock();
        figures.received.insert(object.location);
        // A FETCH response interleaves the subgroups, so the order within a subgroup cannot be checked.
        figures.object(&object.payload, &mut Default::default());
    }
    figures.lock().stream(false);
    Ok(())
}

/// Waits until `count` objects have arrived. Without a count, it never returns.
async fn wait_for_count(figures: &Mutex<ObjectFigures>, count: Option<u64>) {
    let Some(count) = count else { return std::future::pending().await };
    let mut tick = tokio::time::interval(Duration::from_millis(10));
    while figures.lock().delivered() < count {
        tick.tick().await;
    }
}

/// Writes a broadcast's media, or one track's payloads, in order until its end, or until `stop` completes.
///
/// # Errors
/// Fails if the broadcast cannot be received, understood or written. With [`SubscribeOptions::reconnect`] it fails only
/// on errors that a new session cannot resolve.
pub async fn play(
    options: &SubscribeOptions,
    out: impl AsyncWrite + Send + Unpin + 'static,
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let (leave, left) = watch::channel(false);
    let out = Arc::new(tokio::sync::Mutex::new(out));
    let written = Arc::default();
    let played = Arc::default();
    let once = |attempt: Attempt, relays: SharedRelays| {
        let out = Arc::clone(&out);
        let written = Arc::clone(&written);
        let played = Arc::clone(&played);
        let left = left.clone();
        async move {
            let session = relays.lock().await.connect().await?;
            let receiver = ObjectReceiver::new(session.clone());
            let player =
                TrackPlayer { attempt: Arc::new(attempt), receiver: receiver.clone(), out, written, played };
            let work = async {
                match player.attempt.options.track.clone() {
                    Some(track) => player.track(PlayedTrack::plain(track)).await,
                    None => player.media().await,
                }
            };
            receive_during(session, &relays, receiver, work, left).await
        }
    };
    let mut playing = std::pin::pin!(retry_session(options, left.clone(), once));
    tokio::select! {
        played = &mut playing => return played,
        () = stop => drop(leave.send_replace(true)),
    }
    playing.await
}

/// Runs `receiver` on the session until the future `work` completes, the session ends, another session is ready to take
/// over, or `left` becomes true. Then it closes the session.
async fn receive_during(
    session: Arc<Session>,
    relays: &SharedRelays,
    receiver: Arc<ObjectReceiver>,
    work: impl Future<Output = Result<(), Error>>,
    mut left: watch::Receiver<bool>,
) -> Result<SubscriberEnd, Error> {
    let serving = tokio::spawn(session.clone().run(receiver));
    // After the relay has sent GOAWAY, the publisher may leave the relay before this subscriber does. The broadcast
    // then continues at another relay, so the early end of the track is ignored.
    let work = async {
        match work.await {
            Err(error) if error.is_early() && session.goaway().borrow().is_some() => {
                std::future::pending().await
            }
            result => result,
        }
    };
    let mut relays = relays.lock().await;
    let result = tokio::select! {
        result = work => result.map(|()| SubscriberEnd::Over),
        error = serving => Err(Error::Ended(error?)),
        () = relays.successor(&session) => Ok(SubscriberEnd::Moved),
        _ = left.wait_for(|left| *left) => Ok(SubscriberEnd::Over),
    };
    session.close(code::Session::NO_ERROR, "the subscriber leaves");
    match result {
        // A silent relay does not confirm the close, and the next session must not wait for that.
        Ok(SubscriberEnd::Moved) => drop(tokio::spawn(async move { session.closed().await })),
        _ => session.closed().await,
    }
    result
}

/// Subscribes to a track, or to all its alternates.
async fn subscribe(
    receiver: &ObjectReceiver,
    options: &SubscribeOptions,
    next: Option<Location>,
    name: &str,
    sink: ObjectSink,
) -> Result<SubscribedAlternates, Error> {
    let alternates = match options.adaptive {
        true if !receiver.session().switches().await => return Err(Error::NoSwitching),
        true => {
            let catalog = read_msf(receiver, options).await?;
            let alternates = Alternates::from_catalog(&catalog, &options.namespace, name);
            if alternates.is_none() {
                tracing::info!(track = name, "the catalog has no other rendition with a bitrate");
            }
            alternates
        }
        false => None,
    };
    let track = options.track(name)?;
    let parameters = options.parameters(receiver, next);
    match alternates::subscribe(receiver, track, alternates.as_ref(), parameters, sink).await {
        Ok(subscribed) => Ok(subscribed),
        Err(source) => Err(no_track(receiver, options, name, source).await),
    }
}

/// Makes the error for a track that could not be received because of `source`. It lists the existing tracks if the
/// catalog can be read.
async fn no_track(
    receiver: &ObjectReceiver,
    options: &SubscribeOptions,
    name: &str,
    source: session::Error,
) -> Error {
    let mut others = Vec::new();
    if is_absent(&source) && name != CATALOG {
        let catalog = tokio::time::timeout(CATALOG_WAIT, read_catalog(receiver, options)).await;
        let catalog = catalog.ok().and_then(Result::ok);
        others = catalog.into_iter().flat_map(|catalog| catalog.tracks).map(|track| track.name).collect();
    }
    Error::NoTrack { name: name.to_owned(), source, others, is_named: options.track.is_some() }
}

async fn read_catalog(receiver: &ObjectReceiver, options: &SubscribeOptions) -> Result<MoqPubCatalog, Error> {
    let catalog = first_object(receiver, options, CATALOG).await?;
    serde_json::from_slice(&catalog).map_err(Error::Catalog)
}

async fn read_msf(receiver: &ObjectReceiver, options: &SubscribeOptions) -> Result<msf::MsfCatalog, Error> {
    let catalog = first_object(receiver, options, msf::CATALOG).await?;
    msf::MsfCatalog::parse(&catalog).map_err(Error::Catalog)
}

/// Returns the payload of the only object of a track.
async fn first_object(
    receiver: &ObjectReceiver,
    options: &SubscribeOptions,
    name: &str,
) -> Result<Bytes, Error> {
    let (queue, mut steps) = mpsc::channel(QUEUE);
    let track = options.track(name)?;
    let subscribed = receiver.subscribe(track, Parameters::default(), ObjectSink::Queue(queue));
    let mut subscription = match subscribed.await {
        Ok(subscription) => subscription,
        // The future is boxed, because `no_track` may read the catalog, which calls this function again.
        Err(source) => return Err(Box::pin(no_track(receiver, options, name, source)).await),
    };
    let mut over = std::pin::pin!(subscription.done());
    let mut is_over = false;
    let payload = loop {
        tokio::select! {
            biased;
            step = steps.recv() => match step {
                Some(TrackEvent::Object { object, .. } | TrackEvent::Datagram(object)) => break Some(object.payload),
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

struct TrackPlayer<O> {
    attempt: Arc<Attempt>,
    receiver: Arc<ObjectReceiver>,
    out: Arc<tokio::sync::Mutex<O>>,
    /// The init segment that was written to the output, by this session or an earlier one.
    written: Arc<Mutex<Option<Bytes>>>,
    /// The location of the last object of each track that was written to the output, by this session or an earlier one.
    played: Arc<Mutex<HashMap<String, Location>>>,
}

impl<O> Clone for TrackPlayer<O> {
    fn clone(&self) -> Self {
        let receiver = self.receiver.clone();
        let out = self.out.clone();
        let written = self.written.clone();
        let played = self.played.clone();
        Self { attempt: self.attempt.clone(), receiver, out, written, played }
    }
}

impl<O: AsyncWrite + Send + Unpin + 'static> TrackPlayer<O> {
    fn options(&self) -> &SubscribeOptions {
        &self.attempt.options
    }

    async fn media(&self) -> Result<(), Error> {
        let mut next = Some(self.playlist().await?);
        while let Some(Playlist { init, tracks }) = next {
            let is_new = self.written.lock().replace(init.clone()) != Some(init.clone());
            if is_new {
                self.write(init).await?;
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

    /// Returns the tracks to play after all tracks in `before` have ended, if there are any. If the publisher's input
    /// has restarted with new tracks, the catalog lists the new tracks.
    async fn successor(&self, before: &[String]) -> Option<Playlist> {
        if self.options().fetch.is_some() || self.options().count.is_some() {
            return None;
        }
        let catalog =
            tokio::time::timeout(CATALOG_WAIT, read_msf(&self.receiver, self.options())).await.ok()?.ok()?;
        let playlist = Playlist::from_catalog(&catalog, &self.options().choice).ok()??;
        let is_known = |part: &PlayedTrack| before.contains(&part.name);
        (!playlist.tracks.iter().any(is_known)).then_some(playlist)
    }

    /// Returns the tracks to play. They are found by moq-pub's track names or moq-pub's catalog. If the broadcast has
    /// neither, or the user has selected tracks, they are found by the MSF catalog.
    async fn playlist(&self) -> Result<Playlist, Error> {
        if !self.options().choice.is_default() {
            let catalog = read_msf(&self.receiver, self.options()).await?;
            return Playlist::from_catalog(&catalog, &self.options().choice)?.ok_or(Error::NothingToPlay);
        }
        let known = self.as_moq_pub_does().await;
        if !matches!(&known, Err(Error::NoTrack { source, .. }) if is_absent(source)) {
            return known;
        }
        match tokio::time::timeout(CATALOG_WAIT, read_msf(&self.receiver, self.options())).await {
            Ok(Ok(catalog)) => {
                Playlist::from_catalog(&catalog, &self.options().choice)?.ok_or(Error::NothingToPlay)
            }
            _ => known,
        }
    }

    async fn as_moq_pub_does(&self) -> Result<Playlist, Error> {
        let catalog = match self.options().catalog {
            true => Some(read_catalog(&self.receiver, self.options()).await?),
            false => None,
        };
        let described = |position: usize| catalog.as_ref().and_then(|catalog| catalog.tracks.get(position));
        let init = described(0).and_then(|track| track.init_track.as_deref()).unwrap_or(INIT);
        let init = first_object(&self.receiver, self.options(), init).await?;
        let tracks = playable(&init)?;
        if tracks.is_empty() {
            return Err(Error::NothingToPlay);
        }
        let name = |(position, id): (usize, u32)| {
            PlayedTrack::plain(
                described(position).map_or_else(|| format!("{id}.m4s"), |track| track.name.clone()),
            )
        };
        Ok(Playlist { init, tracks: tracks.into_iter().map(name).collect() })
    }

    /// Returns the location after the last object of the track `name` that was written.
    fn next_of(&self, name: &str) -> Option<Location> {
        self.played.lock().get(name).map(|last| Filter::NextObject.start(Some(*last)))
    }

    /// Writes an object of the track `name` unchanged, or converted from LOC to an MP4 fragment.
    async fn write_object(
        &self,
        name: &str,
        wrap: &mut Option<Wrap>,
        object: &ReceivedObject,
    ) -> Result<(), Error> {
        let payload = match wrap {
            Some(wrap) => wrap.fragment(object.location.object == 0, &object.payload)?,
            None => object.payload.clone(),
        };
        self.played.lock().insert(name.to_owned(), object.location);
        self.write(payload).await
    }

    /// Writes all of `payload`, even if the returned future is dropped: the next session goes on behind it.
    async fn write(&self, payload: Bytes) -> Result<(), Error> {
        let out = Arc::clone(&self.out);
        let written = tokio::spawn(async move {
            let mut out = out.lock().await;
            out.write_all(&payload).await?;
            out.flush().await
        });
        written.await?.map_err(Error::Write)
    }

    /// Writes one track to the output until it ends.
    async fn track(self, PlayedTrack { name, mut wrap }: PlayedTrack) -> Result<(), Error> {
        let track = self.options().track(&name)?;
        if let Some(kind) = self.options().fetch_kind(track.clone()) {
            let objects = self.receiver.fetch(kind, self.options().order()).await;
            let objects = objects.map_err(|source| Error::Fetch { name: name.clone(), source })?;
            return self.write_all(&name, &mut wrap, objects).await;
        }
        let next = self.attempt.go_on_at(self.next_of(&name));
        let (queue, steps) = mpsc::channel(QUEUE);
        let sink = ObjectSink::Queue(queue);
        let mut subscription = subscribe(&self.receiver, self.options(), next, &name, sink).await?;
        let last = subscription.largest();
        let next = self.attempt.still_at(next, last);
        let mut sequencer = Sequencer::default();
        next.into_iter().for_each(|next| sequencer.go_on_at(next));
        if let Some(mut missed) = CatchUp::new(&self.receiver, track, next, last) {
            while let Some(object) = missed.next(self.next_of(&name)).await? {
                self.write_object(&name, &mut wrap, &object).await?;
            }
            sequencer.go_on_at(missed.end());
        }
        // Without a filter, some relays begin with the object after the largest one, and others with the beginning of
        // its group.
        sequencer.may_begin_at(self.options().filter.unwrap_or(Filter::NextObject).start(last));
        if let (Some(groups_back), Some(first)) = (self.options().join_groups, subscription.first()) {
            let joined = self.receiver.join(first, groups_back).await;
            let joined = joined.map_err(|source| Error::Join { name: name.clone(), source })?;
            if let Some(objects) = joined {
                self.write_all(&name, &mut wrap, objects).await?;
                last.into_iter().for_each(|last| sequencer.skip_to(last));
            }
        }
        let followed = self.follow(&name, wrap, subscription, steps, sequencer).await;
        followed.map_err(|source| Error::Play { name, source: Box::new(source) })
    }

    /// Writes the objects of a FETCH response.
    async fn write_all(
        &self,
        name: &str,
        wrap: &mut Option<Wrap>,
        mut objects: ObjectStream,
    ) -> Result<(), Error> {
        while let Some(object) = objects.next().await? {
            self.write_object(name, wrap, &object).await?;
        }
        Ok(())
    }

    async fn follow(
        &self,
        name: &str,
        mut wrap: Option<Wrap>,
        mut subscription: SubscribedAlternates,
        mut steps: mpsc::Receiver<TrackEvent>,
        mut sequencer: Sequencer,
    ) -> Result<(), Error> {
        let mut written = 0;
        // The time at which missing objects are skipped, if any object waits for a missing one.
        let mut patience = None;
        let mut last_out = Instant::now();
        let mut over = std::pin::pin!(subscription.done());
        let mut is_over = false;
        let mut last = None;
        loop {
            let mut force = false;
            tokio::select! {
                biased;
                step = steps.recv() => match step {
                    Some(step) => sequencer.push(step),
                    None => {
                        while let Some(object) = sequencer.pop(true) {
                            self.write_object(name, &mut wrap, &object).await?;
                        }
                        return early_end_error(name, last).map_or(Ok(()), Err);
                    }
                },
                done = &mut over, if !is_over => {
                    (is_over, last) = (true, done?);
                    // Closing the queue keeps the objects in it, which are still written.
                    steps.close();
                }
                () = wait_until(patience) => force = true,
            }
            while let Some(object) = sequencer.pop(force) {
                (force, patience, last_out) = (false, None, Instant::now());
                self.write_object(name, &mut wrap, &object).await?;
                written += 1;
                if self.options().count.is_some_and(|count| written >= count) {
                    return Ok(());
                }
            }
            if sequencer.is_waiting() {
                patience.get_or_insert_with(|| {
                    let skip_after = self.options().skip_after;
                    let was_silent = last_out.elapsed() > skip_after;
                    Instant::now() + if was_silent { skip_after.min(SKIP_AFTER_SILENCE) } else { skip_after }
                });
            } else {
                patience = None;
            }
        }
    }
}

async fn wait_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
