//! Tests of publishing several renditions of one video: from existing files, and from files that ffmpeg makes.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use serde_json::Value;

use super::{
    clip::{self, FRAMES, FRAMES_PER_SECOND, GROUP, InteropClip, SECONDS, VIDEO_TRACK, assert_same},
    needs,
    players::subscribe,
    process::{InteropProcess, TestNeed::Ffmpeg},
    relay::InteropRelay,
};

const TRACKS: [&str; 3] = [VIDEO_TRACK, "r1-1.m4s", "r2-1.m4s"];
const INITS: [&str; 3] = ["0.mp4", "r1-0.mp4", "r2-0.mp4"];
/// Length of a clip in seconds, long enough that players can join while it is published on a busy machine.
const LONG: usize = 12;

fn renditions(last_group: usize) -> [Vec<u8>; 3] {
    [("320x240", 600, GROUP), ("240x180", 300, GROUP), ("160x120", 100, last_group)]
        .map(|(size, kbit, group)| clip::encoded(size, kbit, group, SECONDS))
}

fn publish(relay: &InteropRelay, args: &[&str], files: &[PathBuf]) -> InteropProcess {
    let files: Vec<_> = files.iter().map(|file| file.to_str().unwrap()).collect();
    InteropProcess::ours(None, "publish", &relay.url(), &[&["--ladder", "--publish"], args, &files].concat())
}

/// Returns the name, the bitrate and the number `altGroup` (renditions of one video share it) of each track in the
/// catalog.
fn catalog(relay: &InteropRelay) -> Vec<(String, u64, u64)> {
    let json = subscribe(None, &relay.url(), &["--track", "catalog", "--count", "1"]).finish();
    let json: Value = serde_json::from_slice(&json).unwrap();
    let track = |track: &Value| {
        let number = |name: &str| track[name].as_u64().unwrap_or_else(|| panic!("{name} in {track}"));
        (track["name"].as_str().unwrap().to_owned(), number("bitrate"), number("altGroup"))
    };
    json["tracks"].as_array().unwrap().iter().map(track).collect()
}

/// A publisher of three renditions (ladder) whose input is held back until the players have joined.
struct HeldLadder {
    clips: [InteropClip; 3],
    publisher: InteropProcess,
    /// The publisher's input files, which are pipes.
    writers: [File; 3],
    _dir: tempfile::TempDir,
}

impl HeldLadder {
    fn publish_to(relay: &InteropRelay) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let clips = renditions(GROUP).map(|media| InteropClip::split(&media));
        let pipes = ["best", "middle", "least"].map(|name| dir.path().join(name));
        assert!(Command::new("mkfifo").args(&pipes).status().unwrap().success());
        let publisher = publish(relay, &["--ladder-kbit", "600,300,100"], &pipes);
        let mut writers = pipes.map(|pipe| File::options().write(true).open(pipe).unwrap());
        for (writer, clip) in writers.iter_mut().zip(&clips) {
            writer.write_all(&clip.init).unwrap();
        }
        Self { clips, publisher, writers, _dir: dir }
    }

    /// Writes all of the media to the publisher, waits until it has ended, and returns the clips.
    fn play(self) -> [InteropClip; 3] {
        let writing: Vec<_> = self
            .writers
            .into_iter()
            .zip(&self.clips)
            .map(|(mut writer, clip)| {
                let media = clip.fragments.concat();
                thread::spawn(move || writer.write_all(&media).unwrap())
            })
            .collect();
        writing.into_iter().for_each(|writing| writing.join().unwrap());
        self.publisher.finish();
        self.clips
    }
}

#[test]
fn three_files_are_published_as_a_ladder() {
    needs!(Ffmpeg);
    let relay = InteropRelay::start();
    let held = HeldLadder::publish_to(&relay);
    let players = TRACKS.map(|track| {
        relay.until_published(track);
        let player = subscribe(None, &relay.url(), &["--track", track]);
        relay.until_subscribed(track, 1);
        player
    });
    let expected = TRACKS.map(str::to_owned).into_iter().zip([600_000, 300_000, 100_000]);
    assert!(catalog(&relay).into_iter().eq(expected.map(|(name, bitrate)| (name, bitrate, 1))));
    let clips = held.play();
    for ((player, clip), track) in players.into_iter().zip(&clips).zip(TRACKS) {
        assert_eq!(clip.fragments.len(), FRAMES);
        assert_same(&player.finish(), &clip.fragments.concat(), track);
    }
}

