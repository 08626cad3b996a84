//! Processes of a measurement. Each runs in a node of the lab, writes its output to files, and is ended when its handle
//! is dropped.

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::usage::rss_bytes;

const POLL: Duration = Duration::from_millis(20);
/// Interval between two checks that an awaited process still runs, ms.
const LOOK_MS: u8 = 200;
/// Longest time that a process may take to end after SIGTERM. Then it is killed.
const GRACE: Duration = Duration::from_secs(2);
/// Longest time that a process may take to print its results and to end after SIGINT.
const INTERRUPTED: Duration = Duration::from_secs(10);
const LINES_TOLD: usize = 3;
/// Directory with network statistics of the calling thread's network namespace. `/proc/self/net` would be that of the
/// process' main thread.
const NETWORK: &str = "/proc/thread-self/net";

pub struct BenchProcess {
    name: String,
    child: Child,
    output: PathBuf,
    errors: PathBuf,
}

impl BenchProcess {
    /// Starts `command`. Its output goes to files in `directory`.
    pub fn start(name: &str, command: Command, directory: &Path) -> anyhow::Result<Self> {
        Self::spawn(name, command, directory, Stdio::null())
    }

    /// Starts `command` with a pipe as its standard input. Returns the writing end of the pipe.
    pub fn start_fed(name: &str, command: Command, directory: &Path) -> anyhow::Result<(Self, ChildStdin)> {
        let mut process = Self::spawn(name, command, directory, Stdio::piped())?;
        let input = process.child.stdin.take().with_context(|| format!("{name} has no input"))?;
        Ok((process, input))
    }

    fn spawn(name: &str, mut command: Command, directory: &Path, input: Stdio) -> anyhow::Result<Self> {
        let output = directory.join(format!("{name}.out"));
        let errors = directory.join(format!("{name}.err"));
        let child = command
            .stdin(input)
            .stdout(File::create(&output)?)
            .stderr(File::create(&errors)?)
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        Ok(Self { name: name.to_owned(), child, output, errors })
    }

    /// Returns the ID of the process that does the work. If the process is a graft daemon that works in child
    /// processes, returns the ID of the one for tunnelled connections or for sessions, if there is one, and otherwise of
    /// the child with the most memory.
    pub fn id(&self) -> u32 {
        let parts = children(self.child.id()).into_iter().filter_map(|id| {
            let text = fs::read_to_string(format!("/proc/{id}/cmdline")).unwrap_or_default();
            let arguments: Vec<_> = text.split_terminator('\0').collect();
            let [_, "graft", "part", .., name] = arguments[..] else { return None };
            Some((["tunnel", "sessions"].contains(&name), rss_bytes(id).unwrap_or_default(), id))
        });
        parts.max().map_or(self.child.id(), |(_, _, id)| id)
    }

    /// Returns everything that the process has written to standard output so far.
    pub fn output(&self) -> std::io::Result<Vec<u8>> {
        fs::read(&self.output)
    }

    /// Returns everything that the process has written to standard error so far.
    pub fn errors(&self) -> std::io::Result<String> {
        fs::read_to_string(&self.errors)
    }

