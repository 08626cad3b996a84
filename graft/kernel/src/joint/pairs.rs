//! Addresses between which there are sessions of which nothing passes as an application has sent it: in fragments nothing does at all.

use libbpf_rs::{MapCore, MapHandle};
use millrace_kernel::intf::Plain;
use millrace_kernel::object::write;

use super::super::Error;
use super::{Ends, intf, key};

/// In the kernel, each with one of its sessions, by which packets are counted.
pub(super) struct Pairs(pub MapHandle);

impl Pairs {
    pub fn begin(&self, ends: &Ends, session: u32) -> Result<(), Error> {
        Ok(write(&self.0, "strict_pairs", pair(ends)?.as_bytes(), &session.to_ne_bytes())?)
    }

    /// Of a session that is no more; `others` are those that are left.
    pub fn end<'a>(
        &self,
        ends: &Ends,
        mut others: impl Iterator<Item = (&'a Ends, u32)>,
    ) -> Result<(), Error> {
        let gone = pair(ends)?;
        match others.find(|(other, _)| pair(other).is_ok_and(|other| other == gone)) {
            Some((other, session)) => self.begin(other, session),
            None => {
                // There may be none.
                let _ = self.0.delete(gone.as_bytes());
                Ok(())
            }
        }
    }
}

fn pair(ends: &Ends) -> Result<intf::Pair, Error> {
    let intf::Key { local, remote, .. } = key(ends)?;
    Ok(intf::Pair { local, remote })
}
