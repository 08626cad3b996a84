//! Unmodified peers at fixed versions, built by `scripts/peers.sh`: `moq-test-client`, `moq-pub`, `moq-sub`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use process::{Relay, millrace, wait_for};

const MEDIA: Duration = Duration::from_secs(4);
const FRAMES: usize = 100;

/// The command of a peer, or `None` and a word about it.
fn peer(name: &str) -> Option<Command> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers");
    let root = std::env::var_os("MILLRACE_PEERS").map_or(target, PathBuf::from);
    let path = root.join("bin").join(name);
    if !path.exists() {
        println!("SKIP: no {}; scripts/peers.sh builds it", path.display());
        return None;
    }
    Some(Command::new(path))
}

fn is_there(tool: &str) -> bool {
    let found =
        Command::new(tool).arg("-version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !found {
        println!("SKIP: no {tool}");
    }
    found
}

fn url(relay: &Relay) -> String {
    format!("moqt://{}", relay.status().listen[0])
}

#[test]
fn every_case_of_moq_test_client_passes() {
    let Some(mut client) = peer("moq-test-client") else { return };
    let relay = Relay::start(tempfile::tempdir().unwrap(), &[]);
    let output = client.args(["--relay", &url(&relay), "--tls-disable-verify"]).output().unwrap();
    let tap = String::from_utf8_lossy(&output.stdout);
    let passed = tap.lines().filter(|line| line.starts_with("ok ")).count();
    assert_eq!((passed, tap.contains("\nnot ok ")), (18, false), "{tap}");
    assert!(output.status.success());
}

#[test]
fn media_from_moq_pub_to_two_moq_subs() {
    let (Some(publisher), Some(one), Some(other)) = (peer("moq-pub"), peer("moq-sub"), peer("moq-sub"))
    else {
        return;
    };
    carry(publisher, [one, other]);
}

#[test]
fn media_from_millrace_publish_to_two_moq_subs() {
    let (Some(one), Some(other)) = (peer("moq-sub"), peer("moq-sub")) else { return };
    carry(with("publish"), [one, other]);
}

#[test]
fn media_from_moq_pub_to_two_millrace_subscribes() {
    let Some(publisher) = peer("moq-pub") else { return };
    carry(publisher, [with("subscribe"), with("subscribe")]);
}

fn with(subcommand: &str) -> Command {
    let mut command = millrace();
    command.arg(subcommand);
    command
}

/// Media through the relay to two players: both have every frame, byte for byte.
fn carry(publisher: Command, players: [Command; 2]) {
    if !is_there("ffmpeg") || !is_there("ffprobe") {
        return;
    }
    // A publisher that is killed says nothing: the relay notices by its silence.
    let relay = Relay::start(tempfile::tempdir().unwrap(), &["--idle-timeout=8"]);
    let original = relay.path("original.mp4");
    make_media(&original);
    let media = fs::read(&original).unwrap();
    let (init, fragments) = media.split_at(first_fragment(&media));

    let mut publisher = Peer::start(publisher, &relay, "published");
    let mut input = publisher.process.stdin.take().unwrap();
    input.write_all(init).unwrap();
    wait_for("publisher", || relay.status().sessions.iter().any(|session| session.publisher).then_some(()));

    let mut number = 0..;
    let mut players =
        players.map(|command| Peer::start(command, &relay, &format!("played{}", number.next().unwrap())));
    wait_for("subscriptions to both tracks by both players", || {
        // Whoever came before the tracks were there asks again.
        players.iter_mut().for_each(|player| player.keep_running(&relay));
        let tracks = relay.status().tracks;
        let media = tracks.iter().filter(|track| track.name.ends_with("2em4s") && track.subscribers == 2);
        (media.count() == 2).then_some(())
    });
    play_live(&mut input, fragments);
    drop(input);

    // moq-pub stays when its input ends, and moq-sub holds its last bytes back until its publisher is gone.
    let objects = 1 + boxes(fragments).filter(|(kind, _)| kind == b"moof").count() as u64;
    wait_for("everything through the relay", || {
        let status = relay.status();
        let idle = status.sessions.iter().all(|session| session.pending == 0 && session.in_flight == 0);
        (status.totals.objects_received >= objects && idle).then_some(())
    });
    drop(publisher);
    let want = (hashes(&original), FRAMES);
    for player in &players {
        wait_for("whole media", || {
            let have = (hashes(&player.output), frames(&player.output));
            (have == want).then_some(())
        });
    }
}

