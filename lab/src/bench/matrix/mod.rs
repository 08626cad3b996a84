//! `millrace-lab bench matrix`: which publishers and players meet at the relay, and whether what is played is what was published.

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

use self::ends::{End, Program, Stage, Way};
use self::media::{Match, Media};
use super::contender::Contender;
use super::process::Process;
use super::profile::Profile;
use super::site::{SUBSCRIBERS_LINK, Site};
use super::table::write_json;
use super::watch::clip::{self, Camera, Clip};
use super::watch::viewer::{LIMIT, Programs, Served};
use crate::progress::Progress;
use crate::transport::Transport;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Who publishes
    #[arg(long, value_enum, value_delimiter = ',', default_value = "millrace,moq-pub,moq-cli,chromium")]
    publishers: Vec<Program>,
    /// Who plays
    #[arg(long, value_enum, value_delimiter = ',', default_value = "millrace,moq-sub,moq-cli,chromium")]
    players: Vec<Program>,
    /// The relay between them: kernel and user are its engines
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user")]
    relays: Vec<Contender>,
    /// How both come to the relay
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "raw,webtransport",
        value_name = "TRANSPORT"
    )]
    transport: Vec<Transport>,
    /// Drafts that both speak
    #[arg(long, value_delimiter = ',', default_value = "18,19,20,21,22", value_name = "DRAFT")]
    #[arg(value_parser = clap::value_parser!(u8).range(14..=22))]
    drafts: Vec<u8>,
    /// Let publisher and player come by different transports and drafts, too
    #[arg(long)]
    mixed: bool,
    /// Media that each player has to have, without a gap
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Who is late, because it does not get the CPU, gets everything all the same.
const PATIENT: [&str; 2] = ["--max-delay", "off"];
/// Between two looks at what a player has.
const POLL: Duration = Duration::from_millis(250);
/// For media that has begun to come, to come on.
const SLACK: Duration = Duration::from_secs(30);
const FRAMES_A_SECOND: usize = 30;
/// Of a player that came before what it asks for, before it comes again.
const AGAIN: Duration = Duration::from_millis(500);

/// One publisher and one player, at one relay.
struct Cell {
    relay: Contender,
    publisher: End,
    player: End,
    outcome: Option<Outcome>,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Played(Match),
    /// By what they are.
    CannotMeet(String),
    /// A program that is not installed.
    NotHere(String),
    Failed(String),
}

pub fn run(args: Args) -> anyhow::Result<()> {
    args.check()?;
    let browser = Programs::find().ok();
    let mut cells = args.cells(browser.as_ref());
    let to_do = cells.iter().filter(|cell| cell.outcome.is_none()).count();
    if to_do > 0 {
        let troupe = Troupe::new(args.seconds, browser)?;
        let progress = Progress::of(to_do);
        for cell in cells.iter_mut().filter(|cell| cell.outcome.is_none()) {
            progress.begin(cell.label());
            let outcome = match troupe.play(cell) {
                Ok(played) => Outcome::Played(played),
                Err(error) => Outcome::Failed(format!("{error:#}")),
            };
            progress.end(&outcome.told())?;
            cell.outcome = Some(outcome);
        }
    }
    print!("{}", table::markdown(&cells));
    let rows: Vec<_> = cells.iter().map(Cell::json).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &rows))?;
    let failed = cells.iter().filter(|cell| matches!(cell.outcome, Some(Outcome::Failed(_)))).count();
    ensure!(failed == 0, "{failed} of {to_do} that can meet did not");
    ensure!(to_do > 0, "none of these can meet here");
    Ok(())
}

impl Args {
    fn check(&self) -> anyhow::Result<()> {
        if let Some(program) = self.publishers.iter().find(|program| !program.publishes()) {
            bail!("--publishers: {} publishes nothing", program.name());
        }
        if let Some(program) = self.players.iter().find(|program| !program.plays()) {
            bail!("--players: {} plays nothing", program.name());
        }
        ensure!((1..=60).contains(&self.seconds), "--seconds is 1 to 60");
        let other = self.relays.iter().find(|relay| relay.engine().is_none());
        other.map_or(Ok(()), |relay| bail!("--relays: {} does not say who is there", relay.label()))
    }

    /// Engines vary fastest.
    fn cells(&self, browser: Option<&Programs>) -> Vec<Cell> {
        let mut cells = Vec::new();
        for (publishing, playing) in self.ways() {
            for publisher in self.publishers.iter().map(|program| End { program: *program, way: publishing })
            {
                for player in self.players.iter().map(|program| End { program: *program, way: playing }) {
                    for relay in &self.relays {
                        let outcome = hindrance(publisher, player, browser);
                        cells.push(Cell { relay: *relay, publisher, player, outcome });
                    }
                }
            }
        }
        cells
    }

    /// Of the publisher and of the player.
    fn ways(&self) -> Vec<(Way, Way)> {
        let transports = self.transport.iter();
        let all = transports.flat_map(|transport| {
            self.drafts.iter().map(|draft| Way { transport: *transport, draft: *draft })
        });
        let all: Vec<_> = all.collect();
        let pairs = all.iter().flat_map(|one| all.iter().map(|other| (*one, *other)));
        pairs.filter(|(one, other)| self.mixed || one == other).collect()
    }
}

/// What is known beforehand.
fn hindrance(publisher: End, player: End, browser: Option<&Programs>) -> Option<Outcome> {
    if let Some(why) = player.cannot_play(publisher) {
        return Some(Outcome::CannotMeet(why));
    }
    let missing = [publisher, player].into_iter().find(|end| end.program.find(browser).is_err())?;
    Some(Outcome::NotHere(format!("{} is not here", missing.program.name())))
}

