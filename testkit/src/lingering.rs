//! Sockets that block when they are closed.

use std::{
    io::Write as _,
    net::{TcpListener, TcpStream},
    time::Duration,
};

/// Time for which a [`lingering`] socket blocks when it is closed. The time is longer than any test waits.
pub const LINGER: Duration = Duration::from_secs(3600);

/// Returns both ends of a connection. Closing the first end blocks, because the second end does not read. Closing the
/// second end unblocks the first.
///
/// # Panics
/// Panics if no connection over the loopback interface can be made.
pub fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port of loopback");
    let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    let (far, _) = listener.accept().expect("a connection");
    // A close blocks only while sent data is not acknowledged. So the loop fills the receive buffer of `far` and the
    // send buffer of `near`. A blocking socket would wait in the last write.
    near.set_nonblocking(true).expect("a socket that does not wait");
    while (&near).write(&[0; 1 << 16]).is_ok() {}
    // Linux applies SO_LINGER on close to non-blocking sockets, too, but not to sockets that are open when their
    // process exits.
    socket2::SockRef::from(&near).set_linger(Some(LINGER)).expect("a socket that lingers");
    (near, far)
}
