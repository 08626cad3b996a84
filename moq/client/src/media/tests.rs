use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use millrace_moq::{GroupOrder, Location, Namespace, hang, msf};

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mp4_atom::{Decode, Encode, FourCC, Moof, Moov};

use super::boxes::{boxed, full};
use super::init::{self, Presentation};
use super::*;
use crate::broadcast::{Broadcast, History};

/// Returns two seconds of video (50 frames, with a key frame every 10) and audio, or `None` if ffmpeg is missing.
fn sample() -> Option<Vec<u8>> {
    let output = Command::new("ffmpeg")
        .args(["-v", "error", "-f", "lavfi", "-i", "testsrc2=size=160x90:rate=25:duration=2"])
        .args(["-f", "lavfi", "-i", "sine=duration=2", "-c:v", "libx264", "-preset", "ultrafast"])
        .args(["-g", "10", "-keyint_min", "10", "-sc_threshold", "0", "-c:a", "aac", "-f", "mp4"])
        .args(["-movflags", "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame", "-"])
        .output();
    match output {
        Ok(output) if output.status.success() => Some(output.stdout),
        _ => {
            eprintln!("SKIP: ffmpeg with libx264 is not here");
            None
        }
    }
}

fn publish(media: &[u8], piece: usize) -> (Arc<Broadcast>, Vec<Duration>) {
    publish_cut(media, piece, Cut::Whole)
}

fn publish_cut(media: &[u8], piece: usize, cut: Cut) -> (Arc<Broadcast>, Vec<Duration>) {
    let broadcast = Broadcast::new(Namespace::from_path("a/b").unwrap(), History::default());
    let mut publisher = MediaPublisher::new(broadcast.clone(), Packaging::Cmaf, cut).unwrap();
    let mut boxes = Boxes::default();
    let mut times = Vec::new();
    for piece in media.chunks(piece) {
        boxes.push(piece);
        while let Some((kind, bytes)) = boxes.pop().unwrap() {
            publisher.take(kind, boxes.position() - bytes.len() as u64, bytes).unwrap();
            while let Some(time) = publisher.next_time() {
                times.push(time);
                publisher.publish_next().unwrap();
            }
        }
    }
    (broadcast, times)
}

fn objects(broadcast: &Broadcast, name: &str) -> Vec<(Location, Bytes)> {
    let track = broadcast.tracks().into_iter().find(|track| track.name().name() == name).unwrap();
    let all = track.range(Location::default(), Location::new(u64::MAX, 0), GroupOrder::Ascending);
    all.into_iter().map(|object| (object.location, object.payload)).collect()
}

#[test]
fn group_begins_at_each_key_frame() {
    let Some(media) = sample() else { return };
    let (broadcast, times) = publish(&media, 1000);
    let video = objects(&broadcast, "1.m4s");
    assert_eq!(video.len(), 50);
    assert_eq!(video[9].0, Location::new(0, 9));
    assert_eq!(video[10].0, Location::new(1, 0));
    assert_eq!(video[49].0, Location::new(4, 9));
    let audio = objects(&broadcast, "2.m4s");
    assert_eq!(audio.last().map(|(location, _)| location.group), Some(4));
    assert!(times.iter().all(|time| *time < Duration::from_millis(2100)));
    assert!(times.iter().any(|time| *time >= Duration::from_millis(1900)));
}

/// Publishes boxes with groups that are numbered by time, as one of several publishers of the same media.
fn publish_replica<'a>(boxes: impl Iterator<Item = &'a (FourCC, Bytes)>, group: Duration) -> Arc<Broadcast> {
    let broadcast = Broadcast::new(Namespace::from_path("a/b").unwrap(), History::default());
    let publisher = MediaPublisher::new(broadcast.clone(), Packaging::Cmaf, Cut::Whole).unwrap();
    let mut publisher = publisher.numbered_by_time(group);
    let mut at = 0;
    for (kind, bytes) in boxes {
        publisher.take(*kind, at, bytes.clone()).unwrap();
        at += bytes.len() as u64;
        publisher.publish().unwrap();
    }
    broadcast
}

