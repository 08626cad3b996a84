//! Child processes for untrusted bytes: this binary again, with nothing but the descriptors that it is given.
//!
//! In such a process, C libraries parse what a peer or a stranger has sent. An attacker who takes it over has a socket
//! to the daemon, the descriptors that the daemon sent through it, and limited memory. There are no files, no network,
//! no other processes and no rights.
//!
//! | layer | content |
//! | --- | --- |
//! | descriptors | standard input, which is a socket to the daemon; all others are closed |
//! | system calls | an allow-list (seccomp): read, write, wait, and memory that is not executable; all others fail |
//! | rights | a user of its own if the daemon may change users, no capabilities, and none to gain (`no_new_privs`) |
//! | namespaces | if the daemon may create them: a network without interfaces, and an empty file system |
//! | limits | memory and descriptors; no processes, no files, no core dump |
//! | CPU time | an initial amount, and what the daemon grants for answers; a child that exceeds it is killed |
//! | life | the child dies with the daemon, and sees the end of its socket |
//!
//! The layers of rights and namespaces need CAP_SETUID, CAP_SETGID and CAP_SYS_ADMIN. If the daemon lacks one of them,
//! the child reports which layers are missing.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::ExitStatusExt as _,
    },
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use millrace_base::control::{ControlEnd, ControlReceived};
use nix::{
    mount::{MsFlags, mount},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, unshare},
    sys::resource::{Resource, setrlimit},
    time::{ClockId, clock_getcpuclockid, clock_gettime},
    unistd::{Gid, Uid, chdir, chroot, close, geteuid, getpid, setgroups, setresgid, setresuid},
};
use parking_lot::Mutex;
use rustix::{
    net::{SendFlags, send},
    process::{
        DumpableBehavior, Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal, set_dumpable_behavior,
        set_parent_process_death_signal,
    },
    thread::{CapabilitySet, CapabilitySets, remove_capability_from_bounding_set, set_capabilities},
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter_all_threads,
};
use serde::{Deserialize, Serialize};

/// Lowest user ID of the children. Each child adds its process ID, so that none can affect another. Systems assign no
/// user IDs this high.
const USERS_BASE: u32 = 0x6d00_0000;

/// CPU time that a child process may use before the daemon grants it more for the work that it has done. Loading
/// libraries takes less, and one answer of the child takes much less.
pub const CPU_IDLE: Duration = Duration::from_secs(10);

/// Shortest pause between two checks of a child's CPU time.
const LOOK: Duration = Duration::from_millis(100);

/// Resource limits of a child.
#[derive(Clone, Copy, Debug)]
pub struct ChildLimits {
    /// Memory beyond what the child has when it is confined, bytes.
    pub memory: u64,
    /// Number of file descriptors, including the three standard ones.
    pub descriptors: u64,
}

/// The first message that a child sends to the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "confined", rename_all = "snake_case")]
pub enum Hello {
    /// The child is confined, except that the layers of confinement in `without` are missing.
    Yes { without: Vec<String> },
    /// The child could not be confined, and has ended.
    No { why: String },
}

/// The daemon's handle of a child. Dropping it kills the child. The descriptor becomes readable when the child has
/// ended.
pub struct Confined {
    process: Arc<OwnedFd>,
    pid: u32,
    ended: Arc<OnceLock<String>>,
    cpu: Arc<CpuTime>,
}

/// CPU time of all threads of a child: its use, and its limit.
struct CpuTime {
    clock: ClockId,
    /// Most CPU time that the child may have left at any time. It starts with this much.
    idle: Duration,
    /// Total CPU time that the child may have used by now. It is killed if it has used more.
    granted: Mutex<Duration>,
}

