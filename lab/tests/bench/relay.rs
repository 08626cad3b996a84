//! Runs `millrace-lab bench relay` with the plain forwarder, whose results are known, and other benchmarks at a small
//! size. Needs root.

use std::process::Command;

use serde_json::Value;

use crate::rows;

const SUBSCRIBERS: f64 = 2.0;
const RATE_HZ: f64 = 200.0;

#[test]
fn plain_forwarder_is_measured_and_missing_relay_is_reported() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP plain_forwarder_is_measured_and_missing_relay_is_reported: needs root");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("rows.json");
    let plot = directory.path().join("plot.svg");
    let output = Command::new(env!("CARGO_BIN_EXE_millrace-lab"))
        .args(["bench", "relay", "--relays", "moq-relay", "--subscribers", "2", "--rate-hz", "200"])
        .args(["--seconds", "1", "--rounds", "1"])
        .args(["--json".as_ref(), json.as_os_str(), "--plot".as_ref(), plot.as_os_str()])
        .env("MILLRACE_PEERS", directory.path())
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .current_dir(directory.path())
        .output()
        .expect("millrace-lab runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(table.contains("udp-forwarder") && table.contains("moq-relay x 2: "), "{table}");
    assert!(std::fs::read_to_string(plot).expect("a plot").contains("udp-forwarder"));

    let rows: Value = serde_json::from_slice(&std::fs::read(json).expect("rows")).expect("JSON");
    let [missing, forwarder] = &rows.as_array().expect("a list")[..] else { panic!("{rows}") };
    assert_eq!(missing["relay"], "moq-relay");
    assert!(
        missing["error"].as_str().is_some_and(|error| error.contains("moq-relay is not in")),
        "{missing}"
    );
    assert_eq!(missing["delivered"], Value::Null);
    check_forwarder(forwarder);
}

fn check_forwarder(row: &Value) {
    assert_eq!((&row["relay"], row.get("error")), (&Value::from("udp-forwarder"), None));
    let number =
        |path: &str| row.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} in {row}"));
    assert!(number("/delivered") >= RATE_HZ * SUBSCRIBERS);
    assert_eq!(number("/lost"), 0.0);
    // Every copy of an object that left the relay while the packet probe was attached was matched with the object's
    // arrival.
    assert_eq!(number("/wire/subscribers"), SUBSCRIBERS);
    assert!(number("/wire/objects") > 0.0, "{row}");
    assert!(number("/wire/copies") > 0.0, "{row}");
    assert_eq!((number("/wire/missing"), number("/wire/extra")), (0.0, 0.0));
    // The application latency and the wire latency were measured in different periods, so neither has to be longer.
    assert!(number("/wire_latency_us/p50") > 0.0);
    assert!(number("/latency_us/p50") > 0.0);
    // There are one receive per object and one send per copy. The measured number of calls differs slightly, because
    // some calls fall on the start or end of the counted period.
    let calls = number("/syscalls_per_object");
    assert!((calls - (1.0 + 1.0 / SUBSCRIBERS)).abs() < 0.5, "{calls}");
    // The relay's CPU time and the machine's are read from different clocks, and a virtual machine's CPU clocks also
    // count time that its host has taken away. So the relay's time may be the longer one.
    assert!(number("/cpu_ns_per_object/relay") > 0.0 && number("/cpu_ns_per_object/machine") >= 0.0);
    assert!(number("/rss_bytes") > 0.0);
}

/// Measures Millrace's relay, forwarding in the kernel and in userspace, over raw QUIC and over WebTransport.
#[test]
fn relays_are_measured_over_both_transports() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP relays_are_measured_over_both_transports: needs root");
        return;
    }
    let rows = rows(
        "relay --relays kernel,user --transport raw,webtransport --no-forwarder --subscribers 2 --rate-hz 100 --seconds 1 \
         --rounds 1",
    );
    let rows = rows.as_array().expect("a list");
    let expected = [("raw", "kernel"), ("raw", "user"), ("webtransport", "kernel"), ("webtransport", "user")];
    assert_eq!(rows.len(), expected.len());
    for (row, (transport, engine)) in rows.iter().zip(expected) {
        assert_eq!((&row["transport"], &row["engine"]), (&Value::from(transport), &Value::from(engine)));
        assert_eq!(row.get("error"), None, "{row}");
        let number = |path: &str| row.pointer(path).and_then(Value::as_f64).unwrap_or(-1.0);
        assert!(number("/delivered") > 0.0 && number("/latency_us/p50") > 0.0, "{row}");
        assert!(number("/wire_latency_us/p50") > 0.0 && number("/wire/copies") > 0.0, "{row}");
        assert_eq!(number("/wire/subscribers"), 2.0, "{row}");
        if engine == "kernel" {
            assert!(number("/kernel/sent_percent") > 0.0, "{row}");
        }
    }
}

