//! `millrace publish`: fragmented MP4 or generated objects towards a relay.

mod ladder;

use std::{
    io::IsTerminal as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow, bail, ensure};
use millrace_client::{
    broadcast::History,
    generate::{Generator, Settings, Shape, Unusable},
    media::{self, Cut, HOW, MOVFLAGS, Packaging},
    publish::{self, Input, Options, Report, publish},
};
use millrace_daemon::{log, render::print};
use millrace_moq::Namespace;
use millrace_relay_daemon::config::Seconds;

use super::connect::{ConnectArgs, until_stopped};

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    connect: ConnectArgs,
    /// Name of the broadcast: a namespace, its fields divided by /
    #[arg(long)]
    name: String,
    /// Push the tracks with PUBLISH, without waiting to be asked
    #[arg(long)]
    publish: bool,
    /// Fragmented MP4; standard input without it. Three of them with --ladder
    #[arg(value_name = "FILE", num_args = 0..=3, conflicts_with = "generate")]
    input: Vec<PathBuf>,
    /// Publish media at the pace of its timestamps: for input that is not live
    #[arg(long, conflicts_with = "generate")]
    realtime: bool,
    /// Cut video into subgroups by what can be done without: key frames, delta frames, and frames that no other needs, each
    /// less urgent, and sound before all of them; a relay short of room drops the least urgent first
    #[arg(long, conflicts_with = "generate")]
    subgroups: bool,
    /// What an object of media is
    #[arg(long, value_enum, default_value_t, conflicts_with = "generate")]
    packaging: PackagingArg,
    /// Publish three renditions as alternates of each other, at the pace of their timestamps: of FILE, encoded with ffmpeg (a key
    /// frame each second), or three FILEs, the best first, whose key frames are at the same times
    #[arg(long, requires = "input", conflicts_with_all = ["generate", "realtime"])]
    ladder: bool,
    /// What the video of each rendition takes, kbit/s, the best first
    #[arg(long, value_delimiter = ',', default_values_t = ladder::KBIT, value_name = "KBIT,...", requires = "ladder")]
    ladder_kbit: Vec<u64>,
    /// ID of the first group of all tracks, for publishers of the same objects that stand in for each other [default: the time,
    /// milliseconds since 1970]
    #[arg(long, value_name = "N")]
    first_group: Option<u64>,
    /// How much of a track is kept for those who lag or fetch: 500ms, 1m, or a number of seconds
    #[arg(long, default_value = "10s", value_name = "TIME")]
    history: Seconds,
    /// Begin when the first subscriber is there
    #[arg(long)]
    wait: bool,
    /// Print figures as one JSON object at the end
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    generate: GenerateArgs,
}

/// What an object of media is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum PackagingArg {
    /// A fragment of MP4, as it comes in
    #[default]
    Cmaf,
    /// A sample with its time, in LOC (the Low Overhead Media Container): 100 bytes less for each, for players that read it
    Loc,
}

impl From<PackagingArg> for Packaging {
    fn from(arg: PackagingArg) -> Self {
        match arg {
            PackagingArg::Cmaf => Self::Cmaf,
            PackagingArg::Loc => Self::Loc,
        }
    }
}

/// What to generate.
#[derive(Clone, Debug, clap::Args)]
struct GenerateArgs {
    /// Publish generated objects instead of media
    #[arg(long)]
    generate: bool,
    /// Payload of an object, in bytes (32 or more)
    #[arg(long, default_value_t = 1200, value_name = "N", requires = "generate")]
    object_bytes: usize,
    /// Sizes of the payloads in turn, one a line, instead; lines that begin with # do not count
    #[arg(long, value_name = "FILE", requires = "generate", conflicts_with = "object_bytes")]
    object_sizes: Option<PathBuf>,
    /// Objects per second (0.1 to 100,000)
    #[arg(long, default_value_t = 500.0, value_name = "R", requires = "generate")]
    rate_hz: f64,
    /// Objects in a group
    #[arg(long, default_value_t = 50, value_name = "G", requires = "generate")]
    objects_per_group: u64,
    /// How long to go on: 90s, 10m, or a number of seconds; forever without it
    #[arg(long, value_name = "TIME", requires = "generate")]
    duration: Option<Seconds>,
    /// Priorities of the subgroups of a group; its objects take turns in them
    #[arg(long, default_value = "128", value_delimiter = ',', value_name = "P,...", requires = "generate")]
    priority_pattern: Vec<u8>,
    /// Send each object as a datagram
    #[arg(long, requires = "generate")]
    datagrams: bool,
    /// How objects share streams
    #[arg(long, value_enum, default_value_t, requires = "generate", conflicts_with = "datagrams")]
    streams: StreamsPer,
    /// Name of the generated track
    #[arg(long, default_value = "objects", value_name = "T")]
    track: String,
}

/// How objects share streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum StreamsPer {
    /// One stream per subgroup of a group
    #[default]
    Group,
    /// One stream per object
    Object,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    log::to_stderr();
    let json = args.json;
    let runtime = tokio::runtime::Runtime::new()?;
    let report = runtime.block_on(publish_as_asked(args));
    // Nobody waits for what reads the input: a pipe may stay open without a byte.
    runtime.shutdown_background();
    let report = report?;
    if json {
        print(&(serde_json::to_string(&report)? + "\n"))?;
    }
    Ok(())
}

