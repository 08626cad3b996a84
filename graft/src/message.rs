//! Messages for applications that know of it: a session is asked for by what it should do, the daemons of both hosts agree on a graft that
//! does, and the application gets a socket, without a privilege. In the terms of TAPS (RFC 9621, 9622):
//!
//! ```no_run
//! use millrace_graft::message::{Preconnection, Received};
//!
//! let mut session = Preconnection::new("station", "telemetry")
//!     .service("reliability")
//!     .max_delay_ms(200)
//!     .initiate()?;
//! session.send(b"a message")?;
//! while let Received::Message(bytes) = session.receive()? {
//!     println!("{} bytes", bytes.len());
//! }
//! session.close()?;
//! # Ok::<(), millrace_graft::message::Error>(())
//! ```
//!
//! No runtime, no thread: what is pollable is the way into one ([`Session::as_fd`](std::os::fd::AsFd)). Messages go to the kernel from this
//! process, by the session's own socket, and come by it; the daemon is asked for the session and tells events of it.
//!
//! **When the daemon is gone** the session is over, and nothing more is sent: before each datagram the connection to the daemon is looked at, and
//! the daemon's keeper ends the socket itself. `docs/messages.md` is the guide; the design is in `docs/design/0022-messages.md`.

mod error;
mod ffi;
mod inbox;
mod listener;
mod preconnection;
mod session;
mod stream;
mod waiting;
pub mod want;
pub mod wire;

pub use error::Error;
pub use listener::Listener;
pub use preconnection::Preconnection;
pub use session::{Received, Session};
pub use stream::Stream;
pub use want::{Qos, Want};
pub use wire::{By, Opened, Violation, Why};

/// Where the daemon listens, if nobody says otherwise.
pub const DEFAULT_SOCKET: &str = "/run/millrace/messages.sock";

/// What has become of a session. Messages are not among them: [`Session::receive`].
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Both ends use another graft.
    Changed { graft: String, services: Vec<String>, by: By },
    /// A renegotiation came to nothing: all stays as it was.
    Refused { why: Why, reason: String },
    /// What was asked for is not kept to.
    Violated(Violation),
    /// So many messages came in part only, and were given up, since the last such event.
    Lost(u64),
    /// The other end sends no more.
    Finished,
    /// It is over.
    Closed { reason: String },
}
