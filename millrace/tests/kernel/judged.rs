//! Tests of streams that the kernel forwards although their packets are lost, repeated or reordered.

use std::{collections::BTreeMap, time::Duration};

use millrace_relay_daemon::status::Status;
use millrace_testkit::BOUND;
use tokio::time;

use crate::{
    needs_root,
    net::{
        AHEAD, ALIAS, Arrived, Cast, GroupStream, KernelNetwork, OF_A_GROUP, PUBLISHER_LINK, SHOW,
        assert_forwarded, cast, introduce, play, sum,
    },
    peer::{PeerStreamEnd, header},
};

fn count(counts: &Option<BTreeMap<String, u64>>, name: &str) -> u64 {
    counts.as_ref().and_then(|counts| counts.get(name)).copied().unwrap_or(0)
}

fn frames(status: &Status, name: &str) -> u64 {
    count(&status.engine.frames, name)
}

/// Counts gaps in a stream, and how often the kernel continued to forward the stream after a gap.
#[derive(Default)]
struct Holes {
    seen: u64,
    good_then: u64,
    gone_on: u64,
}

impl Holes {
    /// If the kernel forwards at least this number of STREAM frames after a gap, the test counts the stream as
    /// continued.
    const GOOD: u64 = 10;

    fn look(&mut self, status: &Status) {
        let ahead = frames(status, "ahead");
        let good = frames(status, "good");
        if ahead > self.seen {
            self.seen = ahead;
            self.good_then = good;
        } else if self.good_then > 0 && good >= self.good_then + Self::GOOD {
            self.good_then = 0;
            self.gone_on += 1;
        }
    }
}

/// All objects are in one stream. If the kernel stopped forwarding at a gap in the stream, its counter of STREAM frames
/// that may be forwarded would no longer grow.
#[test]
fn kernel_keeps_forwarding_a_stream_after_lost_packets_leave_a_gap() {
    const HOLES: u64 = 3;
    needs_root!(kernel_keeps_forwarding_a_stream_after_lost_packets_leave_a_gap);
    for impairment in ["loss=0.5% delay=5ms", "loss=2% delay=5ms"] {
        let net = KernelNetwork::new(1, true, |_| {});
        let Cast { publisher, mut subscribers, _requests } = cast(&net, &["sub1"]);
        net.impair(PUBLISHER_LINK, impairment);
        let arrived = Arrived::new(1);
        let publishing = async {
            let mut holes = Holes::default();
            let mut id = 0;
            let mut subgroup = publisher.subgroup(header(ALIAS, 0)).await;
            while holes.gone_on < HOLES {
                subgroup.object(id, SHOW.bytes).await;
                id += 1;
                arrived.wait(id.saturating_sub(AHEAD)).await;
                // exact: this pause sets the publisher's sending rate
                time::sleep(Duration::from_millis(1)).await;
                // exact: the counts of STREAM frames are read again after each published object
                holes.look(&net.status());
            }
            subgroup.finish();
            id
        };
        let receiving = async { subscribers[0].next_subgroup().await.all_telling(arrived.at(0)).await };
        let both = net.run(async {
            let both = async { tokio::join!(publishing, receiving) };
            // exact: the status is printed only if the test fails
            time::timeout(BOUND, both).await.map_err(|_| net.status())
        });
        let (objects, received) = both.unwrap_or_else(|status| panic!("{impairment}: {:#?}", status.engine));
        assert_eq!(received, ((0..objects).collect(), PeerStreamEnd::Fin));
    }
}

#[test]
fn reordered_and_duplicate_packets_are_forwarded_once() {
    needs_root!(reordered_and_duplicate_packets_are_forwarded_once);
    for impairment in ["reorder=5% reorder-by=3ms", "duplicate=20%", "reorder=5% duplicate=5% loss=1%"] {
        for link in [PUBLISHER_LINK, "relay-sub1"] {
            let net = KernelNetwork::new(2, true, |_| {});
            let cast = cast(&net, &["sub1", "sub2"]);
            net.impair(link, impairment);
            let show = GroupStream { groups: 6, ..SHOW };
            let status = play(&net, cast, &show, |_| {});
            assert_forwarded(&status, show.groups * OF_A_GROUP);
            if link == PUBLISHER_LINK && impairment == "duplicate=20%" {
                // A duplicate of a whole packet is recognised by its packet number.
                assert!(count(&status.engine.received, "replayed") > 0, "{:#?}", status.engine);
                assert_eq!(frames(&status, "repeated"), 0, "{:#?}", status.engine);
            }
            assert_eq!(frames(&status, "malformed"), 0, "{:#?}", status.engine);
        }
    }
}

/// Generates random connection IDs, which expire soon, so that peers retire them.
struct Passing;

impl quinn::ConnectionIdGenerator for Passing {
    fn generate_cid(&mut self) -> quinn::ConnectionId {
        quinn::ConnectionId::new(&fastrand::u64(..).to_ne_bytes())
    }

    fn cid_len(&self) -> usize {
        size_of::<u64>()
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        Some(Duration::from_millis(250))
    }
}

/// Peers retire their connection IDs again and again, and the relay must send to new ones. Packets that the kernel
/// sends to a retired ID are lost.
#[test]
fn kernel_sends_to_new_connection_ids_after_peers_retire_old_ones() {
    const RETIRED: u64 = 4;
    needs_root!(kernel_sends_to_new_connection_ids_after_peers_retire_old_ones);
    let net = KernelNetwork::new(1, false, |_| {});
    let mut endpoint = quinn::EndpointConfig::default();
    endpoint.cid_generator(|| Box::new(Passing));
    let [publisher, subscriber] =
        ["pub", "sub1"].map(|node| net.peer_from(node, net.relay().addr_v4().into(), endpoint.clone()));
    let Cast { publisher, mut subscribers, _requests } = introduce(&net, publisher, vec![subscriber]);
    let ends = [&publisher, &subscribers[0]].map(|peer| peer.session.connection().clone());
    // exact: the test rereads the count of retired connection IDs after each published object
    let retired = || ends.iter().map(|end| end.stats().frame_rx.retire_connection_id).min().unwrap_or(0);
    let arrived = Arrived::new(1);
    let publishing = async {
        // Packets that the kernel sent between two retirements have the connection ID that was in use between these
        // retirements.
        let mut id = 0;
        let mut seen = 0;
        let mut before = 0;
        let mut served = 0;
        let mut subgroup = publisher.subgroup(header(ALIAS, 0)).await;
        while served < RETIRED {
            subgroup.object(id, SHOW.bytes).await;
            id += 1;
            arrived.wait(id.saturating_sub(AHEAD)).await;
            // exact: this pause sets the publisher's sending rate
            time::sleep(Duration::from_millis(1)).await;
            // exact: the kernel's packet count is read again after each published object
            let status = net.status();
            let packets = sum(&status, |session| session.kernel.packets);
            if retired() > seen {
                (seen, before) = (retired(), packets);
            } else if before > 0 && packets >= before + AHEAD {
                (before, served) = (0, served + 1);
            }
        }
        subgroup.finish();
        id
    };
    let receiving = async { subscribers[0].next_subgroup().await.all_telling(arrived.at(0)).await };
    let both = net.run(async {
        let both = async { tokio::join!(publishing, receiving) };
        // exact: the status is printed only if the test fails
        time::timeout(BOUND, both).await.map_err(|_| net.status())
    });
    let (objects, received) = both.unwrap_or_else(|status| panic!("{} retired: {status:#?}", retired()));
    assert_eq!(received, ((0..objects).collect(), PeerStreamEnd::Fin));
}
