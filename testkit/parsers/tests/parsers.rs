//! Compares the parsers of the BPF programs, compiled natively, with those in Rust on the same bytes. The inputs are
//! those that once made a fuzz target fail, a few that reach rarely executed code, and random bytes. A table lists what
//! each parser accepts.

#![allow(unsafe_code)]

use std::{
    fs,
    net::{IpAddr, Ipv6Addr},
    path::Path,
};

use millrace_base::networks::{levels, network_limit};
use millrace_moq::vi64;
use millrace_quic::webtransport::Binding;

#[path = "../../../fuzz/kernel_checks.rs"]
mod checks;

#[test]
fn bpf_and_rust_parsers_agree_on_every_fixture() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/fixtures");
    for (name, check) in checks::ALL {
        let dir = fixtures.join(name);
        let files: Vec<_> =
            fs::read_dir(&dir).expect("fixtures").map(|entry| entry.expect("a file").path()).collect();
        assert!(!files.is_empty(), "{} is empty", dir.display());
        for file in files {
            println!("{}", file.display());
            check(&fs::read(&file).expect("a file"));
        }
    }
}

/// Compares the parsers on random bytes. This test is no substitute for fuzzing, but it fails early if the parsers
/// disagree.
#[test]
fn bpf_and_rust_parsers_agree_on_random_bytes() {
    let mut rng = fastrand::Rng::with_seed(1);
    for (_, check) in checks::ALL {
        for _ in 0..20_000 {
            let len = rng.usize(..96);
            check(&(0..len).map(|_| rng.u8(..)).collect::<Vec<_>>());
        }
    }
}

/// Compares the parsers on nearly valid frames of IP protocol 253, because random bytes are seldom such frames.
#[test]
fn bpf_and_rust_parsers_agree_on_random_frames_of_protocol_253() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/fixtures/kernel_udp");
    let mut rng = fastrand::Rng::with_seed(4);
    for name in ["ipv4_253", "ipv6_extensions_253"] {
        let fixture = fs::read(fixtures.join(name)).expect("a frame");
        for _ in 0..50_000 {
            let mut data = fixture.clone();
            for _ in 0..rng.usize(..3) {
                let at = rng.usize(15..data.len());
                data[at] = rng.u8(..);
            }
            if rng.u32(..3) == 0 {
                data.truncate(rng.usize(15..data.len()));
            }
            checks::kernel_udp(&data);
        }
    }
}

/// Compares the parsers on nearly valid subgroup streams, because random bytes seldom begin with a valid stream header.
#[test]
fn bpf_and_rust_parsers_agree_on_random_subgroups() {
    let mut rng = fastrand::Rng::with_seed(2);
    for _ in 0..50_000 {
        let mut data = vec![rng.u8(..), rng.u8(..), rng.u8(..)];
        subgroup(&mut rng, &mut data);
        if rng.u32(..3) == 0 {
            let at = rng.usize(3..data.len());
            data[at] ^= 1 << rng.u32(..8);
        }
        checks::kernel_subgroup(&data);
    }
}

/// Compares the parsers on nearly valid STREAM frames. Most begin near the stream's current offset, or where another
/// frame began.
#[test]
fn bpf_and_rust_parsers_agree_on_random_overlapping_frames() {
    const READS: u8 = 0xe0;
    const SAME_PACKET: u8 = 0x20;
    let mut rng = fastrand::Rng::with_seed(5);
    for _ in 0..20_000 {
        let mut data = Vec::new();
        let mut ends = vec![0u16];
        for _ in 0..rng.usize(1..16) {
            let base = ends[rng.usize(..ends.len())].max(if rng.bool() {
                *ends.iter().max().expect("one")
            } else {
                0
            });
            let offset = (base + rng.u16(..80) * u16::from(rng.u8(..3) == 0))
                .saturating_sub(rng.u16(..60) * u16::from(rng.u8(..4) == 0));
            let len = if rng.bool() { rng.u8(..60) } else { rng.u8(..) };
            let version = if rng.u8(..3) == 0 { rng.u8(..3) } else { 0 };
            let fin = if rng.u8(..20) == 0 { 0x1c } else { 0 };
            let same = if rng.bool() { SAME_PACKET } else { 0 };
            let unread = if rng.u8(..10) == 0 { 0xf0 } else { 0 };
            let [high, low] = offset.min(511).to_be_bytes();
            data.extend([version | fin | same, low, len, high | unread]);
            ends.push(offset + u16::from(len));
            if rng.u8(..4) == 0 {
                data.extend([READS, 0, 0, 0]);
            }
        }
        checks::kernel_overlap(&data);
    }
}

