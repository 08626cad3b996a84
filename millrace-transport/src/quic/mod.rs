//! QUIC at the edge: stock quinn connections that share their packet numbers, keys, credit and congestion
//! window with a second sender, the data plane.
//!
//! * [`Endpoint`] is a UDP socket with its connections; [`Connection`] is quinn's handle plus the data
//!   plane ([`Connection::downstream`]).
//! * `seam` implements quinn's crypto traits around its own rustls session. It is the only place where
//!   quinn's packets are touched.
//! * `shared` is what both senders of one connection have in common.
//! * `keeper` is the one task per endpoint that looks after deadlines and what must not happen inside
//!   quinn's lock.

mod congestion;
mod connection;
mod endpoint;
mod keeper;
mod path;
mod seam;
mod shared;
mod socket;
mod stats;
mod tap;
pub mod tls;

pub use connection::{Connection, Incoming};
pub use endpoint::{AcceptError, BindError, Config, ConnectError, Endpoint, ID_LEN, bind_socket};
pub use stats::Stats;
pub use tap::{Sent, Tap};