/// A process of the test, with its output in a file.
struct Peer {
    command: Command,
    process: Child,
    output: PathBuf,
}

impl Peer {
    fn start(mut command: Command, relay: &Relay, output: &str) -> Self {
        let output = relay.path(output);
        command.args(["--name", "interop", "--tls-disable-verify", &url(relay)]).stdin(Stdio::piped());
        let process = Self::spawn(&mut command, relay, &output);
        Self { command, process, output }
    }

    fn spawn(command: &mut Command, relay: &Relay, output: &Path) -> Child {
        let errors = File::options().append(true).create(true).open(relay.path("peers.log")).unwrap();
        command.stdout(File::create(output).unwrap()).stderr(errors).spawn().unwrap()
    }

    fn keep_running(&mut self, relay: &Relay) {
        if self.process.try_wait().unwrap().is_some() {
            self.process = Self::spawn(&mut self.command, relay, &self.output);
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Four seconds of picture and tone, a group per second, a fragment per frame.
fn make_media(path: &Path) {
    let made = Command::new("ffmpeg")
        .args(["-hide_banner", "-loglevel", "error", "-nostdin"])
        .args([
            "-f",
            "lavfi",
            "-i",
            "testsrc2=size=320x180:rate=25",
            "-f",
            "lavfi",
            "-i",
            "sine=frequency=440",
        ])
        .args(["-t", "4", "-c:v", "libx264", "-preset", "ultrafast", "-tune", "zerolatency"])
        .args(["-pix_fmt", "yuv420p", "-g", "25", "-c:a", "aac", "-f", "mp4", "-movflags"])
        .arg("cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame")
        .arg(path)
        .status()
        .unwrap();
    assert!(made.success());
}

/// Where the first `moof` box begins.
fn first_fragment(media: &[u8]) -> usize {
    boxes(media).take_while(|(kind, _)| kind != b"moof").map(|(_, bytes)| bytes.len()).sum()
}

/// Writes fragments at the pace of live media: players skip what comes too late beside what is new.
fn play_live(input: &mut impl Write, fragments: &[u8]) {
    let count = boxes(fragments).filter(|(kind, _)| kind == b"moof").count();
    let start = Instant::now();
    let mut played = 0;
    for (kind, bytes) in boxes(fragments) {
        if &kind == b"moof" {
            let due = start + MEDIA.mul_f64(f64::from(played) / count as f64);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            played += 1;
        }
        input.write_all(bytes).unwrap();
    }
}

/// The boxes of an MP4 file: type, and bytes with the header.
fn boxes(mut media: &[u8]) -> impl Iterator<Item = ([u8; 4], &[u8])> {
    std::iter::from_fn(move || {
        let size = u32::from_be_bytes(*media.first_chunk()?) as usize;
        let (bytes, rest) = media.split_at(size);
        media = rest;
        Some((bytes[4..8].try_into().unwrap(), bytes))
    })
}

/// SHA-256 of each stream's packets, however they are interleaved.
fn hashes(path: &Path) -> String {
    let output = Command::new("ffmpeg")
        .args(["-hide_banner", "-loglevel", "quiet", "-nostdin", "-i"])
        .arg(path)
        .args(["-map", "0", "-c", "copy", "-f", "streamhash", "-hash", "sha256", "-"])
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Frames of video that ffprobe decodes.
fn frames(path: &Path) -> usize {
    let output = Command::new("ffprobe")
        .args(["-loglevel", "quiet", "-select_streams", "v:0", "-count_frames"])
        .args(["-show_entries", "stream=nb_read_frames", "-of", "csv=p=0"])
        .arg(path)
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .next()
        .and_then(|line| line.trim().parse().ok())
        .unwrap_or(0)
}