/// Relays in a row are measured one by one, in a cluster and with upstream relays. Each relay that forwards in the
/// kernel also forwards there what another relay sends it. The relay of Cloudflare has no chains, and says so.
#[test]
fn relays_in_a_row_are_measured_one_by_one() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP relays_in_a_row_are_measured_one_by_one: needs root");
        return;
    }
    for by in ["cluster", "upstream"] {
        let rows = rows(&format!(
            "relay --chain 3 --chain-by {by} --relays kernel,user,moq-relay-ietf --rate-hz 100 --seconds 1 --rounds 1"
        ));
        let [kernel, user, refused] = &rows.as_array().expect("a list")[..] else { panic!("{rows}") };
        for (row, engine) in [(kernel, "kernel"), (user, "user")] {
            assert_eq!(
                (&row["engine"], &row["chain_by"], &row["subscribers"]),
                (&Value::from(engine), &Value::from(by), &Value::from(1))
            );
            assert_eq!(row.get("error"), None, "{row}");
            assert_eq!(row["lost"], 0, "{row}");
            let hops = row["hops"].as_array().expect("a list");
            assert_eq!((&row["chain"], hops.len()), (&Value::from(3), 3));
            for part in hops.iter().chain([row]) {
                let number = |path: &str| part.pointer(path).and_then(Value::as_f64).unwrap_or(-1.0);
                assert!(number("/wire_latency_us/p50") > 0.0 && number("/wire/copies") > 0.0, "{row}");
                assert_eq!(number("/wire/subscribers"), 1.0, "{row}");
            }
            for hop in hops {
                assert!(hop["cpu_ns_per_object"].as_f64().is_some_and(|ns| ns > 0.0), "{row}");
                let share = hop.pointer("/kernel/sent_percent").and_then(Value::as_f64);
                assert_eq!(share.is_some_and(|share| share > 90.0), engine == "kernel", "{row}");
            }
        }
        let error = refused["error"].as_str().unwrap_or_default();
        assert!(error.contains("moq-relay-ietf has no chains"), "{refused}");
    }
}

/// Millrace's own publisher and player work over raw QUIC and WebTransport, with a relay that forwards in the kernel
/// and with one that forwards in userspace.
#[test]
fn publishers_and_players_are_paired_or_skipped_with_reason() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP publishers_and_players_are_paired_or_skipped_with_reason: needs root");
        return;
    }
    if Command::new("ffmpeg").arg("-version").output().is_err() {
        println!("SKIP publishers_and_players_are_paired_or_skipped_with_reason: no ffmpeg");
        return;
    }
    let (is_fine, rows, table) =
        matrix("--publishers millrace,moq-pub --players millrace --transport raw,webtransport --seconds 1");
    assert!(is_fine && table.contains("### QUIC\n"), "{table}");
    assert!(table.contains("| millrace | identical |"), "{table}");
    assert_eq!(rows.len(), 8);
    for row in rows {
        if row["publisher"]["program"] == "moq-pub" {
            assert_eq!((&row["outcome"], &row["frames"]), (&Value::from("not here"), &Value::Null), "{row}");
            continue;
        }
        assert_eq!(
            (&row["outcome"], &row["identical"]),
            (&Value::from("played"), &Value::from(true)),
            "{row}"
        );
        assert!(row["frames"].as_u64().is_some_and(|frames| frames >= 30), "{row}");
    }
    // A run without any pair of compatible programs is an error.
    let (is_fine, rows, _) = matrix("--publishers chromium --players millrace --transport raw");
    assert!(!is_fine && rows.len() == 2);
    for row in rows {
        assert_eq!(row["outcome"], "cannot meet", "{row}");
        assert!(row["reason"].as_str().is_some_and(|why| why.contains("no raw QUIC")), "{row}");
    }
}

/// Runs `millrace-lab bench matrix` without programs of other projects. Returns whether it succeeded, its rows as JSON,
/// and its table as text.
fn matrix(arguments: &str) -> (bool, Vec<Value>, String) {
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("rows.json");
    let output = Command::new(env!("CARGO_BIN_EXE_millrace-lab"))
        .args(["bench", "matrix", "--drafts", "18"])
        .args(arguments.split_whitespace())
        .arg("--json")
        .arg(&json)
        .env("MILLRACE_PEERS", directory.path())
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .current_dir(directory.path())
        .output()
        .expect("millrace-lab runs");
    let said = String::from_utf8_lossy(&output.stderr);
    let rows = std::fs::read(json).unwrap_or_else(|_| panic!("no rows: {said}"));
    let rows: Value = serde_json::from_slice(&rows).expect("JSON");
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.success(), rows.as_array().expect("a list").clone(), table)
}

