//! Runs the probe's programs by BPF_PROG_TEST_RUN, to test parser, size filter and counters.

use libbpf_rs::ProgramInput;

use super::*;

const ETH_IPV4: u16 = 0x0800;
const ETH_IPV6: u16 = 0x86dd;
const ETH_ARP: u16 = 0x0806;
const UDP: u8 = 17;
const TCP: u8 = 6;
const HOP_BY_HOP: u8 = 0;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;

fn ethernet(tags: &[(u16, u16)], protocol: u16, rest: &[u8]) -> Vec<u8> {
    let mut frame = vec![2; 12];
    for (kind, tci) in tags {
        frame.extend(kind.to_be_bytes());
        frame.extend(tci.to_be_bytes());
    }
    frame.extend(protocol.to_be_bytes());
    frame.extend(rest);
    frame
}

fn ipv4(protocol: u8, fragment_bits: u16, options: usize, rest: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45 + options as u8, 0];
    packet.extend((20 + options as u16 * 4 + rest.len() as u16).to_be_bytes());
    packet.extend([0, 1]);
    packet.extend(fragment_bits.to_be_bytes());
    packet.extend([64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    packet.extend(vec![1; options * 4]);
    packet.extend(rest);
    packet
}

fn ipv6(next: u8, rest: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((rest.len() as u16).to_be_bytes());
    packet.extend([next, 64]);
    packet.extend("fd00::1".parse::<Ipv6Addr>().expect("address").octets());
    packet.extend("fd00::2".parse::<Ipv6Addr>().expect("address").octets());
    packet.extend(rest);
    packet
}

fn extension(next: u8, length: u8, rest: &[u8]) -> Vec<u8> {
    let mut header = vec![next, length];
    header.extend(vec![0; 6 + usize::from(length) * 8]);
    header.extend(rest);
    header
}

fn udp(payload: usize) -> Vec<u8> {
    let mut datagram = Vec::new();
    datagram.extend(1111u16.to_be_bytes());
    datagram.extend(4443u16.to_be_bytes());
    datagram.extend((payload as u16 + 8).to_be_bytes());
    datagram.extend([0, 0]);
    datagram.extend(vec![7; payload]);
    datagram
}

/// Builds a `struct __sk_buff` with `gso_segs` and `gso_size`, which make BPF_PROG_TEST_RUN treat a frame as a
/// super-packet.
fn context(gso_size: u32) -> [u8; 192] {
    const GSO_SEGS: usize = 164;
    const GSO_SIZE: usize = 176;
    let mut context = [0; 192];
    context[GSO_SEGS..GSO_SEGS + 4].copy_from_slice(&u32::from(gso_size > 0).to_ne_bytes());
    context[GSO_SIZE..GSO_SIZE + 4].copy_from_slice(&gso_size.to_ne_bytes());
    context
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WantedSample {
    /// A sample of an IPv4 packet, with this UDP payload in bytes and this VLAN ID.
    V4(u32, Option<u16>),
    V6(u32, Option<u16>),
    Small,
    NotUdp,
    Fragment,
    Malformed,
}

#[test]
fn packet_probe_samples_udp_and_counts_small_fragmented_and_malformed() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP packet_probe_samples_udp_and_counts_small_fragmented_and_malformed: needs root");
        return;
    }
    let v4 = |rest: &[u8]| ethernet(&[], ETH_IPV4, rest);
    let v6 = |rest: &[u8]| ethernet(&[], ETH_IPV6, rest);
    let hop_by_hop = |rest: &[u8]| v6(&ipv6(HOP_BY_HOP, &extension(UDP, 1, rest)));
    let five_options =
        (0..4).fold(extension(UDP, 0, &udp(1200)), |rest, _| extension(DESTINATION_OPTIONS, 0, &rest));
    let cases = [
        ("IPv4", v4(&ipv4(UDP, 0, 0, &udp(1200))), 0, WantedSample::V4(1200, None)),
        ("IPv4, options", v4(&ipv4(UDP, 0, 10, &udp(1200))), 0, WantedSample::V4(1200, None)),
        ("IPv4, don't fragment", v4(&ipv4(UDP, 0x4000, 0, &udp(1200))), 0, WantedSample::V4(1200, None)),
        ("IPv4, at the limit", v4(&ipv4(UDP, 0, 0, &udp(1000))), 0, WantedSample::V4(1000, None)),
        ("IPv4, under the limit", v4(&ipv4(UDP, 0, 0, &udp(999))), 0, WantedSample::Small),
        ("IPv4, super-packet", v4(&ipv4(UDP, 0, 0, &udp(2500))), 1200, WantedSample::V4(2500, None)),
        ("IPv4, super-packet of small ones", v4(&ipv4(UDP, 0, 0, &udp(2500))), 500, WantedSample::Small),
        ("IPv4, TCP", v4(&ipv4(TCP, 0, 0, &udp(1200))), 0, WantedSample::NotUdp),
        ("IPv4, first fragment", v4(&ipv4(UDP, 0x2000, 0, &udp(1200))), 0, WantedSample::Fragment),
        ("IPv4, later fragment", v4(&ipv4(UDP, 0x0010, 0, &udp(1200))), 0, WantedSample::Fragment),
        (
            "IPv4, header length 4",
            v4(&[&[0x41], &ipv4(UDP, 0, 0, &udp(1200))[1..]].concat()),
            0,
            WantedSample::Malformed,
        ),
        ("IPv4, cut in the UDP header", v4(&ipv4(UDP, 0, 0, &udp(0)[..7])), 0, WantedSample::Malformed),
        ("IPv4, empty datagram", v4(&ipv4(UDP, 0, 0, &udp(0))), 0, WantedSample::Small),
        ("IPv6", v6(&ipv6(UDP, &udp(1200))), 0, WantedSample::V6(1200, None)),
        ("IPv6, super-packet", v6(&ipv6(UDP, &udp(2400))), 1200, WantedSample::V6(2400, None)),
        ("IPv6, hop-by-hop", hop_by_hop(&udp(1200)), 0, WantedSample::V6(1200, None)),
        ("IPv6, fragment", v6(&ipv6(FRAGMENT, &extension(UDP, 0, &udp(1200)))), 0, WantedSample::Fragment),
        ("IPv6, five extensions", v6(&ipv6(DESTINATION_OPTIONS, &five_options)), 0, WantedSample::Malformed),
        ("IPv6, cut in an extension", v6(&ipv6(HOP_BY_HOP, &[UDP])), 0, WantedSample::Malformed),
        ("IPv6, TCP", v6(&ipv6(TCP, &udp(1200))), 0, WantedSample::NotUdp),
        ("ARP", ethernet(&[], ETH_ARP, &[0; 46]), 0, WantedSample::NotUdp),
        (
            // BPF_PROG_TEST_RUN leaves the outermost tag in the frame. The kernel removes it only on real reception.
            "802.1Q",
            ethernet(&[(0x8100, 0xe007)], ETH_IPV4, &ipv4(UDP, 0, 0, &udp(1200))),
            0,
            WantedSample::V4(1200, Some(7)),
        ),
        (
            "QinQ",
            ethernet(&[(0x88a8, 9), (0x8100, 7)], ETH_IPV6, &ipv6(UDP, &udp(1200))),
            0,
            WantedSample::V6(1200, Some(9)),
        ),
        (
            "three tags",
            ethernet(&[(0x88a8, 9), (0x8100, 7), (0x8100, 8)], ETH_IPV4, &ipv4(UDP, 0, 0, &udp(1200))),
            0,
            WantedSample::NotUdp,
        ),
    ];
    let mut probe =
        PacketProbe::load(&Config { min_payload_bytes: 1000, ..Config::default() }).expect("the probe loads");
    for (program, hook) in [("probe_ingress", KernelHook::Ingress), ("probe_egress", KernelHook::Egress)] {
        for (description, frame, gso_size, want) in &cases {
            let got = run(&mut probe, program, hook, frame, *gso_size);
            assert_eq!(got, *want, "{program}: {description}");
        }
    }
}

