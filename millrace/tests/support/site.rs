//! The hosts of a test's relays and peers: loopback for relays that forward in userspace, network namespaces for relays
//! that forward in the kernel, because the kernel forwards only packets that arrive on an interface.
//!
//! The same tests are built into several test programs. In programs whose name begins with `kernel`, the relays forward
//! in the kernel.

#![allow(dead_code, reason = "each program uses a part")]

use std::{
    cell::RefCell,
    fs::File,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use millrace_lab::lab::{Lab, LabNode, Topology};
use millrace_relay_daemon::{
    config::{Config, EngineChoice},
    status::Status,
};
use millrace_testkit::wait_until;
use nix::{
    sched::{CloneFlags, setns},
    unistd::geteuid,
};

/// The relays' port. In a namespace every port is free, and a relay that forwards in the kernel needs a known port.
const PORT: u16 = 4443;
const PEERS: &str = "peers";
const RELAYS: [&str; 2] = ["relay", "relay2"];

/// Returns whether this program's relays should forward in the kernel.
pub fn wants_kernel() -> bool {
    env!("CARGO_CRATE_NAME").starts_with("kernel")
}

/// Returns whether this program's peers are WebTransport clients.
pub fn wants_web() -> bool {
    env!("CARGO_CRATE_NAME").contains("web")
}

/// Waits until the kernel has forwarded a part of the media, if the relay forwards in the kernel. How large that part
/// is depends on the machine's load, and `millrace-lab bench relay` measures it. The packet counts in a status are
/// those that the kernel had reached at the previous status.
pub fn until_forwarded(status: impl FnMut() -> Status) {
    wait_until("packets forwarded by the kernel, or none without engine `kernel`", status, |status| {
        (status.totals.kernel.packets > 0) == (status.engine.name == "kernel")
    });
}

/// Makes relays in this process log to the output of the test, which a failed test shows.
pub fn log() {
    let builder = tracing_subscriber::fmt().with_test_writer().with_ansi(false);
    let _ = builder.with_env_filter("warn,millrace=info").try_init(); // an error means that the log is set up already
}

/// The hosts of all relays of one test, which has a thread of its own. If the relays forward in the kernel, that thread
/// is in the peers' namespace, and so are processes that it starts.
pub struct RelaySite {
    lab: Option<Lab>,
    /// The network namespace of the test's thread before the test.
    home: File,
    used: AtomicUsize,
}

thread_local!(static SITE: RefCell<Weak<RelaySite>> = const { RefCell::new(Weak::new()) });

impl RelaySite {
    /// Returns the calling test's network namespaces, and makes them at the first call.
    pub fn of_this_test() -> Arc<Self> {
        SITE.with_borrow_mut(|site| {
            site.upgrade().unwrap_or_else(|| {
                let new = Arc::new(Self::new());
                *site = Arc::downgrade(&new);
                new
            })
        })
    }

    fn new() -> Self {
        // exact: a thread's own namespace does not change by itself
        let home = File::open("/proc/thread-self/ns/net").unwrap();
        let lab = wants_kernel().then(lab).flatten();
        if let Some(lab) = &lab {
            let peers = File::open(lab.node(PEERS).unwrap().netns().path()).unwrap();
            setns(peers, CloneFlags::CLONE_NEWNET).unwrap();
        }
        Self { lab, home, used: AtomicUsize::new(0) }
    }

    /// Returns the host for one more relay.
    pub fn host(&self) -> RelayHost<'_> {
        let used = self.used.fetch_add(1, Ordering::Relaxed);
        RelayHost(self.lab.as_ref().map(|lab| lab.node(RELAYS[used % RELAYS.len()]).unwrap()))
    }

    /// Returns the host of an earlier relay.
    pub fn host_at(&self, ip: IpAddr) -> Option<RelayHost<'_>> {
        let has = |node: &&LabNode| node.interfaces().iter().any(|interface| interface.v4 == ip);
        self.lab.as_ref()?.nodes().iter().find(has).map(|node| RelayHost(Some(node)))
    }
}

impl Drop for RelaySite {
    fn drop(&mut self) {
        if self.lab.is_some() {
            setns(&self.home, CloneFlags::CLONE_NEWNET).unwrap();
        }
    }
}

fn lab() -> Option<Lab> {
    if !geteuid().is_root() {
        println!("SKIP engine kernel needs root: done with engine user");
        return None;
    }
    let mut topology = Topology::default();
    topology.connect(PEERS, RELAYS[0]);
    topology.connect(RELAYS[0], RELAYS[1]);
    Some(Lab::new(&topology).unwrap())
}

/// The host of a relay: a network namespace of the emulated network, or this machine if the relay forwards in
/// userspace.
#[derive(Clone, Copy)]
pub struct RelayHost<'a>(pub Option<&'a LabNode>);

impl RelayHost<'_> {
    pub fn v4(&self) -> Ipv4Addr {
        self.0.map_or(Ipv4Addr::LOCALHOST, LabNode::addr_v4)
    }

    pub fn v6(&self) -> Ipv6Addr {
        self.0.map_or(Ipv6Addr::LOCALHOST, LabNode::addr_v6)
    }

    /// Returns the port to listen on; 0 lets the system choose.
    pub fn port(&self, index: u16) -> u16 {
        if self.0.is_some() { PORT + index } else { 0 }
    }

    pub fn configure(&self, config: &mut Config) {
        config.http = None;
        config.engine = EngineChoice::User;
        if let Some(node) = self.0
            && wants_kernel()
        {
            config.engine = EngineChoice::Kernel;
            config.interfaces = node.interfaces().iter().map(|interface| interface.device.clone()).collect();
        }
    }

    /// Runs `start` in the network namespace of this host.
    pub fn enter<T: Send>(&self, start: impl FnOnce() -> T + Send) -> T {
        match self.0 {
            Some(node) => node.enter(start).unwrap(),
            None => start(),
        }
    }
}
