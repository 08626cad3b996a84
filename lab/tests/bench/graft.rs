//! Runs each measurement of `millrace-lab bench graft` at its smallest size. Needs root and cgroup version 2.

use std::{fs::File, process::Command};

use millrace_lab::train::runs;
use nix::fcntl::{Flock, FlockArg};
use serde_json::Value;

/// Runs a measurement with these arguments. Returns its rows. Returns `None` after printing why the measurement cannot
/// run on this machine.
fn rows(test: &str, arguments: &str) -> Option<Vec<Value>> {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP {test}: needs root");
        return None;
    }
    let rows = crate::rows(&format!("graft {arguments}"));
    Some(rows.as_array().expect("a list").clone())
}

/// A congestion control can be registered with TCP only once. So the measurements run one after another, and a lock
/// keeps other test programs out.
#[test]
fn each_graft_benchmark_reports_measured_rows() {
    let file = File::create(std::env::temp_dir().join("millrace-graft-tests.lock")).expect("a lock");
    let _turn = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, error)| error).expect("a turn");
    let Some(deployed) = rows("each_graft_benchmark_reports_measured_rows", "deploy --rounds 2") else {
        return;
    };
    let what: Vec<_> = deployed.iter().filter_map(|row| row["what"].as_str()).collect();
    let wanted = [
        "graft longhaul",
        "graft pcc",
        "graft longhaul, a new file",
        "graft pcc, a new file",
        "TCP in place, one port",
        "reading and changing sockets",
    ];
    assert_eq!(what, wanted);
    for row in &deployed {
        assert_eq!(row["rounds"], 2, "{row}");
        assert!(row["total_us"]["p50"].as_f64().is_some_and(|us| us > 0.0), "{row}");
    }
    // The measurement of the first row loads the same graft repeatedly. A repeated load does not use libbpf, and
    // reports the verifier's time separately.
    assert!(deployed[0]["steps_us"]["verify"]["p50"].as_f64().is_some_and(|us| us > 0.0), "{}", deployed[0]);

    let negotiated = rows(
        "each_graft_benchmark_reports_measured_rows",
        "negotiate --rtt-ms 0,10 --pools 2 --rounds 2 --connections 5",
    );
    for (row, rtt_ms) in negotiated.expect("root").iter().zip([0, 10]) {
        assert_eq!((&row["rtt_ms"], &row["rounds"], &row["pool"]), (&rtt_ms.into(), &2.into(), &2.into()));
        for step in ["connect_us", "tls_us", "offer_us", "bind_us"] {
            assert!(row["steps"][step]["p50"].as_f64().is_some_and(|us| us > 0.0), "{step}: {row}");
        }
        assert!(row["tcp_bound_us"]["p50"].as_f64().is_some_and(|us| us > 0.0), "{row}");
    }

    let swapped = rows("each_graft_benchmark_reports_measured_rows", "swap --rounds 20").expect("root");
    let [swap] = &swapped[..] else { panic!("{swapped:?}") };
    assert_eq!((&swap["swaps"], &swap["bytes_wrong"]), (&Value::from(20), &Value::from(0)));
    assert!(swap["bytes_sent"].as_u64().is_some_and(|bytes| bytes > 0), "{swap}");
    assert_eq!(swap["bytes_sent"], swap["bytes_received"]);

    transfers_are_kept();

    let redirected = rows(
        "each_graft_benchmark_reports_measured_rows",
        "redirect --rounds 1 --messages 50 --seconds 0.2 --connections 200",
    )
    .expect("root");
    let way = |name: &str| redirected.iter().find(|row| row["way"] == name);
    let (direct, carried) = way("TCP").zip(way("carried")).expect("both");
    for row in [direct, carried] {
        assert!(row["one_way_us"]["p50"].as_f64().is_some_and(|us| us > 0.0), "{row}");
        assert!(row["gbit_s"]["median"].as_f64().is_some_and(|gbit| gbit > 0.0), "{row}");
    }
    assert!(carried["added_per_host_p50_us"].is_number() && direct["added_per_host_p50_us"].is_null());
    for name in ["in place", "carried, TCP"] {
        let row = way(name).unwrap_or_else(|| panic!("no {name}: {redirected:?}"));
        assert!(row["gbit_s_of_tcp_percent"].as_f64().is_some_and(|percent| percent > 0.0), "{row}");
    }
    let many = redirected.iter().find(|row| row["connections"] == 200).expect("many");
    assert_eq!(many["waves"].as_array().map(Vec::len), Some(3));

    let plot = tempfile::NamedTempFile::with_suffix(".svg").expect("a file");
    let arguments =
        "fct --controls cubic,mr_longhaul,none --cells 64:0:20,64:1:10 --labs 2 --rounds 1 --plot ";
    let timed =
        rows("each_graft_benchmark_reports_measured_rows", &format!("{arguments}{}", plot.path().display()))
            .expect("root");
    let svg = std::fs::read_to_string(plot.path()).expect("a picture");
    assert!(svg.contains("64 KiB, 10 ms") && svg.contains("mr_longhaul"), "{svg}");
    let earlier = tempfile::NamedTempFile::with_suffix(".json").expect("a file");
    serde_json::to_writer(earlier.as_file(), &timed).expect("rows");
    let twice = format!("fct --only-add --add {0} --add {0}", earlier.path().display());
    let twice = rows("each_graft_benchmark_reports_measured_rows", &twice).expect("root");
    assert_eq!(twice.len(), timed.len());
    for (both, one) in twice.iter().zip(&timed) {
        let rounds = [&one["rounds"][0], &one["rounds"][0]].map(Clone::clone);
        assert_eq!((&both["rounds"], &both["ms"]), (&rounds.to_vec().into(), &one["ms"]));
    }
    let (near, timed): (Vec<_>, Vec<_>) = timed.into_iter().partition(|row| row["rtt_ms"] == 10);
    assert_eq!((near.len(), &near[0]["loss_percent"]), (3, &1.0.into()));
    let [cubic, longhaul, none] = &timed[..] else { panic!("{timed:?}") };
    for (row, control) in [(cubic, "cubic"), (longhaul, "mr_longhaul")] {
        assert_eq!((&row["congestion_control"], &row["bytes"]), (&control.into(), &65536.into()));
        assert_eq!((&row["over"], &row["rounds"][0]["bytes"]), (&0.into(), &65536.into()), "{row}");
        assert!(row["ms"]["median"].as_f64().is_some_and(|ms| ms >= 20.0), "{row}");
    }
    assert!(
        none["rounds"][0]["error"].as_str().is_some_and(|error| error.contains("TCP with none")),
        "{none}"
    );

    let arguments =
        "fairness --controls mr_pcc,congestion --buffers 1,2 --labs 2 --rate-mbit 5 --seconds 1 --rounds 1";
    let shared = rows("each_graft_benchmark_reports_measured_rows", arguments).expect("root");
    let cells = [1.0, 2.0].map(|buffer| ["mr_pcc", "congestion"].map(|control| (control, buffer)));
    assert_eq!(shared.len(), 4);
    for (row, (control, buffer)) in shared.iter().zip(cells.as_flattened()) {
        assert_eq!((&row["congestion_control"], &row["buffer_bdp"]), (&(*control).into(), &(*buffer).into()));
        // The benchmark waits until both flows run. Which of them gets the bottleneck in one second is not checked.
        let [flow, cubic] = ["flow_mbit", "cubic_mbit"].map(|name| row["rounds"][0][name].as_f64());
        assert!(flow.zip(cubic).is_some_and(|(flow, cubic)| flow + cubic > 0.0), "{row}");
    }
}

