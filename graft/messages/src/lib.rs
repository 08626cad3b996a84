//! Sessions for applications, which ask for the services that they need. The daemons of both hosts agree on a graft
//! that provides these services, and the application gets a socket without any privilege. In the terms of TAPS (RFC
//! 9621, RFC 9622):
//!
//! ```no_run
//! use millrace_messages::{Preconnection, Received};
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
//! # Ok::<(), millrace_messages::Error>(())
//! ```
//!
//! The library has no runtime and no threads: a session is pollable ([`Session::as_fd`](std::os::fd::AsFd)), so that
//! any event loop can use it. Messages pass between this process and the kernel on the session's own socket. The
//! daemon opens the session and reports its events.
//!
//! **When the daemon ends**, the session is over, and nothing more is sent: the library checks its connection to the
//! daemon before each datagram, and the daemon's keeper shuts the socket down itself. `docs/guide/messages.md` is the
//! guide; the design is in `docs/notes/design/0022-messages.md`.
#![deny(missing_docs)]

mod error;
mod ffi;
mod inbox;
mod listener;
pub mod parts;
mod preconnection;
mod session;
mod stream;
pub mod turns;
mod waiting;
pub mod want;
pub mod wire;

pub use error::Error;
pub use listener::Listener;
pub use preconnection::Preconnection;
pub use session::{Received, Session};
pub use stream::Stream;
pub use want::{Qos, Want};
pub use wire::{ChangeOrigin, OpenedSession, QualityViolation, SessionRefusal};

/// Path of the daemon's socket, if the application gives no other one.
pub const DEFAULT_SOCKET: &str = "/run/millrace/messages.sock";

/// An event of a session. Messages are separate: see [`Session::receive`].
#[derive(Clone, Debug, PartialEq)]
pub enum SessionEvent {
    /// Both ends use another graft now.
    Changed {
        /// Name of the graft.
        graft: String,
        /// Services of the graft.
        services: Vec<String>,
        /// The side that has asked for the change.
        by: ChangeOrigin,
    },
    /// A renegotiation failed, and the session stays as it was.
    Refused {
        /// The kind of reason.
        why: SessionRefusal,
        /// The reason, as text for people.
        reason: String,
    },
    /// The session does not have the requested quality.
    Violated(QualityViolation),
    /// Number of messages that were given up, since their parts or the messages before them did not arrive, after the
    /// previous such event.
    Lost(u64),
    /// The other end sends no more.
    Finished,
    /// The session is over.
    Closed {
        /// The reason, as text for people.
        reason: String,
    },
}
