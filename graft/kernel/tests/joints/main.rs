//! Packet grafts: the XDP root that they share with the gate, frames one by one, and functions on a path that loses packets.
//! Needs root.

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
use millrace_graft_kernel::joint::{Ends, Function, Joints, List, Protocol, Reason, Session};

pub const KEY: [u8; 16] = *b"sixteen bytes, !";

/// With functions that may be in any list of a test.
pub fn joints() -> Joints {
    // Round trips are short here, and what is asked for too late is too old. A machine that is busy with something else is
    // not a reason to give up.
    let parameters = [("repair", "retry_us", 5000), ("repair", "tries", 0)];
    joints_of(&["number", "order", "repair"], &parameters)
}

/// With these functions, and other values of their parameters: function, parameter, value.
pub fn joints_of(functions: &[&str], parameters: &[(&str, &str, u64)]) -> Joints {
    let mut joints = Joints::load().unwrap_or_else(|error| panic!("{error}"));
    for &(name, image) in FUNCTIONS.iter().filter(|(name, _)| functions.contains(name)) {
        let mut function = Function::open(image).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(function.name(), name);
        for (_, parameter, value) in parameters.iter().filter(|(of, ..)| *of == name) {
            function.set(parameter, *value).expect("a parameter");
        }
        joints.add(function).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    joints
}

pub fn list(functions: &[&str]) -> List {
    let sum = functions.iter().flat_map(|name| name.bytes()).map(u16::from).sum();
    List { functions: functions.iter().map(|&name| name.to_owned()).collect(), id: sum }
}

pub fn ends(local: &str, remote: &str) -> Ends {
    let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
    Ends { local: address(local), remote: address(remote) }
}

pub fn other_side(ends: &Ends) -> Ends {
    Ends { local: ends.remote, remote: ends.local }
}

pub fn open(joints: &mut Joints, ends: Ends, functions: &[&str]) {
    open_over(joints, ends, functions, Protocol::Udp);
}

pub fn open_over(joints: &mut Joints, ends: Ends, functions: &[&str], protocol: Protocol) {
    let session = Session { ends, key: KEY, list: list(functions), budget_ns: 0, protocol };
    joints.open(session).unwrap_or_else(|error| panic!("{error}"));
}

/// Both ends of a session: its own, and the other.
pub fn sides(ends: Ends, functions: &[&str], protocol: Protocol) -> [Joints; 2] {
    [ends, other_side(&ends)].map(|ends| {
        let mut joints = joints();
        open_over(&mut joints, ends, functions, protocol);
        joints
    })
}

pub fn count(joints: &mut Joints, ends: &Ends, reason: Reason) -> u64 {
    let counts = joints.counts(ends).expect("counts");
    counts.into_iter().find(|(it, _)| *it == reason).map_or(0, |(_, count)| count)
}

/// All that were counted.
pub fn counted(joints: &mut Joints, ends: &Ends) -> Vec<(Reason, u64)> {
    joints.counts(ends).expect("counts").into_iter().filter(|(_, count)| *count > 0).collect()
}
