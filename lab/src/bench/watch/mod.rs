//! `millrace-lab bench watch`: what a viewer in a browser sees, with the player of the relay's own page.

pub mod clip;
mod seen;
pub mod viewer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::ValueEnum as _;
use serde_json::{Value, json};

use self::clip::{ClipCamera, EncodedClip};
use self::seen::WatchFigures;
use self::viewer::{BrowserViewer, ServedPage, ViewerPrograms, ViewerTask};
use super::contender::Contender;
use super::figures::error;
use super::process::BenchProcess;
use super::profile::LinkProfile;
use super::site::{BenchSite, SUBSCRIBERS_LINK};
use super::table::{columns, dash, write_json};
use super::usage::warn_if_busy;
use crate::program::product;
use crate::progress::BenchProgress;

#[derive(Debug, clap::Args)]
pub struct WatchArgs {
    /// Relays to measure, in interleaved runs
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user,moq-relay")]
    relays: Vec<Contender>,
    /// Impairments of the link to the browser, in interleaved runs; only impairments that do not change over time
    #[arg(long, value_enum, value_delimiter = ',', default_value = "clean,loss1")]
    impair: Vec<LinkProfile>,
    /// Length of the measurement, which starts a second after the first picture
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Number of runs of every relay with every link
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Buffer of the player, ms
    #[arg(long, default_value_t = 100, value_name = "MS")]
    buffer_ms: u32,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keep a screenshot of the end of each run in this directory
    #[arg(long, value_name = "DIR")]
    screenshots: Option<PathBuf>,
}

const NAME: &str = "live";
/// Time after the first picture during which nothing is measured.
const SETTLING: Duration = Duration::from_secs(1);
/// Longest wait until the last measured frame is shown.
const LAST: Duration = Duration::from_secs(2);
/// Length of the video beyond the measured time, seconds: for the start of the viewer, and a reserve.
const SPARE: u64 = viewer::LIMIT.as_secs() + 10;

pub fn run(args: WatchArgs) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.seconds > 0, "--rounds and --seconds must be at least 1");
    let most = clip::MOST_SECONDS - SPARE;
    ensure!(args.seconds <= most, "--seconds must be at most {most}: frame numbers have 16 bits");
    ensure!(
        !args.relays.iter().any(|relay| relay.is_plain()),
        "plain UDP has no tracks: leave it out of --relays"
    );
    ensure!(
        !args.impair.contains(&LinkProfile::Mobile),
        "--impair: mobile cannot be measured, since it is not constant"
    );
    warn_if_busy()?;
    let programs = ViewerPrograms::find()?;
    if let Some(directory) = &args.screenshots {
        let cannot = || format!("cannot make {}", directory.display());
        std::fs::create_dir_all(directory).with_context(cannot)?;
    }
    let clip = Arc::new(EncodedClip::encode(args.seconds + SPARE)?);
    let mut rows = args.rows();
    let sites = args.sites()?;
    let progress = BenchProgress::with_steps(args.rounds * rows.len());
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

struct WatchRow {
    relay: Contender,
    profile: LinkProfile,
    /// Index of the lab (network with its own impaired link) whose link has the impairment `profile`.
    site: usize,
    rounds: Vec<Result<WatchFigures, String>>,
}

impl WatchRow {
    fn label(&self) -> String {
        format!("{}, {}", self.relay.label(), self.profile.name())
    }

    fn screenshot(&self, directory: &Path, round: usize) -> PathBuf {
        let relay = self.relay.to_possible_value();
        let relay = relay.as_ref().map_or(self.relay.relay(), |it| it.get_name());
        directory.join(format!("{relay}-{}-{round}.png", self.profile.name()))
    }

    /// Returns what the viewer saw in each successful round: frames, stalls and latency.
    fn figures(&self) -> Vec<WatchFigures> {
        self.rounds.iter().flatten().copied().collect()
    }