impl Confined {
    /// Starts a child: this binary with `arguments` that make it call [`enter`] at once. The first record on the
    /// returned socket is a [`Hello`]. `cpu` is the CPU time that the child may use before it has earned more, such as
    /// [`CPU_IDLE`].
    pub fn start(
        arguments: impl IntoIterator<Item = impl Into<OsString>>,
        cpu: Duration,
    ) -> io::Result<(Self, ControlEnd)> {
        let (control, theirs) = ControlEnd::pair()?;
        let mut command = Command::new("/proc/self/exe");
        command.args(arguments.into_iter().map(Into::into)).env_clear().current_dir("/");
        // The child's output is discarded: nothing needs it, and it may contain a stranger's text.
        command.stdin(theirs.as_fd().try_clone_to_owned()?).stdout(Stdio::null()).stderr(Stdio::null());
        let ended = Arc::new(OnceLock::new());
        let (tell, told) = mpsc::sync_channel(1);
        // The kernel's parent-death signal is sent when the thread that started the child ends. So this thread waits
        // for the child.
        let last = Arc::clone(&ended);
        thread::Builder::new().name("confined".to_owned()).stack_size(128 << 10).spawn(move || {
            let (mut child, process, cpu) = match started(command, cpu) {
                Ok((child, process, cpu)) => (child, Arc::new(process), Arc::new(cpu)),
                Err(error) => return drop(tell.send(Err(error))),
            };
            let _ = tell.send(Ok((process.clone(), child.id(), cpu.clone())));
            cpu.watch(&process, &last);
            let how = child.wait().map_or_else(|error| error.to_string(), describe_exit);
            // An error is ignored: the reason for the child's end is already set if the child was killed for its use of
            // CPU time.
            let _ = last.set(how);
        })?;
        let (process, pid, cpu) = told.recv().map_err(io::Error::other)??;
        Ok((Self { process, pid, ended, cpu }, control))
    }

    /// Lets the child use more CPU time, in return for work that it has done.
    pub fn earn(&self, more: Duration) {
        self.cpu.grant(more);
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns how the child has ended. The result is available some moments after this handle's file descriptor has
    /// become readable.
    pub fn ended(&self) -> Option<&str> {
        self.ended.get().map(String::as_str)
    }
}

impl AsFd for Confined {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        // An error is ignored: the child may have ended already.
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
    }
}

impl CpuTime {
    fn new(child: &Child, idle: Duration) -> io::Result<Self> {
        let clock = clock_getcpuclockid(nix::unistd::Pid::from_raw(child.id().cast_signed()))?;
        Ok(Self { clock, idle, granted: Mutex::new(idle) })
    }

    /// Returns the CPU time that the child has used; `None` if the child has ended.
    fn used(&self) -> Option<Duration> {
        clock_gettime(self.clock).ok().map(Duration::from)
    }

    fn grant(&self, more: Duration) {
        if let Some(used) = self.used() {
            let mut granted = self.granted.lock();
            *granted = (*granted + more).min(used + self.idle);
        }
    }

    /// Blocks until the child has ended. A child that exceeds its CPU time is killed, and `why` is set to the reason.
    fn watch(&self, process: &OwnedFd, why: &OnceLock<String>) {
        loop {
            let left = self.used().map_or(LOOK, |used| self.granted.lock().saturating_sub(used));
            if left.is_zero() {
                // Set the reason before the child is killed, since other threads read the reason as soon as they notice
                // the child's end.
                let _ = why.set(format!(
                    "it was killed, since it used {:?} of CPU time without doing any work",
                    self.idle
                ));
                let _ = pidfd_send_signal(process, Signal::KILL);
                return;
            }
            // A child with one thread needs at least as long to use up its remaining CPU time.
            let timeout = PollTimeout::try_from(left.max(LOOK)).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], timeout) {
                Ok(0) | Err(nix::Error::EINTR) => {}
                Ok(_) | Err(_) => return,
            }
        }
    }
}

fn started(mut command: Command, idle: Duration) -> io::Result<(Child, OwnedFd, CpuTime)> {
    let mut child = command.spawn()?;
    // The process ID cannot be reused before the child has been waited for.
    let handles = || -> io::Result<_> {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(rustix::io::Errno::SRCH)?;
        Ok((pidfd_open(pid, PidfdFlags::empty())?, CpuTime::new(&child, idle)?))
    };
    match handles() {
        Ok((process, cpu)) => Ok((child, process, cpu)),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(error)
        }
    }
}

fn describe_exit(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(0), _) => "it has ended".to_owned(),
        (Some(code), _) => format!("it has ended with {code}"),
        (None, Some(signal)) => format!("signal {signal} has ended it"),
        (None, None) => status.to_string(),
    }
}

