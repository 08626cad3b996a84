//! Privileges of a process that handles what strangers send: it keeps no capability that it can do without, and the
//! kernel refuses system calls that it never makes.

use std::collections::BTreeMap;

use rustix::{
    io::{Errno, Result},
    thread::{
        CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
    },
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule, apply_filter};

/// Drops all capabilities except `kept` from the calling thread, and from all threads and processes that it starts from
/// now on. They can never get a dropped capability back, not even by starting a program. Call this before any other
/// thread is started.
///
/// # Errors
/// The kernel refuses a step.
pub fn keep_capabilities(kept: CapabilitySet) -> Result<()> {
    // If this process was not started as root, it may lack some of the capabilities.
    let kept = kept & capabilities(None)?.permitted;
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
    let inheritable = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable })
}

/// System calls that the kernel refuses with EPERM: they start programs, read other processes or change the system.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_open_tree,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_userfaultfd,
    libc::SYS_open_by_handle_at,
    libc::SYS_setuid,
    libc::SYS_setresuid,
    libc::SYS_swapon,
    libc::SYS_swapoff,
];

/// Makes the kernel refuse system calls of the calling thread, and of all threads that it starts from now on: those
/// that start programs, read other processes or change the system, and `more`, which has the conditions on the
/// arguments of each call. A call without conditions is always refused. `no_new_privs` has to be set, as
/// [`keep_capabilities`] does.
///
/// # Errors
/// The kernel refuses the filter.
pub fn refuse_calls(more: BTreeMap<libc::c_long, Vec<SeccompRule>>) -> anyhow::Result<()> {
    let rules = REFUSED.iter().map(|call| (*call, Vec::new())).chain(more).collect();
    let refused = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let machine = std::env::consts::ARCH.try_into()?;
    let filter: BpfProgram = SeccompFilter::new(rules, SeccompAction::Allow, refused, machine)?.try_into()?;
    Ok(apply_filter(&filter)?)
}
