//! Tests of publishers and players over WebTransport, with each other and with publishers and players over QUIC.

use super::{
    clip::{GROUP, VIDEO, VIDEO_TRACK, assert_same},
    needs,
    players::{PACE, Playing, assert_played, assert_published, moq_pub, moq_sub, subscribe},
    process::TestNeed::{Ffmpeg, Peer},
    relay::InteropRelay,
};

/// Number of fragments in two and a half groups. When they were published, more players join.
const LATE: usize = 2 * GROUP + GROUP / 2;

#[test]
fn players_over_both_transports_play_moq_pub_over_webtransport() {
    needs!(Ffmpeg, Peer("moq-pub"), Peer("moq-sub"));
    let relay = InteropRelay::start();
    let clip = &VIDEO;
    let mut publisher = moq_pub(None, &relay, &relay.web_url(), clip, &[]);
    let players = [
        Playing::new(moq_sub(None, &relay.web_url(), &[]), "moq-sub over WebTransport", 0),
        Playing::new(moq_sub(None, &relay.url(), &[]), "moq-sub over QUIC", 0),
        Playing::new(subscribe(None, &relay.web_url(), &[]), "ours over WebTransport", 0),
    ];
    relay.until_subscribed(VIDEO_TRACK, 3);
    publisher.feed(&clip.fragments, PACE);
    assert_played(&relay, clip, players);
}

#[test]
fn late_webtransport_players_play_moq_pub_over_quic() {
    needs!(Ffmpeg, Peer("moq-pub"), Peer("moq-sub"));
    let relay = InteropRelay::start();
    let clip = &VIDEO;
    let mut publisher = moq_pub(None, &relay, &relay.url(), clip, &[]);
    let first = Playing::new(moq_sub(None, &relay.web_url(), &[]), "from the start", 0);
    relay.until_subscribed(VIDEO_TRACK, 1);
    publisher.feed(&clip.fragments[..LATE], PACE);
    relay.until_largest(VIDEO_TRACK, LATE - 1);
    let joining = [
        first,
        Playing::new(moq_sub(None, &relay.web_url(), &["--join-groups", "1"]), "one group back", GROUP),
        Playing::new(subscribe(None, &relay.web_url(), &[]), "ours, this group", 2 * GROUP),
    ];
    relay.until_subscribed(VIDEO_TRACK, 3);
    publisher.feed(&clip.fragments[LATE..], PACE);
    let fetched = moq_sub(None, &relay.web_url(), &["fetch", "standalone", "1:0", "2:0"]).finish();
    assert_same(&fetched, &clip.bytes_of(GROUP..3 * GROUP), "groups 1 and 2");
    assert_played(&relay, clip, joining);
}

#[test]
fn moq_sub_plays_our_publisher_over_webtransport() {
    needs!(Ffmpeg, Peer("moq-sub"));
    let relay = InteropRelay::start();
    assert_published(&relay, &relay.web_url(), [&relay.web_url(), &relay.url()]);
}