fn counted(probe: &mut PacketProbe) -> ProbeCounters {
    // exact: the BPF program counts packets only during BPF_PROG_TEST_RUN, which has returned
    probe.counters().expect("counters")
}

/// Runs a program on one packet. Returns the sample that the program recorded, or the reason that it counted instead.
fn run(
    probe: &mut PacketProbe,
    program: &'static str,
    hook: KernelHook,
    frame: &[u8],
    gso_size: u32,
) -> WantedSample {
    const PASS_ON: u32 = -1i32 as u32;
    let before = counted(probe);
    let mut context = context(gso_size);
    let input =
        ProgramInput { data_in: Some(frame), context_in: Some(&mut context), ..ProgramInput::default() };
    let output = probe.object.program(program).expect(program).test_run(input).expect("test run");
    assert_eq!(output.return_value, PASS_ON);
    let after = counted(probe);
    let samples = probe.read().expect("samples");
    let changed = ProbeCounters {
        sampled: after.sampled - before.sampled,
        ring_full: after.ring_full - before.ring_full,
        small: after.small - before.small,
        not_udp: after.not_udp - before.not_udp,
        fragment: after.fragment - before.fragment,
        malformed: after.malformed - before.malformed,
    };
    let none = ProbeCounters::default();
    match samples[..] {
        [] if changed == (ProbeCounters { small: 1, ..none }) => WantedSample::Small,
        [] if changed == (ProbeCounters { not_udp: 1, ..none }) => WantedSample::NotUdp,
        [] if changed == (ProbeCounters { fragment: 1, ..none }) => WantedSample::Fragment,
        [] if changed == (ProbeCounters { malformed: 1, ..none }) => WantedSample::Malformed,
        [sample] if changed == (ProbeCounters { sampled: 1, ..none }) => {
            assert_eq!(sample.hook, hook);
            assert_eq!(sample.segment_bytes, (gso_size > 0).then_some(gso_size));
            let (from, to) = match sample.source.is_ipv4() {
                true => ("10.0.0.1:1111", "10.0.0.2:4443"),
                false => ("[fd00::1]:1111", "[fd00::2]:4443"),
            };
            assert_eq!((sample.source.to_string(), sample.destination.to_string()), (from.into(), to.into()));
            match sample.source.is_ipv4() {
                true => WantedSample::V4(sample.payload_bytes, sample.vlan),
                false => WantedSample::V6(sample.payload_bytes, sample.vlan),
            }
        }
        _ => panic!("{changed:?} {samples:?}"),
    }
}