/// Returns the child's [`Hello`], its first record; `None` if it has not arrived yet.
///
/// # Errors
///
/// Returns an error if the child's first record is no [`Hello`], or if the child has ended.
pub fn hello(control: &ControlEnd) -> anyhow::Result<Option<Hello>> {
    match control.receive() {
        ControlReceived::Record(hello, _) => Ok(Some(hello)),
        ControlReceived::Nothing => Ok(None),
        ControlReceived::Malformed(why) => Err(anyhow!("the confined process sent no valid hello: {why}")),
        ControlReceived::End => Err(anyhow!("the confined process ended before it sent anything")),
    }
}

/// Confines this process, the child, which must have only one thread. `prepare` loads what is needed; everything after
/// it runs confined. Sends [`Hello`] to the daemon.
///
/// # Errors
///
/// Returns an error if `prepare` failed, or if the kernel refused a required layer of confinement. The daemon was told
/// the reason.
pub fn enter<T>(
    bounds: ChildLimits,
    prepare: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<(T, ControlEnd)> {
    let control = ControlEnd::from(io::stdin().as_fd().try_clone_to_owned()?);
    let entered = close_others(&control).and_then(|()| {
        let mut without = Vec::new();
        // The namespaces are entered first, so that threads that libraries start are in them too.
        let has_own = own_namespaces();
        bound_capabilities().context("capabilities")?;
        let prepared = prepare()?;
        let has = address_space()?;
        note(&mut without, "namespaces", has_own.and_then(|()| empty_file_system()));
        confine(ChildLimits { memory: has.saturating_add(bounds.memory), ..bounds }, &mut without)?;
        Ok((prepared, without))
    });
    let (hello, entered) = match entered {
        Ok((prepared, without)) => (Hello::Yes { without }, Ok(prepared)),
        Err(error) => (Hello::No { why: format!("{error:#}") }, Err(error)),
    };
    say(&control, &hello).context("cannot send the hello")?;
    Ok((entered?, control))
}

/// Sends a message (record) without file descriptors to the daemon. `ControlEnd::send` uses sendmsg, which can carry
/// addresses and descriptors, so the child's filter of system calls forbids it.
pub fn say(control: &ControlEnd, record: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(record)?;
    send(control, &text, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// Closes all descriptors except the standard ones and the socket. This project opens all files with close-on-exec, so
/// any other open descriptor was inherited by mistake.
fn close_others(control: &ControlEnd) -> anyhow::Result<()> {
    use std::os::fd::AsRawFd as _;
    let own = control.as_fd().as_raw_fd();
    let open: Vec<i32> = fs::read_dir("/proc/self/fd")
        .context("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    // An error is ignored: one of the numbers was the listed directory's own descriptor.
    for fd in open.into_iter().filter(|fd| *fd > 2 && *fd != own) {
        let _ = close(fd);
    }
    Ok(())
}

fn note(without: &mut Vec<String>, what: &str, done: nix::Result<()>) {
    without.extend(done.err().map(|error| format!("{what}: {error}")));
}

/// Applies the remaining layers of confinement, after the libraries were loaded. `bounds` includes the memory that the
/// process already has.
fn confine(bounds: ChildLimits, without: &mut Vec<String>) -> anyhow::Result<()> {
    let program = filter().context("the list of system calls")?;
    note(without, "a user of its own", own_user());
    drop_capabilities().context("capabilities")?;
    for (what, resource, most) in [
        ("memory", Resource::RLIMIT_AS, bounds.memory),
        ("descriptors", Resource::RLIMIT_NOFILE, bounds.descriptors),
        ("processes", Resource::RLIMIT_NPROC, 0),
        ("files", Resource::RLIMIT_FSIZE, 0),
        ("core", Resource::RLIMIT_CORE, 0),
        ("locked memory", Resource::RLIMIT_MEMLOCK, 0),
        ("queues", Resource::RLIMIT_MSGQUEUE, 0),
    ] {
        setrlimit(resource, most, most).with_context(|| format!("cannot limit {what}"))?;
    }
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("not to be traced")?;
    // A change of the user resets the parent-death signal, so the signal is set afterwards. If the daemon has already
    // ended, the socket is closed.
    set_parent_process_death_signal(Some(Signal::KILL)).context("to die with the daemon")?;
    // Applying the filter of system calls also sets `no_new_privs`.
    apply_filter_all_threads(&program).context("the list of system calls")
}

/// Enters new namespaces. The network namespace has only a loopback interface, which is down.
fn own_namespaces() -> nix::Result<()> {
    let all = CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS;
    unshare(all)
}

fn empty_file_system() -> nix::Result<()> {
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let flags = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("none"), "/proc", Some("tmpfs"), flags, Some("size=4k,mode=0"))?;
    chdir("/proc")?;
    chroot(".")?;
    chdir("/")
}

/// Changes to a user that no other process has. Without root the user stays the same. Other processes of that user are
/// then protected by the filter of system calls, and cannot trace this process.
fn own_user() -> nix::Result<()> {
    if !geteuid().is_root() {
        return Err(nix::Error::EPERM);
    }
    let number = USERS_BASE.saturating_add(getpid().as_raw().unsigned_abs());
    let user = Uid::from_raw(number);
    let group = Gid::from_raw(number);
    setgroups(&[])?;
    setresgid(group, group, group)?;
    setresuid(user, user, user)
}

/// Drops all capabilities from the bounding set. Ignores capabilities that the kernel does not know, and a missing
/// permission to change the set.
fn bound_capabilities() -> rustix::io::Result<()> {
    for capability in CapabilitySet::all().iter() {
        match remove_capability_from_bounding_set(capability) {
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::PERM) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn drop_capabilities() -> rustix::io::Result<()> {
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
}

/// Returns the size of this process's address space, in bytes.
fn address_space() -> anyhow::Result<u64> {
    let status = fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix("kB"));
    let kib: u64 = kib.and_then(|kib| kib.trim().parse().ok()).context("no VmSize in /proc/self/status")?;
    Ok(kib << 10)
}

/// System calls that are allowed with any arguments. Sending needs restrictions; see [`filter`].
const CALLS: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_shutdown,
    libc::SYS_close,
    libc::SYS_ppoll,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_madvise,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
];

/// Returns the filter of system calls (seccomp). Forbidden calls fail with EPERM instead of ending the process, so that
/// libraries that try more than they need continue.
fn filter() -> anyhow::Result<BpfProgram> {
    let must = |argument, operation, value| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Qword, operation, value)
    };
    let no_code = |argument| must(argument, SeccompCmpOp::MaskedEq(flag(libc::PROT_EXEC)), 0);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = CALLS.iter().map(|call| (*call, Vec::new())).collect();
    // Sending is allowed to the socket's peer only: the address must be null.
    rules.insert(libc::SYS_sendto, vec![SeccompRule::new(vec![must(4, SeccompCmpOp::Eq, 0)?])?]);
    let anonymous = flag(libc::MAP_ANONYMOUS);
    let memory = vec![no_code(2)?, must(3, SeccompCmpOp::MaskedEq(anonymous), anonymous)?];
    rules.insert(libc::SYS_mmap, vec![SeccompRule::new(memory)?]);
    rules.insert(libc::SYS_mprotect, vec![SeccompRule::new(vec![no_code(2)?])?]);
    rules.insert(libc::SYS_mremap, Vec::new());
    // Duplicating a descriptor is allowed, since the number of descriptors is limited.
    let copy = must(1, SeccompCmpOp::Eq, flag(libc::F_DUPFD_CLOEXEC))?;
    rules.insert(libc::SYS_fcntl, vec![SeccompRule::new(vec![copy])?]);
    // A library that aborts may send a signal to its own process.
    let own = u64::from(getpid().as_raw().unsigned_abs());
    rules.insert(libc::SYS_tgkill, vec![SeccompRule::new(vec![must(0, SeccompCmpOp::Eq, own)?])?]);
    let refused = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let filter =
        SeccompFilter::new(rules, refused, SeccompAction::Allow, std::env::consts::ARCH.try_into()?)?;
    Ok(filter.try_into()?)
}

fn flag(flag: i32) -> u64 {
    u64::from(flag.unsigned_abs())
}
