//! Publisher and subscriber of generated media, whose frames have the sizes that an encoder would make.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use millrace_client::broadcast::{Broadcast, BroadcastTrack, History, SubgroupWriter};
use millrace_client::payload::{self, Stamp};
use millrace_client::receive::{EstablishedSubscription, ObjectReceiver, ObjectSink, TrackEvent};
use millrace_client::serve::BroadcastServer;
use millrace_client::session::{Remote, Session, parse_url};
use millrace_client::tls::CertificateTrust;
use millrace_moq::{Namespace, Parameters, Properties, SubgroupId, TrackName, code, msf};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::shown::{ArrivedObject, SentRates};

/// Bit rates of the renditions, bits per second.
pub const LADDER: [u64; 3] = [800_000, 2_000_000, 5_000_000];

const NAMESPACE: &str = "bench";
const SOUND: &str = "audio";
const FPS: u64 = 30;
const SOUNDS_PER_SECOND: u64 = 50;
/// Size of one audio object, bytes. At 50 objects per second it gives 128 kbit/s.
const SOUND_BYTES: usize = 320;
/// Size of a key frame, as a multiple of the size of any other frame.
const KEY: u64 = 8;
/// Publisher priorities of audio, key frames and other frames. Lower numbers are sent first.
const PRIORITIES: [u8; 3] = [10, 20, 30];
/// Longest time that the publisher waits at its end for the connection to become idle, and that the subscriber waits
/// for a track. The next constant, `LAST`, is how long the subscriber waits for late objects after the end of the
/// track.
const PATIENCE: Duration = Duration::from_secs(20);
const LAST: Duration = Duration::from_secs(2);
const QUEUE: usize = 1024;

#[derive(Debug, clap::Subcommand)]
pub enum AdaptEnd {
    /// Publish for so many seconds from the first subscriber on
    #[command(hide = true)]
    Publish {
        #[arg(long)]
        relay: SocketAddr,
        #[arg(long)]
        seconds: u64,
    },
    /// Subscribe to the highest rendition and the sound, and print when each object arrived
    #[command(hide = true)]
    Subscribe {
        #[arg(long)]
        relay: SocketAddr,
    },
}

pub fn run(end: &AdaptEnd) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    let json = match end {
        AdaptEnd::Publish { relay, seconds } => {
            serde_json::to_string(&runtime.block_on(publish(*relay, *seconds))?)?
        }
        AdaptEnd::Subscribe { relay } => serde_json::to_string(&runtime.block_on(subscribe(*relay))?)?,
    };
    println!("{json}");
    Ok(())
}

async fn connect(relay: SocketAddr) -> anyhow::Result<Arc<Session>> {
    let remote = Remote::new(parse_url(&format!("moqt://{relay}"))?, CertificateTrust::Anyone);
    Session::connect(&remote).await.context("no session with the relay")
}

fn rendition(rung: usize) -> String {
    format!("video-{rung}")
}

/// A video track, and the subgroups that are open in its current group.
struct OpenTrack {
    track: Arc<BroadcastTrack>,
    key: Option<SubgroupWriter>,
    others: Option<SubgroupWriter>,
}

impl OpenTrack {
    fn new(broadcast: &Broadcast, name: &str) -> anyhow::Result<Self> {
        let track = broadcast.create(name, Properties::default())?;
        Ok(Self { track, key: None, others: None })
    }

    /// Writes the next frame of a rendition.
    fn frame(&mut self, rung: usize, number: u64, sent: Duration) {
        let group = number / FPS;
        let place = number % FPS;
        let unit = LADDER[rung] / 8 / (FPS - 1 + KEY);
        let stamp = Stamp { sequence: number, sent, total: rung as u64 };
        let writer = if place == 0 {
            self.others = None;
            self.key.insert(self.track.open(group, SubgroupId::Zero, PRIORITIES[1]))
        } else {
            let open = || self.track.open(group, SubgroupId::Explicit(1), PRIORITIES[2]);
            self.others.get_or_insert_with(open)
        };
        let bytes = if place == 0 { KEY * unit } else { unit };
        writer.write(place, payload::build(stamp, bytes as usize));
        self.key = None;
    }

    fn sound(&mut self, number: u64, sent: Duration) {
        let group = number / SOUNDS_PER_SECOND;
        let place = number % SOUNDS_PER_SECOND;
        if place == 0 {
            self.key = Some(self.track.open(group, SubgroupId::Zero, PRIORITIES[0]));
        }
        let stamp = Stamp { sequence: number, sent, total: 0 };
        if let Some(writer) = &mut self.key {
            writer.write(place, payload::build(stamp, SOUND_BYTES));
        }
    }
}

async fn publish(relay: SocketAddr, seconds: u64) -> anyhow::Result<SentRates> {
    let broadcast = Broadcast::new(Namespace::from_path(NAMESPACE)?, History::default());
    let mut videos = Vec::new();
    for rung in 0..LADDER.len() {
        videos.push(OpenTrack::new(&broadcast, &rendition(rung))?);
    }
    let mut sound = OpenTrack::new(&broadcast, SOUND)?;
    let catalog = broadcast.create(msf::CATALOG, Properties::default())?;
    catalog.open(0, SubgroupId::Zero, 0).write(0, catalog_of_all().to_json()?.into());
    let session = connect(relay).await?;
    let server = BroadcastServer::new(session.clone(), broadcast.clone());
    let serving = tokio::spawn(session.clone().run(server.clone()));
    let _announced = server.announce().await.context("the relay refused the namespace")?;
    let sending = async {
        server.subscribed().await;
        let sent = emit(&mut videos, &mut sound, seconds).await;
        drop((videos, sound));
        broadcast.end();
        // A subscriber has received the end of the broadcast by now, or will not receive it at all.
        let _ = timeout(PATIENCE, server.idle()).await;
        sent
    };
    let sent = tokio::select! {
        sent = sending => sent,
        error = serving => anyhow::bail!("the publisher's session ended: {:?}", error?),
    };
    session.close(code::Session::NO_ERROR, "");
    session.closed().await;
    Ok(sent)
}

