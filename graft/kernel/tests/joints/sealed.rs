//! Sealed sessions: what leaves, what comes in, and what does not. A second implementation of the AEADs, ring's, seals and
//! opens what the kernel has to open and has sealed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use millrace_graft_kernel::joint::{
    Ends, FRAME_BYTES, Joint, Joints, KeyWord, Keys, Protocol, Reason, SEAL_BYTES, SEALED_MAX, Session, Word,
};
use millrace_kernel::crypto::QuicKeys;
use millrace_kernel::xdp::Mode;
use nix::sys::socket::{setsockopt, sockopt};
use ring::aead::{AES_128_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

use crate::datagrams::{ETHERNET, PASS_ON, REDIRECT, SHOT, XDP_DROP, XDP_PASS, datagram, v4, v6};
use crate::frames::{framed, reason, request, run};
use crate::net::{Capture, ifindex, inside, root};
use crate::traffic::{
    AtEnd, Fate, GO_BACK, Pace, SELECTIVE, Site, assert_all_once, get_to_know, receive, send_into_window,
};
use crate::{KEY, count, counted, joints, joints_of, list, other_side};

const WORD_KEY: [u8; 16] = *b"words about keys";
const MAGIC: u8 = 0x73;
const TAIL: usize = 8;
const TAG: usize = 16;
const PHASE: usize = 1;
const ALL: u64 = 1 << 47;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    ChaCha20Poly1305,
    Aes128Gcm,
}

const CIPHERS: [Cipher; 2] = [Cipher::ChaCha20Poly1305, Cipher::Aes128Gcm];

/// One direction, as both implementations know it.
#[derive(Clone, Copy)]
struct Direction {
    cipher: Cipher,
    key: [u8; 32],
    iv: [u8; 12],
}

impl Direction {
    fn new(cipher: Cipher, seed: u8) -> Self {
        Self {
            cipher,
            key: std::array::from_fn(|at| seed ^ (at as u8).wrapping_mul(37)),
            iv: std::array::from_fn(|at| seed ^ (at as u8).wrapping_mul(91)),
        }
    }

    fn for_kernel(&self) -> QuicKeys {
        match self.cipher {
            Cipher::ChaCha20Poly1305 => QuicKeys::chacha20_poly1305(&self.key, &self.iv, &[0; 32]),
            Cipher::Aes128Gcm => {
                let key = self.key.first_chunk().expect("16 bytes");
                QuicKeys::aes128_gcm(key, &self.iv, &[0; 16])
            }
        }
    }

    fn for_ring(&self) -> LessSafeKey {
        let (algorithm, bytes): (&Algorithm, _) = match self.cipher {
            Cipher::ChaCha20Poly1305 => (&CHACHA20_POLY1305, &self.key[..]),
            Cipher::Aes128Gcm => (&AES_128_GCM, &self.key[..16]),
        };
        LessSafeKey::new(UnboundKey::new(algorithm, bytes).expect("a key"))
    }

    fn nonce(&self, number: u64) -> Nonce {
        let mut nonce = self.iv;
        nonce[4..].iter_mut().zip(number.to_be_bytes()).for_each(|(byte, with)| *byte ^= with);
        Nonce::assume_unique_for_key(nonce)
    }

    /// What is behind the UDP header, of a text.
    fn seal(&self, phase: u8, number: u64, text: &[u8]) -> Vec<u8> {
        let tail = [&[MAGIC, 0x10 | phase][..], &number.to_be_bytes()[2..]].concat();
        let mut sealed = text.to_vec();
        let aad = Aad::from(&tail);
        self.for_ring().seal_in_place_append_tag(self.nonce(number), aad, &mut sealed).expect("sealed");
        [sealed, tail].concat()
    }

    /// Its number, and the text.
    fn open(&self, sealed: &[u8]) -> (u64, Vec<u8>) {
        let (text, tail) = sealed.split_at(sealed.len() - TAIL);
        assert_eq!(tail[0], MAGIC);
        let number = tail[2..].iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let mut text = text.to_vec();
        let opened = self.for_ring().open_in_place(self.nonce(number), Aad::from(tail), &mut text);
        (number, opened.expect("it opens").to_vec())
    }
}

