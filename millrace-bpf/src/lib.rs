//! Millrace's kernel edge: BPF programs in C, and typed handles to them in Rust.
//!
//! This crate alone needs clang and libbpf. What a program decides is in C, in `src/bpf`; what Rust does is load it, attach
//! it, and keep its maps. No protocol is spoken here: that is `millrace-proto`, which this crate does not depend on but to
//! test against.
//!
//! # What is here
//!
//! Each noun is one object, `src/bpf/NOUN.bpf.c`, and one handle that owns it:
//!
//! | object | hook | handle | does |
//! | --- | --- | --- | --- |
//! | `relay` | TC ingress | [`relay::Relay`] | forwards media from a publisher's packets to its subscribers |
//! | `fanout` | TC ingress | [`fanout::Fanout`] | sends a sender's RTP to many receivers |
//! | `gate` | XDP, TC egress | [`gate::Gate`] | admits or drops QUIC traffic in front of a server |
//! | `graft_tcp`, `graft_sockets` | sock_ops, TCP iterator | [`graft::Tcp`], [`graft::Sockets`] | agree with peers in TCP options, set and read sockets |
//! | `graft_hybla`, `graft_westwood`, `graft_longhaul`, `graft_pcc` | struct_ops | [`graft::Control`] | congestion controls, of the pool that is shipped |
//! | `graft_hook` | cgroup connect and names, sock_ops | [`graft::hook::Hook`] | leads connections to a broker that carries them, and shows true addresses |
//! | `joint` | XDP, TC both ways | [`graft::joint::Joints`] | frames datagrams of sessions, and has their functions run |
//! | `seal` | as `joint` | [`graft::joint::Joints`] | its stages that seal and open, loaded with the first sealed session |
//! | `function_number`, `function_order`, `function_repair` | as `joint` | [`graft::joint::Function`] | functions on packets, of the pool that is shipped |
//! | `root` | XDP | none | shares an interface between gate and joints |
//! | `cost` | tracepoints, functions, perf events | [`cost::Cost`] | times networking and samples its stacks |
//! | `probe` | TC, both ways | [`probe::Probe`] | stamps the packets that pass an interface |
//! | `flood` | XDP | [`flood::Flood`] | sends Initials from forged addresses, to measure the gate |
//! | `softirqs`, `syscalls`, `idle` | tracepoints | [`softirqs::Softirqs`], [`syscalls::Syscalls`], [`idle::Idle`] | time or count one thing each |
//! | `crypto_test` | none | none | runs the packet protection of the relay for `tests/crypto` |
//!
//! From the bottom up, the layers of one noun:
//!
//! 1. `bpf/NOUN_intf.h` has the structures that both sides share, `NOUN/intf.rs` their mirrors in Rust. A test compares
//!    size, offset and name of each field with the object's BTF. The small programs share `bpf/intf.h` and `intf.rs`.
//! 2. `bpf/NOUN.bpf.c` has the programs, called `NOUN_HOOK`, and the one place where a reason becomes a verdict. Headers
//!    beside it have the rest by topic. `bpf/net.h` reads and writes Ethernet, IP and UDP, `bpf/fan.h` copies for many, `bpf/util.h` has what all use.
//! 3. `NOUN.rs` has the handle: a configuration, `load`, `attach`, what to change while it runs, and counters.
//!
//! What handles need of the kernel is in modules of its own: [`tc`] and [`xdp`] attach, `object` opens and loads, `memory`
//! maps arrays and ring buffers into this process, `barrier` waits for program runs to end. [`programs`] tells the run
//! times of any program, [`clock`] and [`energy`] read clocks and counters.
//!
//! # How long things live
//!
//! `build.rs` compiles the objects, and they are embedded: nothing is read from disk at run time but grafts, and nothing is
//! pinned.
//! Dropping a handle detaches its programs. When the process is killed, the kernel does, save for clsact filters on kernels
//! without TCX, and congestion controls on those without links for them, which the next start removes.
//!
//! # What is `unsafe`
//!
//! * `memory`, `relay`, `cost::buffer`: maps that are mapped into this process, which the kernel changes at the same time.
//!   All of it is atomic, or in an `UnsafeCell` with one writer. `Shared` is the promise that a type is made of such.
//! * `intf`, `crypto`: structures as bytes and back. `Plain` is the promise that all bytes are values, and none is padding.
//! * `tc`, `udp`, `xdp`, `raw`, `fork`, `programs`, `energy`, `gate::maps`, `graft`, `cost::{aio, uring}`: system calls, and functions of
//!   libbpf, that no crate wraps.
//!
//! # To add a program
//!
//! 1. Write `bpf/NOUN.bpf.c`. `build.rs` finds it, and `tests/load.rs` loads it into the running kernel.
//! 2. Give it one `const volatile struct NOUN_config config` in `.rodata.config`, with units in the names of its fields.
//! 3. Mirror each structure with `mirror!`, or with `shared!` if it is mapped, and list it in the test `mirrors_match_btf`.
//! 4. Write the handle in `NOUN.rs`: `embedded!("NOUN.bpf.o")`, `configure`, the sizes of maps, `load`.
//! 5. Test it by tables over `BPF_PROG_TEST_RUN`. A parser also compiles natively: `parsers.native.c` has it compared with
//!    one in Rust, on fixtures, random bytes and in `fuzz/`.

#![warn(clippy::undocumented_unsafe_blocks)]

mod barrier;
pub mod clock;
pub mod cost;
pub mod crypto;
pub mod energy;
mod error;
mod fan;
pub mod fanout;
pub mod flood;
mod fork;
pub mod gate;
pub mod graft;
mod hook;
pub mod icmp;
pub mod idle;
mod intf;
mod memory;
pub mod neighbour;
pub mod netfilter;
mod netlink;
mod object;
pub mod probe;
pub mod programs;
pub mod qdisc;
mod raw;
pub mod relay;
pub mod sctp;
mod siphash;
pub mod softirqs;
mod stack;
pub mod syscalls;
pub mod tc;
pub mod udp;
pub mod unix;
pub mod xdp;

pub use error::Error;
