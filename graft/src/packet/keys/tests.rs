use std::collections::BTreeSet;

use super::*;

const MS: Duration = Duration::from_millis(1);

fn ends() -> [Ends; 2] {
    let [a, b] = ["10.0.0.1:7000", "10.0.0.2:6000"].map(|text| text.parse().expect("an address"));
    [Ends { local: a, remote: b }, Ends { local: b, remote: a }]
}

/// Numbers that do not come twice, in place of random ones.
struct Random(u64);

impl Random {
    fn take(&mut self) -> [u8; 32] {
        self.0 += 1;
        let word = self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_ne_bytes();
        [word, word, word, word].concat().try_into().expect("32 bytes")
    }
}

/// What an end opens and seals with, as its acts say.
struct End {
    secret: Secret,
    agreement: Agreement,
    opens: [Option<Pair>; 2],
    seals: Option<(Phase, Pair)>,
    /// All that it has ever sealed with, in no matter which life.
    used: BTreeSet<([u8; 16], [u8; 16])>,
    installed: BTreeSet<([u8; 16], [u8; 16])>,
    agreed: u32,
}

impl End {
    fn new(side: usize, random: &mut Random) -> Self {
        let secret = Secret::new([7; 16], &ends()[side]);
        let agreement = Agreement::new(&secret, Duration::ZERO, random.take());
        Self {
            secret,
            agreement,
            opens: [None; 2],
            seals: None,
            used: BTreeSet::new(),
            installed: BTreeSet::new(),
            agreed: 0,
        }
    }

    fn start_anew(&mut self, now: Duration, random: &mut Random) {
        self.agreement = Agreement::new(&self.secret, now, random.take());
        (self.opens, self.seals) = ([None; 2], None);
    }

    fn act(&mut self, acts: Vec<Act>) -> Vec<(Phase, Word)> {
        let mut said = Vec::new();
        for act in acts {
            match act {
                Act::Install(phase, pair) => {
                    self.opens[usize::from(phase)] = Some(pair);
                    assert!(self.installed.insert((pair.first, pair.second)), "the same keys again");
                }
                Act::Use(phase) => {
                    let pair = self.opens[usize::from(phase)].expect("keys that are there");
                    assert!(self.used.insert((pair.first, pair.second)), "its numbers would begin anew");
                    self.seals = Some((phase, pair));
                    self.agreed += 1;
                }
                Act::Discard(phase) => {
                    assert_ne!(self.seals.map(|(phase, _)| phase), Some(phase));
                    self.opens[usize::from(phase)] = None;
                }
                Act::Say(phase, word) => said.push((phase, word)),
            }
        }
        said
    }

    fn is_understood_by(&self, other: &Self) -> bool {
        self.seals.is_none_or(|(phase, pair)| other.opens[usize::from(phase)] == Some(pair))
    }
}

/// Two ends, a path of 10 ms, and what happens at each millisecond.
struct World {
    ends: [End; 2],
    random: Random,
    flying: Vec<(Duration, usize, (Phase, Word))>,
    /// All that was ever said, to whom.
    said: Vec<(usize, (Phase, Word))>,
    now: Duration,
}

impl World {
    fn new() -> Self {
        let mut random = Random(0);
        let ends = [0, 1].map(|side| End::new(side, &mut random));
        Self { ends, random, flying: Vec::new(), said: Vec::new(), now: Duration::ZERO }
    }

    fn hear(&mut self, side: usize, (phase, word): (Phase, Word), loses: &impl Fn(usize) -> bool) {
        let random = self.random.take();
        let acts = self.ends[side].agreement.hear(self.now, phase, word, random);
        self.act(side, acts, loses);
    }

    fn act(&mut self, side: usize, acts: Vec<Act>, loses: &impl Fn(usize) -> bool) {
        for said in self.ends[side].act(acts) {
            let encoded = said.1.encode(Cipher::Aes128Gcm, said.0);
            assert_eq!(Word::decode(&encoded), Some(said.1));
            self.said.push((1 - side, said));
            if !loses(self.said.len()) {
                self.flying.push((self.now + 10 * MS, 1 - side, said));
            }
        }
    }

