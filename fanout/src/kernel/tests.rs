//! Tests of the BPF program with BPF_PROG_TEST_RUN, without a network interface: what it does with each kind of packet.

use libbpf_rs::{MapCore as _, MapFlags, ProgramInput};
use nix::sched::{CloneFlags, unshare};

use super::*;

const PASS_ON: u32 = -1i32 as u32;
const DROP: u32 = 2;
const SSRC: u32 = 0x0a0b_0c0d;

const RELAY: &str = "10.0.0.1:5004";
const RTCP: &str = "10.0.0.1:5005";
const SENDER: &str = "10.0.0.2:6000";
const SENDER_RTCP: &str = "10.0.0.2:6001";
const FAR: u64 = u64::MAX;

fn at(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

fn stream(ssrc: Ssrc, max_receivers: u32) -> StreamConfig {
    StreamConfig {
        listen: at(RELAY),
        listen_rtcp_port: Some(5005),
        sender: at(SENDER),
        sender_rtcp_port: Some(6001),
        ssrc,
        max_receivers,
    }
}

/// Loads the program in a network namespace of its own, which has no routes.
fn fanout(config: Config) -> Fanout {
    unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
    Fanout::load(&config).unwrap_or_else(|error| panic!("{error}"))
}

/// Loads one stream over IPv4, and one over IPv6.
fn with_ssrc(ssrc: Ssrc) -> Fanout {
    let other = StreamConfig {
        listen: at("[2001:db8::1]:5004"),
        listen_rtcp_port: None,
        sender: at("[2001:db8::2]:6000"),
        sender_rtcp_port: None,
        ssrc: Ssrc::Any,
        max_receivers: 1,
    };
    fanout(Config { streams: vec![stream(ssrc, 3), other], ..Config::default() })
}

fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("SKIP: needs root");
    }
    root
}

fn media(ssrc: u32, sequence: u16) -> Vec<u8> {
    [&[0x80, 96][..], &sequence.to_be_bytes(), &[0, 0, 0, 9], &ssrc.to_be_bytes(), b"payload"].concat()
}

/// Returns a sender report with `middle` in the middle of its NTP time.
fn report(ssrc: u32, middle: u32) -> Vec<u8> {
    [&[0x80, 200, 0, 6][..], &ssrc.to_be_bytes(), &[0, 0], &middle.to_be_bytes(), &[0; 14]].concat()
}

fn udp(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let len = payload.len() as u16 + 8;
    [&from.port().to_be_bytes()[..], &to.port().to_be_bytes(), &len.to_be_bytes(), &[0xab, 0xcd], payload]
        .concat()
}

/// Returns a frame without valid checksums, which the program does not check.
fn frame(from: &str, to: &str, payload: &[u8]) -> Vec<u8> {
    let from = at(from);
    let to = at(to);
    let udp = udp(from, to, payload);
    let len = udp.len() as u16;
    match (from.ip(), to.ip()) {
        (std::net::IpAddr::V4(from), std::net::IpAddr::V4(to)) => {
            let head = [0x45, 0, ((len + 20) >> 8) as u8, (len + 20) as u8, 0, 0, 0x40, 0, 64, 17, 0, 0];
            ethernet(0x0800, &[&head[..], &from.octets(), &to.octets(), &udp].concat())
        }
        (std::net::IpAddr::V6(from), std::net::IpAddr::V6(to)) => {
            let head = [0x60, 0, 0, 0, (len >> 8) as u8, len as u8, 17, 64];
            ethernet(0x86dd, &[&head[..], &from.octets(), &to.octets(), &udp].concat())
        }
        _ => panic!("both of one family"),
    }
}

fn ethernet(kind: u16, rest: &[u8]) -> Vec<u8> {
    [&[2; 12][..], &kind.to_be_bytes(), rest].concat()
}

impl Fanout {
    /// Runs the program on one frame. Returns its TC action, and what it did with the frame.
    fn run(&self, frame: &[u8], gso_size: u32) -> (u32, Outcome) {
        let before = self.counted();
        // The field gso_size of struct __sk_buff is at offset 176.
        let mut context = vec![0; 192];
        context[176..180].copy_from_slice(&gso_size.to_ne_bytes());
        let input =
            ProgramInput { data_in: Some(frame), context_in: Some(&mut context), ..ProgramInput::default() };
        let verdict =
            self.object().program("fanout_ingress").expect("the program").test_run(input).expect("a run");
        let after = self.counted();
        let is_new = |outcome: &Outcome| after.packets(*outcome) > before.packets(*outcome);
        let counted: Vec<_> = Outcome::ALL.into_iter().filter(is_new).collect();
        assert_eq!(counted.len(), 1, "{counted:?}");
        (verdict.return_value, counted[0])
    }

