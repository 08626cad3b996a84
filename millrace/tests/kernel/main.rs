//! Tests of a relay that forwards in the kernel between unmodified peers, each in a network namespace of its own. They
//! need root.

#![allow(clippy::unwrap_used)]

mod datagrams;
mod deferral;
mod forward;
mod gate;
mod handover;
mod judged;
mod life;
mod marks;
mod net;
mod open;
#[allow(dead_code)]
#[path = "../relay/peer.rs"]
mod peer;
mod records;
mod shards;
mod share;
#[path = "../support/site.rs"]
mod site;
mod strangers;
mod trace;
mod wire;

use millrace_testkit::net as frames;
use std::sync::Mutex;

/// Lock that lets one test run at a time: the tests share the CPUs that they measure, and this process's files.
pub static ALONE: Mutex<()> = Mutex::new(());

macro_rules! needs_root {
    ($name:ident) => {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP {}: needs root", stringify!($name));
            return;
        }
        let _alone = crate::ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    };
}
pub(crate) use needs_root;
