//! Networking softirqs against work whose place is known. Needs root.

use std::net::UdpSocket;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use millrace_bpf::softirqs::Softirqs;

const PACKETS: usize = 2000;

/// A packet over loopback is received in a softirq on top of who sends it; somebody else's softirqs are not this
/// process'.
#[test]
fn softirqs_are_timed_and_told_apart() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP softirqs_are_timed_and_told_apart: needs root");
        return;
    }
    let mut other = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().expect("sleep runs");
    let mut of_other = Softirqs::attach(other.id()).expect("it attaches");
    let mut of_this = Softirqs::attach(std::process::id()).expect("it attaches");
    let start = Instant::now();
    send_to_self();
    let elapsed = start.elapsed();
    let (this, others) = (of_this.times().expect("times"), of_other.times().expect("times"));
    other.kill().and_then(|()| other.wait()).expect("sleep ends");
    assert!(this.own_ns > 0 && this.own_ns <= this.all_ns, "{this:?}");
    // An IP packet takes 200 ns at the very least, and they cannot take longer than it took.
    let least_ns = 200 * PACKETS as u64;
    assert!(this.own_ns >= least_ns, "{this:?}");
    assert!(Duration::from_nanos(this.own_ns) < elapsed, "{this:?} in {elapsed:?}");
    assert_eq!(others.own_ns, 0, "{others:?}");
    assert!(others.all_ns >= least_ns, "{others:?} saw the same ones");
}

fn send_to_self() {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.connect(socket.local_addr().expect("an address")).expect("connect");
    let mut buffer = [0; 100];
    for _ in 0..PACKETS {
        socket.send(&[0; 100]).expect("send");
        socket.recv(&mut buffer).expect("receive");
    }
}
