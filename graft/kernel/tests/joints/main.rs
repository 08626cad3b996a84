//! Tests of packet grafts: the XDP hook that they share with the gate, single frames, and functions on a path that
//! loses packets. They need root.

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
mod wire;

use millrace_testkit::net;
use std::net::SocketAddr;

use millrace_graft_kernel::FUNCTIONS;
use millrace_graft_kernel::joint::{
    FunctionList, FunctionSession, JointReason, Joints, OpenedFunction, SessionEnds, WireProtocol,
};

pub const KEY: [u8; 16] = *b"sixteen bytes, !";

/// Loads the dispatcher with the functions that lists of tests use.
pub fn joints() -> Joints {
    // Requests are repeated soon, since round trips are short, and without a limit, since a busy machine is slow.
    let parameters = [("repair", "retry_us", 5000), ("repair", "tries", 0)];
    joints_of(&["number", "order", "repair"], &parameters)
}

/// Loads the dispatcher with these functions. A parameter is given as function, name and value.
pub fn joints_of(functions: &[&str], parameters: &[(&str, &str, u64)]) -> Joints {
    let mut joints = Joints::load().unwrap_or_else(|error| panic!("{error}"));
    for &(name, image) in FUNCTIONS.iter().filter(|(name, _)| functions.contains(name)) {
        let mut function = OpenedFunction::open(image).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(function.name(), name);
        for (_, parameter, value) in parameters.iter().filter(|(of, ..)| *of == name) {
            function.set(parameter, *value).expect("a parameter");
        }
        joints.add(function).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    joints
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

pub fn open(joints: &mut Joints, ends: SessionEnds, functions: &[&str]) {
    open_over(joints, ends, functions, WireProtocol::Udp);
}

pub fn open_over(joints: &mut Joints, ends: SessionEnds, functions: &[&str], protocol: WireProtocol) {
    let session = FunctionSession { ends, key: KEY, list: list(functions), budget_ns: 0, protocol };
    joints.open(session).unwrap_or_else(|error| panic!("{error}"));
}

/// Opens both ends of a session, each in its own dispatcher.
pub fn sides(ends: SessionEnds, functions: &[&str], protocol: WireProtocol) -> [Joints; 2] {
    [ends, other_side(&ends)].map(|ends| {
        let mut joints = joints();
        open_over(&mut joints, ends, functions, protocol);
        joints
    })
}

pub fn count(joints: &mut Joints, ends: &SessionEnds, reason: JointReason) -> u64 {
    let counts = joints.counts(ends).expect("counts");
    counts.into_iter().find(|(it, _)| *it == reason).map_or(0, |(_, count)| count)
}

/// Returns the reasons that were counted at least once.
pub fn counted(joints: &mut Joints, ends: &SessionEnds) -> Vec<(JointReason, u64)> {
    joints.counts(ends).expect("counts").into_iter().filter(|(_, count)| *count > 0).collect()
}