#[test]
fn samples_lost_in_a_full_ring_buffer_are_counted() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP samples_lost_in_a_full_ring_buffer_are_counted: needs root");
        return;
    }
    let mut probe = PacketProbe::load(&Config { capacity: 1, ..Config::default() }).expect("the probe loads");
    let frame = ethernet(&[], ETH_IPV4, &ipv4(UDP, 0, 0, &udp(100)));
    let input = ProgramInput { data_in: Some(&frame), repeat: 2000, ..ProgramInput::default() };
    probe.object.program("probe_ingress").expect("program").test_run(input).expect("test run");
    let counters = counted(&mut probe);
    let samples = probe.read().expect("samples");
    assert_eq!(counters.sampled + counters.ring_full, 2000);
    assert!(counters.ring_full > 0 && counters.sampled > 0, "{counters:?}");
    assert_eq!(samples.len() as u64, counters.sampled);
    assert!(samples.is_sorted_by_key(|sample| sample.time_ns));
}

#[test]
fn gso_super_packet_counts_as_its_segments() {
    let sample = |payload_bytes, segment_bytes| PacketSample {
        time_ns: 0,
        ifindex: 1,
        hook: KernelHook::Ingress,
        source: SocketAddr::from(([0; 4], 0)),
        destination: SocketAddr::from(([0; 4], 0)),
        payload_bytes,
        segment_bytes,
        vlan: None,
    };
    for (payload, segment, want) in [
        (1200, None, 1),
        (999, None, 0),
        (0, None, 0),
        (3600, Some(1200), 3),
        (3700, Some(1200), 3),
        (4600, Some(1200), 4),
        (4599, Some(1200), 3),
        (1100, Some(1200), 1),
        (1500, Some(500), 0),
    ] {
        assert_eq!(sample(payload, segment).packets(1000), want, "{payload} in {segment:?}");
    }
}