/// From the first end to the second, and back.
fn directions(cipher: Cipher) -> [Direction; 2] {
    [Direction::new(cipher, 3), Direction::new(cipher, 200)]
}

fn keys([there, back]: [Direction; 2], limit: u64) -> Keys {
    Keys { seals: there.for_kernel(), opens: back.for_kernel(), limit }
}

fn open_keyless(joints: &mut Joints, ends: Ends, functions: &[&str]) {
    open_keyless_over(joints, ends, functions, Protocol::Udp);
}

fn open_keyless_over(joints: &mut Joints, ends: Ends, functions: &[&str], protocol: Protocol) {
    let session = Session { ends, key: KEY, list: list(functions), budget_ns: 0, protocol };
    joints.open_sealed(session, WORD_KEY).unwrap_or_else(|error| panic!("{error}"));
}

fn install(joints: &mut Joints, ends: &Ends, directions: [Direction; 2], phase: u8) {
    joints.install(ends, phase, &keys(directions, ALL)).expect("keys");
    joints.seal_with(ends, phase).expect("keys");
}

/// Both ends of a session, with keys.
fn pair(ends: Ends, cipher: Cipher, functions: &[&str]) -> (Joints, Joints) {
    pair_of(ends, cipher, functions, joints)
}

pub fn pair_of(
    ends: Ends,
    cipher: Cipher,
    functions: &[&str],
    make: impl Fn() -> Joints,
) -> (Joints, Joints) {
    pair_over(Protocol::Udp, ends, cipher, functions, make)
}

pub fn pair_over(
    protocol: Protocol,
    ends: Ends,
    cipher: Cipher,
    functions: &[&str],
    make: impl Fn() -> Joints,
) -> (Joints, Joints) {
    let (mut sender, mut receiver) = (make(), make());
    let [there, back] = directions(cipher);
    for (joints, ends, directions) in
        [(&mut sender, ends, [there, back]), (&mut receiver, other_side(&ends), [back, there])]
    {
        open_keyless_over(joints, ends, functions, protocol);
        install(joints, &ends, directions, 0);
    }
    (sender, receiver)
}

fn udp_at(ends: &Ends) -> usize {
    ETHERNET + if ends.local.is_ipv4() { 20 } else { 40 }
}

/// What is behind the UDP header.
fn behind(ends: &Ends, frame: &[u8]) -> Vec<u8> {
    frame[udp_at(ends) + 8..].to_vec()
}

#[test]
fn a_datagram_comes_out_as_it_went_in() {
    if !root("a_datagram_comes_out_as_it_went_in") {
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
                let (why, verdict, opened) = reason(&mut receiver, &at, Joint::Rx, &frame);
                assert_eq!((why, verdict), (Reason::LetIn, XDP_PASS), "{cipher:?} {functions:?} {len}");
                assert!(crate::net::check_frame(&opened[..plain.len() + FRAME_BYTES]));
                let (why, verdict, after) = reason(&mut receiver, &at, Joint::Repair, &opened);
                assert_eq!((why, verdict), (Reason::Delivered, PASS_ON));
                assert_eq!(after[..plain.len()], plain, "{cipher:?} {functions:?} {len}");
            }
        }
    }
}

/// The kernel opens what another implementation has sealed, with and without a checksum.
#[test]
fn what_another_implementation_seals_is_opened() {
    if !root("what_another_implementation_seals_is_opened") {
        return;
    }
    for cipher in CIPHERS {
        let [there, _] = directions(cipher);
        let (_, mut receiver) = pair(v4(), cipher, &[]);
        let mut clear = joints();
        crate::open(&mut clear, v4(), &[]);
        for (number, len) in [(0, 1), (7, 100), (1 << 40, 1200), ((1 << 47) - 1, 33)] {
            let payload = vec![number as u8 ^ 0xa5; len];
            let text = behind(&v4(), &framed(&clear, &v4(), &payload));
            let mut frame = datagram(&v4(), &there.seal(0, number, &text));
            let is_summed = len != 33;
            if !is_summed {
                frame[udp_at(&v4()) + 6..][..2].fill(0);
            }
            let (why, _, opened) = reason(&mut receiver, &other_side(&v4()), Joint::Rx, &frame);
            assert_eq!(why, Reason::LetIn, "{cipher:?} {number}");
            let (why, _, after) = reason(&mut receiver, &other_side(&v4()), Joint::Repair, &opened);
            assert_eq!(why, Reason::Delivered);
            let mut plain = datagram(&v4(), &payload);
            if !is_summed {
                plain[udp_at(&v4()) + 6..][..2].fill(0);
            }
            assert_eq!(after[..plain.len()], plain);
        }
    }
}

