//! Tests of the function `pace`: the departure times that it sets, and how the qdisc fq obeys them where the kernel
//! has it.

use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use millrace_graft_kernel::packet::{FunctionHook, PacketHooks, PacketReason};
use millrace_kernel::qdisc::other_than_fq;

use crate::datagrams::{PASS_ON, SHOT, datagram, v4, v6};
use crate::net::{ifindex, inside, root};
use crate::traffic::{AtEnd, DatagramFate, PacketHook, get_to_know, receive, send};
use crate::{count, hooks_of, list, open, other_side};

const LIST: &[&str] = &["pace", "number"];
/// Pacing rate in kbit/s. It is so low that departure times do not depend on the speed of the machine.
const KBIT: u64 = 10;

fn paced(functions: &[&str], parameters: &[(&str, &str, u64)]) -> PacketHooks {
    let mut hooks = hooks_of(functions, parameters);
    open(&mut hooks, v4(), functions);
    hooks
}

/// Sends datagrams of 900 bytes. Returns the departure time of each in ns; `None` if it was refused.
fn leave(hooks: &PacketHooks, datagrams: usize) -> Vec<Option<u64>> {
    let each = (0..datagrams).map(|_| {
        let run = hooks.run(FunctionHook::Tx, &datagram(&v4(), &[7; 900])).expect("a run");
        assert!([PASS_ON, SHOT].contains(&run.verdict), "{}", run.verdict);
        (run.verdict == PASS_ON).then_some(run.leaves_ns)
    });
    each.collect()
}

/// Returns how long a packet takes at the rate of these tests, ns. `bytes` is the length without the Ethernet header.
fn takes_ns(bytes: u64) -> u64 {
    bytes * 8 * 1_000_000 / KBIT
}

#[test]
fn paced_packet_departs_one_interval_after_the_previous_one() {
    if !root("paced_packet_departs_one_interval_after_the_previous_one") {
        return;
    }
    let takes = takes_ns(20 + 8 + 900 + 16);
    // Columns: the number of packets that may wait to depart, the number of packets that may depart in a burst, and the
    // departure times of six datagrams relative to the first one, in multiples of `takes_ns`.
    let table: [(u64, u64, [Option<u64>; 6]); 4] = [
        (64, 1, [Some(0), Some(1), Some(2), Some(3), Some(4), Some(5)]),
        // The first datagram departs at once, the next three wait, and the last two are refused.
        (3, 1, [Some(0), Some(1), Some(2), Some(3), None, None]),
        (1, 1, [Some(0), Some(1), None, None, None, None]),
        // With a burst of four, the first packets depart at once, as if they had been due earlier.
        (64, 4, [Some(0), Some(0), Some(0), Some(0), Some(1), Some(2)]),
    ];
    for (packets, burst, want) in table {
        let parameters =
            [("pace", "rate_kbit", KBIT), ("pace", "burst", burst), ("pace", "packets", packets)];
        let mut hooks = paced(LIST, &parameters);
        let got = leave(&hooks, want.len());
        let first = got[0].expect("the first one leaves");
        assert!(first > 0, "at once is a time, too");
        for (got, want) in got.iter().zip(want) {
            match want {
                // The datagrams of a burst depart when they are sent, and this test sends one after another.
                Some(0) => assert!((first..first + takes).contains(&got.expect("it leaves")), "{got:?}"),
                want => assert_eq!(*got, want.map(|times| first + times * takes), "{packets} {burst}"),
            }
        }
        let refused = want.iter().filter(|it| it.is_none()).count() as u64;
        assert_eq!(count(&mut hooks, &v4(), PacketReason::TooFast), refused);
        // A refused packet gets no packet number.
        assert_eq!(hooks.progress(&v4()).expect("progress").next, 6 - refused as u32);
    }
}

