//! Address pairs of sessions that drop packets without a frame. Fragments between such addresses are dropped, since
//! they may belong to the session.

use libbpf_rs::{MapCore, MapHandle};
use millrace_kernel::intf::Plain;
use millrace_kernel::object::write;

use super::super::Error;
use super::{SessionEnds, intf, key};

/// The kernel's map of address pairs. The value is the index of a session with that pair, in whose statistics dropped
/// fragments are counted.
pub(super) struct AddressPairs(pub MapHandle);

impl AddressPairs {
    pub fn begin(&self, ends: &SessionEnds, session: u32) -> Result<(), Error> {
        Ok(write(&self.0, "sealed_pairs", pair(ends)?.as_bytes(), &session.to_ne_bytes())?)
    }

    /// Removes the address pair of a closed session, unless one of the remaining sessions in `others` has the same
    /// pair.
    pub fn end<'a>(
        &self,
        ends: &SessionEnds,
        mut others: impl Iterator<Item = (&'a SessionEnds, u32)>,
    ) -> Result<(), Error> {
        let gone = pair(ends)?;
        match others.find(|(other, _)| pair(other).is_ok_and(|other| other == gone)) {
            Some((other, session)) => self.begin(other, session),
            None => {
                // Deleting fails if the session never had an entry, which is no error here.
                let _ = self.0.delete(gone.as_bytes());
                Ok(())
            }
        }
    }
}

fn pair(ends: &SessionEnds) -> Result<intf::Pair, Error> {
    let intf::Key { local, remote, .. } = key(ends)?;
    Ok(intf::Pair { local, remote })
}
