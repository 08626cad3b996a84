//! Tests of our publisher and subscriber as processes, with all their options.

use serde_json::Value;

use super::{
    clip::{self, FRAMES, GROUP, InteropClip, SOUND_TRACK, VIDEO, VIDEO_AND_SOUND, VIDEO_TRACK, assert_same},
    needs,
    players::{PACE, assert_same_streams, publish, subscribe},
    process::{InteropProcess, TestNeed::Ffmpeg},
    relay::InteropRelay,
};

#[test]
fn sound_and_video_arrive_unchanged() {
    needs!(Ffmpeg);
    let relay = InteropRelay::start();
    let clip = &VIDEO_AND_SOUND;
    let mut publisher = publish(None, &relay, &relay.url(), clip, &[]);
    let players = [subscribe(None, &relay.url(), &[]), subscribe(None, &relay.url(), &["--catalog"])];
    relay.until_subscribed(VIDEO_TRACK, 2);
    relay.until_subscribed(SOUND_TRACK, 2);
    publisher.feed(&clip.fragments, PACE);
    publisher.finish();
    for player in players {
        assert_same_streams(&player.finish(), clip);
    }
    relay.assert_forwarded();
}

/// The publisher sends each group of the video as two streams. The player must put the frames of both streams back into
/// their original order.
#[test]
fn key_frames_and_deltas_arrive_as_one_track() {
    needs!(Ffmpeg);
    let relay = InteropRelay::start();
    let clip = &VIDEO_AND_SOUND;
    let mut publisher = publish(None, &relay, &relay.url(), clip, &["--subgroups"]);
    let player = subscribe(None, &relay.url(), &["--catalog"]);
    relay.until_subscribed(VIDEO_TRACK, 1);
    relay.until_subscribed(SOUND_TRACK, 1);
    publisher.feed(&clip.fragments, PACE);
    publisher.finish();
    assert_same_streams(&player.finish(), clip);
}

/// Each object is one media sample. The player must assemble the samples into MP4 fragments again.
#[test]
fn loc_objects_arrive_with_the_samples_that_were_published() {
    needs!(Ffmpeg);
    let relay = InteropRelay::start();
    let clip = &VIDEO_AND_SOUND;
    let mut publisher = publish(None, &relay, &relay.url(), clip, &["--packaging", "loc"]);
    let player = subscribe(None, &relay.url(), &[]);
    relay.until_subscribed("1.loc", 1);
    relay.until_subscribed("2.loc", 1);
    publisher.feed(&clip.fragments, PACE);
    publisher.finish();
    let media = player.finish();
    assert_eq!(clip::hashes(&media), clip::hashes(&clip.bytes()));
    assert_eq!(clip::frames(&media), FRAMES);
    relay.assert_forwarded();
}

/// Starts a publisher that has published up to the middle of group 2, and waits until the relay has received all of
/// that.
fn halfway(relay: &InteropRelay, clip: &InteropClip) -> (InteropProcess, usize) {
    let mut publisher = publish(None, relay, &relay.url(), clip, &[]);
    let fed = 2 * GROUP + 7;
    // A relay subscribes to a track only while it has a subscriber. This subscriber unsubscribes after the objects that
    // were published so far.
    let first = subscribe(None, &relay.url(), &["--count", &fed.to_string()]);
    relay.until_subscribed(VIDEO_TRACK, 1);
    publisher.feed(&clip.fragments[..fed], PACE);
    assert_same(&first.finish(), &clip.bytes_of(0..fed), "the first half");
    (publisher, fed)
}

#[test]
fn subscriber_begins_at_requested_group() {
    needs!(Ffmpeg);
    let relay = InteropRelay::start();
    let clip = &VIDEO;
    let (mut publisher, fed) = halfway(&relay, clip);
    let video = |args: &[&str]| subscribe(None, &relay.url(), &[&["--track", VIDEO_TRACK], args].concat());
    let table: [(&[&str], _, _); 7] = [
        (&[], 2 * GROUP, FRAMES),
        (&["--join-groups", "1"], GROUP, FRAMES),
        (&["--join-groups", "1000"], 0, FRAMES),
        (&["--filter", "largest"], fed, FRAMES),
        (&["--filter", "next-group"], 3 * GROUP, FRAMES),
        (&["--filter", "2:3"], 2 * GROUP + 3, FRAMES),
        (&["--filter", "2:5..2", "--priority", "3"], 2 * GROUP + 5, 3 * GROUP),
    ];
    let players: Vec<_> = table.iter().map(|(args, ..)| video(args)).collect();
    relay.until_subscribed(VIDEO_TRACK, table.len() as u64);
    publisher.feed(&clip.fragments[fed..], PACE);
    publisher.finish();
    for ((args, first, last), player) in table.into_iter().zip(players) {
        assert_same(&player.finish(), &clip.fragments[first..last].concat(), &args.join(" "));
    }
}

