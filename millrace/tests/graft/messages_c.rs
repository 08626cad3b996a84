//! Tests of the message API from C: the example program, built and run as its users do, and the effect of fork() on a
//! session.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{
    messages::{MessageHost, hosts},
    site::{GraftSite, wait_for},
};

const GRAFT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../graft");

/// Returns the directory where the library was built.
fn built() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

fn has(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok();
    if !found {
        println!("SKIP: there is no {tool}");
    }
    found
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success(), "{command:?}: {said}");
    said
}

/// Installs the library as a package would, and builds a program against it as the example's Makefile does.
fn build(site: &GraftSite, source: &Path) -> PathBuf {
    let root = site.path("root");
    let mut install = Command::new("make");
    install.arg("-C").arg(Path::new(GRAFT).join("..")).args(["--no-print-directory", "install-messages"]);
    install.arg(format!("PREFIX={}", root.display())).arg(format!("GATE_BUILD={}", built().display()));
    run(install.env_remove("MAKEFLAGS"));
    let directory = site.path("program");
    fs::create_dir_all(&directory).unwrap();
    let name = "telemetry.c";
    fs::copy(source, directory.join(name)).unwrap();
    fs::copy(Path::new(GRAFT).join("examples/telemetry/Makefile"), directory.join("Makefile")).unwrap();
    let mut make = Command::new("make");
    make.arg("-C").arg(&directory).env("PKG_CONFIG_PATH", root.join("lib/pkgconfig"));
    run(make.env("LDFLAGS", format!("-Wl,-rpath,{}", root.join("lib").display())).env_remove("MAKEFLAGS"));
    directory.join("telemetry")
}

fn as_nobody(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid", "nobody", "--regid", "nogroup", "--clear-groups", "--no-new-privs"])
        .arg(program);
    command
}

fn socket(host: &MessageHost<'_>) -> PathBuf {
    host.site.path(&format!("m{}.sock", host.side))
}

#[test]
fn c_example_sends_lines() {
    if !has("cc") || !has("pkg-config") || !has("make") {
        return;
    }
    let Some(site) = GraftSite::new("example") else { return };
    let [near, far] = hosts(&site, "");
    let program = build(&site, &Path::new(GRAFT).join("examples/telemetry/telemetry.c"));
    let telemetry = |host: &MessageHost<'_>, args: &[&str]| {
        let mut command = as_nobody(&program);
        command.arg("-s").arg(socket(host)).args(args);
        command
    };
    let said = telemetry(&near, &["send", "other", "teleport"]).output().unwrap();
    assert!(String::from_utf8_lossy(&said.stderr).contains("there is no service teleport"));
    let log = site.path("listen.log");
    let mut listening = telemetry(&far, &["listen", "other"]);
    listening.stdout(Stdio::piped()).stderr(fs::File::create(&log).unwrap());
    let listening = listening.spawn().unwrap();
    wait_for("a listener", || fs::read_to_string(&log).unwrap().contains("listening"));
    let mut sending = telemetry(&near, &["send", "other", "reliability", "1000"]);
    sending.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut sending = sending.spawn().unwrap();
    let lines: String = (0..500).map(|number| format!("line {number}\n")).collect();
    sending.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let sent = sending.wait_with_output().unwrap();
    let words = String::from_utf8_lossy(&sent.stderr).into_owned();
    assert!(
        sent.status.success() && words.contains("graft selective") && words.contains("sealed"),
        "{words}"
    );
    let got = listening.wait_with_output().unwrap();
    assert!(got.status.success(), "{}", fs::read_to_string(&log).unwrap());
    let mut got: Vec<_> = String::from_utf8(got.stdout).unwrap().lines().map(str::to_owned).collect();
    got.sort_by_key(|line| line[5..].parse::<u32>().unwrap());
    assert_eq!(got, lines.lines().collect::<Vec<_>>());
}

const FORK: &str = r#"
#include <millrace_messages.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MUST(status, call)                                                             \
	do {                                                                           \
		int got = (call);                                                      \
		if (got != (status)) {                                                 \
			printf("%d: %s: %d, %s\n", __LINE__, #call, got, millrace_messages_error()); \
			return 1;                                                      \
		}                                                                      \
	} while (0)

static int child(millrace_messages_session *session)
{
	char message[100];
	size_t bytes;

	MUST(MILLRACE_MESSAGES_FORKED, millrace_messages_send(session, "child", 5));
	MUST(MILLRACE_MESSAGES_FORKED, millrace_messages_recv(session, message, sizeof(message), &bytes));
	MUST(MILLRACE_MESSAGES_FORKED, millrace_messages_finish(session));
	MUST(MILLRACE_MESSAGES_FORKED, millrace_messages_renegotiate(session, "once", NULL));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_close(session));
	return 0;
}

static int stream(const char *socket, millrace_messages_listener *listener)
{
	millrace_messages_session *near, *far;
	char piece[8];
	size_t bytes;

	MUST(MILLRACE_MESSAGES_OK, millrace_messages_init(socket, "other", "test", &near));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_negotiate(near, "reliability order", NULL));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_validate(near, -1));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_accept(listener, &far));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_write(near, "a stream", 8, &bytes));
	if (bytes != 8)
		return 10;
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_finish(near));
	MUST(MILLRACE_MESSAGES_INVALID, millrace_messages_read(far, piece, 0, &bytes));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_read(far, piece, 3, &bytes));
	if (bytes != 3 || memcmp(piece, "a s", 3))
		return 11;
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_read(far, piece, sizeof(piece), &bytes));
	if (bytes != 5 || memcmp(piece, "tream", 5))
		return 12;
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_read(far, piece, sizeof(piece), &bytes));
	if (bytes)
		return 13;
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_close(near));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_close(far));
	return 0;
}