    fn json(&self, args: &WatchArgs) -> Value {
        let round = |round: &Result<WatchFigures, String>| match round {
            Ok(figures) => json!(figures),
            Err(error) => json!({ "error": error }),
        };
        let mut row = WatchFigures::median(&self.figures());
        row.insert("relay".to_owned(), self.relay.relay().into());
        row.insert("engine".to_owned(), self.relay.engine().into());
        row.insert("profile".to_owned(), self.profile.name().into());
        row.insert("seconds".to_owned(), args.seconds.into());
        row.insert("spread".to_owned(), WatchFigures::spread(&self.figures()).into());
        row.insert("rounds".to_owned(), self.rounds.iter().map(round).collect());
        if let Some(error) = error(&self.rounds) {
            row.insert("error".to_owned(), error.into());
        }
        row.into()
    }
}

fn told(round: &Result<WatchFigures, String>) -> String {
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

/// Renders a table with the medians over the rounds.
fn render(rows: &[WatchRow]) -> String {
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
        let median = WatchFigures::median(&row.figures());
        let cell = |(name, _, digits): (&str, _, usize)| {
            median.get(name).and_then(Value::as_f64).map_or_else(dash, |it| format!("{it:.digits$}"))
        };
        lines.push([row.label()].into_iter().chain(FIGURES.map(cell)).collect());
    }
    let errors = rows.iter().filter_map(|row| Some(format!("{}: {}\n", row.label(), error(&row.rounds)?)));
    columns(&lines) + &errors.collect::<String>()
}

impl WatchArgs {
    /// Lists the result rows. Consecutive rows have different relays, so that a machine that becomes slower or faster
    /// during the benchmark affects all relays alike.
    fn rows(&self) -> Vec<WatchRow> {
        let row =
            |site, profile, relay: &Contender| WatchRow { relay: *relay, profile, site, rounds: Vec::new() };
        let profiles = self.impair.iter().copied().enumerate();
        profiles
            .flat_map(|(site, profile)| self.relays.iter().map(move |it| row(site, profile, it)))
            .collect()
    }

    fn sites(&self) -> anyhow::Result<Vec<BenchSite>> {
        let site =
            |profile: &LinkProfile| BenchSite::new(&profile.topology(SUBSCRIBERS_LINK, clip::BITRATE)?);
        self.impair.iter().map(site).collect()
    }

    /// Runs one viewer that joins a broadcast which is already live.
    fn watch(
        &self,
        site: &BenchSite,
        relay: Contender,
        programs: &ViewerPrograms,
        clip: &Arc<EncodedClip>,
        screenshot: Option<&Path>,
    ) -> anyhow::Result<WatchFigures> {
        let mut served = ServedPage::start(site, relay, &[])?;
        let broadcast = WatchBroadcast::start(site, clip)?;
        let watch = SETTLING + Duration::from_secs(self.seconds) + LAST;
        let screenshot = screenshot.map(std::path::absolute).transpose()?;
        let task = ViewerTask { watch, buffer_ms: self.buffer_ms, screenshot: screenshot.as_deref() };
        let seen = BrowserViewer::start(programs, site, served.page, &task)?.finish()?;
        served.check_runs()?;
        let (start, filmed) = broadcast.finish()?;
        WatchFigures::from_report(start, filmed, &seen, self.seconds)
    }
}

/// A camera and its publisher. The publisher is dropped first, so that no write to its pipe blocks any longer.
struct WatchBroadcast {
    publisher: BenchProcess,
    camera: ClipCamera,
}

impl WatchBroadcast {
    fn start(site: &BenchSite, clip: &Arc<EncodedClip>) -> anyhow::Result<Self> {
        let route = site.route()?;
        let mut command = route.publisher.command(product()?);
        let url = format!("moqt://{}", route.relay);
        // The publisher uses the same draft with every relay. moq-relay does not always forward the catalog of a later
        // draft's publisher to the page.
        command.args(["publish", "--draft", "18", "--name", NAME, "--tls-disable-verify", &url]);
        let (publisher, input) = BenchProcess::start_fed("publisher", command, site.directory())?;
        Ok(Self { publisher, camera: ClipCamera::start(Arc::clone(clip), input)? })
    }

    /// Ends the broadcast. Returns the time when it started and the number of frames.
    fn finish(mut self) -> anyhow::Result<(Duration, u64)> {
        self.publisher.check_runs()?;
        Ok((self.camera.start, self.camera.finish()?))
    }
}
