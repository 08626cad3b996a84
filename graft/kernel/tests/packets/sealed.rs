//! Tests of sealed sessions: outgoing, incoming and refused packets. The crate ring serves as a second implementation
//! of the AEADs: it seals datagrams for the kernel, and opens datagrams that the kernel sealed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use millrace_graft_kernel::packet::{
    FRAME_BYTES, FunctionHook, FunctionSession, PacketHooks, PacketReason, SEAL_BYTES, SEALED_MAX, SealKeys,
    SessionEnds, TalkMessage,
};
use millrace_kernel::crypto::QuicKeys;
use millrace_kernel::xdp::XdpMode;
use nix::sys::socket::{setsockopt, sockopt};
use ring::aead::{AES_128_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

use crate::datagrams::{ETHERNET, PASS_ON, REDIRECT, SHOT, XDP_DROP, XDP_PASS, datagram, v4, v6};
use crate::frames::{framed, reason, request, run};
use crate::net::{PacketCapture, ifindex, inside, root};
use crate::traffic::{
    AtEnd, DatagramFate, GO_BACK, PacketHook, SELECTIVE, TrafficPace, assert_all_once, get_to_know, receive,
    send_into_window,
};
use crate::{KEY, count, counted, hooks, hooks_of, list, other_side};

const MAGIC: u8 = 0x73;
const TAIL: usize = 8;
const TAG: usize = 16;
const PHASE: usize = 1;
const ALL: u64 = 1 << 47;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SealedCipher {
    ChaCha20Poly1305,
    Aes128Gcm,
}

const CIPHERS: [SealedCipher; 2] = [SealedCipher::ChaCha20Poly1305, SealedCipher::Aes128Gcm];

/// The key of one direction, as both the kernel and ring need it.
#[derive(Clone, Copy)]
struct SealedDirection {
    cipher: SealedCipher,
    key: [u8; 32],
    iv: [u8; 12],
}

impl SealedDirection {
    fn new(cipher: SealedCipher, seed: u8) -> Self {
        Self {
            cipher,
            key: std::array::from_fn(|at| seed ^ (at as u8).wrapping_mul(37)),
            iv: std::array::from_fn(|at| seed ^ (at as u8).wrapping_mul(91)),
        }
    }

    fn for_kernel(&self) -> QuicKeys {
        match self.cipher {
            SealedCipher::ChaCha20Poly1305 => QuicKeys::chacha20_poly1305(&self.key, &self.iv, &[0; 32]),
            SealedCipher::Aes128Gcm => {
                let key = self.key.first_chunk().expect("16 bytes");
                QuicKeys::aes128_gcm(key, &self.iv, &[0; 16])
            }
        }
    }

    fn for_ring(&self) -> LessSafeKey {
        let (algorithm, bytes): (&Algorithm, _) = match self.cipher {
            SealedCipher::ChaCha20Poly1305 => (&CHACHA20_POLY1305, &self.key[..]),
            SealedCipher::Aes128Gcm => (&AES_128_GCM, &self.key[..16]),
        };
        LessSafeKey::new(UnboundKey::new(algorithm, bytes).expect("a key"))
    }

    fn nonce(&self, number: u64) -> Nonce {
        let mut nonce = self.iv;
        nonce[4..].iter_mut().zip(number.to_be_bytes()).for_each(|(byte, with)| *byte ^= with);
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts a plaintext with ring. Returns the bytes that follow the UDP header.
    fn seal(&self, phase: u8, number: u64, text: &[u8]) -> Vec<u8> {
        let tail = [&[MAGIC, 0x10 | phase][..], &number.to_be_bytes()[2..]].concat();
        let mut sealed = text.to_vec();
        let aad = Aad::from(&tail);
        self.for_ring().seal_in_place_append_tag(self.nonce(number), aad, &mut sealed).expect("sealed");
        [sealed, tail].concat()
    }

    /// Decrypts a datagram with ring. Returns the datagram's number and its plaintext.
    fn open(&self, sealed: &[u8]) -> (u64, Vec<u8>) {
        let (text, tail) = sealed.split_at(sealed.len() - TAIL);
        assert_eq!(tail[0], MAGIC);
        let number = tail[2..].iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let mut text = text.to_vec();
        let opened = self.for_ring().open_in_place(self.nonce(number), Aad::from(tail), &mut text);
        (number, opened.expect("it opens").to_vec())
    }
}

/// Returns the keys of both directions: from the first host to the second, and back.
fn directions(cipher: SealedCipher) -> [SealedDirection; 2] {
    [SealedDirection::new(cipher, 3), SealedDirection::new(cipher, 200)]
}

fn keys([there, back]: [SealedDirection; 2], limit: u64) -> SealKeys {
    SealKeys { seals: there.for_kernel(), opens: back.for_kernel(), limit }
}

fn open_keyless(hooks: &mut PacketHooks, ends: SessionEnds, functions: &[&str]) {
    let session = FunctionSession { ends, key: KEY, list: list(functions), budget_ns: 0 };
    hooks.open_sealed(session).unwrap_or_else(|error| panic!("{error}"));
}

fn install(hooks: &mut PacketHooks, ends: &SessionEnds, directions: [SealedDirection; 2], phase: u8) {
    hooks.install(ends, phase, &keys(directions, ALL)).expect("keys");
    hooks.seal_with(ends, phase).expect("keys");
}

/// Opens both ends of a sealed session, each in its own dispatcher, and installs keys.
fn pair(ends: SessionEnds, cipher: SealedCipher, functions: &[&str]) -> (PacketHooks, PacketHooks) {
    pair_of(ends, cipher, functions, hooks)
}

pub fn pair_of(
    ends: SessionEnds,
    cipher: SealedCipher,
    functions: &[&str],
    make: impl Fn() -> PacketHooks,
) -> (PacketHooks, PacketHooks) {
    let mut sender = make();
    let mut receiver = make();
    let [there, back] = directions(cipher);
    for (hooks, ends, directions) in
        [(&mut sender, ends, [there, back]), (&mut receiver, other_side(&ends), [back, there])]
    {
        open_keyless(hooks, ends, functions);
        install(hooks, &ends, directions, 0);
    }
    (sender, receiver)
}

fn udp_at(ends: &SessionEnds) -> usize {
    ETHERNET + if ends.local.is_ipv4() { 20 } else { 40 }
}

/// Returns the bytes of a frame behind its UDP header.
fn behind(ends: &SessionEnds, frame: &[u8]) -> Vec<u8> {
    frame[udp_at(ends) + 8..].to_vec()
}

#[test]
fn datagram_arrives_unchanged() {
    if !root("datagram_arrives_unchanged") {
        return;
    }
    let lists: [&[&str]; 3] = [&[], &["number", "order"], &["number", "repair"]];
    for (ends, cipher) in [v4(), v6()].into_iter().flat_map(|ends| CIPHERS.map(|cipher| (ends, cipher))) {
        let [there, _] = directions(cipher);
        for functions in lists {
            let (sender, mut receiver) = pair(ends, cipher, functions);
            for (number, len) in [1, 2, 3, 15, 16, 17, 100, 1000, 1413].into_iter().enumerate() {
                let payload: Vec<u8> = (0..len).map(|at| (at * 7) as u8 ^ 0x5a).collect();
                let plain = datagram(&ends, &payload);
                let frame = framed(&sender, &ends, &payload);
                assert_eq!(frame.len(), plain.len() + FRAME_BYTES + SEAL_BYTES, "{functions:?} {len}");
                assert!(crate::net::check_frame(&frame));
                let (used, text) = there.open(&behind(&ends, &frame));
                assert_eq!(used, number as u64);
                assert_eq!(text[..len], payload, "{cipher:?} {len}");
                let at = other_side(&ends);
                let (why, verdict, opened) = reason(&mut receiver, &at, FunctionHook::Rx, &frame);
                assert_eq!((why, verdict), (PacketReason::LetIn, XDP_PASS), "{cipher:?} {functions:?} {len}");
                assert!(crate::net::check_frame(&opened[..plain.len() + FRAME_BYTES]));
                let (why, verdict, after) = reason(&mut receiver, &at, FunctionHook::Repair, &opened);
                assert_eq!((why, verdict), (PacketReason::Delivered, PASS_ON));
                assert_eq!(after[..plain.len()], plain, "{cipher:?} {functions:?} {len}");
            }
        }
    }
}

/// The kernel opens datagrams that ring has sealed, with and without a UDP checksum.
#[test]
fn datagram_encrypted_by_the_ring_library_is_decrypted_by_the_kernel() {
    if !root("datagram_encrypted_by_the_ring_library_is_decrypted_by_the_kernel") {
        return;
    }
    for cipher in CIPHERS {
        let [there, _] = directions(cipher);
        let (_, mut receiver) = pair(v4(), cipher, &[]);
        let mut clear = hooks();
        crate::open(&mut clear, v4(), &[]);
        for (number, len) in [(0, 1), (7, 100), (1 << 40, 1200), ((1 << 47) - 1, 33)] {
            let payload = vec![number as u8 ^ 0xa5; len];
            let text = behind(&v4(), &framed(&clear, &v4(), &payload));
            let mut frame = datagram(&v4(), &there.seal(0, number, &text));
            let is_summed = len != 33;
            if !is_summed {
                frame[udp_at(&v4()) + 6..][..2].fill(0);
            }
            let (why, _, opened) = reason(&mut receiver, &other_side(&v4()), FunctionHook::Rx, &frame);
            assert_eq!(why, PacketReason::LetIn, "{cipher:?} {number}");
            let (why, _, after) = reason(&mut receiver, &other_side(&v4()), FunctionHook::Repair, &opened);
            assert_eq!(why, PacketReason::Delivered);
            let mut plain = datagram(&v4(), &payload);
            if !is_summed {
                plain[udp_at(&v4()) + 6..][..2].fill(0);
            }
            assert_eq!(after[..plain.len()], plain);
        }
    }
}

/// A datagram with any changed bit or any other length is only counted, and not delivered.
#[test]
fn encrypted_datagram_with_any_changed_bit_or_length_is_refused() {
    if !root("encrypted_datagram_with_any_changed_bit_or_length_is_refused") {
        return;
    }
    for cipher in CIPHERS {
        let there = other_side(&v4());
        let (sender, mut receiver) = pair(v4(), cipher, &["number", "order"]);
        let good = framed(&sender, &v4(), b"attack at dawn");
        for at in udp_at(&v4()) + 8..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                let (why, verdict, _) = reason(&mut receiver, &there, FunctionHook::Rx, &bad);
                let tail = (at + TAIL).checked_sub(good.len());
                let want = match (tail, bit) {
                    (Some(0), _) | (Some(PHASE), 4..) => PacketReason::Malformed,
                    (Some(PHASE), 0) => PacketReason::NoKeys,
                    // The unused bits of the tail (the last bytes of a sealed datagram) have no meaning, but are
                    // authenticated like its other bits.
                    _ => PacketReason::Unopened,
                };
                assert_eq!((why, verdict), (want, XDP_DROP), "{cipher:?} byte {at} bit {bit}");
            }
        }
        // Datagrams are cut at the front, within the ciphertext, and at the end, and their UDP and IP headers have the
        // matching lengths.
        let sealed = behind(&v4(), &good);
        for cut in 1..=sealed.len() {
            for shorter in [&sealed[cut..], &sealed[..sealed.len() - cut]] {
                let (why, verdict, _) =
                    reason(&mut receiver, &there, FunctionHook::Rx, &datagram(&v4(), shorter));
                assert!(matches!(why, PacketReason::Unopened | PacketReason::Malformed), "{cut}: {why:?}");
                assert_eq!(verdict, XDP_DROP);
            }
        }
        // The kernel also drops datagrams that were sealed with another key or for the other direction, framed without
        // sealing, or that are empty.
        let [_, back] = directions(cipher);
        let mut clear = hooks();
        crate::open(&mut clear, v4(), &["number", "order"]);
        let table = [
            (datagram(&v4(), &SealedDirection::new(cipher, 77).seal(0, 0, &[0; 40])), PacketReason::Unopened),
            (datagram(&v4(), &back.seal(0, 0, &[0; 40])), PacketReason::Unopened),
            (framed(&clear, &v4(), b"in clear"), PacketReason::Malformed),
            (datagram(&v4(), b""), PacketReason::Malformed),
        ];
        for (frame, want) in table {
            assert_eq!(reason(&mut receiver, &there, FunctionHook::Rx, &frame).0, want);
        }
        // TC does not accept a sealed packet that XDP has not opened.
        let (why, verdict, _) = reason(&mut receiver, &there, FunctionHook::Repair, &good);
        assert_eq!((why, verdict), (PacketReason::Malformed, SHOT));
        // The unchanged datagram is still accepted after the forged ones.
        assert_eq!(reason(&mut receiver, &there, FunctionHook::Rx, &good).0, PacketReason::LetIn);
    }
}