/// Compares the parsers on nearly valid WebTransport prefixes, because random bytes seldom contain the session's ID.
#[test]
fn bpf_and_rust_parsers_agree_on_random_webtransport_prefixes() {
    let mut rng = fastrand::Rng::with_seed(3);
    for _ in 0..50_000 {
        let bits = rng.u32(..63);
        let session = rng.u64(..1 << bits);
        let binding = Binding::Session(session);
        let front = if rng.bool() { binding.uni() } else { binding.datagram() };
        let mut data = [&session.to_be_bytes()[..], &[rng.u8(..), rng.u8(..)], &front, &[7; 9]].concat();
        match rng.u32(..3) {
            0 => {
                let at = rng.usize(10..data.len());
                data[at] ^= 1 << rng.u32(..8);
            }
            1 => data.truncate(rng.usize(10..data.len())),
            _ => {}
        }
        checks::kernel_web(&data);
    }
}

fn subgroup(rng: &mut fastrand::Rng, out: &mut Vec<u8>) {
    let integer = |value: u64, rng: &mut fastrand::Rng, out: &mut Vec<u8>| {
        vi64::encode_in(value, rng.usize(vi64::len(value)..=vi64::MAX_LEN), out);
    };
    let kind = 0x10 | [0, 2, 4][rng.usize(..3)] | rng.u64(..2) | [0, 0x20][rng.usize(..2)];
    integer(kind, rng, out);
    (0..if kind & 6 == 4 { 3 } else { 2 }).for_each(|_| integer(rng.u64(..), rng, out));
    out.extend((kind & 0x20 == 0).then_some(7));
    for _ in 0..rng.usize(..6) {
        let bits = rng.u32(..64);
        integer(rng.u64(..1 << bits), rng, out);
        let properties = if kind & 1 == 1 && rng.bool() { rng.usize(..40) } else { 0 };
        if kind & 1 == 1 {
            integer(properties as u64, rng, out);
            out.extend(std::iter::repeat_n(9, properties));
        }
        let payload = if rng.bool() { rng.usize(..80) } else { 0 };
        integer(payload as u64, rng, out);
        match payload {
            0 => integer([0, 0, 0, 0, 0, 3, 4, 1][rng.usize(..8)], rng, out),
            _ => out.extend(std::iter::repeat_n(5, payload)),
        }
    }
}

fn ethernet(tags: usize, protocol: u16, rest: &[u8]) -> Vec<u8> {
    let tags = [0x81, 0, 0, 7].repeat(tags);
    [&[2; 12], tags.as_slice(), &protocol.to_be_bytes(), rest].concat()
}