#[test]
fn subscriber_fetches_ranges_of_a_track() {
    needs!(Ffmpeg);
    let relay = InteropRelay::start();
    let clip = &VIDEO;
    let (publisher, fed) = halfway(&relay, clip);
    let part = |fragments: std::ops::Range<usize>| clip.fragments[fragments].concat();
    let backwards = [part(GROUP..2 * GROUP), part(0..GROUP)].concat();
    let table: [(&[&str], _); 4] = [
        (&["--fetch", "0:0", "2:0"], part(0..fed)),
        (&["--fetch", "0:5", "1:3"], part(5..GROUP + 3)),
        (&["--fetch", "1:0", "1:0"], part(GROUP..2 * GROUP)),
        (&["--fetch", "0:0", "1:0", "--group-order", "descending"], backwards),
    ];
    for (args, want) in table {
        let args = [&["--track", VIDEO_TRACK], args].concat();
        let fetched = subscribe(None, &relay.url(), &args).finish();
        assert_same(&fetched, &want, &args.join(" "));
    }
    drop(publisher);
}

#[test]
fn a_publisher_pushes_its_tracks() {
    needs!(Ffmpeg);
    let relay = InteropRelay::start();
    let clip = &VIDEO;
    let mut publisher = publish(None, &relay, &relay.url(), clip, &["--publish"]);
    relay.until_published(VIDEO_TRACK);
    let (first, rest) = clip.fragments.split_at(2 * GROUP + 7);
    publisher.feed(first, PACE);
    relay.until_largest(VIDEO_TRACK, first.len() - 1);
    let player = subscribe(None, &relay.url(), &["--join-groups", "9"]);
    relay.until_subscribed(VIDEO_TRACK, 1);
    publisher.feed(rest, PACE);
    publisher.finish();
    assert_same(&player.finish(), &clip.bytes(), "all of the media");
}

/// Publishes 250 generated objects to two subscribers. Returns the statistics that each subscriber prints as JSON.
fn generated(publishing: &[&str], subscribing: &[&str]) -> Vec<Value> {
    let relay = InteropRelay::start();
    let fixed = ["--generate", "--wait", "--rate-hz", "500", "--duration", "0.5", "--object-bytes", "900"];
    let publisher = InteropProcess::ours(None, "publish", &relay.url(), &[&fixed, publishing].concat());
    relay.until_announced();
    let fixed = ["--track", "objects", "--json", "--subscribers", "2"];
    let counting = InteropProcess::ours(None, "subscribe", &relay.url(), &[&fixed, subscribing].concat());
    publisher.finish();
    let report: Value = serde_json::from_slice(&counting.finish()).unwrap();
    let reports = report["subscribers"].as_array().unwrap().clone();
    assert_eq!(reports.len(), 2);
    reports
}

/// Options of a subscriber that fetches all earlier objects, since it may join after the first ones.
const FROM_THE_START: [&str; 2] = ["--join-groups", "1000"];

fn assert_complete(reports: &[Value]) {
    for report in reports {
        for (figure, want) in
            [("delivered", 250), ("lost", 0), ("duplicates", 0), ("corrupted", 0), ("disordered", 0)]
        {
            assert_eq!(report[figure], want, "{figure} in {report:#}");
        }
    }
}

#[test]
fn generated_objects_arrive_on_a_stream_per_group() {
    let publishing = ["--objects-per-group", "20", "--priority-pattern", "10,200"];
    assert_complete(&generated(&publishing, &FROM_THE_START));
}

#[test]
fn generated_objects_arrive_on_a_stream_each() {
    assert_complete(&generated(&["--streams", "object"], &FROM_THE_START));
}

#[test]
fn generated_objects_arrive_in_datagrams() {
    for report in generated(&["--datagrams"], &[]) {
        for figure in ["streams", "corrupted", "duplicates"] {
            assert_eq!(report[figure], 0, "{figure} in {report:#}");
        }
        // Datagrams are lost if a socket's buffer is full because the machine is busy.
        assert!(
            report["delivered"].as_u64().is_some_and(|delivered| (1..=250).contains(&delivered)),
            "{report:#}"
        );
    }
}