#[test]
fn replayed_datagram_is_refused() {
    if !root("replayed_datagram_is_refused") {
        return;
    }
    let there = other_side(&v4());
    // The list of functions is empty, so only the sealing programs can detect a replay.
    let (sender, mut receiver) = pair(v4(), SealedCipher::ChaCha20Poly1305, &[]);
    let frames: Vec<_> = (0..1100).map(|_| framed(&sender, &v4(), b"payload")).collect();
    use PacketReason::{LetIn, Replayed};
    let arrivals = [
        (3, LetIn),
        (3, Replayed),
        (1, LetIn),
        (0, LetIn),
        (1, Replayed),
        (1025, LetIn),
        (1025, Replayed),
        (1, Replayed),
        (2, LetIn),
        (1026, LetIn),
        (2, Replayed),
        (1099, LetIn),
        // Number 75 is too old to tell whether it is a replay: number 1099 uses the same entry of the replay window.
        (75, Replayed),
        (76, LetIn),
    ];
    for (number, want) in arrivals {
        let (why, verdict, _) = reason(&mut receiver, &there, FunctionHook::Rx, &frames[number]);
        assert_eq!(why, want, "{number}");
        assert_eq!(verdict, if want == LetIn { XDP_PASS } else { XDP_DROP });
    }
}

