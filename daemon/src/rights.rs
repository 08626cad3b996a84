//! Capabilities of a part of a daemon. A part that parses what strangers send keeps none that it can do without.

use rustix::{
    io::{Errno, Result},
    thread::{
        CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
    },
};

/// Drops all capabilities except `kept` from the calling thread, and from all threads and processes that it starts from
/// now on. They can never get a dropped capability back, not even by starting a program. Call this before any other
/// thread is started.
///
/// # Errors
/// The kernel refuses a step.
pub fn keep_capabilities(kept: CapabilitySet) -> Result<()> {
    set_no_new_privs(true)?;
    for capability in (CapabilitySet::all() - kept).iter() {
        match remove_capability_from_bounding_set(capability) {
            // The kernel does not know the capability, or this process may not change its bounding set. In that case
            // `no_new_privs` alone keeps programs from getting dropped capabilities.
            Ok(()) | Err(Errno::INVAL | Errno::PERM) => {}
            refused => return refused,
        }
    }
    clear_ambient_capability_set()?;
    let kept = kept & capabilities(None)?.permitted;
    set_capabilities(
        None,
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() },
    )
}
