//! Tests of packet grafts: the XDP hook that they share with Millrace's packet filter (`millrace gate`), functions on
//! single frames, and functions on a path that loses packets. They need root.

mod bounded;
mod datagrams;
mod frames;
mod functions;
mod paced;
mod parity;
mod paths;
mod sealed;
mod shared;
mod swapped;
mod traffic;
mod unread;

use millrace_testkit::net;
use std::net::SocketAddr;

use millrace_graft_kernel::packet::{
    FunctionList, FunctionSession, OpenedFunction, PacketHooks, PacketReason, SessionEnds,
};
use millrace_graft_kernel::{FUNCTIONS, ShippedObject};

pub const KEY: [u8; 16] = *b"sixteen bytes, !";

/// Loads the dispatcher and all functions that the tests' function lists contain.
pub fn hooks() -> PacketHooks {
    // Retransmission requests are repeated after a short time, since round trips are short. They are repeated without a
    // limit, since a busy machine may be slow.
    let parameters = [("repair", "retry_us", 5000), ("repair", "tries", 0)];
    hooks_of(&["number", "order", "repair"], &parameters)
}

/// Loads the dispatcher with the given functions. Each parameter is given as function, name and value.
pub fn hooks_of(functions: &[&str], parameters: &[(&str, &str, u64)]) -> PacketHooks {
    let mut hooks = PacketHooks::load().unwrap_or_else(|error| panic!("{error}"));
    for &ShippedObject { name, image, .. } in FUNCTIONS.iter().filter(|it| functions.contains(&it.name)) {
        let mut function = OpenedFunction::open(image).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(function.name(), name);
        for (_, parameter, value) in parameters.iter().filter(|(of, ..)| *of == name) {
            function.set(parameter, *value).expect("a parameter");
        }
        hooks.add(function).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    hooks
}

pub fn list(functions: &[&str]) -> FunctionList {
    let sum = functions.iter().flat_map(|name| name.bytes()).map(u16::from).sum();
    FunctionList { functions: functions.iter().map(|&name| name.to_owned()).collect(), id: sum }
}

pub fn ends(local: &str, remote: &str) -> SessionEnds {
    let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
    SessionEnds { local: address(local), remote: address(remote) }
}

pub fn other_side(ends: &SessionEnds) -> SessionEnds {
    SessionEnds { local: ends.remote, remote: ends.local }
}

pub fn open(hooks: &mut PacketHooks, ends: SessionEnds, functions: &[&str]) {
    let session = FunctionSession { ends, key: KEY, list: list(functions), budget_ns: 0 };
    hooks.open(session).unwrap_or_else(|error| panic!("{error}"));
}

/// Opens a session at both hosts, each with its own dispatcher.
pub fn sides(ends: SessionEnds, functions: &[&str]) -> [PacketHooks; 2] {
    [ends, other_side(&ends)].map(|ends| {
        let mut hooks = hooks();
        open(&mut hooks, ends, functions);
        hooks
    })
}

pub fn count(hooks: &mut PacketHooks, ends: &SessionEnds, reason: PacketReason) -> u64 {
    let counts = hooks.counts(ends).expect("counts");
    counts.into_iter().find(|(it, _)| *it == reason).map_or(0, |(_, count)| count)
}

/// Returns the reasons for verdicts that the packet programs counted at least once for a session's packets, with their
/// counts.
pub fn counted(hooks: &mut PacketHooks, ends: &SessionEnds) -> Vec<(PacketReason, u64)> {
    hooks.counts(ends).expect("counts").into_iter().filter(|(_, count)| *count > 0).collect()
}
