//! Tests of the process `millrace graft`: rules for unmodified TCP between two namespaces, the status, programs that
//! stay in the kernel, grafts from files, and agreements of two daemons. They need root and cgroup v2.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod agreement;
mod carried;
mod choosing;
mod firewall;
mod gateway;
mod go;
mod messages;
mod messages_c;
mod messages_ends;
mod messages_paths;
mod one_daemon;
mod packets;
mod pools;
mod purposes;
mod site;
mod strangers;
mod streams;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Output},
};

use millrace_graft::status::{self, PeerExplanation};

use crate::site::{
    GraftProcess, GraftSite, PORT, SERVER, congestion, ours, transfer, wait_for, wait_for_none_of_ours,
    wait_until,
};

fn rule(graft: &str) -> String {
    format!(
        "[[rule]]\nname = \"test\"\nside = \"client\"\nport = {PORT}\nagree = false\ngraft = \"{graft}\"\n"
    )
}

#[test]
fn congestion_control_of_a_rule_is_applied_replaced_and_removed() {
    let Some(site) = GraftSite::with_controls("rule") else { return };
    let listener = site.listen();
    let default = congestion(&site.connect(&listener).0);
    site.configure(&rule("longhaul"));
    let daemon = GraftProcess::start(&site);
    let mode = fs::metadata(site.path("graft0.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let (near, far) = site.connect(&listener);
    assert_eq!(congestion(&near), "mr_longhaul");
    assert_eq!(congestion(&far), default);
    // exact: before connect() returns, the kernel counts whether both ends agreed in TCP options
    let status = daemon.status();
    assert_eq!(status.outcomes["one-sided"], 1);
    assert_eq!((status.loaded.len(), status.loaded[0].connections), (1, 1));
    assert_eq!(status.rules[0].congestion.as_deref(), Some("mr_longhaul"));
    let why: PeerExplanation = serde_json::from_str(&daemon.succeed(&["why", SERVER, "--json"])).unwrap();
    assert_eq!((why.outcome.as_deref(), why.rule.as_deref()), (Some("one-sided"), Some("test")));
    let paths = || -> Vec<status::PeerPath> {
        serde_json::from_str(&daemon.succeed(&["monitor", "--json"])).unwrap()
    };
    let path = wait_for("a path", || paths().into_iter().find(|path| path.peer.to_string() == SERVER));
    assert_eq!((path.connections, path.lost), (1, 0));

    let swapped = daemon.succeed(&["swap", "longhaul", "pcc"]);
    assert!(swapped.starts_with("1 live connections changed") && swapped.contains(" 0 refused"), "{swapped}");
    assert_eq!(congestion(&near), "mr_pcc");
    let refused = daemon.fail(&["unload", "longhaul"]);
    assert!(refused.contains("graft longhaul is used by rule test"), "{refused}");
    assert!(daemon.fail(&["load", "longhaul"]).contains("loaded already"));
    assert_eq!(daemon.succeed(&["unload", "pcc"]), "pcc: unloaded\n");
    assert!(daemon.fail(&["unload", "pcc"]).contains("graft pcc is not loaded"));
    assert!(daemon.succeed(&["load", "pcc"]).starts_with("loaded: read in "));
    assert!(daemon.fail(&["load", "nothing"]).contains("there are: longhaul, pcc"));
    assert_eq!(ours(), ["mr_longhaul", "mr_pcc"]);

    daemon.kill();
    wait_for_none_of_ours();
    assert_eq!(congestion(&near), "mr_pcc", "the connection lost its graft");
    let next = || congestion(&site.connect(&listener).0);
    wait_until("the next connection to have the default again", next, |used| *used == default);
    transfer(near, far);
}

#[test]
fn reload_with_an_error_in_the_settings_changes_no_graft() {
    let Some(site) = GraftSite::with_controls("reload") else { return };
    let listener = site.listen();
    site.configure(&rule("longhaul"));
    let daemon = GraftProcess::start(&site);
    for (broken, wanted) in [
        (rule("nothing"), "there is no graft nothing"),
        (
            format!(
                "{}{}",
                rule("pcc"),
                "[[load]]\ngraft = \"longhaul\"\nparameters = { loss_permille = 501 }\n"
            ),
            "from 0 to 500",
        ),
        (rule("pcc").replace("agree", "agrees"), "agrees: unknown key; did you mean `agree`?"),
        (
            format!("{}[[load]]\ngraft = \"longhaul\"\nparameters = {{ none = 1 }}\n", rule("pcc")),
            "no parameter none",
        ),
    ] {
        site.configure(&broken);
        let error = daemon.fail(&["reload"]);
        assert!(error.contains(wanted), "{error}");
        assert_eq!(ours(), ["mr_longhaul"], "{wanted}");
        assert_eq!(congestion(&site.connect(&listener).0), "mr_longhaul", "{wanted}");
        // exact: the failed reload command has returned, so the daemon's list of problems is complete
        let trouble = daemon.status().trouble;
        assert!(trouble.iter().any(|it| it.contains("the settings before stay")), "{trouble:?}");
    }
    // In the reloaded settings, the same graft has another parameter. The graft with that parameter must replace the
    // loaded graft.
    site.configure(&format!(
        "{}[[load]]\ngraft = \"longhaul\"\nparameters = {{ loss_permille = 30 }}\n",
        rule("longhaul")
    ));
    assert_eq!(daemon.succeed(&["reload"]), "the settings were read again\n");
    // exact: the reload command has returned, so the loaded graft has its new parameter
    assert_eq!(daemon.status().loaded[0].parameters["loss_permille"], 30);
    assert_eq!(congestion(&site.connect(&listener).0), "mr_longhaul");
    // The reloaded settings have another graft.
    site.configure(&rule("pcc"));
    daemon.succeed(&["reload"]);
    assert_eq!(ours(), ["mr_pcc"]);
    assert_eq!(congestion(&site.connect(&listener).0), "mr_pcc");
    // exact: the reload command has returned, so the daemon's list of problems is final
    assert_eq!(daemon.status().trouble, Vec::<String>::new());
    let second = Command::new(env!("CARGO_BIN_EXE_millrace"))
        .args(["graft", "run", "--http=off", "--config"])
        .arg(site.path("graft0.toml"))
        .arg("--socket")
        .arg(site.path("graft0.sock"))
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&second.stderr).contains("another daemon of grafts answers"));
}

