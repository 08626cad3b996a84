//! Tests of media from a publisher through a relay to players: the output of real muxers, an input that restarts, other
//! containers, and several languages. All are real processes, and ffmpeg checks the result.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use millrace_testkit::show_log_on_panic;
use process::{RunningRelay, millrace, wait_for};

/// A process that publishes or plays; killed when dropped.
struct MediaClient {
    process: Child,
    said: PathBuf,
}

impl MediaClient {
    /// Starts a client whose output goes to files `NAME.mp4` and `NAME.stderr`.
    fn start(relay: &RunningRelay, name: &str, args: &[&str]) -> Self {
        let said = relay.path(&format!("{name}.stderr"));
        let process = millrace()
            .args([args[0], &relay.url(), "--tls-disable-verify"])
            .args(&args[1..])
            .stdin(Stdio::null())
            .stdout(fs::File::create(relay.path(&format!("{name}.mp4"))).unwrap())
            .stderr(fs::File::create(&said).unwrap())
            .spawn()
            .unwrap();
        Self { process, said }
    }

    /// Starts a publisher that waits for its first subscriber, and publishes at the pace of its input.
    fn publish(relay: &RunningRelay, broadcast: &str, file: &Path) -> Self {
        let broadcast_flag = format!("--name={broadcast}");
        let args = ["publish", &broadcast_flag, "--realtime", "--wait", file.to_str().unwrap()];
        let publisher = Self::start(relay, &format!("publish-{broadcast}"), &args);
        wait_for("the publisher's session", || publisher.said().contains("publishing").then_some(()));
        publisher
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.said).unwrap()
    }

    fn exit_code(&mut self) -> Option<i32> {
        wait_for("the end of a client", || self.process.try_wait().unwrap()).code()
    }
}

impl Drop for MediaClient {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        show_log_on_panic("a client", &self.said);
    }
}

fn size(file: &Path) -> u64 {
    fs::metadata(file).map_or(0, |file| file.len())
}

/// Decodes a file with ffmpeg, and returns the errors that ffmpeg prints.
fn complaints(file: &Path) -> String {
    let output = Command::new("ffmpeg")
        .args(["-nostdin", "-v", "error", "-i"])
        .arg(file)
        .args(["-map", "0:v:0", "-map", "0:a:0?", "-f", "null", "-"])
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the kind, width and language of each stream, as ffprobe reports them.
fn streams(file: &Path) -> Vec<String> {
    let output = Command::new("ffprobe")
        .args([
            "-v",
            "error",
            "-show_entries",
            "stream=codec_type,width:stream_tags=language",
            "-of",
            "csv=p=0",
        ])
        .arg(file)
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// Makes ffmpeg write a file. Returns false if it is not installed or fails.
fn ffmpeg(args: &[&str], file: &Path) -> bool {
    let status = Command::new("ffmpeg").args(["-nostdin", "-v", "error", "-y"]).args(args).arg(file).status();
    let is_made = status.is_ok_and(|status| status.success());
    if !is_made {
        println!("SKIP: ffmpeg with these encoders is not here");
    }
    is_made
}

fn kept(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../moq/client/tests/media").join(name)
}

const CMAF: [&str; 4] =
    ["-f", "mp4", "-movflags", "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame"];
const H264: [&str; 8] = ["-c:v", "libx264", "-preset", "ultrafast", "-pix_fmt", "yuv420p", "-g", "10"];

#[test]
fn media_of_other_muxers_plays_from_the_start_and_late() {
    if Command::new("ffmpeg").arg("-version").output().is_err() {
        println!("SKIP media_of_other_muxers_plays_from_the_start_and_late: no ffmpeg");
        return;
    }
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    // These files have absolute offsets, two videos, key frames marked by the non-sync bit alone, and several tracks in
    // a fragment.
    let names = ["sep_nodbm", "twovideo", "shaka_video", "muxed_dbm"];
    let mut running = Vec::new();
    for name in names {
        let publisher = MediaClient::publish(&relay, name, &kept(&format!("{name}.mp4")));
        let flag = format!("--name={name}");
        let first = MediaClient::start(&relay, &format!("{name}-first"), &["subscribe", &flag]);
        running.push((name, flag, publisher, first));
    }
    let mut late = Vec::new();
    for (name, flag, ..) in &running {
        let third = size(&kept(&format!("{name}.mp4"))) / 3;
        let written = relay.path(&format!("{name}-first.mp4"));
        wait_for("a third of the media at the first player", || (size(&written) > third).then_some(()));
        late.push(MediaClient::start(&relay, &format!("{name}-late"), &["subscribe", flag]));
    }
    for ((name, _, publisher, first), late) in running.iter_mut().zip(&mut late) {
        assert_eq!(publisher.exit_code(), Some(0));
        assert_eq!((first.exit_code(), late.exit_code()), (Some(0), Some(0)), "{name}");
        for who in ["first", "late"] {
            let file = relay.path(&format!("{name}-{who}.mp4"));
            assert_eq!(complaints(&file), "", "{name}, {who}");
            assert!(size(&file) > 10_000, "{name}, {who}: {} bytes", size(&file));
        }
    }
}

#[test]
fn players_follow_input_that_restarts() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let mut input = Vec::new();
    for size in ["160x90", "320x180"] {
        let source = format!("testsrc2=size={size}:rate=25:duration=2");
        let file = relay.path(size);
        if !ffmpeg(&[&["-f", "lavfi", "-i", &source][..], &H264, &CMAF].concat(), &file) {
            return;
        }
        input.extend(fs::read(file).unwrap());
    }
    let both = relay.path("both.mp4");
    fs::write(&both, input).unwrap();
    let mut publisher = MediaClient::publish(&relay, "live", &both);
    let mut player = MediaClient::start(&relay, "player", &["subscribe", "--name=live"]);
    assert_eq!(publisher.exit_code(), Some(0));
    assert!(publisher.said().contains("new init segment"), "{}", publisher.said());
    assert_eq!(player.exit_code(), Some(0));
    let written = fs::read(relay.path("player.mp4")).unwrap();
    let begins: Vec<_> =
        (4..written.len() - 4).filter(|at| &written[*at..at + 4] == b"ftyp").map(|at| at - 4).collect();
    let [0, second] = begins[..] else { panic!("init segments at {begins:?}") };
    for (name, part, width) in
        [("one.mp4", &written[..second], "160"), ("two.mp4", &written[second..], "320")]
    {
        let file = relay.path(name);
        fs::write(&file, part).unwrap();
        assert_eq!(complaints(&file), "", "{name}");
        assert!(streams(&file)[0].contains(width), "{:?}", streams(&file));
    }
}

#[test]
fn suggested_command_for_mpeg_ts_works() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let file = relay.path("two words.ts");
    let source = ["-f", "lavfi", "-i", "testsrc2=size=160x90:rate=25:duration=1"];
    if !ffmpeg(&[&source[..], &H264, &["-f", "mpegts"]].concat(), &file) {
        return;
    }
    let mut publisher =
        MediaClient::start(&relay, "publish", &["publish", "--name=live", file.to_str().unwrap()]);
    assert_eq!(publisher.exit_code(), Some(1));
    let said = publisher.said();
    assert!(said.contains("the input is MPEG-TS, not MP4"), "{said}");
    let line = said.lines().find(|line| line.contains("ffmpeg -i")).unwrap();
    let (remux, again) = line.trim().split_once(" | ").unwrap();
    assert_eq!(again, format!("millrace publish {} --tls-disable-verify --name=live", relay.url()));
    let binary = env!("CARGO_BIN_EXE_millrace");
    let line = format!("{remux} | {binary}{}", again.trim_start_matches("millrace"));
    let output = Command::new("sh").args(["-c", &line]).output().unwrap();
    assert!(output.status.success(), "{line}: {output:?}");
}

