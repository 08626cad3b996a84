use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use millrace_cost::report::{Event, ProfiledStack, Stacks};
use millrace_daemon::http::fetch;
use millrace_daemon::http::token::{HttpToken, TokenFile};

use super::*;
use crate::text::tests::example;

const WAIT: Duration = Duration::from_secs(10);

fn start(live: bool, memory_bytes: usize) -> Dashboard {
    let access = HttpAccess::default();
    let losses = Arc::default();
    Dashboard::start(&Config { addr: ([127, 0, 0, 1], 0).into(), memory_bytes, live, access, losses })
        .expect("it starts")
}

fn report(sequence: u64) -> Arc<Report> {
    let stack = ProfiledStack {
        cpu: 0,
        event: Some(Event::NetRx),
        pid: None,
        frames: vec![0, 1],
        samples: 2,
        ns: 20,
    };
    let other_cpu = ProfiledStack { cpu: 1, samples: 5, ..stack.clone() };
    Arc::new(Report {
        sequence,
        time_unix_ms: 1000 * sequence,
        stacks: Some(Stacks {
            functions: vec!["a".to_owned(), "b".to_owned()],
            stacks: vec![stack, other_cpu],
        }),
        ..example()
    })
}

fn get(dashboard: &Dashboard, path: &str) -> (u16, String) {
    fetch(dashboard.local_addr, path, None).expect("an answer")
}

fn json(dashboard: &Dashboard, path: &str) -> serde_json::Value {
    let (code, text) = get(dashboard, path);
    assert_eq!(code, 200, "{text}");
    serde_json::from_str(&text).expect("JSON")
}

/// Connects a viewer and reads its `hello` event.
fn view(dashboard: &Dashboard) -> BufReader<TcpStream> {
    let mut stream = TcpStream::connect(dashboard.local_addr).expect("connected");
    stream.set_read_timeout(Some(WAIT)).expect("set");
    write!(stream, "GET /api/reports HTTP/1.0\r\nHost: localhost\r\n\r\n").expect("asked");
    let mut lines = BufReader::new(stream);
    assert_eq!(next(&mut lines), ("hello".to_owned(), "{\"live\":true}".to_owned()));
    lines
}

/// Reads the name and data of the next event.
fn next(lines: &mut impl BufRead) -> (String, String) {
    let mut event = String::new();
    let mut line = String::new();
    loop {
        line.clear();
        assert_ne!(lines.read_line(&mut line).expect("a line in time"), 0, "the stream ended");
        if let Some(name) = line.strip_prefix("event: ") {
            name.trim_end().clone_into(&mut event);
        } else if let Some(data) = line.strip_prefix("data: ") {
            return (event, data.trim_end().to_owned());
        }
    }
}

fn sequence(data: &str) -> u64 {
    let report: Report = serde_json::from_str(data).expect("a report");
    assert_eq!(report.stacks, None);
    report.sequence
}

#[test]
fn dashboard_page_may_load_only_its_own_content() {
    let dashboard = start(true, 1 << 20);
    for (path, part) in [("/", "<script"), ("/app.js", "api/reports"), ("/app.css", "prefers-color-scheme")] {
        let (code, body) = get(&dashboard, path);
        assert!(code == 200 && body.contains(part), "{path}: {code}");
        assert!(!body.contains("http://") || path == "/app.js", "{path} needs nothing from elsewhere");
    }
    let ask = |host: &str| {
        let mut stream = TcpStream::connect(dashboard.local_addr).expect("connected");
        write!(stream, "GET / HTTP/1.0\r\nHost: {host}\r\n\r\n").expect("asked");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    };
    assert!(ask("localhost:1").contains("content-security-policy: default-src 'none';"));
    assert!(ask("rebound.example").starts_with("HTTP/1.0 403"));
}

#[test]
fn dashboard_viewers_get_each_report_at_once() {
    let mut dashboard = start(true, 1 << 20);
    let mut early = view(&dashboard);
    for at in 0..3 {
        dashboard.report(&report(at)).expect("taken");
        let (event, data) = next(&mut early);
        assert_eq!((event.as_str(), sequence(&data)), ("report", at));
    }
    // A later viewer gets the latest report without waiting for the next one.
    let (event, data) = next(&mut view(&dashboard));
    assert_eq!((event.as_str(), sequence(&data)), ("report", 2));
}

/// One viewer never reads. The other viewer gets every report, and the drops of the slow one are counted.
#[test]
fn dashboard_viewer_that_never_reads_does_not_delay_other_viewers() {
    let mut dashboard = start(true, 1 << 20);
    let slow = view(&dashboard);
    let mut quick = view(&dashboard);
    // Reports of 1 MiB soon exceed the sockets' buffers.
    let mut large = (*report(0)).clone();
    large.host.name = "x".repeat(1 << 20);
    for at in 0..40 {
        large.sequence = at;
        dashboard.report(&Arc::new(large.clone())).expect("taken");
        let (event, data) = next(&mut quick);
        assert_eq!((event.as_str(), sequence(&data)), ("report", at));
    }
    let dropped = dashboard.shared.state.lock().dropped_frames;
    assert!((1..40).contains(&dropped), "{dropped}");
    let (_, metrics) = get(&dashboard, "/metrics");
    assert!(metrics.contains(&format!("millrace_cost_http_dropped_frames_total {dropped}")), "{metrics}");
    assert!(metrics.contains("millrace_cost_http_skipped_reports_total 0"), "{metrics}");
    // A viewer that reads again first gets the reports that were already queued for it, then the number of dropped
    // reports.
    let mut slow = slow;
    let mut got = 0;
    while got < 40 - dropped {
        assert_eq!(next(&mut slow).0, "report");
        got += 1;
    }
    dashboard.report(&report(40)).expect("taken");
    assert_eq!(next(&mut slow), ("dropped".to_owned(), dropped.to_string()));
    assert_eq!(sequence(&next(&mut slow).1), 40);
}

