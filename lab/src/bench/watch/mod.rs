//! `millrace-lab bench watch`: what a viewer sees in a browser, with the player that a relay's page has.

pub mod clip;
mod seen;
pub mod viewer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::ValueEnum as _;
use serde_json::{Value, json};

use self::clip::{Camera, Clip};
use self::seen::Figures;
use self::viewer::{Programs, Served, Task, Viewer};
use super::contender::Contender;
use super::figures::error;
use super::process::Process;
use super::profile::Profile;
use super::site::{SUBSCRIBERS_LINK, Site};
use super::table::{columns, dash, write_json};
use super::usage::warn_if_busy;
use crate::program::product;
use crate::progress::Progress;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Relays, interleaved
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user,moq-relay")]
    relays: Vec<Contender>,
    /// What the link to the browser does to packets, interleaved; those that stay as they are
    #[arg(long, value_enum, value_delimiter = ',', default_value = "clean,loss1")]
    impair: Vec<Profile>,
    /// Time that is measured, from a second after the first picture on
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Times that every relay runs with every link
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Buffer of the player
    #[arg(long, default_value_t = 100, value_name = "MS")]
    buffer_ms: u32,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keep a screenshot of the end of each run here
    #[arg(long, value_name = "DIR")]
    screenshots: Option<PathBuf>,
}

const NAME: &str = "live";
/// The second after the first picture, which is not measured.
const SETTLING: Duration = Duration::from_secs(1);
/// Until the last frame that is measured has been shown, if it ever is.
const LAST: Duration = Duration::from_secs(2);
/// Video beyond the measured time: until the viewer is there, before and after.
const SPARE: u64 = viewer::LIMIT.as_secs() + 10;

pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.seconds > 0, "--rounds and --seconds are at least 1");
    let most = clip::MOST_SECONDS - SPARE;
    ensure!(args.seconds <= most, "--seconds is at most {most}: frames have numbers of 16 bits");
    ensure!(
        !args.relays.iter().any(|relay| relay.is_plain()),
        "plain UDP has no tracks: leave it out of --relays"
    );
    ensure!(!args.impair.contains(&Profile::Mobile), "--impair: mobile changes");
    warn_if_busy()?;
    let programs = Programs::find()?;
    if let Some(directory) = &args.screenshots {
        let cannot = || format!("cannot make {}", directory.display());
        std::fs::create_dir_all(directory).with_context(cannot)?;
    }
    let clip = Arc::new(Clip::encode(args.seconds + SPARE)?);
    let mut rows = args.rows();
    let sites = args.sites()?;
    let progress = Progress::of(args.rounds * rows.len());
    for round in 1..=args.rounds {
        for row in &mut rows {
            progress.begin(format!("round {round}, {}", row.label()));
            let site = sites.get(row.site).context("a lab for each link")?;
            let screenshot = args.screenshots.as_deref().map(|directory| row.screenshot(directory, round));
            let ran = args.watch(site, row.relay, &programs, &clip, screenshot.as_deref());
            let ran = ran.map_err(|error| format!("{error:#}"));
            progress.end(&told(&ran))?;
            row.rounds.push(ran);
        }
    }
    drop((progress, sites));
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(|row| row.json(&args)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    super::figures::ensure_measured(rows.iter().map(|row| row.rounds.as_slice()))
}

struct Row {
    relay: Contender,
    profile: Profile,
    /// Which lab has this link.
    site: usize,
    rounds: Vec<Result<Figures, String>>,
}

impl Row {
    fn label(&self) -> String {
        format!("{}, {}", self.relay.label(), self.profile.name())
    }

    fn screenshot(&self, directory: &Path, round: usize) -> PathBuf {
        let relay = self.relay.to_possible_value();
        let relay = relay.as_ref().map_or(self.relay.relay(), |it| it.get_name());
        directory.join(format!("{relay}-{}-{round}.png", self.profile.name()))
    }

    /// Of the rounds that worked.
    fn figures(&self) -> Vec<Figures> {
        self.rounds.iter().flatten().copied().collect()
    }

    fn json(&self, args: &Args) -> Value {
        let round = |round: &Result<Figures, String>| match round {
            Ok(figures) => json!(figures),
            Err(error) => json!({ "error": error }),
        };
        let mut row = Figures::median(&self.figures());
        row.insert("relay".to_owned(), self.relay.relay().into());
        row.insert("engine".to_owned(), self.relay.engine().into());
        row.insert("profile".to_owned(), self.profile.name().into());
        row.insert("seconds".to_owned(), args.seconds.into());
        row.insert("spread".to_owned(), Figures::spread(&self.figures()).into());
        row.insert("rounds".to_owned(), self.rounds.iter().map(round).collect());
        if let Some(error) = error(&self.rounds) {
            row.insert("error".to_owned(), error.into());
        }
        row.into()
    }
}

