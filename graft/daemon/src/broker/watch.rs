//! Looks each second whether sessions keep to what was asked for, says where they do not, and changes their grafts where it may.

use std::time::Instant;

use millrace_graft::{
    message::{By, Qos, wire::Word},
    packet::{
        Runtime,
        choose::{Offer, Path, choose},
    },
};
use tracing::info;

use super::{
    Broker,
    lease::{Lease, Stage, waits},
};

impl Broker {
    pub(super) fn look_at_quality(&mut self, runtime: &mut Runtime) {
        let now = Instant::now();
        let lives: Vec<_> = self.leases.keys().copied().collect();
        for life in lives {
            let has_wishes =
                |lease: &&mut Lease| lease.stage == Stage::Open && lease.want.qos != Qos::default();
            let Some(lease) = self.leases.get_mut(&life).filter(has_wishes) else { continue };
            let Ok(Some(traffic)) = runtime.traffic(&lease.ends) else { continue };
            lease.quality.look(&traffic);
            let (Some(far), Some(peer)) = (self.fars.get(lease.peer), self.peers.get(lease.peer)) else {
                continue;
            };
            let measured = far.path();
            let path = Path {
                round_trip: far.round_trip_now(),
                loss: measured.loss.into_iter().chain(lease.quality.loss()).reduce(f64::max),
            };
            let Some(offer) = self.offers.iter().find(|offer| offer.graft == lease.graft) else { continue };
            let violations = lease.quality.violations(&lease.want.qos, offer, &path, peer.datagram_bytes);
            let told = lease.quality.due(&violations, now);
            let better = match violations.is_empty() || !lease.may_adapt() {
                true => None,
                false => better(&self.offers, lease, &path, peer.cipher.is_some()),
            };
            let (desk, graft) = (lease.desk, lease.graft.clone());
            for violation in told {
                info!(graft, ?violation, "a session does not keep to what was asked for");
                desk.into_iter().for_each(|desk| self.tell(desk, &Word::Violated(violation.clone())));
            }
            if let Some(graft) = better {
                self.change(runtime, life, graft, By::Adaption);
            }
        }
    }
}

/// Another graft that keeps to it.
fn better(offers: &[Offer], lease: &Lease, path: &Path, is_sealed: bool) -> Option<String> {
    let is_another =
        |offer: &&Offer| offer.graft != lease.graft && (lease.in_order || !waits(&lease.want, offer));
    let others: Vec<_> = offers.iter().filter(is_another).cloned().collect();
    choose(&others, &lease.want, path, is_sealed).ok().map(|offer| offer.graft.clone())
}
