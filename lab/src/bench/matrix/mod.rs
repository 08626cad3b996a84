//! `millrace-lab bench matrix`: every publisher with every player at the relay: which pairs work, and whether media
//! arrive unchanged.

mod ends;
mod media;
mod table;

use std::borrow::Cow;
use std::path::PathBuf;
use std::process::ChildStdin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use millrace_relay::status::Status;
use serde_json::{Value, json};

use self::ends::{ClientTransport, MatrixEnd, MatrixProgram, MatrixStage};
use self::media::{FrameMatch, MediaFrames};
use super::contender::Contender;
use super::process::BenchProcess;
use super::profile::LinkProfile;
use super::site::{BenchSite, SUBSCRIBERS_LINK};
use super::table::write_json;
use super::watch::clip::{self, ClipCamera, EncodedClip};
use super::watch::viewer::{LIMIT, ServedPage, ViewerPrograms};
use crate::progress::BenchProgress;
use crate::transport::LabTransport;

#[derive(Debug, clap::Args)]
pub struct MatrixArgs {
    /// Publishers to measure
    #[arg(long, value_enum, value_delimiter = ',', default_value = "millrace,moq-pub,moq-cli,chromium")]
    publishers: Vec<MatrixProgram>,
    /// Players to measure
    #[arg(long, value_enum, value_delimiter = ',', default_value = "millrace,moq-sub,moq-cli,chromium")]
    players: Vec<MatrixProgram>,
    /// Where the relay between publishers and players forwards media: in the kernel or in userspace
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user")]
    relays: Vec<Contender>,
    /// Transports of publishers and players
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "raw,webtransport",
        value_name = "TRANSPORT"
    )]
    transport: Vec<LabTransport>,
    /// Drafts of MoQ Transport that publishers and players use
    #[arg(long, value_delimiter = ',', default_value = "18,19,20,21,22", value_name = "DRAFT")]
    #[arg(value_parser = clap::value_parser!(u8).range(14..=22))]
    drafts: Vec<u8>,
    /// Let publisher and player also use different transports and drafts
    #[arg(long)]
    mixed: bool,
    /// Seconds of media that each player must receive without a gap
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Settings of the relay. Without a delay limit, a player that lacks CPU still receives everything.
const PATIENT: [&str; 2] = ["--max-delay", "off"];
/// Interval between two checks of the frames that a player has received.
const POLL: Duration = Duration::from_millis(250);
/// Time that a player gets, beyond the requested duration, to receive all required frames once it has received the
/// first.
const SLACK: Duration = Duration::from_secs(30);
const FRAMES_A_SECOND: usize = 30;
/// Pause before a player is started again, if it had started before its broadcast was announced.
const AGAIN: Duration = Duration::from_millis(500);

/// One publisher and one player at one relay.
struct MatrixCell {
    relay: Contender,
    publisher: MatrixEnd,
    player: MatrixEnd,
    outcome: Option<MatrixOutcome>,
}

/// Result of one publisher with one player at one relay.
#[derive(Debug, Clone, PartialEq, Eq)]
enum MatrixOutcome {
    Played(FrameMatch),
    /// The two programs have no transport, draft or format in common, for this reason.
    CannotMeet(String),
    /// A program is not installed.
    NotHere(String),
    Failed(String),
}

pub fn run(args: MatrixArgs) -> anyhow::Result<()> {
    args.check()?;
    let browser = ViewerPrograms::find().ok();
    let mut cells = args.cells(browser.as_ref());
    let to_do = cells.iter().filter(|cell| cell.outcome.is_none()).count();
    if to_do > 0 {
        let troupe = Troupe::new(args.seconds, browser)?;
        let progress = BenchProgress::with_steps(to_do);
        for cell in cells.iter_mut().filter(|cell| cell.outcome.is_none()) {
            progress.begin(cell.label());
            let outcome = match troupe.play(cell) {
                Ok(played) => MatrixOutcome::Played(played),
                Err(error) => MatrixOutcome::Failed(format!("{error:#}")),
            };
            progress.end(&outcome.told())?;
            cell.outcome = Some(outcome);
        }
    }
    print!("{}", table::markdown(&cells));
    let rows: Vec<_> = cells.iter().map(MatrixCell::json).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &rows))?;
    let failed = cells.iter().filter(|cell| matches!(cell.outcome, Some(MatrixOutcome::Failed(_)))).count();
    ensure!(failed == 0, "{failed} of {to_do} compatible pairs failed");
    ensure!(to_do > 0, "none of the selected pairs is compatible and installed");
    Ok(())
}

impl MatrixArgs {
    fn check(&self) -> anyhow::Result<()> {
        if let Some(program) = self.publishers.iter().find(|program| !program.publishes()) {
            bail!("--publishers: {} cannot publish", program.name());
        }
        if let Some(program) = self.players.iter().find(|program| !program.plays()) {
            bail!("--players: {} cannot play", program.name());
        }
        ensure!((1..=60).contains(&self.seconds), "--seconds must be 1 to 60");
        let other = self.relays.iter().find(|relay| relay.engine().is_none());
        other.map_or(Ok(()), |relay| bail!("--relays: {} is not a Millrace relay", relay.label()))
    }

