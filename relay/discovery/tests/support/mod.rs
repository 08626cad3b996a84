//! A real etcd for a test: Debian's package etcd-server.

use std::{
    io::ErrorKind,
    net::Ipv4Addr,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU16, Ordering::Relaxed},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use url::Url;

/// Number of etcd processes that this test process has started.
static STARTED: AtomicU16 = AtomicU16::new(0);

/// A running etcd with one member. Dropping this value ends it.
pub struct Etcd {
    process: Child,
    /// etcd's URL for clients.
    pub endpoint: Url,
    _folder: TempDir,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.signal(Signal::SIGCONT);
        let _ = self.process.kill(); // an error is ignored: the process may have ended
        let _ = self.process.wait();
    }
}

impl Etcd {
    /// Starts etcd. Returns `None` if it is not installed.
    pub fn start() -> Option<Self> {
        Self::with("http", &[])
    }

    /// Starts etcd with further options. Clients reach it at an address of the given scheme.
    pub fn with(scheme: &str, options: &[&str]) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a folder");
        let port = 2 * STARTED.fetch_add(1, Relaxed);
        let client = format!("{scheme}://{}:{}", Self::address(), 20_000 + port);
        let peer = format!("http://{}:{}", Self::address(), 20_001 + port);
        let process = Command::new("etcd")
            .args(["--name", "one", "--data-dir"])
            .arg(folder.path().join("data"))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("one={peer}")])
            .args(options)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let process = match process {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                println!("SKIP: no etcd here: apt-get install etcd-server");
                return None;
            }
            process => process.expect("etcd starts"),
        };
        Some(Self { process, endpoint: client.parse().expect("a URL"), _folder: folder })
    }

    /// Returns an address of the loopback interface that no other test process uses.
    pub fn address() -> Ipv4Addr {
        let [_, a, b, c] = std::process::id().to_be_bytes();
        Ipv4Addr::new(127, a | 64, b, c)
    }

    pub fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.process.id().cast_signed()), signal); // the process may have ended
    }
}