/// Every bit, every length: nothing changes in the receiver but a counter.
#[test]
fn what_was_changed_on_the_way_does_nothing() {
    if !root("what_was_changed_on_the_way_does_nothing") {
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
                let (why, verdict, _) = reason(&mut receiver, &there, Joint::Rx, &bad);
                let tail = (at + TAIL).checked_sub(good.len());
                let want = match (tail, bit) {
                    (Some(0), _) | (Some(PHASE), 1 | 4..) => Reason::Malformed,
                    (Some(PHASE), 0) => Reason::NoKeys,
                    // Bits of the version that are not used say nothing else, and are authenticated.
                    _ => Reason::Unopened,
                };
                assert_eq!((why, verdict), (want, XDP_DROP), "{cipher:?} byte {at} bit {bit}");
            }
        }
        // Cut from the front, from the middle of the text, from the end: with lengths that say so.
        let sealed = behind(&v4(), &good);
        for cut in 1..=sealed.len() {
            for shorter in [&sealed[cut..], &sealed[..sealed.len() - cut]] {
                let (why, verdict, _) = reason(&mut receiver, &there, Joint::Rx, &datagram(&v4(), shorter));
                assert!(matches!(why, Reason::Unopened | Reason::Malformed), "{cut}: {why:?}");
                assert_eq!(verdict, XDP_DROP);
            }
        }
        // Of another key, in the other direction, in clear with a frame, and with nothing behind.
        let [_, back] = directions(cipher);
        let mut clear = joints();
        crate::open(&mut clear, v4(), &["number", "order"]);
        let table = [
            (datagram(&v4(), &Direction::new(cipher, 77).seal(0, 0, &[0; 40])), Reason::Unopened),
            (datagram(&v4(), &back.seal(0, 0, &[0; 40])), Reason::Unopened),
            (framed(&clear, &v4(), b"in clear"), Reason::Malformed),
            (datagram(&v4(), b""), Reason::Malformed),
        ];
        for (frame, want) in table {
            assert_eq!(reason(&mut receiver, &there, Joint::Rx, &frame).0, want);
        }
        // TC believes nothing that XDP has not opened.
        let (why, verdict, _) = reason(&mut receiver, &there, Joint::Repair, &good);
        assert_eq!((why, verdict), (Reason::Malformed, SHOT));
        // The good one is as good as before.
        assert_eq!(reason(&mut receiver, &there, Joint::Rx, &good).0, Reason::LetIn);
    }
}

#[test]
fn what_comes_again_does_nothing() {
    if !root("what_comes_again_does_nothing") {
        return;
    }
    let there = other_side(&v4());
    // A list that would not notice.
    let (sender, mut receiver) = pair(v4(), Cipher::ChaCha20Poly1305, &[]);
    let frames: Vec<_> = (0..1100).map(|_| framed(&sender, &v4(), b"payload")).collect();
    use Reason::{LetIn, Replayed};
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
        // Too old to tell: 1099 has its place.
        (75, Replayed),
        (76, LetIn),
    ];
    for (number, want) in arrivals {
        let (why, verdict, _) = reason(&mut receiver, &there, Joint::Rx, &frames[number]);
        assert_eq!(why, want, "{number}");
        assert_eq!(verdict, if want == LetIn { XDP_PASS } else { XDP_DROP });
    }
}