/// Two keys are valid at the same time. Each has its own datagram numbers, and is valid until its limit is reached or
/// it is discarded.
#[test]
fn session_keys_are_installed_and_removed() {
    if !root("session_keys_are_installed_and_removed") {
        return;
    }
    let near = v4();
    let far = other_side(&v4());
    let mut sender = hooks();
    let mut receiver = hooks();
    open_keyless(&mut sender, near, &[]);
    open_keyless(&mut receiver, far, &[]);
    let at_tx =
        |sender: &mut PacketHooks| reason(sender, &near, FunctionHook::Tx, &datagram(&near, b"payload"));
    assert!(sender.seal_with(&near, 0).is_err());
    assert_eq!(sender.wear(&near).expect("none"), None);
    let (why, verdict, _) = at_tx(&mut sender);
    assert_eq!((why, verdict), (PacketReason::NoKeys, SHOT));
    let [one, two] = [1, 2].map(|seed| {
        [
            SealedDirection::new(SealedCipher::Aes128Gcm, seed),
            SealedDirection::new(SealedCipher::Aes128Gcm, 99),
        ]
    });
    let turned = |[there, back]: [SealedDirection; 2]| [back, there];
    sender.install(&near, 0, &keys(one, 3)).expect("keys");
    // An installed key opens datagrams, but seals none before seal_with() is called.
    assert_eq!(at_tx(&mut sender).0, PacketReason::NoKeys);
    sender.seal_with(&near, 0).expect("keys");
    let first = [(); 3].map(|()| framed(&sender, &near, b"payload"));
    assert_eq!(at_tx(&mut sender).0, PacketReason::NoKeys, "it is worn");
    assert!(sender.wear(&near).expect("some").expect("some").sealed >= 3);
    let at_rx = |receiver: &mut PacketHooks, frame: &[u8]| reason(receiver, &far, FunctionHook::Rx, frame).0;
    assert_eq!(at_rx(&mut receiver, &first[0]), PacketReason::NoKeys);
    receiver.install(&far, 0, &keys(turned(one), ALL)).expect("keys");
    assert_eq!(at_rx(&mut receiver, &first[0]), PacketReason::LetIn);
    receiver.install(&far, 1, &keys(turned(two), ALL)).expect("keys");
    install(&mut sender, &near, two, 1);
    let second = framed(&sender, &near, b"payload");
    assert_eq!(behind(&near, &second)[behind(&near, &second).len() - TAIL..][1..], [0x11, 0, 0, 0, 0, 0, 0]);
    assert_eq!(at_rx(&mut receiver, &second), PacketReason::LetIn);
    // Packets that were sealed with the old key are still opened. Packets that were received before are refused as
    // replays.
    assert_eq!(at_rx(&mut receiver, &first[1]), PacketReason::LetIn);
    assert_eq!(at_rx(&mut receiver, &first[0]), PacketReason::Replayed);
    receiver.discard(&far, 0).expect("discarded");
    assert_eq!(at_rx(&mut receiver, &first[2]), PacketReason::NoKeys);
    // Datagrams that fail authentication are counted, so that the daemon renews the key in time.
    receiver.seal_with(&far, 1).expect("keys");
    let mut bad = framed(&sender, &near, b"payload");
    *bad.get_mut(udp_at(&near) + 8).expect("a text") ^= 1;
    receiver.active();
    assert_eq!(at_rx(&mut receiver, &bad), PacketReason::Unopened);
    assert_eq!(receiver.wear(&far).expect("some").expect("some").failures, 1);
    assert_eq!(receiver.active(), [far]);
    // The next session with the same index does not get the old keys.
    receiver.close(&far).expect("closed");
    open_keyless(&mut receiver, far, &[]);
    assert_eq!(at_rx(&mut receiver, &second), PacketReason::NoKeys);
    // A session without sealing has no keys.
    let mut clear = hooks();
    crate::open(&mut clear, near, &[]);
    assert!(clear.install(&near, 0, &keys(one, ALL)).is_err() && clear.wear(&near).is_err());
    let (why, ..) = reason(&mut clear, &near, FunctionHook::Rx, &datagram(&far, b"payload, payload"));
    assert_eq!(why, PacketReason::Malformed);
}

