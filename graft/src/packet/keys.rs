//! The key agreement of a session's two ends. The code does no I/O, and gets the time and random bytes as arguments.
//!
//! ```text
//! the first end                          the second
//!   Ask(f) ----------------------------> makes s
//!   opens with (f, s) <------ Offer(f, s)
//!   Take(f, s) ------------------------> opens and seals with (f, s)
//!   seals with (f, s) <-------- Done(f, s)
//! ```
//!
//! The first end is the one with the lower address or port in the session. The messages use a connection between the
//! two daemons that TLS has authenticated. Keys are derived from the TLS exporter of that connection and from the pair
//! of nonces. Neither end ever seals with a key that the other cannot open, whatever is lost. Messages without an
//! answer are repeated. A new connection renews all keys. Offers of the previous connection are not valid any more: if
//! the first end takes one, the second end refuses. Each pair of nonces is used only once: the first end asks only once
//! with a nonce. The second end derives its nonces from a secret, which changes with each connection and whenever one
//! of its offers was taken.
//!
//! `Take` also contains the key that authenticates packet trailers. The first end generates that key when its daemon
//! starts. In a sealed session, the trailer is inside the sealed datagram.

use std::net::SocketAddr;
use std::time::Duration;

use millrace_graft_kernel::packet::{KeyPhase, SealKeys, SessionEnds};
use millrace_kernel::crypto::QuicKeys;
use ring::{hkdf, hmac};
use serde::{Deserialize, Serialize};

/// AEAD cipher of sealed datagrams.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum AeadCipher {
    /// ChaCha20-Poly1305: the default, since it takes the same time for every key.
    #[default]
    Chacha20Poly1305,
    /// AES-128-GCM: faster where the CPU has instructions for AES.
    #[serde(rename = "aes-128-gcm")]
    Aes128Gcm,
}

/// Random bytes that one end contributes to one key agreement.
pub type Nonce = [u8; 16];
/// The key that authenticates the trailers of a session's packets.
pub type FrameKey = [u8; 16];

/// The nonces of both ends, from which keys are derived.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NoncePair {
    /// Nonce of the end with the lower address or port, which requests keys.
    pub first: Nonce,
    /// Nonce of the end with the higher address or port, which offers keys.
    pub second: Nonce,
}

/// A message of the key agreement.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyMessage {
    /// Request for keys by the first end (lower address or port), with that end's nonce.
    Ask(Nonce),
    /// Answer of the second end (higher address or port) to `Ask`: it offers this pair of nonces.
    Offer(NoncePair),
    /// Answer of the first end to `Offer`: it accepts the offered pair of nonces, and sends the key that authenticates
    /// packet trailers.
    Take(NoncePair, FrameKey),
    /// Answer of the second end to `Take`: it now opens and seals with the keys from this pair of nonces.
    Done(NoncePair),
    /// Answer of the second end to `Take`: it did not offer this pair of nonces on the present connection, or has
    /// restarted since.
    Refuse(NoncePair),
    /// The host that does not begin key agreements (the second one) asks the first host for a new agreement (`Ask`),
    /// since it has no keys, or its keys have to be renewed.
    Need,
}

/// A message between the daemons of two hosts, and the session that it is about.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PeerKeyMessage {
    /// The sender's address and port in the session.
    pub local: SocketAddr,
    /// The receiver's address and port in the session.
    pub remote: SocketAddr,
    /// Cipher of the session at the sender, or `None` if the session is not encrypted there.
    pub cipher: Option<AeadCipher>,
    /// Key phase (0 or 1, as in QUIC) of the keys that the message is about.
    pub phase: KeyPhase,
    /// The message of the key agreement.
    pub message: KeyMessage,
}

