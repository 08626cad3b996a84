//! What programs tell, or ask a broker, by a ring buffer.

#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use libbpf_rs::{MapHandle, RingBuffer, RingBufferBuilder};
use millrace_kernel::Error;
use millrace_kernel::object::Loaded;

/// As they come.
pub struct Events<T> {
    name: &'static str,
    ring: RingBuffer<'static>,
    come: Arc<Mutex<Vec<T>>>,
    _map: MapHandle,
}

impl<T: Send + 'static> Events<T> {
    /// Of the object's map of this name. What `parse` does not know is left out.
    pub(super) fn of(
        object: &mut Loaded,
        name: &'static str,
        parse: fn(&[u8]) -> Option<T>,
    ) -> Result<Self, Error> {
        let map = object.handle(name)?;
        let come = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&come);
        let error = |source| Error::Read { what: name, source };
        let mut builder = RingBufferBuilder::new();
        let take = move |bytes: &[u8]| {
            to.lock().unwrap_or_else(PoisonError::into_inner).extend(parse(bytes));
            0
        };
        builder.add(&map, take).map_err(error)?;
        let ring = builder.build().map_err(error)?;
        Ok(Self { name, ring, come, _map: map })
    }

    /// All that have come since.
    pub fn take(&self) -> Result<Vec<T>, super::Error> {
        self.ring.consume().map_err(|source| Error::Read { what: self.name, source })?;
        Ok(std::mem::take(&mut *self.come.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Readable when there are some.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns the descriptor, and lives as long as what is returned.
        unsafe { BorrowedFd::borrow_raw(self.ring.epoll_fd()) }
    }
}
