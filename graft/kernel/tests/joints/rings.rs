//! Rings: what goes there, what goes on to the socket, and what an application finds in its ring.

use std::net::SocketAddr;

use millrace_graft_kernel::FUNCTIONS;
use millrace_graft_kernel::joint::{Ends, FRAME_BYTES, Function, Joints, Reason};
use millrace_kernel::xdp::Mode;
use millrace_kernel::xsk::{FRAMES, Reader, Ring};
use millrace_testkit::{wait_for, wait_until};
use nix::sched::{CloneFlags, unshare};

use crate::datagrams::{XDP_DROP, XDP_PASS, v4, v6};
use crate::frames::{framed, request};
use crate::net::{Network, address, ifindex, inside, ip, root, socket};
use crate::{count, counted, ends, open, other_side};

const XDP_REDIRECT: i32 = 4;

/// As packet grafts have them: `order` has no part behind XDP, but for what others have recovered.
fn joints() -> Joints {
    let mut joints = Joints::load().unwrap_or_else(|error| panic!("{error}"));
    for &(name, image) in FUNCTIONS.iter().filter(|(name, _)| ["number", "order", "repair"].contains(name)) {
        let mut function = Function::open(image).unwrap_or_else(|error| panic!("{name}: {error}"));
        function.only_recovered(name == "order");
        joints.add(function).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    joints
}

/// In a namespace of its own, with an interface that has two queues: its index.
pub fn with_two_queues(work: impl FnOnce(u32) + Send) {
    let in_own = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a namespace");
        ip("link add two numrxqueues 2 numtxqueues 2 type veth peer name other");
        ip("link set two up");
        work(nix::net::if_::if_nametoindex("two").expect("an index"));
    };
    std::thread::scope(|scope| scope.spawn(in_own).join().expect("work in a namespace"));
}

/// A kernel that lends none says so, and is not looked at further.
fn can_lend(test: &str) -> bool {
    let mut can = false;
    with_two_queues(|ifindex| match Ring::new(ifindex, 0) {
        Ok(_) => can = true,
        Err(why) => {
            let has_reason = ["Linux 6.4", "CONFIG_XDP_SOCKETS"].iter().any(|known| why.contains(known));
            assert!(has_reason, "{why}");
            println!("SKIP {test}: {why}");
        }
    });
    can
}

fn why(joints: &mut Joints, ends: &Ends, frame: &[u8], place: (u32, u32)) -> (Reason, i32, Vec<u8>) {
    let before = counted(joints, ends);
    let run = joints.run_at(place, frame).expect("a run");
    let after = counted(joints, ends);
    let new = after.iter().find(|it| !before.contains(it)).expect("a reason");
    (new.0, run.verdict, run.frame)
}