    /// Fails if the process has ended. The error contains the end of its output.
    pub fn check_runs(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("{} ended ({status}): {}", self.name, self.last_words()),
            None => Ok(()),
        }
    }

    /// Polls `condition` until it holds. Fails when the process ends or `limit` has passed.
    pub fn wait_until(
        &mut self,
        what: &str,
        limit: Duration,
        mut condition: impl FnMut() -> bool,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        while !condition() {
            self.check_runs()?;
            if start.elapsed() > limit {
                bail!("{}: timed out after {limit:?} waiting for: {what}; {}", self.name, self.last_words());
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Accepts one connection on `listener`, which the process makes. Fails when the process ends or `limit` has
    /// passed.
    pub fn accept(&mut self, listener: &TcpListener, limit: Duration) -> anyhow::Result<TcpStream> {
        let start = Instant::now();
        while poll(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], LOOK_MS)? == 0 {
            self.check_runs()?;
            ensure!(
                start.elapsed() < limit,
                "{}: no connection arrived within {limit:?}; {}",
                self.name,
                self.last_words()
            );
        }
        Ok(listener.accept()?.0)
    }

    /// Waits until the process ends by itself. Returns its standard output.
    pub fn finish(mut self, limit: Duration) -> anyhow::Result<String> {
        let status = self.ended_within(limit)?;
        match status {
            Some(status) if status.success() => Ok(fs::read_to_string(&self.output)?),
            Some(status) => bail!("{} ended ({status}): {}", self.name, self.last_words()),
            None => bail!("{} did not end within {limit:?}: {}", self.name, self.last_words()),
        }
    }

    /// Waits until the process ends, and interrupts it (SIGINT) after `limit`. Returns its standard output.
    pub fn finish_or_interrupt(mut self, limit: Duration) -> anyhow::Result<String> {
        if self.ended_within(limit)?.is_none() {
            self.signal()?;
        }
        self.finish(INTERRUPTED)
    }

    /// Interrupts the process (SIGINT) and waits until it ends.
    pub fn interrupt(mut self, limit: Duration) -> anyhow::Result<()> {
        self.check_runs()?;
        self.signal()?;
        match self.ended_within(limit)? {
            Some(_) => Ok(()),
            None => bail!("{} did not end within {limit:?}: {}", self.name, self.last_words()),
        }
    }

    /// Kills the process (SIGKILL) and waits for its end.
    pub fn kill(mut self) -> std::io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(drop)
    }

    fn signal(&self) -> anyhow::Result<()> {
        Ok(kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGINT)?)
    }

    fn ended_within(&mut self, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
        let start = Instant::now();
        loop {
            let status = self.child.try_wait()?;
            if status.is_some() || start.elapsed() > limit {
                return Ok(status);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Returns the last lines of the process' output, of standard error if there are any. Binary output is left out.
    pub fn last_words(&self) -> String {
        let said = [&self.errors, &self.output].map(|path| fs::read_to_string(path).unwrap_or_default());
        let text = said.into_iter().find(|text| !text.trim().is_empty()).unwrap_or_default();
        let lines: Vec<&str> = text.trim().lines().collect();
        lines.get(lines.len().saturating_sub(LINES_TOLD)..).unwrap_or_default().join(" | ")
    }
}

impl Drop for BenchProcess {
    fn drop(&mut self) {
        // An error is ignored: it means that the process has ended already.
        let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
        if !matches!(self.ended_within(GRACE), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Reports whether a UDP socket in the calling thread's network namespace is bound to `port`.
pub fn listens(port: u16) -> bool {
    let suffix = format!(":{port:04X}");
    ["udp", "udp6"].iter().any(|table| {
        let text = fs::read_to_string(format!("{NETWORK}/{table}")).unwrap_or_default();
        let mut local = text.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1));
        local.any(|local| local.ends_with(&suffix))
    })
}

/// Packet counters of a network interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterfacePackets {
    pub received: u64,
    pub sent: u64,
}

impl InterfacePackets {
    /// Reads the counters of an interface in the calling thread's network namespace.
    pub fn read_device(device: &str) -> Option<Self> {
        const RECEIVED: usize = 1;
        const SENT: usize = 9;
        let text = fs::read_to_string(format!("{NETWORK}/dev")).ok()?;
        let line = text.lines().find_map(|line| line.trim().strip_prefix(device)?.strip_prefix(':'))?;
        let number = |index| line.split_whitespace().nth(index)?.parse().ok();
        Some(Self { received: number(RECEIVED)?, sent: number(SENT)? })
    }
}

/// Returns the IDs of the running child processes of a process.
fn children(id: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().filter_map(|id| id.parse().ok()).collect::<Vec<_>>())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    use millrace_testkit::BOUND;

    fn shell(name: &'static str, script: &str, directory: &Path) -> BenchProcess {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        BenchProcess::start(name, command, directory).expect("sh starts")
    }

    #[test]
    fn ended_process_reports_its_errors_and_output() {
        let directory = tempfile::tempdir().expect("a directory");
        let fine = shell("fine", "echo 42", directory.path());
        assert_eq!(fine.finish(BOUND).expect("it ends"), "42\n");
        let broken = shell("broken", "echo out; echo because >&2; exit 3", directory.path());
        let error = broken.finish(BOUND).expect_err("it fails").to_string();
        assert!(error.contains("broken") && error.contains('3') && error.ends_with("because"), "{error}");
    }

    #[test]
    fn early_end_of_an_awaited_process_is_an_error() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut gone = shell("gone", "echo cannot bind >&2; exit 1", directory.path());
        let error = gone.wait_until("listening", BOUND, || false).expect_err("it ended");
        assert!(error.to_string().contains("cannot bind"), "{error}");
    }

    #[test]
    fn dropped_process_is_killed_if_it_ignores_sigterm() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut stubborn =
            shell("stubborn", "trap '' TERM; echo ready; while :; do sleep 0.05; done", directory.path());
        let output = stubborn.output.clone();
        let ready = || fs::read_to_string(&output).is_ok_and(|text| text.contains("ready"));
        stubborn.wait_until("ready", BOUND, ready).expect("ready");
        let process = stubborn.id();
        drop(stubborn);
        assert!(!Path::new(&format!("/proc/{process}")).exists()); // exact: `drop` has waited for the process to end
    }

    #[test]
    fn listening_udp_port_and_interface_packet_counts_are_read() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let port = socket.local_addr().expect("an address").port();
        assert!(listens(port));
        let before = InterfacePackets::read_device("lo").expect("lo");
        socket.send_to(&[1], socket.local_addr().expect("an address")).expect("send");
        let after = InterfacePackets::read_device("lo").expect("lo");
        assert!(after.sent > before.sent && after.received > before.received);
        assert_eq!(InterfacePackets::read_device("none"), None);
        drop(socket);
        assert!(!listens(port));
    }
}
