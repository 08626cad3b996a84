//! Tests of Cloudflare's unmodified publisher and player (moq-pub and moq-sub), with each other and with our clients.

use std::time::Duration;

use super::{
    clip::{
        self, FRAMES, GROUP, InteropClip, SOUND_TRACK, VIDEO, VIDEO_AND_SOUND, VIDEO_TRACK, assert_same,
        assert_same_groups,
    },
    needs,
    process::{
        InteropProcess, ProgramHost,
        TestNeed::{Ffmpeg, Peer},
    },
    relay::InteropRelay,
};

/// Time between two fragments.
pub const PACE: Duration = Duration::from_millis(4);

/// Starts moq-pub and waits until it has described its tracks and waits for fragments.
pub fn moq_pub(
    host: ProgramHost,
    relay: &InteropRelay,
    url: &str,
    clip: &InteropClip,
    more: &[&str],
) -> InteropProcess {
    let mut publisher = InteropProcess::peer(host, "moq-pub", url, more);
    publisher.write(&clip.init);
    // moq-pub logs the catalog when its tracks exist.
    publisher.wait_logged("catalog:");
    relay.until_announced();
    publisher
}

/// Starts our publisher, and waits until it has described its tracks and waits for fragments.
pub fn publish(
    host: ProgramHost,
    relay: &InteropRelay,
    url: &str,
    clip: &InteropClip,
    more: &[&str],
) -> InteropProcess {
    let mut publisher = InteropProcess::ours(host, "publish", url, more);
    publisher.write(&clip.init);
    relay.until_announced();
    publisher
}

pub fn moq_sub(host: ProgramHost, url: &str, more: &[&str]) -> InteropProcess {
    InteropProcess::peer(host, "moq-sub", url, more)
}

/// Starts our player. It leaves out no group: on a busy machine one may be finished long after the one that follows it.
pub fn subscribe(host: ProgramHost, url: &str, more: &[&str]) -> InteropProcess {
    InteropProcess::ours(host, "subscribe", url, &[&["--skip-after", "120s"], more].concat())
}

/// Largest number of output bytes that moq-sub buffers until it exits: those after the last line feed (0x0a).
pub const HELD_BACK: usize = 1024;

/// A player, and the fragment from which it should write the media.
pub struct Playing {
    pub player: InteropProcess,
    pub what: String,
    pub first: usize,
}

impl Playing {
    pub fn new(player: InteropProcess, what: &str, first: usize) -> Self {
        Self { player, what: what.into(), first }
    }
}

/// Checks that every player writes the expected media, and that every frame can be decoded. moq-pub never ends a track,
/// and moq-sub keeps a part of its output until it exits. The relay is therefore stopped once all players have begun to
/// write the last fragment.
pub fn assert_played(relay: &InteropRelay, clip: &InteropClip, players: impl IntoIterator<Item = Playing>) {
    let players: Vec<_> = players.into_iter().collect();
    assert!(clip.end().len() > HELD_BACK);
    for Playing { player, first, .. } in &players {
        player.wait_beyond(clip.bytes_from(*first).len() - clip.end().len());
    }
    relay.assert_forwarded();
    relay.stop();
    for Playing { player, what, first } in players {
        let is_ours = player.is_ours();
        assert_video(is_ours, &player.last_output(), clip, first, &what);
    }
}

/// Checks the video. Our player writes groups one after the other; moq-sub begins a group before the previous one has
/// ended.
pub fn assert_video(is_ours: bool, media: &[u8], clip: &InteropClip, first: usize, what: &str) {
    match is_ours {
        true => assert_same(media, &clip.bytes_from(first), what),
        false => assert_same_groups(media, clip, first, what),
    }
    assert_eq!(clip::frames(media), FRAMES - first, "{what}");
}

/// Number of fragments in two and a half groups. A player joins after these, and the rest of the clip follows.
const LATE: usize = 2 * GROUP + GROUP / 2;