    fn counted(&self) -> FanoutCounters {
        // exact: the BPF program counts packets only during BPF_PROG_TEST_RUN, which has returned
        self.counters().expect("counters")
    }
}

#[test]
fn every_packet_has_one_outcome_and_one_verdict() {
    if !is_root() {
        return;
    }
    let fanout = with_ssrc(Ssrc::Is(SSRC));
    let good = frame(SENDER, RELAY, &media(SSRC, 1));
    let with = |at: usize, value: u8| {
        let mut frame = good.clone();
        frame[at] = value;
        frame
    };
    let options = {
        let mut frame = good.clone();
        frame[14] = 0x46;
        let len = frame.len() as u16 - 14 + 4;
        frame[16..18].copy_from_slice(&len.to_be_bytes());
        frame.splice(34..34, [1, 1, 1, 0]);
        frame
    };
    let six = |from: &str| frame(from, "[2001:db8::1]:5004", &media(1, 1));
    for (description, frame, gso_size, outcome, verdict) in [
        ("RTP of the sender", good.clone(), 0, Outcome::Forwarded, DROP),
        ("its RTCP", frame(SENDER, RELAY, &report(SSRC, 1)), 0, Outcome::Forwarded, DROP),
        (
            "its RTCP by ports of its own",
            frame(SENDER_RTCP, RTCP, &report(SSRC, 1)),
            0,
            Outcome::Forwarded,
            DROP,
        ),
        ("RTP of 12 bytes", frame(SENDER, RELAY, &media(SSRC, 1)[..12]), 0, Outcome::Forwarded, DROP),
        ("RTP over IPv6", six("[2001:db8::2]:6000"), 0, Outcome::Forwarded, DROP),
        ("another SSRC", frame(SENDER, RELAY, &media(7, 1)), 0, Outcome::OtherSsrc, DROP),
        ("RTCP of another SSRC", frame(SENDER, RELAY, &report(7, 1)), 0, Outcome::OtherSsrc, DROP),
        ("RTP of 11 bytes", frame(SENDER, RELAY, &media(SSRC, 1)[..11]), 0, Outcome::NotRtp, DROP),
        ("RTCP of 7 bytes", frame(SENDER, RELAY, &report(SSRC, 1)[..7]), 0, Outcome::NotRtp, DROP),
        ("no bytes", frame(SENDER, RELAY, &[]), 0, Outcome::NotRtp, DROP),
        ("STUN of the sender", frame(SENDER, RELAY, &[0; 20]), 0, Outcome::NotRtp, DROP),
        (
            "another port of the sender's host",
            frame("10.0.0.2:6002", RELAY, &media(SSRC, 1)),
            0,
            Outcome::NotSender,
            PASS_ON,
        ),
        ("another host", frame("10.0.0.3:6000", RELAY, &media(SSRC, 1)), 0, Outcome::NotSender, PASS_ON),
        ("another host, IPv6", six("[2001:db8::3]:6000"), 0, Outcome::NotSender, PASS_ON),
        ("another port here", frame(SENDER, "10.0.0.1:5006", &media(SSRC, 1)), 0, Outcome::Other, PASS_ON),
        ("another address here", frame(SENDER, "10.0.0.9:5004", &media(SSRC, 1)), 0, Outcome::Other, PASS_ON),
        ("several in one", good.clone(), 100, Outcome::SuperPacket, PASS_ON),
        ("IPv4 options", options, 0, Outcome::OddHeaders, PASS_ON),
        ("TCP", with(23, 6), 0, Outcome::NotUdp, PASS_ON),
        ("ARP", with(13, 6), 0, Outcome::NotUdp, PASS_ON),
        ("a fragment", with(20, 0x20), 0, Outcome::Fragment, PASS_ON),
        ("a header of 16 bytes", with(14, 0x44), 0, Outcome::Malformed, PASS_ON),
        ("cut", good[..40].to_vec(), 0, Outcome::Malformed, PASS_ON),
        ("UDP longer than the frame", with(39, 200), 0, Outcome::Malformed, PASS_ON),
        ("UDP shorter than its header", with(39, 7), 0, Outcome::Malformed, PASS_ON),
    ] {
        assert_eq!(fanout.run(&frame, gso_size), (verdict, outcome), "{description}");
    }
    let stream = &fanout.streams()[0];
    let media = stream.media();
    assert_eq!((media.packets, media.ssrc), (4, Some(SSRC)), "what was fanned out");
    assert!(media.last_ns > 0);
}