#[test]
fn replica_that_begins_later_numbers_its_objects_alike() {
    let Some(media) = sample() else { return };
    let mut reader = Boxes::default();
    reader.push(&media);
    let plain: Vec<_> = std::iter::from_fn(|| reader.pop().unwrap()).collect();
    // The media began 1.2 s after 1970 by their encoder's clock.
    let ntp_timestamp = (2_208_988_801 << 32) + (1 << 32) / 5;
    let mut prft = Vec::new();
    mp4_atom::Prft { reference_track_id: 1, ntp_timestamp, ..Default::default() }.encode(&mut prft).unwrap();
    let prft = (FourCC::new(b"prft"), Bytes::from(prft));
    let is_moof = |(kind, _): &(FourCC, Bytes)| *kind == FourCC::new(b"moof");
    let clocked =
        plain.iter().flat_map(|one| is_moof(one).then_some(&prft).into_iter().chain([one])).cloned();
    let clocked: Vec<_> = clocked.collect();
    let group = Duration::from_millis(400);
    for (boxes, first) in [(&plain, 0), (&clocked, 3)] {
        let whole = publish_replica(boxes.iter(), group);
        let begins = |one: &&(FourCC, Bytes)| [b"ftyp", b"moov"].contains(&one.0.as_ref());
        let fragments = boxes.iter().enumerate().filter(|(_, one)| is_moof(one)).map(|(at, _)| at);
        // The later publisher begins in the middle of a group, in front of the clock of a fragment.
        let middle = fragments.skip(30).map(|at| at - usize::from(first > 0)).next().unwrap();
        let late = boxes.iter().filter(begins).chain(&boxes[middle..]);
        let late = publish_replica(late, group);
        for track in ["1.m4s", "2.m4s"] {
            let all = objects(&whole, track);
            let later = objects(&late, track);
            assert!(later.len() > 10 && later.len() < all.len() && later[0].0.object == 0, "{later:?}");
            assert_eq!(all[all.len() - later.len()..], later, "{track}, groups from {first} on");
        }
        // A frame takes 40 ms.
        let video = objects(&whole, "1.m4s");
        let groups: Vec<_> = video.iter().map(|(location, _)| location.group).collect();
        let expected = (0..50).map(|frame| first + frame / 10);
        assert_eq!(groups, expected.skip(if first > 0 { 10 } else { 0 }).collect::<Vec<_>>());
    }
    // Two key frames in the time of one group do not begin two groups.
    let twice = objects(&publish_replica(plain.iter(), 2 * group), "1.m4s");
    assert_eq!(twice.iter().map(|(location, _)| location.group).max(), Some(2));
}

#[test]
fn every_byte_of_the_media_is_in_an_object() {
    let Some(media) = sample() else { return };
    let (broadcast, _) = publish(&media, 7);
    let init = objects(&broadcast, INIT);
    let [(Location { group: 0, object: 0 }, init)] = &init[..] else { panic!("{init:?}") };
    assert!(media.starts_with(init));
    let mut fragments = [objects(&broadcast, "1.m4s"), objects(&broadcast, "2.m4s")].concat();
    let length: usize = fragments.iter().map(|(_, payload)| payload.len()).sum();
    assert_eq!(init.len() + length, media.len());
    // After its init segment, the published input consists of the payloads of both tracks' objects, interleaved in any
    // way.
    let mut rest = &media[init.len()..];
    while !rest.is_empty() {
        let next = fragments.iter().position(|(_, payload)| rest.starts_with(payload)).unwrap();
        rest = &rest[fragments.remove(next).1.len()..];
    }
    assert_eq!(playable(init).unwrap(), [(0, 1), (1, 2)]);
}

