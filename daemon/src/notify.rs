//! Messages to the service manager that started this process: the protocol of sd_notify(3), without its library.
//!
//! `Type=notify-reload` of a systemd unit waits for [`ready`] at start-up and after each SIGHUP, and for [`stopping`]
//! at the end.

use std::{
    env,
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    time::Duration,
};

use nix::time::{ClockId, clock_gettime};

/// Longest time that sending a message may block this process, if the service manager does not read its socket.
const PATIENCE: Duration = Duration::from_secs(1);

/// Reports that the daemon is ready, at start-up or after a reload.
pub fn ready() {
    notify("READY=1");
}

/// Reports that the daemon is reading its settings again. [`ready`] follows, even if the reload fails.
pub fn reloading() {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    notify(&format!("RELOADING=1\nMONOTONIC_USEC={}", now.as_micros()));
}

/// Reports that the process `pid` goes on as the daemon, and is ready. Only the present main process may say so.
pub fn replaced(pid: u32) {
    notify(&format!("MAINPID={pid}\nREADY=1"));
}

/// Reports that the daemon is stopping.
pub fn stopping() {
    notify("STOPPING=1");
}

fn notify(state: &str) {
    let Some(socket) = env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty()) else { return };
    if let Err(error) = send(&socket, state) {
        tracing::warn!(socket = %socket.display(), %error, "cannot notify the service manager (systemd) of the daemon's state");
    }
}

/// Sends one datagram. `socket` is the path of the manager's socket, or `@` and a name in the abstract namespace.
fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let datagrams = UnixDatagram::unbound()?;
    datagrams.set_write_timeout(Some(PATIENCE))?;
    datagrams.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_manager_is_notified_on_a_path_and_on_an_abstract_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let name = format!("millrace-notify-{}", std::process::id());
        let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
        let managers = [
            (path.clone().into_os_string(), UnixDatagram::bind(&path).unwrap()),
            (format!("@{name}").into(), UnixDatagram::bind_addr(&abstract_name).unwrap()),
        ];
        for (socket, manager) in managers {
            let mut got = [0; 64];
            send(&socket, "READY=1").unwrap();
            let bytes = manager.recv(&mut got).unwrap();
            assert_eq!(got.get(..bytes), Some(b"READY=1".as_slice()), "{}", socket.display());
        }
        assert!(send(OsStr::new("/nowhere/notify"), "READY=1").is_err());
    }
}