#[test]
fn only_the_first_ssrc_of_a_stream_is_forwarded() {
    if !is_root() {
        return;
    }
    let fanout = with_ssrc(Ssrc::First);
    let run = |ssrc| fanout.run(&frame(SENDER, RELAY, &media(ssrc, 1)), 0).1;
    assert_eq!([run(5), run(6), run(5)], [Outcome::Forwarded, Outcome::OtherSsrc, Outcome::Forwarded]);
    let stream = &fanout.streams()[0];
    assert_eq!(stream.media().ssrc, Some(5));
    assert!(stream.takes(5) && !stream.takes(6), "userspace judges the same");
    stream.forget_ssrc();
    assert_eq!([run(6), run(5)], [Outcome::Forwarded, Outcome::OtherSsrc]);
    let any = with_ssrc(Ssrc::Any);
    for ssrc in [0, 1, u32::MAX] {
        assert_eq!(any.run(&frame(SENDER, RELAY, &media(ssrc, 1)), 0).1, Outcome::Forwarded);
    }
}

#[test]
fn latest_8_rtcp_sender_reports_of_a_stream_are_stored() {
    if !is_root() {
        return;
    }
    let fanout = with_ssrc(Ssrc::Any);
    let stream = &fanout.streams()[0];
    assert_eq!(stream.reports(), []);
    for middle in 1..=10 {
        fanout.run(&frame(SENDER, RELAY, &report(SSRC, middle)), 0);
        fanout.run(&frame(SENDER, RELAY, &media(SSRC, 1)), 0);
    }
    let middles: Vec<_> = stream.reports().iter().map(|report| report.ntp_middle).collect();
    assert_eq!(middles, [10, 9, 8, 7, 6, 5, 4, 3]);
}

/// The copies find no route, because there is no interface. The tests in network namespaces have routes.
#[test]
fn receivers_are_added_and_removed_in_the_kernel() {
    if !is_root() {
        return;
    }
    let fanout = with_ssrc(Ssrc::Any);
    let stream = &fanout.streams()[0];
    let cap = Cap { bits_per_s: 1_000_000, burst_bytes: 10_000 };
    let add = |port: u16| stream.add(SocketAddr::new([203, 0, 113, 1].into(), port), cap, FAR);
    let copies = |outcome| fanout.counted().copies(outcome);
    let run = || fanout.run(&frame(SENDER, RELAY, &media(SSRC, 1)), 0);
    let mut all: Vec<_> = (1..=3).map(|port| add(port).expect("room")).collect();
    assert!(matches!(add(4), Err(Error::Full { .. })));
    assert_eq!(run(), (DROP, Outcome::Forwarded));
    assert_eq!(copies(CopyOutcome::NoRoute), 3);
    all.remove(1);
    run();
    assert_eq!(copies(CopyOutcome::NoRoute), 5);
    all.push(add(5).expect("the place is free again"));
    assert_eq!(all[2].number(), 2);
    run();
    assert_eq!(copies(CopyOutcome::NoRoute), 8);
    all[0].renew(1);
    run();
    assert_eq!((copies(CopyOutcome::Ended), copies(CopyOutcome::NoRoute)), (1, 10));
    assert_eq!((all[0].copies(CopyOutcome::Ended), all[2].copies(CopyOutcome::NoRoute)), (1, 2), "its own");
    drop(all);
    run();
    assert_eq!(copies(CopyOutcome::NoRoute), 10);
    let wrong = stream.add(at("[2001:db8::9]:1"), cap, FAR);
    assert!(matches!(wrong, Err(Error::Config(_))));
    assert!(add(6).is_ok(), "it took no place");
}