#[test]
fn two_moq_subs_play_moq_pub() {
    needs!(Ffmpeg, Peer("moq-pub"), Peer("moq-sub"));
    let relay = InteropRelay::start();
    let clip = &VIDEO;
    let mut publisher = moq_pub(None, &relay, &relay.url(), clip, &[]);
    let first = moq_sub(None, &relay.url(), &[]);
    relay.until_subscribed(VIDEO_TRACK, 1);
    publisher.feed(&clip.fragments[..LATE], PACE);
    relay.until_largest(VIDEO_TRACK, LATE - 1);

    let late = moq_sub(None, &relay.url(), &[]);
    relay.until_subscribed(VIDEO_TRACK, 2);
    publisher.feed(&clip.fragments[LATE..], PACE);
    let first = Playing::new(first, "from the start", 0);
    let late = Playing::new(late, "the current group, from the cache", 2 * GROUP);
    assert_played(&relay, clip, [first, late]);
}

#[test]
fn moq_sub_joins_with_earlier_groups() {
    needs!(Ffmpeg, Peer("moq-pub"), Peer("moq-sub"));
    let relay = InteropRelay::start();
    let clip = &VIDEO;
    let mut publisher = moq_pub(None, &relay, &relay.url(), clip, &[]);
    // A relay receives a track only while the track has a subscriber, so one player subscribes from the start.
    let _first = moq_sub(None, &relay.url(), &[]);
    relay.until_subscribed(VIDEO_TRACK, 1);
    publisher.feed(&clip.fragments[..LATE], PACE);
    relay.until_largest(VIDEO_TRACK, LATE - 1);

    let joining = [
        Playing::new(moq_sub(None, &relay.url(), &["--join-groups", "1"]), "one group back", GROUP),
        Playing::new(moq_sub(None, &relay.url(), &["--catalog", "fetch", "absolute", "0"]), "group 0", 0),
        Playing::new(moq_sub(None, &relay.url(), &["fetch", "relative", "1"]), "this group", 2 * GROUP),
    ];
    relay.until_subscribed(VIDEO_TRACK, 4);
    publisher.feed(&clip.fragments[LATE..], PACE);
    let fetched = moq_sub(None, &relay.url(), &["fetch", "standalone", "1:0", "2:0"]).finish();
    assert_same(&fetched, &clip.bytes_of(GROUP..3 * GROUP), "groups 1 and 2");
    assert_played(&relay, clip, joining);
}

#[test]
fn pushed_tracks_of_moq_pub_are_played() {
    needs!(Ffmpeg, Peer("moq-pub"), Peer("moq-sub"));
    let relay = InteropRelay::start();
    let clip = &VIDEO;
    let mut publisher = moq_pub(None, &relay, &relay.url(), clip, &["--publish"]);
    relay.until_published(VIDEO_TRACK);
    publisher.feed(&clip.fragments[..LATE], PACE);
    relay.until_largest(VIDEO_TRACK, LATE - 1);
    let theirs = moq_sub(None, &relay.url(), &["--join-groups", "9"]);
    let ours = subscribe(None, &relay.url(), &[]);
    relay.until_subscribed(VIDEO_TRACK, 2);
    publisher.feed(&clip.fragments[LATE..], PACE);
    let players = [Playing::new(theirs, "moq-sub", 0), Playing::new(ours, "ours", 2 * GROUP)];
    assert_played(&relay, clip, players);
}

#[test]
fn moq_sub_plays_our_publisher() {
    needs!(Ffmpeg, Peer("moq-sub"));
    let relay = InteropRelay::start();
    assert_published(&relay, &relay.url(), [&relay.url(), &relay.url()]);
}