/// The actions that follow from a message or from a time-out. The caller carries them out in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyAction {
    /// Authenticate the trailers of the session's packets with this key.
    Frames(FrameKey),
    /// Open datagrams with the keys of this pair of nonces as well. They replace the keys with the same key phase (0 or
    /// 1).
    Install(KeyPhase, NoncePair),
    /// Seal datagrams with the key that has this key phase (0 or 1).
    Use(KeyPhase),
    /// Stop opening datagrams with the key that has this key phase (0 or 1).
    Discard(KeyPhase),
    /// Send this message to the other daemon, with the key phase (0 or 1) of the keys that it is about.
    Say(KeyPhase, KeyMessage),
}

/// Pause before a message is repeated for the first time. It doubles with each repetition, so that ten thousand
/// sessions that begin at the same time cause no burst.
const AGAIN: Duration = Duration::from_millis(250);
/// Number of repetitions after which the pause no longer doubles.
const DOUBLINGS: u32 = 5;
/// Pause before the second end (higher address or port) repeats `Need`. Only the first end can start an agreement,
/// which it also does without a `Need`.
const NEED: Duration = Duration::from_secs(4);
/// Longest time that datagrams may be in flight, which is also the shortest time between two key agreements.
const LINGER: Duration = Duration::from_secs(2);
/// Number of datagrams that failed to open after which a key is renewed: half of the limit in RFC 9001, section 6.6.
const FAILURES: u64 = 1 << 35;

/// Secret from the TLS exporter of a connection between two daemons, which is the same at both ends (RFC 8446,
/// section 7.5).
#[derive(Clone)]
pub struct Exported(pub [u8; 32]);

/// The secret of a session, which both ends share.
#[derive(Clone)]
pub struct SessionSecret {
    bytes: [u8; 32],
    /// Addresses and ports of the session, so that each session has keys of its own.
    context: String,
    is_first: bool,
}

impl SessionSecret {
    /// Derives the secret of a session from the secret of a connection between the two daemons.
    pub fn new(exported: &Exported, ends: &SessionEnds) -> Self {
        let bytes = exported.0;
        // Both ends order their two addresses in the same way, and so derive the same keys.
        let is_first = is_first(ends);
        let [one, other] = if is_first { [ends.local, ends.remote] } else { [ends.remote, ends.local] };
        let context = format!("{} {} {} {}", one.ip(), one.port(), other.ip(), other.port());
        Self { bytes, context, is_first }
    }

    /// Derives the keys of both directions. Each pair of nonces may be used only once.
    pub fn keys(&self, cipher: AeadCipher, pair: NoncePair) -> SealKeys {
        let nonces = [pair.first, pair.second].concat();
        let direction = |from_first: bool| {
            let label =
                |what| format!("{} {what} {}", cipher.name(), if from_first { "out" } else { "back" });
            let iv = self.derive(&nonces, &label("iv"));
            match cipher {
                AeadCipher::Chacha20Poly1305 => {
                    QuicKeys::chacha20_poly1305(&self.derive(&nonces, &label("key")), &iv, &[0; 32])
                }
                AeadCipher::Aes128Gcm => {
                    QuicKeys::aes128_gcm(&self.derive(&nonces, &label("key")), &iv, &[0; 16])
                }
            }
        };
        SealKeys { seals: direction(self.is_first), opens: direction(!self.is_first), limit: cipher.limit() }
    }

    /// Derives bytes by HKDF-SHA256 (RFC 5869).
    fn derive<const LEN: usize>(&self, salt: &[u8], label: &str) -> [u8; LEN] {
        struct HkdfLength(usize);
        impl hkdf::KeyType for HkdfLength {
            fn len(&self) -> usize {
                self.0
            }
        }
        let mut out = [0; LEN];
        let key = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(&self.bytes);
        let info = [b"millrace graft ", label.as_bytes(), b" ", self.context.as_bytes()];
        let filled = key.expand(&info, HkdfLength(LEN)).and_then(|made| made.fill(&mut out));
        assert!(filled.is_ok(), "HKDF makes up to 8160 bytes, not {LEN}");
        out
    }
}

