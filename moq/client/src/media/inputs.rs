//! Tests with inputs of real muxers: each input is published and played, and ffmpeg decodes the player's output. A
//! player that starts at the beginning and one that joins late both have to produce pictures that ffmpeg can decode, at
//! the same times as in the input.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_moq::{GroupOrder, Location, Namespace, hang, msf};
use mp4_atom::{Decode as _, Moof};

use super::init::Presentation;
use super::*;
use crate::broadcast::{Broadcast, History};

/// Largest tolerated difference between packet times, in seconds: rounding in both timescales adds up to less than
/// this.
const APART: f64 = 0.0015;

/// Inputs of the long test that the publisher must refuse, each with a part of the expected error.
const REFUSED: [(&str, &str); 0] = [];

/// ffmpeg's messages about encrypted fragments that ffmpeg itself has written but cannot read. Inputs with such a
/// message are not compared.
const UNREAD: [&str; 2] = ["Incorrect number of samples in encryption info", "saio atom found without saiz"];

/// A packet as ffmpeg reports it: its stream, presentation time in seconds and checksum.
#[derive(Clone, Debug, PartialEq)]
struct FfmpegPacket {
    stream: usize,
    time: f64,
    sum: String,
}

/// Ffmpeg's report about a file: its packets of video and audio, and the errors of decoding them.
struct Judged {
    packets: Vec<FfmpegPacket>,
    said: String,
}

