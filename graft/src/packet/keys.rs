//! How both ends of a sealed session agree on keys, as values: no I/O, and time and random bytes are arguments.
//!
//! ```text
//! the first end                          the second
//!   Ask(f) ----------------------------> makes s
//!   opens with (f, s) <------ Offer(f, s)
//!   Take(f, s) ------------------------> opens and seals with (f, s)
//!   seals with (f, s) <-------- Done(f, s)
//! ```
//!
//! So neither end ever seals with what the other one does not open with, whatever is lost; what is not answered is said again. Of
//! each pair of nonces one is this end's own and new, so that words and datagrams of before do nothing when somebody sends them
//! again, to an end that was started anew neither. A pair is used once: the first end asks with a nonce once, and the second
//! end's nonces are of a secret that is another one as soon as one of them was taken. Until then it remembers nothing.

use std::time::Duration;

use millrace_graft_kernel::joint::{Ends, KeyWord, Keys, Phase};
use millrace_kernel::crypto::QuicKeys;
use ring::{hkdf, hmac};
use serde::Deserialize;

/// An AEAD, and its number in words.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Cipher {
    /// Takes the same time whatever the key is.
    #[default]
    Chacha20Poly1305,
    #[serde(rename = "aes-128-gcm")]
    Aes128Gcm,
}

pub type Nonce = [u8; 16];

/// Of both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    pub first: Nonce,
    pub second: Nonce,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    Ask(Nonce),
    Offer(Pair),
    Take(Pair),
    Done(Pair),
    /// The second end was not the one that made it, or was started anew since.
    Refuse(Pair),
    /// The second end has no keys, or its keys are worn.
    Need,
}

/// What is to be done, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Open with it, too, instead of what had this phase.
    Install(Phase, Pair),
    /// Seal with what has this phase.
    Use(Phase),
    /// Open with what has this phase no longer.
    Discard(Phase),
    Say(Phase, Word),
}

/// Between two tries of a word.
const AGAIN: Duration = Duration::from_millis(250);
/// After so many, they are further apart.
const SOON: u32 = 8;
const LATER: Duration = Duration::from_secs(1);
/// How long datagrams may be under way, and so the least time between two agreements.
const LINGER: Duration = Duration::from_secs(2);
/// More datagrams that do not open (RFC 9001, section 6.6) wear a key: half of what the kernel allows.
const FAILURES: u64 = 1 << 35;

/// A key that both ends have.
#[derive(Clone)]
pub struct Secret {
    bytes: [u8; 16],
    /// Keys are of one session.
    context: String,
    is_first: bool,
}

impl Secret {
    pub fn new(bytes: [u8; 16], ends: &Ends) -> Self {
        let is_first = ends.local < ends.remote;
        let [one, other] = if is_first { [ends.local, ends.remote] } else { [ends.remote, ends.local] };
        let context = format!("{} {} {} {}", one.ip(), one.port(), other.ip(), other.port());
        Self { bytes, context, is_first }
    }

    /// For frames, which are sealed with what they belong to.
    pub fn frame_key(&self) -> [u8; 16] {
        self.derive(&[], "frame")
    }

    /// For words about keys.
    pub fn word_key(&self) -> [u8; 16] {
        self.derive(&[], "word")
    }

    /// Of both directions. To be used once.
    pub fn keys(&self, cipher: Cipher, pair: Pair) -> Keys {
        let nonces = [pair.first, pair.second].concat();
        let direction = |from_first: bool| {
            let label =
                |what| format!("{} {what} {}", cipher.name(), if from_first { "out" } else { "back" });
            let iv = self.derive(&nonces, &label("iv"));
            match cipher {
                Cipher::Chacha20Poly1305 => {
                    QuicKeys::chacha20_poly1305(&self.derive(&nonces, &label("key")), &iv, &[0; 32])
                }
                Cipher::Aes128Gcm => {
                    QuicKeys::aes128_gcm(&self.derive(&nonces, &label("key")), &iv, &[0; 16])
                }
            }
        };
        Keys { seals: direction(self.is_first), opens: direction(!self.is_first), limit: cipher.limit() }
    }