    fn step(&mut self, loses: &impl Fn(usize) -> bool) {
        self.now += MS;
        let now = self.now;
        let (arrived, rest) =
            std::mem::take(&mut self.flying).into_iter().partition(|(when, ..)| *when <= now);
        self.flying = rest;
        let arrived: Vec<_> = arrived;
        for (_, side, said) in arrived {
            self.hear(side, said, loses);
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

    /// At each moment, from here on.
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
fn both_ends_agree_whatever_is_lost() {
    for loses in [|_| false, |count| count % 3 == 0, at_random, |count| count < 9] {
        let mut world = World::new();
        world.run_understood(30_000, loses);
        world.assert_agreed(1);
    }
}

#[test]
fn it_takes_two_round_trips() {
    let mut world = World::new();
    world.run(42, |_| false);
    assert!(world.ends.iter().all(|end| end.agreement.has_keys()));
}

/// Either end has keys renewed, in the middle of the traffic.
#[test]
fn keys_are_renewed_without_loss() {
    for side in [0, 1] {
        let mut world = World::new();
        world.run_understood(5000, at_random);
        for _ in 0..20 {
            let (now, random) = (world.now, world.random.take());
            world.ends[side].agreement.renew(now, random);
            // Once more says nothing new.
            world.ends[side].agreement.renew(now, random);
            world.run_understood(20_000, at_random);
        }
        world.run_understood(20_000, |_| false);
        world.assert_agreed(21);
    }
}

#[test]
fn an_end_that_is_started_anew_gets_other_keys() {
    for side in [0, 1] {
        let mut world = World::new();
        for round in 0..10 {
            // In the middle of it, too.
            world.run(if round % 2 == 0 { 5000 } else { 25 }, |_| false);
            let (now, mut random) = (world.now, Random(1000 * (round + 1)));
            world.ends[side].start_anew(now, &mut random);
        }
        world.run(10_000, at_random);
        world.run(10_000, |_| false);
        let [one, other] = &world.ends;
        assert!(one.seals.is_some() && one.seals == other.seals);
        world.run_understood(10_000, |_| false);
    }
}

/// Whoever sends old words again, all of them, does not bring old keys back, and leaves those that are there.
#[test]
fn old_words_do_nothing() {
    let mut world = World::new();
    for round in 0..6 {
        world.run(4000, |_| false);
        let (now, mut random) = (world.now, Random(1000 * (round + 1)));
        world.ends[(round % 2) as usize].start_anew(now, &mut random);
    }
    world.run(6000, |_| false);
    let seals = world.ends[0].seals;
    // Nothing was agreed on but now: the end that has keys may have others made when it is asked to.
    for (side, said) in world.said.clone() {
        if said.1 == Word::Need {
            continue;
        }
        // What is answered gets lost: the other end would say no more than that it is an old word.
        world.hear(side, said, &|_| true);
        assert_eq!((world.ends[0].seals, world.ends[1].seals), (seals, seals), "{said:?}");
    }
    world.run_understood(5000, |_| false);
    assert_eq!((world.ends[0].seals, world.ends[1].seals), (seals, seals));
    // That others are needed is believed, but no more often than what was before lingers.
    for _ in 0..10_000 {
        world.hear(0, (0, Word::Need), &|_| false);
        world.run_understood(1, |_| false);
    }
    assert!(world.ends[0].agreed <= 6 + 1 + 5, "{}", world.ends[0].agreed);
    world.run_understood(5000, |_| false);
    assert_eq!(world.ends[0].seals, world.ends[1].seals);
}

/// Whatever is said, nothing is installed twice, and what is sealed with is there.
#[test]
fn random_words_are_judged() {
    for side in [0, 1] {
        let mut world = World::new();
        let mut random = Random(99);
        for _ in 0..100_000 {
            let bytes = random.take();
            let known =
                world.said.get(usize::from(bytes[4]) % world.said.len().max(1)).map(|(_, said)| said.1);
            let mut said = known.unwrap_or(Word::Need).encode(Cipher::Aes128Gcm, bytes[0] & 1);
            if bytes[1] & 1 == 0 {
                said.kind = bytes[2] % 8;
            }
            if bytes[3] & 3 == 0 {
                said.nonces[usize::from(bytes[5] & 1)][0] ^= bytes[6];
            }
            let Some(word) = Word::decode(&said) else { continue };
            world.hear(side, (said.phase, word), &|_| bytes[7] & 1 == 0);
            world.step(&|_| false);
        }
    }
}

#[test]
fn keys_are_of_one_session_cipher_and_direction() {
    let pair = Pair { first: [1; 16], second: [2; 16] };
    let [near, far] = ends().map(|ends| Secret::new([7; 16], &ends));
    let other = Ends { local: "10.0.0.1:7001".parse().expect("an address"), ..ends()[0] };
    let other = Secret::new([7; 16], &other);
    for cipher in [Cipher::Chacha20Poly1305, Cipher::Aes128Gcm] {
        let [here, there] = [&near, &far].map(|secret| secret.keys(cipher, pair));
        assert!(here.seals == there.opens && here.opens == there.seals);
        assert!(here.seals != here.opens);
        assert!(other.keys(cipher, pair).seals != here.seals);
        assert!(near.keys(cipher, Pair { first: [3; 16], ..pair }).seals != here.seals);
        assert!(near.keys(cipher, Pair { second: [3; 16], ..pair }).seals != here.seals);
    }
    assert_eq!(near.frame_key(), far.frame_key());
    assert_eq!(near.word_key(), far.word_key());
    let derived =
        BTreeSet::from([near.frame_key(), near.word_key(), other.frame_key(), other.word_key(), [7; 16]]);
    assert_eq!(derived.len(), 5);
}

#[test]
fn worn_keys_are_renewed_long_before_they_end() {
    assert!(!Cipher::Aes128Gcm.is_worn((1 << 27) - 1, (1 << 35) - 1));
    assert!(Cipher::Aes128Gcm.is_worn(1 << 27, 0));
    assert!(!Cipher::Chacha20Poly1305.is_worn(1 << 40, 0));
    assert!(Cipher::Chacha20Poly1305.is_worn(0, 1 << 35));
}
