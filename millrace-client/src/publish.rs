//! `millrace publish`: fragmented MP4 or generated objects towards a relay.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use millrace_proto::moq::property::TrackProperties;
use millrace_proto::moq::{Namespace, code};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::broadcast::{Broadcast, History, Track};
use crate::generate::{GenerateArgs, Generated, Generator};
use crate::media::{Boxes, Media};
use crate::serve::Server;
use crate::session::{ConnectArgs, Session};

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Name of the broadcast: a namespace, its fields divided by /
    #[arg(long)]
    pub name: String,
    /// Push the tracks with PUBLISH, without waiting to be asked
    #[arg(long)]
    pub publish: bool,
    /// Fragmented MP4; standard input without it
    #[arg(value_name = "FILE", conflicts_with = "generate")]
    pub input: Option<PathBuf>,
    /// Publish media at the pace of its timestamps: for input that is not live
    #[arg(long, conflicts_with = "generate")]
    pub realtime: bool,
    /// Seconds of a track that are kept for those who lag or fetch
    #[arg(long, default_value_t = 10.0, value_name = "S")]
    pub history: f64,
    /// Begin when the first subscriber is there
    #[arg(long)]
    pub wait: bool,
    /// Print figures as one JSON object at the end
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub generate: GenerateArgs,
}

/// What was published, and what became of its packets.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Report {
    /// Of generated objects: how many, and how many a second. A machine that is too busy makes fewer than were asked
    /// for.
    #[serde(flatten)]
    generated: Option<Generated>,
    packets: u64,
    packets_lost: u64,
    congestion_events: u64,
    /// At the end.
    congestion_window_bytes: u64,
    /// Smoothed, at the end.
    round_trip_us: u64,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    crate::log();
    let json = args.json;
    let report = tokio::runtime::Runtime::new()?.block_on(publish(args))?;
    if json {
        println!("{}", serde_json::to_string(&report)?);
    }
    Ok(())
}

/// Publishes until the input ends and everything is delivered, or the session ends.
pub async fn publish(args: Args) -> anyhow::Result<Report> {
    let namespace = Namespace::from_path(&args.name).context("--name is not a namespace")?;
    let max_age = Duration::try_from_secs_f64(args.history).context("--history is not a time")?;
    let broadcast = Broadcast::new(namespace, History { max_age, ..History::default() });
    // Its tracks are there before anybody can ask for them.
    let source = Source::open(&args, &broadcast).await?;
    let session = Session::connect(&args.connect).await?;
    let server = Server::new(session.clone(), broadcast.clone());
    let serving = tokio::spawn(session.clone().run(server.clone()));
    let mut pushing = None;
    let mut announced = None;
    match args.publish {
        true => pushing = Some(tokio::spawn(push_all(server.clone(), broadcast.clone()))),
        // Held: the namespace is announced for as long as its stream is open.
        false => {
            announced = Some(server.announce().await.context("the relay does not take the namespace")?);
        }
    }
    tracing::info!(name = %broadcast.namespace(), url = %args.connect.url, "publishing");

    let work = async {
        if args.wait {
            server.subscribed().await;
        }
        let generated = source.run(args.realtime).await?;
        broadcast.end();
        if let Some(pushing) = pushing {
            pushing.await?;
        }
        server.idle().await;
        anyhow::Ok(generated)
    };
    let generated = tokio::select! {
        result = work => result?,
        error = serving => return Err(error?).context("the session ended"),
    };
    drop(announced);
    let path = session.connection().stats().path;
    session.close(code::Session::NO_ERROR, "the broadcast is over");
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

/// Pushes every track, those to come included, until the broadcast is over and delivered.
async fn push_all(server: Arc<Server>, broadcast: Arc<Broadcast>) {
    let mut ended = broadcast.ended();
    let mut pushes = JoinSet::new();
    let mut pushed = Vec::new();
    loop {
        let is_over = *ended.borrow_and_update();
        for track in broadcast.tracks() {
            if !pushed.contains(track.name()) {
                pushed.push(track.name().clone());
                let server = server.clone();
                pushes.spawn(async move {
                    if let Err(error) = server.publish(track.clone()).await {
                        tracing::warn!(track = %track.name(), "not published: {error}");
                    }
                });
            }
        }
        if is_over || ended.changed().await.is_err() {
            break;
        }
    }
    while pushes.join_next().await.is_some() {}
}

/// What is published.
enum Source {
    Generated(Generator, Arc<Track>),
    Media(Media, Box<dyn AsyncRead + Unpin>),
}

impl Source {
    async fn open(args: &Args, broadcast: &Arc<Broadcast>) -> anyhow::Result<Self> {
        if args.generate.generate {
            let generator = Generator::new(&args.generate)?;
            let properties = TrackProperties::default().encode();
            return Ok(Self::Generated(generator, broadcast.create(&args.generate.track, properties)?));
        }
        let input: Box<dyn AsyncRead + Unpin> = match &args.input {
            Some(path) => {
                let file = tokio::fs::File::open(path).await;
                Box::new(file.with_context(|| format!("cannot open {}", path.display()))?)
            }
            None => Box::new(tokio::io::stdin()),
        };
        Ok(Self::Media(Media::new(broadcast.clone())?, input))
    }

    async fn run(self, realtime: bool) -> anyhow::Result<Option<Generated>> {
        match self {
            Self::Generated(generator, track) => generate(generator, track).await.map(Some),
            Self::Media(media, input) => play(media, input, realtime).await.map(|()| None),
        }
    }
}

async fn generate(generator: Generator, track: Arc<Track>) -> anyhow::Result<Generated> {
    // On a thread of its own: it spins for up to 80 us before each object.
    let (done, ended) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name("generate".into()).spawn(move || {
        // Nobody waits any more if the session has ended.
        let _ = done.send(generator.run(&track));
    })?;
    ended.await.context("the generator stopped")
}

async fn play(mut media: Media, mut input: Box<dyn AsyncRead + Unpin>, realtime: bool) -> anyhow::Result<()> {
    let mut boxes = Boxes::default();
    let mut origin = None;
    let mut piece = vec![0; 64 << 10];
    loop {
        while let Some((kind, bytes)) = boxes.pop()? {
            let time = media.take(kind, bytes)?;
            if let Some(time) = time.filter(|_| realtime) {
                let (start, first) = *origin.get_or_insert((Instant::now(), time));
                tokio::time::sleep_until(start + time.saturating_sub(first)).await;
            }
        }
        match input.read(&mut piece).await.context("cannot read the media")? {
            0 => return Ok(()),
            length => boxes.push(&piece[..length]),
        }
    }
}
