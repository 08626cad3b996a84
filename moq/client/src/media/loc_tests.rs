//! Tests of media packaged as LOC. ffmpeg checks the player's output: it must have the same samples at the same times
//! as the input.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use millrace_moq::{GroupOrder, Location, Namespace, hang, msf};

use std::sync::Arc;

use bytes::Bytes;
use mp4_atom::{Decode as _, Moof};

use millrace_moq::loc;

use super::*;
use crate::broadcast::{Broadcast, History};

const EVERY_FRAME: &[&str] = &["-movflags", "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame"];
/// ffmpeg's arguments that make fragments of one second.
const EVERY_SECOND: &[&str] =
    &["-movflags", "cmaf+separate_moof+delay_moov+skip_trailer", "-frag_duration", "1000000"];

/// Returns two seconds of small video, with a key frame every 10 of 50 frames, and sound. Returns `None` if ffmpeg or
/// one of its encoders for `video` and `audio` is missing.
fn encoded(video: &[&str], audio: &[&str], fragments: &[&str]) -> Option<Vec<u8>> {
    let output = Command::new("ffmpeg")
        .args(["-v", "error", "-f", "lavfi", "-i", "testsrc2=size=160x90:rate=25:duration=2"])
        .args([
            "-f",
            "lavfi",
            "-i",
            "sine=frequency=440:duration=2",
            "-pix_fmt",
            "yuv420p",
            "-g",
            "10",
            "-c:v",
        ])
        .args(video)
        .arg("-c:a")
        .args(audio)
        .args(["-f", "mp4"])
        .args(fragments)
        .arg("-")
        .output();
    let media = output.ok().filter(|output| output.status.success()).map(|output| output.stdout);
    if media.is_none() {
        eprintln!("SKIP: ffmpeg with {} and {} is not here", video[0], audio[0]);
    }
    media
}

const H264: &[&str] = &["libx264", "-preset", "ultrafast", "-sc_threshold", "0", "-keyint_min", "10"];
const REORDERED: &[&str] =
    &["libx264", "-preset", "veryfast", "-sc_threshold", "0", "-keyint_min", "10", "-bf", "2"];

fn publish(media: &[u8], packaging: Packaging) -> Result<Arc<Broadcast>, Error> {
    let broadcast = Broadcast::new(Namespace::from_path("a/b").unwrap(), History::default());
    let mut publisher = MediaPublisher::new(broadcast.clone(), packaging, Cut::Whole)?;
    feed(&mut publisher, media)?;
    Ok(broadcast)
}

fn objects(broadcast: &Broadcast, name: &str) -> Vec<(Location, Bytes)> {
    let track = broadcast.tracks().into_iter().find(|track| track.name().name() == name).unwrap();
    let all = track.range(Location::default(), Location::new(u64::MAX, 0), GroupOrder::Ascending);
    all.into_iter().map(|object| (object.location, object.payload)).collect()
}

fn catalog(broadcast: &Broadcast) -> msf::MsfCatalog {
    msf::MsfCatalog::parse(&objects(broadcast, msf::CATALOG).remove(0).1).unwrap()
}

/// Returns the MP4 that a player writes.
fn played(broadcast: &Broadcast) -> Vec<u8> {
    let Playlist { init, tracks } =
        Playlist::from_catalog(&catalog(broadcast), &TrackChoice::default()).unwrap().unwrap();
    let mut media = init.to_vec();
    for PlayedTrack { name, wrap } in tracks {
        let mut wrap = wrap.unwrap();
        for (location, payload) in objects(broadcast, &name) {
            media.extend(wrap.fragment(location.object == 0, &payload).unwrap());
        }
    }
    media
}

/// Lists the samples of a file with ffprobe: for each its stream, its presentation time relative to the first sample,
/// and a hash of its data.
fn samples_of(media: &[u8]) -> Vec<(usize, i64, String)> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("millrace-loc-{}-{}.mp4", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let file = std::env::temp_dir().join(name);
    std::fs::write(&file, media).unwrap();
    let output = Command::new("ffprobe")
        // ffprobe would otherwise hide the samples that edit lists skip.
        .args(["-v", "error", "-ignore_editlist", "1", "-show_data_hash", "md5"])
        .args(["-show_entries", "packet=stream_index,pts,data_hash", "-of", "csv=p=0"])
        .arg(&file)
        .output();
    std::fs::remove_file(&file).unwrap();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    let mut first = [i64::MAX; 2];
    let mut samples = Vec::new();
    for line in text.lines() {
        let fields: Vec<_> = line.split(',').collect();
        let [stream, presented, hash, ..] = fields[..] else { panic!("{line}") };
        let stream: usize = stream.parse().unwrap();
        let presented: i64 = presented.parse().unwrap();
        // In files with negative time stamps, ffprobe reports times relative to the earliest one.
        first[stream] = first[stream].min(presented);
        samples.push((stream, presented, hash.to_owned()));
    }
    samples.iter_mut().for_each(|(stream, presented, _)| *presented -= first[*stream]);
    samples.sort();
    samples
}

