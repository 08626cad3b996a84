//! Sockets that take their time to be closed.

use std::{
    io::Write as _,
    net::{TcpListener, TcpStream},
    time::Duration,
};

/// How long a [`lingering`] socket waits when it is closed: longer than a test waits for anything.
pub const LINGER: Duration = Duration::from_secs(3600);

/// Returns both ends of a connection of which the first waits when it is closed, because nobody reads at the other one. To close the other
/// end ends the wait.
///
/// # Panics
/// Loopback has no room for a connection.
pub fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port of loopback");
    let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    let (far, _) = listener.accept().expect("a connection");
    near.set_nonblocking(true).expect("a socket that does not wait");
    while (&near).write(&[0; 1 << 16]).is_ok() {}
    socket2::SockRef::from(&near).set_linger(Some(LINGER)).expect("a socket that lingers");
    (near, far)
}
