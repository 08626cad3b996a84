//! Tests of media that the kernel forwards, and of media that it leaves to userspace.

use std::time::Duration;

use millrace_moq::code;
use millrace_relay_daemon::{
    config::CipherSuite,
    status::{KeystreamStatus, Status},
};
use tokio::time;

use crate::{
    needs_root,
    net::{
        ALIAS, Cast, GroupStream, KernelNetwork, OF_A_GROUP, PUBLISHER_LINK, SHOW, assert_forwarded, cast,
        play, subscribers, sum,
    },
    peer::{PeerStreamEnd, header},
};

/// The cipher suites of QUIC that rustls supports.
const SUITES: [CipherSuite; 3] =
    [CipherSuite::Chacha20Poly1305, CipherSuite::Aes128Gcm, CipherSuite::Aes256Gcm];

#[test]
fn kernel_forwards_chacha20_and_aes_streams_to_two_subscribers() {
    needs_root!(kernel_forwards_chacha20_and_aes_streams_to_two_subscribers);
    for suite in SUITES {
        let net = KernelNetwork::new(2, false, |config| config.cipher_suites = vec![suite]);
        let cast = cast(&net, &["sub1", "sub2"]);
        let status = play(&net, cast, &SHOW, |_| {});
        assert_eq!(status.engine.name, "kernel");
        assert_eq!(subscribers(&status).count(), 2);
        assert_forwarded(&status, SHOW.groups * OF_A_GROUP);
    }
}

#[test]
fn packet_loss_on_publisher_or_subscriber_link_is_repaired() {
    needs_root!(packet_loss_on_publisher_or_subscriber_link_is_repaired);
    for loss in ["loss=1%", "loss=5%"] {
        for link in [PUBLISHER_LINK, "relay-sub1"] {
            let net = KernelNetwork::new(2, true, |_| {});
            let cast = cast(&net, &["sub1", "sub2"]);
            net.impair(link, loss);
            let show = GroupStream { groups: 6, ..SHOW };
            let status = play(&net, cast, &show, |_| {});
            let lost = sum(&status, |session| session.packets_lost);
            assert!(link == PUBLISHER_LINK || lost > 0, "{loss} on {link}");
            assert_forwarded(&status, show.groups * OF_A_GROUP);
        }
    }
}

#[test]
fn kernel_forwards_across_key_updates_by_every_side() {
    needs_root!(kernel_forwards_across_key_updates_by_every_side);
    for suite in SUITES {
        let net = KernelNetwork::new(1, false, |config| config.cipher_suites = vec![suite]);
        let cast = cast(&net, &["sub1"]);
        let ends = [&cast.publisher, &cast.subscribers[0]].map(|peer| peer.session.connection().clone());
        let show = GroupStream { groups: 30, objects: 20, ..SHOW };
        // A key update by the publisher changes the keys of incoming packets, and one by the subscriber makes the relay
        // update the keys with which it sends.
        let status = play(&net, cast, &show, |group| ends[group as usize % 2].force_key_update());
        assert_forwarded(&status, show.groups * OF_A_GROUP);
    }
}

/// Returns how many packets the kernel has sent to subscribers with a keystream from each source (for example computed
/// in advance). Checks for each session that these numbers add up to the kernel's packets.
fn sealed(status: &Status) -> KeystreamStatus {
    let mut all = KeystreamStatus::default();
    for session in subscribers(status) {
        let sealed = session.keystreams.unwrap().sealed;
        // exact: both packet counts are from the same snapshot of the status
        assert_eq!(sealed.counts().iter().map(|(_, count)| count).sum::<u64>(), session.kernel.packets);
        all.add(sealed);
    }
    all
}

fn opened(status: &Status) -> KeystreamStatus {
    let mut publishers = status.sessions.iter().filter(|session| session.publisher);
    publishers.next().unwrap().keystreams.unwrap().opened
}

