//! Tests that keys of ended connections are erased.

use super::*;

impl ProgramBench {
    /// Returns the indexes of a map's entries that are not all zeroes.
    fn filled(&self, map: &'static str) -> Vec<u32> {
        let mut object = lock(&self.relay.object);
        let map = object.map(map).expect("a map");
        let filled = |index: &u32| {
            let value = map.lookup(&index.to_ne_bytes(), MapFlags::ANY).expect("read").expect("an entry");
            value.iter().any(|byte| *byte != 0)
        };
        (0..map.max_entries()).filter(filled).collect()
    }
}

/// A key update installs the keys of the present and of the next generation. The present ones are in use.
#[test]
fn receive_keys_in_use_are_not_written_again() {
    if !root("receive_keys_in_use_are_not_written_again") {
        return;
    }
    let mut bench = ProgramBench::new();
    let packet = |bench: &mut ProgramBench, generation, number| {
        let packet = bench.publisher.seal(generation, number, 4, &stream(9));
        bench.run_packet(&packet)
    };
    assert_eq!(packet(&mut bench, 0, 1), Outcome::Forwarded);
    let others = DirectionKeys::new(KeySuite::ChaCha20Poly1305, ID_LEN, &mut bench.rng);
    bench.upstream.set_keys(0, &others.kernel_keys(0)).expect("keys");
    assert_eq!(packet(&mut bench, 0, 2), Outcome::Forwarded);
    // Keys of another generation replace them.
    bench.upstream.set_keys(2, &bench.publisher.kernel_keys(2)).expect("keys");
    assert_eq!(packet(&mut bench, 2, 3), Outcome::Forwarded);
}

#[test]
fn connection_is_open_once_the_program_has_its_id_and_keys() {
    if !root("connection_is_open_once_the_program_has_its_id_and_keys") {
        return;
    }
    let bench = ProgramBench::new();
    let upstream = bench.relay.upstream(0).expect("an upstream");
    assert!(!upstream.is_open());
    upstream.add_id(&[7; ID_LEN]).expect("an ID");
    assert!(!upstream.is_open());
    upstream.set_keys(0, &bench.publisher.kernel_keys(0)).expect("keys");
    assert!(upstream.is_open());
    upstream.stop();
    assert!(!upstream.is_open());
}

#[test]
fn keys_and_keystreams_are_erased_when_a_connection_ends() {
    if !root("keys_and_keystreams_are_erased_when_a_connection_ends") {
        return;
    }
    let keystream_bytes = 64 * size_of::<intf::Keystream>() as u64;
    let mut bench = ProgramBench::with_config(Config { keystream_bytes, ..Config::default() });
    let keys = DirectionKeys::new(KeySuite::Aes128Gcm, ID_LEN, &mut bench.rng);
    let want = WantedRing { len: 16, text_bytes: 1000 };
    for generation in [0, 1] {
        bench.downstream.set_keys(generation, &keys.kernel_keys(generation)).expect("keys");
        bench.upstream.set_keys(generation, &bench.publisher.kernel_keys(generation)).expect("keys");
    }
    assert_eq!(bench.downstream.refill(want, keys.keystreams()).len, 16);
    assert_eq!(bench.upstream.refill(0, want, bench.publisher.keystreams()).len, 16);
    let maps = ["open_keys", "seal_keys", "keystreams"];
    assert_eq!(maps.map(|map| bench.filled(map).len()), [2, 2, 32]);
    // A second connection stays open, so the program must keep the keys of that connection.
    let upstream = bench.relay.upstream(0).expect("an upstream");
    upstream.set_keys(1, &bench.publisher.kernel_keys(1)).expect("keys");
    assert_eq!(upstream.refill(1, WantedRing { len: 4, ..want }, bench.publisher.keystreams()).len, 4);
    assert!(!bench.relay.has_old_keys());

    let empty = bench.upstream.slot(STREAM);
    drop(bench.slot.replace(empty));
    drop(std::mem::replace(&mut bench.upstream, upstream));
    let path = PacketPath {
        local: ([10, 0, 0, 1], PORT).into(),
        remote: ([10, 0, 0, 2], PORT).into(),
        id: vec![1],
        traffic_class: 0,
        flow_label: 0,
    };
    let downstream = bench.relay.downstream(&path, 1452, 0).expect("a downstream");
    drop(std::mem::replace(&mut bench.downstream, downstream));
    assert!(bench.relay.has_old_keys());
    bench.relay.settle().expect("settled");
    assert!(!bench.relay.has_old_keys());
    assert_eq!(maps.map(|map| bench.filled(map).len()), [1, 0, 4], "the other upstream's");
}
