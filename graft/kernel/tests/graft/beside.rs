//! Tests grafts next to another program on the same cgroup. That program writes a TCP option of its own, and counts
//! SYNs and later packets that have this option.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;
use std::process::Command;

use libbpf_rs::{Link, MapCore as _, MapFlags, Object, ObjectBuilder};
use millrace_graft_kernel::{RuleSide, TcpOutcome};

use crate::site::{GraftTestSite, TestCgroup, congestion, congestion_of, counted, loaded, rule, transfer};

/// Source of the other program. It writes option kind 254 with an experiment ID of 16 bits into every packet, so its
/// callback flag has to stay set.
const SOURCE: &str = r#"
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
struct { __uint(type, BPF_MAP_TYPE_ARRAY); __type(key, __u32); __type(value, __u64); __uint(max_entries, 2); } written SEC(".maps");
SEC("sockops") int beside(struct bpf_sock_ops *ctx)
{
	__u8 option[4] = {254, 4, 0xab, 0xcd};
	__u32 is_syn = ctx->skb_tcp_flags & 2 ? 1 : 0;
	__u64 *count;
	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
		break;
	case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
		bpf_reserve_hdr_opt(ctx, sizeof(option), 0);
		break;
	case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
		count = bpf_map_lookup_elem(&written, &is_syn);
		if (!bpf_store_hdr_opt(ctx, option, sizeof(option), 0) && count)
			__sync_fetch_and_add(count, 1);
		break;
	}
	return 1;
}
char LICENSE[] SEC("license") = "GPL";
"#;

struct SecondSockops {
    object: Object,
    _link: Link,
}

impl SecondSockops {
    /// Compiles and attaches the other program. Returns `None` and prints SKIP if this host cannot compile it.
    fn attach(test: &str, cgroup: &TestCgroup) -> Option<Self> {
        if !Path::new("/usr/include/bpf/bpf_helpers.h").exists() {
            println!("SKIP {test}: no libbpf-dev");
            return None;
        }
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("beside.bpf.c"), SOURCE).expect("written");
        let names = std::iter::once("clang".to_owned()).chain((16..=24).rev().map(|n| format!("clang-{n}")));
        let runs = |name: &String| Command::new(name).arg("--version").output().is_ok();
        let clang = names.into_iter().find(runs).expect("clang, as the build has found it");
        let machine = Command::new("uname").arg("-m").output().expect("uname").stdout;
        let include = format!("/usr/include/{}-linux-gnu", String::from_utf8_lossy(&machine).trim());
        let mut command = Command::new(clang);
        command.args(["-target", "bpf", "-mcpu=v3", "-g", "-O2", "-I", &include, "-c", "beside.bpf.c"]);
        let compiled = command.current_dir(directory.path()).status(); // exact: status() waits for clang to end
        assert!(compiled.expect("clang").success());
        let open = ObjectBuilder::default().open_file(directory.path().join("beside.bpf.o"));
        let object = open.expect("opens").load().expect("loads");
        let at = std::fs::File::open(&cgroup.path).expect("a cgroup");
        let program = object.progs_mut().next().expect("a program");
        let link = program.attach_cgroup(at.as_fd().as_raw_fd()).expect("attached");
        Some(Self { object, _link: link })
    }

    /// Returns how many SYNs, and how many later packets, had the other program's option.
    fn written(&self) -> (u64, u64) {
        let map = self.object.maps().next().expect("a map");
        let count = |key: u32| {
            let value = map.lookup(&key.to_ne_bytes(), MapFlags::ANY).expect("readable").expect("a value");
            u64::from_ne_bytes(value.try_into().expect("8 bytes"))
        };
        (count(1), count(0))
    }
}

#[test]
fn graft_attaches_beside_an_earlier_foreign_program() {
    let Some(site) = GraftTestSite::new("first-other") else { return };
    let Some(beside) =
        SecondSockops::attach("graft_attaches_beside_an_earlier_foreign_program", &site.clients)
    else {
        return;
    };
    let (mut client, mut server) =
        site.both(&rule(RuleSide::Client, congestion("reno")), &rule(RuleSide::Server, congestion("cubic")));
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    assert_eq!((congestion_of(&near), congestion_of(&far)), ("reno".into(), "cubic".into()));
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut client), [(TcpOutcome::Agreed, 1)]);
    assert_eq!(counted(&mut server), [(TcpOutcome::Agreed, 1), (TcpOutcome::Answered, 1)]);
    // The SYN had both options. All later packets (of at most 64 KiB each) have the other program's option, so grafts
    // did not clear its callback flag.
    let (syns, others) = beside.written();
    assert!(syns == 1 && others >= 16, "{syns} {others}");
}

#[test]
fn grafts_may_detach_before_a_later_foreign_program() {
    let Some(site) = GraftTestSite::new("later-other") else { return };
    let (mut client, _server) =
        site.both(&rule(RuleSide::Client, congestion("reno")), &rule(RuleSide::Server, congestion("cubic")));
    let Some(beside) =
        SecondSockops::attach("grafts_may_detach_before_a_later_foreign_program", &site.clients)
    else {
        return;
    };
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    assert_eq!(congestion_of(&near), "reno");
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut client), [(TcpOutcome::Agreed, 1)]);
    assert_eq!(beside.written().0, 1);
    client.detach();
    let (near, far) = site.connect(&listener);
    assert_ne!(congestion_of(&near), "reno");
    transfer(near, far, 1 << 20);
    let (syns, others) = beside.written();
    assert!(syns == 2 && others >= 16, "{syns} {others}");
    assert_eq!(
        loaded(&site.clients, &rule(RuleSide::Client, congestion("reno"))).peers().expect("peers"),
        []
    );
}
