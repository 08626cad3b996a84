//! Tests of the relay's report on the kernel's share of the media.

use millrace_relay_daemon::{config::Config, status::Status};

use crate::{
    needs_root,
    net::{Cast, GroupStream, KernelNetwork, SHOW, cast},
};

#[test]
fn reason_and_remedy_are_reported_if_the_kernel_forwards_nothing() {
    needs_root!(reason_and_remedy_are_reported_if_the_kernel_forwards_nothing);
    let status = measured(|net| net.interfaces.retain(|interface| interface != "to-pub"));
    for share in status.shares.sessions.values().chain(status.shares.interfaces.values()) {
        assert_eq!((share.percent(), share.reason.as_str()), (0, "not seen"));
        assert!(share.remedy.contains("in the setting interface"), "{share:?}");
    }
}

#[test]
fn status_reports_kernel_bytes_and_all_bytes_of_each_interface() {
    needs_root!(status_reports_kernel_bytes_and_all_bytes_of_each_interface);
    let status = measured(|_| {});
    for share in status.shares.interfaces.values() {
        assert!(share.by_kernel > 0 && share.by_kernel <= share.bytes, "{share:?}");
    }
}

/// Plays to two subscribers on an interface each, and waits until the report includes the media of both.
fn measured(change: impl FnOnce(&mut Config)) -> Status {
    let net = KernelNetwork::new(2, false, change);
    let Cast { publisher, subscribers, _requests } = cast(&net, &["sub1", "sub2"]);
    let _peers = net.run(GroupStream { groups: 4, ..SHOW }.play(&publisher, subscribers, |_| {}));
    net.until("the media of both interfaces to be measured", |status| {
        status.shares.sessions.len() == 2 && status.shares.interfaces.len() == 2
    })
}
