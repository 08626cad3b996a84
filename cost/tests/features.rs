//! Tests that the error on a kernel before Linux 6.1 names the missing BPF feature. Needs root.

use millrace_cost::kernel::missing_features;
use millrace_cost::{Config, Error, Observer};

/// `scripts/kernels.sh 5.10` runs this test on an old kernel. On a new one it checks that no feature is missing.
#[test]
fn error_on_an_old_kernel_names_the_missing_feature() {
    if !nix::unistd::geteuid().is_root() {
        return println!("SKIP error_on_an_old_kernel_names_the_missing_feature: needs root");
    }
    let missing = missing_features();
    match Observer::start(Config::new().expect("a taxonomy")) {
        Ok(_) => assert!(missing.is_empty(), "the observer runs without {missing:?}"),
        Err(error) => {
            println!("{error}");
            assert!(matches!(error, Error::Old { .. }) && !missing.is_empty(), "{error:?}");
            assert!(missing.iter().all(|feature| error.to_string().contains(feature)), "{error}");
        }
    }
}
