//! A broadcast towards a relay: generated objects, or fragmented MP4.

use std::io;
use std::sync::Arc;

use millrace_moq::Namespace;
use millrace_moq::name::NameError;
use millrace_moq::property::TrackProperties;
use serde::Serialize;
use tokio::io::AsyncRead;
use tokio::sync::watch;

use crate::broadcast::{Broadcast, History, Track};
use crate::generate::{Generated, Generator};
pub use crate::keep::Error as SessionError;
use crate::keep::{Current, Keeper};
use crate::media::{self, Cut, Media, Pace, Packaging, Renditions, Stopped, play};
use crate::session::Remote;

/// What to publish, where, and how.
pub struct Options {
    pub remote: Remote,
    /// The broadcast's name.
    pub namespace: Namespace,
    pub input: Input,
    /// Push the tracks with PUBLISH, without waiting to be asked.
    pub push: bool,
    /// The ID of the first group of all tracks; without it the time in milliseconds since 1970. Publishers of the same objects that
    /// stand in for each other need the same one.
    pub first_group: Option<u64>,
    /// What is kept of a track for those who lag or fetch.
    pub history: History,
    /// Begin when the first subscriber is there.
    pub wait: bool,
    /// Connect again when the session ends, and go on trying when there is none.
    pub reconnect: bool,
}

/// What is published.
pub enum Input {
    Generated {
        generator: Generator,
        /// Name of the track.
        track: String,
    },
    Media {
        /// Fragmented MP4.
        reader: Box<dyn AsyncRead + Unpin>,
        /// At the pace of its timestamps: for input that is not live.
        realtime: bool,
        packaging: Packaging,
        cut: Cut,
    },
    /// Renditions of the same media, the best first, at the pace of their timestamps, as CMAF; sound is in the best only.
    Ladder { renditions: [Encoded; RUNGS], cut: Cut },
}

/// Renditions of a ladder.
pub const RUNGS: usize = 3;

/// Media as it comes from an encoder.
pub struct Encoded {
    /// Fragmented MP4. Key frames of all renditions are at the same times.
    pub reader: Box<dyn AsyncRead + Unpin>,
    /// Of its video, bits per second.
    pub bitrate: u64,
}

/// Why a broadcast ended early.
#[derive(Debug, thiserror::Error)]
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
    #[error("the generator stopped")]
    Generator,
    #[error("a task failed: {0}")]
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

/// What was published, and what became of its packets.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Report {
    /// Of generated objects: how many, and how many a second. A machine that is too busy makes fewer than were asked
    /// for.
    #[serde(flatten)]
    pub generated: Option<Generated>,
    pub packets: u64,
    pub packets_lost: u64,
    pub congestion_events: u64,
    /// At the end.
    pub congestion_window_bytes: u64,
    /// Smoothed, at the end.
    pub round_trip_us: u64,
}

/// Publishes until the input ends and everything is delivered, or `stop` is over.
///
/// # Errors
/// The relay cannot be reached or does not take the broadcast, the input cannot be read, or the session ends before it; with
/// [`Options::reconnect`] only what another attempt will not mend.
pub async fn publish(options: Options, stop: impl Future<Output = ()>) -> Result<Report, Error> {
    let Options { remote, namespace, input, push, first_group, history, wait, reconnect } = options;
    let broadcast = Broadcast::new(namespace, history);
    first_group.into_iter().for_each(|first| broadcast.number_groups_from(first));
    // Its tracks are there before anybody can ask for them.
    let source = Source::new(input, &broadcast)?;
    let (current, sessions) = watch::channel(None);
    let keeper = Keeper { remote, broadcast: broadcast.clone(), push, reconnect, first_group, current };
    let work = work(source, &broadcast, wait, sessions.clone());
    let generated = tokio::select! {
        result = work => result?,
        error = keeper.run() => return Err(error.into()),
        () = stop => None,
    };
    let Some(Current { session, .. }) = sessions.borrow().clone() else { return Ok(Report::default()) };
    let path = session.connection().stats().path;
    // It is closed, as its keeper is gone.
    session.closed().await;
    Ok(Report {
        generated,
        packets: path.sent_packets,
        packets_lost: path.lost_packets,
        congestion_events: path.congestion_events,
        congestion_window_bytes: path.cwnd,
        round_trip_us: path.rtt.as_micros() as u64,
    })
}

/// Until all of the source is delivered.
async fn work(
    source: Source,
    broadcast: &Broadcast,
    wait: bool,
    mut sessions: watch::Receiver<Option<Current>>,
) -> Result<Option<Generated>, Error> {
    let mut session = async || {
        let current = sessions.wait_for(Option::is_some).await.ok().and_then(|current| current.clone());
        match current {
            Some(current) => current,
            // The keeper has ended, which is told elsewhere.
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

/// An [`Input`] with the tracks that it goes to.
enum Source {
    Generated(Generator, Arc<Track>),
    Media { media: Box<Media>, reader: Box<dyn AsyncRead + Unpin>, realtime: bool },
    Ladder(Box<[(Media, Box<dyn AsyncRead + Unpin>); RUNGS]>),
}

impl Source {
    fn new(input: Input, broadcast: &Arc<Broadcast>) -> Result<Self, NameError> {
        Ok(match input {
            Input::Generated { generator, track } => {
                let properties = TrackProperties::default().encode();
                Self::Generated(generator, broadcast.create(&track, properties)?)
            }
            Input::Media { reader, realtime, packaging, cut } => Self::Media {
                media: Box::new(Media::new(broadcast.clone(), packaging, cut)?),
                reader,
                realtime,
            },
            Input::Ladder { renditions: [best, middle, least], cut } => {
                let shared = Renditions::new(broadcast.clone(), RUNGS, Packaging::Cmaf)?;
                let source = |place, Encoded { reader, bitrate }| {
                    Ok::<_, NameError>((shared.media(place, Some(bitrate), cut)?, reader))
                };
                Self::Ladder(Box::new([source(0, best)?, source(1, middle)?, source(2, least)?]))
            }
        })
    }

    async fn run(self) -> Result<Option<Generated>, Error> {
        match self {
            Self::Generated(generator, track) => generate(generator, track).await.map(Some),
            Self::Media { media, reader, realtime } => {
                let pace = realtime.then(Pace::new);
                play(*media, reader, pace.as_ref()).await?;
                Ok(None)
            }
            Self::Ladder(ladder) => {
                let [best, middle, least] = *ladder;
                let pace = Pace::new();
                let play = |(media, reader)| play(media, reader, Some(&pace));
                tokio::try_join!(play(best), play(middle), play(least))?;
                Ok(None)
            }
        }
    }
}

async fn generate(generator: Generator, track: Arc<Track>) -> Result<Generated, Error> {
    // On a thread of its own: it spins for up to 80 us before each object.
    let (done, ended) = tokio::sync::oneshot::channel();
    let generate = move || {
        // Nobody waits any more if the session has ended.
        let _ = done.send(generator.run(&track));
    };
    std::thread::Builder::new().name("generate".into()).spawn(generate).map_err(Error::Thread)?;
    ended.await.map_err(|_| Error::Generator)
}
