//! Tests of media between clients that use different drafts of MoQ Transport.

use super::{
    clip::{FRAMES, GROUP, VIDEO, VIDEO_TRACK, assert_same},
    needs,
    players::{PACE, publish, subscribe},
    process::TestNeed::Ffmpeg,
    relay::InteropRelay,
};

const DRAFTS: [&str; 5] = ["18", "19", "20", "21", "22"];

/// Publishes to players of every draft, over raw QUIC and over WebTransport. Some players join late, and request the
/// objects of the previous group by FETCH or, in later drafts, by FILL_PARAMETERS in the subscription.
fn published_in(draft: &str) {
    needs!(Ffmpeg);
    let relay = InteropRelay::start();
    let clip = &VIDEO;
    let mut publisher = publish(None, &relay, &relay.url(), clip, &["--draft", draft]);
    let play = |url: &str, args: &[&str]| {
        DRAFTS.map(|draft| {
            let fixed = ["--track", VIDEO_TRACK, "--draft", draft];
            (draft, subscribe(None, url, &[&fixed, args].concat()))
        })
    };
    let early = play(&relay.url(), &[]);
    relay.until_subscribed(VIDEO_TRACK, 5);
    let fed = 2 * GROUP + 7;
    publisher.feed(&clip.fragments[..fed], PACE);
    relay.until_largest(VIDEO_TRACK, fed - 1);
    let late = play(&relay.web_url(), &["--join-groups", "1"]);
    relay.until_subscribed(VIDEO_TRACK, 10);
    publisher.feed(&clip.fragments[fed..], PACE);
    publisher.finish();
    for (players, first) in [(early, 0), (late, GROUP)] {
        for (player, process) in players {
            let what = format!("draft-{draft} to draft-{player} from fragment {first} on");
            assert_same(&process.finish(), &clip.fragments[first..FRAMES].concat(), &what);
        }
    }
    relay.assert_forwarded();
}

#[test]
fn draft_18_publisher_plays_in_all_drafts() {
    published_in("18");
}

#[test]
fn draft_19_publisher_plays_in_all_drafts() {
    published_in("19");
}

#[test]
fn draft_20_publisher_plays_in_all_drafts() {
    published_in("20");
}

#[test]
fn draft_21_publisher_plays_in_all_drafts() {
    published_in("21");
}

#[test]
fn draft_22_publisher_plays_in_all_drafts() {
    published_in("22");
}
