//! Keys of sessions. Both daemons agree on them, and the kernel uses them. They are renewed with each connection
//! between the daemons, and before the limit of sealed datagrams.

use std::time::Duration;

use millrace_graft_kernel::packet::SessionEnds;
use ring::rand::{SecureRandom as _, SystemRandom};

use super::super::keys::{AeadCipher, FrameKey, KeyAction, KeyAgreement, SessionSecret};
use super::live::{Keying, LiveLine};
use super::{Exported, PacketEvent, PacketRuntime, PeerKeyMessage, SPREAD};
use crate::Error;

impl PacketRuntime {
    /// Reports whether all sessions have keys, so that datagrams pass.
    pub fn is_open(&self) -> bool {
        self.live.values().all(|live| live.is_open())
    }

    /// Starts key agreements on a new connection for the sessions with a peer, and renews existing keys. It must be
    /// called before the connection's first message is passed to [`receive_key_message`](Self::receive_key_message).
    pub fn connected(&mut self, peer: &str, exported: &Exported) -> Result<(), Error> {
        let mut at = self.now();
        self.lines.insert(peer.to_owned(), exported.clone());
        let of_peer = self.live.iter_mut().filter(|(_, live)| live.session.peer == peer);
        for (ends, live) in of_peer {
            live.keying.connect(ends, exported, at)?;
            self.agenda.put(*ends, live.next());
            at += SPREAD;
        }
        Ok(())
    }

    /// Handles a message about keys from a peer's daemon.
    pub fn receive_key_message(&mut self, peer: &str, said: &PeerKeyMessage) -> Result<(), Error> {
        let now = self.now();
        let ends = SessionEnds { local: said.remote, remote: said.local };
        // A peer may send messages only about its own sessions. Messages about other sessions are ignored.
        let live = self.live.get_mut(&ends).filter(|live| live.session.peer == peer);
        let Some(live) = live else { return Ok(()) };
        let acts = live.keying.on_key_message(now, said)?;
        self.act_on_keys(&ends, acts)?;
        self.plan(&ends);
        Ok(())
    }

    /// Returns messages for the daemons of peers. Each must be sent on the connection of the latest call of
    /// [`connected`](Self::connected), and lost ones are repeated.
    pub fn take_key_messages(&mut self) -> Vec<(String, PeerKeyMessage)> {
        std::mem::take(&mut self.key_messages)
    }

    pub(super) fn tick_keys(&mut self, ends: &SessionEnds) -> Result<(), Error> {
        let now = self.now();
        let line = self.live.get_mut(ends).and_then(|live| live.keying.line.as_mut());
        let acts = line.map(|line| line.agreement.tick(now)).unwrap_or_default();
        self.act_on_keys(ends, acts)
    }

    pub(super) fn look_at_keys(&mut self, active: &[SessionEnds]) -> Result<(), Error> {
        let now = self.now();
        for ends in active {
            let Some(live) = self.live.get_mut(ends) else { continue };
            let Keying { cipher: Some(cipher), line: Some(line), .. } = &mut live.keying else { continue };
            let wear = self.hooks.wear(ends)?.unwrap_or_default();
            if cipher.is_worn(wear.sealed, wear.failures) {
                line.agreement.renew(now, random()?);
                self.agenda.put(*ends, live.next());
            }
        }
        Ok(())
    }

    fn act_on_keys(&mut self, ends: &SessionEnds, acts: Vec<KeyAction>) -> Result<(), Error> {
        for act in acts {
            let Some(live) = self.live.get(ends) else { continue };
            let Keying { cipher, line: Some(line), .. } = &live.keying else { continue };
            match (act, *cipher) {
                (KeyAction::Frames(key), _) => self.hooks.set_key(ends, key)?,
                (KeyAction::Install(phase, pair), Some(cipher)) => {
                    self.hooks.install(ends, phase, &line.secret.keys(cipher, pair))?;
                }
                (KeyAction::Discard(phase), Some(_)) => self.hooks.discard(ends, phase)?,
                (KeyAction::Install(..) | KeyAction::Discard(_), None) => {}
                (KeyAction::Use(phase), cipher) => {
                    match cipher {
                        Some(_) => self.hooks.seal_with(ends, phase)?,
                        // An unencrypted session has been waiting for the key that authenticates packet trailers, and
                        // now passes datagrams.
                        None => self.hooks.resume(ends)?,
                    }
                    self.pending.push(PacketEvent::Keys { session: live.session.name.clone() });
                    // An end that has restarted could not open earlier greetings, so it gets another greeting.
                    let now = self.now();
                    self.live.entry(*ends).and_modify(|live| live.owe_greeting(now));
                }
                (KeyAction::Say(phase, message), cipher) => {
                    let SessionEnds { local, remote } = *ends;
                    let said = PeerKeyMessage { local, remote, cipher, phase, message };
                    self.key_messages.push((live.session.peer.clone(), said));
                }
            }
        }
        Ok(())
    }
}

impl Keying {
    /// Returns the key state of a session whose daemons have not connected yet.
    pub(super) fn new(cipher: Option<AeadCipher>, frames: FrameKey) -> Self {
        Self { cipher, frames, line: None, is_unlike: false }
    }

    pub(super) fn connect(
        &mut self,
        ends: &SessionEnds,
        exported: &Exported,
        at: Duration,
    ) -> Result<(), Error> {
        let secret = SessionSecret::new(exported, ends);
        let random = random()?;
        match &mut self.line {
            Some(line) => {
                line.secret = secret;
                line.agreement.reconnect(at, random);
            }
            None => {
                let agreement = KeyAgreement::new(ends, self.frames, at, random);
                self.line = Some(LiveLine { secret, agreement });
            }
        }
        Ok(())
    }

    fn on_key_message(&mut self, now: Duration, said: &PeerKeyMessage) -> Result<Vec<KeyAction>, Error> {
        self.is_unlike = said.cipher != self.cipher;
        match &mut self.line {
            Some(line) if !self.is_unlike => {
                Ok(line.agreement.on_message(now, said.phase, said.message, random()?))
            }
            _ => Ok(Vec::new()),
        }
    }
}

pub(super) fn random<const BYTES: usize>() -> Result<[u8; BYTES], Error> {
    let mut bytes = [0; BYTES];
    SystemRandom::new().fill(&mut bytes).map_err(|_| Error::NoRandom)?;
    Ok(bytes)
}
