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
        let is_known = |id: &u64| self.sessions.get(id).is_some_and(|session| session.peer == peer);
        match say {
            PeerMessage::Open { id, port, service, in_order } => {
                // `Open` is repeated until it is answered, so a repeated `Open` of a known session is accepted again.
                let known =
                    self.sessions.get(&id).is_some_and(|session| session.peer == peer && !session.is_own);
                let answer =
                    match if known { Ok(()) } else { self.offered(peer, id, port, service, in_order) } {
                        Ok(()) => PeerMessage::Accept { id },
                        Err((why, reason)) => PeerMessage::Refuse { id, why, reason: short(&reason) },
                    };
                self.say(peer, &answer);
            }
            PeerMessage::Keys { message } => {
                let name = self.peers.get(peer).map_or("", |peer| &peer.name);
                if let Err(error) = runtime.receive_key_message(name, &message) {
                    error!(peer = name, "a message about session keys cannot be handled: {error}");
                }
            }
            PeerMessage::Accept { id } if is_known(&id) => self.accepted(id),
            PeerMessage::Refuse { id, why, reason } if is_known(&id) => {
                self.declined(runtime, id, why, &reason)
            }
            PeerMessage::Go { id } if is_known(&id) => self.go(runtime, id),
            PeerMessage::Ready { id } if is_known(&id) => self.ready(id),
            PeerMessage::Finish { id, messages } => {
                if is_known(&id) {
                    self.tell_finish(id, messages);
                }
                self.say(peer, &PeerMessage::Finished { id });
            }
            PeerMessage::Finished { id } if is_known(&id) => {
                self.sessions.entry(id).and_modify(|session| session.finish = None);
            }
            PeerMessage::Close { id, messages, reason } => {
                if is_known(&id) {
                    // `Close` may arrive before `Finish`, so it also says how many messages the other application has
                    // sent.
                    messages.into_iter().for_each(|messages| self.tell_finish(id, messages));
                    self.end(id, &reason, true);
                }
                self.say(peer, &PeerMessage::Closed { id });
            }
            PeerMessage::Closed { id } if is_known(&id) => {
                if let Some(session) = self.sessions.get_mut(&id) {
                    session.said = None;
                }
            }
            PeerMessage::Report { id, delivered, asks } if is_known(&id) => {
                if let Some(session) = self.sessions.get_mut(&id) {
                    session.is_asked = asks;
                    delivered.into_iter().for_each(|delivered| session.quality.on_delivered(delivered));
                }
            }
            // The peer's daemon sends a report on a session that this daemon does not know, so this daemon closes the
            // session.
            PeerMessage::Report { id, .. } => {
                let reason =
                    "the daemon at the other end does not know the session: it was restarted".to_owned();
                self.say(peer, &PeerMessage::Close { id, messages: None, reason });
            }
            // The message belongs to a session that is over, or is of a type that daemons do not accept in the
            // session's state.
            _ => {}
        }
    }

    pub(super) fn say(&self, peer: usize, say: &PeerMessage) {
        self.links.say(peer, say);
    }

    pub(super) fn say_of(&self, id: u64, say: &PeerMessage) {
        self.sessions.get(&id).into_iter().for_each(|session| self.say(session.peer, say));
    }
}
