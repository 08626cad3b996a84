//! What programs owe whoever runs them: help that was reviewed, no panic where nobody reads on, and the reason where rights are missing.

use std::{
    collections::VecDeque,
    env,
    fmt::Write as _,
    fs,
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, Stdio},
};

use crate::wait_for;

/// Returns the help of a program and of all its commands, in their order.
pub fn helps(program: &Path) -> String {
    let name = program.file_name().expect("a program").to_string_lossy();
    let mut out = String::new();
    let mut waiting = VecDeque::from([Vec::<String>::new()]);
    while let Some(path) = waiting.pop_front() {
        let output =
            Command::new(program).args(&path).arg("--help").env_remove("RUST_LOG").output().expect("it runs");
        assert!(output.status.success(), "{path:?}");
        let help = String::from_utf8(output.stdout).expect("text");
        let line: Vec<_> = path.iter().map(String::as_str).chain(["--help"]).collect();
        let _ = writeln!(out, "$ {name} {}\n{help}", line.join(" "));
        // Each with what is below it.
        for command in commands(&help).into_iter().rev() {
            waiting.push_front([&path[..], &[command]].concat());
        }
    }
    out
}

/// Returns the names of the commands below one, by its help.
fn commands(help: &str) -> Vec<String> {
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let list = list.take_while(|line| line.starts_with("  "));
    let names = list.filter_map(|line| {
        line.strip_prefix("  ")?.split_whitespace().next().filter(|_| !line.starts_with("   "))
    });
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

/// Compares a text with a file that reviews show. `MILLRACE_GOLDEN=write`, with `again`, which runs the test, makes it the file.
///
/// # Panics
/// It is another.
#[track_caller]
pub fn assert_as_reviewed(file: &Path, now: &str, again: &str) {
    if env::var("MILLRACE_GOLDEN").is_ok_and(|value| value == "write") {
        fs::create_dir_all(file.parent().expect("a directory")).expect("a directory");
        return fs::write(file, now).expect("written");
    }
    let before = fs::read_to_string(file).unwrap_or_default();
    let differs = now.lines().zip(before.lines()).position(|(now, before)| now != before);
    let line = differs.unwrap_or_else(|| now.lines().count().min(before.lines().count()));
    assert!(
        now == before,
        "line {} of {} is another: {:?} now, {:?} there. If that is meant: MILLRACE_GOLDEN=write {again}",
        line + 1,
        file.display(),
        now.lines().nth(line),
        before.lines().nth(line),
    );
}

/// Reads the first line of what a program says, and no further, as `2>&1 | head -n1` does; one that goes on gets SIGTERM then. Returns its
/// exit code, unless a signal ended it.
///
/// # Panics
/// It says nothing, or does not end.
pub fn exit_code_after_one_line(program: &Path, args: &[&str], goes_on: bool) -> Option<i32> {
    let (read, write) = std::io::pipe().expect("a pipe");
    let mut command = Command::new(program);
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command.stdout(write.try_clone().expect("a pipe")).stderr(write);
    let mut process = command.spawn().expect("it runs");
    drop(command);
    let mut line = String::new();
    BufReader::new(read).read_line(&mut line).expect("a line");
    assert!(!line.is_empty(), "{args:?} says nothing");
    if goes_on {
        let status = Command::new("kill").args(["-TERM", &process.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }
    wait_for(&format!("end of {args:?}"), || process.try_wait().expect("a child")).code()
}

/// Runs a program as nobody in particular: from a directory in which all may read. Returns its exit code, and what it said to standard error.
pub fn run_as_nobody(program: &Path, args: &[&str]) -> (Option<i32>, String) {
    const NOBODY: u32 = 65_534;
    let mut command = Command::new(program);
    command.args(args).uid(NOBODY).gid(NOBODY).env_remove("XDG_RUNTIME_DIR").env("HOME", "/nowhere");
    let output = command.current_dir("/").output().expect("it runs");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}
