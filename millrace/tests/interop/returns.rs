//! A publisher that is killed and started again, with players that are not ours.

use super::{
    clip::{GROUP, VIDEO, VIDEO_TRACK, assert_same},
    needs,
    players::{HELD_BACK, PACE, moq_pub, moq_sub},
    process::Need::{Ffmpeg, Peer},
    relay::Relay,
};

/// Two and a half groups.
const BEFORE: usize = 2 * GROUP + GROUP / 2;

/// moq-pub numbers its groups from 0 again. By QUIC moq-sub ends its session at a stream that is reset.
#[test]
fn moq_pub_that_is_killed_and_started_again_is_a_gap_for_moq_sub() {
    needs!(Ffmpeg, Peer("moq-pub"), Peer("moq-sub"));
    let (relay, clip) = (Relay::start(), &VIDEO);
    let mut publisher = moq_pub(None, &relay, &relay.url(), clip, &[]);
    let players = [moq_sub(None, &relay.url(), &[]), moq_sub(None, &relay.web_url(), &[])];
    relay.until_subscribed(VIDEO_TRACK, 2);
    publisher.feed(&clip.fragments[..BEFORE], PACE);
    let before = clip.bytes_of(0..BEFORE);
    players.iter().for_each(|player| player.wait_beyond(before.len() - HELD_BACK));

    // It is killed.
    drop(publisher);
    let mut publisher = moq_pub(None, &relay, &relay.url(), clip, &[]);
    // It sends what it has by then at once, in any order: no more than the group that begins the track anew.
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
