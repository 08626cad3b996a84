//! Tests that the observer's BPF maps use little memory. Needs root.

use millrace_cost::{Config, Observer};

/// Environment variable with the number of possible CPUs that a virtual machine was configured to have.
const POSSIBLE: &str = "MILLRACE_POSSIBLE_CPUS";
/// Limit of the BPF maps' memory in bytes, on a machine with few CPUs online.
const MOST_BYTES: u64 = 16 << 20;
const FEW_CPUS: usize = 4;

/// Returns the size in bytes of all BPF maps that this process has open.
fn maps() -> u64 {
    let mut sum = 0;
    // exact: the set of BPF maps no longer changes, because the observer makes all of them when it starts
    for entry in std::fs::read_dir("/proc/self/fdinfo").expect("descriptors") {
        // A listed descriptor may be closed by now, so that its entry cannot be read.
        let text = std::fs::read_to_string(entry.expect("an entry").path()).unwrap_or_default();
        let field = |name| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        if field("map_id:").is_some() {
            sum += field("memlock:").unwrap_or(0);
        }
    }
    sum
}

/// `scripts/kernels/cost.sh` runs this test on a machine with 4 CPUs online and 240 possible.
#[test]
fn map_memory_does_not_depend_on_possible_cpus() {
    if !nix::unistd::geteuid().is_root() {
        return println!("SKIP map_memory_does_not_depend_on_possible_cpus: needs root");
    }
    let possible = libbpf_rs::num_possible_cpus().expect("a number");
    if let Ok(wanted) = std::env::var(POSSIBLE) {
        assert_eq!(possible.to_string(), wanted);
    }
    let mut observer = Observer::start(Config::new().expect("a taxonomy")).expect("it starts");
    let report = observer.report().expect("a report");
    let online = report.cpus.len();
    let bytes = maps();
    println!("{:.1} MiB of maps: {online} CPUs of {possible}", bytes as f64 / f64::from(1 << 20));
    assert!(bytes > 0);
    if online <= FEW_CPUS {
        assert!(bytes <= MOST_BYTES, "{bytes}: {online} CPUs of {possible}");
    }
}
