//! Publishes a broadcast to a relay: generated objects, or fragmented MP4.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use millrace_moq::Namespace;
use millrace_moq::name::NameError;
use millrace_moq::property::TrackProperties;
use serde::Serialize;
use tokio::io::AsyncRead;
use tokio::sync::watch;

use crate::again::RelayList;
use crate::broadcast::{Broadcast, BroadcastTrack, History};
use crate::generate::{Generated, Generator};
pub use crate::keep::Error as SessionError;
use crate::keep::{BroadcastPublisher, ServingSession};
use crate::media::{self, Cut, FirstFragment, MediaPublisher, Packaging, Renditions, Stopped, play};
use crate::session::Remote;

/// The broadcast to publish, the relay, and how to publish.
///
/// ```
/// use std::time::Duration;
/// use millrace_client::broadcast::History;
/// use millrace_client::generate::{Generator, Settings, ObjectShape};
/// use millrace_client::publish::{Input, PublishOptions};
/// use millrace_client::session::{Remote, parse_url};
/// use millrace_client::tls::CertificateTrust;
/// use millrace_moq::Namespace;
///
/// # fn example() -> Result<PublishOptions, Box<dyn std::error::Error>> {
/// // 30 objects of 1000 bytes per second, one stream for each group of 30.
/// let generator = Generator::new(Settings {
///     object_bytes: 1000,
///     sizes: Vec::new(),
///     rate_hz: 30.0,
///     objects_per_group: 30,
///     duration: None,
///     priority_pattern: vec![128],
///     shape: ObjectShape::Groups,
/// })?;
/// let options = PublishOptions {
///     remote: Remote::new(parse_url("moqt://relay.example/")?, CertificateTrust::System),
///     namespace: Namespace::from_path("live/test")?,
///     input: Input::Generated { generator, track: "objects".to_owned() },
///     push: false,
///     first_group: None,
///     replica: None,
///     history: History { max_age: Duration::from_secs(10), ..History::default() },
///     wait: true,
///     reconnect: true,
/// };
/// // Pass them to `publish`, with a future that ends the broadcast.
/// # Ok(options)
/// # }
/// # example().unwrap();
/// ```
pub struct PublishOptions {
    /// The relay at which the broadcast is published.
    pub remote: Remote,
    /// The broadcast's name.
    pub namespace: Namespace,
    /// The media or objects to publish.
    pub input: Input,
    /// Whether to push the tracks with PUBLISH, instead of announcing the namespace and waiting for subscriptions.
    pub push: bool,
    /// The ID of the first group of all tracks; `None` for the time in milliseconds since 1970. Redundant publishers of
    /// the same broadcast need the same ID.
    pub first_group: Option<u64>,
    /// The expected duration of a group, to number groups by media time instead. Several publishers of the same media
    /// then number alike, and a relay uses them as one (see [`MediaPublisher::numbered_by_time`]). Generated objects
    /// are numbered by this host's clock ([`Generator::numbered_by_time`]).
    pub replica: Option<Duration>,
    /// Limits on the objects of a track that are kept for subscribers that lag or join late, and for FETCH.
    pub history: History,
    /// Whether to wait for the first subscriber before publishing.
    pub wait: bool,
    /// Whether to connect again when the session ends, and to keep trying when none can be established.
    pub reconnect: bool,
}

/// The media or objects to publish.
pub enum Input {
    /// Generated objects.
    Generated {
        /// The generator of the objects.
        generator: Generator,
        /// Name of the track.
        track: String,
    },
    /// Media from one encoder or file.
    Media {
        /// Fragmented MP4.
        reader: Box<dyn AsyncRead + Unpin>,
        /// Whether to publish at the pace of the time stamps, for input that is not live.
        realtime: bool,
        /// The packaging of media in objects.
        packaging: Packaging,
        /// The way in which groups are divided into subgroups.
        cut: Cut,
    },
    /// Renditions of the same media, the best first, published as CMAF at the pace of their time stamps. Only the
    /// best has sound.
    Ladder {
        /// The renditions, the best first.
        renditions: [Encoded; RUNGS],
        /// The way in which groups are divided into subgroups.
        cut: Cut,
    },
}

/// Number of renditions that an [`Input::Ladder`] has.
pub const RUNGS: usize = 3;

/// The output of an encoder.
pub struct Encoded {
    /// A stream of fragmented MP4. All renditions must have key frames at the same times.
    pub reader: Box<dyn AsyncRead + Unpin>,
    /// Bit rate of the rendition's video, in bits per second.
    pub bitrate: u64,
}

/// The reason why publishing ended before the input did.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Name(#[from] NameError),
    #[error(transparent)]
    Media(#[from] media::Error),
    #[error("cannot read the media: {0}")]
    Read(#[source] io::Error),
    #[error("no thread can be started for the generator: {0}")]
    Thread(#[source] io::Error),
    #[error("the generator of objects stopped early")]
    Generator,
    #[error("a task of the publisher failed: {0}")]
    Task(#[from] tokio::task::JoinError),
}

impl From<Stopped> for Error {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Media(error) => Self::Media(error),
            Stopped::Read(error) => Self::Read(error),
        }
    }
}

/// Statistics of the broadcast, and of the packets that carried it.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct PublishReport {
    /// Number and rate of the generated objects, or `None` if media were published. The rate is lower than configured
    /// if the machine is overloaded.
    #[serde(flatten)]
    pub generated: Option<Generated>,
    /// Number of QUIC packets sent.
    pub packets: u64,
    /// Number of QUIC packets lost.
    pub packets_lost: u64,
    /// Number of congestion events on the QUIC connection (packet losses or ECN marks to which congestion control
    /// reacted).
    pub congestion_events: u64,
    /// Congestion window at the end of the broadcast, in bytes.
    pub congestion_window_bytes: u64,
    /// Smoothed round-trip time at the end of the broadcast, in microseconds.
    pub round_trip_us: u64,
}