/// Returns the `clang` that the build used.
fn clang() -> String {
    let candidates = std::iter::once("clang".to_owned()).chain((16..=24).rev().map(|n| format!("clang-{n}")));
    let runs = |name: &String| Command::new(name).arg("--version").output().is_ok();
    candidates.into_iter().find(runs).unwrap()
}

/// Runs the command of docs/guide/graft.md on this source, with the headers that `make install` installs, and no
/// others of this repository.
fn compile(directory: &Path, source: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let installed = directory.join("installed");
    let mut command = Command::new("make");
    command.args(["--silent", "install-graft", "PREFIX="]).arg(format!("DESTDIR={}", installed.display()));
    let output = command.current_dir(root).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::write(directory.join("mine.bpf.c"), source).unwrap();
    let machine = Command::new("uname").arg("-m").output().unwrap().stdout;
    let machine = String::from_utf8(machine).unwrap();
    let mut command = Command::new(clang());
    command.args(["-target", "bpf", "-mcpu=v3", "-g", "-O2", "-I"]).arg(installed.join("include/millrace"));
    command.args(["-I", &format!("/usr/include/{}-linux-gnu", machine.trim())]);
    command.arg("-c").arg("mine.bpf.c").args(["-o", "mine.bpf.o"]).current_dir(directory);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn hybla_as_mine() -> String {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../graft/examples/controls");
    fs::read_to_string(examples.join("hybla.bpf.c")).unwrap().replace("mr_hybla", "mr_mine")
}

fn graft(site: &GraftSite, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
    command.arg("graft").args(args).current_dir(site.directory.path()).output().unwrap()
}

/// Writes the manifest of docs/guide/graft.md, with the hash that identifies the graft, which `millrace graft check`
/// prints.
fn write_manifest(site: &GraftSite) {
    let output = graft(site, &["check", "mine.bpf.o"]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && said.contains("this kernel takes it"), "{said}");
    let identity = said.lines().find_map(|line| line.trim().strip_prefix("identity: ")).unwrap();
    let documented = include_str!("../../../docs/guide/graft.md");
    let manifests = documented.split("```toml\n").skip(1).map(|text| text.split("```").next().unwrap());
    let manifest = manifests.into_iter().find(|text| text.starts_with("abi")).unwrap();
    fs::write(site.path("mine.toml"), manifest.replace("\"...\"", &format!("\"{identity}\""))).unwrap();
}

#[test]
fn own_graft_is_built_and_loaded_as_documented() {
    let Some(site) = GraftSite::with_controls("own") else { return };
    if !Path::new("/usr/include/bpf/bpf_helpers.h").exists() {
        println!("SKIP own_graft_is_built_and_loaded_as_documented: no libbpf-dev");
        return;
    }
    compile(site.directory.path(), &hybla_as_mine());
    write_manifest(&site);
    let listed = String::from_utf8(graft(&site, &["list", "--pool", "."]).stdout).unwrap();
    assert!(listed.contains("mr_mine") && !listed.contains("NOT USABLE"), "{listed}");

    site.configure(&format!("pool = [\".\"]\n{}", rule("mine")));
    let daemon = GraftProcess::start(&site);
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    assert_eq!(congestion(&near), "mr_mine");
    // The graft's object file is replaced by one with other code and the same name.
    compile(site.directory.path(), &hybla_as_mine().replace("rtt0_us = 35000", "rtt0_us = 26000"));
    let error = daemon.fail(&["swap", "mine", "mine"]);
    assert!(error.contains("and sha256 says"), "{error}");
    write_manifest(&site);
    let swapped = daemon.succeed(&["swap", "mine", "mine"]);
    assert!(swapped.starts_with("1 live connections changed"), "{swapped}");
    // exact: the swap command has returned, so the loaded graft has its new parameter
    assert_eq!(daemon.status().loaded[0].parameters["rtt0_us"], 26_000);
    transfer(near, far);
}

#[test]
fn installed_headers_suffice_to_build_a_packet_function() {
    if !Path::new("/usr/include/bpf/bpf_helpers.h").exists() {
        println!("SKIP installed_headers_suffice_to_build_a_packet_function: no libbpf-dev");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source =
        include_str!("../../../graft/kernel/src/bpf/function_order.bpf.c").replace("order_", "mine_");
    compile(directory.path(), &source);
    let object = fs::read(directory.path().join("mine.bpf.o")).unwrap();
    let program = b"mine_rx";
    assert!(object.windows(program.len()).any(|name| name == program), "the object has no such program");
}

#[test]
fn example_grafts_are_built_and_used_by_a_rule() {
    let Some(site) = GraftSite::with_controls("examples") else { return };
    if !Path::new("/usr/include/bpf/bpf_helpers.h").exists() {
        println!("SKIP example_grafts_are_built_and_used_by_a_rule: no libbpf-dev");
        return;
    }
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../graft/examples/controls");
    let mut make = Command::new("make");
    make.arg("-C").arg(examples).arg(format!("OUT={}", site.path("pool").display()));
    let made = make.arg(format!("CLANG={}", clang())).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));

    let listener = site.listen();
    for (graft, parameter) in [("hybla", "rtt0_us = 30000"), ("westwood", "keep_percent = 80")] {
        let parameters = format!("[[load]]\ngraft = \"{graft}\"\nparameters = {{ {parameter} }}\n");
        site.configure(&format!("pool = [\"pool\"]\n{}{parameters}", rule(graft)));
        let daemon = GraftProcess::start(&site);
        let (near, far) = site.connect(&listener);
        assert_eq!(congestion(&near), format!("mr_{graft}"));
        transfer(near, far);
        daemon.end();
    }
}