    /// Lists the combinations of publisher, player and relay. Relays that forward in the kernel and in userspace
    /// alternate, so that a machine that becomes slower or faster during the run affects both alike.
    fn cells(&self, browser: Option<&ViewerPrograms>) -> Vec<MatrixCell> {
        let mut cells = Vec::new();
        for (publishing, playing) in self.ways() {
            for publisher in
                self.publishers.iter().map(|program| MatrixEnd { program: *program, way: publishing })
            {
                for player in self.players.iter().map(|program| MatrixEnd { program: *program, way: playing })
                {
                    for relay in &self.relays {
                        let outcome = hindrance(publisher, player, browser);
                        cells.push(MatrixCell { relay: *relay, publisher, player, outcome });
                    }
                }
            }
        }
        cells
    }

    /// Returns the pairs of connections of publisher and player.
    fn ways(&self) -> Vec<(ClientTransport, ClientTransport)> {
        let transports = self.transport.iter();
        let all = transports.flat_map(|transport| {
            self.drafts.iter().map(|draft| ClientTransport { transport: *transport, draft: *draft })
        });
        let all: Vec<_> = all.collect();
        let pairs = all.iter().flat_map(|one| all.iter().map(|other| (*one, *other)));
        pairs.filter(|(one, other)| self.mixed || one == other).collect()
    }
}

/// Returns why this publisher and this player cannot be measured together on this machine; `None` if they can be.
fn hindrance(
    publisher: MatrixEnd,
    player: MatrixEnd,
    browser: Option<&ViewerPrograms>,
) -> Option<MatrixOutcome> {
    if let Some(why) = player.cannot_play(publisher) {
        return Some(MatrixOutcome::CannotMeet(why));
    }
    let missing = [publisher, player].into_iter().find(|end| end.program.find(browser).is_err())?;
    Some(MatrixOutcome::NotHere(format!("{} is not installed", missing.program.name())))
}

impl MatrixCell {
    fn label(&self) -> String {
        let Self { relay, publisher, player, .. } = self;
        let publisher_way = publisher.way.label();
        let ways = match player.way == publisher.way {
            true => publisher_way,
            false => format!("{publisher_way} to {}", player.way.label()),
        };
        format!("{} to {}, {}, {ways}", publisher.program.name(), player.program.name(), relay.label())
    }

    fn json(&self) -> Value {
        let end = |end: MatrixEnd| json!({ "program": end.program.name(), "transport": end.way.transport.name(), "draft": end.way.draft });
        let (outcome, reason, played) = match &self.outcome {
            None => ("failed", None, None),
            Some(MatrixOutcome::Played(played)) => ("played", None, Some(*played)),
            Some(MatrixOutcome::CannotMeet(why)) => ("cannot meet", Some(why), None),
            Some(MatrixOutcome::NotHere(why)) => ("not here", Some(why), None),
            Some(MatrixOutcome::Failed(why)) => ("failed", Some(why), None),
        };
        json!({
            "relay": self.relay.relay(),
            "engine": self.relay.engine(),
            "publisher": end(self.publisher),
            "player": end(self.player),
            "outcome": outcome,
            "reason": reason,
            "frames": played.map(|it| it.frames),
            "identical": played.map(|it| it.identical),
        })
    }
}

impl MatrixOutcome {
    fn told(&self) -> String {
        match self {
            Self::Played(FrameMatch { frames, identical: true }) => {
                format!("{frames} frames, identical fragments")
            }
            Self::Played(FrameMatch { frames, .. }) => format!("{frames} frames, identical"),
            Self::CannotMeet(why) | Self::NotHere(why) | Self::Failed(why) => why.clone(),
        }
    }
}

/// The media and the lab that all measurements (publisher, player, relay) share.
struct Troupe {
    seconds: u64,
    browser: Option<ViewerPrograms>,
    clip: Arc<EncodedClip>,
    media: MediaFrames,
    site: BenchSite,
}

impl Troupe {
    fn new(seconds: u64, browser: Option<ViewerPrograms>) -> anyhow::Result<Self> {
        // The clip lasts as long as a player may take to start, so publishing never ends early.
        let clip = Arc::new(EncodedClip::encode(LIMIT.as_secs() + SLACK.as_secs() + seconds)?);
        let media = MediaFrames::read(&clip.bytes())?;
        let site = BenchSite::new(&LinkProfile::Clean.topology(SUBSCRIBERS_LINK, clip::BITRATE)?)?;
        Ok(Self { seconds, browser, clip, media, site })
    }