int main(int argc, char **argv)
{
	millrace_messages_listener *listener;
	millrace_messages_session *near, *far;
	millrace_messages_agreed agreed;
	millrace_messages_event event;
	char message[100];
	size_t bytes = 0;
	int status;

	if (argc != 3 || !millrace_messages_version()[0])
		return 2;
	MUST(MILLRACE_MESSAGES_NO_DAEMON, millrace_messages_init("/nowhere", "other", "test", &near));
	MUST(MILLRACE_MESSAGES_INVALID, millrace_messages_init(argv[1], NULL, "test", &near));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_listen(argv[2], "other", "test", &listener));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_listener_set_nonblocking(listener, 1));
	MUST(MILLRACE_MESSAGES_AGAIN, millrace_messages_accept(listener, &far));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_listener_set_nonblocking(listener, 0));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_init(argv[1], "other", "test", &near));
	MUST(MILLRACE_MESSAGES_NOT_AGREED, millrace_messages_send(near, "early", 5));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_negotiate(near, "reliability once", NULL));
	MUST(MILLRACE_MESSAGES_NOT_AGREED, millrace_messages_send(near, "early", 5));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_validate(near, -1));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_agreement(near, &agreed));
	if (strcmp(agreed.graft, "selective") || !strstr(agreed.services, "reliability") || !agreed.is_sealed)
		return 3;
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_accept(listener, &far));
	switch (fork()) {
	case 0:
		_exit(child(near));
	default:
		wait(&status);
		if (status)
			return 4;
	}
	/* The child has closed it: the parent's is as it was. */
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_send(near, "the parent's", 12));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_set_timeout(far, 30000));
	MUST(MILLRACE_MESSAGES_TOO_LONG, millrace_messages_recv(far, message, 5, &bytes));
	if (bytes != 12)
		return 5;
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_recv(far, message, sizeof(message), &bytes));
	if (bytes != 12 || memcmp(message, "the parent's", 12))
		return 6;
	MUST(MILLRACE_MESSAGES_AGAIN, millrace_messages_next_event(far, &event));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_set_nonblocking(far, 1));
	MUST(MILLRACE_MESSAGES_AGAIN, millrace_messages_recv(far, message, sizeof(message), &bytes));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_set_nonblocking(far, 0));
	MUST(MILLRACE_MESSAGES_INVALID, millrace_messages_write(near, "no order", 8, &bytes));
	MUST(MILLRACE_MESSAGES_TOO_LONG, millrace_messages_send(near, message, MILLRACE_MESSAGES_MESSAGE_MAX + 1));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_finish(near));
	MUST(MILLRACE_MESSAGES_FINISHED, millrace_messages_send(near, "late", 4));
	MUST(MILLRACE_MESSAGES_FINISHED, millrace_messages_recv(far, message, sizeof(message), &bytes));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_next_event(far, &event));
	if (event.kind != MILLRACE_MESSAGES_EVENT_FINISHED)
		return 7;
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_close(far));
	MUST(MILLRACE_MESSAGES_OK, millrace_messages_close(near));
	MUST(0, stream(argv[1], listener));
	millrace_messages_listener_close(listener);
	puts("done");
	return 0;
}
"#;

/// Struct layouts and constants in the C header must be those of the library. A forked child cannot use its parent's
/// session.
#[test]
fn every_c_function_works_and_a_forked_child_cannot_use_the_session() {
    if !has("cc") || !has("pkg-config") || !has("make") {
        return;
    }
    let Some(site) = GraftSite::new("fork") else { return };
    let [near, far] = hosts(&site, crate::streams::IN_ORDER);
    fs::write(site.path("fork.c"), FORK).unwrap();
    let program = build(&site, &site.path("fork.c"));
    let mut command = as_nobody(&program);
    assert_eq!(run(command.arg(socket(&near)).arg(socket(&far))), "done\n");
}

#[test]
fn the_header_is_c99_and_cplusplus() {
    for (tool, standard, language) in [("cc", "-std=c99", "c"), ("c++", "-std=c++11", "c++")] {
        if !has(tool) {
            continue;
        }
        let mut command = Command::new(tool);
        command.args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-x", language, "-fsyntax-only"]);
        run(command.arg(Path::new(GRAFT).join("messages/include/millrace_messages.h")));
    }
}

/// The header is written by hand, so its functions are compared with the library's symbols.
#[test]
fn the_library_exports_what_the_header_declares() {
    if !has("nm") {
        return;
    }
    let mut names = Command::new("nm");
    names.args(["-D", "--defined-only"]).arg(built().join("libmillrace_messages.so"));
    let text = run(&mut names);
    let mut exported: Vec<_> = text.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    exported.sort_unstable();
    let header = fs::read_to_string(Path::new(GRAFT).join("messages/include/millrace_messages.h")).unwrap();
    let mut declared: Vec<_> = header
        .lines()
        .filter(|line| !line.starts_with([' ', '\t', '/']))
        .filter_map(|line| line.split_once("millrace_messages_").filter(|(_, rest)| rest.contains('(')))
        .map(|(_, rest)| format!("millrace_messages_{}", rest.split('(').next().unwrap()))
        .collect();
    declared.sort_unstable();
    assert_eq!(exported, declared);
}
