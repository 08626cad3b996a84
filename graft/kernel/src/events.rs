//! Events that BPF programs write to a ring buffer, for userspace to read.

#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use libbpf_rs::{MapHandle, RingBuffer, RingBufferBuilder};
use millrace_kernel::Error;
use millrace_kernel::object::LoadedObject;

/// A BPF ring buffer whose records are parsed to events of type `T`, in the order of the records.
pub struct Events<T> {
    name: &'static str,
    ring: RingBuffer<'static>,
    come: Arc<Mutex<Vec<T>>>,
    _map: MapHandle,
}

impl<T: Send + 'static> Events<T> {
    /// Opens the ring buffer map `name` of an object. Records for which `parse` returns `None` are skipped.
    pub(super) fn open_ring(
        object: &mut LoadedObject,
        name: &'static str,
        parse: fn(&[u8]) -> Option<T>,
    ) -> Result<Self, Error> {
        let map = object.handle(name)?;
        let come = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&come);
        let error = |source| Error::Read { what: name, source };
        let mut builder = RingBufferBuilder::new();
        // libbpf calls this closure on the thread that calls take(), so the lock is never contended.
        let take = move |bytes: &[u8]| {
            to.lock().unwrap_or_else(PoisonError::into_inner).extend(parse(bytes));
            0
        };
        builder.add(&map, take).map_err(error)?;
        let ring = builder.build().map_err(error)?;
        Ok(Self { name, ring, come, _map: map })
    }

    /// Returns all events that arrived since the last call.
    pub fn take(&self) -> Result<Vec<T>, super::Error> {
        self.ring.consume().map_err(|source| Error::Read { what: self.name, source })?;
        Ok(std::mem::take(&mut *self.come.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Returns a descriptor that poll() reports as readable when events are waiting.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns the descriptor, and outlives the borrow that is returned.
        unsafe { BorrowedFd::borrow_raw(self.ring.epoll_fd()) }
    }
}