    fn play(&self, cell: &MatrixCell) -> anyhow::Result<FrameMatch> {
        let mut served = ServedPage::start(&self.site, cell.relay, &PATIENT)?;
        let stage = MatrixStage { site: &self.site, browser: self.browser.as_ref(), page: served.page };
        let mut broadcast = MatrixBroadcast::start(self, &stage, cell.publisher)?;
        broadcast.wait_until_announced(&stage)?;
        let played = self.watch(&stage, cell, &mut broadcast);
        served.check_runs()?;
        played
    }

    /// Waits until the player has received enough frames, and the relay has forwarded some of them where it should: in
    /// the kernel or in userspace.
    fn watch(
        &self,
        stage: &MatrixStage<'_>,
        cell: &MatrixCell,
        broadcast: &mut MatrixBroadcast<'_>,
    ) -> anyhow::Result<FrameMatch> {
        let wanted = usize::try_from(self.seconds)? * FRAMES_A_SECOND;
        let mut player = cell.player.play(stage, cell.publisher)?;
        let mut since = Instant::now();
        let mut limit = LIMIT;
        let mut has_begun = false;
        loop {
            let has = MediaFrames::read(&player.output()?)?;
            std::thread::sleep(POLL);
            broadcast.process.check_runs()?;
            // The published media are read after the player's output, so they contain everything that the player
            // received.
            let found = has.follows(broadcast.media()?.as_ref());
            let is_forwarded = forwards(stage, cell.relay)?;
            match found {
                Ok(found) if found.frames >= wanted && is_forwarded => return Ok(found),
                found if since.elapsed() > limit => {
                    let why = missing(found, wanted, is_forwarded);
                    bail!("{why}; last output of {}: {}", cell.player.program.name(), player.last_words());
                }
                _ => {}
            }
            if has.frames.is_empty() {
                // A player that started before its broadcast was announced may have ended with an error.
                if player.check_runs().is_err() {
                    std::thread::sleep(AGAIN);
                    player = cell.player.play(stage, cell.publisher)?;
                }
            } else if !std::mem::replace(&mut has_begun, true) {
                (since, limit) = (Instant::now(), SLACK + Duration::from_secs(self.seconds));
            }
        }
    }
}

/// Describes what is missing in a player's output.
fn missing(found: Result<FrameMatch, String>, wanted: usize, is_forwarded: bool) -> String {
    match found {
        Err(why) => why,
        Ok(found) if found.frames < wanted => format!("only {} of {wanted} frames arrived", found.frames),
        Ok(_) if !is_forwarded => "all media arrived, but the kernel forwarded none of them".to_owned(),
        Ok(_) => "the media took too long".to_owned(),
    }
}

fn forwards(stage: &MatrixStage<'_>, relay: Contender) -> anyhow::Result<bool> {
    Ok(relay.engine() != Some("kernel") || ask(stage)?.totals.kernel.packets > 0)
}

/// Fetches the relay's status.
fn ask(stage: &MatrixStage<'_>) -> anyhow::Result<Status> {
    let asked = stage.site.relay()?.enter(|| millrace_daemon::http::fetch(stage.page, "/status", None))?;
    let (code, body) = asked.context("cannot fetch the relay's status")?;
    ensure!(code == 200, "the relay answered /status with HTTP {code}");
    Ok(serde_json::from_str(&body)?)
}

/// A publisher and its media. The process is dropped first, so that no write to its pipe blocks any longer.
struct MatrixBroadcast<'a> {
    process: BenchProcess,
    source: MatrixSource<'a>,
}

enum MatrixSource<'a> {
    /// A clip that is written to the process in an endless loop.
    Clip { media: &'a MediaFrames, _camera: ClipCamera },
    /// Media that the process films itself and records.
    Own { _input: ChildStdin },
}

impl<'a> MatrixBroadcast<'a> {
    fn start(troupe: &'a Troupe, stage: &MatrixStage<'_>, publisher: MatrixEnd) -> anyhow::Result<Self> {
        let (process, input) = publisher.publish(stage)?;
        let source = match publisher.program {
            MatrixProgram::Chromium => MatrixSource::Own { _input: input },
            _ => MatrixSource::Clip {
                media: &troupe.media,
                _camera: ClipCamera::start(Arc::clone(&troupe.clip), input)?,
            },
        };
        Ok(Self { process, source })
    }

    fn wait_until_announced(&mut self, stage: &MatrixStage<'_>) -> anyhow::Result<()> {
        let is_there = || ask(stage).is_ok_and(|status| status.sessions.iter().any(|it| it.publisher));
        self.process.wait_until("publishing", LIMIT, is_there)
    }

    fn media(&self) -> anyhow::Result<Cow<'_, MediaFrames>> {
        match &self.source {
            MatrixSource::Clip { media, .. } => Ok(Cow::Borrowed(media)),
            MatrixSource::Own { .. } => Ok(Cow::Owned(MediaFrames::read(&self.process.output()?)?)),
        }
    }
}
