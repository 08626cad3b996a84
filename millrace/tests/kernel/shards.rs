//! Tests of a relay whose sessions are divided between several shards, each with sockets of its own.

use millrace_relay_daemon::status::Status;

use crate::{
    needs_root,
    net::{KernelNetwork, OF_A_GROUP, PeerKind, SHOW, assert_forwarded, introduce, play, sum},
    peer::TestPeer,
};

const SHARDS: usize = 2;

/// Connects a peer, and returns it with the index of the shard that it belongs to.
fn connect(net: &KernelNetwork, node: &str, by: PeerKind) -> (TestPeer, usize) {
    // exact: no other peer connects or leaves meanwhile
    let before = connections(&net.status());
    let peer = net.peer_by(node, by);
    let shard = |status: &Status| connections(status).iter().zip(&before).position(|(now, then)| now > then);
    let status = net.until("the connection", |status| shard(status).is_some());
    (peer, shard(&status).unwrap())
}

fn connections(status: &Status) -> Vec<u64> {
    status.shards.iter().map(|shard| shard.connections).collect()
}

#[test]
fn kernel_forwards_from_a_publisher_to_subscribers_of_every_shard() {
    needs_root!(kernel_forwards_from_a_publisher_to_subscribers_of_every_shard);
    for by in [PeerKind::Quic, PeerKind::Web] {
        let net = KernelNetwork::new(2, false, |config| config.shards = SHARDS);
        let (publisher, _) = connect(&net, "pub", by);
        let mut subscribers = Vec::new();
        let mut of_shard = [0; SHARDS];
        while of_shard.contains(&0) || of_shard.contains(&1) {
            let node = ["sub1", "sub2"][subscribers.len() % 2];
            let (subscriber, shard) = connect(&net, node, by);
            of_shard[shard] += 1;
            subscribers.push(subscriber);
        }
        let cast = introduce(&net, publisher, subscribers);
        let status = play(&net, cast, &SHOW, |_| {});
        assert_forwarded(&status, SHOW.groups * OF_A_GROUP);
        assert_eq!(status.shards.len(), SHARDS);
        for shard in &status.shards {
            assert!(shard.received > 0 && shard.misdirected == 0, "{:#?}", status.shards);
        }
        // Packets of each connection are deferred to the socket of its own shard, and read there.
        assert!(status.engine.deferred > SHOW.groups, "{by:?}: {:#?}", status.engine);
        assert_eq!(status.engine.deferred_dropped, 0);
        assert!(sum(&status, |session| session.packets_lost) < SHOW.objects, "{by:?}: {status:#?}");
    }
}