/// Runs ffmpeg on the video and audio streams of a file, or on its other streams if it has neither.
fn judge(file: &Path) -> Judged {
    let streams = |kinds: [&'static str; 2]| kinds.map(|kind| ["-map", kind]).concat();
    let decoded = ["-fps_mode", "passthrough", "-f", "null", "-"];
    let media = streams(["0:v?", "0:a?"]);
    let found = judge_streams(file, &media, &[&media[..], &decoded].concat());
    match found.packets.is_empty() {
        true => judge_streams(file, &streams(["0:s?", "0:d?"]), &[]),
        false => found,
    }
}

fn judge_streams(file: &Path, copied: &[&str], decoded: &[&str]) -> Judged {
    let packets = file.with_extension("packets");
    let output = Command::new("ffmpeg")
        .args(["-nostdin", "-v", "error", "-y", "-copyts", "-i"])
        .arg(file)
        .args(copied)
        .args(["-c", "copy", "-f", "framecrc"])
        .arg(&packets)
        .args(decoded)
        .output()
        .unwrap();
    let text = fs::read_to_string(&packets).unwrap_or_default();
    let _ = fs::remove_file(&packets);
    let mut bases = BTreeMap::new();
    let mut found = Vec::new();
    for line in text.lines() {
        if let Some((stream, base)) = line.strip_prefix("#tb ").and_then(|rest| rest.split_once(": ")) {
            let (numerator, denominator) = base.split_once('/').unwrap();
            let base = numerator.parse::<f64>().unwrap() / denominator.parse::<f64>().unwrap();
            bases.insert(stream.parse::<usize>().unwrap(), base);
        } else if !line.starts_with('#') {
            let fields: Vec<_> = line.split(',').map(str::trim).collect();
            let stream = fields[0].parse().unwrap();
            let time = fields[2].parse::<f64>().unwrap() * bases[&stream];
            found.push(FfmpegPacket { stream, time, sum: fields[5].to_owned() });
        }
    }
    Judged { packets: found, said: String::from_utf8_lossy(&output.stderr).into_owned() }
}

fn publish(input: &[u8], packaging: Packaging) -> Result<Arc<Broadcast>, Error> {
    let history = History { max_bytes: usize::MAX, ..History::default() };
    let broadcast = Broadcast::new(Namespace::from_path("a/b").unwrap(), history);
    let mut media = MediaPublisher::new(broadcast.clone(), packaging, Cut::Whole)?;
    feed(&mut media, input)?;
    Ok(broadcast)
}

fn objects(broadcast: &Broadcast, name: &str) -> Vec<(Location, Bytes)> {
    let track = broadcast.tracks().into_iter().find(|track| track.name().name() == name).unwrap();
    let all = track.range(Location::default(), Location::new(u64::MAX, 0), GroupOrder::Ascending);
    all.into_iter().map(|object| (object.location, object.payload)).collect()
}

fn catalog(broadcast: &Broadcast) -> msf::MsfCatalog {
    msf::MsfCatalog::parse(&objects(broadcast, msf::CATALOG).pop().unwrap().1).unwrap()
}

/// Returns the output of a player that starts at the beginning. If `is_late` is true, the player skips the first half
/// of each track's groups.
fn played(broadcast: &Broadcast, is_late: bool) -> Result<Vec<u8>, Error> {
    let catalog = catalog(broadcast);
    let tracks = catalog.tracks.iter().filter(|track| matches!(&track.packaging[..], "cmaf" | "loc"));
    let tracks: Vec<_> = tracks.collect();
    let is_medium = |track: &&&msf::MsfTrack| matches!(track.role.as_deref(), Some("video" | "audio"));
    let media: Vec<_> = tracks.iter().filter(is_medium).collect();
    let chosen = if media.is_empty() { tracks.iter().collect() } else { media };
    let choice = TrackChoice { tracks: chosen.iter().map(|it| it.name.clone()).collect(), language: None };
    let Playlist { init, tracks } = Playlist::from_catalog(&catalog, &choice)?.unwrap();
    let mut fragments = Vec::new();
    for PlayedTrack { name, mut wrap } in tracks {
        let objects = objects(broadcast, &name);
        let groups =
            objects.first().zip(objects.last()).map(|((first, _), (last, _))| (first.group, last.group));
        let from = groups.filter(|_| is_late).map_or(0, |(first, last)| (first + last).div_ceil(2));
        for (location, payload) in objects {
            match &mut wrap {
                _ if location.group < from => {}
                Some(wrap) => fragments.push(wrap.fragment(location.object == 0, &payload)?),
                None => fragments.push(payload),
            }
        }
    }
    // A player writes fragments in the order of their decode times.
    let tracks = Presentation::parse(&init)?.tracks;
    fragments.sort_by_cached_key(|fragment| {
        let (track, time) = time_of(fragment);
        let timescale = tracks.iter().find(|it| it.id == track).unwrap().timescale;
        Duration::from_secs_f64(time as f64 / f64::from(timescale))
    });
    Ok([&init[..], &fragments.concat()].concat())
}

/// Returns the track of a fragment, and the decode time of its first sample.
fn time_of(fragment: &[u8]) -> (u32, u64) {
    let moof = boxes::child(fragment, b"moof").unwrap();
    let moof = Moof::decode(&mut &moof.whole[..]).unwrap();
    let time = moof.traf[0].tfdt.as_ref().unwrap().base_media_decode_time;
    (moof.traf[0].tfhd.track_id, time)
}

/// Returns the seconds by which ffmpeg presents each video track too late. ffmpeg delays a track by its most negative
/// composition offset.
fn shown_late(input: &[u8]) -> Vec<f64> {
    let mut least = BTreeMap::<u32, i64>::new();
    let boxes = boxes::children(input).unwrap_or_default();
    for moof in boxes.iter().filter(|it| it.kind == *b"moof") {
        let Ok(moof) = Moof::decode(&mut &moof.whole[..]) else { continue };
        for traf in &moof.traf {
            let offsets = traf.trun.iter().flat_map(|trun| trun.samples.iter()).filter_map(|it| it.cts);
            let lowest = offsets.min().unwrap_or(0).min(0);
            let known = least.entry(traf.tfhd.track_id).or_default();
            *known = (*known).min(lowest);
        }
    }
    let tracks = Presentation::parse(input).map(|presentation| presentation.tracks).unwrap_or_default();
    let video = tracks.iter().filter(|track| track.is_video());
    video.map(|it| -least.get(&it.id).copied().unwrap_or(0) as f64 / f64::from(it.timescale)).collect()
}

/// Compares a player's packets with the input's. Each of them must equal a packet of the input in content and time, and
/// the last packets of each stream must be present. `late` is the number of seconds by which each stream may be late.
/// With `is_moved`, all times may also differ by the same offset. Returns the first difference as the error.
fn differs(
    expected: &Judged,
    player: &Judged,
    late: &[f64],
    is_moved: bool,
    missing: usize,
) -> Result<(), String> {
    if !player.said.is_empty() && expected.said.is_empty() && !is_tolerated(&player.said) {
        return Err(format!("ffmpeg says {}", player.said));
    }
    let mut moved = None;
    let streams = 1 + expected.packets.iter().map(|packet| packet.stream).max().unwrap_or(0);
    for stream in 0..streams {
        let of = |judged: &Judged| -> Vec<FfmpegPacket> {
            judged.packets.iter().filter(|packet| packet.stream == stream).cloned().collect()
        };
        let before = of(expected);
        let after = of(player);
        if after.is_empty() || after.len() > before.len() {
            return Err(format!("stream {stream} has {} of {} packets", after.len(), before.len()));
        }
        let end = before.len() - missing.min(before.len() - after.len());
        for (before, after) in before[end - after.len()..end].iter().zip(&after) {
            let late = after.time - before.time + late.get(stream).copied().unwrap_or(0.0);
            let moved = if is_moved { *moved.get_or_insert(late) } else { 0.0 };
            if before.sum != after.sum || (late - moved).abs() > APART {
                return Err(format!("{after:?} instead of {before:?}, {late} s later instead of {moved} s"));
            }
        }
    }
    Ok(())
}

/// Reports whether none of ffmpeg's messages concerns a missing picture. A player that joins within an open group of
/// pictures lacks pictures that the stream tells ffmpeg to drop. A decoder may guess the times of its last pictures
/// from decode times, which LOC does not carry. The times of packets are compared elsewhere.
fn is_tolerated(said: &str) -> bool {
    const HARMLESS: [&str; 3] =
        ["mmco: unref short failure", "non monotonically increasing dts to muxer", "Last message repeated"];
    said.lines().all(|line| HARMLESS.iter().any(|harmless| line.contains(harmless)))
}

/// Publishes an input, plays it, and fails with the first difference between the input and the player's output.
fn check(file: &Path, scratch: &Path, packaging: Packaging) -> Result<(), String> {
    let input = fs::read(file).unwrap();
    let broadcast = publish(&input, packaging).map_err(|error| format!("refused: {error}"))?;
    let judged = judge(file);
    if UNREAD.iter().any(|why| judged.said.contains(why)) {
        println!("{} is not read by ffmpeg itself: {}", file.display(), judged.said);
        return Ok(());
    }
    // The last packet of a truncated input is incomplete. ffmpeg reports it nevertheless, but the publisher drops it.
    let missing = usize::from(file.to_string_lossy().contains("truncated"));
    let player = |is_late: bool| {
        let file = scratch.join(format!("{}-{is_late}.mp4", file.file_stem().unwrap().to_string_lossy()));
        fs::write(&file, played(&broadcast, is_late).map_err(|error| error.to_string())?).unwrap();
        let found = judge(&file);
        fs::remove_file(&file).unwrap();
        Ok::<_, String>(found)
    };
    let is_loc = packaging == Packaging::Loc;
    let late = if is_loc { shown_late(&input) } else { Vec::new() };
    let first = player(false)?;
    differs(&judged, &first, &late, is_loc, missing)
        .map_err(|why| format!("a player from the start: {why}"))?;
    if first.packets.len() + missing < judged.packets.len() * 9 / 10 {
        return Err(format!(
            "a player from the start: {} of {} packets",
            first.packets.len(),
            judged.packets.len()
        ));
    }
    differs(&first, &player(true)?, &[], false, 0).map_err(|why| format!("a player that comes late: {why}"))
}

fn check_all(files: &[PathBuf], packagings: &[Packaging]) -> Vec<String> {
    let scratch = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for file in files {
        for packaging in packagings {
            if let Err(why) = check(file, scratch.path(), *packaging) {
                wrong
                    .push(format!("{} as {packaging:?}: {why}", file.file_name().unwrap().to_string_lossy()));
            }
        }
    }
    wrong
}

fn mp4s(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|it| it == "mp4")).collect();
    files.sort();
    files
}

