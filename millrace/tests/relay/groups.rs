//! Complete groups of two objects, as tests of several relays publish them.

use super::peer::{PeerStreamEnd, TestPeer, header};

/// Publishes a complete group of two objects.
pub async fn publish_group(publisher: &TestPeer, alias: u64, group: u64) {
    let mut subgroup = publisher.subgroup(header(alias, group)).await;
    subgroup.object(0, 700).await;
    subgroup.object(1, 700).await;
    subgroup.finish();
}

/// Receives the next group, and checks that it has this ID and both objects once.
pub async fn expect_group(subscriber: &mut TestPeer, group: u64) {
    let received = subscriber.next_subgroup().await;
    assert_eq!((received.header.group, received.all().await), (group, (vec![0, 1], PeerStreamEnd::Fin)));
}