#[test]
fn control_message_of_an_encrypted_session_must_be_encrypted() {
    if !root("control_message_of_an_encrypted_session_must_be_encrypted") {
        return;
    }
    let near = v4();
    let far = other_side(&v4());
    let (sender, mut receiver) = pair(v4(), SealedCipher::ChaCha20Poly1305, &["number"]);
    let message = sender.frame_message(&near, TalkMessage::Says(3, 77)).expect("a message");
    // An unsealed message of the daemon must be dropped, also if its last bytes imitate the current or the previous
    // format of sealed datagrams.
    for bits in [0x10, 0x12] {
        let as_sealed = [&message[..], &[9; 24], &[MAGIC, bits, 0, 0, 0, 0, 0, 9]].concat();
        for payload in [&message[..], &as_sealed] {
            let (why, verdict, _) = reason(&mut receiver, &far, FunctionHook::Rx, &datagram(&near, payload));
            assert!(
                matches!(why, PacketReason::Malformed | PacketReason::Unopened) && verdict == XDP_DROP,
                "{why:?}"
            );
        }
    }
    assert_eq!(receiver.receive_messages(Duration::ZERO).expect("messages"), []);
    let hello = framed_message(&sender, &near, TalkMessage::Says(3, 77));
    let (why, _, opened) = reason(&mut receiver, &far, FunctionHook::Rx, &hello);
    assert_eq!(why, PacketReason::LetIn);
    assert_eq!(reason(&mut receiver, &far, FunctionHook::Repair, &opened).0, PacketReason::Answered);
    assert_eq!(receiver.receive_messages(Duration::ZERO).expect("messages").len(), 1);
}