#[test]
fn player_chooses_sound_and_subtitles() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let subtitles = relay.path("words.srt");
    fs::write(&subtitles, "1\n00:00:00,000 --> 00:00:01,500\nwords\n").unwrap();
    let file = relay.path("languages.mp4");
    let sound = ["-f", "lavfi", "-i", "sine=frequency=440:duration=2"];
    let inputs =
        [&["-f", "lavfi", "-i", "testsrc2=size=160x90:rate=25:duration=2"][..], &sound, &sound].concat();
    let maps = ["-i", subtitles.to_str().unwrap(), "-map", "0", "-map", "1", "-map", "2", "-map", "3"];
    let named = [
        "-metadata:s:a:0",
        "language=deu",
        "-metadata:s:a:1",
        "language=eng",
        "-metadata:s:s:0",
        "language=eng",
    ];
    let codecs = ["-c:a", "aac", "-c:s", "mov_text"];
    // With `frag_every_frame` ffmpeg would not make a fragment for each frame of subtitles.
    let fragments = ["-f", "mp4", "-movflags", "frag_keyframe+empty_moov+default_base_moof"];
    if !ffmpeg(&[&inputs[..], &maps, &H264, &codecs, &named, &fragments].concat(), &file) {
        return;
    }
    let mut publisher = MediaClient::publish(&relay, "live", &file);
    let mut players = vec![];
    for (name, args, expected) in [
        ("english", &["--language=en"][..], &["video,160", "audio,eng", "subtitle,eng"][..]),
        ("german", &["--language=ger"], &["video,160", "audio,deu"]),
        ("named", &["--track=1.m4s", "--track=3.m4s"], &["video,160", "audio,eng"]),
    ] {
        players.push((
            name,
            MediaClient::start(&relay, name, &[&["subscribe", "--name=live"], args].concat()),
            expected,
        ));
    }
    assert_eq!(publisher.exit_code(), Some(0));
    for (name, player, expected) in &mut players {
        assert_eq!(player.exit_code(), Some(0), "{name}");
        let file = relay.path(&format!("{name}.mp4"));
        assert_eq!(complaints(&file), "", "{name}");
        let found = streams(&file);
        let is_like =
            |(found, expected): (&String, &&str)| expected.split(',').all(|part| found.contains(part));
        assert!(
            found.len() == expected.len() && found.iter().zip(*expected).all(is_like),
            "{name}: {found:?}"
        );
    }
    let mut player = MediaClient::start(&relay, "french", &["subscribe", "--name=live", "--language=fr"]);
    assert_eq!(player.exit_code(), Some(1));
}
