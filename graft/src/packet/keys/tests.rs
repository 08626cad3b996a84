use std::collections::BTreeSet;

use super::*;

const MS: Duration = Duration::from_millis(1);

fn ends() -> [SessionEnds; 2] {
    let [a, b] = ["10.0.0.1:7000", "10.0.0.2:6000"].map(|text| text.parse().expect("an address"));
    [SessionEnds { local: a, remote: b }, SessionEnds { local: b, remote: a }]
}

/// Unique numbers that the tests use instead of random ones.
struct NonceCounter(u64);

impl NonceCounter {
    fn take(&mut self) -> [u8; 32] {
        self.0 += 1;
        let word = self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_ne_bytes();
        [word, word, word, word].concat().try_into().expect("32 bytes")
    }
}

/// A simulated end: the keys with which it opens and seals, according to its actions. A key is a pair of nonces, with
/// the number of the connection that it was derived from.
struct KeyTestEnd {
    side: usize,
    agreement: KeyAgreement,
    connection: u32,
    frames: FrameKey,
    opens: [Option<(NoncePair, u32)>; 2],
    seals: Option<(KeyPhase, NoncePair, u32)>,
    /// Every key with which the end has sealed, before and after its restarts.
    used: BTreeSet<([u8; 16], [u8; 16])>,
    installed: BTreeSet<([u8; 16], [u8; 16])>,
    agreed: u32,
}

impl KeyTestEnd {
    fn new(side: usize, random: &mut NonceCounter) -> Self {
        let frames = half(random.take());
        let agreement = KeyAgreement::new(&ends()[side], frames, Duration::ZERO, random.take());
        Self {
            side,
            agreement,
            connection: 0,
            frames,
            opens: [None; 2],
            seals: None,
            used: BTreeSet::new(),
            installed: BTreeSet::new(),
            agreed: 0,
        }
    }

    fn start_anew(&mut self, now: Duration, random: &mut NonceCounter) {
        self.frames = half(random.take());
        self.agreement = KeyAgreement::new(&ends()[self.side], self.frames, now, random.take());
        (self.opens, self.seals) = ([None; 2], None);
    }

    fn act(&mut self, acts: Vec<KeyAction>) -> Vec<(KeyPhase, KeyMessage)> {
        let mut said = Vec::new();
        for act in acts {
            match act {
                KeyAction::Frames(key) => self.frames = key,
                KeyAction::Install(phase, pair) => {
                    self.opens[usize::from(phase)] = Some((pair, self.connection));
                    assert!(self.installed.insert((pair.first, pair.second)), "the same keys again");
                }
                KeyAction::Use(phase) => {
                    let (pair, connection) = self.opens[usize::from(phase)].expect("keys that are there");
                    assert!(self.used.insert((pair.first, pair.second)), "its numbers would begin anew");
                    self.seals = Some((phase, pair, connection));
                    self.agreed += 1;
                }
                KeyAction::Discard(phase) => {
                    assert_ne!(self.seals.map(|(phase, ..)| phase), Some(phase));
                    self.opens[usize::from(phase)] = None;
                }
                KeyAction::Say(phase, message) => said.push((phase, message)),
            }
        }
        said
    }

    fn is_understood_by(&self, other: &Self) -> bool {
        let opens = |(phase, pair, connection)| other.opens[usize::from(phase)] == Some((pair, connection));
        self.seals.is_none_or(|seals| opens(seals) && self.frames == other.frames)
    }
}

/// Two simulated ends on a path with a delay of 10 ms, whose time advances in steps of a millisecond.
struct KeyTestWorld {
    ends: [KeyTestEnd; 2],
    random: NonceCounter,
    /// Messages in flight: arrival time, receiver, message, and number of the connection.
    flying: Vec<(Duration, usize, (KeyPhase, KeyMessage), u32)>,
    /// Every message that was sent so far, with its receiver.
    said: Vec<(usize, (KeyPhase, KeyMessage))>,
    now: Duration,
}

impl KeyTestWorld {
    fn new() -> Self {
        let mut random = NonceCounter(0);
        let ends = [0, 1].map(|side| KeyTestEnd::new(side, &mut random));
        Self { ends, random, flying: Vec::new(), said: Vec::new(), now: Duration::ZERO }
    }

    fn hear(&mut self, side: usize, phase: KeyPhase, message: KeyMessage, loses: &impl Fn(usize) -> bool) {
        let random = self.random.take();
        let acts = self.ends[side].agreement.on_message(self.now, phase, message, random);
        self.act(side, acts, loses);
    }

    fn act(&mut self, side: usize, acts: Vec<KeyAction>, loses: &impl Fn(usize) -> bool) {
        for said in self.ends[side].act(acts) {
            let text = serde_json::to_string(&said.1).expect("JSON");
            assert_eq!(serde_json::from_str::<KeyMessage>(&text).expect("a message"), said.1);
            self.said.push((1 - side, said));
            if !loses(self.said.len()) {
                let connection = self.ends[side].connection;
                self.flying.push((self.now + 10 * MS, 1 - side, said, connection));
            }
        }
    }

