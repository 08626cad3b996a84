//! Checks that the observer reports each kernel context by its name while a load runs networking there. Needs root, and
//! the programs that the loads call.
//! Runs: alone, since the traffic of other tests would show the same names.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::time::{Duration, Instant};

use millrace_lab::bench::{ContextNames, names_by_load};

const LOADS: usize = 12;

#[test]
fn cost_observer_names_each_kernel_context_under_load() {
    const TEST: &str = "cost_observer_names_each_kernel_context_under_load";
    if !nix::unistd::geteuid().is_root() {
        return println!("SKIP {TEST}: needs root");
    }
    let mut wrong = Vec::new();
    let mut number = 0;
    let mut before = Instant::now();
    // A load is done as soon as the observer has reported all its names, which takes less than a second on a machine
    // with free CPUs.
    for (load, names) in names_by_load(Duration::from_secs(30)) {
        println!("{load}: {names:?} after {:?}", std::mem::replace(&mut before, Instant::now()).elapsed());
        match names {
            Ok(ContextNames::Complete) => {}
            Ok(ContextNames::Missing(reason)) => println!("SKIP {TEST}, {load}: {reason}"),
            Ok(ContextNames::Incomplete { absent, last }) => {
                wrong.push(format!("{load}: the observer did not report {}; {last}", absent.join(", ")));
            }
            Err(error) => wrong.push(format!("{load}: {error:#}")),
        }
        number += 1;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(number, LOADS);
}
