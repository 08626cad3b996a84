//! Millrace's interface to the kernel, for the BPF programs of all products: handles in Rust, and headers in C.
//!
//! The programs themselves are in the crates of their products, each with a typed handle that loads and attaches it, and writes its maps.
//! Decisions of a program are in C. `millrace-kernel-build` compiles it, and finds the headers here, in `src/bpf`: `net.h` reads and
//! writes Ethernet, IP and UDP, `aead.h` and `quic_packet.h` protect packets, `fan.h` copies for many, `util.h` has common helpers.
//!
//! # Modules
//!
//! | module | contents |
//! | --- | --- |
//! | [`object`] | opens and loads the embedded objects |
//! | [`memory`] | maps arrays and ring buffers into this process |
//! | [`intf`] | structures that C and Rust share, as bytes and back |
//! | [`tc`], [`xdp`] | attach programs to interfaces; gate and grafts share one at XDP |
//! | [`fan`] | attachments and paths of programs that copy packets to many |
//! | [`barrier`] | waits for program runs to end |
//! | [`crypto`] | keys of packet protection, as programs have them |
//! | [`programs`] | run times of any program |
//! | [`neighbour`], [`netfilter`], [`qdisc`], [`stack`] | asks the kernel by netlink: next hops, firewall rules, queueing, what lies below an interface |
//! | [`clock`], [`energy`] | clocks and counters of energy |
//! | [`prefix`] | networks as users write them |
//! | [`sctp`], [`udp`], [`unix`] | sockets that no crate wraps |
//!
//! # Lifetimes
//!
//! Objects are embedded: nothing is read from disk at run time but grafts, and nothing is pinned. Dropping a handle detaches its programs.
//! If the process is killed, the kernel detaches them. Exceptions are clsact filters on kernels without TCX, and congestion controls on
//! kernels without links for them: the next start removes those.
//!
//! # Unsafe code
//!
//! * [`memory`]: maps that are mapped into this process, which the kernel changes at the same time. All of it is atomic, or in an
//!   `UnsafeCell` with one writer. A type promises that by [`memory::Shared`].
//! * [`intf`], [`crypto`]: structures as bytes and back. A type promises by [`intf::Plain`] that all bytes are values, and none is padding.
//! * [`tc`], [`udp`], [`xdp`], [`raw`], [`fork`], [`programs`], [`energy`]: system calls, and functions of libbpf, that no crate wraps.
//!
//! # To add a program
//!
//! 1. Write `src/bpf/NOUN.bpf.c` in its product's crate. The build script finds it, and `tests/load.rs` loads it into the running kernel.
//! 2. Give it one `const volatile struct NOUN_config config` in `.rodata.config`, with units in the names of its fields.
//! 3. Put what Rust needs of it into `NOUN_intf.h`: the build writes Rust's types and constants from there (`millrace-kernel-build`). A
//!    structure that is mapped into the process is marked `SHARED` (`shared.h`).
//! 4. Write the handle: [`embedded!`], `configure`, the sizes of maps, `load`.
//! 5. Test it by tables over `BPF_PROG_TEST_RUN`. A parser also compiles natively: `testkit/parsers` compares it with one in Rust, on
//!    fixtures, random bytes and in `fuzz/`.
#![deny(missing_docs)]
#![warn(clippy::undocumented_unsafe_blocks)]

pub mod barrier;
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
