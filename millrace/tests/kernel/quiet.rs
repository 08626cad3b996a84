//! What does not wake the relay.

use std::cell::Cell;

use millrace::relay::{
    config::{Config, EngineChoice},
    status::Status,
};

use crate::{
    needs_root,
    net::{Net, SHOW, Show, cast, play, share, subscribers, sum},
};

/// Packets of the subscribers that wake nobody, and all of them.
fn acks(status: &Status) -> (u64, u64) {
    let all = status.engine.received.as_ref().unwrap()["from_subscriber"];
    (sum(status, |session| session.kernel_quiet), all)
}

#[test]
fn what_the_kernel_sent_to_everybody_wakes_nobody() {
    needs_root!(what_the_kernel_sent_to_everybody_wakes_nobody);
    let net = Net::new(2, false, |_| {});
    let cast = cast(&net, &["sub1", "sub2"]);
    let status = play(&net, cast, &SHOW, |_| {});
    let forwarded = status.engine.received.as_ref().unwrap()["forwarded"];
    assert!(forwarded >= SHOW.groups * (SHOW.objects - 10), "{:#?}", status.engine);
    // One of 32 does all the same, and what comes before it is known that nobody else waits.
    let (acks, _) = acks(&status);
    let publishers = status.engine.quiet - acks;
    assert!(publishers * 100 >= forwarded * 80, "{:#?}", status.engine);
    assert!(publishers < forwarded);
    assert_eq!(status.engine.quiet_dropped, 0);
}

#[test]
fn nor_do_acknowledgements_of_it() {
    needs_root!(nor_do_acknowledgements_of_it);
    let net = Net::new(2, false, |_| {});
    let cast = cast(&net, &["sub1", "sub2"]);
    let status = play(&net, cast, &SHOW, |_| {});
    let (quiet, all) = acks(&status);
    // Those that come while the relay is awake anyway are not: most, where others keep it waiting for a CPU.
    assert!(quiet * 100 >= all * 30, "{quiet} of {all}, {status:#?}");
    assert_eq!(sum(&status, |session| session.packets_lost), 0, "{status:#?}");
}

/// Who waits for acknowledgements to send more gets each at once.
#[test]
fn a_full_window_is_no_place_for_patience() {
    needs_root!(a_full_window_is_no_place_for_patience);
    let net = Net::new(1, true, |_| {});
    let cast = cast(&net, &["sub1"]);
    net.impair("relay-sub1", "rate=1mbit");
    let show = Show { groups: 5, objects: 100, ..SHOW };
    let status = play(&net, cast, &show, |_| {});
    let (quiet, all) = acks(&status);
    let session = subscribers(&status).next().unwrap();
    assert!(session.kernel_copies.as_ref().unwrap().contains_key("window"), "{status:#?}");
    assert!(quiet * 100 <= all * 50, "{quiet} of {all}, {status:#?}");
}

#[test]
fn nothing_is_quiet_while_nothing_is_attached() {
    needs_root!(nothing_is_quiet_while_nothing_is_attached);
    let net = Net::new(2, false, |_| {});
    let cast = cast(&net, &["sub1", "sub2"]);
    let user = Config { engine: EngineChoice::User, interfaces: Vec::new(), ..net.config.clone() };
    let quiet = Cell::new(0);
    let show = Show { groups: 30, objects: 30, ..SHOW };
    let status = play(&net, cast, &show, |group| match group {
        10 => {
            net.server.change_engine(&user).unwrap();
            quiet.set(net.status().engine.quiet);
            assert!(quiet.get() > 0);
        }
        20 => {
            assert_eq!(net.status().engine.quiet, quiet.get());
            net.server.change_engine(&net.config).unwrap();
        }
        _ => {}
    });
    let before = quiet.get();
    assert!(status.engine.quiet > before + before / 2, "{before}, {status:#?}");
    assert!(subscribers(&status).all(|session| share(session) > 50), "{status:#?}");
}