#[test]
fn relay_bandwidth_beside_tcp_at_a_bottleneck_is_measured() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP relay_bandwidth_beside_tcp_at_a_bottleneck_is_measured: needs root");
        return;
    }
    let rows = rows(
        "fairness --relays kernel,user --tcp reno,none --buffers 1 --rate-mbit 5 --seconds 1 --rounds 1",
    );
    let [kernel, user, reno, none] = &rows.as_array().expect("a list")[..] else { panic!("{rows}") };
    for (row, relay, engine) in
        [(kernel, "millrace", "kernel".into()), (user, "millrace", "user".into()), (reno, "tcp", Value::Null)]
    {
        assert_eq!((&row["relay"], &row["engine"]), (&Value::from(relay), &engine));
        let round = &row["rounds"][0];
        let number = |name: &str| round[name].as_f64().unwrap_or_else(|| panic!("{name} in {row}"));
        // The benchmark waits until both flows run. Which of them gets the bottleneck in one second is not checked.
        assert!(number("flow_mbit") + number("cubic_mbit") > 0.0, "{row}");
        assert!((0.0..=100.0).contains(&number("share_percent")), "{row}");
        assert_eq!(row["share_percent"]["median"], round["share_percent"]);
    }
    let error = none["rounds"][0]["error"].as_str().unwrap_or_else(|| panic!("an error in {none}"));
    assert!(error.contains("TCP with none") && error.contains("tcp_available_congestion_control"), "{error}");
}

#[test]
fn media_delivery_during_hostile_client_requests_is_measured() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP media_delivery_during_hostile_client_requests_is_measured: needs root");
        return;
    }
    let rows = rows(
        "hostile --transport raw,webtransport --scenarios garbage,web-requests --clients 2 --seconds 2 --rounds 1",
    );
    let expected = [
        ("garbage", "raw", "kernel"),
        ("garbage", "raw", "user"),
        ("garbage", "webtransport", "kernel"),
        ("garbage", "webtransport", "user"),
        ("web-requests", "webtransport", "kernel"),
        ("web-requests", "webtransport", "user"),
    ];
    let rows = rows.as_array().expect("a list");
    assert_eq!(rows.len(), expected.len());
    for (row, (scenario, transport, engine)) in rows.iter().zip(expected) {
        let text = ["scenario", "transport", "engine"].map(|name| row[name].as_str());
        assert_eq!(text, [Some(scenario), Some(transport), Some(engine)]);
        let round = &row["rounds"][0];
        assert!(round["attacks"].as_u64().is_some_and(|attacks| attacks > 0), "{row}");
        for stretch in ["quiet", "meanwhile", "alike"] {
            let newcomers = &round[stretch]["newcomers"];
            assert!(newcomers["count"].as_u64().is_some_and(|count| count > 0), "{stretch}: {row}");
            assert_eq!(newcomers["ready_ms"].is_object(), engine == "kernel", "{stretch}: {row}");
            assert_eq!(newcomers["queue_too_long"], 0, "{stretch}: {row}");
            let owed = &round[stretch]["owed"];
            // A relay that gets too little of the CPUs gives up late groups, so not all objects need to arrive.
            let delivered = owed["delivered"].as_u64().expect("a number");
            assert!((1..=owed["objects"].as_u64().unwrap()).contains(&delivered), "{stretch}: {row}");
        }
        for rate in ["packets_per_s", "alike_packets_per_s"] {
            assert!(round[rate].as_f64().is_some_and(|rate| rate > 0.0), "{rate}: {row}");
        }
        assert!(round["rss_bytes_last"].as_u64().is_some_and(|bytes| bytes > 0), "{row}");
    }
}

/// The addresses of all viewers change. How long it takes until the viewers are served again depends on the CPUs, and
/// is not checked.
#[test]
fn time_until_moved_viewers_are_served_is_measured() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP time_until_moved_viewers_are_served_is_measured: needs root");
        return;
    }
    let rows = rows("moves --sessions 50 --rounds 1");
    let [row] = &rows.as_array().expect("a list")[..] else { panic!("{rows}") };
    assert_eq!((&row["engine"], &row["sessions"]), (&Value::from("kernel"), &Value::from(50)));
    let round = &row["rounds"][0];
    for figure in ["back_ms", "ready_ms"] {
        assert!(round[figure].as_f64().is_some(), "{figure}: {row}");
    }
    let viewers = &round["viewers"];
    assert_eq!((&viewers["served"], &viewers["moves"][0]["sessions"]), (&Value::from(50), &Value::from(50)));
    for figure in ["missing", "duplicates", "late", "streams_cut"] {
        assert_eq!(viewers[figure], 0, "{figure}: {row}");
    }
    assert!(viewers["bytes_per_session"].as_u64().is_some_and(|bytes| bytes > 0), "{row}");
}

