//! Tests of precomputed keystreams and their memory.

use super::*;

/// Sends the next `count` packets of the publisher. Returns how often each result of the keystream lookup occurred.
fn open_next(bench: &mut ProgramBench, word: &mut (u16, u64), count: u64) -> [u64; 3] {
    let before = Lookup::ALL.map(|lookup| bench.upstream.lookups(lookup));
    for _ in 0..count {
        let packet = bench.publisher.seal(word.0, word.1, 2, &stream(1000));
        assert_eq!(bench.run_packet(&packet), Outcome::Forwarded);
        word.1 += 1;
    }
    let after = Lookup::ALL.map(|lookup| bench.upstream.lookups(lookup));
    std::array::from_fn(|lookup| after[lookup] - before[lookup])
}

#[test]
fn packets_are_decrypted_with_precomputed_keystreams() {
    if !root("packets_are_decrypted_with_precomputed_keystreams") {
        return;
    }
    let mut bench = ProgramBench::new();
    let mut keystreams = bench.publisher.keystreams();
    let want = WantedRing { len: 8, text_bytes: 1100 };
    let mut word = (0, 0);
    assert_eq!(open_next(&mut bench, &mut word, 2), [0, 0, 2], "no ring");
    assert_eq!(bench.upstream.refill(0, want, &mut keystreams), Refill { computed: 8, len: 8 });
    assert_eq!(open_next(&mut bench, &mut word, 10), [8, 2, 0]);
    word.1 += 20;
    assert_eq!(open_next(&mut bench, &mut word, 1), [0, 1, 0]);
    assert_eq!(bench.upstream.refill(0, want, &mut keystreams).computed, 8);
    assert_eq!(open_next(&mut bench, &mut word, 3), [3, 0, 0]);
    assert_eq!(bench.upstream.refill(0, want, &mut keystreams).computed, 3, "only what was used");
    // A ring of keystreams gets its wanted length at once. Keystreams that are shorter than a packet are not used.
    let short = WantedRing { len: 32, text_bytes: 900 };
    assert_eq!(bench.upstream.refill(0, short, &mut keystreams), Refill { computed: 32, len: 32 });
    assert_eq!(open_next(&mut bench, &mut word, 1), [0, 1, 0]);
    assert_eq!(bench.upstream.refill(0, WantedRing { len: 32, ..want }, &mut keystreams).computed, 32);
    assert_eq!(open_next(&mut bench, &mut word, 32), [32, 0, 0]);
    // After a key update all keystreams are stale until they are computed again.
    assert_eq!(bench.upstream.refill(0, want, &mut keystreams).computed, 8);
    bench.upstream.set_keys(1, &bench.publisher.kernel_keys(1)).expect("keys");
    word.0 = 1;
    assert_eq!(open_next(&mut bench, &mut word, 1), [0, 1, 0]);
    assert_eq!(bench.upstream.refill(1, want, &mut keystreams).computed, 8);
    assert_eq!(open_next(&mut bench, &mut word, 8), [8, 0, 0]);
    // No keystream is computed for a key generation without keys.
    let nothing = bench.upstream.refill(2, want, |_, _, _: &mut [u8; 64], _: &mut [u8]| false);
    assert_eq!(nothing, Refill { computed: 0, len: 8 });
    assert_eq!(open_next(&mut bench, &mut word, 8), [0, 8, 0]);
    assert_eq!(bench.upstream.refill(1, WantedRing { len: 0, ..want }, &mut keystreams), Refill::default());
    assert_eq!(open_next(&mut bench, &mut word, 1), [0, 0, 1]);
}

#[test]
fn keystream_rings_of_upstreams_share_a_configured_memory_limit() {
    if !root("keystream_rings_of_upstreams_share_a_configured_memory_limit") {
        return;
    }
    let entry = size_of::<intf::Keystream>() as u64;
    let load = |entries: u64| {
        let config = Config { keystream_bytes: entries * entry, ..Config::default() };
        let relay = RelayProgram::load(&config).expect("the relay loads");
        let upstreams = [0, 1].map(|_| relay.upstream(0).expect("an upstream"));
        (relay, upstreams)
    };
    let refill = |upstream: &UpstreamRecord, len| {
        let want = WantedRing { len, text_bytes: 10 };
        upstream.refill(0, want, |_, _, _: &mut [u8; 64], _: &mut [u8]| true).len
    };
    let (relay, [one, other]) = load(24);
    assert_eq!([refill(&one, 16), refill(&other, 16)], [16, 8]);
    assert_eq!(refill(&one, 32), 16, "no room for more");
    assert_eq!([refill(&one, 0), refill(&other, 16)], [0, 8], "it may still be in use");
    relay.settle().expect("settled");
    assert_eq!(refill(&other, 16), 16);
    let (_relay, [one, _]) = load(0);
    assert_eq!(refill(&one, 1), 0);
}

#[test]
fn removed_upstream_record_is_reusable_after_running_programs_end() {
    if !root("removed_upstream_record_is_reusable_after_running_programs_end") {
        return;
    }
    let relay =
        RelayProgram::load(&Config { max_upstreams: 2, ..Config::default() }).expect("the relay loads");
    let upstreams = [0, 1].map(|_| relay.upstream(0).expect("an upstream"));
    assert!(matches!(relay.upstream(0), Err(Error::Full { .. })));
    assert!(!relay.needs_settling());
    drop(upstreams);
    assert!(matches!(relay.upstream(0), Err(Error::Unsettled { .. })));
    assert!(relay.needs_settling());
    relay.settle().expect("settled");
    assert!(!relay.needs_settling() && relay.upstream(0).is_ok());
}