    fn reconnect(&mut self, side: usize) {
        let now = self.now;
        let random = self.random.take();
        self.ends[side].connection += 1;
        self.ends[side].agreement.reconnect(now, random);
    }

    fn step(&mut self, loses: &impl Fn(usize) -> bool) {
        self.now += MS;
        let now = self.now;
        let (arrived, rest) =
            std::mem::take(&mut self.flying).into_iter().partition(|(when, ..)| *when <= now);
        self.flying = rest;
        let arrived: Vec<_> = arrived;
        for (_, side, said, connection) in arrived {
            // An end receives nothing from a connection that it does not know yet. Messages of an earlier connection
            // may still arrive.
            if connection <= self.ends[side].connection {
                self.hear(side, said.0, said.1, loses);
            }
        }
        for side in 0..2 {
            if self.ends[side].agreement.next().is_some_and(|due| due <= now) {
                let acts = self.ends[side].agreement.tick(now);
                self.act(side, acts, loses);
            }
        }
    }

    fn run(&mut self, millis: u32, loses: impl Fn(usize) -> bool) {
        (0..millis).for_each(|_| self.step(&loses));
    }

    /// Simulates this many milliseconds, and checks after each that either end can open what the other one seals.
    fn run_understood(&mut self, millis: u32, loses: impl Fn(usize) -> bool) {
        for _ in 0..millis {
            self.step(&loses);
            let [one, other] = &self.ends;
            assert!(one.is_understood_by(other) && other.is_understood_by(one), "at {:?}", self.now);
        }
    }

    fn assert_agreed(&self, times: u32) {
        let [one, other] = &self.ends;
        assert!(one.is_understood_by(other) && other.is_understood_by(one));
        assert_eq!(one.seals, other.seals);
        assert!(self.ends.iter().all(|end| end.agreed == times && end.agreement.has_keys()));
        assert!(self.ends.iter().all(|end| end.opens.iter().flatten().count() == 1), "one key is left");
        assert!(self.ends.iter().all(|end| end.agreement.next().is_none()), "nothing is under way");
    }
}