#[test]
fn packet_functions_are_replaced_at_runtime_without_losing_datagrams() {
    let arguments = "swap --packets 20000 --rate 5000";
    let Some(rows) = rows("packet_functions_are_replaced_at_runtime_without_losing_datagrams", arguments)
    else {
        return;
    };
    let [row] = &rows[..] else { panic!("{rows:?}") };
    for (what, count) in [("sent", 20000), ("received", 20000), ("lost", 0), ("wrong", 0), ("twice", 0)] {
        assert_eq!(row[format!("packets_{what}")], count, "{row}");
    }
    assert!(row["swaps"].as_u64().is_some_and(|swaps| swaps > 0), "{row}");
    assert!(row["agreed_us"]["p50"].as_f64().is_some_and(|us| us > 40_000.0), "two round trips: {row}");
}

/// Checks that each list of packet functions keeps its promises (such as full reliability) on a link that loses
/// packets. Throughput and delay are not checked.
#[test]
fn packet_functions_repair_lost_messages_with_their_promised_reliability() {
    let arguments = "repair --windows 1,16 --loss 5 --rtt-ms 10 --delay-rtt-ms 20 --delay-loss 5 --rate 100 --seconds 3 --rounds 1";
    let Some(rows) = rows("packet_functions_repair_lost_messages_with_their_promised_reliability", arguments)
    else {
        return;
    };
    let (windows, messages): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| row["part"] == "window");
    assert_eq!(windows.iter().map(|row| row["window"].clone()).collect::<Vec<_>>(), [1, 16]);
    for row in &windows {
        for list in ["selective_repeat", "go_back_n"] {
            let round = &row[list][0];
            assert!(round["packets_s"].as_f64().is_some_and(|packets| packets > 0.0), "{row}");
            assert!(round["transmissions"].as_f64().is_some_and(|sent| sent >= 1.0), "{row}");
        }
    }
    let names: Vec<_> = messages.iter().filter_map(|row| row["candidate"].as_str()).collect();
    let lists = ["repair", "gobackn", "partial 20", "partial 5", "fec", "fec, repair"];
    assert_eq!(names, [&lists[..], &["TCP cubic", "TCP bbr", "QUIC datagrams"]].concat());
    for row in &messages {
        let [sent, lost] = ["sent", "lost"].map(|what| row[what].as_u64().expect("a count"));
        assert!(sent > 0 && row["delay_ms"]["p50"].as_f64().is_some_and(|ms| ms >= 10.0), "{row}");
        match row["candidate"].as_str() {
            Some("partial 20") => assert!(lost * 1000 <= sent * 20, "more than the bound: {row}"),
            Some("partial 5") => assert!(lost * 1000 <= sent * 5, "more than the bound: {row}"),
            Some("fec") => assert!(lost * 100 <= sent * 5, "more than without: {row}"),
            Some("QUIC datagrams") => assert!(lost * 4 <= sent, "far more than the link loses: {row}"),
            _ => assert_eq!(lost, 0, "{row}"),
        }
        // A lost message counts as if its delay were longer than that of every message that arrived.
        let owed = (row["owed"].as_u64().expect("a count"), row["p99_of_owed_ms"].as_f64());
        assert_eq!(owed.0, 300);
        let most = row["delay_ms"]["max"].as_f64();
        assert!(owed.1.is_none() == ((sent - lost) * 100 < owed.0 * 99) && owed.1 <= most, "{row}");
    }
}