/// A session whose sending the daemon has paused (`hold`) sends nothing. A packet that is authenticated with a new key
/// counts as forged until the peer has the new key, too.
#[test]
fn packet_is_authenticated_with_the_latest_session_key() {
    if !root("packet_is_authenticated_with_the_latest_session_key") {
        return;
    }
    let near = v4();
    let far = other_side(&v4());
    let mut sender = hooks();
    let mut receiver = hooks();
    crate::open(&mut sender, near, &[]);
    crate::open(&mut receiver, far, &[]);
    sender.set_key(&near, [7; 16]).expect("a key");
    sender.hold(&near).expect("held");
    let (why, ..) = reason(&mut sender, &near, FunctionHook::Tx, &datagram(&near, b"payload"));
    assert_eq!(why, PacketReason::Paused);
    sender.resume(&near).expect("resumed");
    let (why, _, framed) = reason(&mut sender, &near, FunctionHook::Tx, &datagram(&near, b"payload"));
    assert_eq!(why, PacketReason::Sent);
    assert_eq!(reason(&mut receiver, &far, FunctionHook::Rx, &framed).0, PacketReason::Forged);
    receiver.set_key(&far, [7; 16]).expect("a key");
    assert_eq!(reason(&mut receiver, &far, FunctionHook::Rx, &framed).0, PacketReason::LetIn);
}

/// Returns a daemon's message that is sealed with the first unused datagram number.
fn framed_message(sender: &PacketHooks, ends: &SessionEnds, message: TalkMessage) -> Vec<u8> {
    let [there, _] = directions(SealedCipher::ChaCha20Poly1305);
    datagram(ends, &there.seal(0, 900, &sender.frame_message(ends, message).expect("a message")))
}

/// A retransmission is sealed with a new datagram number. The same ciphertext is never sent twice, although the
/// plaintext is the same.
#[test]
fn retransmission_is_sealed_anew_with_the_original_plaintext() {
    if !root("retransmission_is_sealed_anew_with_the_original_plaintext") {
        return;
    }
    let near = v4();
    let far = other_side(&v4());
    let (mut sender, receiver) = pair(near, SealedCipher::ChaCha20Poly1305, &["number", "repair"]);
    let [there, back] = directions(SealedCipher::ChaCha20Poly1305);
    let first = framed(&sender, &near, b"payload");
    let clear_request = behind(&far, &request(&receiver, &far, 0));
    let asked = datagram(&far, &back.seal(0, 0, &clear_request));
    let (why, _, opened) = reason(&mut sender, &near, FunctionHook::Rx, &asked);
    assert_eq!(why, PacketReason::LetIn);
    let (why, verdict, again) = reason(&mut sender, &near, FunctionHook::Repair, &opened);
    assert_eq!((why, verdict), (PacketReason::Resent, REDIRECT));
    // The retransmission is redirected to TC egress, where it is sealed. The test lost_packets_are_sent_again checks
    // that on a wire.
    let (_, text) = there.open(&behind(&near, &first));
    assert_eq!(behind(&near, &again), text);
}

/// A host accepts some UDP packets that the BPF programs cannot parse. Between the addresses of a sealed session such
/// packets are dropped in both directions; between other addresses they pass.
#[test]
fn packet_that_cannot_be_sealed_or_opened_is_dropped() {
    if !root("packet_that_cannot_be_sealed_or_opened_is_dropped") {
        return;
    }
    for ends in [v4(), v6()] {
        let (mut sender, mut receiver) = pair(ends, SealedCipher::ChaCha20Poly1305, &["number"]);
        let mut clear = hooks();
        crate::open(&mut clear, ends, &["number"]);
        for frame in odd(&ends) {
            let (why, verdict, _) = reason(&mut sender, &ends, FunctionHook::Tx, &frame);
            assert_eq!((why, verdict), (PacketReason::Fragment, SHOT), "{ends:?} {frame:?}");
            let (why, verdict, _) = reason(&mut receiver, &other_side(&ends), FunctionHook::Repair, &frame);
            assert_eq!((why, verdict), (PacketReason::Fragment, SHOT), "{ends:?} {frame:?}");
            assert_eq!(run(&clear, FunctionHook::Tx, &frame).0, PASS_ON);
        }
        // The programs do not drop TCP packets, nor packets of other addresses.
        let mut stranger = ends;
        stranger.remote.set_ip(stranger.local.ip());
        let mut tcp = odd(&ends).swap_remove(0);
        tcp[if ends.local.is_ipv4() { 23 } else { 54 }] = 6;
        for frame in odd(&stranger).into_iter().chain([tcp]) {
            assert_eq!(run(&sender, FunctionHook::Tx, &frame).0, PASS_ON, "{frame:?}");
            assert_eq!(run(&receiver, FunctionHook::Repair, &frame).0, PASS_ON, "{frame:?}");
        }
        // After the last session between the addresses is closed, malformed packets pass again.
        let session = |port| {
            let mut other = ends;
            other.local.set_port(port);
            other
        };
        open_keyless(&mut sender, session(1), &[]);
        sender.close(&ends).expect("closed");
        let frame = &odd(&ends)[0];
        assert_eq!(reason(&mut sender, &session(1), FunctionHook::Tx, frame).0, PacketReason::Fragment);
        sender.close(&session(1)).expect("closed");
        assert_eq!(run(&sender, FunctionHook::Tx, frame).0, PASS_ON);
    }
}

