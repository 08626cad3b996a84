//! Packet protection in C, both as native code and as the kernel runs it: standards' examples, Wycheproof,
//! every length against ring, every bit flipped, and the carries of Poly1305.

mod carries;
mod engine;
mod examples;
mod measure;
mod random;
mod wycheproof;