/// Each measured transfer is a row of the CSV file with the results. A transfer whose row is complete is not measured
/// again, and a transfer whose row is incomplete is measured again.
fn transfers_are_kept() {
    let directory = tempfile::tempdir().expect("a directory");
    let csv = directory.path().join("runs.csv");
    let measure = |further: &[&str]| {
        let arguments = "bench graft select --networks 2 --seeds 1 --rates 5:10 --rtts 5:20 --limit 30 --most-kib 128 --at-once 2";
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace-lab"));
        command.args(arguments.split(' ')).args(["--candidates", "mr_longhaul,carried-warm"]).args(further);
        command.arg("--csv").arg(&csv).output().expect("millrace-lab runs")
    };
    let read = || {
        let text = std::fs::read_to_string(&csv).expect("rows");
        (runs::parse(&text).expect("rows as they should be"), text)
    };
    let first = measure(&[]);
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    let (rows, text) = read();
    assert_eq!(rows.len(), 4);
    for row in &rows {
        assert!(row.came.bytes == 128 << 10 && row.came.rungs_ms[2].is_some(), "{row:?}");
        assert!(row.seen.rtt_ms.is_some_and(|ms| ms >= row.truth.rtt_ms * 0.9), "{row:?}");
    }
    // A connection that was never limited by its path shows no delivery rate, so not all rows have one.
    assert!(rows.iter().any(|row| row.seen.rate_mbit.is_some()), "{rows:?}");
    let again = measure(&[]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("--resume"), "it is not written over");
    std::fs::write(&csv, &text[..text.len() - 5]).expect("a row is cut");
    assert!(measure(&["--resume"]).status.success());
    let (now, _) = read();
    assert_eq!((&now[..3], now.len()), (&rows[..3], 4));
    assert_eq!((now[3].network, &now[3].candidate), (rows[3].network, &rows[3].candidate));
}

