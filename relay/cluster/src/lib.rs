//! The routes of a relay to namespaces at other relays of its cluster (draft-lcurley-moq-cluster-01), and the choice
//! between them.
//!
//! Relays announce namespaces to each other. An announcement contains the [path](HopPath) from the publisher, and a
//! cost. [`RouteTable`] keeps the announcements of all sessions, and answers three questions: which session to
//! subscribe at, what to announce to a session, and whether a track has to move to another session.
//!
//! [`Pauses`] says when to connect again to a relay.
//!
//! Relays that announce nothing to each other register their publishers' namespaces in a store, and look up the
//! others'. [`LookupCache`] keeps the store's answers.
//!
//! The crate does no I/O, reads no clock and draws no random numbers.
//!
//! # Why routes contain no loops
//!
//! * An announcement whose path contains the relay's own hop is refused. None is sent to a peer whose hop is on its
//!   path.
//! * A subscription of a peer is never served by a route whose path contains the peer.
//! * A track leaves a working route only for a path with strictly fewer hops ([`RouteTable::next`]). If several relays
//!   move at the same time, each moves to a relay whose path was shorter than its own, so the moves cannot form a loop.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod lookup;
mod reconnect;
mod status;
mod table;

pub use lookup::{LookupCache, LookupLimits, RegistrationKey, RegistrationState};
pub use millrace_moq::{HopError, HopId, HopPath};
pub use reconnect::{BRIEF, Pauses};
pub use status::LookupStatus;
pub use table::{
    Announcement, AnnouncementKey, AnnouncementRefusal, ClusterLink, NamespaceRoute, Neighbour, NextSource,
    RouteLimits, RouteTable,
};