    /// HKDF-SHA256 (RFC 5869).
    fn derive<const LEN: usize>(&self, salt: &[u8], label: &str) -> [u8; LEN] {
        struct Len(usize);
        impl hkdf::KeyType for Len {
            fn len(&self) -> usize {
                self.0
            }
        }
        let mut out = [0; LEN];
        let key = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(&self.bytes);
        let info = [b"millrace graft ", label.as_bytes(), b" ", self.context.as_bytes()];
        let filled = key.expand(&info, Len(LEN)).and_then(|made| made.fill(&mut out));
        assert!(filled.is_ok(), "HKDF makes up to 8160 bytes, not {LEN}");
        out
    }
}

impl Cipher {
    pub fn name(self) -> &'static str {
        match self {
            Self::Chacha20Poly1305 => "chacha20-poly1305",
            Self::Aes128Gcm => "aes-128-gcm",
        }
    }

    /// Datagrams of up to 2 KiB that may be sealed with a key (RFC 9001, appendix B.1.1); of the first, as many as there are
    /// numbers.
    fn limit(self) -> u64 {
        match self {
            Self::Chacha20Poly1305 => 1 << 47,
            Self::Aes128Gcm => 1 << 28,
        }
    }

    /// Whether it is time for other keys.
    pub fn is_worn(self, sealed: u64, failures: u64) -> bool {
        sealed >= self.limit() / 2 || failures >= FAILURES
    }
}

#[derive(Debug)]
enum Side {
    First(Asking),
    Second {
        /// Of the nonces that are offered.
        secret: [u8; 32],
        /// When it says that it needs keys; `None`: it does not.
        needs: Option<Duration>,
    },
}

#[derive(Debug, Clone, Copy)]
enum Asking {
    Idle,
    /// With its own nonce.
    Asks {
        first: Nonce,
        next: Duration,
        tries: u32,
    },
    Takes {
        pair: Pair,
        next: Duration,
        tries: u32,
    },
}

/// One end of a session.
#[derive(Debug)]
pub struct Agreement {
    side: Side,
    /// That is sealed with, and since when.
    current: Option<(Phase, Pair, Duration)>,
    /// Until when what was before is opened with.
    lingers: Option<Duration>,
}

impl Agreement {
    /// `now`: since any fixed moment. `random`: of nobody else.
    pub fn new(secret: &Secret, now: Duration, random: [u8; 32]) -> Self {
        let side = match secret.is_first {
            true => Side::First(Asking::Asks { first: half(random), next: now, tries: 0 }),
            false => Side::Second { secret: random, needs: Some(now) },
        };
        Self { side, current: None, lingers: None }
    }

    pub fn has_keys(&self) -> bool {
        self.current.is_some()
    }

    /// Has both ends agree on other keys, if they are not about to.
    pub fn renew(&mut self, now: Duration, random: [u8; 32]) {
        match &mut self.side {
            Side::First(asking @ Asking::Idle) => {
                *asking = Asking::Asks { first: half(random), next: now, tries: 0 };
            }
            Side::First(_) => {}
            Side::Second { needs, .. } => *needs = needs.or(Some(now)),
        }
    }

    /// To be called when [`next`](Self::next) says.
    pub fn tick(&mut self, now: Duration) -> Vec<Act> {
        let mut acts = Vec::new();
        if self.lingers.is_some_and(|until| now >= until) {
            self.lingers = None;
            acts.extend(self.current.map(|(phase, ..)| Act::Discard(phase ^ 1)));
        }
        let phase = self.next_phase();
        match &mut self.side {
            Side::First(Asking::Asks { first, next, tries }) if now >= *next => {
                (*next, *tries) = (now + pause(*tries), *tries + 1);
                acts.push(Act::Say(phase, Word::Ask(*first)));
            }
            Side::First(Asking::Takes { pair, next, tries }) if now >= *next => {
                (*next, *tries) = (now + pause(*tries), *tries + 1);
                acts.push(Act::Say(phase, Word::Take(*pair)));
            }
            Side::Second { needs: Some(next), .. } if now >= *next => {
                *next = now + LATER;
                acts.push(Act::Say(0, Word::Need));
            }
            _ => {}
        }
        acts
    }

    /// `None`: nothing is under way.
    pub fn next(&self) -> Option<Duration> {
        let said = match self.side {
            Side::First(Asking::Asks { next, .. } | Asking::Takes { next, .. }) => Some(next),
            Side::First(Asking::Idle) => None,
            Side::Second { needs, .. } => needs,
        };
        said.into_iter().chain(self.lingers).min()
    }