/// Its name, a list, bytes of payload and of padding, the queue, and whether it goes there.
type Row = (&'static str, &'static [&'static str], usize, usize, u32, bool);

#[test]
fn what_goes_to_a_ring() {
    if !root("what_goes_to_a_ring") || !can_lend("what_goes_to_a_ring") {
        return;
    }
    with_two_queues(|ifindex| {
        let table: [Row; 10] = [
            ("framing alone", &[], 100, 0, 0, true),
            ("nothing in it", &[], 0, 0, 0, true),
            ("numbers", &["number"], 100, 0, 0, true),
            ("order", &["number", "order"], 100, 0, 0, true),
            ("behind padding", &["number"], 3, 14, 0, true),
            ("as long as there is room", &["number"], 1776, 0, 0, true),
            ("longer", &["number"], 1777, 0, 0, false),
            ("another queue", &["number"], 100, 0, 1, false),
            ("a function behind XDP", &["number", "repair"], 100, 0, 0, false),
            ("and one for what it recovers", &["number", "repair", "order"], 100, 0, 0, false),
        ];
        for (what, functions, bytes, padding, queue, is_given) in table {
            for ends in [v4(), v6()] {
                let (mut sender, mut receiver, there) = (joints(), joints(), other_side(&ends));
                open(&mut sender, ends, functions);
                open(&mut receiver, there, functions);
                let early = framed(&sender, &ends, b"where it comes");
                assert_eq!(why(&mut receiver, &there, &early, (ifindex, 0)).0, Reason::LetIn);
                assert_eq!(receiver.came_by(&there).expect("a place"), Some((ifindex, 0)));
                let _lent = receiver.lend_ring(&there).unwrap_or_else(|error| panic!("{what}: {error}"));
                let payload: Vec<u8> = (0..bytes).map(|at| at as u8 ^ 0x3c).collect();
                let mut frame = framed(&sender, &ends, &payload);
                let tail = frame[frame.len() - FRAME_BYTES..].to_vec();
                frame.extend(vec![0; padding]);
                let (reason, verdict, after) = why(&mut receiver, &there, &frame, (ifindex, queue));
                match is_given {
                    true => {
                        assert_eq!((reason, verdict), (Reason::InRing, XDP_REDIRECT), "{what}");
                        assert_eq!(after, [&payload[..], &tail].concat(), "{what}");
                    }
                    false => {
                        assert_eq!((reason, verdict), (Reason::LetIn, XDP_PASS), "{what}");
                        assert_eq!(after, frame, "{what}");
                    }
                }
                // What is no datagram of the application's is not for it.
                let asked = request(&sender, &ends, 0);
                assert_eq!(why(&mut receiver, &there, &asked, (ifindex, 0)).1, XDP_PASS, "{what}");
                // Nor what is not believed.
                let mut forged = frame.clone();
                forged[14 + 28 + bytes] ^= 0xff;
                if ends.local.is_ipv4() {
                    assert_eq!(why(&mut receiver, &there, &forged, (ifindex, 0)).1, XDP_DROP, "{what}");
                }
                receiver.end_ring(&there).expect("the end");
                let frame = framed(&sender, &ends, &payload);
                assert_eq!(why(&mut receiver, &there, &frame, (ifindex, 0)).1, XDP_PASS, "{what}");
            }
        }
    });
}

/// A queue has one ring at a time; it is free when nobody has it any more, and not before.
#[test]
fn a_queue_has_one_ring() {
    if !root("a_queue_has_one_ring") || !can_lend("a_queue_has_one_ring") {
        return;
    }
    with_two_queues(|ifindex| {
        let mut joints = joints();
        let sessions =
            [6000, 6001, 6002].map(|port| ends(&format!("10.0.0.2:{port}"), &format!("10.0.0.1:{port}")));
        for (ends, queue) in sessions.iter().zip([0, 0, 1]) {
            open(&mut joints, *ends, &[]);
            let nothing = joints.lend_ring(ends).err().expect("no place").to_string();
            assert!(nothing.contains("nothing has come yet"), "{nothing}");
            let mut sender = self::joints();
            open(&mut sender, other_side(ends), &[]);
            let frame = framed(&sender, &other_side(ends), b"here");
            joints.run_at((ifindex, queue), &frame).expect("a run");
        }
        let first = joints.lend_ring(&sessions[0]).expect("a ring");
        let refused = joints.lend_ring(&sessions[1]).err().expect("one has it").to_string();
        assert!(refused.contains("has a ring already"), "{refused}");
        let third = joints.lend_ring(&sessions[2]).expect("of another queue");
        joints.end_ring(&sessions[0]).expect("the end");
        assert!(joints.lend_ring(&sessions[1]).is_err(), "somebody has its descriptors");
        drop(first);
        // The kernel lets go of it a little later.
        wait_for("a queue that is free", || joints.lend_ring(&sessions[1]).is_ok());
        joints.close(&sessions[2]).expect("closed");
        drop(third);
        joints.close(&sessions[1]).expect("closed");
        open(&mut joints, sessions[2], &[]);
        assert_eq!(joints.came_by(&sessions[2]).expect("a place"), None, "of the one before");
    });
}

/// Through the kernel, into the memory, and out of it: in order, all of it, around and around; what had no room is counted.
#[test]
fn an_application_reads_its_ring() {
    if !root("an_application_reads_its_ring") || !can_lend("an_application_reads_its_ring") {
        return;
    }
    for family in [4, 6] {
        let network = Network::new(&format!("rings{family}"));
        let hosts = [(&network.publisher, "eth"), (&network.relay, "west")];
        let at = |host: u8, port: u16| SocketAddr::new(address(family, 1, host), port);
        let ends = Ends { local: at(2, 7000), remote: at(1, 6000) };
        let there = other_side(&ends);
        let [mut near, mut far] =
            [(hosts[0], ends), (hosts[1], there)].map(|((namespace, interface), ends)| {
                let mut joints = joints();
                open(&mut joints, ends, &["number"]);
                let index = ifindex(namespace, interface);
                inside(namespace, || joints.attach(index, Mode::Auto).expect("attached"));
                joints
            });
        let (from, to) = (socket(&network.publisher, ends.local), socket(&network.relay, ends.remote));
        from.connect(ends.remote).expect("connected");
        let message = |number: u32| [&number.to_be_bytes()[..], &vec![7; number as usize % 1400]].concat();
        let send = |number: u32| assert!(from.send(&message(number)).is_ok());
        send(0);
        let mut buffer = [0; 2048];
        assert_eq!(to.recv(&mut buffer).expect("by the socket"), 4);
        let lent = inside(&network.relay, || far.lend_ring(&there).expect("a ring"));
        assert_eq!(lent.frames, FRAMES);
        let mut reader = Reader::new(lent.descriptors, lent.frames).expect("a reader");
        assert_eq!(reader.next(&mut buffer), None);
        let mut take = |reader: &mut Reader, number: u32| {
            let got = wait_for("a message", || reader.next(&mut buffer));
            assert_eq!(buffer[..got - FRAME_BYTES], message(number), "{number}");
        };
        for number in 0..3 * FRAMES {
            send(number);
            take(&mut reader, number);
        }
        let mut sent = u64::from(3 * FRAMES);
        for number in 0..FRAMES + 100 {
            send(number);
            sent += 1;
            // The interface has room for less.
            if number % 50 == 49 {
                wait_until("what was sent", || count(&mut far, &there, Reason::InRing), |come| *come >= sent);
            }
        }
        (0..FRAMES).for_each(|number| take(&mut reader, number));
        wait_until("what was sent", || count(&mut far, &there, Reason::InRing), |come| *come >= sent);
        // The kernel finds out that there is no room after the program has counted the packet.
        wait_until("what had no room", || count(&mut far, &there, Reason::RingFull), |full| *full >= 100);
        assert_eq!(count(&mut far, &there, Reason::RingFull), 100);
        send(1);
        take(&mut reader, 1);
        // By the socket again; what was counted stays known.
        far.end_ring(&there).expect("the end");
        send(2);
        assert_eq!(to.recv(&mut [0; 2048]).expect("by the socket"), 6);
        assert_eq!(count(&mut far, &there, Reason::RingFull), 100);
        assert_eq!(count(&mut near, &ends, Reason::Sent), sent + 3);
        assert_eq!(count(&mut far, &there, Reason::Delivered), 2);
    }
}

/// Descriptors of something else are none of a ring.
#[test]
fn what_is_no_ring_is_refused() {
    let null = || std::fs::File::open("/dev/null").expect("a file").into();
    for frames in [0, 1, 3, 512, u32::MAX] {
        assert!(Reader::new([null(), null()], frames).is_err(), "{frames}");
    }
}
