//! Keys of sealed sessions: agreed on, given to the kernel, and renewed before they are worn.

use std::time::Duration;

use millrace_graft_kernel::joint::{Ends, KeyWord};
use ring::rand::{SecureRandom as _, SystemRandom};

use super::super::keys::{Act, Agreement, Cipher, Secret, Word};
use super::live::Sealed;
use super::{Event, Runtime, Session};
use crate::Error;

impl Runtime {
    /// Whether every session passes datagrams: the sealed ones have keys.
    pub fn is_open(&self) -> bool {
        self.live.values().all(|live| live.is_open())
    }

    /// Returns of which sessions something was heard.
    pub(super) fn hear_keys(&mut self, events: &mut Vec<Event>) -> Result<Vec<Ends>, Error> {
        let mut heard = Vec::new();
        for (ends, said) in self.joints.key_words() {
            heard.push(ends);
            let now = self.now();
            let Some(sealed) = self.sealed(&ends) else { continue };
            let acts = sealed.hear(now, &said)?;
            self.act_on_keys(&ends, acts, events)?;
        }
        Ok(heard)
    }

    pub(super) fn tick_keys(&mut self, ends: &Ends, events: &mut Vec<Event>) -> Result<(), Error> {
        let now = self.now();
        let acts = self.sealed(ends).map(|sealed| sealed.agreement.tick(now)).unwrap_or_default();
        self.act_on_keys(ends, acts, events)
    }

    pub(super) fn look_at_keys(&mut self, active: &[Ends]) -> Result<(), Error> {
        let now = self.now();
        for ends in active {
            let Some(live) = self.live.get_mut(ends) else { continue };
            let Some(sealed) = &mut live.sealed else { continue };
            let wear = self.joints.wear(ends)?.unwrap_or_default();
            if sealed.cipher.is_worn(wear.sealed, wear.failures) {
                sealed.agreement.renew(now, random()?);
                self.agenda.put(*ends, live.next());
            }
        }
        Ok(())
    }

    fn act_on_keys(&mut self, ends: &Ends, acts: Vec<Act>, events: &mut Vec<Event>) -> Result<(), Error> {
        for act in acts {
            let Some(live) = self.live.get_mut(ends) else { continue };
            let Some(sealed) = &live.sealed else { continue };
            match act {
                Act::Install(phase, pair) => {
                    let keys = sealed.secret.keys(sealed.cipher, pair);
                    self.joints.install(ends, phase, &keys)?;
                }
                Act::Use(phase) => {
                    self.joints.seal_with(ends, phase)?;
                    events.push(Event::Keys { session: live.session.name.clone() });
                }
                Act::Discard(phase) => self.joints.discard(ends, phase)?,
                Act::Say(phase, word) => {
                    let said = self.joints.say_key_word(ends, &word.encode(sealed.cipher, phase));
                    live.mute = said.err().map(|error| error.to_string());
                }
            }
        }
        Ok(())
    }

    fn sealed(&mut self, ends: &Ends) -> Option<&mut Sealed> {
        self.live.get_mut(ends)?.sealed.as_mut()
    }
}

impl Sealed {
    pub(super) fn new(cipher: Cipher, session: &Session, now: Duration) -> Result<Self, Error> {
        let secret = Secret::new(session.key, &session.ends);
        let agreement = Agreement::new(&secret, now, random()?);
        Ok(Self { cipher, secret, agreement, other: None })
    }

    fn hear(&mut self, now: Duration, said: &KeyWord) -> Result<Vec<Act>, Error> {
        self.other = (said.suite != self.cipher as u8).then_some(said.suite);
        match Word::decode(said) {
            Some(word) if self.other.is_none() => Ok(self.agreement.hear(now, said.phase, word, random()?)),
            _ => Ok(Vec::new()),
        }
    }
}

pub(super) fn random<const BYTES: usize>() -> Result<[u8; BYTES], Error> {
    let mut bytes = [0; BYTES];
    SystemRandom::new().fill(&mut bytes).map_err(|_| Error::NoRandom)?;
    Ok(bytes)
}