impl AeadCipher {
    /// Returns the name of the cipher in settings and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chacha20Poly1305 => "chacha20-poly1305",
            Self::Aes128Gcm => "aes-128-gcm",
        }
    }

    /// Returns how many datagrams of up to 2 KiB may be sealed with one key (RFC 9001, appendix B.1.1).
    /// ChaCha20-Poly1305 is limited by the packet numbers only.
    fn limit(self) -> u64 {
        match self {
            Self::Chacha20Poly1305 => 1 << 47,
            Self::Aes128Gcm => 1 << 28,
        }
    }

    /// Reports whether a key with these counts of sealed and failed datagrams has to be renewed.
    pub fn is_worn(self, sealed: u64, failures: u64) -> bool {
        // Renewal at half of the limit leaves time to agree on new keys.
        sealed >= self.limit() / 2 || failures >= FAILURES
    }
}

#[derive(Debug)]
enum KeySide {
    First(KeyRequestState),
    Second {
        /// Secret from which the nonces of this end's offers are derived.
        secret: [u8; 32],
        /// Time at which the next `Need` is sent, or `None` if this end needs no keys.
        needs: Option<Duration>,
    },
}

#[derive(Debug, Clone, Copy)]
enum KeyRequestState {
    Idle,
    /// This end has sent `Ask` with its nonce, and waits for an offer.
    Asks {
        first: Nonce,
        next: Duration,
        tries: u32,
    },
    /// This end has taken an offered pair of nonces, and waits for `Done`.
    Takes {
        pair: NoncePair,
        next: Duration,
        tries: u32,
    },
}

/// One end's state of the key agreement. Messages, time and [`reconnect`](Self::reconnect) change it.
///
/// # States
///
/// The first end is *idle*, *asks* with its nonce, or *takes* a pair that was offered. The second end keeps no state of
/// an agreement: its nonces follow from a secret, and it only remembers whether it needs keys. [`Self::on_message`]
/// handles each message, [`Self::tick`] has to be called at the time of [`Self::next`], [`Self::renew`] asks for new
/// keys, and [`Self::reconnect`] has to be called for each new connection between the daemons. `on_message` and `tick`
/// return actions that the caller carries out in their order, before the next call. Between calls, this end opens
/// whatever the other end may seal: with the present keys, with the previous keys for `LINGER`, and with the keys that
/// both ends have just agreed on.
#[derive(Debug)]
pub struct KeyAgreement {
    side: KeySide,
    /// The key that authenticates packet trailers. Both ends use the key that the first end has generated.
    frames: FrameKey,
    /// True if the pending key agreement uses an earlier connection between the daemons, so that another agreement must
    /// follow.
    is_behind: bool,
    /// The keys with which this end seals, and the time at which it began to use them.
    current: Option<(KeyPhase, NoncePair, Duration)>,
    /// Time until which this end still opens datagrams of the previous key.
    lingers: Option<Duration>,
}

impl KeyAgreement {
    /// Creates the state of one end. `now` is the time since any fixed moment, and `random` has bytes that no other end
    /// has.
    pub fn new(ends: &SessionEnds, frames: FrameKey, now: Duration, random: [u8; 32]) -> Self {
        let side = match is_first(ends) {
            true => KeySide::First(KeyRequestState::Asks { first: half(random), next: now, tries: 0 }),
            false => KeySide::Second { secret: random, needs: Some(now) },
        };
        Self { side, frames, is_behind: false, current: None, lingers: None }
    }

    /// Reports whether this end has a key and seals with it.
    pub fn has_keys(&self) -> bool {
        self.current.is_some()
    }

    /// Starts an agreement on new keys unless one is pending. The agreement begins when no datagram that was sealed
    /// with the previous keys can be in flight any more.
    pub fn renew(&mut self, now: Duration, random: [u8; 32]) {
        let next = self.current.map_or(now, |(.., since)| now.max(since + LINGER));
        match &mut self.side {
            KeySide::First(asking @ KeyRequestState::Idle) => {
                *asking = KeyRequestState::Asks { first: half(random), next, tries: 0 };
            }
            KeySide::First(_) => {}
            KeySide::Second { needs, .. } => *needs = needs.or(Some(now)),
        }
    }

