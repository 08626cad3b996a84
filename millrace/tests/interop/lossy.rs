//! Tests of media over links that lose packets, and between hosts whose addresses change.

use std::{net::Ipv4Addr, time::Duration};

use millrace_lab::lab::{Directions, Lab, LabNode, Topology};
use millrace_relay_daemon::status::Status;

use super::{
    clip::{FRAMES, FRAMES_PER_SECOND, VIDEO, VIDEO_TRACK},
    needs,
    players::{Playing, assert_played, assert_video, moq_pub, moq_sub, publish, subscribe},
    process::TestNeed::{Ffmpeg, Peer, Root},
    relay::InteropRelay,
};

/// Real time between two fragments. At this pace a stream that loses packets is not overtaken by the next group.
const PACE: Duration = Duration::from_millis(1000 / FRAMES_PER_SECOND as u64);

/// Makes a lab of one relay whose links have a delay of 20 ms and these impairments.
fn lab(subscribers: usize, impairments: &[(&str, &str)]) -> Lab {
    let mut topology = Topology::standard(1, subscribers);
    for (link, settings) in [&[("all", "delay=20ms")], impairments].concat() {
        topology.impair(link, Directions::Both, settings).unwrap();
    }
    Lab::new(&topology).unwrap()
}

#[test]
fn loss_between_publisher_and_relay_is_repaired() {
    needs!(Root, Ffmpeg, Peer("moq-pub"), Peer("moq-sub"));
    let clip = &VIDEO;
    for loss in ["loss=2%", "loss=5%"] {
        let lab = lab(1, &[("pub-relay", loss)]);
        let [source, relay, player] = ["pub", "relay", "sub1"].map(|name| lab.node(name).unwrap());
        let url_at = relay.addr_v4();
        let relay = InteropRelay::inside(relay);
        let url = relay.url_at(url_at);
        let mut publisher = moq_pub(Some(source), &relay, &url, clip, &[]);
        let theirs = Playing::new(moq_sub(Some(player), &url, &[]), loss, 0);
        let ours = Playing::new(subscribe(Some(player), &url, &[]), loss, 0);
        relay.until_subscribed(VIDEO_TRACK, 2);
        publisher.feed(&clip.fragments, PACE);
        assert_played(&relay, clip, [theirs, ours]);
    }
}

#[test]
fn loss_between_relay_and_players_is_repaired() {
    needs!(Root, Ffmpeg, Peer("moq-sub"));
    let clip = &VIDEO;
    let lab = lab(2, &[("relay-sub1", "loss=2%"), ("relay-sub2", "loss=5%")]);
    let node = |name| lab.node(name).unwrap();
    let relay = InteropRelay::inside(node("relay"));
    let url = relay.url_at(node("relay").addr_v4());
    let mut publisher = publish(Some(node("pub")), &relay, &url, clip, &[]);
    let players = ["sub1", "sub2"].map(|name| {
        let host = Some(node(name));
        [("moq-sub", moq_sub(host, &url, &[])), ("ours", subscribe(host, &url, &[]))]
            .map(|(program, player)| (format!("{program} on {name}"), player))
    });
    relay.until_subscribed(VIDEO_TRACK, 4);
    publisher.feed(&clip.fragments, PACE);
    publisher.finish();
    for (what, player) in players.into_iter().flatten() {
        let is_ours = player.is_ours();
        assert_video(is_ours, &player.finish(), clip, 0, &what);
    }
    relay.until("the retransmission", |status| status.totals.bytes_retransmitted > 0);
}

#[test]
fn media_arrives_complete_while_quic_keys_update_every_100_packets() {
    needs!(Root, Ffmpeg, Peer("moq-pub"), Peer("moq-sub"));
    let clip = &VIDEO;
    for (up, down) in [("loss=0%", "loss=0%"), ("loss=1%", "loss=5%"), ("loss=5%", "loss=1%")] {
        let lab = lab(2, &[("pub-relay", up), ("relay-sub1", down)]);
        let node = |name| lab.node(name).unwrap();
        let relay = InteropRelay::inside_with(node("relay"), |config| config.max_packets_per_key = 100);
        let url = relay.url_at(node("relay").addr_v4());
        let mut publisher = moq_pub(Some(node("pub")), &relay, &url, clip, &[]);
        let players = ["sub1", "sub2"].map(|name| {
            [moq_sub, subscribe].map(|play| Playing::new(play(Some(node(name)), &url, &[]), name, 0))
        });
        relay.until_subscribed(VIDEO_TRACK, 4);
        publisher.feed(&clip.fragments, PACE);
        assert_played(&relay, clip, players.into_iter().flatten());
        // Each of 4 players gets more than 400 packets, and the relay updates keys after 100. The number of updates
        // depends on how soon the players confirm them, so the test requires only 4.
        relay.until("updates of keys", |status| status.totals.key_updates >= 4);
    }
}

/// Gives the host of a publisher or subscriber another address, which replaces the old one at once.
fn change_address(node: &LabNode) {
    let interface = &node.interfaces()[0];
    let [a, b, c, d] = interface.v4.octets();
    let old = interface.v4;
    let new = Ipv4Addr::new(a, b, c, d + 100);
    let device = &interface.device;
    let gateway = Ipv4Addr::new(a, b, c, if d == 1 { 2 } else { 1 });
    let script = format!(
        "ip address add {new}/24 dev {device} && ip address del {old}/24 dev {device} && \
         ip address replace {new}/24 dev {device} && ip route replace default via {gateway} dev {device}"
    );
    let status = node.command("sh").args(["-c", &script]).status().unwrap();
    assert!(status.success(), "{script}: {status}");
}

#[test]
fn media_continues_when_publisher_and_players_change_ip_addresses() {
    needs!(Root, Ffmpeg, Peer("moq-pub"), Peer("moq-sub"));
    let clip = &VIDEO;
    let lab = lab(2, &[]);
    let node = |name| lab.node(name).unwrap();
    let relay = InteropRelay::inside(node("relay"));
    let url = relay.url_at(node("relay").addr_v4());
    let mut publisher = moq_pub(Some(node("pub")), &relay, &url, clip, &[]);
    let players = [
        Playing::new(moq_sub(Some(node("sub1")), &url, &[]), "moq-sub", 0),
        Playing::new(subscribe(Some(node("sub2")), &url, &[]), "ours", 0),
    ];
    relay.until_subscribed(VIDEO_TRACK, 2);
    let addresses =
        |status: &Status| status.sessions.iter().map(|session| session.remote.ip()).collect::<Vec<_>>();
    let before = addresses(&relay.status()); // exact: no session has changed its address yet
    let (first, rest) = clip.fragments.split_at(FRAMES / 4);
    publisher.feed(first, PACE);
    change_address(node("sub1"));
    change_address(node("sub2"));
    publisher.feed(&rest[..FRAMES / 4], PACE);
    change_address(node("pub"));
    publisher.feed(&rest[FRAMES / 4..], PACE);
    // A player that only receives is silent; its next keep-alive shows its new address.
    let status = relay.until("everybody at a new address", |status| {
        addresses(status).iter().all(|now| !before.contains(now))
    });
    assert_eq!(addresses(&status).len(), 3);
    assert_played(&relay, clip, players);
}