#[test]
fn key_frames_and_delta_frames_have_separate_subgroups() {
    let Some(media) = sample() else { return };
    let (broadcast, _) = publish_cut(&media, 1000, Cut::ByNeed);
    let stored = |name: &str| {
        let track = broadcast.tracks().into_iter().find(|track| track.name().name() == name).unwrap();
        track.range(Location::default(), Location::new(u64::MAX, 0), GroupOrder::Ascending)
    };
    let video = stored("1.m4s");
    let found: Vec<_> =
        video.iter().map(|object| (object.location, object.subgroup, object.priority)).collect();
    let expected = (0..50).map(|frame| match frame % 10 {
        0 => (Location::new(frame / 10, 0), Some(0), 125),
        id => (Location::new(frame / 10, id), Some(1), 126),
    });
    assert_eq!(found, expected.collect::<Vec<_>>());
    assert!(stored("2.m4s").iter().all(|object| (object.subgroup, object.priority) == (Some(0), 124)));
    // The objects' payloads are the same as if each group were published as one subgroup.
    let (whole, _) = publish(&media, 1000);
    assert_eq!(objects(&broadcast, "1.m4s"), objects(&whole, "1.m4s"));
    assert_eq!(objects(&broadcast, "2.m4s"), objects(&whole, "2.m4s"));
}

#[test]
fn sample_flags_decide_the_subgroup_of_a_fragment() {
    use super::output::FragmentNeed;
    let sample = |flags: &u32| super::fragment::MediaSample {
        flags: *flags,
        decoded: 0,
        duration: 1,
        offset: 0,
        at: 0..1,
    };
    for (is_key, flags, need) in [
        (true, &[0x0200_0000][..], FragmentNeed::Key),
        (false, &[0x0101_0000], FragmentNeed::Delta),
        (false, &[0x0181_0000], FragmentNeed::Disposable),
        (false, &[0x0181_0000, 0x0101_0000], FragmentNeed::Delta),
        (true, &[0x0200_0000, 0x0181_0000], FragmentNeed::Key),
        (false, &[], FragmentNeed::Delta),
    ] {
        let samples: Vec<_> = flags.iter().map(sample).collect();
        assert_eq!(FragmentNeed::classify(is_key, &samples), need, "{flags:x?}");
    }
}

#[test]
fn catalog_equals_the_one_that_moq_pub_writes() {
    let Some(media) = sample() else { return };
    let (broadcast, _) = publish(&media, usize::MAX);
    let catalog = objects(&broadcast, CATALOG).remove(0).1;
    let catalog: serde_json::Value = serde_json::from_slice(&catalog).unwrap();
    assert_eq!(catalog["version"], 1);
    assert_eq!(catalog["streamingFormat"], 1);
    assert_eq!(catalog["streamingFormatVersion"], "0.2");
    assert_eq!(catalog["supportsDeltaUpdates"], true);
    let common = serde_json::json!({"namespace": "/a/b", "packaging": "cmaf", "renderGroup": 1});
    assert_eq!(catalog["commonTrackFields"], common);
    let video = &catalog["tracks"][0];
    assert_eq!((&video["name"], &video["initTrack"]), (&"1.m4s".into(), &"0.mp4".into()));
    assert!(video["selectionParams"]["codec"].as_str().unwrap().starts_with("avc1."));
    assert_eq!(video["selectionParams"]["width"], 160);
    let audio = &catalog["tracks"][1]["selectionParams"];
    assert_eq!(audio["codec"], "mp4a.40.2", "{catalog:#}");
    // ffmpeg always writes 2 channels into the sample entry, and moq-pub copies that number.
    assert_eq!(audio["channelConfig"], "2", "{catalog:#}");
    assert_eq!(audio["samplerate"], 44_100);
}

/// Returns three seconds of video with parameter sets before each key frame, or `None` if ffmpeg is missing.
fn in_band(size: &str, bitrate: &str, group: &str) -> Option<Vec<u8>> {
    let output = Command::new("ffmpeg")
        .args(["-v", "error", "-f", "lavfi", "-i", &format!("testsrc2=size={size}:rate=25:duration=3")])
        .args(["-c:v", "libx264", "-preset", "ultrafast", "-b:v", bitrate, "-g", group, "-keyint_min", group])
        .args([
            "-sc_threshold",
            "0",
            "-bf",
            "0",
            "-tag:v",
            "avc3",
            "-bsf:v",
            "dump_extra=freq=keyframe",
            "-f",
            "mp4",
        ])
        .args(["-movflags", "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame", "-"])
        .output();
    output.ok().filter(|output| output.status.success()).map(|output| output.stdout)
}

