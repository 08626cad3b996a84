//! Exchanges messages between two confined processes while packets on the path are lost, duplicated and forged.
//!
//! Tier: test-all, since it is no part of the product.

#![allow(clippy::unwrap_used)]

use std::{
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::net::UnixDatagram,
    },
    path::Path,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use millrace_base::control;
use millrace_study_usrsctp::confine::Hello;
use millrace_testkit::wait_for;

const LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libusrsctp.so.2";

fn is_there(test: &str) -> bool {
    let is_there = Path::new(LIBRARY).exists();
    if !is_there {
        println!("SKIP {test}: {LIBRARY} is not installed (package libusrsctp2)");
    }
    is_there
}

/// A confined process with its sockets.
struct SctpProcess {
    child: Child,
    control: control::ControlEnd,
    application: OwnedFd,
}

impl SctpProcess {
    fn start(wire: impl AsFd) -> Self {
        let (control, theirs) = control::ControlEnd::pair().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace-study-usrsctp"));
        command.stdout(Stdio::null());
        let child = command.stdin(theirs.as_fd().try_clone_to_owned().unwrap()).spawn().unwrap();
        drop((theirs, command));
        let hello = wait_for("hello", || match control.receive::<Hello>() {
            control::ControlReceived::Record(hello, _) => Some(hello),
            control::ControlReceived::Nothing => None,
            other => panic!("{other:?}"),
        });
        assert!(matches!(hello, Hello::Yes { .. }), "{hello:?}");
        let (own, other) = control::ControlEnd::pair().unwrap();
        let serve = serde_json::json!({ "packet_bytes": 1200, "parameters": { "rto_min_ms": 20 } });
        control.send(&serve, &[wire.as_fd(), other.as_fd()]).unwrap();
        Self { child, control, application: own.as_fd().try_clone_to_owned().unwrap() }
    }

    fn try_send(&self, bytes: &[u8]) -> bool {
        use nix::sys::socket::{MsgFlags, send};
        send(self.application.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL).is_ok()
    }

    fn try_receive(&self) -> Option<Vec<u8>> {
        use nix::sys::socket::{MsgFlags, recv};
        let mut buffer = vec![0; 2048];
        let got = recv(self.application.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT).ok()?;
        buffer.truncate(got);
        Some(buffer)
    }
}

impl Drop for SctpProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Forwards a packet or drops it, and sometimes adds forged ones. Some of the forged ones look genuine.
fn pass(from: &UnixDatagram, to: &UnixDatagram, random: &mut fastrand::Rng) -> bool {
    let mut packet = [0; 2048];
    let Ok(got) = from.recv(&mut packet) else { return false };
    let packet = &mut packet[..got];
    if random.u8(..) < 12 {
        return true;
    }
    let _ = to.send(packet);
    if random.u8(..) < 60 {
        let mut noise = vec![0; random.usize(1..1400)];
        random.fill(&mut noise);
        let _ = to.send(&noise);
        // Ports and verification tag are genuine. One bit is flipped, so the checksum is wrong.
        let at = random.usize(..packet.len());
        packet[at] ^= 1 << random.u8(..8);
        let _ = to.send(packet);
        let _ = to.send(&packet[..random.usize(1..=packet.len())]);
    }
    true
}

#[test]
fn arbitrary_packets_end_no_sctp_process() {
    const SENT: u32 = 400;
    if !is_there("arbitrary_packets_end_no_sctp_process") {
        return;
    }
    let [(near_wire, near_end), (far_wire, far_end)] = [(); 2].map(|()| UnixDatagram::pair().unwrap());
    for socket in [&near_wire, &near_end, &far_wire, &far_end] {
        socket.set_nonblocking(true).unwrap();
    }
    let mut both = [SctpProcess::start(&near_wire), SctpProcess::start(&far_wire)];
    drop((near_wire, far_wire));
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = fastrand::Rng::with_seed(7);
            while !is_over.load(Ordering::Relaxed) {
                let passed = [pass(&near_end, &far_end, &mut random), pass(&far_end, &near_end, &mut random)];
                if passed == [false; 2] {
                    thread::sleep(std::time::Duration::from_micros(200)); // exact: pause between checks for packets
                }
            }
        });
        let number = |number: u32| [&number.to_be_bytes()[..], &[number as u8; 900]].concat();
        let mut sent = [0_u32; 2];
        let mut got = [0_u32; 2];
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait_for("all of them", || {
                for (at, process) in both.iter().enumerate() {
                    while sent[at] < SENT && process.try_send(&number(sent[at])) {
                        sent[at] += 1;
                    }
                    while let Some(bytes) = process.try_receive() {
                        assert!(bytes == number(got[at]), "message {} at {at}", got[at]);
                        got[at] += 1;
                    }
                }
                got == [SENT; 2]
            });
        }));
        is_over.store(true, Ordering::Relaxed);
        done.unwrap();
    });
    for process in &mut both {
        assert!(matches!(process.child.try_wait(), Ok(None)));
        // The process must have sent nothing but its periodic messages that it still works.
        loop {
            match process.control.receive::<serde_json::Value>() {
                control::ControlReceived::Record(word, _) => {
                    assert_eq!(word, serde_json::json!({ "tell": "alive" }))
                }
                control::ControlReceived::Nothing => break,
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn sctp_process_ends_when_its_control_socket_closes() {
    if !is_there("sctp_process_ends_when_its_control_socket_closes") {
        return;
    }
    let (wire, _end) = UnixDatagram::pair().unwrap();
    let mut process = SctpProcess::start(&wire);
    let (other, _) = control::ControlEnd::pair().unwrap();
    drop(std::mem::replace(&mut process.control, other));
    wait_for("its end", || process.child.try_wait().unwrap());
}
