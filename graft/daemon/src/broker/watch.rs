//! Checks each second whether sessions meet what was asked for, reports violations, and changes grafts where
//! that is allowed.

use std::time::Instant;

use millrace_graft::packet::{
    PacketRuntime,
    choose::{Offer, PeerPathFigures, choose},
};
use millrace_messages::{ChangeOrigin, Qos, wire::BrokerReply};
use tracing::info;

use super::{
    SessionBroker,
    client_session::{ClientSession, ClientSessionStage, waits},
};

impl SessionBroker {
    pub(super) fn look_at_quality(&mut self, runtime: &mut PacketRuntime) {
        let now = Instant::now();
        let lives: Vec<_> = self.client_sessions.keys().copied().collect();
        for session_id in lives {
            let has_wishes = |client_session: &&mut ClientSession| {
                client_session.stage == ClientSessionStage::Open && client_session.want.qos != Qos::default()
            };
            let Some(client_session) = self.client_sessions.get_mut(&session_id).filter(has_wishes) else {
                continue;
            };
            let Ok(Some(traffic)) = runtime.traffic(&client_session.ends) else { continue };
            client_session.quality.look(&traffic);
            let (Some(far), Some(peer)) =
                (self.links.fars.get(client_session.peer), self.peers.get(client_session.peer))
            else {
                continue;
            };
            let measured = far.path();
            // Queues delay datagrams, too, so the present round trip counts. The larger one of two measured losses
            // counts.
            let path = PeerPathFigures {
                round_trip: far.round_trip_now(),
                loss: measured.loss.into_iter().chain(client_session.quality.loss()).reduce(f64::max),
            };
            let Some(offer) = self.offers.iter().find(|offer| offer.graft == client_session.graft) else {
                continue;
            };
            let violations = client_session.quality.violations(
                &client_session.want.qos,
                offer,
                &path,
                peer.datagram_bytes,
            );
            let told = client_session.quality.due_violations(&violations, now);
            let better = match violations.is_empty() || !client_session.may_adapt() {
                true => None,
                false => better(&self.offers, client_session, &path, peer.cipher.is_some()),
            };
            let client = client_session.client;
            let graft = client_session.graft.clone();
            for violation in told {
                info!(graft, ?violation, "a session does not meet the requirements of its application");
                client
                    .into_iter()
                    .for_each(|client| self.tell(client, &BrokerReply::Violated(violation.clone())));
            }
            if let Some(graft) = better {
                self.change(runtime, session_id, graft, ChangeOrigin::Adaption);
            }
        }
    }
}

/// Returns another graft that would meet the session's requirements.
fn better(
    offers: &[Offer],
    client_session: &ClientSession,
    path: &PeerPathFigures,
    is_sealed: bool,
) -> Option<String> {
    let is_another = |offer: &&Offer| {
        offer.graft != client_session.graft
            && (client_session.in_order || !waits(&client_session.want, offer))
    };
    let others: Vec<_> = offers.iter().filter(is_another).cloned().collect();
    choose(&others, &client_session.want, path, is_sealed).ok().map(|offer| offer.graft.clone())
}