#[test]
fn loc_object_is_a_sample_with_its_time() {
    let Some(media) = encoded(H264, &["aac"], EVERY_FRAME) else { return };
    let broadcast = publish(&media, Packaging::Loc).unwrap();
    let video = objects(&broadcast, "1.loc");
    let configuration =
        STANDARD.decode(catalog(&broadcast).init_data(&catalog(&broadcast).tracks[0]).unwrap()).unwrap();
    assert_eq!(video.len(), 50);
    // The audio begins before time 0, which LOC cannot express. All time stamps are therefore shifted so that the audio
    // begins at 0.
    let later = loc::LocSample::parse(&video[0].1).unwrap().timestamp;
    assert!(later < 384, "1024 of 44,100 are 298 of 12,800: {later}");
    for (frame, (location, payload)) in (0..).zip(&video) {
        assert_eq!(*location, Location::new(frame / 10, frame % 10));
        let object = loc::LocSample::parse(payload).unwrap();
        assert_eq!((object.timestamp - later) * 25, frame * object.timescale);
        let config = (frame % 10 == 0).then_some(loc::Config::Video(&configuration));
        assert_eq!(object.config, config);
        // The sample is a sequence of NAL units, each preceded by its length (ISO/IEC 14496-15).
        let mut rest = object.sample;
        while let Some((length, unit)) = rest.split_first_chunk::<4>() {
            rest = &unit[u32::from_be_bytes(*length) as usize..];
        }
        assert!(rest.is_empty());
    }
    let sound = objects(&broadcast, "2.loc");
    let first = loc::LocSample::parse(&sound[0].1).unwrap();
    // These bytes are the AudioSpecificConfig of AAC-LC, 44.1 kHz, one channel.
    let Some(loc::Config::Audio([0x12, 0x08, ..])) = first.config else { panic!("{first:?}") };
    assert_eq!(first.timescale, 44_100);
    assert_eq!(sound.last().unwrap().0.group, 4);
}

#[test]
fn played_samples_equal_published_ones() {
    for (video, audio, fragments) in [
        (H264, &["aac"][..], EVERY_FRAME),
        (H264, &["aac"], EVERY_SECOND),
        (REORDERED, &["aac"], EVERY_FRAME),
        (REORDERED, &["aac"], EVERY_SECOND),
        (
            &["libx264", "-preset", "ultrafast", "-tag:v", "avc3", "-bsf:v", "dump_extra"],
            &["libopus"],
            EVERY_FRAME,
        ),
        (
            &["libx265", "-preset", "ultrafast", "-x265-params", "log-level=error", "-tag:v", "hvc1"],
            &["aac"],
            EVERY_FRAME,
        ),
        (&["libsvtav1", "-preset", "12"], &["libopus"], EVERY_FRAME),
        (&["libvpx-vp9", "-deadline", "realtime"], &["libopus"], EVERY_FRAME),
    ] {
        let Some(media) = encoded(video, audio, fragments) else { continue };
        let broadcast = publish(&media, Packaging::Loc).unwrap();
        let before = samples_of(&media);
        assert_eq!(before.iter().filter(|(stream, ..)| *stream == 0).count(), 50, "{video:?}");
        let after = samples_of(&played(&broadcast));
        let differs = before.iter().zip(&after).find(|(before, after)| before != after);
        assert_eq!((differs, after.len()), (None, before.len()), "{video:?} {audio:?} {fragments:?}");
    }
}

#[test]
fn groups_begin_at_key_frames_even_within_a_fragment() {
    let (Some(frames), Some(seconds)) =
        (encoded(H264, &["aac"], EVERY_FRAME), encoded(H264, &["aac"], EVERY_SECOND))
    else {
        return;
    };
    let [frames, seconds] = [frames, seconds].map(|media| publish(&media, Packaging::Loc).unwrap());
    assert_eq!(objects(&frames, "1.loc"), objects(&seconds, "1.loc"));
}