/// Two keys are live at the same time; each has its own numbers, and ends when it is worn or discarded.
#[test]
fn keys_come_and_go() {
    if !root("keys_come_and_go") {
        return;
    }
    let (near, far) = (v4(), other_side(&v4()));
    let (mut sender, mut receiver) = (joints(), joints());
    open_keyless(&mut sender, near, &[]);
    open_keyless(&mut receiver, far, &[]);
    let at_tx = |sender: &mut Joints| reason(sender, &near, Joint::Tx, &datagram(&near, b"payload"));
    assert!(sender.seal_with(&near, 0).is_err());
    assert_eq!(sender.wear(&near).expect("none"), None);
    let (why, verdict, _) = at_tx(&mut sender);
    assert_eq!((why, verdict), (Reason::NoKeys, SHOT));
    let [one, two] =
        [1, 2].map(|seed| [Direction::new(Cipher::Aes128Gcm, seed), Direction::new(Cipher::Aes128Gcm, 99)]);
    let turned = |[there, back]: [Direction; 2]| [back, there];
    sender.install(&near, 0, &keys(one, 3)).expect("keys");
    // To open with it is not yet to seal with it.
    assert_eq!(at_tx(&mut sender).0, Reason::NoKeys);
    sender.seal_with(&near, 0).expect("keys");
    let first = [(); 3].map(|()| framed(&sender, &near, b"payload"));
    assert_eq!(at_tx(&mut sender).0, Reason::NoKeys, "it is worn");
    assert!(sender.wear(&near).expect("some").expect("some").sealed >= 3);
    let at_rx = |receiver: &mut Joints, frame: &[u8]| reason(receiver, &far, Joint::Rx, frame).0;
    assert_eq!(at_rx(&mut receiver, &first[0]), Reason::NoKeys);
    receiver.install(&far, 0, &keys(turned(one), ALL)).expect("keys");
    assert_eq!(at_rx(&mut receiver, &first[0]), Reason::LetIn);
    receiver.install(&far, 1, &keys(turned(two), ALL)).expect("keys");
    install(&mut sender, &near, two, 1);
    let second = framed(&sender, &near, b"payload");
    assert_eq!(behind(&near, &second)[behind(&near, &second).len() - TAIL..][1..], [0x11, 0, 0, 0, 0, 0, 0]);
    assert_eq!(at_rx(&mut receiver, &second), Reason::LetIn);
    // What was under way still opens; what has come does not come again.
    assert_eq!(at_rx(&mut receiver, &first[1]), Reason::LetIn);
    assert_eq!(at_rx(&mut receiver, &first[0]), Reason::Replayed);
    receiver.discard(&far, 0).expect("discarded");
    assert_eq!(at_rx(&mut receiver, &first[2]), Reason::NoKeys);
    // What does not open is counted, for who renews keys.
    receiver.seal_with(&far, 1).expect("keys");
    let mut bad = framed(&sender, &near, b"payload");
    *bad.get_mut(udp_at(&near) + 8).expect("a text") ^= 1;
    receiver.active();
    assert_eq!(at_rx(&mut receiver, &bad), Reason::Unopened);
    assert_eq!(receiver.wear(&far).expect("some").expect("some").failures, 1);
    assert_eq!(receiver.active(), [far]);
    // Who has the place next has nothing of it.
    receiver.close(&far).expect("closed");
    open_keyless(&mut receiver, far, &[]);
    assert_eq!(at_rx(&mut receiver, &second), Reason::NoKeys);
    // Of a session in clear there are no keys.
    let mut clear = joints();
    crate::open(&mut clear, near, &[]);
    assert!(clear.install(&near, 0, &keys(one, ALL)).is_err() && clear.wear(&near).is_err());
    let (why, ..) = reason(&mut clear, &near, Joint::Rx, &datagram(&far, b"payload, payload"));
    assert_eq!(why, Reason::Malformed);
}

