//! Limits the number of streams delegated to the kernel offload. All connections of one client, and all of one network,
//! share a limit.

use std::sync::Arc;

use super::{Declined, Delegation, OffloadIngress, OpeningSide};
use crate::windows::WindowShare;

/// The limits on one connection's delegated streams, which it shares with other connections.
#[derive(Default)]
pub(in crate::offload) struct OffloadPlaces {
    /// The client's limit on delegated streams, and the limit of its network. A delegation counts against the network's
    /// limit only when the client's limit is reached.
    shares: Option<[Arc<WindowShare>; 2]>,
    /// Number of streams that were not delegated to the offload because both limits were reached.
    pub declined: u64,
}

impl OffloadPlaces {
    /// Sets the limits against which newly delegated streams count.
    pub fn set_shares(&mut self, shares: [Arc<WindowShare>; 2]) {
        self.shares = Some(shares);
    }

    /// Calls `make`, which creates a delegation, and counts the delegation against a limit until it is dropped.
    ///
    /// # Errors
    /// Fails if both limits are reached, or if `make` fails.
    pub fn within(
        &mut self,
        make: impl FnOnce() -> Result<Box<dyn Delegation>, Declined>,
    ) -> Result<Box<dyn Delegation>, Declined> {
        let Some(shares) = &self.shares else { return make() };
        let Some(place) = shares.iter().find_map(OffloadPlace::take) else {
            self.declined += 1;
            return Err(Declined("the client's share of the offload's streams is used up".to_owned()));
        };
        Ok(Box::new(PlacedDelegation { delegation: make()?, _place: place }))
    }
}

/// One delegated stream that counts against a limit. Dropping this value ends the count.
struct OffloadPlace(Arc<WindowShare>);

impl OffloadPlace {
    fn take(share: &Arc<WindowShare>) -> Option<Self> {
        share.take(1).then(|| Self(Arc::clone(share)))
    }
}

impl Drop for OffloadPlace {
    fn drop(&mut self) {
        self.0.give(1);
    }
}

/// A [`Delegation`] (the forwarding of one stream) that counts against a limit until it is dropped.
struct PlacedDelegation {
    // Fields are dropped in this order, so the delegation ends before its unit of the limit is released.
    delegation: Box<dyn Delegation>,
    _place: OffloadPlace,
}

impl Delegation for PlacedDelegation {
    fn set_max_offset(&self, max: u64) {
        self.delegation.set_max_offset(max);
    }

    fn is_of(&self, ingress: &Arc<dyn OffloadIngress>) -> bool {
        self.delegation.is_of(ingress)
    }

    fn close(&self) -> OpeningSide {
        self.delegation.close()
    }

    fn on_opened(&self) {
        self.delegation.on_opened();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct NoDelegation;

    impl Delegation for NoDelegation {
        fn set_max_offset(&self, _max: u64) {}

        fn is_of(&self, _ingress: &Arc<dyn OffloadIngress>) -> bool {
            true
        }

        fn close(&self) -> OpeningSide {
            OpeningSide::Userspace
        }

        fn on_opened(&self) {}
    }

    /// All sessions of a client share the client's limit of delegated streams, and all clients of a network share the
    /// network's limit.
    #[test]
    fn sessions_of_a_client_share_its_limit_of_offloaded_streams() {
        let network = Arc::new(WindowShare::new(5, None));
        let share = |within: &Arc<WindowShare>| Arc::new(WindowShare::new(4, Some(Arc::clone(within))));
        let client = share(&network);
        let neighbour = share(&network);
        let common = Arc::new(WindowShare::new(3, None));
        let mut sessions = [(); 3].map(|()| OffloadPlaces::default());
        for (places, own) in sessions.iter_mut().zip([&client, &client, &neighbour]) {
            places.set_shares([Arc::clone(own), Arc::clone(&common)]);
        }
        let mut take = |at: usize| sessions[at].within(|| Ok(Box::new(NoDelegation))).ok();
        let mut held: Vec<_> = (0..10).filter_map(|at| take(at % 2)).collect();
        assert_eq!(held.len(), 7, "the client gets its own four places, and the three common ones");
        let mut others: Vec<_> = (0..3).filter_map(|_| take(2)).collect();
        assert_eq!(others.len(), 1, "the network has one place left");
        assert_eq!(sessions.each_ref().map(|places| places.declined).iter().sum::<u64>(), 3 + 2);
        // A delegation that failed does not count against any limit.
        held.truncate(3);
        let declined = sessions[0].within(|| Err(Declined("full".to_owned())));
        assert_eq!(declined.err().map(|declined| declined.0).as_deref(), Some("full"));
        assert_eq!((client.held(), network.held()), (3, 4));
        others.extend(sessions[2].within(|| Ok(Box::new(NoDelegation))));
        drop((held, others));
        assert_eq!((client.held(), network.held()), (0, 0));
        // A connection whose client is not known yet has no limit on delegated streams.
        assert!((0..100).all(|_| OffloadPlaces::default().within(|| Ok(Box::new(NoDelegation))).is_ok()));
    }
}