/// Returns packets that the programs cannot parse: a first and a later fragment. For IPv6 there are also packets with
/// many extension headers, and with a payload length of 0.
pub fn odd(ends: &SessionEnds) -> Vec<Vec<u8>> {
    const OPTIONS: u8 = 60;
    const FRAGMENT: u8 = 44;
    let plain = datagram(ends, b"payload, payload, payload");
    if ends.local.is_ipv4() {
        let with = |field: [u8; 2]| {
            let mut frame = plain.clone();
            frame[ETHERNET + 6..][..2].copy_from_slice(&field);
            frame
        };
        return vec![with([0x20, 0]), with([0x20, 9]), with([0, 9])];
    }
    let behind = |first: u8, headers: &[u8]| {
        let mut frame = plain.clone();
        frame[ETHERNET + 6] = first;
        let length = u16::from_be_bytes([frame[ETHERNET + 4], frame[ETHERNET + 5]]) + headers.len() as u16;
        frame[ETHERNET + 4..][..2].copy_from_slice(&length.to_be_bytes());
        frame.splice(ETHERNET + 40..ETHERNET + 40, headers.iter().copied());
        frame
    };
    let options = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
    let many = [[OPTIONS; 4].map(options).concat(), options(17).to_vec()].concat();
    let mut no_length = plain.clone();
    no_length[ETHERNET + 44..][..2].fill(0);
    vec![
        behind(FRAGMENT, &[17, 0, 0, 1, 0, 0, 0, 7]),
        behind(FRAGMENT, &[17, 0, 0, 0x48, 0, 0, 0, 7]),
        behind(FRAGMENT, &[OPTIONS, 0, 0, 1, 0, 0, 0, 7]),
        behind(OPTIONS, &many),
        no_length,
    ]
}

#[test]
fn too_long_datagram_is_not_sent() {
    if !root("too_long_datagram_is_not_sent") {
        return;
    }
    let (mut sender, _) = pair(v4(), SealedCipher::ChaCha20Poly1305, &[]);
    for len in [SEALED_MAX - FRAME_BYTES + 1, 1600, 3000] {
        let (why, verdict, _) = reason(&mut sender, &v4(), FunctionHook::Tx, &datagram(&v4(), &vec![0; len]));
        assert_eq!((why, verdict), (PacketReason::TooLong, SHOT), "{len}");
    }
}

#[test]
fn random_frames_get_a_verdict() {
    if !root("random_frames_get_a_verdict") {
        return;
    }
    let mut random = fastrand::Rng::with_seed(15);
    let near = v4();
    let far = other_side(&v4());
    let (sender, mut receiver) = pair(near, SealedCipher::Aes128Gcm, &["number", "order", "repair"]);
    let good = behind(&near, &framed(&sender, &near, &[7; 50]));
    for round in 0..3000 {
        let authentic: Vec<u8> = match round % 2 {
            0 => (0..random.usize(0..100)).map(|_| random.u8(..)).collect(),
            _ => good.clone(),
        };
        let mut payload = authentic.clone();
        for _ in 0..random.usize(1..4) {
            if !payload.is_empty() {
                let at = random.usize(..payload.len());
                payload[at] = payload[at].wrapping_add(random.u8(1..));
            }
        }
        if payload.len() > TAIL && random.bool() {
            let at = payload.len() - TAIL;
            payload[at..at + 2].copy_from_slice(&[MAGIC, 0x10 | random.u8(..4)]);
        }
        if payload == authentic {
            payload.push(0);
        }
        let frame = datagram(&near, &payload);
        let len = random.usize(ETHERNET + 20..=frame.len());
        let frame = &frame[..if random.bool() { len } else { frame.len() }];
        assert!(matches!(run(&receiver, FunctionHook::Rx, frame).0, XDP_DROP | XDP_PASS));
        assert!(matches!(run(&receiver, FunctionHook::Repair, frame).0, PASS_ON | SHOT));
    }
    let counts = counted(&mut receiver, &far);
    let is_refusal = |reason: &PacketReason| {
        matches!(
            reason,
            PacketReason::Malformed | PacketReason::Forged | PacketReason::Unopened | PacketReason::NoKeys
        )
    };
    assert!(!counts.is_empty() && counts.iter().all(|(reason, _)| is_refusal(reason)), "{counts:?}");
}

