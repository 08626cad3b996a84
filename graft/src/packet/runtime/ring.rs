//! Rings for applications that have a session.

use millrace_graft_kernel::joint::{Ends, Lent};

use super::Runtime;
use crate::Error;

impl Runtime {
    /// Has what comes for a session go to a ring, past its socket; `None`: it has had one before, and that one is used. Where its graft
    /// changes the ring stops, or goes on, by itself.
    ///
    /// # Errors
    /// Why it comes by the socket, in words.
    pub fn lend_ring(&mut self, ends: &Ends) -> Result<Option<Lent>, String> {
        let words = |error: millrace_graft_kernel::Error| error.to_string();
        if !self.joints.uses_ring(ends).map_err(words)? {
            let graft = self.live.get(ends).map_or("", |live| &live.graft.name);
            return Err(format!("graft {graft} has functions that run behind XDP"));
        }
        if self.joints.has_ring(ends).map_err(words)? {
            return Ok(None);
        }
        let place = self.joints.came_by(ends).map_err(words)?;
        let is_its = |index: i32| place.is_some_and(|(ifindex, _)| index.cast_unsigned() == ifindex);
        let name = self.places.iter().find(|place| is_its(place.index)).map(|place| place.name.clone());
        self.joints.lend_ring(ends).map(Some).map_err(|error| match name {
            Some(name) => format!("{name}: {error}"),
            None => error.to_string(),
        })
    }

    /// What comes from now on comes by the socket.
    pub fn end_ring(&mut self, ends: &Ends) -> Result<(), Error> {
        Ok(self.joints.end_ring(ends)?)
    }
}