fn renditions(media: [&[u8]; 2]) -> Result<Arc<Broadcast>, Error> {
    let broadcast = Broadcast::new(Namespace::from_path("a/b").unwrap(), History::default());
    let shared = Renditions::new(broadcast.clone(), 2, Packaging::Cmaf)?;
    for (place, (media, bitrate)) in media.into_iter().zip([2_000_000, 300_000]).enumerate() {
        feed(&mut shared.media(place, Some(bitrate), Cut::ByNeed)?, media)?;
    }
    Ok(broadcast)
}

/// Returns the decode time of a fragment.
fn time_of(fragment: &[u8]) -> u64 {
    let moof = Moof::decode(&mut &fragment[..]).unwrap();
    moof.traf[0].tfdt.as_ref().unwrap().base_media_decode_time
}

#[test]
fn groups_of_the_same_id_begin_at_the_same_time_in_all_renditions() {
    let (Some(best), Some(least)) = (in_band("320x180", "2M", "10"), in_band("160x90", "300k", "10")) else {
        eprintln!("SKIP: ffmpeg with libx264 is not here");
        return;
    };
    let broadcast = renditions([&best, &least]).unwrap();
    let starts = |name: &str| -> Vec<(u64, u64)> {
        let firsts = objects(&broadcast, name).into_iter().filter(|(location, _)| location.object == 0);
        firsts.map(|(location, payload)| (location.group, time_of(&payload))).collect()
    };
    let best = starts("1.m4s");
    assert_eq!(best.len(), 8);
    assert_eq!(best, starts("r1-1.m4s"));
    let json = objects(&broadcast, msf::CATALOG).remove(0).1;
    let catalog = msf::MsfCatalog::parse(&json).unwrap();
    let found: Vec<_> =
        catalog.alternates("1.m4s").iter().map(|track| (track.name.clone(), track.bitrate)).collect();
    assert_eq!(found, [("1.m4s".to_owned(), Some(2_000_000)), ("r1-1.m4s".to_owned(), Some(300_000))]);
    assert!(catalog.tracks[0].codec.as_deref().unwrap().starts_with("avc3."));
    assert_eq!(catalog.tracks.iter().map(|track| track.width).collect::<Vec<_>>(), [Some(320), Some(160)]);
    let own: Bytes = STANDARD.decode(catalog.init_data(&catalog.tracks[1]).unwrap()).unwrap().into();
    assert_eq!(objects(&broadcast, "r1-0.mp4")[0].1, own);
    let hang: hang::HangCatalog =
        serde_json::from_slice(&objects(&broadcast, hang::CATALOG).remove(0).1).unwrap();
    assert_eq!(hang.video.unwrap().renditions.keys().collect::<Vec<_>>(), ["1.m4s", "r1-1.m4s"]);
    // The best rendition keeps moq-pub's track names, so that moq-pub's own players find its tracks.
    assert_eq!((objects(&broadcast, CATALOG).len(), objects(&broadcast, INIT).len()), (1, 1));
}

#[test]
fn renditions_whose_groups_are_not_aligned_are_refused() {
    let (Some(best), Some(least)) = (in_band("320x180", "2M", "10"), in_band("160x90", "300k", "15")) else {
        eprintln!("SKIP: ffmpeg with libx264 is not here");
        return;
    };
    let error = renditions([&best, &least]).err().unwrap();
    assert!(matches!(error, Error::Apart { group: 1, .. }), "{error}");
}

/// Returns an init segment in base64 with the ID of its only track changed to `id`.
fn renamed(init: &str, id: u32) -> String {
    let init = STANDARD.decode(init).unwrap();
    let at = init.windows(4).position(|window| window == b"moov").unwrap() - 4;
    let mut moov = Moov::decode(&mut &init[at..]).unwrap();
    moov.trak[0].tkhd.track_id = id;
    moov.mvex.as_mut().unwrap().trex[0].track_id = id;
    let mut renamed = init[..at].to_vec();
    mp4_atom::Encode::encode(&moov, &mut renamed).unwrap();
    STANDARD.encode(renamed)
}

/// Returns the track IDs in an init segment, and the track IDs in its mvex box.
fn ids(init: &[u8]) -> (Vec<u32>, Vec<u32>) {
    let at = init.windows(4).position(|window| window == b"moov").unwrap() - 4;
    let moov = Moov::decode(&mut &init[at..]).unwrap();
    let extended = moov.mvex.unwrap().trex.iter().map(|trex| trex.track_id).collect();
    (moov.trak.iter().map(|trak| trak.tkhd.track_id).collect(), extended)
}