    /// Derives keys from a new connection between the daemons from now on. It must be called before any message of that
    /// connection is handled.
    pub fn reconnect(&mut self, now: Duration, random: [u8; 32]) {
        match &mut self.side {
            KeySide::First(KeyRequestState::Idle) => self.renew(now, random),
            // A request that is already scheduled keeps its time, since two agreements must be `LINGER` apart.
            KeySide::First(KeyRequestState::Asks { tries: 0, .. }) => {}
            KeySide::First(KeyRequestState::Asks { next, tries, .. }) => (*next, *tries) = (now, 0),
            KeySide::First(KeyRequestState::Takes { next, tries, .. }) => {
                (*next, *tries, self.is_behind) = (now, 0, true);
            }
            KeySide::Second { secret, needs } => (*secret, *needs) = (random, needs.map(|_| now)),
        }
    }

    /// Handles time-outs and repetitions. It must be called at the time of [`next`](Self::next).
    pub fn tick(&mut self, now: Duration) -> Vec<KeyAction> {
        let mut acts = Vec::new();
        if self.lingers.is_some_and(|until| now >= until) {
            self.lingers = None;
            // There are two key phases (0 and 1), so the previous key has the other one.
            acts.extend(self.current.map(|(phase, ..)| KeyAction::Discard(phase ^ 1)));
        }
        let phase = self.next_phase();
        match &mut self.side {
            KeySide::First(KeyRequestState::Asks { first, next, tries }) if now >= *next => {
                (*next, *tries) = (now + pause(*tries), *tries + 1);
                acts.push(KeyAction::Say(phase, KeyMessage::Ask(*first)));
            }
            KeySide::First(KeyRequestState::Takes { pair, next, tries }) if now >= *next => {
                (*next, *tries) = (now + pause(*tries), *tries + 1);
                acts.push(KeyAction::Say(phase, KeyMessage::Take(*pair, self.frames)));
            }
            KeySide::Second { needs: Some(next), .. } if now >= *next => {
                *next = now + NEED;
                acts.push(KeyAction::Say(0, KeyMessage::Need));
            }
            _ => {}
        }
        acts
    }

    /// Returns the time of the next `tick`, or `None` if no agreement is pending.
    pub fn next(&self) -> Option<Duration> {
        let said = match self.side {
            KeySide::First(KeyRequestState::Asks { next, .. } | KeyRequestState::Takes { next, .. }) => {
                Some(next)
            }
            KeySide::First(KeyRequestState::Idle) => None,
            KeySide::Second { needs, .. } => needs,
        };
        said.into_iter().chain(self.lingers).min()
    }

    /// Handles a message. `random` has bytes that no other end has, and that are new for each call.
    pub fn on_message(
        &mut self,
        now: Duration,
        phase: KeyPhase,
        message: KeyMessage,
        random: [u8; 32],
    ) -> Vec<KeyAction> {
        match &self.side {
            KeySide::First(asking) => self.hear_second(now, message, *asking, random),
            KeySide::Second { secret, .. } => {
                let secret = *secret;
                self.hear_first(now, phase & 1, message, &secret, random)
            }
        }
    }