#[test]
fn userspace_fan_out_has_the_same_rate_limit_as_the_kernel() {
    if !is_root() {
        return;
    }
    let fanout = with_ssrc(Ssrc::Any);
    // At 8 Mbit/s the bucket regains one byte each microsecond.
    let cap = Cap { bits_per_s: 8_000_000, burst_bytes: 3000 };
    let receiver = fanout.streams()[0].add(at("203.0.113.1:1"), cap, 5_000_000_000).expect("room");
    let mut now = 1_000_000_000;
    let admit = |now| receiver.admit(1000, 972, now);
    let all: Vec<_> = (0..4).map(|_| admit(now)).collect();
    assert_eq!(all, [CopyOutcome::Sent, CopyOutcome::Sent, CopyOutcome::Sent, CopyOutcome::Rate]);
    now += 999_000;
    assert_eq!(admit(now), CopyOutcome::Rate);
    now += 1000;
    assert_eq!(admit(now), CopyOutcome::Sent);
    assert_eq!(admit(5_000_000_000), CopyOutcome::Ended);
    assert_eq!(receiver.sent(), (4, 4 * 972));
    assert_eq!((receiver.copies(CopyOutcome::Rate), receiver.copies(CopyOutcome::Ended)), (2, 1));
}

#[test]
fn every_second_packet_of_the_selected_stream_is_traced() {
    if !is_root() {
        return;
    }
    let fanout = with_ssrc(Ssrc::Is(SSRC));
    let stream = &fanout.streams()[0];
    let _receiver =
        stream.add(at("203.0.113.1:1"), Cap { bits_per_s: 1, burst_bytes: 1 }, FAR).expect("room");
    let events = || {
        let mut events = Vec::new();
        assert_eq!(fanout.drain_events(|event| events.push((event.sequence, event.what))), 0);
        events
    };
    let run = |ssrc, sequence| fanout.run(&frame(SENDER, RELAY, &media(ssrc, sequence)), 0);
    run(SSRC, 4);
    assert_eq!(events(), [], "nobody watches");
    let every = std::num::NonZero::new(2).expect("not 0");
    let tracing =
        FanoutTraceSelection { every, stream: std::num::NonZero::new(stream.number()), receiver: None };
    fanout.set_tracing(Some(tracing));
    for sequence in 3..7 {
        run(SSRC, sequence);
    }
    run(7, 8);
    let copy = CopyEventKind::Copy(1, CopyOutcome::NoRoute);
    assert_eq!(events(), [(4, copy), (6, copy), (8, CopyEventKind::Packet(Outcome::OtherSsrc))]);
    fanout.set_tracing(Some(FanoutTraceSelection { stream: std::num::NonZero::new(2), ..tracing }));
    run(SSRC, 2);
    fanout.set_tracing(None);
    run(SSRC, 2);
    assert_eq!(events(), []);
}

#[test]
fn fan_out_run_interrupting_another_leaves_its_packet_to_userspace() {
    if !is_root() {
        return;
    }
    let fanout = with_ssrc(Ssrc::Any);
    let set_busy = |busy: u64| {
        let mut object = fanout.object();
        let works = object.map("works").expect("a map");
        let key = 0u32.to_ne_bytes();
        let mut areas = works.lookup_percpu(&key, MapFlags::ANY).expect("read").expect("an area");
        areas.iter_mut().for_each(|area| area[..8].copy_from_slice(&busy.to_ne_bytes()));
        works.update_percpu(&key, &areas, MapFlags::ANY).expect("written");
    };
    let good = frame(SENDER, RELAY, &media(SSRC, 1));
    set_busy(1);
    assert_eq!(fanout.run(&good, 0), (PASS_ON, Outcome::Busy));
    set_busy(0);
    assert_eq!(fanout.run(&good, 0), (DROP, Outcome::Forwarded));
}

#[test]
fn stream_with_mixed_ip_versions_or_unspecified_address_is_refused() {
    let wrong = [
        StreamConfig { sender: at("[2001:db8::2]:6000"), ..stream(Ssrc::Any, 1) },
        StreamConfig { listen: at("0.0.0.0:5004"), ..stream(Ssrc::Any, 1) },
    ];
    for stream in wrong {
        let loaded = Fanout::load(&Config { streams: vec![stream], ..Config::default() });
        assert!(matches!(loaded, Err(Error::Config(_))));
    }
}
