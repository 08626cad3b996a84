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
    lease::{Lease, LeaseStage, waits},
};

impl SessionBroker {
    pub(super) fn look_at_quality(&mut self, runtime: &mut PacketRuntime) {
        let now = Instant::now();
        let lives: Vec<_> = self.leases.keys().copied().collect();
        for life in lives {
            let has_wishes =
                |lease: &&mut Lease| lease.stage == LeaseStage::Open && lease.want.qos != Qos::default();
            let Some(lease) = self.leases.get_mut(&life).filter(has_wishes) else { continue };
            let Ok(Some(traffic)) = runtime.traffic(&lease.ends) else { continue };
            lease.quality.look(&traffic);
            let (Some(far), Some(peer)) = (self.links.fars.get(lease.peer), self.peers.get(lease.peer))
            else {
                continue;
            };
            let measured = far.path();
            // Queues delay datagrams, too, so the present round trip counts. The larger one of two measured losses
            // counts.
            let path = PeerPathFigures {
                round_trip: far.round_trip_now(),
                loss: measured.loss.into_iter().chain(lease.quality.loss()).reduce(f64::max),
            };
            let Some(offer) = self.offers.iter().find(|offer| offer.graft == lease.graft) else { continue };
            let violations = lease.quality.violations(&lease.want.qos, offer, &path, peer.datagram_bytes);
            let told = lease.quality.due_violations(&violations, now);
            let better = match violations.is_empty() || !lease.may_adapt() {
                true => None,
                false => better(&self.offers, lease, &path, peer.cipher.is_some()),
            };
            let desk = lease.desk;
            let graft = lease.graft.clone();
            for violation in told {
                info!(graft, ?violation, "a session does not meet the requirements of its application");
                desk.into_iter().for_each(|desk| self.tell(desk, &BrokerReply::Violated(violation.clone())));
            }
            if let Some(graft) = better {
                self.change(runtime, life, graft, ChangeOrigin::Adaption);
            }
        }
    }
}

/// Returns another graft that would meet the session's requirements.
fn better(offers: &[Offer], lease: &Lease, path: &PeerPathFigures, is_sealed: bool) -> Option<String> {
    let is_another =
        |offer: &&Offer| offer.graft != lease.graft && (lease.in_order || !waits(&lease.want, offer));
    let others: Vec<_> = offers.iter().filter(is_another).cloned().collect();
    choose(&others, &lease.want, path, is_sealed).ok().map(|offer| offer.graft.clone())
}