async fn publish_as_asked(args: Args) -> anyhow::Result<Report> {
    let namespace = Namespace::from_path(&args.name).context("--name is not a namespace")?;
    let Seconds(max_age) = args.history;
    let cut = if args.subgroups { Cut::ByNeed } else { Cut::Whole };
    let packaging = args.packaging.into();
    ensure!(
        !args.ladder || packaging == Packaging::Cmaf,
        "--packaging loc is for one rendition: leave out --ladder, or publish it as cmaf"
    );
    let files = args.input.clone();
    let mut encoders = None;
    let input = match (args.generate.generate, &args.input[..]) {
        (true, _) => args.generate.input()?,
        (false, files) if args.ladder => {
            let bitrates = ladder::bitrates(&args.ladder_kbit)?;
            let renditions = match files {
                [file] => {
                    let (started, renditions) = ladder::encode(file, bitrates)?;
                    encoders = Some(started);
                    renditions
                }
                [best, middle, least] => ladder::open([best, middle, least], bitrates).await?,
                _ => bail!("--ladder takes one file, or three"),
            };
            Input::Ladder { renditions, cut }
        }
        (false, []) => media(None, args.realtime, packaging, cut).await?,
        (false, [file]) => media(Some(file), args.realtime, packaging, cut).await?,
        (false, _) => bail!("several files are for --ladder"),
    };
    let stop = until_stopped(None)?;
    let options = Options {
        first_group: args.first_group,
        reconnect: args.connect.reconnect.unwrap_or(true),
        remote: args.connect.remote(),
        namespace,
        input,
        push: args.publish,
        history: History { max_age, ..History::default() },
        wait: args.wait,
    };
    let report = publish(options, stop).await;
    drop(encoders);
    report.map_err(|error| match &error {
        publish::Error::Media(media::Error::NotMp4(Some(what))) => remuxed(what, &files),
        _ => error.into(),
    })
}

/// Makes an error of input in another container: with the line that has ffmpeg put it into MP4, without encoding it again.
fn remuxed(what: &str, files: &[PathBuf]) -> anyhow::Error {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    anyhow!(
        "the input is {what}, not MP4; this has ffmpeg make MP4 of it, as it is encoded:\n    {}",
        remux_line(files, &arguments)
    )
}

/// Writes a command line that pipes input through ffmpeg into `millrace`, which had these arguments.
fn remux_line(files: &[PathBuf], arguments: &[String]) -> String {
    let names: Vec<_> = files.iter().map(|file| file.to_string_lossy().into_owned()).collect();
    let input = names.first().map_or_else(|| "-".to_owned(), |name| quoted(name));
    let rest = arguments.iter().filter(|argument| !names.contains(argument)).map(|argument| quoted(argument));
    let rest: Vec<_> = rest.collect();
    let reader = if names.is_empty() { "... | " } else { "" };
    format!("{reader}ffmpeg -i {input} -c copy -f mp4 -movflags {MOVFLAGS} - | millrace {}", rest.join(" "))
}

/// Quotes a word for a shell, where that is needed.
fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=,@%+[]".contains(&byte);
    match !word.is_empty() && word.bytes().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

async fn media(file: Option<&Path>, realtime: bool, packaging: Packaging, cut: Cut) -> anyhow::Result<Input> {
    let Some(path) = file else {
        ensure!(
            !std::io::stdin().is_terminal(),
            "nothing to publish: {HOW}, or name a FILE, or add --generate"
        );
        return Ok(Input::Media { reader: Box::new(tokio::io::stdin()), realtime, packaging, cut });
    };
    Ok(Input::Media { reader: Box::new(open(path).await?), realtime, packaging, cut })
}

async fn open(path: &Path) -> anyhow::Result<tokio::fs::File> {
    tokio::fs::File::open(path).await.with_context(|| format!("cannot open {}", path.display()))
}

/// Of a file, one a line.
fn sizes(path: &Path) -> anyhow::Result<Vec<usize>> {
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("--object-sizes: cannot read {}", path.display()))?;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let sizes: Result<Vec<_>, _> = lines.map(|line| line.trim().parse()).collect();
    let sizes = sizes.with_context(|| format!("--object-sizes: {} has other lines", path.display()))?;
    ensure!(!sizes.is_empty(), "--object-sizes: {} has no lines", path.display());
    Ok(sizes)
}

impl GenerateArgs {
    fn input(self) -> anyhow::Result<Input> {
        let shape = match (self.datagrams, self.streams) {
            (true, _) => Shape::Datagrams,
            (false, StreamsPer::Group) => Shape::Groups,
            (false, StreamsPer::Object) => Shape::Objects,
        };
        let generator = Generator::new(Settings {
            object_bytes: self.object_bytes,
            sizes: self.object_sizes.as_deref().map(sizes).transpose()?.unwrap_or_default(),
            rate_hz: self.rate_hz,
            objects_per_group: self.objects_per_group,
            duration: self.duration.map(|Seconds(time)| time.as_secs_f64()),
            priority_pattern: self.priority_pattern,
            shape,
        });
        // Settings and flags have the same names.
        let generator =
            generator.map_err(|Unusable { name, rule }| anyhow!("--{} {rule}", name.replace('_', "-")))?;
        Ok(Input::Generated { generator, track: self.track })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_that_remuxes_is_one_that_a_shell_takes() {
        let arguments =
            ["publish", "--name", "live/it's", "clip 1.ts", "moqt://[::1]:4443"].map(str::to_owned);
        let line = remux_line(&["clip 1.ts".into()], &arguments);
        let expected = format!(
            "ffmpeg -i 'clip 1.ts' -c copy -f mp4 -movflags {MOVFLAGS} - | millrace publish --name 'live/it'\\''s' moqt://[::1]:4443"
        );
        assert_eq!(line, expected);
        let piped = remux_line(&[], &["publish".to_owned()]);
        assert_eq!(
            piped,
            format!("... | ffmpeg -i - -c copy -f mp4 -movflags {MOVFLAGS} - | millrace publish")
        );
    }
}