#[test]
fn words_about_keys_are_heard_if_they_are_authentic() {
    if !root("words_about_keys_are_heard_if_they_are_authentic") {
        return;
    }
    let (near, far) = (v4(), other_side(&v4()));
    let (sender, mut receiver) = pair(v4(), Cipher::ChaCha20Poly1305, &["number"]);
    let said = KeyWord { kind: 2, suite: 1, phase: 1, nonces: [[5; 16], [6; 16]] };
    let good = sender.key_word(&near, &said).expect("a word");
    let (why, verdict, _) = reason(&mut receiver, &far, Joint::Rx, &datagram(&near, &good));
    assert_eq!((why, verdict), (Reason::Answered, XDP_DROP));
    assert_eq!(receiver.words(Duration::ZERO).expect("words"), []);
    assert_eq!(receiver.key_words(), [(far, said)]);
    for at in 0..good.len() {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            let (why, verdict, _) = reason(&mut receiver, &far, Joint::Rx, &datagram(&near, &bad));
            let is_refusal = matches!(
                why,
                Reason::Forged | Reason::Malformed | Reason::NoKeys | Reason::Unopened | Reason::Replayed
            );
            assert!(is_refusal && verdict == XDP_DROP, "{at} {bit}: {why:?}");
        }
    }
    for len in 0..good.len() {
        let (why, ..) = reason(&mut receiver, &far, Joint::Rx, &datagram(&near, &good[good.len() - len..]));
        assert_eq!(why, Reason::Malformed, "{len}");
    }
    receiver.words(Duration::ZERO).expect("words");
    assert_eq!(receiver.key_words(), []);
    // Sealed words of other kinds are heard as before.
    let hello = framed_word(&sender, &near, Word::Says(3, 77));
    let (why, _, opened) = reason(&mut receiver, &far, Joint::Rx, &hello);
    assert_eq!(why, Reason::LetIn);
    assert_eq!(reason(&mut receiver, &far, Joint::Repair, &opened).0, Reason::Answered);
    assert_eq!(receiver.words(Duration::ZERO).expect("words").len(), 1);
}

/// A word of a daemon, sealed by hand with the first number that is not used.
fn framed_word(sender: &Joints, ends: &Ends, word: Word) -> Vec<u8> {
    let [there, _] = directions(Cipher::ChaCha20Poly1305);
    datagram(ends, &there.seal(0, 900, &sender.word(ends, word).expect("a word")))
}

/// Another number is drawn for what is sent again: the same bytes never leave twice, and their text does.
#[test]
fn what_is_asked_for_is_what_it_was() {
    if !root("what_is_asked_for_is_what_it_was") {
        return;
    }
    let (near, far) = (v4(), other_side(&v4()));
    let (mut sender, receiver) = pair(near, Cipher::ChaCha20Poly1305, &["number", "repair"]);
    let [there, back] = directions(Cipher::ChaCha20Poly1305);
    let first = framed(&sender, &near, b"payload");
    let clear_request = behind(&far, &request(&receiver, &far, 0));
    let asked = datagram(&far, &back.seal(0, 0, &clear_request));
    let (why, _, opened) = reason(&mut sender, &near, Joint::Rx, &asked);
    assert_eq!(why, Reason::LetIn);
    let (why, verdict, again) = reason(&mut sender, &near, Joint::Repair, &opened);
    assert_eq!((why, verdict), (Reason::Resent, REDIRECT));
    // So it comes to the way out, where it is sealed: what_is_lost_is_sent_again has that on a wire.
    let (_, text) = there.open(&behind(&near, &first));
    assert_eq!(behind(&near, &again), text);
}

/// What hosts accept as UDP, though no frame can be found in it: nothing of it leaves or comes in between the addresses of a
/// sealed session. Of others, it passes.
#[test]
fn what_cannot_be_sealed_or_opened_does_not_pass() {
    if !root("what_cannot_be_sealed_or_opened_does_not_pass") {
        return;
    }
    for ends in [v4(), v6()] {
        let (mut sender, mut receiver) = pair(ends, Cipher::ChaCha20Poly1305, &["number"]);
        let mut clear = joints();
        crate::open(&mut clear, ends, &["number"]);
        for frame in odd(&ends) {
            let (why, verdict, _) = reason(&mut sender, &ends, Joint::Tx, &frame);
            assert_eq!((why, verdict), (Reason::Fragment, SHOT), "{ends:?} {frame:?}");
            let (why, verdict, _) = reason(&mut receiver, &other_side(&ends), Joint::Repair, &frame);
            assert_eq!((why, verdict), (Reason::Fragment, SHOT), "{ends:?} {frame:?}");
            assert_eq!(run(&clear, Joint::Tx, &frame).0, PASS_ON);
        }
        // Neither UDP nor of these addresses.
        let mut stranger = ends;
        stranger.remote.set_ip(stranger.local.ip());
        let mut tcp = odd(&ends).swap_remove(0);
        tcp[if ends.local.is_ipv4() { 23 } else { 54 }] = 6;
        for frame in odd(&stranger).into_iter().chain([tcp]) {
            assert_eq!(run(&sender, Joint::Tx, &frame).0, PASS_ON, "{frame:?}");
            assert_eq!(run(&receiver, Joint::Repair, &frame).0, PASS_ON, "{frame:?}");
        }
        // With the last session of the pair it ends.
        let session = |port| {
            let mut other = ends;
            other.local.set_port(port);
            other
        };
        open_keyless(&mut sender, session(1), &[]);
        sender.close(&ends).expect("closed");
        let frame = &odd(&ends)[0];
        assert_eq!(reason(&mut sender, &session(1), Joint::Tx, frame).0, Reason::Fragment);
        sender.close(&session(1)).expect("closed");
        assert_eq!(run(&sender, Joint::Tx, frame).0, PASS_ON);
    }
}

