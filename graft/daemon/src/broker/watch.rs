//! Checks each second whether sessions meet the requirements of their applications, reports violations, and changes
//! grafts where the settings allow it.

use std::time::Instant;

use millrace_graft::packet::{
    PacketRuntime,
    choose::{Offer, PeerPathFigures, choose},
};
use millrace_messages::{ChangeOrigin, Qos, wire::BrokerReply};
use tracing::info;

use super::{
    SessionBroker,
    client_session::{ClientSession, SessionStage, waits},
};

impl SessionBroker {
    pub(super) fn look_at_quality(&mut self, runtime: &mut PacketRuntime) {
        let now = Instant::now();
        let session_ids: Vec<_> = self.sessions.keys().copied().collect();
        for id in session_ids {
            let has_wishes = |session: &&mut ClientSession| {
                session.stage == SessionStage::Open && session.want.qos != Qos::default()
            };
            let Some(session) = self.sessions.get_mut(&id).filter(has_wishes) else {
                continue;
            };
            let Ok(Some(traffic)) = runtime.traffic(&session.ends) else { continue };
            session.quality.look(&traffic);
            let Some(peer) = self.peers.get(session.peer) else { continue };
            let measured = self.links.path(session.peer);
            // The expected delay includes queueing, so the present round-trip time is used and not the smallest one.
            // The loss is the larger of two rates: of pings, and of the session's datagrams.
            let path = PeerPathFigures {
                round_trip: self.links.round_trip_now(session.peer),
                loss: measured.loss.into_iter().chain(session.quality.loss()).reduce(f64::max),
            };
            let Some(offer) = self.offers.iter().find(|offer| offer.graft == session.graft) else {
                continue;
            };
            let violations = session.quality.violations(&session.want.qos, offer, &path, peer.datagram_bytes);
            let told = session.quality.due_violations(&violations, now);
            let better = match violations.is_empty() || !session.may_adapt() {
                true => None,
                false => better(&self.offers, session, &path, peer.cipher.is_some()),
            };
            let client = session.client;
            let graft = session.graft.clone();
            for violation in told {
                info!(graft, ?violation, "a session does not meet the requirements of its application");
                client
                    .into_iter()
                    .for_each(|client| self.tell(client, &BrokerReply::Violated(violation.clone())));
            }
            if let Some(graft) = better {
                self.change(runtime, id, graft, ChangeOrigin::Adaption);
            }
        }
    }
}

/// Returns the name of another graft with which the session would meet its application's requirements.
fn better(
    offers: &[Offer],
    session: &ClientSession,
    path: &PeerPathFigures,
    is_sealed: bool,
) -> Option<String> {
    let is_another =
        |offer: &&Offer| offer.graft != session.graft && (session.in_order || !waits(&session.want, offer));
    let others: Vec<_> = offers.iter().filter(is_another).cloned().collect();
    choose(&others, &session.want, path, is_sealed).ok().map(|offer| offer.graft.clone())
}
