//! Compares the system call counter with a number of calls that is known exactly. Needs root.

use std::process::Command;

use millrace_lab_kernel::syscalls::Syscalls;

const CALLS: u64 = 1000;

/// Calls of all threads of the process count, and calls of other processes do not.
#[test]
fn system_calls_are_counted_exactly() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP system_calls_are_counted_exactly: needs root");
        return;
    }
    let mut other = Command::new("sleep").arg("60").spawn().expect("sleep runs");
    let mut of_other = Syscalls::attach(other.id()).expect("the counter attaches");
    let mut of_this = Syscalls::attach(std::process::id()).expect("the counter attaches");
    assert_eq!(getpgid_calls(&mut of_this), 0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(call_getpgid);
        }
    });
    assert_eq!(getpgid_calls(&mut of_this), 2 * CALLS);
    assert_eq!(getpgid_calls(&mut of_other), 0);
    // exact: a system call is counted when it starts, and all calls of the test have returned
    let all: u64 = of_this.counts().expect("counts").iter().sum();
    assert!(all > 2 * CALLS, "clone and others are counted too: {all}");
    other.kill().and_then(|()| other.wait()).expect("sleep ends");
}

fn call_getpgid() {
    for _ in 0..CALLS {
        nix::unistd::getpgid(None).expect("getpgid");
    }
}

fn getpgid_calls(syscalls: &mut Syscalls) -> u64 {
    let number = usize::try_from(nix::libc::SYS_getpgid).expect("a number");
    // exact: a system call is counted when it starts, and all calls of the test have returned
    syscalls.counts().expect("counts")[number]
}
