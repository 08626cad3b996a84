//! Millrace's interface to the kernel, for the BPF programs of all products: handles in Rust, and headers in C.
//!
//! The programs themselves are in the crates of their products. Each has a typed handle that loads and attaches it, and
//! writes its maps. The programs' code is in C and is compiled by `millrace-kernel-build`. Common headers are in
//! `src/bpf`: `net.h` reads and writes Ethernet, IP and UDP headers, `aead.h` and `quic_packet.h` protect QUIC packets,
//! `fan.h` copies packets to many receivers, and `util.h` has common helpers.
//!
//! # Modules
//!
//! | module | contents |
//! | --- | --- |
//! | [`object`] | opens and loads the embedded objects |
//! | [`memory`] | maps arrays and ring buffers into this process |
//! | [`intf`] | converts structures that C and Rust share to bytes and back |
//! | [`tc`], [`xdp`] | attach programs to interfaces; gate and grafts share an interface at XDP |
//! | [`fan`] | attachments and paths of programs that copy packets to many receivers |
//! | [`barrier`] | waits for program runs to end |
//! | [`crypto`] | keys of packet protection, in the form that programs use |
//! | [`programs`] | run times of any program |
//! | [`neighbour`], [`netfilter`], [`qdisc`], [`stack`] | ask the kernel by netlink: next hops, firewall rules, queueing, interfaces below an interface |
//! | [`clock`], [`energy`] | clocks and counters of energy |
//! | [`prefix`] | networks as users write them |
//! | [`sctp`], [`udp`], [`unix`] | socket options and calls that no crate wraps |
//!
//! # Lifetimes
//!
//! Objects are embedded: only grafts are read from disk at run time, and nothing is pinned. Dropping a handle detaches
//! its programs. If the process is killed, the kernel detaches them. There are two exceptions, which the next start
//! removes: clsact filters on kernels without TCX, and congestion controls on kernels without links for them.
//!
//! # Unsafe code
//!
//! * [`memory`]: maps that are mapped into this process, and that the kernel changes at the same time. All their data
//!   is atomic, or in an `UnsafeCell` with one writer. A type promises this by [`memory::Shared`].
//! * [`intf`], [`crypto`]: conversion of structures to bytes and back. A type promises by [`intf::Plain`] that every
//!   bit pattern is a valid value, and that no byte is padding.
//! * [`tc`], [`udp`], [`xdp`], [`raw`], [`fork`], [`programs`], [`energy`]: system calls and functions of libbpf that
//!   no crate wraps.
//!
//! # To add a program
//!
//! 1. Write `src/bpf/NOUN.bpf.c` in its product's crate. The build script finds it, and `tests/load.rs` loads it into
//!    the running kernel.
//! 2. Give it one `const volatile struct NOUN_config config` in `.rodata.config`, with units in the names of its
//!    fields.
//! 3. Put the structures and constants that Rust needs into `NOUN_intf.h`, from which the build generates Rust's types
//!    (`millrace-kernel-build`). A structure that is mapped into the process is marked `SHARED` (`shared.h`).
//! 4. Write the handle: call [`embedded!`] and `configure`, set the sizes of maps, and call `load`.
//! 5. Test it by tables over `BPF_PROG_TEST_RUN`. A parser also compiles natively: `testkit/parsers` compares it with
//!    one in Rust on fixtures and random bytes, and `fuzz/` does so too.
#![deny(missing_docs)]
#![warn(clippy::undocumented_unsafe_blocks)]

pub mod barrier;
pub mod checksum;
pub mod clock;
pub mod crypto;
pub mod energy;
pub mod error;
pub mod fan;
pub mod fork;
pub mod hook;
pub mod intf;
pub mod memory;
pub mod neighbour;
pub mod netfilter;
pub mod netlink;
pub mod object;
mod outcome;
pub mod prefix;
pub mod programs;
pub mod qdisc;
pub mod raw;
pub mod sctp;
pub mod siphash;
pub mod stack;
pub mod tc;
#[cfg(any(test, feature = "testing"))]
#[allow(missing_docs, reason = "helpers of tests")]
pub mod testing;
pub mod udp;
pub mod unix;
pub mod xdp;

pub use error::Error;