/// Reports whether, on average, at least one packet of each group found a keystream that was computed in advance. The
/// share of such packets depends on the machine's load, and is measured by `millrace-lab bench relay`.
fn is_ahead(supply: KeystreamStatus, show: &GroupStream) -> bool {
    supply.hit >= show.groups
}

#[test]
fn keystreams_are_computed_before_packets_arrive() {
    needs_root!(keystreams_are_computed_before_packets_arrive);
    for suite in SUITES {
        let net = KernelNetwork::new(2, false, |config| config.cipher_suites = vec![suite]);
        let cast = cast(&net, &["sub1", "sub2"]);
        let show = GroupStream { groups: 20, ..SHOW };
        let status = play(&net, cast, &show, |_| {});
        assert!(is_ahead(sealed(&status), &show), "{status:#?}");
        assert!(is_ahead(opened(&status), &show), "{status:#?}");
    }
}

#[test]
fn keystreams_are_computed_with_new_keys_after_a_quic_key_update() {
    needs_root!(keystreams_are_computed_with_new_keys_after_a_quic_key_update);
    let net = KernelNetwork::new(1, false, |_| {});
    let cast = cast(&net, &["sub1"]);
    let ends = [&cast.publisher, &cast.subscribers[0]].map(|peer| peer.session.connection().clone());
    let show = GroupStream { groups: 20, ..SHOW };
    let status = play(&net, cast, &show, |group| ends[group as usize % 2].force_key_update());
    let sealed = sealed(&status);
    let opened = opened(&status);
    // For the first packets with new keys there is no keystream yet. These packets show the relay that the peer has
    // updated its keys.
    assert!(opened.stale > 5 && is_ahead(opened, &show), "{status:#?}");
    assert!(is_ahead(sealed, &show), "{status:#?}");
}

#[test]
fn kernel_without_keystream_memory_encrypts_directly() {
    needs_root!(kernel_without_keystream_memory_encrypts_directly);
    let net = KernelNetwork::new(2, false, |config| config.keystream_bytes = 0);
    let cast = cast(&net, &["sub1", "sub2"]);
    let status = play(&net, cast, &SHOW, |_| {});
    assert_forwarded(&status, SHOW.groups * OF_A_GROUP);
    for supply in [sealed(&status), opened(&status)] {
        assert!(supply.miss > 0 && supply.hit + supply.stale == 0, "{status:#?}");
    }
}

#[test]
fn kernel_sends_nothing_after_the_end_of_a_dropped_stream() {
    needs_root!(kernel_sends_nothing_after_the_end_of_a_dropped_stream);
    let net = KernelNetwork::new(2, false, |_| {});
    let Cast { publisher, mut subscribers, _requests } = cast(&net, &["sub1", "sub2"]);
    net.run(async {
        for group in 0..20 {
            let mut subgroup = publisher.subgroup(header(ALIAS, group)).await;
            subgroup.object(0, 1000).await;
            let mut received = Vec::new();
            for subscriber in &mut subscribers {
                received.push(subscriber.next_subgroup().await);
            }
            // The first subscriber stops its stream while media is in flight. Later the publisher resets the subgroup,
            // also while media is in flight.
            for id in 1..40 {
                subgroup.object(id, 1000).await;
                if id == 20 {
                    received[0].stop(code::Reset::CANCELLED);
                }
                // exact: this pause sets the publisher's sending rate
                time::sleep(Duration::from_micros(300)).await;
            }
            subgroup.reset(code::Reset::CANCELLED);
            assert_eq!(received.pop().unwrap().all().await.1, PeerStreamEnd::Reset);
        }
        // A peer closes the connection if it receives bytes after a stream's final size. All connections are open, so
        // no peer received such bytes.
        for subscriber in &subscribers {
            assert!(subscriber.session.connection().close_reason().is_none());
        }
    });
    net.until("packets by the kernel", |status| sum(status, |session| session.kernel.packets) > 200);
    net.until("no stream in the kernel", |status| status.engine.streams == 0);
}