/// Retransmission requests, retransmissions and the daemons' messages are sealed, too, on a path that loses packets in
/// both directions. The path sees no clear text, and no datagram twice.
#[test]
fn lost_packets_are_sent_again() {
    const SENT: u32 = 3000;
    if !root("lost_packets_are_sent_again") {
        return;
    }
    for (family, cipher) in [
        (4, SealedCipher::ChaCha20Poly1305),
        (6, SealedCipher::Aes128Gcm),
        (4, SealedCipher::Aes128Gcm),
        (6, SealedCipher::ChaCha20Poly1305),
    ] {
        let site = PacketHook::new("sealed", family);
        let (near, far) = site.sockets();
        let there = other_side(&site.ends);
        let (mut sender, mut receiver) = pair(site.ends, cipher, &["number", "repair"]);
        site.attach(&site.network.publisher, &mut sender);
        site.attach(&site.network.subscriber, &mut receiver);
        let stop = AtomicBool::new(false);
        let pace = TrafficPace::default();
        let lossy = |count: u64| {
            if count % 7 == 3 || count % 61 < 3 { DatagramFate::Lose } else { DatagramFate::Pass }
        };
        let wire = site.wire();
        let capture = PacketCapture::on(&site.network.relay, "west");
        let captured = Mutex::new(Vec::new());
        let got = thread::scope(|scope| {
            let _end = AtEnd(&stop, true);
            scope.spawn(|| wire.run(&stop, lossy));
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    captured.lock().expect("frames").extend(capture.frames());
                    thread::sleep(Duration::from_millis(1)); // exact: interval at which the captured packets are read
                }
            });
            let receiving = scope.spawn(|| pace.receive(&far, SENT));
            scope.spawn(|| pace.send(&near, SENT));
            while !receiving.is_finished() {
                inside(&site.network.publisher, || sender.say(&site.ends, pace.last()).expect("said"));
                // exact: the interval between GRAFT_LAST messages, which reveal that the latest packets were lost
                thread::sleep(Duration::from_millis(20));
            }
            stop.store(true, Ordering::Relaxed);
            receiving.join().expect("messages")
        });
        println!("sender {:?}", counted(&mut sender, &site.ends));
        println!("receiver {:?}", counted(&mut receiver, &there));
        assert_all_once(&got, SENT);
        assert!(count(&mut sender, &site.ends, PacketReason::Resent) >= u64::from(SENT) / 7);
        assert_eq!(count(&mut receiver, &there, PacketReason::Delivered), u64::from(SENT));
        for reason in
            [PacketReason::Unopened, PacketReason::Replayed, PacketReason::Malformed, PacketReason::Forged]
        {
            assert_eq!(count(&mut receiver, &there, reason), 0, "{reason:?}");
        }
        let mut frames = captured.into_inner().expect("frames");
        frames.extend(capture.frames());
        let [out, back] = assert_sealed(&site.ends, &frames, directions(cipher));
        assert!(out + back > 3000 && back > 100, "{out} out, {back} back");
    }
}

/// Packets that functions send are sealed, too: acknowledgements, retransmissions, and parity packets.
#[test]
fn acknowledgements_retransmissions_and_parity_packets_are_encrypted() {
    const SENT: u32 = 1500;
    if !root("acknowledgements_retransmissions_and_parity_packets_are_encrypted") {
        return;
    }
    let parity: &[&str] = &["window", "number", "fec", "repair", "acknowledge"];
    use SealedCipher::{Aes128Gcm, ChaCha20Poly1305};
    use XdpMode::{Auto, Generic};
    for (family, mode, cipher, functions) in [
        (4, Auto, ChaCha20Poly1305, SELECTIVE),
        (6, Auto, Aes128Gcm, GO_BACK),
        (4, Auto, Aes128Gcm, parity),
        (6, Generic, ChaCha20Poly1305, parity),
        (4, Generic, ChaCha20Poly1305, GO_BACK),
        (4, Generic, ChaCha20Poly1305, parity),
        (4, Auto, ChaCha20Poly1305, GO_BACK),
        (6, Auto, Aes128Gcm, SELECTIVE),
        (6, Auto, ChaCha20Poly1305, parity),
    ] {
        let parameters = [
            ("window", "packets", 64),
            ("repair", "retry_us", 20_000),
            ("repair", "tries", 0),
            ("gobackn", "retry_us", 20_000),
            ("fec", "packets", 8),
        ];
        let site = PacketHook { mode, ..PacketHook::new("sealedf", family) };
        let (near, far) = site.sockets();
        match family {
            4 => setsockopt(&near, sockopt::Ipv4RecvErr, &true).expect("errors"),
            _ => setsockopt(&near, sockopt::Ipv6RecvErr, &true).expect("errors"),
        }
        let there = other_side(&site.ends);
        let make = || hooks_of(functions, &parameters);
        let (mut sender, mut receiver) = pair_of(site.ends, cipher, functions, make);
        site.attach(&site.network.publisher, &mut sender);
        site.attach(&site.network.subscriber, &mut receiver);
        let stop = AtomicBool::new(false);
        let lossy = |count: u64| if count % 17 == 3 { DatagramFate::Lose } else { DatagramFate::Pass };
        let wire = site.wire();
        let capture = PacketCapture::on(&site.network.relay, "west");
        let captured = Mutex::new(Vec::new());
        let got = thread::scope(|scope| {
            let _end = AtEnd(&stop, true);
            scope.spawn(|| wire.run(&stop, lossy));
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    captured.lock().expect("frames").extend(capture.frames());
                    thread::sleep(Duration::from_millis(1)); // exact: interval at which the captured packets are read
                }
            });
            get_to_know(&site, &sender, &mut receiver);
            let receiving = scope.spawn(|| receive(&far, SENT as usize));
            let sending = scope.spawn(|| send_into_window(&near, 0..SENT));
            while !receiving.is_finished() || !sending.is_finished() {
                let next = sender.progress(&site.ends).expect("progress").next;
                inside(&site.network.publisher, || {
                    sender.say(&site.ends, TalkMessage::Last(next)).expect("said");
                });
                // exact: the interval between GRAFT_LAST messages, which reveal that the latest packets were lost
                thread::sleep(Duration::from_millis(20));
            }
            stop.store(true, Ordering::Relaxed);
            sending.join().expect("sent");
            receiving.join().expect("messages")
        });
        println!("{functions:?} sender {:?}", counted(&mut sender, &site.ends));
        println!("{functions:?} receiver {:?}", counted(&mut receiver, &there));
        assert_all_once(&got, SENT);
        assert!(functions != GO_BACK || got.is_sorted(), "out of order");
        assert_eq!(count(&mut sender, &site.ends, PacketReason::Sent), u64::from(SENT));
        if functions == parity {
            assert_eq!(count(&mut sender, &site.ends, PacketReason::Protected), u64::from(SENT) / 8);
            assert!(count(&mut receiver, &there, PacketReason::Recovered) > 0);
        }
        for reason in [
            PacketReason::Unopened,
            PacketReason::Replayed,
            PacketReason::Malformed,
            PacketReason::Forged,
            PacketReason::NoKeys,
            PacketReason::NoRoom,
            PacketReason::NoFunction,
        ] {
            assert_eq!(count(&mut sender, &site.ends, reason), 0, "{functions:?} {reason:?}");
            assert_eq!(count(&mut receiver, &there, reason), 0, "{functions:?} {reason:?}");
        }
        let mut frames = captured.into_inner().expect("frames");
        frames.extend(capture.frames());
        let [out, back] = assert_sealed(&site.ends, &frames, directions(cipher));
        assert!(out > 1400 && back > 500, "{functions:?}: {out} out, {back} back");
    }
}

