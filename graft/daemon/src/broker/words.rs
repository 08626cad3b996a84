//! Handles messages from the daemons of peers about sessions.

use millrace_graft::packet::{PacketRuntime, keys::Exported};
use tracing::error;

use super::{SessionBroker, far::PeerMessage, lease::short};

impl SessionBroker {
    pub(super) fn connected(&self, runtime: &mut PacketRuntime, peer: usize, exported: &Exported) {
        let name = self.peers.get(peer).map_or("", |peer| &peer.name);
        if let Err(error) = runtime.connected(name, exported) {
            error!(
                peer = name,
                "session keys cannot be derived from the new connection between the daemons: {error}"
            );
        }
    }

    pub(super) fn on_peer_message(&mut self, runtime: &mut PacketRuntime, peer: usize, say: PeerMessage) {
        // A message about a session with another peer is ignored.
        let is_known = |life: &u64| self.leases.get(life).is_some_and(|lease| lease.peer == peer);
        match say {
            PeerMessage::Open { life, port, service, in_order } => {
                // `Open` is repeated until it is answered, so one of a known session is accepted again.
                let known = self.leases.get(&life).is_some_and(|lease| lease.peer == peer && !lease.is_own);
                let answer =
                    match if known { Ok(()) } else { self.offered(peer, life, port, service, in_order) } {
                        Ok(()) => PeerMessage::Accept { life },
                        Err((why, reason)) => PeerMessage::Refuse { life, why, reason: short(&reason) },
                    };
                self.say(peer, &answer);
            }
            PeerMessage::Keys { word } => {
                let name = self.peers.get(peer).map_or("", |peer| &peer.name);
                if let Err(error) = runtime.hear_key_word(name, &word) {
                    error!(peer = name, "a message about session keys cannot be handled: {error}");
                }
            }
            PeerMessage::Accept { life } if is_known(&life) => self.accepted(life),
            PeerMessage::Refuse { life, why, reason } if is_known(&life) => {
                self.declined(runtime, life, why, &reason)
            }
            PeerMessage::Go { life } if is_known(&life) => self.go(runtime, life),
            PeerMessage::Ready { life } if is_known(&life) => self.ready(life),
            PeerMessage::Finish { life, messages } => {
                if is_known(&life) {
                    self.tell_finish(life, messages);
                }
                self.say(peer, &PeerMessage::Finished { life });
            }
            PeerMessage::Finished { life } if is_known(&life) => {
                self.leases.entry(life).and_modify(|lease| lease.finish = None);
            }
            PeerMessage::Close { life, messages, reason } => {
                if is_known(&life) {
                    // `Close` may arrive before `Finish`, and has the same number.
                    messages.into_iter().for_each(|messages| self.tell_finish(life, messages));
                    self.end(life, &reason, true);
                }
                self.say(peer, &PeerMessage::Closed { life });
            }
            PeerMessage::Closed { life } if is_known(&life) => {
                if let Some(lease) = self.leases.get_mut(&life) {
                    lease.said = None;
                }
            }
            PeerMessage::Report { life, delivered, asks } if is_known(&life) => {
                if let Some(lease) = self.leases.get_mut(&life) {
                    lease.is_asked = asks;
                    delivered.into_iter().for_each(|delivered| lease.quality.on_delivered(delivered));
                }
            }
            // The other end has a session that this end does not know.
            PeerMessage::Report { life, .. } => {
                let reason =
                    "the daemon at the other end does not know the session: it was restarted".to_owned();
                self.say(peer, &PeerMessage::Close { life, messages: None, reason });
            }
            // The session is over, or the message is not for this end.
            _ => {}
        }
    }

    pub(super) fn say(&self, peer: usize, say: &PeerMessage) {
        self.links.fars.get(peer).into_iter().for_each(|far| far.say(say));
    }

    pub(super) fn say_of(&self, life: u64, say: &PeerMessage) {
        self.leases.get(&life).into_iter().for_each(|lease| self.say(lease.peer, say));
    }
}
