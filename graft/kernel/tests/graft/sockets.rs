//! Sockets that live, read and changed.

use millrace_graft_kernel::{Change, Changed, Rule, Side, Sockets};

use crate::net::inside;
use crate::site::{Site, congestion, congestion_of, rule, transfer};

#[test]
fn live_sockets_are_read_and_changed() {
    let Some(site) = Site::new("live") else { return };
    let mut sockets = Sockets::load().expect("loads");
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    let default = congestion_of(&near);

    let seen = inside(site.client(), || sockets.read().expect("sockets"));
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert_eq!((seen[0].local, seen[0].remote), (near.local_addr().unwrap(), near.peer_addr().unwrap()));
    assert_eq!(seen[0].congestion, default);
    assert!(seen[0].cwnd_packets > 0 && seen[0].srtt_us > 0, "{seen:?}");

    let to = |side| Change { rule: Rule { agree: false, ..rule(side, congestion("reno")) }, from: None };
    let set = |sockets: &mut Sockets, namespace: &str, change: &Change| {
        inside(namespace, || sockets.set(change).expect("changed"))
    };
    let one = Changed { connections: 1, ..Changed::default() };
    assert_eq!(set(&mut sockets, site.client(), &to(Side::Client)), one);
    assert_eq!(congestion_of(&near), "reno");
    // Nobody has it any more.
    let from = Change { from: Some(default.clone()), ..to(Side::Client) };
    assert_eq!(set(&mut sockets, site.client(), &from), Changed::default());
    let from = Change {
        from: Some("reno".into()),
        rule: Rule { agree: false, ..rule(Side::Client, congestion("cubic")) },
    };
    assert_eq!(set(&mut sockets, site.client(), &from), one);
    assert_eq!(congestion_of(&near), "cubic");
    // Another namespace is another world.
    assert_eq!(congestion_of(&far), default);
    assert_eq!(set(&mut sockets, site.server(), &to(Side::Client)), Changed::default());
    // A listener, and what it accepted before.
    assert_eq!(set(&mut sockets, site.server(), &to(Side::Server)), Changed { listeners: 1, ..one });
    assert_eq!(congestion_of(&far), "reno");
    let unknown =
        Change { rule: Rule { agree: false, ..rule(Side::Client, congestion("mr_nowhere")) }, from: None };
    assert_eq!(set(&mut sockets, site.client(), &unknown), Changed { refused: 1, ..Changed::default() });
    transfer(near, far, 1 << 20);
    let (near, far) = site.connect(&listener);
    assert_eq!(congestion_of(&far), "reno");
    transfer(near, far, 1000);
}
