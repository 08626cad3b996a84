//! Tests of hostile clients that change their ports, connection IDs or keys all the time while other clients connect.
//! The hostile clients have sent SETUP, since the kernel has no state of a session before that.

use std::{
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::Duration,
};

use millrace_lab::{
    hostile::peer::{HostilePeer, PeerTarget},
    transport::LabTransport,
};
use millrace_relay_daemon::status::Status;
use millrace_testkit::{StopOnDrop, wait_for};

use crate::{
    needs_root,
    net::{KernelNetwork, PORT},
};

/// Number of times that the hostile client changes its port, ID or key before another client connects.
const CHANGES: u64 = 500;
const PAUSE: Duration = Duration::from_millis(2);
/// Largest number of connections at the same time: the hostile client's, the new client's, and one of the hostile
/// client that the relay has just closed.
const CONNECTIONS: u64 = 3;

/// A hostile client that changes its port, ID or key until `stops` is set. It runs in a thread of its own in the
/// network namespace of a peer's host.
struct StrangerClient<'a> {
    net: &'a KernelNetwork,
    target: PeerTarget,
    changes: AtomicU64,
    stops: AtomicBool,
}

impl<'a> StrangerClient<'a> {
    fn new(net: &'a KernelNetwork) -> Self {
        let target = PeerTarget {
            addr: SocketAddr::new(net.relay().addr_v4().into(), PORT),
            name: "localhost".into(),
            path: String::new(),
            transport: LabTransport::Raw,
        };
        Self { net, target, changes: AtomicU64::new(0), stops: AtomicBool::new(false) }
    }

    /// Repeats `change` while `meanwhile` runs. The client reconnects if the relay closes it.
    fn while_changing<T>(
        &self,
        change: impl Fn(&mut HostilePeer) + Sync,
        meanwhile: impl FnOnce(&Self) -> T,
    ) -> T {
        let node = self.net.lab.node("sub1").unwrap();
        let run = || {
            while !self.stops.load(Relaxed) {
                let mut peer = HostilePeer::establish(&self.target).unwrap();
                while peer.closed.is_none() && !self.stops.load(Relaxed) {
                    change(&mut peer);
                    self.changes.fetch_add(1, Relaxed);
                    peer.pump(PAUSE, |_| false);
                }
                peer.close().unwrap();
            }
        };
        thread::scope(|scope| {
            // The client must end even if the test fails, since the scope waits for its thread.
            let _stop = StopOnDrop(&self.stops);
            scope.spawn(move || node.enter(run).unwrap());
            meanwhile(self)
        })
    }

    fn wait_for_changes(&self) {
        let before = self.changes.load(Relaxed);
        wait_for("changes", || self.changes.load(Relaxed) >= before + CHANGES);
    }
}

/// Checks that the kernel serves a new client, and that the queue of commands to the kernel has no more than
/// [`CONNECTIONS`] entries.
fn a_newcomer_is_served(net: &KernelNetwork) {
    let _newcomer = net.peer("sub2");
    let address = IpAddr::from(net.lab.node("sub2").unwrap().addr_v4());
    let is_served = |status: &Status| {
        let waiting = status.engine.commands_waiting;
        assert!(waiting <= CONNECTIONS, "{waiting} in the queue");
        let mut newcomers = status.sessions.iter().filter(|session| session.remote.ip() == address);
        newcomers.any(|newcomer| newcomer.kernel_ready == Some(true))
    };
    net.until("the kernel may send to the newcomer", is_served);
}

/// Until a client's new address has answered a path challenge, only quinn sends to it, so the change of port must not
/// cause a command to the kernel.
#[test]
fn unvalidated_client_ports_cause_no_kernel_commands() {
    needs_root!(unvalidated_client_ports_cause_no_kernel_commands);
    let net = KernelNetwork::new(2, false, |_| {});
    let hop = |peer: &mut HostilePeer| {
        peer.answers_challenges = false;
        peer.hop().unwrap();
    };
    StrangerClient::new(&net).while_changing(hop, |stranger| {
        stranger.wait_for_changes();
        // Commands are expected for keys and for the client's first path. quinn also returns to this path if the client
        // had to wait. exact: the count of kernel commands may grow; the test only checks an upper bound
        let commands = net.status().engine.commands;
        assert!(commands < CHANGES / 4, "{commands} commands");
        a_newcomer_is_served(&net);
    });
}

/// The client answers path challenges from each port, so each change causes a command to the kernel. A newer command
/// replaces one that still waits.
#[test]
fn constant_port_changes_of_a_client_prevent_no_kernel_forwarding() {
    needs_root!(constant_port_changes_of_a_client_prevent_no_kernel_forwarding);
    let net = KernelNetwork::new(2, false, |_| {});
    StrangerClient::new(&net).while_changing(
        |peer| peer.hop().unwrap(),
        |stranger| {
            stranger.wait_for_changes();
            net.until("paths that have answered", |status| status.engine.commands > CONNECTIONS * 8);
            a_newcomer_is_served(&net);
        },
    );
}

#[test]
fn constant_connection_id_or_key_changes_prevent_no_kernel_forwarding() {
    needs_root!(constant_connection_id_or_key_changes_prevent_no_kernel_forwarding);
    let changes: [fn(&mut HostilePeer); 2] = [
        |peer| drop(peer.change_ids()), // an error means that the relay has closed the connection
        |peer| drop(peer.update_keys()),
    ];
    for change in changes {
        let net = KernelNetwork::new(2, false, |_| {});
        StrangerClient::new(&net).while_changing(change, |stranger| {
            stranger.wait_for_changes();
            a_newcomer_is_served(&net);
        });
    }
}
