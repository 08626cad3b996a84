//! Millrace's kernel edge: what the BPF programs of all products need, in Rust and as headers in C.
//!
//! The programs themselves are in the crates of their products, each with a typed handle that loads it, attaches it, and keeps its maps.
//! What a program decides is in C. `millrace-kernel-build` compiles it, and finds the headers here, in `src/bpf`: `net.h` reads and
//! writes Ethernet, IP and UDP, `aead.h` and `quic_packet.h` protect packets, `fan.h` copies for many, `util.h` has what all use.
//!
//! # What is here
//!
//! | module | what it is |
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
//! # How long things live
//!
//! Objects are embedded: nothing is read from disk at run time but grafts, and nothing is pinned. Dropping a handle detaches its programs.
//! When the process is killed, the kernel does, save for clsact filters on kernels without TCX, and congestion controls on those without
//! links for them, which the next start removes.
//!
//! # What is `unsafe`
//!
//! * [`memory`]: maps that are mapped into this process, which the kernel changes at the same time. All of it is atomic, or in an
//!   `UnsafeCell` with one writer. [`memory::Shared`] is the promise that a type is made of such.
//! * [`intf`], [`crypto`]: structures as bytes and back. [`intf::Plain`] is the promise that all bytes are values, and none is padding.
//! * [`tc`], [`udp`], [`xdp`], [`raw`], [`fork`], [`programs`], [`energy`]: system calls, and functions of libbpf, that no crate wraps.
//!
//! # To add a program
//!
//! 1. Write `src/bpf/NOUN.bpf.c` in its product's crate. The build script finds it, and `tests/load.rs` loads it into the running kernel.
//! 2. Give it one `const volatile struct NOUN_config config` in `.rodata.config`, with units in the names of its fields.
//! 3. Put what Rust needs of it into `NOUN_intf.h`: the build writes Rust's types and constants from there (`millrace-kernel-build`). A
//!    structure that is mapped into the process is marked `SHARED` (`shared.h`).
//! 4. Write the handle: [`embedded!`], `configure`, the sizes of maps, `load`.
//! 5. Test it by tables over `BPF_PROG_TEST_RUN`. A parser also compiles natively: `testkit/parsers` has it compared with one in Rust, on
//!    fixtures, random bytes and in `fuzz/`.

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
pub mod testing;
pub mod udp;
pub mod unix;
pub mod xdp;

pub use error::Error;