/// Command lines may contain secrets, so they are served only if requests need a token.
#[test]
fn command_lines_require_a_token() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = TokenFile::At(dir.path().join("token"));
    let start = |file: &TokenFile| {
        let access = HttpAccess::new(file, Vec::new()).expect("a token");
        let config = Config {
            addr: ([127, 0, 0, 1], 0).into(),
            memory_bytes: 1 << 20,
            live: false,
            access: access.clone(),
            losses: Arc::default(),
        };
        let dashboard = Dashboard::start(&config).expect("it starts");
        let mut report = (*report(1)).clone();
        report.processes[0].arguments = Some("server --token s3cret".to_owned());
        dashboard.load(Arc::new(report));
        (dashboard, access)
    };
    let get = |dashboard: &Dashboard, access: &HttpAccess, path: &str| {
        // exact: the HTTP server serves one fixed report, which the test loaded before this request
        fetch(dashboard.local_addr, path, access.token().map(HttpToken::text)).expect("an answer")
    };
    let (open, all) = start(&TokenFile::Off);
    let (guarded, by_token) = start(&file);
    for (path, shown) in [("/api/report", true), ("/api/report?from=0&to=2000", true), ("/metrics", false)] {
        let (code, text) = get(&guarded, &by_token, path);
        assert_eq!((code, text.contains("s3cret")), (200, shown), "{path}");
        assert_eq!(get(&guarded, &all, path).0, 401, "{path}");
        let (code, text) = get(&open, &all, path);
        assert_eq!((code, text.contains("s3cret")), (200, false), "{path}");
    }
}

#[test]
fn reports_of_a_time_range_are_summed() {
    let dashboard = start(false, 1 << 20);
    assert_eq!(get(&dashboard, "/api/report").0, 404);
    for at in 1..=4 {
        dashboard.load(report(at));
    }
    assert_eq!(json(&dashboard, "/api/report")["time_unix_ms"], 4000);
    let two = json(&dashboard, "/api/report?from=2000&to=3000");
    assert_eq!(two["period_ns"], 2_000_000_000u64);
    assert_eq!(two["cpus"][0]["events"][0]["ns"], 500_000_000);
    assert_eq!(two["stacks"], serde_json::Value::Null);
    let samples = |path| json(&dashboard, path)["stacks"][0]["samples"].clone();
    assert_eq!(samples("/api/stacks?from=2000&to=3000"), 14);
    assert_eq!(samples("/api/stacks?from=2000&to=3000&cpu=0"), 4);
    assert_eq!(get(&dashboard, "/api/report?from=9000").0, 404);
    assert_eq!(get(&dashboard, "/api/report?from=x").0, 400);
}

/// A live dashboard whose memory is full drops the oldest reports but keeps their CPU shares as points of the chart.
#[test]
fn dashboard_memory_for_reports_is_bounded() {
    let mut dashboard = start(true, 20_000);
    let mut viewer = view(&dashboard);
    for at in 0..100 {
        dashboard.report(&report(at)).expect("taken");
        next(&mut viewer);
    }
    let history = json(&dashboard, "/api/history");
    assert_eq!(history["points"].as_array().map(Vec::len), Some(100));
    let mut events = vec![serde_json::Value::Null; Event::NETWORKING];
    events[0] = 0.5.into();
    assert_eq!(history["points"][0]["events"], serde_json::Value::Array(events));
    assert_eq!(history["points"][0]["cpus"], serde_json::json!([0.25, 0.25]));
    assert_eq!(history["whole_since_unix_ms"], 1000 * dashboard.forgotten());
    assert!((50..99).contains(&dashboard.forgotten()), "{}", dashboard.forgotten());
}

/// A log that exceeds the memory is stored from its beginning to its end, in sums of several reports.
#[test]
fn log_larger_than_memory_is_served_as_sums_of_reports() {
    let dashboard = start(false, 20_000);
    for at in 0..100 {
        dashboard.load(report(at));
    }
    let history = json(&dashboard, "/api/history");
    assert_eq!(
        (&history["points"].as_array().map(Vec::len), &history["point_reports"]),
        (&Some(100), &1.into())
    );
    let step = history["whole_reports"].as_u64().expect("a number");
    assert!(step > 1 && dashboard.forgotten() == 0, "{step}");
    assert_eq!(history["whole_since_unix_ms"], 1000 * (step - 1));
    assert_eq!(json(&dashboard, "/api/report?from=0")["period_ns"], 100_000_000_000u64);
    assert_eq!(json(&dashboard, "/api/stacks?from=0&cpu=0")["stacks"][0]["samples"], 200);
    // A new viewer gets the log's last report at once.
    let mut stream = TcpStream::connect(dashboard.local_addr).expect("connected");
    write!(stream, "GET /api/reports HTTP/1.0\r\nHost: localhost\r\n\r\n").expect("asked");
    let mut lines = BufReader::new(stream);
    assert_eq!(next(&mut lines).1, "{\"live\":false}");
    assert_eq!(sequence(&next(&mut lines).1), 99);
}

#[test]
fn dashboard_on_an_address_in_use_is_an_error() {
    let first = start(true, 0);
    let again = Dashboard::start(&Config {
        addr: first.local_addr,
        memory_bytes: 0,
        live: true,
        access: HttpAccess::default(),
        losses: Arc::default(),
    });
    assert!(again.is_err_and(|error| error.to_string().contains(&first.local_addr.to_string())));
}