/// Returns an IPv4 packet. `fragment` is the header field with the fragmentation flags and offset.
fn ipv4(options: u8, fragment: u16, rest: &[u8]) -> Vec<u8> {
    let [high, low] = (20 + u16::from(options) * 4 + rest.len() as u16).to_be_bytes();
    let [flags, offset] = fragment.to_be_bytes();
    let header = [0x45 + options, 0, high, low, 0, 1, flags, offset, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    [&header, vec![1; usize::from(options) * 4].as_slice(), rest].concat()
}

/// Returns an IPv6 packet. `headers` lists the protocol numbers of extension headers, each 8 bytes long. `offset` is
/// the offset field of a fragment header.
fn ipv6(headers: &[u8], offset: u16, rest: &[u8]) -> Vec<u8> {
    let nexts = headers.iter().skip(1).chain(&[17]);
    let field = offset.to_be_bytes();
    let extensions = headers.iter().zip(nexts).flat_map(|(header, next)| match header {
        44 => [*next, 0, field[0], field[1], 0, 0, 0, 1],
        _ => [*next, 0, 1, 4, 0, 0, 0, 0],
    });
    let payload: Vec<u8> = extensions.chain(rest.iter().copied()).collect();
    let [high, low] = (payload.len() as u16).to_be_bytes();
    let first = headers.first().copied().unwrap_or(17);
    [[0x60, 0, 0, 0, high, low, first, 64].as_slice(), &[0xfd; 32], &payload].concat()
}

/// A row of the table: description, frame, results of the TC parser and of the packet gate's parser (XDP), and the
/// anomalies that the latter reports.
type ParserCase = (&'static str, Vec<u8>, &'static str, &'static str, &'static [&'static str]);

/// Checks which headers the TC parser and the packet gate's parser (XDP) accept. The two parsers are built from the
/// same functions (`net.h`).
#[test]
fn tc_and_xdp_parsers_accept_only_their_own_listed_header_forms() {
    let udp = [&[1, 2, 3, 4, 0, 48, 0, 0], [0x40; 40].as_slice()].concat();
    let v4 = |tags, options, fragment| ethernet(tags, 0x0800, &ipv4(options, fragment, &udp));
    let v6 = |headers: &[u8], offset| ethernet(0, 0x86dd, &ipv6(headers, offset, &udp));
    let changed = |mut frame: Vec<u8>, at: usize, to: u8| {
        frame[at] = to;
        frame
    };
    let cut = |frame: Vec<u8>, len: usize| frame[..len].to_vec();
    let cases: &[ParserCase] = &[
        ("IPv4", v4(0, 0, 0x4000), "UDP", "UDP", &[]),
        ("IPv4 options", v4(0, 10, 0), "UDP", "UDP", &["options"]),
        ("a VLAN tag", v4(1, 0, 0), "UDP", "UDP", &[]),
        ("two VLAN tags", v4(2, 0, 0), "UDP", "UDP", &[]),
        ("three VLAN tags", v4(3, 0, 0), "not UDP", "other", &[]),
        ("IPv4, first fragment", v4(0, 0, 0x2000), "fragment", "UDP", &["fragment"]),
        ("IPv4, later fragment", v4(0, 0, 0x2001), "fragment", "no port", &["fragment"]),
        ("IPv4, last fragment", v4(0, 0, 0x0001), "fragment", "no port", &["fragment"]),
        ("IPv4 of another version", changed(v4(0, 0, 0), 14, 0x55), "malformed", "other", &[]),
        ("IPv4 of 16 bytes", changed(v4(0, 0, 0), 14, 0x44), "malformed", "other", &[]),
        ("IPv4, TCP", changed(v4(0, 0, 0), 23, 6), "not UDP", "other", &[]),
        ("IPv4, longer than the frame", changed(v4(0, 0, 0), 16, 1), "UDP", "UDP", &["lengths"]),
        ("IPv4, UDP longer than IP", changed(v4(0, 0, 0), 38, 1), "UDP", "UDP", &["lengths"]),
        ("IPv4, cut in the UDP header", cut(v4(0, 0, 0), 41), "malformed", "too many", &["lengths"]),
        ("IPv6", v6(&[], 0), "UDP", "UDP", &[]),
        ("IPv6, four extension headers", v6(&[0, 60, 43, 60], 0), "UDP", "UDP", &["options"]),
        ("IPv6, five of them", v6(&[0, 60, 43, 60, 60], 0), "malformed", "UDP", &["options"]),
        ("IPv6, eight of them", v6(&[60; 8], 0), "malformed", "UDP", &["options"]),
        ("IPv6, nine of them", v6(&[60; 9], 0), "malformed", "too many", &["options"]),
        ("IPv6, a header of IPsec", v6(&[51], 0), "not UDP", "other", &[]),
        ("IPv6, first fragment", v6(&[44], 1), "fragment", "UDP", &["fragment", "options"]),
        ("IPv6, later fragment", v6(&[44], 8), "fragment", "no port", &["fragment", "options"]),
        (
            "IPv6, cut in an extension",
            cut(v6(&[60], 0), 56),
            "malformed",
            "too many",
            &["options", "lengths"],
        ),
        ("ARP", ethernet(0, 0x0806, &[0; 46]), "not UDP", "other", &[]),
        ("cut in IPv4", cut(v4(0, 0, 0), 33), "malformed", "other", &[]),
        ("cut in a VLAN tag", cut(v4(1, 0, 0), 15), "malformed", "other", &[]),
    ];
    for (description, frame, at_tc, at_gate, noted) in cases {
        assert_eq!(checks::skb_verdict(frame), *at_tc, "{description}, at TC");
        assert_eq!(checks::gate_verdict(frame), (*at_gate, noted.to_vec()), "{description}, at the gate");
    }
}

/// A copy of C's `struct bucket_rate`, in ticks of 1/64 ns.
#[repr(C)]
struct BucketRateCopy {
    cost: u64,
    burst: u64,
}

unsafe extern "C" {
    fn gate_native_take(full_at: *mut u64, rate: *const BucketRateCopy, times: u64, now_ns: u64) -> i32;
    fn gate_native_network(levels: *const Levels, address: *const u8, level: u32, to: *mut u8) -> u32;
    fn gate_native_most(of_client: u64, times: u32, all: u64) -> u64;
}

/// Returns how many packets a token bucket lets pass at the time `now_ns`.
fn taken(full_at: &mut u64, rate: &BucketRateCopy, now_ns: u64) -> usize {
    taken_of_network(full_at, rate, 1, now_ns)
}

fn taken_of_network(full_at: &mut u64, rate: &BucketRateCopy, times: u64, now_ns: u64) -> usize {
    // SAFETY: `full_at` and `rate` outlive the call, which only writes to `full_at`.
    (0..1000).take_while(|_| unsafe { gate_native_take(full_at, rate, times, now_ns) } == 0).count()
}

/// A copy of C's `struct gate_levels`.
#[repr(C)]
struct Levels {
    v4: [GateLevelCopy; 3],
    v6: [GateLevelCopy; 3],
}

/// A copy of C's `struct gate_level`.
#[repr(C)]
struct GateLevelCopy {
    mask: [u8; 16],
    times: u64,
}

/// Returns the prefix lengths of client networks, each with its limit factor, for a packet gate (XDP) with default
/// settings.
fn levels_of_gate() -> Levels {
    let of = |prefix: u32, times| GateLevelCopy { mask: (u128::MAX << (128 - prefix)).to_be_bytes(), times };
    Levels {
        v4: [of(96 + 32, 1), of(96 + 24, 8), GateLevelCopy { mask: [0; 16], times: 0 }],
        v6: [of(64, 1), of(56, 8), of(48, 64)],
    }
}

/// Checks that the packet gate's BPF program and the daemons assign an address to the same networks, and compute the
/// same limits for these networks.
#[test]
fn client_networks_and_limits_in_bpf_equal_those_of_the_daemon() {
    let gate = levels_of_gate();
    let of_gate = |address: IpAddr| -> Vec<(Ipv6Addr, usize)> {
        let mapped = mapped(address);
        let network = |level| {
            let mut to = [0; 16];
            // SAFETY: all arguments have the sizes that `gate_native_network` expects, and outlive the call.
            let times =
                unsafe { gate_native_network(&gate, mapped.octets().as_ptr(), level, to.as_mut_ptr()) };
            (times > 0).then_some((Ipv6Addr::from(to), times as usize))
        };
        (0..3).filter_map(network).collect()
    };
    let table =
        ["192.0.2.77", "0.0.0.0", "255.255.255.255", "::", "::1", "2001:db8:1:2345:6::7", "::fffe:192.0.2.1"];
    let table = table.map(|text| text.parse().expect("an address"));
    let mut random = fastrand::Rng::with_seed(34);
    let random: Vec<IpAddr> = (0..2000)
        .map(|n| match n % 2 {
            0 => IpAddr::from(random.u32(..).to_be_bytes()),
            _ => IpAddr::from(random.u128(..).to_be_bytes()),
        })
        .collect();
    for address in table.into_iter().chain(random) {
        let want: Vec<_> = levels(address).map(|(network, times)| (mapped(network.address), times)).collect();
        assert_eq!(of_gate(address), want, "{address}");
    }
    for (of_client, times, all) in
        [(1, 8, 1000), (4, 8, 64), (4, 64, 64), (4, 64, 63), (4, 1, 7), (4, 1, 1000), (0, 64, 10), (5, 64, 0)]
    {
        // SAFETY: the function only computes with numbers.
        let of_gate = unsafe { gate_native_most(of_client, times, all) };
        let want = network_limit(of_client as usize, times as usize, all as usize) as u64;
        assert_eq!(of_gate, want, "{of_client} {times} {all}");
    }
}

/// Checks that a network's token bucket holds a multiple of a client's tokens, and fills in the same time.
#[test]
fn token_bucket_of_a_network_holds_a_multiple_of_a_clients() {
    const SECOND: u64 = 1_000_000_000;
    let rate = BucketRateCopy { cost: SECOND / 10 * 64, burst: SECOND / 2 * 64 };
    let now = 1000 * SECOND;
    for (times, held) in [(1, 5), (8, 40), (64, 320)] {
        let mut bucket = 0;
        assert_eq!(taken_of_network(&mut bucket, &rate, times, now), held);
        assert_eq!(taken_of_network(&mut bucket, &rate, times, now + SECOND / 10), held / 5);
    }
}

fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// Checks that a token bucket holds the right number of tokens at any time, even if the time in ticks no longer fits
/// into 63 or 64 bits.
#[test]
fn token_bucket_is_exact_after_years() {
    const SECOND: u64 = 1_000_000_000;
    const YEAR: u64 = 365 * 24 * 3600 * SECOND;
    let rate = BucketRateCopy { cost: SECOND / 10 * 64, burst: SECOND / 2 * 64 };
    let wraps = u64::MAX / 64;
    let times = [0, 1, 4, 5, 9, 10, 20, 100].map(|years| years * YEAR);
    for now in times.into_iter().chain([wraps / 2, wraps - SECOND / 4, wraps]) {
        // The first token bucket is zero, as in a new map entry. The second token bucket is full from exactly the time
        // `now` on.
        let mut bucket = 0;
        if now % (wraps + 1) < wraps - 2 * SECOND {
            assert_eq!(taken(&mut bucket, &rate, now), 5, "a new one at {now}");
        }
        let mut bucket = now.wrapping_mul(64);
        assert_eq!(taken(&mut bucket, &rate, now), 5, "at {now}");
        assert_eq!(taken(&mut bucket, &rate, now), 0, "at {now}");
        assert_eq!(taken(&mut bucket, &rate, now - (now > 0) as u64 * SECOND / 50), 0, "by another clock");
        assert_eq!(taken(&mut bucket, &rate, now + SECOND / 10), 1, "at {now}");
        for idle in [SECOND, YEAR, 4 * YEAR, 5 * YEAR, 8 * YEAR] {
            let mut bucket = bucket;
            assert_eq!(taken(&mut bucket, &rate, now + SECOND / 10 + idle), 5, "{idle} after {now}");
        }
    }
}

/// Compares the parsers on nearly valid TCP options with which a SYN offers a graft (a function that both hosts load
/// into the kernel). Each byte of the option is changed to every value, at every length of the option.
#[test]
fn bpf_and_rust_parsers_agree_on_damaged_tcp_options_of_grafts() {
    let offer = *b"\xfd\x0cMRg1\x01\x01abcdefgh";
    for length in 0..=offer.len() {
        for at in 0..length {
            for byte in 0..=u8::MAX {
                let mut data = offer;
                data[at] = byte;
                checks::kernel_graft(&data[..length]);
            }
        }
    }
}

/// Checks congestion control (RFC 5681) step by step: slow start, halving, additive increase, a timeout, and a
/// congestion window that is not used.
#[test]
fn rfc_5681_congestion_window_grows_by_acks_and_shrinks_on_loss() {
    for start in [0, u32::MAX - 100] {
        let mut path = checks::Controlled::new(start);
        let mut windows = vec![path.look(0, 0, 0)];
        windows.extend([(20, 10), (40, 20), (60, 40)].map(|(ms, come)| path.look(ms, come, 0)));
        assert_eq!(windows, [10, 20, 40, 80]);
        assert_eq!(path.look(80, 80, 1), 40, "half");
        assert_eq!(path.look(100, 40, 0), 41, "a packet more in a round trip");
        assert_eq!(path.look(120, 41, 0), 42);
        // The sender waits longer than the retransmission timeout of 200 ms. Each further timeout counts from the
        // previous one.
        assert_eq!(path.look(319, 0, 0), 42);
        assert_eq!(path.look(321, 0, 0), 1);
        // The congestion window grows exponentially up to half of its old size (slow start), and then linearly.
        assert_eq!(path.look(340, 1, 0), 2);
        assert_eq!(path.look(360, 100, 0), 21);
        assert_eq!(path.look(380, 21, 0), 22);
        // Losses without a timeout never reduce the congestion window below two packets.
        let least = (0..9).map(|step| path.look(400 + step, 1, 1)).min();
        assert_eq!(least, Some(2));
        // A congestion window that is not used does not grow. If no packet is in flight, no timeout occurs.
        let mut idle = checks::Controlled::new(start);
        (0..5).for_each(|step| assert_eq!(idle.look_idle(step * 1000, 2), 10));
    }
}
