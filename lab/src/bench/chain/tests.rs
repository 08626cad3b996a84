//! Tests of chains: the arguments of relays, the matching of packets, and the combination of rounds.

use std::net::{Ipv4Addr, SocketAddr};

use millrace_kernel::tc::KernelHook;

use super::*;
use crate::transport::LabTransport;

const LOAD: RowLoad =
    RowLoad { transport: LabTransport::Raw, subscribers: 1, object_bytes: 1200, rate_hz: 500 };

fn host(number: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 77, number, 2))
}

fn sample(time_ns: u64, hook: KernelHook, [from, to]: [u8; 2]) -> PacketSample {
    PacketSample {
        time_ns,
        ifindex: 1,
        hook,
        source: SocketAddr::new(host(from), 4443),
        destination: SocketAddr::new(host(to), 4443),
        payload_bytes: 1230,
        segment_bytes: None,
        vlan: None,
    }
}

#[test]
fn relay_that_cannot_be_chained_is_refused_by_name() {
    let before = Some("10.77.0.2:4443".parse().unwrap());
    let arguments =
        |contender, by: ChainBy| by.arguments(contender, before).map_err(|error| error.to_string());
    let peer = arguments(Contender::Kernel, ChainBy::Cluster).unwrap();
    assert_eq!(peer, ["--cluster-peer=moqt://10.77.0.2:4443", "--upstream-tls-disable-verify"]);
    let upstream = arguments(Contender::User, ChainBy::Upstream).unwrap();
    assert_eq!(upstream, ["--upstream=moqt://10.77.0.2:4443", "--upstream-tls-disable-verify"]);
    let other = arguments(Contender::MoqRelay, ChainBy::Cluster).unwrap();
    assert_eq!(other, ["--cluster-connect=moqt://10.77.0.2:4443", "--connect-tls-insecure=true"]);
    let refused = arguments(Contender::MoqRelay, ChainBy::Upstream).unwrap_err();
    assert!(refused.contains("moq-relay") && refused.contains("--chain-by cluster"), "{refused}");
    let refused = arguments(Contender::MoqRelayIetf, ChainBy::Cluster).unwrap_err();
    assert!(refused.contains("moq-relay-ietf has no chains"), "{refused}");
}

#[test]
fn object_is_matched_at_each_relay_and_over_the_whole_chain() {
    // Hosts 1 and 4 are publisher and subscribers, hosts 2 and 3 are relays. Each object is seen at both ends of the
    // link between the relays. Two large packets go backwards there, and belong to no object.
    let at = |time: u64| {
        [
            sample(time, KernelHook::Ingress, [1, 2]),
            sample(time + 10, KernelHook::Egress, [2, 3]),
            sample(time + 13, KernelHook::Ingress, [2, 3]),
            sample(time + 20, KernelHook::Egress, [3, 2]),
            sample(time + 23, KernelHook::Ingress, [3, 2]),
            sample(time + 33, KernelHook::Egress, [3, 4]),
        ]
    };
    let samples = [at(100), at(200), at(300)].concat();
    let matched = |came: [u8; 2], went: [u8; 2]| {
        let wire = matched_between(&samples, came.map(host), went.map(host), &LOAD);
        assert_eq!((wire.matched.missing, wire.matched.extra), (0, 0));
        wire.latencies_ns
    };
    assert_eq!(matched([1, 2], [2, 3]), [10, 10]);
    assert_eq!(matched([2, 3], [3, 4]), [20, 20]);
    assert_eq!(matched([1, 2], [3, 4]), [33, 33]);
}

#[test]
fn chain_row_has_medians_by_hop_and_what_each_further_relay_adds() {
    let hop = |p50: f64| HopFigures {
        wire_latency_us: Some(Percentiles { p50, p90: p50, p99: p50, max: p50 }),
        wire: wire::Matched::default(),
        cpu_ns_per_object: 1000.0 * p50,
        rss_bytes: 1 << 20,
        kernel: None,
    };
    let round = |hops: &[f64]| {
        let hops: Vec<_> = hops.iter().copied().map(hop).collect();
        let p50 = hops.iter().filter_map(|hop| hop.wire_latency_us).map(|it| it.p50).sum();
        Ok(ChainFigures {
            delivered: 10,
            lost: 0,
            latency_us: None,
            wire_latency_us: Some(Percentiles { p50, p90: p50, p99: p50, max: p50 }),
            wire: wire::Matched::default(),
            machine_ns_per_object: 1.0,
            hops,
        })
    };
    let row = |length, rounds| ChainRow {
        contender: Contender::Kernel,
        by: ChainBy::Cluster,
        length,
        load: LOAD,
        rounds,
    };
    let rows = [
        row(1, vec![round(&[4.0]), round(&[6.0]), round(&[5.0])]),
        row(3, vec![round(&[4.0, 5.0, 7.0]), Err("it died".to_owned()), round(&[5.0, 9.0, 7.0])]),
    ];
    let [single, chain] = rows.each_ref().map(|row| row.json(&rows));
    assert_eq!(single["hops"][0]["wire_latency_us"]["p50"], 5.0);
    assert_eq!(single["added_per_hop_us"], serde_json::Value::Null);
    assert_eq!(chain["hops"].as_array().map(Vec::len), Some(3));
    assert_eq!(chain["hops"][1]["wire_latency_us"]["p50"], 7.0);
    assert_eq!(chain["spread"]["hops"][1]["cpu_ns_per_object"], serde_json::json!([5000.0, 9000.0]));
    // The chain took 12 and 16 us more than the single relay in the same rounds, for two further relays.
    let added = rows[1].added_per_hop(&rows).unwrap();
    assert_eq!((added.median, added.min, added.max), (7.0, 6.0, 8.0));
    assert_eq!(chain["error"], "1 of 3 rounds: it died");
    let text = table::render(&rows);
    assert!(text.contains("each further relay adds 7.0 us") && text.contains("it died"), "{text}");
}