/// When the path's round-trip time rises and falls, the session changes to another graft and back. Either the
/// application causes the changes (`aware`), or a rule in the daemon's settings does (`in-place`). The command fails if
/// more messages are lost than the graft in use allows.
#[test]
fn graft_is_reconfigured_when_the_path_changes() {
    let plot = tempfile::NamedTempFile::with_suffix(".svg").expect("a file");
    let arguments = "reconfigure --rounds 1 --window 16 --megabytes 4 --after-s 1 --far-s 4 --plot ";
    let arguments = format!("{arguments}{}", plot.path().display());
    let Some(rows) = rows("graft_is_reconfigured_when_the_path_changes", &arguments) else { return };
    let methods: Vec<_> = rows.iter().filter_map(|row| row["method"].as_str()).collect();
    assert_eq!(methods, ["aware", "in-place", "none"]);
    for row in &rows {
        let round = &row["rounds"][0];
        let counts = ["messages", "received", "lost"].map(|what| round[what].as_u64().expect("a count"));
        assert_eq!(counts[0], counts[1] + counts[2], "{row}");
        let changes = round["changed_after_s"].as_array().expect("both");
        let is_changed = changes.iter().all(|after| after.as_f64().is_some_and(|s| s > 0.0));
        assert!(is_changed == (row["method"] != "none"), "{changes:?}");
        let reasons = round["reasons"].as_array().expect("a list");
        assert_eq!(reasons.len(), if row["method"] == "in-place" { 2 } else { 0 }, "{reasons:?}");
        for phase in round["phases"].as_array().expect("phases") {
            assert!(phase["delay_ms"]["p50"].as_f64().is_some_and(|ms| ms >= 10.0), "{phase}");
        }
        assert!(row["method"] != "none" || counts[2] == 0, "{row}");
    }
    let svg = std::fs::read_to_string(plot.path()).expect("a picture");
    assert!(svg.contains("in-place") && svg.contains("320 ms from 1 s on"), "{svg}");
}

/// The memory that the daemon reports equals the kernel's count. It does not grow when the sessions are used.
#[test]
fn sessions_use_the_memory_that_the_daemon_reports() {
    let arguments = "sessions --sessions 1,3 --rate 200 --seconds 1 --rounds 1 --memory-sessions 1,300";
    let Some(rows) = rows("sessions_use_the_memory_that_the_daemon_reports", arguments) else { return };
    let of = |part: &str| rows.iter().filter(|row| row["part"] == part).collect::<Vec<_>>();
    let delays = of("delay");
    let received = of("receive");
    let memory = of("memory");
    let room = of("room");
    assert_eq!(
        [delays.len(), received.len(), memory.len(), room.len(), rows.len()],
        [2 * 7, 2, 2, 2 * 2, 22]
    );
    assert_ne!(received[0]["sealed"], received[1]["sealed"]);
    for row in delays.into_iter().chain(received) {
        assert_eq!((&row["sent"], &row["lost"]), (&200.into(), &0.into()), "{row}");
        assert!(row["delay_us"]["p50"].as_f64().is_some_and(|us| us > 0.0), "{row}");
    }
    for (row, sessions) in memory.iter().zip([1, 300]) {
        assert_eq!(row["sessions"], sessions);
        let [stated, before, after] = ["stated", "maps", "maps_after"]
            .map(|what| row[format!("{what}_bytes")].as_f64().expect("bytes"));
        assert!(before == after && (0.9..1.1).contains(&(stated / before)), "{row}");
    }
}

/// The session uses both paths, and continues on the remaining path after the other path was cut.
#[test]
fn multipath_session_uses_two_paths_and_survives_the_cut_of_one() {
    let Some(rows) = rows(
        "multipath_session_uses_two_paths_and_survives_the_cut_of_one",
        "paths --rate-mbit 5 --seconds 2 --rounds 1",
    ) else {
        return;
    };
    let names: Vec<_> = rows.iter().map(|row| row["paths"].as_str().expect("a name")).collect();
    assert_eq!(names, ["one path", "spread", "redundant", "spread, first cut", "spread, second cut"]);
    for row in &rows {
        let round = &row["rounds"][0];
        assert!(round["received"].as_u64() > Some(0) && round["gap_ms"].as_f64() > Some(0.0), "{row}");
    }
}

/// Runs `bench graft faults` for a short time; `make soak` runs it for longer.
#[test]
fn tunnelled_connections_survive_faults_without_damage() {
    let test = "tunnelled_connections_survive_faults_without_damage";
    if Command::new("nft").arg("--version").output().is_err() {
        println!("SKIP {test}: needs nft");
        return;
    }
    let only = "client-killed,client-restarted,blackhole";
    let arguments = format!("faults --carriers quic,tcp --labs 3 --only {only}");
    let Some(rows) = rows(test, &arguments) else { return };
    assert_eq!(rows.len(), 2 * only.split(',').count());
    for row in &rows {
        let number = |name: &str| row[name].as_u64().expect("a number");
        assert_eq!(row["wrong"], serde_json::json!([]), "{row}");
        assert_eq!(number("connections"), number("whole") + number("reset"), "{row}");
        assert!(number("whole") > 0 && number("bytes") > 0 && number("runs") > 0, "{row}");
    }
    let of = |fault: &str| rows.iter().filter(|row| row["fault"] == fault).collect::<Vec<_>>();
    for row in of("blackhole") {
        assert_eq!(&row["reset"], &0, "{row}");
    }
    for row in of("client-killed") {
        assert!(row["reset"].as_u64() >= Some(3), "{row}");
    }
}
