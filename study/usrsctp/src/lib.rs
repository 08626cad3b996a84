//! SCTP (RFC 9260) by the C library usrsctp, for one message session, in a process without rights.
//!
//! | module | contents |
//! | --- | --- |
//! | `usrsctp` | the library's functions, which are loaded at run time |
//! | `confine` | child processes of this binary for untrusted bytes, without files, network and rights |
//! | `process` | such a process, between an application's socket and the session's |
//!
//! Tier: test-all, since it is no part of the product.

pub mod confine;
pub mod process;
pub mod usrsctp;
