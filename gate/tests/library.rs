//! Tests of the library's Rust and C interfaces with a loaded gate.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::SocketAddr,
    process::{Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use millrace_gate::{
    Error, Gate, ListEntry, Policy, XdpMode,
    policy::TokenKeys,
    token::{self, GateKey, Token},
};
use support::{GateSite, inside, is_root, wait_for};

const WEB: &str = "[[scope]]\nname = \"web\"\nport = 443\ncount = \"application\"\n";

#[test]
fn connections_of_a_client_count_for_its_quota_until_handle_is_dropped() {
    if !is_root() {
        return;
    }
    let gate = Gate::new(&Policy::parse(WEB).unwrap()).unwrap();
    let scope = gate.scope("web").unwrap();
    let client = "192.0.2.7".parse().unwrap();
    let of_a_prefix = ["2001:db8::1", "2001:db8::2"].map(|address| address.parse().unwrap());
    let connections: Vec<_> = std::thread::scope(|threads| {
        let each = || (0..100).map(|_| scope.connection(client).unwrap()).collect::<Vec<_>>();
        let threads: Vec<_> = (0..4).map(|_| threads.spawn(each)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let others = of_a_prefix.map(|client| scope.connection(client).unwrap());
    assert_eq!(scope.connections(client).unwrap(), 400);
    assert_eq!(scope.connections(of_a_prefix[0]).unwrap(), 2, "a /64 is one client");
    assert_eq!(gate.clients("web").unwrap().len(), 2);

    // A connection stays counted when the policy changes, and dropping a connection works after the gate has been
    // dropped.
    gate.set_policy(&Policy::parse(&format!("{WEB}rules.quota = {{ connections = 1 }}\n")).unwrap()).unwrap();
    assert_eq!(scope.connections(client).unwrap(), 400);
    std::thread::scope(|threads| drop(threads.spawn(|| drop(connections))));
    assert_eq!(scope.connections(client).unwrap(), 0);
    drop(gate);
    drop(others);
    assert_eq!(scope.connections(of_a_prefix[0]).unwrap(), 0);
    assert_eq!(scope.dec(client).unwrap(), 0, "never less than none");
}

#[test]
fn invalid_use_of_the_gate_library_is_named_in_the_error() {
    if !is_root() {
        return;
    }
    let gate = Gate::new(&Policy::parse(WEB).unwrap()).unwrap();
    assert!(
        matches!(gate.scope("wbe"), Err(Error::NoScope { name, known }) if name == "wbe" && known == ["web"])
    );
    assert!(
        matches!(gate.attach("nowhere0", XdpMode::Auto), Err(Error::Interface { name, .. }) if name == "nowhere0")
    );
    let prefix = "192.0.2.0/24".parse().unwrap();
    assert!(matches!(gate.list(Some("wbe"), prefix, ListEntry::Block), Err(Error::NoScope { .. })));
    let other = Policy::parse(&format!("load.client_prefix_v4 = 24\n{WEB}")).unwrap();
    assert!(matches!(gate.set_policy(&other), Err(Error::Load)));
    assert_eq!(gate.rules(), Policy::parse(WEB).unwrap().rules, "the policy is still the first");
}

/// Checks that a gate without shared keys makes new keys regularly, and accepts every token for its whole lifetime.
#[test]
fn gates_own_token_keys_rotate_without_invalidating_tokens() {
    if !is_root() {
        return;
    }
    let begin = Instant::now();
    let gate =
        Gate::new(&Policy::parse(&format!("{WEB}rules.retry = {{ lifetime = 1 }}\n")).unwrap()).unwrap();
    let keys = || gate.token_keys();
    let known = |key: &GateKey| (0..2).any(|slot| keys().get(slot) == Some(key));
    let first = (0..2).find_map(|slot| keys().get(slot).cloned()).unwrap();
    // `before` is the last time at which the gate was seen with only one token key. `begin` is the time before the gate
    // existed.
    let mut before = begin;
    let (is_known, after) = wait_for("a second key", || {
        let now = Instant::now();
        let keys = keys();
        let is_there = (0..2).all(|slot| keys.get(slot).is_some());
        before = if is_there { before } else { now };
        let is_known = (0..2).any(|slot| keys.get(slot) == Some(&first));
        is_there.then(|| (is_known, before.elapsed()))
    });
    assert!(begin.elapsed() > Duration::from_secs(1), "the first is good for two lifetimes");
    // On a busy machine this check may run so late that a third token key has replaced the first. The check is then
    // skipped.
    assert!(is_known || after > Duration::from_secs(1), "and accepted with the second");
    wait_for("a third key", || !known(&first));
    assert!(before.elapsed() > Duration::from_secs(1), "for a lifetime at least");
    // The gate does not renew token keys that the policy gives.
    let shared = TokenKeys { slots: [1, 2].map(|byte| GateKey::new([byte; 16])), current: 0 };
    let policy = Policy::parse(&format!("{WEB}rules.retry = {{ lifetime = 1 }}\n")).unwrap();
    gate.set_policy(&Policy { token_keys: Some(shared.clone()), ..policy.clone() }).unwrap();
    assert!(shared.slots.iter().all(known));
    gate.set_policy(&policy).unwrap();
    wait_for("keys of its own", || shared.slots.iter().all(|key| !known(key)));
}

/// Checks that each error message of `attach` names its cause once and, where there is one, a remedy.
#[test]
fn attach_errors_name_their_cause_once_and_a_remedy() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("errors", "");
    let gate = Gate::new(&Policy::parse(WEB).unwrap()).unwrap();
    let other = Gate::new(&Policy::parse(WEB).unwrap());
    let other = other.unwrap();
    let attach = |gate: &Gate, interface, mode| {
        let done = inside(&site.server, || gate.attach(interface, mode));
        format!("{:#}", anyhow::Error::from(done.expect_err("an error")))
    };
    let gone = attach(&gate, "nowhere0", XdpMode::Auto);
    assert_eq!(gone, "there is no interface nowhere0: ENODEV: No such device");
    let lo = attach(&gate, "lo", XdpMode::Native);
    assert!(lo.contains("mode generic works") && lo.matches("os error").count() == 1, "{lo}");
    inside(&site.server, || gate.attach("lo", XdpMode::Auto)).unwrap();
    assert_eq!(
        attach(&gate, "lo", XdpMode::Auto),
        "interface lo is guarded by this gate already: name it once"
    );
    inside(&site.server, || gate.attach("eth", XdpMode::Generic)).unwrap();
    let taken = attach(&other, "eth", XdpMode::Native);
    assert!(taken.contains("in the other mode: `bpftool net` names it"), "{taken}");
    for mode in [XdpMode::Auto, XdpMode::Generic] {
        let taken = attach(&other, "eth", mode);
        assert!(taken.contains("has another gate at XDP already"), "{taken}");
    }
}

/// Checks that gates with the same token key file give each key the same index, whatever keys the gates had before.
/// Tokens contain this index.
#[test]
fn token_key_gets_the_index_that_the_key_file_gives() {
    if !is_root() {
        return;
    }
    let keys =
        |slots: [u8; 2], current| TokenKeys { slots: slots.map(|byte| GateKey::new([byte; 16])), current };
    let policy = |keys| Policy { token_keys: Some(keys), ..Policy::parse(WEB).unwrap() };
    let client: SocketAddr = "192.0.2.7:4433".parse().unwrap();
    // The lifetime of tokens is long, because a change of policy may take seconds on a busy machine.
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let gate = Gate::new(&policy(keys([1, 2], 0))).unwrap();
    let scope = gate.scope("web").unwrap();
    for next in [
        keys([1, 2], 0),
        keys([1, 3], 1), // the key with index 1 changes and makes new tokens
        keys([4, 3], 0), // the key with index 0 changes and makes new tokens
        keys([4, 3], 1), // the earlier key with index 1 makes new tokens again
        keys([3, 3], 0),
        keys([5, 6], 0), // both keys change
        keys([6, 5], 0), // the keys swap their indexes
    ] {
        gate.set_policy(&policy(next.clone())).unwrap();
        for (slot, key) in next.slots.iter().enumerate() {
            let sealed =
                |client| Token::new(client, b"original", now()).unwrap().seal(slot as u8, key, "web");
            let token = scope.check_token(client, &sealed(client)).unwrap();
            assert_eq!(token.original_id(), b"original");
            let elsewhere = "192.0.2.8:4433".parse().unwrap();
            assert_eq!(scope.check_token(client, &sealed(elsewhere)), Err(token::Error::OtherClient));
        }
        let forged = Token::new(client, b"original", now()).unwrap().seal(0, &GateKey::new([9; 16]), "web");
        assert_eq!(scope.check_token(client, &forged), Err(token::Error::Forged));
    }
}

const PROGRAM: &str = r#"
#include <millrace_gate.h>
#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

#define MUST(status, call)                                                            \
	do {                                                                          \
		int got = (call);                                                     \
		if (got != (status)) {                                                \
			printf("%s: %d, %s\n", #call, got, millrace_gate_error());    \
			return 1;                                                     \
		}                                                                     \
	} while (0)

static size_t unhex(const char *text, uint8_t *to)
{
	size_t bytes = 0;
	unsigned int byte;

	for (; sscanf(text + 2 * bytes, "%2x", &byte) == 1; bytes++)
		to[bytes] = byte;
	return bytes;
}

int main(void)
{
	const char *policy = "token_keys = \"keys\"\n[[scope]]\nname = \"web\"\nport = 443\ncount = \"application\"\n"
			     "rules.retry = { lifetime = 3600 }\n";
	struct sockaddr_in client = {.sin_family = AF_INET, .sin_port = htons(1)};
	static millrace_gate_count counts[1000];
	uint8_t token[72] = "some connection ID..";
	millrace_gate_id original;
	millrace_gate_scope *scope;
	millrace_gate *gate;
	uint32_t connections;
	size_t have, found = 0;

	inet_pton(AF_INET, "192.0.2.7", &client.sin_addr);
	MUST(MILLRACE_GATE_NOT_FOUND, millrace_gate_open("nowhere0", policy, MILLRACE_GATE_MODE_AUTO, &gate));
	MUST(MILLRACE_GATE_POLICY, millrace_gate_open("eth", "[[scope]]", MILLRACE_GATE_MODE_AUTO, &gate));
	MUST(MILLRACE_GATE_OK, millrace_gate_open("eth", policy, MILLRACE_GATE_MODE_GENERIC, &gate));
	MUST(MILLRACE_GATE_SYSTEM, millrace_gate_attach(gate, "eth", MILLRACE_GATE_MODE_GENERIC));
	MUST(MILLRACE_GATE_NOT_FOUND, millrace_gate_scope_open(gate, "wbe", &scope));
	MUST(MILLRACE_GATE_OK, millrace_gate_scope_open(gate, "web", &scope));
	MUST(MILLRACE_GATE_OK, millrace_gate_inc(scope, (struct sockaddr *)&client, sizeof(client), NULL));
	MUST(MILLRACE_GATE_OK, millrace_gate_inc(scope, (struct sockaddr *)&client, sizeof(client), &connections));
	if (connections != 2)
		return 2;
	MUST(MILLRACE_GATE_OK, millrace_gate_dec(scope, (struct sockaddr *)&client, sizeof(client), &connections));
	if (connections != 1)
		return 3;
	MUST(MILLRACE_GATE_INVALID, millrace_gate_publish(scope, (const uint8_t *)"", 0));
	MUST(MILLRACE_GATE_OK, millrace_gate_publish(scope, token, 20));
	MUST(MILLRACE_GATE_OK, millrace_gate_retire(scope, token, 20));
	MUST(MILLRACE_GATE_OK, millrace_gate_retire(scope, token, 20));
	MUST(MILLRACE_GATE_INVALID, millrace_gate_retire(scope, token, 21));
	if (unhex(TOKEN, token) != sizeof(token))
		return 6;
	MUST(MILLRACE_GATE_OK, millrace_gate_check_token(scope, (struct sockaddr *)&client, sizeof(client), token,
							 sizeof(token), &original));
	if (original.len != 8 || memcmp(original.bytes, "original", 8))
		return 7;
	client.sin_port = htons(2);
	MUST(MILLRACE_GATE_NOT_FOUND, millrace_gate_check_token(scope, (struct sockaddr *)&client, sizeof(client), token,
								sizeof(token), &original));
	client.sin_port = htons(1);
	token[70] ^= 1;
	MUST(MILLRACE_GATE_NOT_FOUND, millrace_gate_check_token(scope, (struct sockaddr *)&client, sizeof(client), token,
								sizeof(token), &original));
	MUST(MILLRACE_GATE_OK, millrace_gate_list(gate, "web", "198.51.100.0/24", MILLRACE_GATE_BLOCK));
	MUST(MILLRACE_GATE_OK, millrace_gate_list(gate, "web", "198.51.100.0/24", MILLRACE_GATE_UNLIST));
	MUST(MILLRACE_GATE_INVALID, millrace_gate_list(gate, NULL, "198.51.100.0/33", MILLRACE_GATE_ALLOW));
	MUST(MILLRACE_GATE_POLICY, millrace_gate_set_policy(gate, "scope = 1"));
	MUST(MILLRACE_GATE_OK, millrace_gate_set_policy(gate, policy));
	MUST(MILLRACE_GATE_OK, millrace_gate_statistics(gate, counts, 1, &have));
	if (have < 2 || have > 1000 || strcmp(counts[0].scope, "interface") || counts[1].scope[0])
		return 4;
	MUST(MILLRACE_GATE_OK, millrace_gate_statistics(gate, counts, 1000, &have));
	for (size_t i = 0; i < have; i++)
		found += !strcmp(counts[i].scope, "web") && !strcmp(counts[i].reason, "quota") && counts[i].is_rule;
	if (found != 1)
		return 5;
	millrace_gate_close(gate);
	MUST(MILLRACE_GATE_OK, millrace_gate_dec(scope, (struct sockaddr *)&client, sizeof(client), NULL));
	millrace_gate_scope_close(scope);
	puts(millrace_gate_version());
	return 0;
}
"#;

/// Compiles a C program with the library. Returns `None` and prints a message if there is no compiler.
fn build(site: &GateSite, text: &str, defines: &[String]) -> Option<Command> {
    let source = site.path("program.c");
    let program = site.path("program");
    std::fs::write(&source, text).unwrap();
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap();
    let mut compile = Command::new("cc");
    compile.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror"]).args(defines);
    compile
        .args(["-I", concat!(env!("CARGO_MANIFEST_DIR"), "/include")])
        .arg(&source)
        .arg("-o")
        .arg(&program);
    compile.arg("-L").arg(library).args(["-lmillrace_gate", &format!("-Wl,-rpath,{}", library.display())]);
    match compile.output() {
        Err(error) => {
            println!("SKIP: no C compiler: {error}");
            return None;
        }
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
    }
    // Programs look for the library by its soname at run time.
    std::os::unix::fs::symlink(library.join("libmillrace_gate.so"), site.path("libmillrace_gate.so.0"))
        .unwrap();
    let mut command = Command::new(&program);
    command.env("LD_LIBRARY_PATH", site.dir.path()).current_dir(site.dir.path());
    Some(command)
}

/// Checks from a C program that the header's layouts and numbers equal those of the library.
#[test]
fn c_program_can_call_every_function_of_the_gate_library() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("abi", "");
    // The token that this test makes is equal to the token that a gate with the same key would make.
    let key = GateKey::new([7; 16]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let token = Token::new("192.0.2.7:1".parse().unwrap(), b"original", now).unwrap().seal(1, &key, "web");
    std::fs::write(site.path("keys"), format!("{}\n* {}\n", "06".repeat(16), "07".repeat(16))).unwrap();
    let token = format!("-DTOKEN=\"{}\"", millrace_gate::hex::encode(&token));
    let Some(mut command) = build(&site, PROGRAM, &[token]) else { return };
    let output = inside(&site.server, || command.output().unwrap());
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!((output.status.code(), said.as_ref()), (Some(0), concat!(env!("CARGO_PKG_VERSION"), "\n")));
    assert!(!site.is_guarded());
}

const FORK: &str = r#"
#include <millrace_gate.h>
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	const char *policy = "[[scope]]\nname = \"web\"\nport = 443\n";
	millrace_gate *gate;
	char byte;

	if (millrace_gate_open("eth", policy, MILLRACE_GATE_MODE_AUTO, &gate)) {
		puts(millrace_gate_error());
		return 1;
	}
	puts("guarding");
	fflush(stdout);
	if (read(0, &byte, 1) != 1 || fork())
		return 0;
	/* The child lives until nobody writes to it any more. */
	return read(0, &byte, 1) != 0;
}
"#;

/// Lets a child process outlive the server that forked it. The gate must be detached although the child lives on.
#[test]
fn forked_child_does_not_keep_the_gate_attached() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("fork", "");
    let Some(mut command) = build(&site, FORK, &[]) else { return };
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut parent = inside(&site.server, || command.spawn().unwrap());
    let mut said = BufReader::new(parent.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "guarding\n");
    assert!(site.is_guarded());
    let mut stdin = parent.stdin.take().unwrap();
    stdin.write_all(b"f").unwrap();
    assert_eq!(parent.wait().unwrap().code(), Some(0));
    // The kernel frees a BPF link in a work queue, some time after the process has ended.
    wait_for("a clean interface", || !site.is_guarded());
    // This write to the child's standard input fails if the child has ended.
    stdin.write_all(b"x").expect("the child lives");
    drop(stdin);
    said.read_to_string(&mut line).unwrap();
}
