//! Tests that packets which the kernel handles completely do not wake the relay's process.

use std::cell::Cell;
use std::time::Duration;

use millrace_relay_daemon::{
    config::{Config, EngineChoice},
    status::Status,
};
use millrace_testkit::wait_for;

use crate::{
    needs_root,
    net::{GroupStream, KernelNetwork, OF_A_GROUP, SHOW, assert_forwarded, cast, play, subscribers, sum},
};

/// Returns the number of packets from subscribers that did not wake the relay, and the number of all packets from
/// subscribers.
fn acks(status: &Status) -> (u64, u64) {
    let all = status.engine.received.as_ref().unwrap()["from_subscriber"];
    (sum(status, |session| session.kernel_deferred), all)
}

#[test]
fn packets_forwarded_to_all_subscribers_do_not_wake_userspace() {
    needs_root!(packets_forwarded_to_all_subscribers_do_not_wake_userspace);
    let net = KernelNetwork::new(2, false, |_| {});
    let cast = cast(&net, &["sub1", "sub2"]);
    let status = play(&net, cast, &SHOW, |_| {});
    let forwarded = status.engine.received.as_ref().unwrap()["forwarded"];
    assert!(forwarded >= SHOW.groups * OF_A_GROUP, "{:#?}", status.engine);
    // One in 32 of the packets that the kernel handles wakes the relay, and so do packets that arrive before the kernel
    // knows that every subscriber of the stream is served by the kernel. `millrace-lab bench relay` measures how many
    // system calls are saved.
    let (acks, _) = acks(&status);
    let publishers = status.engine.deferred - acks;
    assert!(publishers >= SHOW.groups * OF_A_GROUP, "{:#?}", status.engine);
    assert!(publishers < forwarded);
    assert_eq!(status.engine.deferred_dropped, 0);
}

#[test]
fn acknowledgements_of_kernel_packets_do_not_wake_userspace() {
    needs_root!(acknowledgements_of_kernel_packets_do_not_wake_userspace);
    let net = KernelNetwork::new(2, false, |_| {});
    let cast = cast(&net, &["sub1", "sub2"]);
    let status = play(&net, cast, &SHOW, |_| {});
    let (deferred, all) = acks(&status);
    // While the relay is awake, acknowledgements go to userspace immediately and are not deferred. On a busy machine
    // most of them are not deferred.
    assert!((SHOW.groups..all).contains(&deferred), "{deferred} of {all}, {status:#?}");
    assert_eq!(status.engine.deferred_dropped, 0);
    // Packets that overtake others on another CPU count as lost. If acknowledgements were late, all packets would count
    // as lost.
    assert!(sum(&status, |session| session.packets_lost) < SHOW.objects, "{status:#?}");
}

/// Each acknowledgement for a sender whose congestion window is full must wake the relay immediately.
#[test]
fn acknowledgement_for_a_full_congestion_window_wakes_userspace_at_once() {
    needs_root!(acknowledgement_for_a_full_congestion_window_wakes_userspace_at_once);
    let net = KernelNetwork::new(1, true, |_| {});
    let cast = cast(&net, &["sub1"]);
    // A slow link fills the congestion window, whatever the machine's load is. The first objects of each group wait for
    // the kernel to have their stream.
    net.impair("relay-sub1", "rate=500kbit");
    let show = GroupStream { groups: 3, objects: 100, pause: Duration::ZERO, ahead: Some(u64::MAX), ..SHOW };
    let status = play(&net, cast, &show, |_| {});
    let (deferred, all) = acks(&status);
    let session = subscribers(&status).next().unwrap();
    assert!(session.kernel_copies.as_ref().unwrap().contains_key("window"), "{status:#?}");
    assert!(deferred * 100 <= all * 50, "{deferred} of {all}, {status:#?}");
}

#[test]
fn detached_program_defers_no_packet() {
    needs_root!(detached_program_defers_no_packet);
    let net = KernelNetwork::new(2, false, |_| {});
    let cast = cast(&net, &["sub1", "sub2"]);
    let user = Config { engine: EngineChoice::User, interfaces: Vec::new(), ..net.config.clone() };
    let deferred = Cell::new(0);
    let show = GroupStream { groups: 30, objects: 30, ..SHOW };
    let status = play(&net, cast, &show, |group| match group {
        10 => {
            net.server.change_engine(&user).unwrap();
            // exact: ten groups have arrived, so the kernel has deferred waking the relay for acknowledgements
            assert!(net.status().engine.deferred > 0);
        }
        // exact: a group has arrived after the detach, so the kernel's count of deferred packets is final
        11 => deferred.set(net.status().engine.deferred),
        20 => {
            // exact: the detached program does not change the count of packets whose wake-up the kernel deferred
            assert_eq!(net.status().engine.deferred, deferred.get());
            net.server.change_engine(&net.config).unwrap();
        }
        _ => {}
    });
    let before = deferred.get();
    assert!(status.engine.deferred >= before + 10, "{before}, {status:#?}");
    assert_forwarded(&status, 20 * OF_A_GROUP);
}

/// The relay prepares streams to subscribers in advance, so that the kernel can open them. This must not keep the
/// thread that controls the kernel's forwarding (the engine) awake while no media arrives.
#[test]
fn engine_sleeps_while_nothing_is_published() {
    needs_root!(engine_sleeps_while_nothing_is_published);
    let net = KernelNetwork::new(1, false, |_| {});
    let cast = cast(&net, &["sub1"]);
    let show = GroupStream { groups: 10, ..SHOW };
    let status = play(&net, cast, &show, |group| {
        if group != 5 {
            return;
        }
        net.until("openings are prepared", |status| status.engine.prepared > 0);
        wait_for("a second in which the engine sleeps", || {
            let before = net.status().engine.ticks;
            std::thread::sleep(Duration::from_secs(1));
            // While the thread that controls the kernel's forwarding sleeps, it wakes about once a second, and a few
            // times after a keep-alive. While it is awake, it runs a hundred times a second.
            net.status().engine.ticks - before <= 40
        });
    });
    assert!(status.engine.ticks > show.groups, "the engine did not tick during the show");
    assert_forwarded(&status, show.groups * OF_A_GROUP);
    assert_eq!(status.engine.deferred_dropped, 0);
}