/// Writes video frames and audio objects at the times when they are due.
async fn emit(videos: &mut [OpenTrack], sound: &mut OpenTrack, seconds: u64) -> SentRates {
    let start = Instant::now();
    let began = payload::now();
    let mut frame = 0;
    let mut sounds = 0;
    loop {
        let due = |number: u64, per_second: u64| Duration::from_nanos(number * 1_000_000_000 / per_second);
        let next_frame = due(frame, FPS);
        let next_sound = due(sounds, SOUNDS_PER_SECOND);
        let next = next_frame.min(next_sound);
        if next >= Duration::from_secs(seconds) {
            break;
        }
        sleep_until(start + next).await;
        // The time stamp is the time when the object was due. If the publisher is late, its lateness is a part of the
        // measured delay.
        if next_sound <= next_frame {
            sound.sound(sounds, began + next);
            sounds += 1;
        } else {
            videos.iter_mut().enumerate().for_each(|(rung, video)| video.frame(rung, frame, began + next));
            frame += 1;
        }
    }
    SentRates { start: began, seconds, frames_per_second: FPS, sounds_per_second: SOUNDS_PER_SECOND }
}

fn catalog_of_all() -> msf::MsfCatalog {
    let video = |(rung, bitrate): (usize, &u64)| msf::MsfTrack {
        name: rendition(rung),
        packaging: "loc".to_owned(),
        is_live: true,
        role: Some("video".to_owned()),
        codec: Some("av01".to_owned()),
        bitrate: Some(*bitrate),
        render_group: Some(1),
        alt_group: Some(1),
        ..msf::MsfTrack::default()
    };
    let sound = msf::MsfTrack {
        name: SOUND.to_owned(),
        packaging: "loc".to_owned(),
        is_live: true,
        role: Some("audio".to_owned()),
        codec: Some("opus".to_owned()),
        bitrate: Some(SOUNDS_PER_SECOND * SOUND_BYTES as u64 * 8),
        render_group: Some(1),
        ..msf::MsfTrack::default()
    };
    msf::MsfCatalog::new(LADDER.iter().enumerate().map(video).chain([sound]).collect())
}

async fn subscribe(relay: SocketAddr) -> anyhow::Result<Vec<ArrivedObject>> {
    let session = connect(relay).await?;
    let receiver = ObjectReceiver::new(session.clone());
    let serving = tokio::spawn(session.clone().run(receiver.clone()));
    let (queue, steps) = mpsc::channel(QUEUE);
    let (sounds, sound_steps) = mpsc::channel(QUEUE);
    let receiving = async {
        // The first subscription starts the broadcast. Audio is subscribed to first, so that none of it is missed.
        let sound = subscribe_to(&receiver, SOUND, sounds).await?;
        let video = subscribe_to(&receiver, &rendition(LADDER.len() - 1), queue).await?;
        let (video, sound) = tokio::join!(collect(video, steps, true), collect(sound, sound_steps, false));
        Ok::<_, anyhow::Error>([video, sound].concat())
    };
    let came = tokio::select! {
        came = receiving => came?,
        error = serving => anyhow::bail!("the subscriber's session ended: {:?}", error?),
    };
    session.close(code::Session::NO_ERROR, "");
    session.closed().await;
    Ok(came)
}

/// Subscribes to a track, and tries again while the relay does not know the track yet.
async fn subscribe_to(
    receiver: &ObjectReceiver,
    track: &str,
    queue: mpsc::Sender<TrackEvent>,
) -> anyhow::Result<EstablishedSubscription> {
    let name = TrackName::new(Namespace::from_path(NAMESPACE)?, track.as_bytes().to_vec())?;
    let asked = Instant::now();
    loop {
        let sink = ObjectSink::Queue(queue.clone());
        match receiver.subscribe(name.clone(), Parameters::default(), sink).await {
            Ok(subscription) => return Ok(subscription),
            Err(error) if asked.elapsed() > PATIENCE => {
                return Err(error).with_context(|| format!("no track {track}"));
            }
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Collects the objects that arrive until [`LAST`] after the end of the track.
async fn collect(
    mut subscription: EstablishedSubscription,
    mut steps: mpsc::Receiver<TrackEvent>,
    video: bool,
) -> Vec<ArrivedObject> {
    let mut came = Vec::new();
    let mut over = std::pin::pin!(subscription.done());
    let mut end = None;
    loop {
        let rest = async {
            match end {
                Some(end) => sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            step = steps.recv() => match step {
                Some(TrackEvent::Object { object, .. } | TrackEvent::Datagram(object)) => {
                    let at = payload::now();
                    if let Ok(stamp) = payload::check(&object.payload) {
                        let rendition = video.then_some(stamp.total as u32);
                        came.push(ArrivedObject { rendition, number: stamp.sequence, sent: stamp.sent, at });
                    }
                }
                Some(_) => {}
                None => return came,
            },
            _ = &mut over, if end.is_none() => end = Some(Instant::now() + LAST),
            () = rest => return came,
        }
    }
}
