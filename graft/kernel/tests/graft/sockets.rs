//! Tests that read and change existing sockets.

use millrace_graft_kernel::{ChangeCounts, RuleSide, SocketChange, SocketPrograms, TcpRule};

use crate::net::inside;
use crate::site::{GraftTestSite, congestion, congestion_of, rule, transfer};

#[test]
fn congestion_control_of_existing_tcp_sockets_is_read_and_changed() {
    let Some(site) = GraftTestSite::new("live") else { return };
    let mut sockets = SocketPrograms::load().expect("loads");
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    let default = congestion_of(&near);

    let seen = inside(site.client(), || sockets.read().expect("sockets"));
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert_eq!((seen[0].local, seen[0].remote), (near.local_addr().unwrap(), near.peer_addr().unwrap()));
    assert_eq!(seen[0].congestion, default);
    assert!(seen[0].cwnd_packets > 0 && seen[0].srtt_us > 0, "{seen:?}");

    let to =
        |side| SocketChange { rule: TcpRule { agree: false, ..rule(side, congestion("reno")) }, from: None };
    let set = |sockets: &mut SocketPrograms, namespace: &str, change: &SocketChange| {
        inside(namespace, || sockets.set(change).expect("changed"))
    };
    let one = ChangeCounts { connections: 1, ..ChangeCounts::default() };
    assert_eq!(set(&mut sockets, site.client(), &to(RuleSide::Client)), one);
    assert_eq!(congestion_of(&near), "reno");
    // No socket uses the previous control any more, so a change of sockets that use it changes none.
    let from = SocketChange { from: Some(default.clone()), ..to(RuleSide::Client) };
    assert_eq!(set(&mut sockets, site.client(), &from), ChangeCounts::default());
    let from = SocketChange {
        from: Some("reno".into()),
        rule: TcpRule { agree: false, ..rule(RuleSide::Client, congestion("cubic")) },
    };
    assert_eq!(set(&mut sockets, site.client(), &from), one);
    assert_eq!(congestion_of(&near), "cubic");
    // The server's socket is in another network namespace, so the change did not include it.
    assert_eq!(congestion_of(&far), default);
    assert_eq!(set(&mut sockets, site.server(), &to(RuleSide::Client)), ChangeCounts::default());
    // The rule for servers changes the listener, and the socket that it accepted before.
    assert_eq!(set(&mut sockets, site.server(), &to(RuleSide::Server)), ChangeCounts { listeners: 1, ..one });
    assert_eq!(congestion_of(&far), "reno");
    let unknown = SocketChange {
        rule: TcpRule { agree: false, ..rule(RuleSide::Client, congestion("mr_nowhere")) },
        from: None,
    };
    assert_eq!(
        set(&mut sockets, site.client(), &unknown),
        ChangeCounts { refused: 1, ..ChangeCounts::default() }
    );
    transfer(near, far, 1 << 20);
    let (near, far) = site.connect(&listener);
    assert_eq!(congestion_of(&far), "reno");
    transfer(near, far, 1000);
}