/// Publishes at the URL `at` with our publisher. One moq-sub plays at the URL `plain`, and one, which reads the
/// broadcast's catalog, at the URL `with_catalog`.
pub fn assert_published(relay: &InteropRelay, at: &str, [plain, with_catalog]: [&str; 2]) {
    let clip = &VIDEO;
    let mut publisher = publish(None, relay, at, clip, &[]);
    let players = [moq_sub(None, plain, &[]), moq_sub(None, with_catalog, &["--catalog"])];
    relay.until_subscribed(VIDEO_TRACK, 2);
    publisher.feed(&clip.fragments, PACE);
    publisher.finish();
    for player in players {
        // The player exits by itself when it has received as many streams as PUBLISH_DONE announces.
        assert_video(false, &player.finish(), clip, 0, "moq-sub");
    }
    relay.assert_forwarded();
}

#[test]
fn moq_sub_plays_our_publisher_with_sound() {
    needs!(Ffmpeg, Peer("moq-sub"));
    let relay = InteropRelay::start();
    let clip = &VIDEO_AND_SOUND;
    let mut publisher = publish(None, &relay, &relay.url(), clip, &[]);
    let players = [moq_sub(None, &relay.url(), &[]), moq_sub(None, &relay.url(), &["--catalog"])];
    relay.until_subscribed(VIDEO_TRACK, 2);
    relay.until_subscribed(SOUND_TRACK, 2);
    publisher.feed(&clip.fragments, PACE);
    publisher.finish();
    for player in players {
        assert_same_streams(&player.finish(), clip);
    }
}

/// Checks that the player wrote the video and the sound as they were published. The order of their fragments may
/// differ.
pub fn assert_same_streams(media: &[u8], clip: &InteropClip) {
    let want = clip.bytes();
    assert_eq!(media.len(), want.len());
    assert_eq!(clip::hashes(media), clip::hashes(&want));
    assert_eq!(clip::frames(media), FRAMES);
}

#[test]
fn moq_sub_plays_moq_pub_with_sound() {
    needs!(Ffmpeg, Peer("moq-pub"), Peer("moq-sub"));
    let relay = InteropRelay::with(|config| config.idle_timeout = Duration::from_secs(8));
    let clip = &VIDEO_AND_SOUND;
    let mut publisher = moq_pub(None, &relay, &relay.url(), clip, &[]);
    let players = [moq_sub(None, &relay.url(), &[]), moq_sub(None, &relay.url(), &["--catalog"])];
    relay.until_subscribed(VIDEO_TRACK, 2);
    relay.until_subscribed(SOUND_TRACK, 2);
    publisher.feed(&clip.fragments, PACE);
    // The relay also delivers two objects that are no fragments: the initialisation segment and the catalog.
    relay.until_delivered(2 + clip.fragments.len());
    // The publisher leaves without ending its tracks. The relay ends them after the session's idle timeout, and then
    // the players end.
    drop(publisher);
    for player in players {
        assert_same_streams(&player.last_output(), clip);
    }
    relay.assert_forwarded();
}

#[test]
fn our_subscriber_plays_moq_pub() {
    needs!(Ffmpeg, Peer("moq-pub"));
    let relay = InteropRelay::start();
    let clip = &VIDEO_AND_SOUND;
    let mut publisher = moq_pub(None, &relay, &relay.url(), clip, &[]);
    let both = subscribe(None, &relay.url(), &["--catalog"]);
    let video = subscribe(None, &relay.url(), &["--track", VIDEO_TRACK, "--count", &FRAMES.to_string()]);
    relay.until_subscribed(VIDEO_TRACK, 2);
    relay.until_subscribed(SOUND_TRACK, 1);
    publisher.feed(&clip.fragments, PACE);
    both.wait_beyond(clip.bytes().len() - 1);
    assert_same_streams(&both.output(), clip);
    let alone = [&clip.init[..], &video.finish()].concat();
    assert_eq!(clip::frames(&alone), FRAMES);
    assert_eq!(clip::hashes(&alone)[0], clip::hashes(&clip.bytes())[0]);
}
