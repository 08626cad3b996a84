//! Tests that BPF programs loaded while an observer runs get their own names. Needs root.

use std::net::UdpSocket;
use std::process::Command;
use std::time::{Duration, Instant};

use millrace_cost::report::Report;
use millrace_cost::{Config, Observer, POLL_INTERVAL};
use millrace_lab_kernel::probe::{self, PacketProbe};
use millrace_testkit::wait_for;
use nix::sched::{CloneFlags, unshare};

const PERIOD: Duration = Duration::from_millis(300);

/// Returns the network stack parts of a report that are named after BPF programs, with their numbers of samples.
fn programs(report: &Report) -> Vec<(&str, u64)> {
    let parts = report.cpus.iter().flat_map(|cpu| &cpu.events).flat_map(|event| &event.parts);
    parts
        .filter(|part| part.name.starts_with("bpf:"))
        .map(|part| (part.name.as_str(), part.samples))
        .collect()
}

/// Sends packets from a socket to itself over the interface `lo` until `until` accepts a report.
fn traffic(observer: &mut Observer, mut until: impl FnMut(&Report) -> bool) {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let to = socket.local_addr().expect("an address");
    wait_for("enough of it", || {
        let start = Instant::now();
        while start.elapsed() < PERIOD {
            // On a busy machine a poll takes many times as long as a hundred packets.
            let sending = Instant::now();
            while sending.elapsed() < POLL_INTERVAL / 4 {
                for _ in 0..100 {
                    socket.send_to(&[0; 1000], to).expect("sent");
                    socket.recv(&mut [0; 1000]).expect("received");
                }
            }
            observer.poll();
        }
        let report = observer.report().expect("a report");
        // The report may contain BPF programs of other processes, since an observer sees the whole machine.
        if until(&report) { Ok(()) } else { Err(format!("{:?}", programs(&report))) }
    });
}

#[test]
fn bpf_programs_loaded_later_get_their_names() {
    if !nix::unistd::geteuid().is_root() {
        return println!("SKIP bpf_programs_loaded_later_get_their_names: needs root");
    }
    unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
    assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().expect("ip").success());
    let mut config = Config::new().expect("the taxonomy parses");
    config.frequency_hz = 5000;
    let mut observer = Observer::start(config).expect("it starts");
    traffic(&mut observer, |_| true);
    // The loop runs several times, since a program that is loaded later may get the address of an earlier one.
    for _ in 0..3 {
        let mut probe = PacketProbe::load(&probe::Config::default()).expect("it loads");
        probe.attach(1).expect("it attaches");
        let mut samples = [("bpf:probe_ingress", 0), ("bpf:probe_egress", 0)];
        traffic(&mut observer, |report| {
            for (name, sum) in &mut samples {
                *sum += programs(report).iter().filter(|(is, _)| is == name).map(|(_, n)| n).sum::<u64>();
            }
            samples.iter().all(|(_, sum)| *sum > 5)
        });
        drop(probe);
    }
}
