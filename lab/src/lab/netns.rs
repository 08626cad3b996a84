//! Named network namespaces, by `ip` (iproute2) and `setns`.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Error, Result};

/// Directory of the namespaces of `ip netns`.
pub(super) const RUN: &str = "/run/netns";

/// Longest wait until killed processes have disappeared.
const KILL_WAIT: Duration = Duration::from_secs(5);

/// A named network namespace that belongs to a lab.
#[derive(Debug, Clone)]
pub struct Netns {
    name: String,
}

impl Netns {
    pub(super) fn new(name: String) -> Self {
        Self { name }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn path(&self) -> PathBuf {
        Path::new(RUN).join(&self.name)
    }

    /// Returns a command that runs inside the namespace, by `nsenter`. `ip netns exec` would hide the mounts below
    /// `/sys` (cgroups, bpffs, tracefs). `nsenter` executes the program, so the child's process ID is the program's.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg("--").arg(program);
        command
    }

    /// Runs `work` in a thread inside the namespace. Sockets and processes that it creates stay inside.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let path = self.path();
        let inside =
            || File::open(&path).and_then(|file| Ok(setns(file, CloneFlags::CLONE_NEWNET)?)).map(|()| work());
        match std::thread::scope(|scope| scope.spawn(inside).join()) {
            Ok(result) => {
                result.map_err(|source| Error::Io { what: format!("enter {}", path.display()), source })
            }
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    fn inode(&self) -> Option<u64> {
        std::fs::metadata(self.path()).ok().map(|meta| meta.ino())
    }
}

/// Runs `lines`, each with the arguments of one `ip` command, with `ip -batch`.
pub(super) fn ip(lines: &[String]) -> Result<()> {
    let what = || "run ip (iproute2)".to_owned();
    let mut child = Command::new("ip")
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| Error::Io { what: what(), source })?;
    if let Some(mut stdin) = child.stdin.take() {
        // A write error is ignored: `ip` stops reading at the first line that fails, and its own error is reported
        // below.
        let _ = stdin.write_all(format!("{}\n", lines.join("\n")).as_bytes());
    }
    let output = child.wait_with_output().map_err(|source| Error::Io { what: what(), source })?;
    check("ip", &output)
}

pub(super) fn check(program: &str, output: &std::process::Output) -> Result<()> {
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Error::Command { program: program.into(), text })
}

pub(super) fn create(namespaces: &[Netns]) -> Result<()> {
    ip(&namespaces.iter().map(|netns| format!("netns add {}", netns.name)).collect::<Vec<_>>())
}

/// Removes namespaces and kills the processes inside. A missing namespace is no error.
pub(super) fn remove(namespaces: &[Netns]) -> Result<()> {
    kill_inside(namespaces)?;
    let there = namespaces.iter().filter(|netns| netns.path().exists());
    let lines: Vec<String> = there.map(|netns| format!("netns del {}", netns.name)).collect();
    if lines.is_empty() { Ok(()) } else { ip(&lines) }
}

/// Returns all namespaces whose name starts with `prefix`.
pub(super) fn list(prefix: &str) -> Vec<Netns> {
    let Ok(entries) = std::fs::read_dir(RUN) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(prefix)).map(Netns::new).collect()
}

fn kill_inside(namespaces: &[Netns]) -> Result<()> {
    let inodes: Vec<u64> = namespaces.iter().filter_map(Netns::inode).collect();
    let start = Instant::now();
    loop {
        let inside = processes_in(&inodes);
        if inside.is_empty() {
            return Ok(());
        }
        if start.elapsed() > KILL_WAIT {
            return Err(Error::Invalid(format!("processes {inside:?} survived SIGKILL")));
        }
        for pid in inside {
            // An error is ignored: the process may have ended already.
            let _ = kill(pid, Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the processes in these namespaces. Zombies are in no namespace.
fn processes_in(inodes: &[u64]) -> Vec<Pid> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let own = Pid::this();
    let inside = |pid: &Pid| {
        let netns = std::fs::metadata(format!("/proc/{pid}/ns/net"));
        netns.is_ok_and(|netns| inodes.contains(&netns.ino()))
    };
    pids.map(Pid::from_raw).filter(|pid| *pid != own).filter(inside).collect()
}

/// Turns off segmentation, merging and checksum offloads, which make frames on a veth differ from frames on a wire. The
/// device must be in the calling thread's namespace.
pub(super) fn disable_offloads(device: &str) -> Result<()> {
    const OFF: [&str; 6] = ["rx", "tx", "tso", "gso", "gro", "tx-udp-segmentation"];
    let mut command = Command::new("ethtool");
    command.arg("-K").arg(device).args(OFF.iter().flat_map(|feature| [feature, "off"]));
    let output = command.output().map_err(|source| Error::Io { what: "run ethtool".into(), source })?;
    check("ethtool", &output)
}

/// Writes a network sysctl of the calling thread's namespace.
pub(super) fn sysctl(name: &str, value: &str) -> Result<()> {
    let path = format!("/proc/sys/net/{name}");
    std::fs::write(&path, value).map_err(|source| Error::Io { what: format!("write {path}"), source })
}
