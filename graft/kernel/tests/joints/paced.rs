//! `pace`: the time stamps by which the qdisc fq has packets leave, and what it makes of them where the kernel has it.

use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use millrace_graft_kernel::joint::{Joint, Joints, Reason};
use millrace_kernel::qdisc::other_than_fq;

use crate::datagrams::{PASS_ON, SHOT, datagram, v4, v6};
use crate::net::{ifindex, inside, root};
use crate::traffic::{AtEnd, Fate, Site, get_to_know, receive, send};
use crate::{count, joints_of, list, open, other_side};

const LIST: &[&str] = &["pace", "number"];
/// Slow enough for time stamps not to depend on how fast this machine is.
const KBIT: u64 = 10;

fn paced(functions: &[&str], parameters: &[(&str, &str, u64)]) -> Joints {
    let mut joints = joints_of(functions, parameters);
    open(&mut joints, v4(), functions);
    joints
}

/// When each of so many datagrams of 900 bytes is to leave; `None`: it is not sent.
fn leave(joints: &Joints, datagrams: usize) -> Vec<Option<u64>> {
    let each = (0..datagrams).map(|_| {
        let run = joints.run(Joint::Tx, &datagram(&v4(), &[7; 900])).expect("a run");
        assert!([PASS_ON, SHOT].contains(&run.verdict), "{}", run.verdict);
        (run.verdict == PASS_ON).then_some(run.leaves_ns)
    });
    each.collect()
}

/// Of such a datagram with its frame, at the rate of a test: `bytes` behind the Ethernet header.
fn takes_ns(bytes: u64) -> u64 {
    bytes * 8 * 1_000_000 / KBIT
}

#[test]
fn each_leaves_when_the_one_before_has_taken_its_time() {
    if !root("each_leaves_when_the_one_before_has_taken_its_time") {
        return;
    }
    let takes = takes_ns(20 + 8 + 900 + 16);
    // Waiting, burst, and what becomes of six: how many times that takes behind the first one.
    let table: [(u64, u64, [Option<u64>; 6]); 4] = [
        (64, 1, [Some(0), Some(1), Some(2), Some(3), Some(4), Some(5)]),
        // One leaves, and three wait.
        (3, 1, [Some(0), Some(1), Some(2), Some(3), None, None]),
        (1, 1, [Some(0), Some(1), None, None, None, None]),
        // As if the first three had left before.
        (64, 4, [Some(0), Some(0), Some(0), Some(0), Some(1), Some(2)]),
    ];
    for (packets, burst, want) in table {
        let parameters =
            [("pace", "rate_kbit", KBIT), ("pace", "burst", burst), ("pace", "packets", packets)];
        let mut joints = paced(LIST, &parameters);
        let got = leave(&joints, want.len());
        let first = got[0].expect("the first one leaves");
        assert!(first > 0, "at once is a time, too");
        for (got, want) in got.iter().zip(want) {
            match want {
                // Those of a burst, which are sent one after another here.
                Some(0) => assert!((first..first + takes).contains(&got.expect("it leaves")), "{got:?}"),
                want => assert_eq!(*got, want.map(|times| first + times * takes), "{packets} {burst}"),
            }
        }
        let refused = want.iter().filter(|it| it.is_none()).count() as u64;
        assert_eq!(count(&mut joints, &v4(), Reason::TooFast), refused);
        // What is not sent has no number.
        assert_eq!(joints.progress(&v4()).expect("progress").next, 6 - refused as u32);
    }
}

#[test]
fn without_a_rate_nothing_waits() {
    if !root("without_a_rate_nothing_waits") {
        return;
    }
    assert_eq!(leave(&paced(LIST, &[]), 3), [Some(0); 3]);
    assert_eq!(leave(&paced(&["number"], &[]), 3), [Some(0); 3]);
    // Nor does what the daemon says, or what is of no session.
    let joints = paced(LIST, &[("pace", "rate_kbit", KBIT)]);
    leave(&joints, 3);
    let stranger = joints.run(Joint::Tx, &datagram(&v6(), b"other")).expect("a run");
    assert_eq!((stranger.verdict, stranger.leaves_ns), (PASS_ON, 0));
}

/// A session that changes its list goes on in the time that it has drawn, and one that begins anew does not.
#[test]
fn time_that_was_drawn_is_the_sessions() {
    if !root("time_that_was_drawn_is_the_sessions") {
        return;
    }
    let mut joints =
        joints_of(&["pace", "number", "order"], &[("pace", "rate_kbit", KBIT), ("pace", "burst", 1)]);
    open(&mut joints, v4(), LIST);
    let first = leave(&joints, 2)[0].expect("it leaves");
    let epoch = joints.accept(&v4(), &list(&["pace", "number", "order"])).expect("ready");
    joints.switch(&v4(), epoch).expect("switched");
    let takes = takes_ns(20 + 8 + 900 + 16);
    assert_eq!(leave(&joints, 1), [Some(first + 2 * takes)]);
    joints.replace(&v4(), &list(LIST), epoch).expect("anew");
    assert!(leave(&joints, 1)[0].expect("it leaves") < first + 2 * takes);
}

fn tc(namespace: &str, arguments: &str) -> Output {
    inside(namespace, || Command::new("tc").args(arguments.split(' ')).output().expect("tc"))
}

#[test]
fn fq_has_each_leave_in_its_time_and_loses_none() {
    if !root("fq_has_each_leave_in_its_time_and_loses_none") {
        return;
    }
    let site = Site::new("paced", 4);
    let near = site.network.publisher.clone();
    let other = || {
        let eth = ifindex(&near, "eth");
        inside(&near, || other_than_fq(eth).expect("an answer"))
    };
    assert!(other().is_some(), "it is another one to begin with");
    // A module of most kernels.
    if !tc(&near, "qdisc replace dev eth root fq").status.success() {
        println!("SKIP fq_has_each_leave_in_its_time_and_loses_none: this kernel has no qdisc fq");
        return;
    }
    assert_eq!(other(), None);
    // A datagram each 5 ms or so, which is longer than any machine takes to send one: more than wait at once are refused.
    let parameters = [("pace", "rate_kbit", 1000), ("pace", "packets", 50)];
    let [mut sender, mut receiver] = site.joints_of(LIST, &parameters);
    let (from, to) = site.sockets();
    let stop = AtomicBool::new(false);
    let wire = site.wire();
    let got = thread::scope(|scope| {
        let _end = AtEnd(&stop, true);
        scope.spawn(|| wire.run(&stop, |_| Fate::Pass));
        get_to_know(&site, &sender, &mut receiver);
        send(&from, 0..400);
        let sent = count(&mut sender, &site.ends, Reason::Sent);
        let got = receive(&to, sent as usize);
        stop.store(true, Ordering::Relaxed);
        got
    });
    let (sent, refused) =
        (count(&mut sender, &site.ends, Reason::Sent), count(&mut sender, &site.ends, Reason::TooFast));
    println!("sent {sent}, refused {refused}");
    assert_eq!((sent + refused, got.len() as u64), (400, sent));
    assert!(got.windows(2).all(|pair| pair[0] < pair[1]), "in order");
    assert_eq!(count(&mut receiver, &other_side(&site.ends), Reason::Delivered), sent);
    // It had packets wait for their time: the last figure of that name is how often.
    let shown = tc(&near, "-s qdisc show dev eth");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let throttled = shown.rsplit("throttled ").next().and_then(|rest| rest.split([' ', '\n']).next());
    let throttled: Option<u64> = throttled.and_then(|text| text.trim_matches(',').parse().ok());
    assert!(throttled.is_some_and(|count| count > 0), "{shown}");
}