#[test]
fn playlist_is_made_from_the_catalog() {
    let Some(media) = sample() else { return };
    let (broadcast, _) = publish(&media, usize::MAX);
    let catalog = msf::MsfCatalog::parse(&objects(&broadcast, msf::CATALOG).remove(0).1).unwrap();
    let tracks = ["1.m4s", "2.m4s"].map(|name| PlayedTrack::plain(name.into())).to_vec();

    // The init segments of the tracks are joined into one.
    let described = |ids: [u32; 2]| {
        let mut tracks = catalog.tracks.clone();
        for (track, id) in tracks.iter_mut().zip(ids) {
            track.init_data = Some(renamed(catalog.init_data(track).unwrap(), id));
            track.init_ref = None;
        }
        msf::MsfCatalog::new(tracks)
    };
    for wanted in [[1, 2], [4, 7]] {
        let joined = Playlist::from_catalog(&described(wanted), &TrackChoice::default()).unwrap().unwrap();
        assert_eq!(playable(&joined.init).unwrap(), [(0, wanted[0]), (1, wanted[1])]);
        assert_eq!(joined.tracks, tracks);
        assert_eq!(ids(&joined.init), (wanted.to_vec(), wanted.to_vec()));
    }
    // This init segment is the same for both tracks, so it is used unchanged.
    let init = objects(&broadcast, INIT).remove(0).1;
    let mut common = catalog.tracks.clone();
    common.iter_mut().for_each(|track| track.init_data = Some(STANDARD.encode(&init)));
    let common =
        Playlist::from_catalog(&msf::MsfCatalog::new(common), &TrackChoice::default()).unwrap().unwrap();
    assert_eq!(common, Playlist { init, tracks });
    // These two tracks have the same track ID, so only the first one is played.
    let apart = Playlist::from_catalog(&described([1, 1]), &TrackChoice::default()).unwrap().unwrap();
    assert_eq!((playable(&apart.init).unwrap(), apart.tracks.len()), (vec![(0, 1)], 1));
    // These tracks have no playable packaging.
    let legacy = |mut track: msf::MsfTrack| {
        track.packaging = "legacy".into();
        track
    };
    let other = msf::MsfCatalog::new(catalog.tracks.iter().cloned().map(legacy).collect());
    assert_eq!(Playlist::from_catalog(&other, &TrackChoice::default()).unwrap(), None);
}

#[test]
fn video_and_audio_without_alternates_are_in_msf_and_hang_catalogs() {
    let Some(media) = sample() else { return };
    let (broadcast, _) = publish(&media, usize::MAX);
    let catalog = msf::MsfCatalog::parse(&objects(&broadcast, msf::CATALOG).remove(0).1).unwrap();
    let described: Vec<_> =
        catalog.tracks.iter().map(|track| (&track.name[..], track.role.as_deref())).collect();
    assert_eq!(described, [("1.m4s", Some("video")), ("2.m4s", Some("audio"))]);
    assert!(catalog.tracks.iter().all(|track| track.alt_group.is_none() && track.render_group == Some(1)));
    // Each track has its own init segment: the init segment of all tracks, without the other tracks.
    let init = objects(&broadcast, INIT).remove(0).1;
    let common = Presentation::parse(&init).unwrap();
    for (track, id) in catalog.tracks.iter().zip([1, 2]) {
        let own = STANDARD.decode(catalog.init_data(track).unwrap()).unwrap();
        assert_eq!(ids(&own), (vec![id], vec![id]));
        assert_eq!(init::single_track_init(&init, id).unwrap(), own);
        assert_eq!(
            Presentation::parse(&own).unwrap().tracks[0].timescale,
            common.tracks[id as usize - 1].timescale
        );
    }
    // hang's catalog has the same init segments as the MSF catalog.
    let json = objects(&broadcast, hang::CATALOG).remove(0).1;
    let hang: hang::HangCatalog = serde_json::from_slice(&json).unwrap();
    let video = &hang.video.unwrap().renditions["1.m4s"];
    assert_eq!((video.coded_width, video.coded_height), (Some(160), Some(90)));
    let hang::Container::Cmaf { init: own } = &video.container else { panic!("{video:?}") };
    assert_eq!(Some(&own[..]), catalog.init_data(&catalog.tracks[0]));
    assert_eq!(video.description.as_deref(), Some(&body_of(b"avcC", &init)[..]));
    let sound = &hang.audio.unwrap().renditions["2.m4s"];
    // These bytes are the AudioSpecificConfig of AAC-LC, 44.1 kHz, one channel. The catalog takes rate and channels
    // from these bytes, even if the sample entry states others.
    assert_eq!((&sound.codec[..], sound.sample_rate, sound.number_of_channels), ("mp4a.40.2", 44_100, 1));
    assert!(sound.description.as_deref().unwrap().starts_with("1208"), "{sound:?}");
}

