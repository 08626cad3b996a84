//! Tests `millrace-lab` as a program: its help, and its errors.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use millrace_testkit::cli;

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_millrace-lab"))
}

#[test]
fn lab_help_equals_the_golden_file() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/cli.txt");
    cli::assert_as_reviewed(&file, &cli::helps(program()), "cargo test -p millrace-lab --test program");
}

#[test]
fn closed_output_pipe_ends_a_command_cleanly() {
    let head = |args: &[&str], goes_on| {
        let code = cli::exit_code_after_one_line(program(), args, goes_on);
        assert!(code != Some(101), "{args:?}: {code:?}");
    };
    for args in [&["--help"][..], &["bench", "--help"], &["lab", "hostile", "--list"], &["lab", "status"]] {
        head(args, false);
    }
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP closed_output_pipe_ends_a_command_cleanly: labs need root");
        return;
    }
    head(&["lab", "run", "--", "sh", "-c", "yes"], false);
    head(&["lab", "up"], true);
}

#[test]
fn lab_command_without_root_names_the_missing_privilege() {
    if !nix::unistd::geteuid().is_root() {
        println!(
            "SKIP lab_command_without_root_names_the_missing_privilege: needs root, to be somebody else"
        );
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("permissions");
    let copy = dir.path().join("millrace-lab");
    fs::copy(program(), &copy).expect("a copy");
    for args in [&["lab", "up"][..], &["lab", "run", "--", "true"], &["bench", "relay"]] {
        let (code, said) = cli::run_as_nobody(&copy, args);
        assert_eq!(code, Some(1), "{args:?}: {said}");
        assert!(said.contains("root") && !said.contains("libbpf"), "{args:?}: {said}");
    }
}
