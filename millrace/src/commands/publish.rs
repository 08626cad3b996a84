//! `millrace publish`: publishes fragmented MP4 or generated objects to a relay.

mod ladder;

use std::{
    io::IsTerminal as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow, bail, ensure};
use millrace_client::{
    broadcast::History,
    generate::{Generator, ObjectShape, Settings, Unusable},
    media::{self, Cut, HOW, MOVFLAGS, Packaging},
    publish::{self, Input, PublishOptions, PublishReport, publish},
};
use millrace_daemon::{log, render::print};
use millrace_moq::Namespace;
use millrace_relay_daemon::config::DurationValue;

use super::connect::{ConnectArgs, wait_until_stopped};

#[derive(Clone, Debug, clap::Args)]
pub struct PublishArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    /// Name of the broadcast: a namespace with fields separated by /
    #[arg(long)]
    name: String,
    /// Push the tracks with PUBLISH, without waiting for a subscription
    #[arg(long)]
    publish: bool,
    /// File with fragmented MP4; standard input without it. With --ladder, one or three files
    #[arg(value_name = "FILE", num_args = 0..=3, conflicts_with = "generate")]
    input: Vec<PathBuf>,
    /// Publish media at the pace of its time stamps: for input that is not live
    #[arg(long, conflicts_with = "generate")]
    realtime: bool,
    /// Divide video into subgroups by importance: key frames, frames that other frames refer to, and the rest. A relay
    /// short of capacity drops the least important first, and sound last
    #[arg(long, conflicts_with = "generate")]
    subgroups: bool,
    /// Format of the media in an object
    #[arg(long, value_enum, default_value_t, conflicts_with = "generate")]
    packaging: PackagingArg,
    /// Publish three renditions of a video as alternates: one FILE, which ffmpeg encodes three times, or three FILEs,
    /// the best first, with key frames at the same times
    #[arg(long, requires = "input", conflicts_with_all = ["generate", "realtime"])]
    ladder: bool,
    /// Bit rate of each rendition's video in kbit/s, the best first
    #[arg(long, value_delimiter = ',', default_values_t = ladder::KBIT, value_name = "KBIT,...", requires = "ladder")]
    ladder_kbit: Vec<u64>,
    /// ID of the first group of all tracks; publishers that replace each other need the same one [default: the time,
    /// milliseconds since 1970]
    #[arg(long, value_name = "N")]
    first_group: Option<u64>,
    /// Number groups by media time, one for each TIME, which is the distance of key frames. Publishers of the same
    /// media then number alike, so that a relay goes on with another one when one is lost. The media time is that of
    /// prft boxes, or the time stamps; generated objects are numbered by the clock [default without a value: 1s]
    #[arg(
        long,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1s",
        value_name = "TIME",
        conflicts_with = "first_group"
    )]
    replica: Option<DurationValue>,
    /// Media time of each track that is kept for subscribers that lag or fetch: 500ms, 1m, or a number of seconds
    #[arg(long, default_value = "10s", value_name = "TIME")]
    history: DurationValue,
    /// Start when the first subscriber has arrived
    #[arg(long)]
    wait: bool,
    /// Print statistics of generated objects and sent packets as one JSON object at the end
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    generate: GenerateArgs,
}

/// The format of the media in an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum PackagingArg {
    /// An MP4 fragment (CMAF), as in the input
    #[default]
    Cmaf,
    /// A sample with its time in LOC, the Low Overhead Media Container: 100 bytes less per sample, for players that
    /// support it
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

/// The number, size, rate and priority of generated objects.
#[derive(Clone, Debug, clap::Args)]
struct GenerateArgs {
    /// Publish generated objects instead of media
    #[arg(long)]
    generate: bool,
    /// Length of the payload of each generated object, bytes (32 or more)
    #[arg(long, default_value_t = 1200, value_name = "N", requires = "generate")]
    object_bytes: usize,
    /// File with the payload lengths of successive generated objects, one per line, in bytes; lines that begin with #
    /// are ignored
    #[arg(long, value_name = "FILE", requires = "generate", conflicts_with = "object_bytes")]
    object_sizes: Option<PathBuf>,
    /// Rate of generated objects per second: 0.1 to 100,000
    #[arg(long, default_value_t = 500.0, value_name = "R", requires = "generate")]
    rate_hz: f64,
    /// Number of generated objects in a group
    #[arg(long, default_value_t = 50, value_name = "G", requires = "generate")]
    objects_per_group: u64,
    /// Time to generate objects: 90s, 10m, or a number of seconds; without end by default
    #[arg(long, value_name = "TIME", requires = "generate")]
    duration: Option<DurationValue>,
    /// Priorities of the subgroups of each generated group; objects go into the subgroups in turn
    #[arg(long, default_value = "128", value_delimiter = ',', value_name = "P,...", requires = "generate")]
    priority_pattern: Vec<u8>,
    /// Send each generated object as a datagram
    #[arg(long, requires = "generate")]
    datagrams: bool,
    /// Which generated objects share a stream
    #[arg(long, value_enum, default_value_t, requires = "generate", conflicts_with = "datagrams")]
    streams: StreamsPer,
    /// Name of the generated track
    #[arg(long, default_value = "objects", value_name = "T")]
    track: String,
}