/// Fragments, first and later ones; of IPv6 also more extension headers than are followed, and a length that says nothing.
pub fn odd(ends: &Ends) -> Vec<Vec<u8>> {
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
fn what_is_too_long_is_not_sent() {
    if !root("what_is_too_long_is_not_sent") {
        return;
    }
    let (mut sender, _) = pair(v4(), Cipher::ChaCha20Poly1305, &[]);
    for len in [SEALED_MAX - FRAME_BYTES + 1, 1600, 3000] {
        let (why, verdict, _) = reason(&mut sender, &v4(), Joint::Tx, &datagram(&v4(), &vec![0; len]));
        assert_eq!((why, verdict), (Reason::TooLong, SHOT), "{len}");
    }
}

#[test]
fn random_frames_are_judged() {
    if !root("random_frames_are_judged") {
        return;
    }
    let mut random = fastrand::Rng::with_seed(15);
    let (near, far) = (v4(), other_side(&v4()));
    let (sender, mut receiver) = pair(near, Cipher::Aes128Gcm, &["number", "order", "repair"]);
    let good = behind(&near, &framed(&sender, &near, &[7; 50]));
    for round in 0..3000 {
        let authentic: Vec<u8> = match round % 3 {
            0 => (0..random.usize(0..100)).map(|_| random.u8(..)).collect(),
            1 => good.clone(),
            _ => sender
                .key_word(&near, &KeyWord { kind: 0, suite: 0, phase: 0, nonces: [[1; 16]; 2] })
                .expect("a word"),
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
        assert!(matches!(run(&receiver, Joint::Rx, frame).0, XDP_DROP | XDP_PASS));
        assert!(matches!(run(&receiver, Joint::Repair, frame).0, PASS_ON | SHOT));
    }
    let counts = counted(&mut receiver, &far);
    let is_refusal = |reason: &Reason| {
        matches!(reason, Reason::Malformed | Reason::Forged | Reason::Unopened | Reason::NoKeys)
    };
    assert!(!counts.is_empty() && counts.iter().all(|(reason, _)| is_refusal(reason)), "{counts:?}");
    assert!(receiver.key_words().is_empty());
}

/// Both directions of a path that loses packets: requests, retransmissions and words are sealed, too. On the wire there is no
/// clear text, and no datagram twice.
#[test]
fn what_is_lost_is_sent_again() {
    const SENT: u32 = 3000;
    if !root("what_is_lost_is_sent_again") {
        return;
    }
    for (family, protocol, cipher) in [
        (4, Protocol::Udp, Cipher::ChaCha20Poly1305),
        (6, Protocol::Udp, Cipher::Aes128Gcm),
        (4, Protocol::Ip253, Cipher::Aes128Gcm),
        (6, Protocol::Ip253, Cipher::ChaCha20Poly1305),
    ] {
        let site = Site::over("sealed", family, protocol);
        let (near, far) = site.sockets();
        let there = other_side(&site.ends);
        let (mut sender, mut receiver) =
            pair_over(protocol, site.ends, cipher, &["number", "repair"], joints);
        site.attach(&site.network.publisher, &mut sender);
        site.attach(&site.network.subscriber, &mut receiver);
        let (stop, pace) = (AtomicBool::new(false), Pace::default());
        let lossy = |count: u64| if count % 7 == 3 || count % 61 < 3 { Fate::Lose } else { Fate::Pass };
        let wire = site.wire();
        let capture = Capture::on(&site.network.relay, "west");
        let captured = Mutex::new(Vec::new());
        let got = thread::scope(|scope| {
            let _end = AtEnd(&stop, true);
            scope.spawn(|| wire.run(&stop, lossy));
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    captured.lock().expect("frames").extend(capture.frames());
                    thread::sleep(Duration::from_millis(1)); // exact: between two readings of the capture
                }
            });
            let receiving = scope.spawn(|| pace.receive(&far, SENT));
            scope.spawn(|| pace.send(&near, SENT));
            while !receiving.is_finished() {
                inside(&site.network.publisher, || sender.say(&site.ends, pace.last()).expect("said"));
                thread::sleep(Duration::from_millis(20)); // exact: as often as the daemon says it
            }
            stop.store(true, Ordering::Relaxed);
            receiving.join().expect("messages")
        });
        println!("sender {:?}", counted(&mut sender, &site.ends));
        println!("receiver {:?}", counted(&mut receiver, &there));
        assert_all_once(&got, SENT);
        assert!(count(&mut sender, &site.ends, Reason::Resent) >= u64::from(SENT) / 7);
        assert_eq!(count(&mut receiver, &there, Reason::Delivered), u64::from(SENT));
        for reason in [Reason::Unopened, Reason::Replayed, Reason::Malformed, Reason::Forged] {
            assert_eq!(count(&mut receiver, &there, reason), 0, "{reason:?}");
        }
        let mut frames = captured.into_inner().expect("frames");
        frames.extend(capture.frames());
        let [out, back] = assert_sealed(&site.ends, &frames, directions(cipher));
        assert!(out + back > 3000 && back > 100, "{out} out, {back} back");
    }
}

