//! Sessions for applications: an application requests the transport services that it needs. The daemons of both hosts
//! agree on a graft (a list of packet functions in the kernel) that provides these services, and the application gets a
//! socket without any privilege. In the terms of TAPS (RFC 9621, RFC 9622):
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
//! **When the daemon ends**, the session is over, and nothing more is sent. The library checks its connection to the
//! daemon before each datagram. In addition, the daemon's watchdog process shuts the socket down.
//! `docs/guide/messages.md` is the guide; the design is in `docs/notes/design/0022-messages.md`.
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

/// Path of the daemon's socket, if the application sets no other path.
pub const DEFAULT_SOCKET: &str = "/run/millrace/messages.sock";

/// An event of a session. Messages are separate: see [`Session::receive`].
#[derive(Clone, Debug, PartialEq)]
pub enum SessionEvent {
    /// Both hosts have changed to another graft, a list of packet functions in the kernel.
    Changed {
        /// Name of the new graft.
        graft: String,
        /// Services of the new graft.
        services: Vec<String>,
        /// Originator of the change of grafts: the application, the daemon, or the other host.
        by: ChangeOrigin,
    },
    /// A renegotiation failed, and the session continues unchanged.
    Refused {
        /// The category of the reason, for programs that react to it.
        why: SessionRefusal,
        /// The reason, as text for people.
        reason: String,
    },
    /// The measured quality of the session is worse than requested.
    Violated(QualityViolation),
    /// Number of messages that were discarded since the previous `Lost` event, because all or some of their datagrams
    /// did not arrive.
    Lost(u64),
    /// The other side of the session has ended and sends no more messages.
    Finished,
    /// The session is over.
    Closed {
        /// The reason, as text for people.
        reason: String,
    },
}
