//! Privileges of the worker processes that parse what peers send.

use std::collections::BTreeMap;

use millrace_daemon::rights::{keep_capabilities, refuse_calls};
use rustix::thread::CapabilitySet;
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

/// Flags of `openat` and `open` that change or create a file.
const WRITES: [i32; 4] = [libc::O_WRONLY, libc::O_RDWR, libc::O_CREAT, libc::O_TRUNC];

/// System calls that these processes never make, in addition to those that no confined process makes. A process of root
/// without any capability could otherwise write to files of root, and connect to sockets of root's daemons.
const REFUSED: &[libc::c_long] = {
    use libc::*;
    &[
        SYS_perf_event_open,
        SYS_io_uring_setup,
        SYS_openat2,
        SYS_kill,
        SYS_tkill,
        SYS_rt_sigqueueinfo,
        SYS_rt_tgsigqueueinfo,
        SYS_pidfd_send_signal,
        SYS_truncate,
        SYS_renameat2,
        SYS_unlinkat,
        SYS_linkat,
        SYS_symlinkat,
        SYS_mkdirat,
        SYS_mknodat,
        SYS_fchmod,
        SYS_fchmodat,
        SYS_fchown,
        SYS_fchownat,
        SYS_setxattr,
    ]
};

/// Older names of some of these calls, which only some machines have.
#[cfg(target_arch = "x86_64")]
const REFUSED_OLD: &[libc::c_long] = {
    use libc::*;
    &[
        SYS_creat,
        SYS_rename,
        SYS_renameat,
        SYS_unlink,
        SYS_link,
        SYS_symlink,
        SYS_mkdir,
        SYS_rmdir,
        SYS_mknod,
        SYS_chmod,
        SYS_chown,
        SYS_lchown,
    ]
};
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_OLD: &[libc::c_long] = &[];

/// Commands of the system call `bpf`: `enum bpf_cmd` in linux/bpf.h. These make programs, maps and links of their own, or
/// open those of others. All other commands need a descriptor.
const BPF_MAKES: [u64; 17] = [
    0,  // BPF_MAP_CREATE
    5,  // BPF_PROG_LOAD
    6,  // BPF_OBJ_PIN
    7,  // BPF_OBJ_GET
    11, // BPF_PROG_GET_NEXT_ID
    12, // BPF_MAP_GET_NEXT_ID
    13, // BPF_PROG_GET_FD_BY_ID
    14, // BPF_MAP_GET_FD_BY_ID
    17, // BPF_RAW_TRACEPOINT_OPEN
    18, // BPF_BTF_LOAD
    19, // BPF_BTF_GET_FD_BY_ID
    20, // BPF_TASK_FD_QUERY
    23, // BPF_BTF_GET_NEXT_ID
    30, // BPF_LINK_GET_FD_BY_ID
    31, // BPF_LINK_GET_NEXT_ID
    33, // BPF_ITER_CREATE
    36, // BPF_TOKEN_CREATE
];

/// The use of the system call `bpf` that is left to a confined process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BpfUse {
    /// The process may not call `bpf`.
    None,
    /// The process uses the maps and programs whose descriptors it has, and can neither make nor find others.
    OfDescriptors,
}

/// Drops all capabilities but `kept`, for good. From then on this process cannot start programs, change files, send
/// signals or open Unix sockets. Must be called before any other thread is started.
///
/// # Errors
/// The kernel refuses a step.
pub fn confine(kept: CapabilitySet, bpf: BpfUse) -> anyhow::Result<()> {
    keep_capabilities(kept)?;
    let value = |number: i32| u64::from(number.unsigned_abs());
    let has = |place, flag| {
        SeccompCondition::new(place, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(flag), flag)
    };
    let first = |value| SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value);
    let writes = |place: u8| -> anyhow::Result<Vec<_>> {
        WRITES.into_iter().map(|flag| Ok(SeccompRule::new(vec![has(place, value(flag))?])?)).collect()
    };
    let makes = BPF_MAKES.map(|command| SeccompRule::new(vec![first(command)?]));
    let mut calls: BTreeMap<_, _> =
        REFUSED.iter().chain(REFUSED_OLD).map(|call| (*call, Vec::new())).collect();
    calls.insert(libc::SYS_openat, writes(2)?);
    // Not only old programs make this call: rustix reads `/proc/self/auxv` by it, on kernels before 6.4.
    #[cfg(target_arch = "x86_64")]
    calls.insert(libc::SYS_open, writes(1)?);
    calls.insert(libc::SYS_socket, vec![SeccompRule::new(vec![first(value(libc::AF_UNIX))?])?]);
    calls.insert(
        libc::SYS_bpf,
        match bpf {
            BpfUse::None => Vec::new(),
            BpfUse::OfDescriptors => makes.into_iter().collect::<Result<_, _>>()?,
        },
    );
    refuse_calls(calls)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File, io::ErrorKind::PermissionDenied, net::TcpListener, os::unix::net::UnixStream,
        process::Command,
    };

    use super::*;

    #[test]
    fn confined_thread_reads_files_and_listens_but_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        File::create(&file).unwrap();
        let socket = directory.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        // The filter and the capabilities are those of one thread, so other tests are not affected.
        let confined = std::thread::spawn(move || {
            confine(CapabilitySet::NET_RAW, BpfUse::None).unwrap();
            assert!(File::open(&file).is_ok() && TcpListener::bind("127.0.0.1:0").is_ok());
            // These make the system call `open` where the machine has it.
            let open = |flags| rustix::fs::open(&file, flags, rustix::fs::Mode::empty()).map(drop);
            assert_eq!(open(rustix::fs::OFlags::RDONLY), Ok(()));
            assert_eq!(open(rustix::fs::OFlags::RDWR), Err(rustix::io::Errno::PERM));
            let kind = |refused: std::io::Result<()>| refused.unwrap_err().kind();
            assert_eq!(kind(File::create(&file).map(drop)), PermissionDenied);
            assert_eq!(kind(File::options().append(true).open(&file).map(drop)), PermissionDenied);
            assert_eq!(kind(std::fs::remove_file(&file)), PermissionDenied);
            assert_eq!(kind(UnixStream::connect(&socket).map(drop)), PermissionDenied);
            assert_eq!(kind(Command::new("true").status().map(drop)), PermissionDenied);
            let signal = nix::sys::signal::kill(nix::unistd::Pid::this(), None);
            assert_eq!(signal, Err(nix::errno::Errno::EPERM));
        });
        confined.join().unwrap();
    }
}
