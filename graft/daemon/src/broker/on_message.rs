//! Handles messages from the daemons of peers about sessions.

use millrace_graft::packet::{PacketRuntime, keys::Exported};
use tracing::error;

use super::{SessionBroker, client_session::short, peer_message::PeerMessage};

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
        let is_known =
            |session_id: &u64| self.sessions.get(session_id).is_some_and(|session| session.peer == peer);
        match say {
            PeerMessage::Open { session_id, port, service, in_order } => {
                // `Open` is repeated until it is answered, so one of a known session is accepted again.
                let known = self
                    .sessions
                    .get(&session_id)
                    .is_some_and(|session| session.peer == peer && !session.is_own);
                let answer = match if known {
                    Ok(())
                } else {
                    self.offered(peer, session_id, port, service, in_order)
                } {
                    Ok(()) => PeerMessage::Accept { session_id },
                    Err((why, reason)) => PeerMessage::Refuse { session_id, why, reason: short(&reason) },
                };
                self.say(peer, &answer);
            }
            PeerMessage::Keys { word } => {
                let name = self.peers.get(peer).map_or("", |peer| &peer.name);
                if let Err(error) = runtime.hear_key_word(name, &word) {
                    error!(peer = name, "a message about session keys cannot be handled: {error}");
                }
            }
            PeerMessage::Accept { session_id } if is_known(&session_id) => self.accepted(session_id),
            PeerMessage::Refuse { session_id, why, reason } if is_known(&session_id) => {
                self.declined(runtime, session_id, why, &reason)
            }
            PeerMessage::Go { session_id } if is_known(&session_id) => self.go(runtime, session_id),
            PeerMessage::Ready { session_id } if is_known(&session_id) => self.ready(session_id),
            PeerMessage::Finish { session_id, messages } => {
                if is_known(&session_id) {
                    self.tell_finish(session_id, messages);
                }
                self.say(peer, &PeerMessage::Finished { session_id });
            }
            PeerMessage::Finished { session_id } if is_known(&session_id) => {
                self.sessions.entry(session_id).and_modify(|session| session.finish = None);
            }
            PeerMessage::Close { session_id, messages, reason } => {
                if is_known(&session_id) {
                    // `Close` may arrive before `Finish`, and has the same number.
                    messages.into_iter().for_each(|messages| self.tell_finish(session_id, messages));
                    self.end(session_id, &reason, true);
                }
                self.say(peer, &PeerMessage::Closed { session_id });
            }
            PeerMessage::Closed { session_id } if is_known(&session_id) => {
                if let Some(session) = self.sessions.get_mut(&session_id) {
                    session.said = None;
                }
            }
            PeerMessage::Report { session_id, delivered, asks } if is_known(&session_id) => {
                if let Some(session) = self.sessions.get_mut(&session_id) {
                    session.is_asked = asks;
                    delivered.into_iter().for_each(|delivered| session.quality.on_delivered(delivered));
                }
            }
            // The other end has a session that this end does not know.
            PeerMessage::Report { session_id, .. } => {
                let reason =
                    "the daemon at the other end does not know the session: it was restarted".to_owned();
                self.say(peer, &PeerMessage::Close { session_id, messages: None, reason });
            }
            // The session is over, or the message is not for this end.
            _ => {}
        }
    }

    pub(super) fn say(&self, peer: usize, say: &PeerMessage) {
        self.links.fars.get(peer).into_iter().for_each(|far| far.say(say));
    }

    pub(super) fn say_of(&self, session_id: u64, say: &PeerMessage) {
        self.sessions.get(&session_id).into_iter().for_each(|session| self.say(session.peer, say));
    }
}
