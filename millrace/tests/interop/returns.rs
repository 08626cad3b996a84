//! Tests of a publisher that is killed and started again, with unmodified players.

use super::{
    clip::{GROUP, VIDEO, VIDEO_TRACK, assert_same},
    needs,
    players::{HELD_BACK, PACE, moq_pub, moq_sub},
    process::TestNeed::{Ffmpeg, Peer},
    relay::InteropRelay,
};

/// Number of fragments in two and a half groups, after which the publisher is killed.
const BEFORE: usize = 2 * GROUP + GROUP / 2;

/// A restarted moq-pub numbers its groups from 0 again. Over QUIC moq-sub ends its session when a stream is reset, so
/// the relay must not reset any.
#[test]
fn moq_sub_continues_when_moq_pub_restarts() {
    needs!(Ffmpeg, Peer("moq-pub"), Peer("moq-sub"));
    let relay = InteropRelay::start();
    let clip = &VIDEO;
    let mut publisher = moq_pub(None, &relay, &relay.url(), clip, &[]);
    let players = [moq_sub(None, &relay.url(), &[]), moq_sub(None, &relay.web_url(), &[])];
    relay.until_subscribed(VIDEO_TRACK, 2);
    publisher.feed(&clip.fragments[..BEFORE], PACE);
    let before = clip.bytes_of(0..BEFORE);
    players.iter().for_each(|player| player.wait_beyond(before.len() - HELD_BACK));

    // The publisher is killed.
    drop(publisher);
    let mut publisher = moq_pub(None, &relay, &relay.url(), clip, &[]);
    // moq-pub sends everything that it has read at once, in any order. The test therefore feeds it only the fragments
    // of one group, with which the track restarts.
    publisher.feed(&clip.fragments[..GROUP], PACE);
    let begun = before.len() + clip.fragments[..GROUP].concat().len();
    players.iter().for_each(|player| player.wait_beyond(begun - HELD_BACK));
    publisher.feed(&clip.fragments[GROUP..], PACE);
    let want = [before, clip.fragments.concat()].concat();
    assert!(clip.end().len() > HELD_BACK);
    players.iter().for_each(|player| player.wait_beyond(want.len() - clip.end().len()));
    relay.stop();
    for (player, what) in players.into_iter().zip(["moq-sub", "moq-sub, WebTransport"]) {
        assert_same(&player.last_output(), &want, what);
    }
}