/// No packet is sent without keys, neither by the application nor by a function. The application gets an error for its
/// own packet only.
#[test]
fn no_packet_of_application_or_function_is_sent_without_session_keys() {
    if !root("no_packet_of_application_or_function_is_sent_without_session_keys") {
        return;
    }
    let site = PacketHook::new("keyless", 4);
    let functions = ["number", "fec"];
    let mut sender = hooks_of(&functions, &[("fec", "packets", 2)]);
    open_keyless(&mut sender, site.ends, &functions);
    let eth = ifindex(&site.network.publisher, "eth");
    inside(&site.network.publisher, || sender.attach(eth, XdpMode::Auto).expect("attached"));
    let capture = PacketCapture::on(&site.network.relay, "west");
    let (near, _far) = site.sockets();
    for number in 0..4u8 {
        near.send(&[number; 100]).expect("sent");
    }
    // Six packets were refused: two data packets without parity, and two data packets with one parity packet each.
    assert_eq!(count(&mut sender, &site.ends, PacketReason::NoKeys), 6);
    let frames = capture.frames();
    assert!(!frames.iter().any(|frame| crate::traffic::is_datagram(frame)), "{frames:?}");
}

/// Checks that every datagram can be opened with the key of its direction, and that no datagram number repeats. Returns
/// the number of datagrams in each direction.
fn assert_sealed(ends: &SessionEnds, frames: &[Vec<u8>], [there, back]: [SealedDirection; 2]) -> [usize; 2] {
    let mut numbers = [std::collections::BTreeSet::new(), std::collections::BTreeSet::new()];
    for frame in frames {
        let at = udp_at(ends);
        if frame.len() < at + 8 || !crate::traffic::is_datagram(frame) {
            continue;
        }
        let is_back = frame[at..at + 2] == ends.remote.port().to_be_bytes();
        let payload = behind(ends, frame);
        let (number, text) = [there, back][usize::from(is_back)].open(&payload);
        assert!(numbers[usize::from(is_back)].insert(number), "number {number} twice");
        let clear = &text[..text.len() - FRAME_BYTES];
        let is_there = clear.len() >= TAG && payload.windows(clear.len()).any(|window| window == clear);
        assert!(!is_there, "clear text on the wire");
    }
    numbers.map(|numbers| numbers.len())
}

/// A measurement, not a check: `cargo test --release -p millrace-graft-kernel --test packets -- --ignored --nocapture
/// encryption_time_per_packet_is_measured`
#[test]
#[ignore = "soak: measures, on a quiet machine"]
fn encryption_time_per_packet_is_measured() {
    const ROUNDS: usize = 2001;
    if !root("encryption_time_per_packet_is_measured") {
        return;
    }
    let median = |mut times: Vec<u128>| {
        times.sort_unstable();
        (times[ROUNDS / 10], times[ROUNDS / 2], times[ROUNDS * 9 / 10])
    };
    let show = |what: &str, sender: &PacketHooks, receiver: &PacketHooks, len: usize| {
        let mut out = Vec::new();
        let mut back = Vec::new();
        for _ in 0..ROUNDS {
            let sent = sender.run(FunctionHook::Tx, &datagram(&v4(), &vec![7; len])).expect("a run");
            out.push(sent.time.as_nanos());
            back.push(receiver.run(FunctionHook::Rx, &sent.frame).expect("a run").time.as_nanos());
        }
        println!("{what}, {len} bytes, ns at p10, p50, p90: tx {:?}, rx {:?}", median(out), median(back));
    };
    for len in [100, 1200] {
        let mut sender = hooks();
        let mut receiver = hooks();
        crate::open(&mut sender, v4(), &["number"]);
        crate::open(&mut receiver, other_side(&v4()), &["number"]);
        show("clear", &sender, &receiver, len);
        for cipher in CIPHERS {
            let (sender, receiver) = pair(v4(), cipher, &["number"]);
            show(&format!("{cipher:?}"), &sender, &receiver, len);
        }
    }
}