/// Returns the body of the first box of a type, at any depth, in hexadecimal digits.
fn body_of(kind: &[u8; 4], init: &[u8]) -> String {
    let at = init.windows(4).position(|window| window == kind).unwrap();
    let length = u32::from_be_bytes(init[at - 4..at].try_into().unwrap()) as usize;
    init[at + 4..at - 4 + length].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn catalog_has_the_rfc_6381_name_of_each_codec() {
    for (video, audio, names, record) in [
        (&["libx265", "-tag:v", "hvc1"][..], "aac", ["hvc1.1.6.L", "mp4a.40.2"], Some(b"hvcC")),
        (&["libx265", "-tag:v", "hev1"], "aac", ["hev1.1.6.L", "mp4a.40.2"], Some(b"hvcC")),
        (&["libsvtav1"], "libopus", ["av01.0.00M.08", "opus"], Some(b"av1C")),
        (&["libvpx-vp9"], "libopus", ["vp09.00.10.08", "opus"], None),
        (&["libvpx-vp9"], "libmp3lame", ["vp09.00.10.08", "mp4a.6B"], None),
    ] {
        let Some(media) = encoded(video, audio) else {
            eprintln!("SKIP: ffmpeg with {} and {audio} is not here", video[0]);
            continue;
        };
        let (broadcast, _) = publish(&media, usize::MAX);
        let catalog = msf::MsfCatalog::parse(&objects(&broadcast, msf::CATALOG).remove(0).1).unwrap();
        for (track, name) in catalog.tracks.iter().zip(names) {
            assert!(track.codec.as_deref().unwrap().starts_with(name), "{track:?}");
        }
        assert_eq!((catalog.tracks[0].width, catalog.tracks[0].height), (Some(160), Some(90)));
        let init = objects(&broadcast, INIT).remove(0).1;
        let hang: hang::HangCatalog =
            serde_json::from_slice(&objects(&broadcast, hang::CATALOG).remove(0).1).unwrap();
        let video = &hang.video.unwrap().renditions["1.m4s"];
        let audio = hang.audio.unwrap();
        assert_eq!(video.description, record.map(|kind| body_of(kind, &init)));
        assert!(audio.renditions.contains_key("2.m4s"));
    }
}

/// Returns half a second of small video and audio, or `None` if ffmpeg or one of its encoders for `video` and `audio`
/// is missing.
fn encoded(video: &[&str], audio: &str) -> Option<Vec<u8>> {
    let output = Command::new("ffmpeg")
        .args(["-v", "error", "-f", "lavfi", "-i", "testsrc2=size=160x90:rate=10:duration=0.5"])
        .args(["-f", "lavfi", "-i", "sine=frequency=440:duration=0.5", "-pix_fmt", "yuv420p", "-c:v"])
        .args(video)
        .args(["-c:a", audio, "-f", "mp4"])
        .args(["-movflags", "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame", "-"])
        .output();
    output.ok().filter(|output| output.status.success()).map(|output| output.stdout)
}

#[test]
fn different_init_segment_makes_new_track_names_in_the_catalog() {
    let (Some(small), Some(large)) = (in_band("160x90", "300k", "10"), in_band("320x180", "2M", "10")) else {
        eprintln!("SKIP: ffmpeg with libx264 is not here");
        return;
    };
    // A repeated init segment changes nothing, while a different one makes new tracks.
    let (broadcast, _) = publish(&[&small[..], &small, &large].concat(), 1000);
    let names: Vec<_> = broadcast.tracks().iter().map(|track| track.name().name().clone()).collect();
    assert_eq!(names, [".catalog", "catalog", "catalog.json", "i2-0.mp4", "i2-1.m4s"]);
    let catalogs = objects(&broadcast, msf::CATALOG);
    let parsed = catalogs.iter().map(|(_, json)| msf::MsfCatalog::parse(json).unwrap());
    let found: Vec<_> = parsed.map(|it| (it.tracks[0].name.clone(), it.tracks[0].width)).collect();
    assert_eq!(found, [("1.m4s".to_owned(), Some(160)), ("i2-1.m4s".to_owned(), Some(320))]);
    assert_eq!(catalogs.iter().map(|(at, _)| at.group).collect::<Vec<_>>(), [0, 1]);
    let again: MoqPubCatalog =
        serde_json::from_slice(&objects(&broadcast, CATALOG).pop().unwrap().1).unwrap();
    assert_eq!(again.tracks[0].init_track.as_deref(), Some("i2-0.mp4"));
    let (small, _) = publish(&[&small[..], &small].concat(), usize::MAX);
    let before = objects(&small, "1.m4s");
    let after = objects(&broadcast, "i2-1.m4s");
    assert_eq!(after[0].0, Location::new(before.last().unwrap().0.group + 1, 0), "groups go on");
}

/// Returns an init segment of video in an unknown codec, whose samples have one byte each.
fn unknown_video(entry: &[u8; 4]) -> Vec<u8> {
    let tkhd = [&[0; 8][..], &1_u32.to_be_bytes(), &[0; 68]].concat();
    let mdhd = [&[0; 8][..], &10_u32.to_be_bytes(), &[0; 8]].concat();
    let hdlr = [&[0; 4][..], b"vide", &[0; 13]].concat();
    let stsd = [&1_u32.to_be_bytes()[..], &boxed(entry, &[0; 78])].concat();
    let stbl = boxed(b"stbl", &full(b"stsd", 0, 0, &stsd));
    let mdia = [full(b"mdhd", 0, 0, &mdhd), full(b"hdlr", 0, 0, &hdlr), boxed(b"minf", &stbl)].concat();
    let trak = [full(b"tkhd", 0, 0, &tkhd), boxed(b"mdia", &mdia)].concat();
    let moov = [
        boxed(b"trak", &trak),
        boxed(b"mvex", &full(b"trex", 0, 0, &[0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0])),
    ];
    boxed(b"moov", &moov.concat())
}

/// Byte offset of the sample in the result of [`unknown_fragment`].
const UNKNOWN_DATA: usize = 104;

/// Returns a fragment with one sample, which has the decode time `time` and the sample flags `flags`.
fn unknown_fragment(time: u64, flags: u32) -> Vec<u8> {
    let tfhd = [1_u32.to_be_bytes(), flags.to_be_bytes()].concat();
    let parts = [
        full(b"tfhd", 0, 0x02_0020, &tfhd),
        full(b"tfdt", 1, 0, &time.to_be_bytes()),
        full(b"trun", 0, 0x201, &[0, 0, 0, 1, 0, 0, 0, UNKNOWN_DATA as u8, 0, 0, 0, 1]),
    ];
    let mfhd = full(b"mfhd", 0, 0, &[0; 4]);
    let moof = boxed(b"moof", &[mfhd, boxed(b"traf", &parts.concat())].concat());
    assert_eq!(moof.len() + 8, UNKNOWN_DATA);
    [moof, boxed(b"mdat", b"x")].concat()
}

#[test]
fn video_without_key_frame_flags_is_divided_into_groups_by_time() {
    let starts = |flags: fn(u64) -> u32| {
        let fragments = (0..100).flat_map(|time| unknown_fragment(time, flags(time)));
        let (broadcast, _) = publish(&[unknown_video(b"zzzz"), fragments.collect()].concat(), usize::MAX);
        let starts = objects(&broadcast, "1.m4s").into_iter().filter(|(at, _)| at.object == 0);
        starts.map(|(_, payload)| time_of(&payload)).collect::<Vec<_>>()
    };
    const DELTA: u32 = 0x0101_0000;
    assert_eq!(starts(|_| DELTA), [0, 20, 40, 60, 80], "every two seconds");
    assert_eq!(starts(|time| if time % 30 == 0 { 0 } else { 0x1_0000 }), [0, 30, 60, 90], "as it is marked");
}

#[test]
fn fragments_of_unknown_tracks_and_without_samples_are_skipped() {
    let empty = boxed(b"moof", &boxed(b"traf", &full(b"tfhd", 0, 0x02_0000, &1_u32.to_be_bytes())));
    let mut other = unknown_fragment(0, 0);
    let track = other.windows(4).position(|window| window == b"tfhd").unwrap() + 8;
    other[track..track + 4].copy_from_slice(&9_u32.to_be_bytes());
    let input = [&unknown_video(b"zzzz")[..], &empty, &other, &unknown_fragment(3, 0), &empty].concat();
    let (broadcast, times) = publish(&input, 5);
    assert_eq!(times, [Duration::from_millis(300)]);
    let payloads = objects(&broadcast, "1.m4s");
    assert_eq!(payloads.len(), 1);
    assert_eq!(payloads[0].1, unknown_fragment(3, 0));
}

#[test]
fn sample_offset_outside_mdat_is_an_error_naming_default_base_is_moof() {
    // The offset that the fragment states for its sample is within the moof box itself, or beyond the input. The mdat
    // box has more bytes than the one sample, so the right offset cannot be guessed.
    for offset in [7_u32, 70_000] {
        let mut fragment = unknown_fragment(0, 0);
        let at = fragment.windows(4).position(|window| window == b"trun").unwrap() + 12;
        fragment[at..at + 4].copy_from_slice(&offset.to_be_bytes());
        fragment.truncate(UNKNOWN_DATA - 8);
        fragment.extend(boxed(b"mdat", b"more"));
        let input: Vec<u8> =
            unknown_video(b"zzzz").into_iter().chain(std::iter::repeat_n(fragment, 70).flatten()).collect();
        let broadcast = Broadcast::new(Namespace::from_path("a").unwrap(), History::default());
        let mut media = MediaPublisher::new(broadcast, Packaging::Cmaf, Cut::Whole).unwrap();
        let error = feed(&mut media, &input).unwrap_err().to_string();
        assert!(error.contains("default-base-is-moof"), "{error}");
    }
}

#[test]
fn fragment_with_several_truns_or_a_gap_in_mdat_gets_one_trun() {
    let trun = |offset: usize, count: u8| {
        let sizes = [0, 0, 0, 1].repeat(count.into());
        full(b"trun", 0, 0x201, &[&[0, 0, 0, count], &(offset as u32).to_be_bytes()[..], &sizes].concat())
    };
    let moof = |truns: &[u8]| {
        // These sample flags mark no sample as a key frame, so the samples stay in one fragment.
        let tfhd = full(b"tfhd", 0, 0x02_0020, &[0, 0, 0, 1, 1, 1, 0, 0]);
        let traf = boxed(b"traf", &[&tfhd[..], &full(b"tfdt", 1, 0, &[0; 8]), truns].concat());
        boxed(b"moof", &[full(b"mfhd", 0, 0, &[0; 4]), traf].concat())
    };
    let twice = |at: usize| [trun(at, 1), trun(at + 1, 2)].concat();
    let further = |at: usize| trun(at + 2, 3);
    for (truns, mdat) in [(&twice as &dyn Fn(usize) -> Vec<u8>, &b"abc"[..]), (&further, b"--abc")] {
        let body = moof(&truns(0)).len() + 8;
        let input = [unknown_video(b"zzzz"), moof(&truns(body)), boxed(b"mdat", mdat)].concat();
        let (broadcast, _) = publish(&input, 7);
        let payload = objects(&broadcast, "1.m4s").pop().unwrap().1;
        let found = Moof::decode(&mut &payload[..]).unwrap();
        let [trun] = &found.traf[0].trun[..] else { panic!("{found:?}") };
        let body = payload.len() - 3;
        assert_eq!((trun.samples.len(), trun.data_offset), (3, Some(body as i32)));
        assert_eq!(payload[body..], b"abc"[..]);
    }
}