/// What functions send is sealed, too: acknowledgements, what is repeated, parity behind its packets.
#[test]
fn what_functions_send_is_sealed() {
    const SENT: u32 = 1500;
    if !root("what_functions_send_is_sealed") {
        return;
    }
    let parity: &[&str] = &["window", "number", "fec", "repair", "acknowledge"];
    use Cipher::{Aes128Gcm, ChaCha20Poly1305};
    use Mode::{Auto, Generic};
    use Protocol::{Ip253, Udp};
    for (family, protocol, mode, cipher, functions) in [
        (4, Udp, Auto, ChaCha20Poly1305, SELECTIVE),
        (6, Udp, Auto, Aes128Gcm, GO_BACK),
        (4, Udp, Auto, Aes128Gcm, parity),
        (6, Udp, Generic, ChaCha20Poly1305, parity),
        (4, Udp, Generic, ChaCha20Poly1305, GO_BACK),
        (4, Ip253, Generic, ChaCha20Poly1305, parity),
        (4, Ip253, Auto, ChaCha20Poly1305, GO_BACK),
        (6, Ip253, Auto, Aes128Gcm, SELECTIVE),
        (6, Ip253, Auto, ChaCha20Poly1305, parity),
    ] {
        let parameters = [
            ("window", "packets", 64),
            ("repair", "retry_us", 20_000),
            ("repair", "tries", 0),
            ("gobackn", "retry_us", 20_000),
            ("fec", "packets", 8),
        ];
        let site = Site { mode, ..Site::over("sealedf", family, protocol) };
        let (near, far) = site.sockets();
        match family {
            4 => setsockopt(&near, sockopt::Ipv4RecvErr, &true).expect("errors"),
            _ => setsockopt(&near, sockopt::Ipv6RecvErr, &true).expect("errors"),
        }
        let there = other_side(&site.ends);
        let make = || joints_of(functions, &parameters);
        let (mut sender, mut receiver) = pair_over(protocol, site.ends, cipher, functions, make);
        site.attach(&site.network.publisher, &mut sender);
        site.attach(&site.network.subscriber, &mut receiver);
        let stop = AtomicBool::new(false);
        let lossy = |count: u64| if count % 17 == 3 { Fate::Lose } else { Fate::Pass };
        let wire = site.wire();
        let capture = Capture::on(&site.network.relay, "west");
        let captured = Mutex::new(Vec::new());
        let got = thread::scope(|scope| {
            let _end = AtEnd(&stop, true);
            scope.spawn(|| wire.run(&stop, lossy));
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    captured.lock().expect("frames").extend(capture.frames());
                    thread::sleep(Duration::from_millis(1)); // exact: between two readings of the capture
                }
            });
            get_to_know(&site, &sender, &mut receiver);
            let receiving = scope.spawn(|| receive(&far, SENT as usize));
            let sending = scope.spawn(|| send_into_window(&near, 0..SENT));
            while !receiving.is_finished() || !sending.is_finished() {
                let next = sender.progress(&site.ends).expect("progress").next;
                inside(&site.network.publisher, || {
                    sender.say(&site.ends, Word::Last(next)).expect("said");
                });
                thread::sleep(Duration::from_millis(20)); // exact: as often as the daemon says it
            }
            stop.store(true, Ordering::Relaxed);
            sending.join().expect("sent");
            receiving.join().expect("messages")
        });
        println!("{functions:?} sender {:?}", counted(&mut sender, &site.ends));
        println!("{functions:?} receiver {:?}", counted(&mut receiver, &there));
        assert_all_once(&got, SENT);
        assert!(functions != GO_BACK || got.is_sorted(), "out of order");
        assert_eq!(count(&mut sender, &site.ends, Reason::Sent), u64::from(SENT));
        if functions == parity {
            assert_eq!(count(&mut sender, &site.ends, Reason::Protected), u64::from(SENT) / 8);
            assert!(count(&mut receiver, &there, Reason::Recovered) > 0);
        }
        for reason in [
            Reason::Unopened,
            Reason::Replayed,
            Reason::Malformed,
            Reason::Forged,
            Reason::NoKeys,
            Reason::NoRoom,
            Reason::NoFunction,
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

/// Nor does one leave as long as there are no keys, and the second of both says nothing to the application.
#[test]
fn what_functions_send_needs_keys() {
    if !root("what_functions_send_needs_keys") {
        return;
    }
    let site = Site::new("keyless", 4);
    let functions = ["number", "fec"];
    let mut sender = joints_of(&functions, &[("fec", "packets", 2)]);
    open_keyless(&mut sender, site.ends, &functions);
    let eth = ifindex(&site.network.publisher, "eth");
    inside(&site.network.publisher, || sender.attach(eth, Mode::Auto).expect("attached"));
    let capture = Capture::on(&site.network.relay, "west");
    let (near, _far) = site.sockets();
    for number in 0..4u8 {
        near.send(&[number; 100]).expect("sent");
    }
    // Two alone, and two with a parity packet each.
    assert_eq!(count(&mut sender, &site.ends, Reason::NoKeys), 6);
    let frames = capture.frames();
    assert!(!frames.iter().any(|frame| crate::traffic::is_datagram(frame)), "{frames:?}");
}

/// Every datagram opens with one direction's key, and none of these has a number of another one. Returns how many there are.
fn assert_sealed(ends: &Ends, frames: &[Vec<u8>], [there, back]: [Direction; 2]) -> [usize; 2] {
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

/// Not a check: `cargo test --release -p millrace-graft-kernel --test joints -- --ignored --nocapture time_of_sealing`
#[test]
#[ignore = "soak: measures, on a quiet machine"]
fn time_of_sealing() {
    const ROUNDS: usize = 2001;
    if !root("time_of_sealing") {
        return;
    }
    let median = |mut times: Vec<u128>| {
        times.sort_unstable();
        (times[ROUNDS / 10], times[ROUNDS / 2], times[ROUNDS * 9 / 10])
    };
    let show = |what: &str, sender: &Joints, receiver: &Joints, len: usize| {
        let (mut out, mut back) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let sent = sender.run(Joint::Tx, &datagram(&v4(), &vec![7; len])).expect("a run");
            out.push(sent.time.as_nanos());
            back.push(receiver.run(Joint::Rx, &sent.frame).expect("a run").time.as_nanos());
        }
        println!("{what}, {len} bytes, ns at p10, p50, p90: tx {:?}, rx {:?}", median(out), median(back));
    };
    for len in [100, 1200] {
        let (mut sender, mut receiver) = (joints(), joints());
        crate::open(&mut sender, v4(), &["number"]);
        crate::open(&mut receiver, other_side(&v4()), &["number"]);
        show("clear", &sender, &receiver, len);
        for cipher in CIPHERS {
            let (sender, receiver) = pair(v4(), cipher, &["number"]);
            show(&format!("{cipher:?}"), &sender, &receiver, len);
        }
    }
}