#[test]
fn verifier_refusal_names_the_source_line() {
    let Some(site) = GraftSite::with_controls("refused") else { return };
    if !Path::new("/usr/include/bpf/bpf_helpers.h").exists() {
        println!("SKIP verifier_refusal_names_the_source_line: no libbpf-dev");
        return;
    }
    let source = hybla_as_mine()
        .replace("\tif (config.pace)\n", "\tgraft_tcp(sk)->mss_cache = 1;\n\tif (config.pace)\n");
    compile(site.directory.path(), &source);
    let output = graft(&site, &["check", "mine.bpf.o"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    let line = source.lines().position(|line| line.contains("mss_cache = 1")).unwrap() + 1;
    assert!(said.contains(&format!("mine.bpf.c:{line}")), "{said}");
    assert!(said.contains("graft_tcp(sk)->mss_cache = 1;") && said.contains("hint: "), "{said}");
}

#[test]
fn shipped_graft_can_be_exported_and_changed() {
    let Some(site) = GraftSite::with_controls("export") else { return };
    let none = graft(&site, &["export", "pool", "longhaul", "none"]);
    assert_eq!(none.status.code(), Some(1), "{none:?}");
    assert!(!site.path("pool/longhaul.toml").exists(), "a part of the grafts was exported");
    let exported = graft(&site, &["export", "pool", "longhaul"]);
    let said = String::from_utf8(exported.stdout).unwrap();
    assert_eq!((exported.status.code(), said.as_str()), (Some(0), "longhaul: exported to pool\n"));
    let usable = graft(&site, &["check", "pool/longhaul.toml", "--set", "loss_permille=500"]);
    assert!(usable.status.success(), "{}", String::from_utf8_lossy(&usable.stderr));
    let error = |args: &[&str]| String::from_utf8(graft(&site, args).stderr).unwrap();
    assert!(error(&["check", "pool/longhaul.toml", "--set", "loss_permille=501"]).contains("from 0 to 500"));
    // Two grafts with one name cannot be loaded, and the compiled-in graft was loaded first.
    let listed = String::from_utf8(graft(&site, &["list", "--pool", "pool"]).stdout).unwrap();
    assert!(listed.contains("there is a graft longhaul already"), "{listed}");
    let object = site.path("pool/longhaul.bpf.o");
    let mut image = fs::read(&object).unwrap();
    *image.last_mut().unwrap() ^= 1;
    fs::write(&object, image).unwrap();
    assert!(error(&["check", "pool/longhaul.toml"]).contains("and sha256 says"));
    // The settings trust a key, and the graft has no signature.
    site.configure(&format!("pool = [\"pool\"]\ntrusted-keys = [\"{}\"]\n{}", "00".repeat(32), rule("mine")));
    fs::rename(site.path("pool/longhaul.toml"), site.path("pool/mine.toml")).unwrap();
    let unsigned = error(&["run", "--check", "--config", "graft0.toml"]);
    assert!(unsigned.contains("it is not signed"), "{unsigned}");
}

#[test]
fn probe_command_measures_a_path_by_icmp_or_udp() {
    let Some(site) = GraftSite::new("probe") else { return };
    site.configure("");
    let daemon = GraftProcess::start(&site);
    let probe = |more: &str| -> Vec<serde_json::Value> {
        let args: Vec<&str> = ["probe", SERVER, "--json"].into_iter().chain(more.split(' ')).collect();
        let probed: serde_json::Value = serde_json::from_str(&daemon.succeed(&args)).unwrap();
        probed["history"].as_array().unwrap().clone()
    };
    let by_icmp = probe("--period 20ms --duration 400ms");
    let report = &by_icmp[0]["report"];
    assert_eq!(
        (&report["sent"], &report["answered"], &report["loss_percent"]),
        (&20.into(), &20.into(), &0.0.into())
    );
    assert!(report["rtt_min_us"].as_u64().is_some_and(|us| us > 0 && us < 1_000_000), "{report}");
    let said = daemon.succeed(&["probe", SERVER, "--period", "20ms", "--duration", "100ms"]);
    assert!(said.starts_with("10.96.0.1 by icmp: lan\n") && said.contains("0 of 20"), "{said}");
    // The port has no listener, so the peer's host answers with an ICMP error.
    let by_udp = probe("--udp 9 --period 100ms --duration 200ms");
    assert_eq!(by_udp[0]["report"]["answered"], 2);

    let drops = [
        "add table inet graft",
        "add chain inet graft in { type filter hook input priority 0; }",
        "add rule inet graft in icmp type echo-request drop",
    ];
    let nft = |line: &&str| {
        let run = Command::new("ip").args(["netns", "exec", &site.namespaces[1], "nft", line]).output();
        run.is_ok_and(|output| output.status.success())
    };
    if drops.iter().all(nft) {
        let lost = probe("--period 50ms --duration 100ms");
        assert_eq!(lost.len(), 3, "earlier measurements were forgotten");
        assert_eq!(
            (&lost[2]["report"]["answered"], &lost[2]["report"]["loss_percent"]),
            (&0.into(), &100.0.into())
        );
    }
    let refused = daemon.fail(&["probe", SERVER, "--period", "1ms"]);
    assert!(refused.contains("the period has to be at least 5ms"), "{refused}");
}

/// The daemon probes the network paths to the peers in its settings, each at its interval, and the command `monitor`
/// lists the paths.
#[test]
fn paths_are_probed_as_the_settings_say() {
    let Some(site) = GraftSite::new("schedule") else { return };
    site.configure(&format!(
        "[[probe]]\npeer = \"{SERVER}\"\nperiod-ms = 20\nduration-ms = 100\nevery-s = 6\n\
         [[class]]\nname = \"near\"\nmin-rtt-us = 0\n"
    ));
    let daemon = GraftProcess::start(&site);
    let monitored =
        || -> serde_json::Value { serde_json::from_str(&daemon.succeed(&["monitor", "--json"])).unwrap() };
    let path = wait_for("a path", || monitored().get(0).cloned());
    assert_eq!(
        (&path["peer"], &path["class"], &path["connections"]),
        (&SERVER.into(), &"near".into(), &0.into())
    );
    assert_eq!(path["probed"]["loss_percent"], 0.0, "{path}");
    assert!(daemon.succeed(&["monitor"]).contains("PROBED"));
    // The second probe of the path also starts by itself.
    let mut oldest = 0;
    wait_for("a younger probe", || {
        let age = monitored()[0]["probed"]["age_s"].as_u64()?;
        oldest = oldest.max(age);
        (age < oldest).then_some(())
    });
    site.configure("[[probe]]\npeer = \"192.0.2.1\"\nevery-s = 1\n");
    assert!(daemon.fail(&["reload"]).contains("probe of 192.0.2.1: every-s is from the duration"));
}

/// The BPF programs of a daemon with `--persist` stay in the kernel when the daemon ends. The next daemon takes them
/// over, and `clean` removes them.
#[test]
fn grafts_loaded_with_persist_stay_in_the_kernel_until_clean() {
    let Some(site) = GraftSite::with_controls("persist") else { return };
    let mount = site.path("bpf");
    fs::create_dir(&mount).unwrap();
    let mounted = Command::new("mount").args(["-t", "bpf", "bpf"]).arg(&mount).status().unwrap();
    if !mounted.success() {
        println!(
            "SKIP grafts_loaded_with_persist_stay_in_the_kernel_until_clean: no BPF file system can be mounted"
        );
        return;
    }
    let pins = mount.join("graft");
    let pins = pins.to_str().unwrap();
    let keep = ["--persist", "--pins", pins];
    site.configure(&rule("longhaul"));
    let listener = site.listen();
    let default = congestion(&site.connect(&listener).0);
    let is_used = || congestion(&site.connect(&listener).0);
    GraftProcess::start_with(&site, 0, &keep).end();
    assert_eq!((ours(), is_used()), (vec!["mr_longhaul".to_owned()], "mr_longhaul".to_owned()));
    // BPF programs also stay in the kernel when their daemon is killed. The settings of the next daemon differ.
    site.configure(&format!("{}[[load]]\ngraft = \"pcc\"\n", rule("longhaul")));
    let next = GraftProcess::start_with(&site, 0, &keep);
    // exact: the daemon loads all grafts before its start is complete, so their number is final
    assert_eq!(next.status().loaded.len(), 2);
    next.kill();
    assert_eq!(
        (ours(), is_used()),
        (vec!["mr_longhaul".to_owned(), "mr_pcc".to_owned()], "mr_longhaul".to_owned())
    );
    let changed = rule("longhaul") + "[[load]]\ngraft = \"longhaul\"\nparameters = { loss_permille = 30 }\n";
    site.configure(&changed);
    let third = GraftProcess::start_with(&site, 0, &keep);
    assert_eq!((ours(), is_used()), (vec!["mr_longhaul".to_owned()], "mr_longhaul".to_owned()));
    // exact: before connect() returns, the kernel counts whether both ends agreed in TCP options
    assert_eq!(third.status().outcomes["one-sided"], 1, "the outcome was counted twice");
    third.succeed(&["load", "pcc"]);
    third.succeed(&["unload", "pcc"]);
    third.end();
    assert_eq!(ours(), ["mr_longhaul"]);
    // A daemon without `--persist` also takes over the programs that the previous daemon has left, and removes them
    // when it ends.
    GraftProcess::start_with(&site, 0, &["--pins", pins]).end();
    assert_eq!((ours(), is_used()), (Vec::new(), default.clone()));

    GraftProcess::start_with(&site, 0, &keep).end();
    let cleaned = graft(&site, &["clean", "--pins", pins]);
    assert_eq!(
        String::from_utf8_lossy(&cleaned.stdout),
        "removed: cc-mr_longhaul, tcp, tcp-connect4, tcp-connect6\n"
    );
    assert_eq!((ours(), is_used()), (Vec::new(), default));
    let again = graft(&site, &["clean", "--pins", pins]);
    assert_eq!(String::from_utf8_lossy(&again.stdout), "nothing to remove\n");
    let nowhere = site.path("pins");
    let log = graft(
        &site,
        &[
            "run",
            "--config",
            "graft0.toml",
            "--socket",
            "s",
            "--persist",
            "--pins",
            nowhere.to_str().unwrap(),
        ],
    );
    assert!(String::from_utf8_lossy(&log.stderr).contains("no BPF file system: mount -t bpf bpf"), "{log:?}");
    let unnamed = graft(&site, &["run", "--config", "graft0.toml", "--socket", "s", "--persist"]);
    assert!(String::from_utf8_lossy(&unnamed.stderr).contains("needs --pins"), "{unnamed:?}");
    let _ = Command::new("umount").arg(&mount).status();
}

/// Once properties of a network path (such as its RTT) are known, new connections get the congestion control or graft
/// that the model chooses. A reload replaces the model.
#[test]
fn model_chooses_congestion_control_by_measured_path_rtt() {
    let Some(site) = GraftSite::with_controls("select") else { return };
    let listener = site.listen();
    let model = |near: &str, far: &str| {
        let leaf = |number: u32, candidate: &str| {
            let others = ["mr_longhaul", "mr_pcc", "mr_nobody"].map(|other| {
                let right = u8::from(other == candidate);
                format!("{{\"candidate\":\"{other}\",\"right\":{right},\"utility\":{right}}}")
            });
            let mut ranking = others.to_vec();
            ranking.sort_by_key(|rank| !rank.contains(candidate));
            format!("{{\"leaf\":{{\"number\":{number},\"examples\":1,\"ranking\":[{}]}}}}", ranking.join(","))
        };
        let text = format!(
            "{{\"version\":1,\"about\":\"a test\",\"candidates\":[\"mr_longhaul\",\"mr_pcc\",\"mr_nobody\"],\"tree\":{{\"split\":\
             {{\"by\":\"rtt\",\"at\":40.0,\"unknown\":\"above\",\"below\":{},\"above\":{}}}}}}}",
            leaf(0, near),
            leaf(1, far)
        );
        fs::write(site.path("model.json"), text).unwrap();
    };
    let rule = format!(
        "[[rule]]\nname = \"web\"\nside = \"client\"\nport = {PORT}\nagree = false\nselect = \"loss\"\n"
    );
    model("mr_longhaul", "mr_pcc");
    site.configure(&format!("model = \"model.json\"\n{rule}"));
    let default = congestion(&site.connect(&listener).0);
    let daemon = GraftProcess::start(&site);
    // No property of the path is known yet. A graft that the model names but that is not loaded cannot be chosen.
    assert_eq!(ours(), ["mr_longhaul", "mr_pcc"]);
    let first = site.connect(&listener);
    assert_eq!(congestion(&first.0), default);
    // The daemon evaluates the path once a second.
    let is_used = |wanted: &str| {
        wait_for(wanted, || {
            let (client, _server) = site.connect(&listener);
            (congestion(&client) == wanted).then_some(())
        });
    };
    is_used("mr_longhaul");
    assert_eq!(congestion(&first.0), default, "the open connection lost its graft");
    let why = daemon.succeed(&["why", SERVER]);
    assert!(why.contains("mr_longhaul for web, right for 100 %"), "{why}");
    assert!(why.contains("at most 40 ms"), "the way in words: {why}");
    assert!(why.contains("rule: web"), "{why}");
    // A graft that is not loaded is never chosen, whatever the model says.
    model("mr_nobody", "mr_nobody");
    daemon.succeed(&["reload"]);
    is_used("mr_longhaul");
    model("mr_pcc", "mr_longhaul");
    daemon.succeed(&["reload"]);
    is_used("mr_pcc");
    fs::write(site.path("model.json"), "{}").unwrap();
    let error = daemon.fail(&["reload"]);
    assert!(error.contains("model.json") && error.contains("missing field"), "{error}");
    is_used("mr_pcc");
    daemon.end();
    assert_eq!((ours(), congestion(&site.connect(&listener).0)), (Vec::new(), default));
}