/// When a publisher or relay restarts, viewers keep their subscriptions, receive no object twice, and then receive
/// media again. This holds for a relay that forwards in the kernel and for one that forwards in userspace. The test
/// does not check how long the interruption lasts.
#[test]
fn restarted_publishers_and_relays_are_measured() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP restarted_publishers_and_relays_are_measured: needs root");
        return;
    }
    let rows = rows("restarts --publisher-absent 0,1 --relay-absent 1 --rounds 1");
    let rows = rows.as_array().expect("a list");
    assert_eq!(rows.len(), 6, "{rows:?}");
    for row in rows {
        assert_eq!(row["errors"], Value::Array(Vec::new()), "{row}");
        let viewers = row["viewers"].as_array().expect("a list");
        let names: Vec<_> = viewers.iter().filter_map(|viewer| viewer["viewer"].as_str()).collect();
        let of_relay = row["case"] == "relay 1 s";
        assert_eq!(names, ["its client", "behind an edge"][..1 + usize::from(of_relay)]);
        for viewer in viewers {
            assert!(viewer["gap_ms"][0].as_f64().is_some_and(|gap| gap > 0.0), "{row}");
            assert_eq!(
                (&viewer["duplicates"], &viewer["ended"]),
                (&Value::from(0), &Value::from(0)),
                "{row}"
            );
        }
    }
}

/// A relay is measured that forwards in the kernel, and one that forwards in userspace. How much a subscriber with a
/// bad link slows another one depends on the machine, and is not checked.
#[test]
fn subscriber_beside_a_bad_link_is_measured() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP subscriber_beside_a_bad_link_is_measured: needs root");
        return;
    }
    let rows = rows("isolation --relays kernel,user --impair bursts --seconds 2 --rounds 1");
    let [kernel, user] = &rows.as_array().expect("a list")[..] else { panic!("{rows}") };
    for (row, engine) in [(kernel, "kernel"), (user, "user")] {
        assert_eq!((&row["engine"], &row["impair"]), (&Value::from(engine), &Value::from("bursts")));
        let round = &row["rounds"][0];
        assert_eq!(round.get("error"), None, "{row}");
        for (link, who) in [("good", "owed"), ("good", "other"), ("bad", "owed"), ("bad", "other")] {
            let owed = &round[link][who];
            assert!(owed["objects"].as_u64().is_some_and(|objects| objects > 0), "{link}, {who}: {row}");
        }
        for percentile in ["p50", "p90", "p99"] {
            let it = &row["latency_us"][percentile];
            assert!(it["ratio"]["mean"].as_f64().is_some_and(|ratio| ratio > 0.0), "{row}");
            assert!(it["good"]["median"].as_f64().is_some_and(|us| us > 0.0), "{row}");
        }
    }
}

/// Relays that forward in the kernel and in userspace are measured, with several renditions and with one. The share of
/// video that is shown in time depends on the machine, and is not checked.
#[test]
fn adaptation_to_a_slow_link_is_measured() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP adaptation_to_a_slow_link_is_measured: needs root");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let plot = directory.path().join("plot.svg");
    let rows = rows(&format!(
        "adapt --relays kernel,user --policies adaptive,live --rates-mbit 8,4 --seconds 4 --rounds 1 --plot {}",
        plot.display()
    ));
    let plot = std::fs::read_to_string(plot).expect("a plot");
    for text in ["millrace (kernel), adaptive", "millrace (user), live", "stall_ms_total", "latency_p95_ms"] {
        assert!(plot.contains(text), "{text} is not in the picture");
    }
    let rows = rows.as_array().expect("a list");
    let expected = [("kernel", "adaptive"), ("kernel", "live"), ("user", "adaptive"), ("user", "live")];
    assert_eq!(rows.len(), expected.len());
    for (row, (engine, policy)) in rows.iter().zip(expected) {
        let text = ["relay", "engine", "policy", "profile"].map(|name| row[name].as_str());
        assert_eq!(text, [Some("millrace"), Some(engine), Some(policy), Some("8-4")], "{row}");
        assert_eq!(row["rounds"][0].get("error"), None, "{row}");
        let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name} in {row}"));
        assert!(number("frames_shown_pct") > 0.0 && number("latency_p95_ms") > 0.0, "{row}");
        for name in ["audio_on_time_pct", "key_frames_on_time_pct", "frames_shown_pct"] {
            assert!((0.0..=100.0).contains(&number(name)), "{name} in {row}");
        }
        assert!(number("longest_stall_ms") <= number("stall_ms_total"), "{row}");
        let spread = &row["spread"]["audio_on_time_pct"];
        assert_eq!(
            [&spread["median"], &spread["min"], &spread["max"]],
            [&row["audio_on_time_pct"]; 3],
            "{row}"
        );
        if policy == "live" {
            assert_eq!(number("switches"), 0.0, "{row}");
        }
    }
}