impl Cell {
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
        let end = |end: End| json!({ "program": end.program.name(), "transport": end.way.transport.name(), "draft": end.way.draft });
        let (outcome, reason, played) = match &self.outcome {
            None => ("failed", None, None),
            Some(Outcome::Played(played)) => ("played", None, Some(*played)),
            Some(Outcome::CannotMeet(why)) => ("cannot meet", Some(why), None),
            Some(Outcome::NotHere(why)) => ("not here", Some(why), None),
            Some(Outcome::Failed(why)) => ("failed", Some(why), None),
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

impl Outcome {
    fn told(&self) -> String {
        match self {
            Self::Played(Match { frames, identical: true }) => {
                format!("{frames} frames, identical fragments")
            }
            Self::Played(Match { frames, .. }) => format!("{frames} frames, identical"),
            Self::CannotMeet(why) | Self::NotHere(why) | Self::Failed(why) => why.clone(),
        }
    }
}

/// What is played, and where.
struct Troupe {
    seconds: u64,
    browser: Option<Programs>,
    clip: Arc<Clip>,
    media: Media,
    site: Site,
}

impl Troupe {
    fn new(seconds: u64, browser: Option<Programs>) -> anyhow::Result<Self> {
        // As long as a player may take to begin.
        let clip = Arc::new(Clip::encode(LIMIT.as_secs() + SLACK.as_secs() + seconds)?);
        let media = Media::read(&clip.bytes())?;
        let site = Site::new(&Profile::Clean.topology(SUBSCRIBERS_LINK, clip::BITRATE)?)?;
        Ok(Self { seconds, browser, clip, media, site })
    }

    fn play(&self, cell: &Cell) -> anyhow::Result<Match> {
        let mut served = Served::start(&self.site, cell.relay, &PATIENT)?;
        let stage = Stage { site: &self.site, browser: self.browser.as_ref(), page: served.page };
        let mut broadcast = Broadcast::start(self, &stage, cell.publisher)?;
        broadcast.until_announced(&stage)?;
        let played = self.watch(&stage, cell, &mut broadcast);
        served.check_runs()?;
        played
    }

    /// Until the player has enough, and the engine has had a part in it.
    fn watch(&self, stage: &Stage<'_>, cell: &Cell, broadcast: &mut Broadcast<'_>) -> anyhow::Result<Match> {
        let wanted = usize::try_from(self.seconds)? * FRAMES_A_SECOND;
        let mut player = cell.player.play(stage, cell.publisher)?;
        let (mut since, mut limit, mut has_begun) = (Instant::now(), LIMIT, false);
        loop {
            let has = Media::read(&player.output()?)?;
            std::thread::sleep(POLL);
            broadcast.process.check_runs()?;
            // By now it is also known to have been published.
            let found = has.follows(broadcast.media()?.as_ref());
            let is_forwarded = forwards(stage, cell.relay)?;
            match found {
                Ok(found) if found.frames >= wanted && is_forwarded => return Ok(found),
                found if since.elapsed() > limit => {
                    let why = missing(found, wanted, is_forwarded);
                    bail!("{why}; {} said: {}", cell.player.program.name(), player.last_words());
                }
                _ => {}
            }
            if has.frames.is_empty() {
                // It may have come before what it asks for.
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

/// What a player does not have.
fn missing(found: Result<Match, String>, wanted: usize, is_forwarded: bool) -> String {
    match found {
        Err(why) => why,
        Ok(found) if found.frames < wanted => format!("{} frames of {wanted} have come", found.frames),
        Ok(_) if !is_forwarded => "everything came, but the kernel forwarded nothing of it".to_owned(),
        Ok(_) => "it took too long".to_owned(),
    }
}

fn forwards(stage: &Stage<'_>, relay: Contender) -> anyhow::Result<bool> {
    Ok(relay.engine() != Some("kernel") || ask(stage)?.totals.kernel.packets > 0)
}

/// What the relay says of itself.
fn ask(stage: &Stage<'_>) -> anyhow::Result<Status> {
    let asked = stage.site.relay()?.enter(|| millrace_daemon::http::fetch(stage.page, "/status", None))?;
    let (code, body) = asked.context("the relay's status")?;
    ensure!(code == 200, "the relay's status: {code}");
    Ok(serde_json::from_str(&body)?)
}

/// Who publishes, and what. The process ends first: who waits for it to take something waits no more then.
struct Broadcast<'a> {
    process: Process,
    source: Source<'a>,
}

enum Source<'a> {
    /// What the process is given, of which it never has all.
    Clip { media: &'a Media, _camera: Camera },
    /// It films for itself, and writes what comes of it.
    Own { _input: ChildStdin },
}

impl<'a> Broadcast<'a> {
    fn start(troupe: &'a Troupe, stage: &Stage<'_>, publisher: End) -> anyhow::Result<Self> {
        let (process, input) = publisher.publish(stage)?;
        let source = match publisher.program {
            Program::Chromium => Source::Own { _input: input },
            _ => Source::Clip {
                media: &troupe.media,
                _camera: Camera::start(Arc::clone(&troupe.clip), input)?,
            },
        };
        Ok(Self { process, source })
    }

    fn until_announced(&mut self, stage: &Stage<'_>) -> anyhow::Result<()> {
        let is_there = || ask(stage).is_ok_and(|status| status.sessions.iter().any(|it| it.publisher));
        self.process.wait_until("publishing", LIMIT, is_there)
    }

    fn media(&self) -> anyhow::Result<Cow<'_, Media>> {
        match &self.source {
            Source::Clip { media, .. } => Ok(Cow::Borrowed(media)),
            Source::Own { .. } => Ok(Cow::Owned(Media::read(&self.process.output()?)?)),
        }
    }
}
