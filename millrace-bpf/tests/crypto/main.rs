//! Packet protection in C, both as native code and as the kernel runs it: standards' examples, Wycheproof,
//! every length against ring, and every bit flipped.

mod engine;
mod examples;
mod measure;
mod random;
mod wycheproof;
