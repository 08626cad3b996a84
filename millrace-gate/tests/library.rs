//! The library on a loaded gate, by its Rust and its C side.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::{
    net::SocketAddr,
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use millrace_gate::{
    Entry, Error, Gate, Mode, Policy,
    policy::TokenKeys,
    token::{self, Key, Token},
};
use support::{Site, inside, is_root};

const WEB: &str = "[[scope]]\nname = \"web\"\nport = 443\ncount = \"application\"\n";

#[test]
fn connections_count_until_they_are_dropped() {
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

    // Connections outlive a policy, and their scope's handle the gate.
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
fn what_cannot_be_is_an_error_that_names_it() {
    if !is_root() {
        return;
    }
    let gate = Gate::new(&Policy::parse(WEB).unwrap()).unwrap();
    assert!(matches!(gate.scope("wbe"), Err(Error::NoScope(name)) if name == "wbe"));
    assert!(
        matches!(gate.attach("nowhere0", Mode::Auto), Err(Error::Interface { name, .. }) if name == "nowhere0")
    );
    let prefix = "192.0.2.0/24".parse().unwrap();
    assert!(matches!(gate.list(Some("wbe"), prefix, Entry::Block), Err(Error::NoScope(_))));
    let other = Policy::parse(&format!("load.client_prefix_v4 = 24\n{WEB}")).unwrap();
    assert!(matches!(gate.set_policy(&other), Err(Error::Load)));
    assert_eq!(gate.rules(), Policy::parse(WEB).unwrap().rules, "the policy is still the first");
}

/// Gates that share a file agree on slots, whatever each has been through.
#[test]
fn token_keys_are_in_the_slots_that_the_file_says() {
    if !is_root() {
        return;
    }
    let keys = |slots: [u8; 2], current| TokenKeys { slots: slots.map(|byte| Key::new([byte; 16])), current };
    let policy = |keys| Policy { token_keys: Some(keys), ..Policy::parse(WEB).unwrap() };
    let client: SocketAddr = "192.0.2.7:4433".parse().unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let gate = Gate::new(&policy(keys([1, 2], 0))).unwrap();
    let scope = gate.scope("web").unwrap();
    for next in [
        keys([1, 2], 0),
        keys([1, 3], 1), // a rotation
        keys([4, 3], 0), // another
        keys([4, 3], 1), // back
        keys([3, 3], 0),
        keys([5, 6], 0), // both at once
        keys([6, 5], 0), // exchanged
    ] {
        gate.set_policy(&policy(next.clone())).unwrap();
        for (slot, key) in next.slots.iter().enumerate() {
            let sealed = |client| Token::new(client, b"original", now).unwrap().seal(slot as u8, key);
            let token = scope.check_token(client, &sealed(client)).unwrap();
            assert_eq!(token.original_id(), b"original");
            let elsewhere = "192.0.2.8:4433".parse().unwrap();
            assert_eq!(scope.check_token(client, &sealed(elsewhere)), Err(token::Error::OtherClient));
        }
        let forged = Token::new(client, b"original", now).unwrap().seal(0, &Key::new([9; 16]));
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

int main(void)
{
	const char *policy = "[[scope]]\nname = \"web\"\nport = 443\ncount = \"application\"\n";
	struct sockaddr_in client = {.sin_family = AF_INET, .sin_port = htons(1)};
	static millrace_gate_count counts[1000];
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

/// Layouts and numbers of the header are those of the library.
#[test]
fn every_function_from_c() {
    if !is_root() {
        return;
    }
    let site = Site::new("abi", "");
    let (source, program) = (site.path("abi.c"), site.path("abi"));
    std::fs::write(&source, PROGRAM).unwrap();
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap();
    let mut compile = Command::new("cc");
    compile.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I"]);
    compile.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/include")).arg(&source).arg("-o").arg(&program);
    compile.arg("-L").arg(library).args(["-lmillrace_gate", &format!("-Wl,-rpath,{}", library.display())]);
    match compile.output() {
        Err(error) => return println!("SKIP: no C compiler: {error}"),
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
    }
    // The name that programs look for at run time is the soname.
    std::os::unix::fs::symlink(library.join("libmillrace_gate.so"), site.path("libmillrace_gate.so.0"))
        .unwrap();
    let mut command = Command::new(&program);
    command.env("LD_LIBRARY_PATH", site.dir.path());
    let output = inside(&site.server, || command.output().unwrap());
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!((output.status.code(), said.as_ref()), (Some(0), concat!(env!("CARGO_PKG_VERSION"), "\n")));
    assert!(!site.is_guarded());
}
