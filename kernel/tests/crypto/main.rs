//! Tests of packet protection in C, both as native code and in the kernel. They use the examples of the RFCs, the
//! vectors of Wycheproof, comparisons with ring at every length, packets with a flipped bit, and the carries of
//! Poly1305.

mod carries;
mod engine;
mod examples;
mod measure;
mod random;
mod wycheproof;
