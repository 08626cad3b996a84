//! The relay's own gate in front of the kernel engine.

use std::time::Duration;

use millrace::relay::config::GateChoice;
use tokio::time;

use crate::{
    needs_root,
    net::{Net, PORT, SHOW, assert_shares, cast, play, subscribers},
    peer::Peer,
};

#[test]
fn behind_the_gate_the_kernel_forwards_as_before() {
    needs_root!(behind_the_gate_the_kernel_forwards_as_before);
    let net = Net::new(2, false, |config| config.gate = GateChoice::On);
    let cast = cast(&net, &["sub1", "sub2"]);
    let status = play(&net, cast, &SHOW, |_| {});
    assert_eq!(status.engine.name, "kernel");
    assert_eq!(subscribers(&status).count(), 2);
    assert_shares(&status, 90);
    assert!(status.gate.on && status.gate.reason.contains("by XDP, native"), "{:?}", status.gate);
    assert!(status.gate.refused.is_empty(), "{:?}", status.gate);
}

#[test]
fn a_client_that_has_its_sessions_gets_no_further_one() {
    needs_root!(a_client_that_has_its_sessions_gets_no_further_one);
    let net = Net::new(1, false, |config| {
        config.gate = GateChoice::On;
        config.gate_sessions = Some(1);
    });
    let first = net.peer("sub1");
    let url = format!("moqt://{}:{PORT}", net.relay().addr_v4()).parse().unwrap();
    let again = || net.run(async { time::timeout(Duration::from_secs(3), Peer::connect(url)).await });
    assert!(net.lab.node("sub1").unwrap().enter(again).unwrap().is_err(), "it must not be answered");
    let status = net.status();
    assert!(status.gate.refused.get("quota").is_some_and(|packets| *packets > 0), "{:?}", status.gate);
    assert_eq!(status.sessions.len(), 1);
    drop(net.peer("pub"));
    drop(first);
}
