//! Compares softirq times with work whose process is known. Needs root.

use std::net::UdpSocket;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use millrace_lab_kernel::softirqs::{SoftirqTimes, Softirqs};
use millrace_testkit::wait_until;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

const PACKETS: usize = 2000;

/// The kernel receives loopback packets in a softirq that interrupts their sender. Softirqs that interrupt another
/// process must not count.
#[test]
fn softirqs_are_timed_in_total_and_per_process() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP softirqs_are_timed_in_total_and_per_process: needs root");
        return;
    }
    let mut other = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().expect("sleep runs");
    // A stopped process is on no CPU, so no softirq can interrupt it.
    let pid = Pid::from_raw(other.id().try_into().expect("a process ID"));
    kill(pid, Signal::SIGSTOP).expect("a signal");
    let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).expect("it stops");
    assert_eq!(stopped, WaitStatus::Stopped(pid, Signal::SIGSTOP));
    let mut of_other = Softirqs::attach(other.id()).expect("it attaches");
    let start = Instant::now();
    let mut of_this = Softirqs::attach(std::process::id()).expect("it attaches");
    // Each packet takes at least 200 ns in the IP stack.
    let least_ns = 200 * PACKETS as u64;
    let mut before = SoftirqTimes::default();
    // A busy machine may run softirqs in ksoftirqd instead. The test repeats until softirqs have interrupted this
    // process for long enough in one round.
    let round = || {
        send_to_self();
        let now = of_this.times().expect("times");
        let since = std::mem::replace(&mut before, now);
        (now, now.own_ns - since.own_ns)
    };
    let (this, _) = wait_until("a round of its own softirqs", round, |(_, own_ns)| *own_ns >= least_ns);
    let elapsed = start.elapsed();
    let later = of_this.times().expect("times");
    let others = of_other.times().expect("times");
    other.kill().and_then(|()| other.wait()).expect("sleep ends");
    assert!(this.own_ns > 0 && this.own_ns <= later.all_ns, "{this:?}, {later:?}");
    // Softirqs that interrupt this process cannot take longer than the whole measurement.
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
