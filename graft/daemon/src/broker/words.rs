//! What the two daemons say to each other of sessions.

use millrace_graft::packet::Runtime;

use super::{Broker, far::Say, lease::short};

impl Broker {
    pub(super) fn hear(&mut self, runtime: &mut Runtime, peer: usize, say: Say) {
        // Of a session with another peer it is nothing.
        let is_known = |life: &u64| self.leases.get(life).is_some_and(|lease| lease.peer == peer);
        match say {
            Say::Open { life, port, service, in_order } => {
                let known = self.leases.get(&life).is_some_and(|lease| lease.peer == peer && !lease.is_own);
                let answer =
                    match if known { Ok(()) } else { self.offered(peer, life, (port, service), in_order) } {
                        Ok(()) => Say::Accept { life },
                        Err((why, reason)) => Say::Refuse { life, why, reason: short(&reason) },
                    };
                self.say(peer, &answer);
            }
            Say::Accept { life } if is_known(&life) => self.accepted(life),
            Say::Refuse { life, why, reason } if is_known(&life) => {
                self.declined(runtime, life, why, &reason)
            }
            Say::Go { life } if is_known(&life) => self.go(runtime, life),
            Say::Ready { life } if is_known(&life) => self.ready(life),
            Say::Finish { life, messages } => {
                if is_known(&life) {
                    self.tell_finish(life, messages);
                }
                self.say(peer, &Say::Finished { life });
            }
            Say::Finished { life } if is_known(&life) => {
                self.leases.entry(life).and_modify(|lease| lease.finish = None);
            }
            Say::Close { life, messages, reason } => {
                if is_known(&life) {
                    messages.into_iter().for_each(|messages| self.tell_finish(life, messages));
                    self.end(life, &reason, true);
                }
                self.say(peer, &Say::Closed { life });
            }
            Say::Closed { life } if is_known(&life) => {
                if let Some(lease) = self.leases.get_mut(&life) {
                    lease.said = None;
                }
            }
            Say::Report { life, delivered, asks } if is_known(&life) => {
                if let Some(lease) = self.leases.get_mut(&life) {
                    lease.is_asked = asks;
                    delivered.into_iter().for_each(|delivered| lease.quality.hear(delivered));
                }
            }
            // It believes to have what this end knows nothing of.
            Say::Report { life, .. } => {
                let reason =
                    "the daemon at the other end knows nothing of it: it was started anew".to_owned();
                self.say(peer, &Say::Close { life, messages: None, reason });
            }
            // Of what is over, or not for this end.
            _ => {}
        }
    }

    pub(super) fn say(&self, peer: usize, say: &Say) {
        self.fars.get(peer).into_iter().for_each(|far| far.say(say));
    }

    pub(super) fn say_of(&self, life: u64, say: &Say) {
        self.leases.get(&life).into_iter().for_each(|lease| self.say(lease.peer, say));
    }
}