#[test]
fn adaptive_player_gets_each_group_whole_from_a_single_rendition() {
    needs!(Ffmpeg);
    let relay = InteropRelay::with(|config| config.switching_sets = true);
    let held = HeldLadder::publish_to(&relay);
    TRACKS.iter().for_each(|track| relay.until_published(track));
    let player = subscribe(None, &relay.url(), &["--track", VIDEO_TRACK, "--adaptive"]);
    TRACKS.iter().for_each(|track| relay.until_subscribed(track, 1));
    let clips = held.play();
    let played = player.finish();
    let mut rest = &played[..];
    for group in 0..FRAMES / GROUP {
        let whole = |clip: &InteropClip| clip.fragments[group * GROUP..(group + 1) * GROUP].concat();
        let found = clips.iter().map(whole).find(|bytes| rest.starts_with(bytes));
        rest = &rest[found.unwrap_or_else(|| panic!("group {group} is of no rendition")).len()..];
    }
    assert!(rest.is_empty(), "more than the groups of one rendition each");
}

#[test]
fn relay_without_switching_is_reported_to_adaptive_player() {
    needs!(Ffmpeg);
    let relay = InteropRelay::start();
    let held = HeldLadder::publish_to(&relay);
    relay.until_published(VIDEO_TRACK);
    let player = subscribe(None, &relay.url(), &["--track", VIDEO_TRACK, "--adaptive"]);
    player.wait_logged("millrace relay --switching-sets");
    held.play();
}

#[test]
fn files_whose_groups_are_not_aligned_are_refused() {
    needs!(Ffmpeg);
    let relay = InteropRelay::start();
    let dir = tempfile::tempdir().unwrap();
    let files = write_all(dir.path(), &renditions(GROUP - 5));
    let publisher = publish(&relay, &[], &files);
    publisher.wait_logged("group 1 begins at");
    let publisher = publish(&relay, &[], &files[..2]);
    publisher.wait_logged("--ladder takes one file, or three");
    let publisher = publish(&relay, &["--ladder-kbit", "1,2,3"], &files);
    publisher.wait_logged("--ladder-kbit must descend");
}

fn write_all(dir: &Path, renditions: &[Vec<u8>]) -> Vec<PathBuf> {
    let file = |(place, media): (usize, &Vec<u8>)| {
        let path = dir.join(format!("{place}.mp4"));
        fs::write(&path, media).unwrap();
        path
    };
    renditions.iter().enumerate().map(file).collect()
}

#[test]
fn ffmpeg_makes_a_ladder_of_one_file() {
    needs!(Ffmpeg);
    let relay = InteropRelay::start();
    let dir = tempfile::tempdir().unwrap();
    let files = write_all(dir.path(), &[clip::encoded("320x240", 600, 7, LONG)]);
    let publisher = publish(&relay, &[], &files);
    let players = TRACKS.map(|track| {
        relay.until_published(track);
        subscribe(None, &relay.url(), &["--track", track, "--join-groups", "1000"])
    });
    let expected = TRACKS.map(str::to_owned).into_iter().zip([5_000_000, 2_000_000, 800_000]);
    assert!(catalog(&relay).into_iter().eq(expected.map(|(name, bitrate)| (name, bitrate, 1))));
    let inits = INITS.map(|init| subscribe(None, &relay.url(), &["--track", init, "--count", "1"]).finish());
    publisher.finish();
    for ((player, init), track) in players.into_iter().zip(inits).zip(TRACKS) {
        let media = [init, player.finish()].concat();
        assert_eq!(clip::frames(&media), LONG * FRAMES_PER_SECOND, "{track}");
    }
}