/// Which generated objects share a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum StreamsPer {
    /// One stream for each subgroup of a group
    #[default]
    Group,
    /// One stream for each object
    Object,
}

pub fn run(args: PublishArgs) -> anyhow::Result<()> {
    log::to_stderr();
    let json = args.json;
    let runtime = tokio::runtime::Runtime::new()?;
    let report = runtime.block_on(publish_as_asked(args));
    // The runtime is shut down without waiting for the thread that reads standard input, since that read may block
    // forever.
    runtime.shutdown_background();
    let report = report?;
    if json {
        print(&(serde_json::to_string(&report)? + "\n"))?;
    }
    Ok(())
}

async fn publish_as_asked(args: PublishArgs) -> anyhow::Result<PublishReport> {
    let namespace = Namespace::from_path(&args.name).context("--name is not a namespace")?;
    let DurationValue(max_age) = args.history;
    let cut = if args.subgroups { Cut::ByNeed } else { Cut::Whole };
    let packaging = args.packaging.into();
    ensure!(
        !args.ladder || packaging == Packaging::Cmaf,
        "--packaging loc is for one rendition: remove --ladder, or use --packaging cmaf"
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
        (false, _) => bail!("several files need --ladder: give one file, or add --ladder"),
    };
    let stop = wait_until_stopped(None)?;
    let options = PublishOptions {
        first_group: args.first_group,
        replica: args.replica.map(|DurationValue(time)| time),
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

/// Makes the error for input in another container than MP4. It has the command line that converts the input with
/// ffmpeg, without encoding it again.
fn remuxed(what: &str, files: &[PathBuf]) -> anyhow::Error {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    anyhow!(
        "the input is {what}, not MP4; this command converts it to MP4 with ffmpeg, without encoding it again:\n    {}",
        remux_line(files, &arguments)
    )
}

/// Formats a command line that pipes the input through ffmpeg into `millrace`, with this process's other arguments.
fn remux_line(files: &[PathBuf], arguments: &[String]) -> String {
    let names: Vec<_> = files.iter().map(|file| file.to_string_lossy().into_owned()).collect();
    let input = names.first().map_or_else(|| "-".to_owned(), |name| quoted(name));
    let rest = arguments.iter().filter(|argument| !names.contains(argument)).map(|argument| quoted(argument));
    let rest: Vec<_> = rest.collect();
    let reader = if names.is_empty() { "... | " } else { "" };
    format!("{reader}ffmpeg -i {input} -c copy -f mp4 -movflags {MOVFLAGS} - | millrace {}", rest.join(" "))
}

/// Quotes a word for a shell, if needed.
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

/// Reads the payload lengths of generated objects from a file, one per line, in bytes.
fn sizes(path: &Path) -> anyhow::Result<Vec<usize>> {
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("--object-sizes: cannot read {}", path.display()))?;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let sizes: Result<Vec<_>, _> = lines.map(|line| line.trim().parse()).collect();
    let sizes =
        sizes.with_context(|| format!("--object-sizes: a line of {} is not a number", path.display()))?;
    ensure!(!sizes.is_empty(), "--object-sizes: the file {} has no numbers", path.display());
    Ok(sizes)
}

impl GenerateArgs {
    fn input(self) -> anyhow::Result<Input> {
        let shape = match (self.datagrams, self.streams) {
            (true, _) => ObjectShape::Datagrams,
            (false, StreamsPer::Group) => ObjectShape::Groups,
            (false, StreamsPer::Object) => ObjectShape::Objects,
        };
        let generator = Generator::new(Settings {
            object_bytes: self.object_bytes,
            sizes: self.object_sizes.as_deref().map(sizes).transpose()?.unwrap_or_default(),
            rate_hz: self.rate_hz,
            objects_per_group: self.objects_per_group,
            duration: self.duration.map(|DurationValue(time)| time.as_secs_f64()),
            priority_pattern: self.priority_pattern,
            shape,
        });
        // The generator's error names the refused field of its settings. The flag has the same name, with hyphens.
        let generator =
            generator.map_err(|Unusable { name, rule }| anyhow!("--{} {rule}", name.replace('_', "-")))?;
        Ok(Input::Generated { generator, track: self.track })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggested_ffmpeg_command_is_valid_for_a_shell() {
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