    /// Handles a message of the second end (higher address or port) at the first end.
    fn hear_second(
        &mut self,
        now: Duration,
        message: KeyMessage,
        asking: KeyRequestState,
        random: [u8; 32],
    ) -> Vec<KeyAction> {
        let phase = self.next_phase();
        match (message, asking) {
            (KeyMessage::Offer(pair), KeyRequestState::Asks { first, .. }) if pair.first == first => {
                self.side = KeySide::First(KeyRequestState::Takes { pair, next: now + AGAIN, tries: 1 });
                // The new key gets the key phase of the previous key, so installing it discards the previous key.
                self.lingers = None;
                vec![
                    KeyAction::Install(phase, pair),
                    KeyAction::Say(phase, KeyMessage::Take(pair, self.frames)),
                ]
            }
            (KeyMessage::Done(done), KeyRequestState::Takes { pair, .. }) if done == pair => {
                self.side = KeySide::First(KeyRequestState::Idle);
                self.agreed(now, phase, pair);
                if std::mem::take(&mut self.is_behind) {
                    self.renew(now, random);
                }
                vec![KeyAction::Use(phase)]
            }
            (KeyMessage::Refuse(refused), KeyRequestState::Takes { pair, .. }) if refused == pair => {
                self.side =
                    KeySide::First(KeyRequestState::Asks { first: half(random), next: now, tries: 0 });
                self.is_behind = false;
                Vec::new()
            }
            // As long as the present key was used for less than `LINGER`, datagrams of the previous key may be in
            // flight. `Need` is therefore ignored, and the other end repeats it.
            (KeyMessage::Need, KeyRequestState::Idle)
                if self.current.is_none_or(|(.., at)| now >= at + LINGER) =>
            {
                self.renew(now, random);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// Handles a message of the first end (lower address or port) at the second end.
    fn hear_first(
        &mut self,
        now: Duration,
        phase: KeyPhase,
        message: KeyMessage,
        secret: &[u8; 32],
        random: [u8; 32],
    ) -> Vec<KeyAction> {
        match message {
            KeyMessage::Ask(first) => vec![KeyAction::Say(phase, KeyMessage::Offer(offer(secret, first)))],
            // The message `Done` of this end was lost, so it is sent again.
            KeyMessage::Take(pair, _) if self.current.is_some_and(|(_, current, _)| current == pair) => {
                vec![KeyAction::Say(phase, KeyMessage::Done(pair))]
            }
            // An accepted pair of nonces is valid only if it follows from this end's present secret. A pair that was
            // offered on an earlier connection is therefore refused.
            KeyMessage::Take(pair, frames) if offer(secret, pair.first) == pair => {
                // A new secret makes sure that this pair of nonces is never offered again.
                self.side = KeySide::Second { secret: random, needs: None };
                self.agreed(now, phase, pair);
                let done = KeyAction::Say(phase, KeyMessage::Done(pair));
                vec![KeyAction::Frames(frames), KeyAction::Install(phase, pair), KeyAction::Use(phase), done]
            }
            KeyMessage::Take(pair, _) => vec![KeyAction::Say(phase, KeyMessage::Refuse(pair))],
            _ => Vec::new(),
        }
    }

    fn agreed(&mut self, now: Duration, phase: KeyPhase, pair: NoncePair) {
        self.lingers = self.current.map(|_| now + LINGER);
        self.current = Some((phase, pair, now));
    }

    /// Returns the key phase (0 or 1) of the keys that the first end (lower address or port) requests next.
    fn next_phase(&self) -> KeyPhase {
        self.current.map_or(0, |(phase, ..)| phase ^ 1)
    }
}

fn pause(tries: u32) -> Duration {
    AGAIN * 2_u32.pow(tries.min(DOUBLINGS))
}

fn half(random: [u8; 32]) -> Nonce {
    let mut nonce = [0; 16];
    nonce.copy_from_slice(&random[..16]);
    nonce
}

/// Returns the pair of nonces that answers a nonce of the first end. A secret always gives the same pair for a nonce,
/// and different pairs for different nonces.
fn offer(secret: &[u8; 32], first: Nonce) -> NoncePair {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), &first);
    let mut second = [0; 16];
    second.copy_from_slice(&tag.as_ref()[..16]);
    NoncePair { first, second }
}

/// Reports whether this end is the first one, which asks for keys: the one with the lower address or port.
fn is_first(ends: &SessionEnds) -> bool {
    ends.local < ends.remote
}

#[cfg(test)]
mod tests;
