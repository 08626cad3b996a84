//! The gate's programs over BPF_PROG_TEST_RUN.

use super::*;

fn root(test: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("SKIP {test}: needs root");
    }
    root
}

#[test]
fn loads() {
    if root("loads") {
        let gate = Gate::load(&Config::default()).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(gate.statistics().expect("statistics").scopes.len(), 1);
    }
}