    /// `random`: of nobody else, and new each time.
    pub fn hear(&mut self, now: Duration, phase: Phase, word: Word, random: [u8; 32]) -> Vec<Act> {
        match &self.side {
            Side::First(asking) => self.hear_second(now, word, *asking, random),
            Side::Second { secret, .. } => {
                let secret = *secret;
                self.hear_first(now, phase & 1, word, &secret, random)
            }
        }
    }

    /// What the first end hears.
    fn hear_second(&mut self, now: Duration, word: Word, asking: Asking, random: [u8; 32]) -> Vec<Act> {
        let phase = self.next_phase();
        match (word, asking) {
            (Word::Offer(pair), Asking::Asks { first, .. }) if pair.first == first => {
                self.side = Side::First(Asking::Takes { pair, next: now + AGAIN, tries: 1 });
                self.lingers = None;
                vec![Act::Install(phase, pair), Act::Say(phase, Word::Take(pair))]
            }
            (Word::Done(done), Asking::Takes { pair, .. }) if done == pair => {
                self.side = Side::First(Asking::Idle);
                self.agreed(now, phase, pair);
                vec![Act::Use(phase)]
            }
            (Word::Refuse(refused), Asking::Takes { pair, .. }) if refused == pair => {
                self.side = Side::First(Asking::Asks { first: half(random), next: now, tries: 0 });
                Vec::new()
            }
            // What was before may still be under way; it is said again.
            (Word::Need, Asking::Idle) if self.current.is_none_or(|(.., at)| now >= at + LINGER) => {
                self.renew(now, random);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// What the second end hears.
    fn hear_first(
        &mut self,
        now: Duration,
        phase: Phase,
        word: Word,
        secret: &[u8; 32],
        random: [u8; 32],
    ) -> Vec<Act> {
        match word {
            Word::Ask(first) => vec![Act::Say(phase, Word::Offer(offer(secret, first)))],
            // Our answer was lost.
            Word::Take(pair) if self.current.is_some_and(|(_, current, _)| current == pair) => {
                vec![Act::Say(phase, Word::Done(pair))]
            }
            Word::Take(pair) if offer(secret, pair.first) == pair => {
                self.side = Side::Second { secret: random, needs: None };
                self.agreed(now, phase, pair);
                vec![Act::Install(phase, pair), Act::Use(phase), Act::Say(phase, Word::Done(pair))]
            }
            Word::Take(pair) => vec![Act::Say(phase, Word::Refuse(pair))],
            _ => Vec::new(),
        }
    }

    fn agreed(&mut self, now: Duration, phase: Phase, pair: Pair) {
        self.lingers = self.current.map(|_| now + LINGER);
        self.current = Some((phase, pair, now));
    }

    /// Of what the first end asks for.
    fn next_phase(&self) -> Phase {
        self.current.map_or(0, |(phase, ..)| phase ^ 1)
    }
}

fn pause(tries: u32) -> Duration {
    if tries < SOON { AGAIN } else { LATER }
}

fn half(random: [u8; 32]) -> Nonce {
    let mut nonce = [0; 16];
    nonce.copy_from_slice(&random[..16]);
    nonce
}

/// The same for the same nonce, as long as the secret is, and unlike any other.
fn offer(secret: &[u8; 32], first: Nonce) -> Pair {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), &first);
    let mut second = [0; 16];
    second.copy_from_slice(&tag.as_ref()[..16]);
    Pair { first, second }
}

impl Word {
    pub fn encode(self, cipher: Cipher, phase: Phase) -> KeyWord {
        let none = Pair { first: [0; 16], second: [0; 16] };
        let (kind, Pair { first, second }) = match self {
            Self::Ask(first) => (0, Pair { first, ..none }),
            Self::Offer(pair) => (1, pair),
            Self::Take(pair) => (2, pair),
            Self::Done(pair) => (3, pair),
            Self::Refuse(pair) => (4, pair),
            Self::Need => (5, none),
        };
        KeyWord { kind, suite: cipher as u8, phase, nonces: [first, second] }
    }

    pub fn decode(said: &KeyWord) -> Option<Self> {
        let [first, second] = said.nonces;
        let pair = Pair { first, second };
        match said.kind {
            0 => Some(Self::Ask(first)),
            1 => Some(Self::Offer(pair)),
            2 => Some(Self::Take(pair)),
            3 => Some(Self::Done(pair)),
            4 => Some(Self::Refuse(pair)),
            5 => Some(Self::Need),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
