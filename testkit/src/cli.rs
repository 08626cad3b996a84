//! Checks that every command-line program has to pass: its help text equals a reviewed one, a closed pipe causes no
//! panic, and an error names the missing privilege.

use std::{
    collections::VecDeque,
    env,
    fmt::Write as _,
    fs,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
};

use crate::wait_for;

/// Returns the help text of a program and of all its subcommands, in order.
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
        // Each subcommand is followed by its own subcommands.
        for command in commands(&help).into_iter().rev() {
            waiting.push_front([&path[..], &[command]].concat());
        }
    }
    out
}

/// Returns the names of the subcommands that a help text lists.
fn commands(help: &str) -> Vec<String> {
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let list = list.take_while(|line| line.starts_with("  "));
    let names = list.filter_map(|line| {
        line.strip_prefix("  ")?.split_whitespace().next().filter(|_| !line.starts_with("   "))
    });
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

/// Compares a text with a golden file. With the environment variable `MILLRACE_GOLDEN=write`, writes the text to the
/// file instead. `again` is the command that runs the test, which the panic message states.
///
/// # Panics
/// Panics if the texts differ.
#[track_caller]
pub fn assert_as_reviewed(file: &Path, now: &str, again: &str) {
    if env::var("MILLRACE_GOLDEN").is_ok_and(|value| value == "write") {
        fs::create_dir_all(file.parent().expect("a directory")).expect("a directory");
        return fs::write(file, now).expect("written");
    }
    // A missing golden file counts as empty, so the panic below tells how to write it.
    let before = fs::read_to_string(file).unwrap_or_default();
    let differs = now.lines().zip(before.lines()).position(|(now, before)| now != before);
    let line = differs.unwrap_or_else(|| now.lines().count().min(before.lines().count()));
    assert!(
        now == before,
        "line {} of {} differs: {:?} now, {:?} in the file. If the change is intended, run MILLRACE_GOLDEN=write {again}",
        line + 1,
        file.display(),
        now.lines().nth(line),
        before.lines().nth(line),
    );
}

/// Reads the first line of a program's output and closes the pipe, as `2>&1 | head -n1` does. If `goes_on` is true, the
/// program does not end by itself, so it gets SIGTERM. Returns the exit code, or `None` if a signal ended the program.
///
/// # Panics
/// Panics if the program prints nothing, or does not end.
pub fn exit_code_after_one_line(program: &Path, args: &[&str], goes_on: bool) -> Option<i32> {
    let (read, write) = std::io::pipe().expect("a pipe");
    let mut command = Command::new(program);
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command.stdout(write.try_clone().expect("a pipe")).stderr(write);
    let mut process = command.spawn().expect("it runs");
    // `command` holds this process's copies of the pipe's write end. While they are open, the read below would wait
    // forever for a program that ends without any output.
    drop(command);
    let mut line = String::new();
    // The reader is dropped at the end of this statement, which closes the pipe: all later writes of the program fail
    // with EPIPE.
    BufReader::new(read).read_line(&mut line).expect("a line");
    assert!(!line.is_empty(), "{args:?} says nothing");
    if goes_on {
        // `Child::kill` would send SIGKILL, which no program can handle. The process ID cannot belong to another
        // process, because the child was not waited for yet.
        let status = Command::new("kill").args(["-TERM", &process.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }
    wait_for(&format!("end of {args:?}"), || process.try_wait().expect("a child")).code()
}

/// Runs a program that refuses to start. Returns its exit code, or `None` if a signal ended it, and its standard error.
///
/// # Panics
/// Panics if the program goes on running. The panic also kills the program.
pub fn run_until_refused(mut command: Command) -> (Option<i32>, String) {
    struct KilledChild(Child);
    impl Drop for KilledChild {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut process = KilledChild(command.spawn().expect("it runs"));
    let mut stderr = process.0.stderr.take().expect("a pipe");
    // A thread reads the program's standard error at the same time. Otherwise a program that writes more than a pipe
    // holds would block, and never end.
    let said = thread::spawn(move || {
        let mut said = String::new();
        stderr.read_to_string(&mut said).expect("text");
        said
    });
    let status = wait_for(&format!("the refusal of {command:?}"), || process.0.try_wait().expect("a child"));
    (status.code(), said.join().expect("a text"))
}

/// Runs a program as an unprivileged user, from a directory that everybody may read. Returns its exit code and its
/// standard error.
pub fn run_as_nobody(program: &Path, args: &[&str]) -> (Option<i32>, String) {
    const NOBODY: u32 = 65_534;
    let mut command = Command::new(program);
    // When root sets another user ID, `Command` also drops root's supplementary groups. XDG_RUNTIME_DIR and HOME would
    // name directories of root, which this user may not enter.
    command.args(args).uid(NOBODY).gid(NOBODY).env_remove("XDG_RUNTIME_DIR").env("HOME", "/nowhere");
    let output = command.current_dir("/").output().expect("it runs");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}