#[test]
fn loc_catalogs_have_the_same_decoder_configuration_as_cmaf_catalogs() {
    let Some(media) = encoded(H264, &["aac"], EVERY_FRAME) else { return };
    let broadcast = publish(&media, Packaging::Loc).unwrap();
    let other = publish(&media, Packaging::Cmaf).unwrap();
    let catalog = catalog(&broadcast);
    let found: Vec<_> =
        catalog.tracks.iter().map(|it| (&it.name[..], &it.packaging[..], it.timescale)).collect();
    assert_eq!(found, [("1.loc", "loc", Some(12_800)), ("2.loc", "loc", Some(44_100))]);
    let parsed = |broadcast| -> hang::HangCatalog {
        serde_json::from_slice(&objects(broadcast, hang::CATALOG).remove(0).1).unwrap()
    };
    let hang = parsed(&broadcast);
    let as_cmaf = parsed(&other);
    let video = &hang.video.unwrap().renditions["1.loc"];
    let audio = &hang.audio.unwrap().renditions["2.loc"];
    assert_eq!((&video.container, &audio.container), (&hang::Container::Loc, &hang::Container::Loc));
    assert_eq!(video.description, as_cmaf.video.unwrap().renditions["1.m4s"].description);
    assert_eq!(audio.description, as_cmaf.audio.unwrap().renditions["2.m4s"].description);
    let hexadecimal = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let begins =
        catalog.init_data(&catalog.tracks[0]).map(|data| hexadecimal(STANDARD.decode(data).unwrap()));
    assert_eq!(begins, video.description);
    // moq-pub's format cannot describe LOC.
    let names: Vec<_> = broadcast.tracks().iter().map(|track| track.name().name().clone()).collect();
    assert_eq!(names, ["1.loc", "2.loc", "catalog", "catalog.json"]);
}

#[test]
fn track_that_loc_cannot_carry_is_published_as_cmaf() {
    let Some(media) = encoded(H264, &["flac", "-strict", "-2"], EVERY_FRAME) else { return };
    let broadcast = publish(&media, Packaging::Loc).unwrap();
    let catalog = catalog(&broadcast);
    let found: Vec<_> = catalog.tracks.iter().map(|it| (&it.name[..], &it.packaging[..])).collect();
    assert_eq!(found, [("1.loc", "loc"), ("2.m4s", "cmaf")]);
    let playlist = Playlist::from_catalog(&catalog, &TrackChoice::default()).unwrap().unwrap();
    assert_eq!(playlist.tracks.len(), 2);
}

#[test]
fn loc_track_without_timescale_and_decoder_configuration_is_played() {
    // The catalog and the objects are like those of moq-cli: they state no timescale and no decoder configuration, and
    // time stamps are in microseconds.
    let catalog = br#"{"version": "draft-01", "tracks": [
        {"name": "audio", "packaging": "loc", "isLive": true, "role": "audio", "codec": "opus", "samplerate": 48000, "channelConfig": "2"},
        {"name": "unknown", "packaging": "loc", "isLive": true, "role": "video", "codec": "vp8", "width": 1, "height": 1}]}"#;
    let playlist = Playlist::from_catalog(&msf::MsfCatalog::parse(catalog).unwrap(), &TrackChoice::default())
        .unwrap()
        .unwrap();
    let [PlayedTrack { name, wrap: Some(wrap) }] = &playlist.tracks[..] else { panic!("{playlist:?}") };
    assert_eq!(name, "audio");
    let mut wrap = wrap.clone();
    let times =
        [&[2, 0x10, 40, b'a'][..], &[3, 0x10, 0x44, 0, b'b'], &[3, 0x10, 0x40, 20, b'c']].map(|object| {
            let fragment = wrap.fragment(true, object).unwrap();
            let moof = Moof::decode(&mut &fragment[..]).unwrap();
            let time = moof.traf[0].tfdt.as_ref().unwrap().base_media_decode_time;
            let entry = moof.traf[0].trun[0].samples.get(0).unwrap();
            let at = moof.traf[0].trun[0].data_offset.unwrap() as usize;
            let sample = fragment[at..at + entry.size.unwrap() as usize].to_vec();
            (time, time.saturating_add_signed(entry.cts.unwrap()), sample)
        });
    // The third time stamp is before the second one: a publisher may restart its clock.
    assert_eq!(times, [(40, 40, b"a".to_vec()), (1024, 1024, b"b".to_vec()), (20, 20, b"c".to_vec())]);
    assert!(matches!(wrap.fragment(true, b"x"), Err(Error::NotLoc(_))));
    let huge =
        loc::LocSample { timestamp: 1 << 61, timescale: 1, config: None, sample: b"x" }.encode().unwrap();
    assert!(matches!(wrap.fragment(false, &huge), Err(Error::Malformed(_))));
    // The decoder configuration in this catalog is not valid.
    let catalog = br#"{"tracks": [{"name": "v", "packaging": "loc", "role": "video", "codec": "avc1.42C01E", "width": 1, "height": 1, "initData": "AAAA"}]}"#;
    let error = Playlist::from_catalog(&msf::MsfCatalog::parse(catalog).unwrap(), &TrackChoice::default())
        .err()
        .unwrap();
    assert!(matches!(error, Error::Configuration(_)), "{error}");
}