fn told(round: &Result<Figures, String>) -> String {
    let ms = |ms: Option<f64>| ms.map_or_else(|| "never".to_owned(), |ms| format!("{ms:.0}"));
    match round {
        Ok(it) => format!(
            "{:.2} % shown, stalls {:.0} ms, glass to glass {} / {} ms, first picture {:.0} ms",
            it.frames_shown_pct,
            it.stall_ms_total,
            ms(it.glass_to_glass_p50_ms),
            ms(it.glass_to_glass_p95_ms),
            it.first_picture_ms
        ),
        Err(error) => error.clone(),
    }
}

/// Medians.
fn render(rows: &[Row]) -> String {
    const FIGURES: [(&str, &str, usize); 8] = [
        ("frames_shown_pct", "shown %", 2),
        ("stall_ms_total", "stalls ms", 0),
        ("longest_stall_ms", "longest ms", 0),
        ("glass_to_glass_p50_ms", "p50 ms", 0),
        ("glass_to_glass_p95_ms", "p95 ms", 0),
        ("longest_pause_ms", "pause ms", 0),
        ("first_picture_ms", "first ms", 0),
        ("buffer_ms", "buffer ms", 0),
    ];
    let head = ["relay, link"].into_iter().chain(FIGURES.map(|(_, head, _)| head));
    let mut lines = vec![head.map(str::to_owned).collect::<Vec<_>>()];
    for row in rows.iter().filter(|row| !row.figures().is_empty()) {
        let median = Figures::median(&row.figures());
        let cell = |(name, _, digits): (&str, _, usize)| {
            median.get(name).and_then(Value::as_f64).map_or_else(dash, |it| format!("{it:.digits$}"))
        };
        lines.push([row.label()].into_iter().chain(FIGURES.map(cell)).collect());
    }
    let errors = rows.iter().filter_map(|row| Some(format!("{}: {}\n", row.label(), error(&row.rounds)?)));
    columns(&lines) + &errors.collect::<String>()
}

impl Args {
    /// Relays vary fastest.
    fn rows(&self) -> Vec<Row> {
        let row = |site, profile, relay: &Contender| Row { relay: *relay, profile, site, rounds: Vec::new() };
        let profiles = self.impair.iter().copied().enumerate();
        profiles
            .flat_map(|(site, profile)| self.relays.iter().map(move |it| row(site, profile, it)))
            .collect()
    }

    fn sites(&self) -> anyhow::Result<Vec<Site>> {
        let site = |profile: &Profile| Site::new(&profile.topology(SUBSCRIBERS_LINK, clip::BITRATE)?);
        self.impair.iter().map(site).collect()
    }

    /// One viewer of one broadcast, who comes while it goes on.
    fn watch(
        &self,
        site: &Site,
        relay: Contender,
        programs: &Programs,
        clip: &Arc<Clip>,
        screenshot: Option<&Path>,
    ) -> anyhow::Result<Figures> {
        let mut served = Served::start(site, relay, &[])?;
        let broadcast = Broadcast::start(site, clip)?;
        let watch = SETTLING + Duration::from_secs(self.seconds) + LAST;
        let screenshot = screenshot.map(std::path::absolute).transpose()?;
        let task = Task { watch, buffer_ms: self.buffer_ms, screenshot: screenshot.as_deref() };
        let seen = Viewer::start(programs, site, served.page, &task)?.finish()?;
        served.check_runs()?;
        let (start, filmed) = broadcast.finish()?;
        Figures::of(start, filmed, &seen, self.seconds)
    }
}

/// A camera, and who publishes what it films. The publisher ends first: who waits for it to take something waits no more then.
struct Broadcast {
    publisher: Process,
    camera: Camera,
}

impl Broadcast {
    fn start(site: &Site, clip: &Arc<Clip>) -> anyhow::Result<Self> {
        let route = site.route()?;
        let mut command = route.publisher.command(product()?);
        let url = format!("moqt://{}", route.relay);
        // The same for all relays: of a later draft's publisher, moq-relay does not always pass on the catalog to the page.
        command.args(["publish", "--draft", "18", "--name", NAME, "--tls-disable-verify", &url]);
        let (publisher, input) = Process::start_fed("publisher", command, site.directory())?;
        Ok(Self { publisher, camera: Camera::start(Arc::clone(clip), input)? })
    }

    /// When it began, and how many frames there were.
    fn finish(mut self) -> anyhow::Result<(Duration, u64)> {
        self.publisher.check_runs()?;
        Ok((self.camera.start, self.camera.finish()?))
    }
}