/// Publishes until the input has ended and all objects are delivered to the subscribers, or until `stop` completes.
///
/// # Errors
/// Fails if the relay cannot be reached or refuses the broadcast, the input cannot be read, or the session ends early.
/// With [`PublishOptions::reconnect`] it fails only on errors that a new session cannot resolve.
pub async fn publish(
    options: PublishOptions,
    stop: impl Future<Output = ()>,
) -> Result<PublishReport, Error> {
    let PublishOptions { remote, namespace, input, push, first_group, replica, history, wait, reconnect } =
        options;
    let broadcast = Broadcast::new(namespace, history);
    // The numbers of replicas are complete.
    let first_group = first_group.or(replica.map(|_| 0));
    first_group.into_iter().for_each(|first| broadcast.number_groups_from(first));
    // The tracks must exist before the broadcast is announced, because subscribers may request them at once.
    let source = TrackSource::new(input, replica, &broadcast)?;
    let (current, sessions) = watch::channel(None);
    let publisher = BroadcastPublisher {
        relays: RelayList::new(&remote),
        broadcast: broadcast.clone(),
        push,
        reconnect,
        first_group,
        current,
    };
    let work = work(source, &broadcast, wait, sessions.clone());
    let generated = tokio::select! {
        result = work => result?,
        error = publisher.run() => return Err(error.into()),
        () = stop => None,
    };
    let Some(ServingSession { session, .. }) = sessions.borrow().clone() else {
        return Ok(PublishReport::default());
    };
    let path = session.connection().stats().path;
    // `publisher.run()` was dropped above, which closes the session. This waits until the peer has received the close.
    session.closed().await;
    Ok(PublishReport {
        generated,
        packets: path.sent_packets,
        packets_lost: path.lost_packets,
        congestion_events: path.congestion_events,
        congestion_window_bytes: path.cwnd,
        round_trip_us: path.rtt.as_micros() as u64,
    })
}

/// Publishes the input to its end, and waits until all of its objects are delivered to the subscribers.
async fn work(
    source: TrackSource,
    broadcast: &Broadcast,
    wait: bool,
    mut sessions: watch::Receiver<Option<ServingSession>>,
) -> Result<Option<Generated>, Error> {
    let mut session = async || {
        let current = sessions.wait_for(Option::is_some).await.ok().and_then(|current| current.clone());
        match current {
            Some(current) => current,
            // `publisher.run()` has ended with an error, which `publish` returns.
            None => std::future::pending().await,
        }
    };
    let first = session().await;
    if wait {
        first.server.subscribed().await;
    }
    let generated = source.run().await?;
    broadcast.end();
    session().await.delivered().await;
    Ok(generated)
}

/// An [`Input`] that has been assigned the tracks on which it is published.
enum TrackSource {
    Generated(Generator, Arc<BroadcastTrack>),
    Media { media: Box<MediaPublisher>, reader: Box<dyn AsyncRead + Unpin>, realtime: bool },
    Ladder(Box<[(MediaPublisher, Box<dyn AsyncRead + Unpin>); RUNGS]>),
}

impl TrackSource {
    fn new(input: Input, replica: Option<Duration>, broadcast: &Arc<Broadcast>) -> Result<Self, NameError> {
        let numbered = |media: MediaPublisher| match replica {
            Some(group) => media.numbered_by_time(group),
            None => media,
        };
        Ok(match input {
            Input::Generated { generator, track } => {
                let properties = TrackProperties::default().encode();
                let generator = if replica.is_some() { generator.numbered_by_time() } else { generator };
                Self::Generated(generator, broadcast.create(&track, properties)?)
            }
            Input::Media { reader, realtime, packaging, cut } => Self::Media {
                media: Box::new(numbered(MediaPublisher::new(broadcast.clone(), packaging, cut)?)),
                reader,
                realtime,
            },
            Input::Ladder { renditions: [best, middle, least], cut } => {
                let shared = Renditions::new(broadcast.clone(), RUNGS, Packaging::Cmaf)?;
                let source = |place, Encoded { reader, bitrate }| {
                    Ok::<_, NameError>((numbered(shared.media(place, Some(bitrate), cut)?), reader))
                };
                Self::Ladder(Box::new([source(0, best)?, source(1, middle)?, source(2, least)?]))
            }
        })
    }

    async fn run(self) -> Result<Option<Generated>, Error> {
        match self {
            Self::Generated(generator, track) => generate(generator, track).await.map(Some),
            Self::Media { media, reader, realtime } => {
                let pace = realtime.then(FirstFragment::new);
                play(*media, reader, pace.as_ref()).await?;
                Ok(None)
            }
            Self::Ladder(ladder) => {
                let [best, middle, least] = *ladder;
                let pace = FirstFragment::new();
                let play = |(media, reader)| play(media, reader, Some(&pace));
                tokio::try_join!(play(best), play(middle), play(least))?;
                Ok(None)
            }
        }
    }
}

async fn generate(generator: Generator, track: Arc<BroadcastTrack>) -> Result<Generated, Error> {
    // The generator busy-waits for up to 80 us before each object, so it must not run in a thread of the async runtime.
    let (done, ended) = tokio::sync::oneshot::channel();
    let generate = move || {
        // If the session has ended, the receiver `ended` was dropped, and sending the generator's result to it fails.
        let _ = done.send(generator.run(&track));
    };
    std::thread::Builder::new().name("generate".into()).spawn(generate).map_err(Error::Thread)?;
    ended.await.map_err(|_| Error::Generator)
}
