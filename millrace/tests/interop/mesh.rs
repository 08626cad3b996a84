//! Tests of a cluster in which one relay is an unmodified moq-relay: media goes through it, to it and from it.

use std::{
    fs,
    net::{Ipv4Addr, UdpSocket},
};

use millrace_moq::HopId;
use millrace_relay_daemon::config::{ClusterConfig, Config, PeerConfig, UpstreamConfig};
use tempfile::TempDir;

use super::{
    clip::{VIDEO, assert_same},
    needs,
    players::{PACE, publish, subscribe},
    process::{InteropProcess, TestNeed},
    relay::InteropRelay,
    site::wants_kernel,
};

/// An unmodified moq-relay on this host, which accepts everybody as a peer.
struct MoqRelay {
    url: String,
    _process: InteropProcess,
    _identity: TempDir,
}

impl MoqRelay {
    fn start() -> Self {
        let identity = tempfile::tempdir().unwrap();
        let names = ["localhost".to_owned(), Ipv4Addr::LOCALHOST.to_string()];
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        let cert = identity.path().join("cert.pem");
        let key = identity.path().join("key.pem");
        fs::write(&cert, made.cert.pem()).unwrap();
        fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        let addr = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let listen = addr.to_string();
        let process = InteropProcess::start_peer(
            "moq-relay",
            &[
                "--listen",
                &listen,
                "--listen-tls-cert",
                cert.to_str().unwrap(),
                "--listen-tls-key",
                key.to_str().unwrap(),
                "--auth-public",
                "**",
            ],
        );
        Self { url: format!("moqt://{addr}"), _process: process, _identity: identity }
    }

    /// Starts a relay of ours that connects to moq-relay.
    fn neighbour(&self, hop: u64) -> InteropRelay {
        let url = self.url.parse().unwrap();
        let relay = InteropRelay::with(|config: &mut Config| {
            config.upstream =
                Some(UpstreamConfig { urls: Vec::new(), tls_root: None, token: None, identity: None });
            let peers = vec![PeerConfig { url, cost: None, namespaces: Vec::new() }];
            config.cluster = Some(ClusterConfig {
                hop: Some(HopId(hop)),
                cost: None,
                peers,
                discovery: None,
                max_routes: 100,
            });
        });
        relay.until("moq-relay is a relay of the cluster", |status| {
            status.cluster.as_ref().is_some_and(|cluster| cluster.links.iter().any(|link| link.hop != 0))
        });
        relay
    }
}

fn until_route(relay: &InteropRelay) {
    relay.until("a route", |status| status.cluster.as_ref().is_some_and(|cluster| cluster.routes > 0));
}

/// The media of a publisher at a relay of ours must reach a viewer at moq-relay, and a viewer at a second relay of ours
/// behind it.
#[test]
fn media_of_our_relay_reaches_viewers_at_moq_relay_and_behind_it() {
    needs!(TestNeed::Ffmpeg, TestNeed::Peer("moq-relay"));
    if wants_kernel() {
        return; // moq-relay is on this host, relays that forward in the kernel are in namespaces
    }
    let middle = MoqRelay::start();
    let first = middle.neighbour(11);
    let last = middle.neighbour(12);
    let clip = &VIDEO;
    let mut publisher = publish(None, &first, &first.url(), clip, &[]);
    until_route(&last);
    let players = [subscribe(None, &last.url(), &[]), subscribe(None, &middle.url, &[])];
    first.until("moq-relay has subscribed", |status| status.tracks.iter().any(|track| track.subscribers > 0));
    last.until("the viewer has subscribed", |status| status.tracks.iter().any(|track| track.subscribers > 0));
    publisher.feed(&clip.fragments, PACE);
    publisher.finish();
    for (player, what) in players.into_iter().zip(["through moq-relay", "to moq-relay"]) {
        assert_same(&player.finish(), &clip.bytes(), what);
    }
    last.until("no violation", |status| status.drops["protocol_violation"] == 0);
}

/// The media of a publisher at moq-relay must reach a viewer at a relay of ours.
#[test]
fn media_published_at_moq_relay_reaches_a_viewer_at_our_relay() {
    needs!(TestNeed::Ffmpeg, TestNeed::Peer("moq-relay"));
    if wants_kernel() {
        return; // moq-relay is on this host, relays that forward in the kernel are in namespaces
    }
    let far = MoqRelay::start();
    let relay = far.neighbour(11);
    let clip = &VIDEO;
    let mut publisher = InteropProcess::ours(None, "publish", &far.url, &[]);
    publisher.write(&clip.init);
    until_route(&relay);
    let player = subscribe(None, &relay.url(), &[]);
    relay.until("the viewer has subscribed", |status| {
        status.tracks.iter().any(|track| track.subscribers > 0 && track.publishers > 0)
    });
    publisher.feed(&clip.fragments, PACE);
    publisher.finish();
    assert_same(&player.finish(), &clip.bytes(), "from moq-relay");
}
