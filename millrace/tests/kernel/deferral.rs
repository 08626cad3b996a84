//! What does not wake the relay.

use std::cell::Cell;
use std::time::Duration;

use millrace_relay_daemon::{
    config::{Config, EngineChoice},
    status::Status,
};
use millrace_testkit::wait_for;

use crate::{
    needs_root,
    net::{Net, OF_A_GROUP, SHOW, Show, assert_forwarded, cast, play, subscribers, sum},
};

/// Packets of the subscribers that wake nobody, and all of them.
fn acks(status: &Status) -> (u64, u64) {
    let all = status.engine.received.as_ref().unwrap()["from_subscriber"];
    (sum(status, |session| session.kernel_deferred), all)
}

#[test]
fn what_the_kernel_sent_to_everybody_wakes_nobody() {
    needs_root!(what_the_kernel_sent_to_everybody_wakes_nobody);
    let net = Net::new(2, false, |_| {});
    let cast = cast(&net, &["sub1", "sub2"]);
    let status = play(&net, cast, &SHOW, |_| {});
    let forwarded = status.engine.received.as_ref().unwrap()["forwarded"];
    assert!(forwarded >= SHOW.groups * OF_A_GROUP, "{:#?}", status.engine);
    // One of 32 does all the same, and what comes before it is known that nobody else waits. What the rest saves is
    // among the system calls for each object that `millrace-lab bench relay` counts.
    let (acks, _) = acks(&status);
    let publishers = status.engine.deferred - acks;
    assert!(publishers >= SHOW.groups * OF_A_GROUP, "{:#?}", status.engine);
    assert!(publishers < forwarded);
    assert_eq!(status.engine.deferred_dropped, 0);
}

#[test]
fn nor_do_acknowledgements_of_it() {
    needs_root!(nor_do_acknowledgements_of_it);
    let net = Net::new(2, false, |_| {});
    let cast = cast(&net, &["sub1", "sub2"]);
    let status = play(&net, cast, &SHOW, |_| {});
    let (deferred, all) = acks(&status);
    // Those that come while the relay is awake anyway are not: most, where others keep it waiting for a CPU.
    assert!((SHOW.groups..all).contains(&deferred), "{deferred} of {all}, {status:#?}");
    assert_eq!(status.engine.deferred_dropped, 0);
    // That some packets overtake others, on two processors, counts as a loss; late acknowledgements would be all of them.
    assert!(sum(&status, |session| session.packets_lost) < SHOW.objects, "{status:#?}");
}

/// Who waits for acknowledgements to send more gets each at once.
#[test]
fn a_full_window_is_no_place_for_patience() {
    needs_root!(a_full_window_is_no_place_for_patience);
    let net = Net::new(1, true, |_| {});
    let cast = cast(&net, &["sub1"]);
    // Everything waits for it, whoever has the CPU.
    net.impair("relay-sub1", "rate=500kbit");
    let show = Show { groups: 3, objects: 100, pause: Duration::ZERO, ahead: None, ..SHOW };
    let status = play(&net, cast, &show, |_| {});
    let (deferred, all) = acks(&status);
    let session = subscribers(&status).next().unwrap();
    assert!(session.kernel_copies.as_ref().unwrap().contains_key("window"), "{status:#?}");
    assert!(deferred * 100 <= all * 50, "{deferred} of {all}, {status:#?}");
}

#[test]
fn nothing_is_quiet_while_nothing_is_attached() {
    needs_root!(nothing_is_quiet_while_nothing_is_attached);
    let net = Net::new(2, false, |_| {});
    let cast = cast(&net, &["sub1", "sub2"]);
    let user = Config { engine: EngineChoice::User, interfaces: Vec::new(), ..net.config.clone() };
    let deferred = Cell::new(0);
    let show = Show { groups: 30, objects: 30, ..SHOW };
    let status = play(&net, cast, &show, |group| match group {
        10 => {
            net.server.change_engine(&user).unwrap();
            assert!(net.status().engine.deferred > 0); // exact: of ten groups that have come
        }
        11 => deferred.set(net.status().engine.deferred), // exact: a group has come since
        20 => {
            assert_eq!(net.status().engine.deferred, deferred.get()); // exact: nothing counts meanwhile
            net.server.change_engine(&net.config).unwrap();
        }
        _ => {}
    });
    let before = deferred.get();
    assert!(status.engine.deferred >= before + 10, "{before}, {status:#?}");
    assert_forwarded(&status, 20 * OF_A_GROUP);
}

/// Openings are prepared all the time.
#[test]
fn while_nothing_is_published_the_engine_sleeps() {
    needs_root!(while_nothing_is_published_the_engine_sleeps);
    let net = Net::new(1, false, |_| {});
    let cast = cast(&net, &["sub1"]);
    let show = Show { groups: 10, ..SHOW };
    let status = play(&net, cast, &show, |group| {
        if group != 5 {
            return;
        }
        net.until("openings are prepared", |status| status.engine.prepared > 0);
        wait_for("a second that it sleeps through", || {
            let before = net.status().engine.ticks;
            std::thread::sleep(Duration::from_secs(1));
            // One a second, and some behind a keep-alive; while it ticks they are a hundred.
            net.status().engine.ticks - before <= 40
        });
    });
    assert!(status.engine.ticks > show.groups, "and else it ticks");
    assert_forwarded(&status, show.groups * OF_A_GROUP);
    assert_eq!(status.engine.deferred_dropped, 0);
}
