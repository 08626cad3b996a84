//! Streams and datagrams of a publisher's track that a kernel offload may forward before userspace has read them.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;

use crate::offload::{OffloadIngress, OffloadOpenings, OffloadResult};

/// The two parts of a track that may be offered to a kernel offload: the track's datagrams, and its new streams from
/// their first byte on. At first both offers are withheld.
///
/// An offer is *withheld* (the offload must not forward), *unknown* (nothing was set up) or *known* (the offload's
/// ingress or openings exist). An ingress is the offload's handle of an incoming stream, or of a track's incoming
/// datagrams. Openings are ingresses prepared for streams that have not begun. [`Self::allow`] makes an offer unknown.
/// The first call of [`Self::datagrams`] or [`Self::openings`] that gets a permit makes it known. When the offload is
/// released, the offer is unknown again. [`Self::withhold`] withholds both offers in any state. It closes the openings,
/// so that no further stream is assigned to one. Openings with an assigned stream are kept until that stream is read.
pub struct Offers {
    datagrams: Mutex<Offered<dyn OffloadIngress>>,
    openings: Mutex<Offered<dyn OffloadOpenings>>,
    /// [`OffloadOpenings`] that get no further streams, but still forward streams that this process has not accepted
    /// yet.
    closed: Mutex<Vec<Arc<dyn OffloadOpenings>>>,
}

impl Default for Offers {
    fn default() -> Self {
        let datagrams = Mutex::new(Offered::Withheld);
        let openings = Mutex::new(Offered::Withheld);
        Self { datagrams, openings, closed: Mutex::default() }
    }
}

impl Offers {
    /// Returns the kernel offload's handle (ingress) of the track's incoming datagrams, which `make` creates when
    /// needed. Returns `None` while datagrams are withheld.
    pub fn datagrams(
        &self,
        places: PlaceProvider<'_>,
        make: impl FnOnce() -> Option<Arc<dyn OffloadIngress>>,
    ) -> Option<Arc<dyn OffloadIngress>> {
        self.datagrams.lock().get(places, make)
    }

    /// Returns the kernel offload's handle (ingress) of the track's incoming datagrams, if it exists.
    pub fn known_datagrams(&self) -> Option<Arc<dyn OffloadIngress>> {
        self.datagrams.lock().known()
    }

    /// Returns the track's openings (the kernel offload's handles prepared for streams that have not begun), which
    /// `make` creates when needed. Returns `None` while new streams are withheld.
    pub fn openings(
        &self,
        places: PlaceProvider<'_>,
        make: impl FnOnce() -> Option<Arc<dyn OffloadOpenings>>,
    ) -> Option<Arc<dyn OffloadOpenings>> {
        self.openings.lock().get(places, make)
    }

    /// Returns the track's openings (the kernel offload's handles prepared for streams that have not begun), if they
    /// exist.
    pub fn known_openings(&self) -> Option<Arc<dyn OffloadOpenings>> {
        self.openings.lock().known()
    }

    /// Lets the kernel offload forward the track's datagrams, and its new streams from their first byte on.
    pub fn allow(&self) {
        self.datagrams.lock().allow();
        self.openings.lock().allow();
    }

    /// Withholds datagrams and new streams from the kernel offload. Streams that the offload forwards already stay
    /// forwarded. Returns group and ID of the last subgroup that the offload forwards, or that userspace has claimed to
    /// send itself.
    pub fn withhold(&self) -> Option<(u64, u64)> {
        let withheld = self.datagrams.lock().withhold();
        drop(withheld);
        let openings = self.openings.lock().withhold()?;
        let last = openings.close();
        let mut closed = self.closed.lock();
        closed.retain(|openings| openings.has_bound());
        closed.push(openings);
        Some(last)
    }

    /// Returns whether the kernel offload forwards a new stream that this process has not accepted yet.
    pub fn has_bound(&self) -> bool {
        self.known_openings().is_some_and(|openings| openings.has_bound())
            || self.closed.lock().iter().any(|openings| openings.has_bound())
    }
}

/// Whether the kernel offload may forward a track's datagrams, or its new streams, and the handle by which it does so.
enum Offered<T: ?Sized> {
    /// The kernel offload's handle of these datagrams or streams was not requested yet, or the offload could not create
    /// it.
    Unknown,
    Known {
        known: Arc<T>,
        /// The permit to offload one of the session's tracks.
        _place: OwnedSemaphorePermit,
    },
    /// The kernel offload may not forward these datagrams or streams.
    Withheld,
}

/// A function that returns a permit to offload one more track of the session, or `None` if the session has reached its
/// limit of offloaded tracks.
pub type PlaceProvider<'a> = &'a dyn Fn() -> Option<OwnedSemaphorePermit>;

impl<T: OffloadResult + ?Sized> Offered<T> {
    /// Returns the kernel offload's handle of these datagrams or streams, which `make` creates when needed. Returns
    /// `None` while they are withheld from the offload, or if the session has reached its limit of offloaded tracks
    /// (`places`).
    fn get(&mut self, places: PlaceProvider<'_>, make: impl FnOnce() -> Option<Arc<T>>) -> Option<Arc<T>> {
        if matches!(self, Self::Known { known, .. } if known.is_over()) {
            *self = Self::Unknown;
        }
        if let Self::Unknown = self {
            let _place = places()?;
            *self = Self::Known { known: make()?, _place };
        }
        self.known()
    }

    fn known(&self) -> Option<Arc<T>> {
        match self {
            Self::Known { known, .. } => Some(Arc::clone(known)),
            Self::Unknown | Self::Withheld => None,
        }
    }

    fn allow(&mut self) {
        if matches!(self, Self::Withheld) {
            *self = Self::Unknown;
        }
    }

    fn withhold(&mut self) -> Option<Arc<T>> {
        match std::mem::replace(self, Self::Withheld) {
            Self::Known { known, .. } => Some(known),
            Self::Unknown | Self::Withheld => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::*;

    /// A fake [`OffloadIngress`]. The flag tells whether its offload was released.
    struct FakeIngress(AtomicBool);

    impl OffloadResult for FakeIngress {
        fn is_over(&self) -> bool {
            self.0.load(Relaxed)
        }
    }

    #[test]
    fn track_offer_of_a_released_offload_is_replaced() {
        let places = Arc::new(tokio::sync::Semaphore::new(1));
        let place = || Arc::clone(&places).try_acquire_owned().ok();
        let make = || Some(Arc::new(FakeIngress(AtomicBool::new(false))));
        let mut offered = Offered::Unknown;
        let first = offered.get(&place, make).expect("there is a place");
        assert!(Arc::ptr_eq(&first, &offered.get(&place, make).expect("it is known")));
        first.0.store(true, Relaxed);
        let second = offered.get(&place, make).expect("its place is free again");
        assert!(!Arc::ptr_eq(&first, &second));
    }

    #[test]
    fn track_over_the_limit_of_offloaded_tracks_is_not_offloaded() {
        let offers = Offers::default();
        offers.allow();
        assert!(offers.openings(&|| None, || panic!("there is no place")).is_none());
        assert!(offers.datagrams(&|| None, || panic!("there is no place")).is_none());
    }
}