fn cache_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/media")
}

fn has_ffmpeg() -> bool {
    let is_here = Command::new("ffmpeg").arg("-version").output().is_ok();
    if !is_here {
        eprintln!("SKIP: ffmpeg is not here");
    }
    is_here
}

#[test]
fn rare_mp4_layouts_play_from_the_start_and_after_a_late_join() {
    if !has_ffmpeg() {
        return;
    }
    let files = mp4s(&cache_directory());
    assert_eq!(files.len(), 12);
    let wrong = check_all(&files, &[Packaging::Cmaf, Packaging::Loc]);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The variable `MILLRACE_INPUTS` may name a folder whose files are tested instead of the default ones.
#[test]
#[ignore = "test-all: makes over a hundred inputs, some minutes of ffmpeg"]
fn mp4_files_made_by_ffmpeg_play_from_the_start_and_after_a_late_join() {
    if !has_ffmpeg() {
        return;
    }
    let made = tempfile::tempdir().unwrap();
    let folder = match std::env::var_os("MILLRACE_INPUTS") {
        Some(folder) => folder.into(),
        None => {
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/media.py");
            assert!(Command::new(script).arg(made.path()).status().unwrap().success());
            made.path().to_owned()
        }
    };
    let files = mp4s(&folder);
    let wrong = check_all(&files, &[Packaging::Cmaf, Packaging::Loc]);
    let is_expected = |wrong: &&String| {
        REFUSED.iter().any(|(file, why)| wrong.starts_with(&format!("{file}.mp4 as")) && wrong.contains(why))
    };
    let (refused, wrong): (Vec<_>, Vec<_>) = wrong.iter().partition(is_expected);
    println!("{} inputs, refused: {refused:#?}", files.len());
    assert!(files.len() >= 60 || std::env::var_os("MILLRACE_INPUTS").is_some(), "{} inputs", files.len());
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(10 * refused.len() <= 2 * files.len());
}

#[test]
fn prft_and_emsg_boxes_precede_their_fragments_and_become_timelines() {
    let event = boxes::full(
        b"emsg",
        1,
        0,
        &[
            &[0, 0, 3, 232, 0, 0, 0, 0, 0, 0, 1, 244, 0, 0, 0, 100, 0, 0, 0, 7][..],
            b"urn:scte:scte35:2013:bin\0\0cue",
        ]
        .concat(),
    );
    let mut input = fs::read(cache_directory().join("prft.mp4")).unwrap();
    let moof: usize = boxes::children(&input)
        .unwrap()
        .iter()
        .take_while(|it| it.kind != *b"moof")
        .map(|it| it.whole.len())
        .sum();
    input.splice(moof..moof, event);
    let count = |bytes: &[u8], kind: &[u8]| bytes.windows(4).filter(|window| *window == kind).count();
    for packaging in [Packaging::Cmaf, Packaging::Loc] {
        let broadcast = publish(&input, packaging).unwrap();
        if packaging == Packaging::Cmaf {
            let played = played(&broadcast, false).unwrap();
            for kind in [b"prft", b"emsg"] {
                assert!(count(&input, kind) > 0);
                assert_eq!(count(&played, kind), count(&input, kind));
            }
        }
        let catalog = catalog(&broadcast);
        let timeline = catalog.tracks.iter().find(|track| track.packaging == "mediatimeline").unwrap();
        assert_eq!(timeline.depends.as_ref().map(Vec::len), Some(catalog.tracks.len() - 2), "{timeline:?}");
        let records: serde_json::Value =
            serde_json::from_slice(&objects(&broadcast, events::TIMELINE).pop().unwrap().1).unwrap();
        let leader = &catalog.tracks[0].name;
        let groups: Vec<_> = objects(&broadcast, leader).iter().map(|(at, _)| at.group).collect();
        for record in records.as_array().unwrap() {
            assert!(groups.contains(&record[1][0].as_u64().unwrap()), "{record}");
            // Index 2 of a media timeline's record is a wall-clock time in milliseconds since 1970. It must be later
            // than the year 1999.
            assert!(record[2].as_u64().unwrap() > 946_684_800_000, "{record}");
        }
        let events = catalog.tracks.iter().find(|track| track.packaging == "eventtimeline").unwrap();
        assert!(events.event_type.is_some() && events.mime_type.as_deref() == Some("application/json"));
        let events: serde_json::Value =
            serde_json::from_slice(&objects(&broadcast, events::EVENTS).pop().unwrap().1).unwrap();
        let data = &events[0]["data"];
        assert_eq!(
            (&data["schemeIdUri"], &data["id"]),
            (&"urn:scte:scte35:2013:bin".into(), &7.into()),
            "{events}"
        );
        assert_eq!((&data["messageData"], &data["duration"]), (&"Y3Vl".into(), &100.into()), "{events}");
        // The event of the input's emsg box takes place half a second after the fragment's first sample. For LOC, all
        // times are also shifted so that none is negative.
        assert!((500..600).contains(&events[0]["m"].as_i64().unwrap()), "{events}");
    }
}

#[test]
fn catalogs_list_role_and_codec_of_video_audio_and_subtitle_tracks() {
    let described = |file: &str| {
        let broadcast = publish(&fs::read(cache_directory().join(file)).unwrap(), Packaging::Cmaf).unwrap();
        let hang: hang::HangCatalog =
            serde_json::from_slice(&objects(&broadcast, hang::CATALOG).pop().unwrap().1).unwrap();
        let tracks = catalog(&broadcast).tracks.into_iter();
        let tracks: Vec<_> = tracks.map(|it| (it.role.unwrap(), it.codec.unwrap())).collect();
        (tracks, hang)
    };
    let (tracks, hang) = described("subs_movtext.mp4");
    assert_eq!(tracks.iter().map(|(role, _)| &role[..]).collect::<Vec<_>>(), ["video", "audio", "subtitle"]);
    assert_eq!(tracks[2].1, "tx3g");
    assert_eq!(hang.audio.unwrap().renditions.len(), 1);
    let (tracks, hang) = described("hevc_ac3.mp4");
    assert_eq!(tracks[1], ("audio".to_owned(), "ac-3".to_owned()));
    assert_eq!(hang.audio.unwrap().renditions.len(), 1);
    let (tracks, hang) = described("twovideo.mp4");
    assert_eq!(tracks.iter().filter(|(role, _)| role == "video").count(), 2);
    assert_eq!(hang.video.unwrap().renditions.len(), 2);
}
