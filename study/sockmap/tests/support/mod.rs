//! Helpers: a broker that listens on loopback, and the cgroup of this process.

use std::{
    fs,
    net::{TcpListener, TcpStream},
    path::PathBuf,
};

use millrace_study_sockmap::{Bypass, Config};

/// Returns the cgroup (version 2) of this process; `None` if there is none or the process is not root.
pub fn cgroup() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let mount = fields.find(|fields| fields.get(2) == Some(&"cgroup2"))?.get(1)?.to_string();
    // exact: no other process moves this process to another cgroup
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    nix::unistd::geteuid().is_root().then(|| PathBuf::from(mount).join(path))
}

/// Starts a broker at this address. With `window_bytes`, the programs pass at most that many unread bytes to the broker
/// without TCP.
pub fn broker(address: &str, window_bytes: Option<u64>) -> Option<(TcpListener, Option<Bypass>)> {
    let listener = TcpListener::bind(address).ok()?;
    let port = listener.local_addr().ok()?.port();
    let Some(window_bytes) = window_bytes else { return Some((listener, None)) };
    let bypass = Bypass::attach(Config { port, window_bytes, both_ways: true }, &cgroup()?);
    Some((listener, Some(bypass.expect("the kernel takes the programs"))))
}

/// Connects an application to the broker. Returns the application's socket and the broker's.
pub fn connect(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let application = TcpStream::connect(listener.local_addr().expect("an address")).expect("a broker");
    application.set_nodelay(true).expect("a socket");
    let (broker, _) = listener.accept().expect("an application");
    broker.set_nodelay(true).expect("a socket");
    (application, broker)
}