/// A relay is measured that forwards in the kernel, and one that forwards in userspace. The share of video that the
/// browser shows in time depends on the machine, and is not checked.
#[test]
fn browser_playback_is_measured() {
    if let Some(why) = no_browser() {
        println!("SKIP browser_playback_is_measured: {why}");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let rows = rows(&format!(
        "watch --relays kernel,user --impair clean --seconds 2 --rounds 1 --buffer-ms 150 --screenshots {}",
        directory.path().display()
    ));
    let [kernel, user] = &rows.as_array().expect("a list")[..] else { panic!("{rows}") };
    for (row, engine) in [(kernel, "kernel"), (user, "user")] {
        assert_eq!(row.get("error"), None, "{row}");
        let text = ["relay", "engine", "profile"].map(|name| row[name].as_str());
        assert_eq!(text, [Some("millrace"), Some(engine), Some("clean")], "{row}");
        let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name} in {row}"));
        assert!((59.0..=61.0).contains(&number("frames_owed")), "two seconds of 30 frames: {row}");
        assert!(number("frames_shown_pct") > 0.0 && number("frames_shown_pct") <= 100.0, "{row}");
        assert!(number("longest_stall_ms") <= number("stall_ms_total"), "{row}");
        assert!(number("glass_to_glass_p50_ms") > 0.0 && number("first_picture_ms") > 0.0, "{row}");
        assert!(number("glass_to_glass_p50_ms") <= number("glass_to_glass_p95_ms"), "{row}");
        assert_eq!(number("buffer_ms"), 150.0, "the player has the buffer that it was told: {row}");
        assert_eq!(row["spread"]["frames_shown_pct"]["min"], row["frames_shown_pct"], "{row}");
        let picture = std::fs::read(directory.path().join(format!("{engine}-clean-1.png")));
        assert!(picture.expect("a screenshot").starts_with(b"\x89PNG"), "{engine}");
    }
}

/// Returns the reason why a browser cannot be tested on this machine, if there is one.
fn no_browser() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root".to_owned());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = |program: &str| std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
    let chromium = std::env::var("CHROMIUM").unwrap_or_else(|_| "chromium".to_owned());
    let missing = [&chromium[..], "node", "ffmpeg"].into_iter().find(|program| !is_there(program));
    missing.map(|program| format!("no {program}"))
}

/// A benchmark without results fails with an error, after reporting its progress.
#[test]
fn benchmark_without_results_fails() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP benchmark_without_results_fails: needs root");
        return;
    }
    let nowhere = tempfile::tempdir().expect("a directory");
    for arguments in [
        "relay --relays moq-relay --no-forwarder --subscribers 1 --seconds 1 --rounds 1",
        "relay --max-rate --relays moq-relay --no-forwarder --subscribers 1 --seconds 1 --rounds 1",
        "fairness --relays moq-relay --tcp none --buffers 1 --seconds 1 --rounds 1",
        "isolation --relays moq-relay --impair bursts --seconds 1 --rounds 1",
        "adapt --relays moq-relay --seconds 3 --rounds 1",
        "graft fct --controls none --sizes-kib 64 --loss 0 --rtt-ms 20 --rounds 1",
        "graft fairness --controls none --buffers 1 --seconds 1 --rounds 1",
        "cost --only nothing",
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_millrace-lab"))
            .arg("bench")
            .args(arguments.split_whitespace())
            .env("MILLRACE_PEERS", nowhere.path())
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .current_dir(nowhere.path())
            .output()
            .expect("millrace-lab runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments}: {said}");
        let last = said.lines().last().unwrap_or_default();
        assert!(last.starts_with("millrace-lab: no"), "{arguments}: {last}");
        let steps = said.lines().filter(|line| line.contains(" done")).count();
        assert!(steps > 0 || arguments.starts_with("cost"), "{arguments}: no progress in {said}");
    }
}