#[test]
fn packets_without_pacing_rate_are_not_delayed() {
    if !root("packets_without_pacing_rate_are_not_delayed") {
        return;
    }
    assert_eq!(leave(&paced(LIST, &[]), 3), [Some(0); 3]);
    assert_eq!(leave(&paced(&["number"], &[]), 3), [Some(0); 3]);
    // The daemon's messages and packets of no session are not paced.
    let hooks = paced(LIST, &[("pace", "rate_kbit", KBIT)]);
    leave(&hooks, 3);
    let stranger = hooks.run(FunctionHook::Tx, &datagram(&v6(), b"other")).expect("a run");
    assert_eq!((stranger.verdict, stranger.leaves_ns), (PASS_ON, 0));
}

/// When function lists are swapped, a session keeps its next departure time; when the session restarts, the time is
/// cleared.
#[test]
fn pacing_departure_time_outlasts_function_list_change_not_a_restart() {
    if !root("pacing_departure_time_outlasts_function_list_change_not_a_restart") {
        return;
    }
    let mut hooks =
        hooks_of(&["pace", "number", "order"], &[("pace", "rate_kbit", KBIT), ("pace", "burst", 1)]);
    open(&mut hooks, v4(), LIST);
    let first = leave(&hooks, 2)[0].expect("it leaves");
    let epoch = hooks.accept(&v4(), &list(&["pace", "number", "order"])).expect("ready");
    hooks.switch(&v4(), epoch).expect("switched");
    let takes = takes_ns(20 + 8 + 900 + 16);
    assert_eq!(leave(&hooks, 1), [Some(first + 2 * takes)]);
    hooks.replace(&v4(), &list(LIST), epoch).expect("anew");
    assert!(leave(&hooks, 1)[0].expect("it leaves") < first + 2 * takes);
}

fn tc(namespace: &str, arguments: &str) -> Output {
    inside(namespace, || Command::new("tc").args(arguments.split(' ')).output().expect("tc"))
}

#[test]
fn fq_sends_each_packet_on_time_without_loss() {
    if !root("fq_sends_each_packet_on_time_without_loss") {
        return;
    }
    let site = PacketHook::new("paced", 4);
    let near = site.network.publisher.clone();
    let other = || {
        let eth = ifindex(&near, "eth");
        inside(&near, || other_than_fq(eth).expect("an answer"))
    };
    assert!(other().is_some(), "it is another one to begin with");
    // The qdisc fq is a module that most kernels have.
    if !tc(&near, "qdisc replace dev eth root fq").status.success() {
        println!("SKIP fq_sends_each_packet_on_time_without_loss: this kernel has no qdisc fq");
        return;
    }
    assert_eq!(other(), None);
    // At this rate a datagram departs every 5 ms, which is longer than sending one takes. Datagrams are refused if too
    // many already wait.
    let parameters = [("pace", "rate_kbit", 1000), ("pace", "packets", 50)];
    let [mut sender, mut receiver] = site.hooks_of(LIST, &parameters);
    let (from, to) = site.sockets();
    let stop = AtomicBool::new(false);
    let wire = site.wire();
    let got = thread::scope(|scope| {
        let _end = AtEnd(&stop, true);
        scope.spawn(|| wire.run(&stop, |_| DatagramFate::Pass));
        get_to_know(&site, &sender, &mut receiver);
        send(&from, 0..400);
        let sent = count(&mut sender, &site.ends, PacketReason::Sent);
        let got = receive(&to, sent as usize);
        stop.store(true, Ordering::Relaxed);
        got
    });
    let sent = count(&mut sender, &site.ends, PacketReason::Sent);
    let refused = count(&mut sender, &site.ends, PacketReason::TooFast);
    println!("sent {sent}, refused {refused}");
    assert_eq!((sent + refused, got.len() as u64), (400, sent));
    assert!(got.windows(2).all(|pair| pair[0] < pair[1]), "in order");
    assert_eq!(count(&mut receiver, &other_side(&site.ends), PacketReason::Delivered), sent);
    // The `throttled` figure in fq's statistics counts packets that had to wait for their departure time.
    let shown = tc(&near, "-s qdisc show dev eth");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let throttled = shown.rsplit("throttled ").next().and_then(|rest| rest.split([' ', '\n']).next());
    let throttled: Option<u64> = throttled.and_then(|text| text.trim_matches(',').parse().ok());
    assert!(throttled.is_some_and(|count| count > 0), "{shown}");
}
