//! Measures the time per packet in the kernel. It checks nothing, so it only runs on demand:
//! `cargo test -p millrace-kernel --test crypto -- --ignored --nocapture`

use millrace_kernel::crypto::QuicKeys;

use crate::engine::{CryptoCase, CryptoEngine, Operation};
use crate::random::{RandomSuite, SUITES, bytes};

const TEXT_LEN: usize = 1200;
const REPEAT: u32 = 20_000;
const ROUNDS: usize = 7;

const OPERATIONS: [Operation; 6] = [
    // `Number` only decodes a packet number, so its time is mostly the overhead of running a BPF program
    Operation::Number,
    Operation::Seal,
    Operation::SealWith,
    Operation::OpenWith,
    Operation::Keystream,
    Operation::Protect,
];

#[test]
#[ignore = "soak: measures, on a quiet machine"]
fn crypto_time_per_packet_is_measured() {
    let Some(engine) = CryptoEngine::kernel("crypto_time_per_packet_is_measured") else { return };
    println!("ns per run, {TEXT_LEN}-byte text, least / median / most of {ROUNDS} rounds of {REPEAT}");
    for suite in SUITES {
        let keys = match suite {
            RandomSuite::ChaCha20Poly1305 => QuicKeys::chacha20_poly1305(&bytes(), &bytes(), &bytes()),
            RandomSuite::Aes128Gcm => QuicKeys::aes128_gcm(&bytes(), &bytes(), &bytes()),
            RandomSuite::Aes256Gcm => QuicKeys::aes256_gcm(&bytes(), &bytes(), &bytes()),
        };
        for operation in OPERATIONS {
            let mut case = CryptoCase::to_seal(&keys, 7, &bytes::<13>(), &bytes::<TEXT_LEN>());
            case.header.number_bytes = 4;
            case.id_bytes = 8;
            let mut times: Vec<_> = (0..ROUNDS)
                .filter_map(|_| engine.time(operation, &mut case, REPEAT))
                .map(|time| time.as_nanos())
                .collect();
            times.sort_unstable();
            println!("{suite:?} {operation:?}: {} / {} / {}", times[0], times[ROUNDS / 2], times[ROUNDS - 1]);
        }
    }
}