fn at_random(count: usize) -> bool {
    (count as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 7 < 4
}

#[test]
fn both_ends_agree_on_keys_despite_losses() {
    for loses in [|_| false, |count| count % 3 == 0, at_random, |count| count < 9] {
        let mut world = KeyTestWorld::new();
        world.run_understood(30_000, loses);
        world.assert_agreed(1);
    }
}

#[test]
fn key_agreement_takes_two_round_trips() {
    let mut world = KeyTestWorld::new();
    world.run(42, |_| false);
    assert!(world.ends.iter().all(|end| end.agreement.has_keys()));
}

/// A new connection replaces the present one at any moment of a key agreement, and both ends learn of it one after the
/// other. No end ever seals with a key that the other cannot open, and in the end both have keys of the latest
/// connection.
#[test]
fn session_keys_are_derived_from_the_latest_tls_connection() {
    for delay in 0..80 {
        for early in [0, 1] {
            let mut world = KeyTestWorld::new();
            world.run(5000, |_| false);
            for round in 1..6 {
                world.reconnect(early);
                world.run_understood(round, |_| false);
                world.reconnect(1 - early);
                world.run_understood(delay, |_| false);
            }
            world.run_understood(30_000, |_| false);
            let [one, other] = &world.ends;
            assert!(one.seals.is_some_and(|(_, _, connection)| connection == 5), "{delay}: {:?}", one.seals);
            assert_eq!(one.seals, other.seals);
            assert!(one.agreement.next().is_none() && other.agreement.next().is_none());
        }
    }
}

/// Either end requests new keys while datagrams are in flight.
#[test]
fn session_keys_are_renewed_while_every_datagram_stays_decryptable() {
    for side in [0, 1] {
        let mut world = KeyTestWorld::new();
        world.run_understood(5000, at_random);
        for _ in 0..20 {
            let now = world.now;
            let random = world.random.take();
            world.ends[side].agreement.renew(now, random);
            // A repeated request for new keys changes nothing.
            world.ends[side].agreement.renew(now, random);
            world.run_understood(20_000, at_random);
        }
        world.run_understood(20_000, |_| false);
        world.assert_agreed(21);
    }
}

#[test]
fn restarted_session_end_agrees_on_new_keys() {
    for side in [0, 1] {
        let mut world = KeyTestWorld::new();
        for round in 0..10 {
            // Restarts happen alternately between two key agreements and in the middle of one.
            world.run(if round % 2 == 0 { 5000 } else { 25 }, |_| false);
            let now = world.now;
            let mut random = NonceCounter(1000 * (round + 1));
            world.ends[side].start_anew(now, &mut random);
        }
        world.run(10_000, at_random);
        world.run(10_000, |_| false);
        let [one, other] = &world.ends;
        assert!(one.seals.is_some() && one.seals == other.seals);
        world.run_understood(10_000, |_| false);
    }
}

/// Replayed messages neither restore old keys nor remove present ones.
#[test]
fn replayed_key_messages_are_ignored() {
    let mut world = KeyTestWorld::new();
    for round in 0..6 {
        world.run(4000, |_| false);
        let now = world.now;
        let mut random = NonceCounter(1000 * (round + 1));
        world.ends[(round % 2) as usize].start_anew(now, &mut random);
    }
    world.run(6000, |_| false);
    let seals = world.ends[0].seals;
    // `Need` is not replayed here, since it may make the end that has keys renew them.
    for (side, said) in world.said.clone() {
        if said.1 == KeyMessage::Need {
            continue;
        }
        // The reply to a replayed message is dropped, since it would only refuse that message.
        world.hear(side, said.0, said.1, &|_| true);
        assert_eq!((world.ends[0].seals, world.ends[1].seals), (seals, seals), "{said:?}");
    }
    world.run_understood(5000, |_| false);
    assert_eq!((world.ends[0].seals, world.ends[1].seals), (seals, seals));
    // A replayed `Need` has an effect, but at most once in the time for which the previous key stays valid.
    for _ in 0..10_000 {
        world.hear(0, 0, KeyMessage::Need, &|_| false);
        world.run_understood(1, |_| false);
    }
    assert!(world.ends[0].agreed <= 6 + 1 + 5, "{}", world.ends[0].agreed);
    world.run_understood(5000, |_| false);
    assert_eq!(world.ends[0].seals, world.ends[1].seals);
}

/// Random messages never install a key twice, and the key that an end seals with is always installed.
#[test]
fn random_key_messages_install_no_key_twice() {
    for side in [0, 1] {
        let mut world = KeyTestWorld::new();
        let mut random = NonceCounter(99);
        for _ in 0..100_000 {
            let bytes = random.take();
            let known =
                world.said.get(usize::from(bytes[4]) % world.said.len().max(1)).map(|(_, said)| said.1);
            let message = known.unwrap_or(KeyMessage::Need);
            let mut pair = match message {
                KeyMessage::Offer(pair)
                | KeyMessage::Take(pair, _)
                | KeyMessage::Done(pair)
                | KeyMessage::Refuse(pair) => pair,
                KeyMessage::Ask(first) => NoncePair { first, second: half(bytes) },
                KeyMessage::Need => NoncePair { first: half(bytes), second: half(bytes) },
            };
            if bytes[3] & 3 == 0 {
                let nonces = [&mut pair.first, &mut pair.second];
                nonces.into_iter().nth(usize::from(bytes[5] & 1)).expect("two")[0] ^= bytes[6];
            }
            let message = match bytes[2] % 7 {
                0 => KeyMessage::Ask(pair.first),
                1 => KeyMessage::Offer(pair),
                2 => KeyMessage::Take(pair, half(bytes)),
                3 => KeyMessage::Done(pair),
                4 => KeyMessage::Refuse(pair),
                _ => message,
            };
            world.hear(side, bytes[0] & 1, message, &|_| bytes[7] & 1 == 0);
            world.step(&|_| false);
        }
    }
}

#[test]
fn keys_differ_by_session_cipher_and_direction() {
    let pair = NoncePair { first: [1; 16], second: [2; 16] };
    let exported = Exported([7; 32]);
    let [near, far] = ends().map(|ends| SessionSecret::new(&exported, &ends));
    let other = SessionEnds { local: "10.0.0.1:7001".parse().expect("an address"), ..ends()[0] };
    let other = SessionSecret::new(&exported, &other);
    let later = SessionSecret::new(&Exported([8; 32]), &ends()[0]);
    for cipher in [AeadCipher::Chacha20Poly1305, AeadCipher::Aes128Gcm] {
        let [here, there] = [&near, &far].map(|secret| secret.keys(cipher, pair));
        assert!(here.seals == there.opens && here.opens == there.seals);
        assert!(here.seals != here.opens);
        assert!(other.keys(cipher, pair).seals != here.seals);
        assert!(later.keys(cipher, pair).seals != here.seals);
        assert!(near.keys(cipher, NoncePair { first: [3; 16], ..pair }).seals != here.seals);
        assert!(near.keys(cipher, NoncePair { second: [3; 16], ..pair }).seals != here.seals);
    }
}

#[test]
fn keys_are_renewed_long_before_the_sealing_limit() {
    assert!(!AeadCipher::Aes128Gcm.is_worn((1 << 27) - 1, (1 << 35) - 1));
    assert!(AeadCipher::Aes128Gcm.is_worn(1 << 27, 0));
    assert!(!AeadCipher::Chacha20Poly1305.is_worn(1 << 40, 0));
    assert!(AeadCipher::Chacha20Poly1305.is_worn(0, 1 << 35));
}
