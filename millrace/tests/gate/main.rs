//! Tests of the process `millrace gate` in front of two servers: one without support for the gate, and one in Go that
//! uses the gate's control socket.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;
#[path = "../../../gate/tests/support/mod.rs"]
mod support;
#[path = "../terminal/mod.rs"]
mod terminal;
mod trace;
mod views;

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::UdpSocket,
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::Path,
    process::Command,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use millrace_daemon::http::fetch;
use millrace_gate::status::GateInterfaceStatus;
use millrace_kernel::xdp;
use nix::{net::if_::if_nametoindex, sys::signal::Signal};
use process::GateProcess;
use quinn::{Connection, ConnectionError, Endpoint, EndpointConfig, TokioRuntime};
use serde_json::{Value, json};
use support::{
    GateServerProcess, GateSite, PORT, SERVER, answer, hello, initial, inside, is_root, quota_of_two_holds,
    wait_for, wait_until,
};
use tokio::{sync::watch, task::JoinHandle, time::timeout};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(2);

fn policy(connections: u32) -> String {
    format!("[[scope]]\nname = \"web\"\nport = {PORT}\nrules.quota = {{ connections = {connections} }}\n")
}

fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap()
}

/// A QUIC server without support for the gate.
fn serve(site: &GateSite) -> Endpoint {
    let socket = inside(&site.server, || UdpSocket::bind((SERVER, PORT)).unwrap());
    let config = Some(site.server_config());
    let endpoint = Endpoint::new(EndpointConfig::default(), config, socket, Arc::new(TokioRuntime)).unwrap();
    let accepting = endpoint.clone();
    tokio::spawn(async move {
        while let Some(incoming) = accepting.accept().await {
            tokio::spawn(async move {
                if let Ok(connection) = incoming.await {
                    answer(connection).await;
                }
            });
        }
    });
    endpoint
}

#[tokio::test(flavor = "multi_thread")]
async fn gate_limits_connections_of_a_quic_server_without_gate_support() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("command", &policy(2));
    let gate = GateProcess::start(&site, &["--policy=gate.toml", "--http=127.0.0.1:9999"]);
    let _server = serve(&site);
    let first = site.connect(LONG).await.unwrap();
    hello(&first).await;
    let second = site.connect(LONG).await.unwrap();
    hello(&second).await;
    assert_eq!(gate.connections(), 2, "the gate does not count both connections");
    assert_eq!(site.connect(SHORT).await.unwrap_err(), ConnectionError::TimedOut);
    hello(&first).await;
    let (refused, monitored) = gate.counted("quota");
    assert!(refused > 0);
    assert_eq!(monitored, 0);

    // The log names the refused client and the rule.
    wait_for("a sample in the log", || gate.logged("refused rule=\"quota\" scope=\"web\""));
    let recent = wait_until("samples", || gate.status().recent, |recent| !recent.is_empty());
    assert!(
        recent
            .iter()
            .all(|it| it.refused && it.rules == ["quota"] && it.source.ip().to_string() == "10.97.0.2")
    );
    let shown = gate.succeed(&["status"]);
    assert!(shown.contains("guards eth") && shown.contains("web: 2 connections of 1 clients"), "{shown}");
    let http = "127.0.0.1:9999".parse().unwrap();
    // exact: callers repeat this HTTP request, or the policy reload that changes the answer has returned
    let scrape = |path: &str| inside(&site.server, || fetch(http, path, None).unwrap());
    let line = format!(r#"millrace_gate_refused_packets_total{{scope="web",rule="quota"}} {refused}"#);
    let (code, metrics) = wait_until(&line, || scrape("/metrics"), |(_, metrics)| metrics.contains(&line));
    assert_eq!(code, 200);
    let room = r#"millrace_gate_table_room{table="connections"} 131072"#;
    assert!(metrics.contains(room), "{room} is not in\n{metrics}");
    assert_eq!(scrape("/healthz"), (200, "ok\n".to_owned()));

    // An invalid policy changes nothing. A valid one takes effect without disturbing a live connection.
    std::fs::write(site.path("gate.toml"), policy(3).replace("quota", "quoat")).unwrap();
    let said = gate.fail(&["reload"]);
    assert!(said.contains("gate.toml:4: scope[0].rules.quoat: unknown key; did you mean `quota`?"), "{said}");
    assert_eq!(gate.succeed(&["policy"]), policy(2));
    // exact: the reload command has returned, so the status has the result of the reload
    let status = gate.status();
    let error = status.reload.clone().unwrap().error.expect("the reload failed");
    assert!(error.contains("did you mean `quota`?"), "{error}");
    assert!(status.trouble.iter().any(|it| it.contains("the latest reload failed")), "{:?}", status.trouble);
    assert!(scrape("/metrics").1.contains("millrace_gate_reload_ok 0"));
    assert_eq!(
        scrape("/healthz"),
        (200, "ok\n".to_owned()),
        "the gate stopped to refuse after a failed reload"
    );
    assert_eq!(site.connect(SHORT).await.unwrap_err(), ConnectionError::TimedOut);
    std::fs::write(site.path("gate.toml"), policy(3)).unwrap();
    let before = unix_time().as_secs_f64();
    assert_eq!(gate.succeed(&["reload"]), "the policy was read again\n");
    let after = unix_time().as_secs_f64();
    assert_eq!(gate.succeed(&["policy"]), policy(3));
    // exact: the reload command has returned, so the status has the result of the reload
    let status = gate.status();
    let reload = status.reload.unwrap();
    assert_eq!((reload.error, status.trouble), (None, vec![]));
    assert!((before..=after).contains(&reload.time_s), "{} is not in {before}..={after}", reload.time_s);
    assert!(scrape("/metrics").1.contains("millrace_gate_reload_ok 1"));
    hello(&site.connect(LONG).await.unwrap()).await;
    hello(&first).await;
    hello(&second).await;

    // An address prefix that an operator blocks by command stays blocked after a reload of the policy.
    gate.succeed(&["block", "10.97.0.0/24"]);
    gate.succeed(&["reload"]);
    assert_eq!(site.connect(SHORT).await.unwrap_err(), ConnectionError::TimedOut);
    assert!(gate.counted("block").0 > 0);
    // exact: the gate changes its list of blocked prefixes before it answers the block command
    assert_eq!(gate.status().listed.len(), 1);
    gate.succeed(&["block", "10.97.0.0/24", "--remove"]);
    hello(&first).await;
    // exact: the gate removed the blocked prefix from its list before it answered the command
    assert_eq!(gate.status().listed, []);
    assert!(gate.fail(&["block", "10.97.0.0/33"]).contains("is no address prefix"));
    assert!(gate.fail(&["allow", "10.97.0.2", "--scope=wbe"]).contains("there is no scope \"wbe\""));

    let mode = std::fs::metadata(site.path("gate.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let again = site
        .command(env!("CARGO_BIN_EXE_millrace"))
        .args(["gate", "--interface=eth", "--port=1"])
        .args(["--socket=gate.sock", "--http=off"])
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&again.stderr).contains("another gate answers on this control socket"));

    assert!(site.is_guarded());
    assert_eq!(gate.end(Signal::SIGTERM), Some(0));
    assert!(!site.is_guarded());
    assert!(!site.path("gate.sock").exists());
    hello(&first).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dry_run_counts_and_refuses_nothing() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("dry", "");
    let port = PORT.to_string();
    let gate = GateProcess::start(&site, &["--port", &port, "--connections=1", "--dry-run", "--http=off"]);
    let _server = serve(&site);
    let first = site.connect(LONG).await.unwrap();
    hello(&first).await;
    hello(&site.connect(LONG).await.unwrap()).await;
    let status = gate.status(); // exact: the server has answered the packets, so the gate has counted them
    assert!(status.dry_run);
    let quota = status.scopes[1].rules.iter().find(|count| count.rule == "quota").unwrap();
    assert_eq!((quota.mode.as_str(), quota.packets), ("monitor", 0));
    assert!(quota.monitored > 0);
    assert_eq!(gate.end(Signal::SIGKILL), None);
    wait_for("a clean interface", || !site.is_guarded());
    // The socket file that a killed gate has left does not prevent a new start.
    assert!(site.path("gate.sock").exists());
    let gate = GateProcess::start(&site, &["--port", &port, "--http=off"]);
    assert_eq!(gate.connections(), 0);
}

/// A prefix, several prefixes or a file with prefixes can be blocked, also for a limited time. The command's output
/// names an address of the prefix that another list exempts.
#[test]
fn block_and_allow_commands_change_the_gates_prefix_lists() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("lists", &policy(2));
    let gate = GateProcess::start(&site, &["--policy=gate.toml", "--http=off"]);
    let listed = || -> Vec<_> {
        // exact: the gate changes its list of prefixes before it answers a command, or the caller repeats this read
        let listed = gate.status().listed.into_iter();
        listed.map(|it| (it.prefix, it.entry, it.scope, it.seconds.is_some())).collect()
    };
    let entry = |prefix: &str, entry: &str, scope: Option<&str>, ends| {
        (prefix.to_owned(), entry.to_owned(), scope.map(str::to_owned), ends)
    };
    assert_eq!(gate.succeed(&["block", "192.0.2.0/24", "2001:db8::/32"]), "2 prefixes: blocked\n");
    let allowed = gate.succeed(&["allow", "192.0.2.7", "--scope=web", "--for=1h"]);
    assert_eq!(allowed, "192.0.2.7: allowed in scope web for 1h00m\n");
    let all = [
        entry("192.0.2.0/24", "block", None, false),
        entry("2001:db8::/32", "block", None, false),
        entry("192.0.2.7", "allow", Some("web"), true),
    ];
    assert_eq!(listed(), all);
    assert!(
        gate.fail(&["block", "198.51.100.0/24", "nonsense"]).contains("\"nonsense\" is no address prefix")
    );
    assert_eq!(listed(), all, "a list with an invalid prefix was applied in part");

    let note = |args: &[&str]| String::from_utf8(gate.verb(args).stderr).unwrap();
    let said = note(&["block", "192.0.2.0/25"]);
    assert_eq!(said, "note: 192.0.2.7 is unaffected: the list of scope web overrides it with allow\n");
    assert_eq!(note(&["block", "192.0.2.7"]), "", "the block did not override the allow entry");
    let said = note(&["allow", "192.0.2.7", "--scope=web"]);
    assert!(said.contains("192.0.2.7 is unaffected: the list for all overrides it with block"), "{said}");
    gate.succeed(&["unblock", "192.0.2.0/25", "192.0.2.0/24", "2001:db8::/32", "192.0.2.7"]);
    assert_eq!(
        listed(),
        [entry("192.0.2.7", "allow", Some("web"), false)],
        "the prefix was listed again without its time"
    );
    assert_eq!(
        gate.succeed(&["unblock", "192.0.2.7", "--scope=web"]),
        "192.0.2.7: removed from the lists in scope web\n"
    );
    assert_eq!(listed(), []);
    let nothing = gate.fail(&["unblock", "192.0.2.7", "--scope=web"]);
    assert!(nothing.contains("192.0.2.7 was neither blocked nor allowed in scope web"), "{nothing}");

    let from_stdin = |verb: &str, text: &str| {
        std::fs::write(site.path("list"), text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.args(["gate", verb, "-", "--socket"]).arg(site.path("gate.sock"));
        command.stdin(std::fs::File::open(site.path("list")).unwrap()).output().unwrap()
    };
    let text: String = (0..2500).map(|n| format!("10.{}.{}.0/24 # {n}\n", n / 250, n % 250)).collect();
    assert!(from_stdin("block", &text).status.success());
    // exact: the gate changes its list of blocked prefixes before it answers the block command
    assert_eq!(gate.status().listed.len(), 2500);
    let output = from_stdin("block", "192.0.2.0/24\n\n192.0.2.0/33\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("standard input:3: "), "{output:?}");
    assert!(from_stdin("unblock", &text).status.success());
    assert_eq!(listed(), []);

    gate.succeed(&["block", "192.0.2.0/24", "--for=1s"]);
    wait_until("the end of the block", listed, Vec::is_empty);
    wait_for("the log line", || gate.logged("removed an expired entry"));
    for time in ["10x", "m", "0s", "366d", "-1s"] {
        let output = gate.verb(&["block", "192.0.2.0/24", &format!("--for={time}")]);
        assert_eq!(output.status.code(), Some(2), "{time}");
    }
}

/// The gate stays attached when its interface is renamed or set down. It attaches again when the interface is replaced
/// or the program is detached, and logs what happened.
#[tokio::test(flavor = "multi_thread")]
async fn gate_reattaches_to_a_replaced_interface_or_after_detachment() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("back", &policy(1));
    let gate = GateProcess::start(&site, &["--policy=gate.toml", "--http=127.0.0.1:9999"]);
    let _server = serve(&site);
    // exact: `until` rereads the status of the interface until it is as expected
    let interface = || gate.status().interfaces.remove(0);
    let until = |what: &str, is_so: &dyn Fn(&GateInterfaceStatus) -> bool| wait_until(what, interface, is_so);
    let scrape = |path: &str| {
        let http = "127.0.0.1:9999".parse().unwrap();
        // exact: callers repeat this HTTP request until the health or the metric is as expected
        inside(&site.server, || fetch(http, path, None).unwrap())
    };
    let health = || scrape("/healthz");
    // Clients without the HTTP token only get the word `trouble`. The description of the problem may contain file
    // names, so they do not get it.
    let healthy = |code: u16| {
        let words = if code == 200 { "ok\n" } else { "trouble\n" };
        wait_until("its health", health, |health| *health == (code, words.to_owned()));
    };
    let well = interface();
    assert_eq!((well.mode.as_str(), well.attached, well.reattached), ("native", true, 0));

    // The gate stays attached when the interface is down and up again.
    site.ip_link(&["set", "eth", "down"]);
    site.ip_link(&["set", "eth", "up"]);
    assert!(site.is_guarded());

    // The gate stays attached when the interface is renamed.
    let rename = |from: &str, to: &str| {
        site.ip_link(&["set", from, "down"]);
        site.ip_link(&["set", from, "name", to]);
        site.ip_link(&["set", to, "up"]);
    };
    rename("eth", "other");
    let renamed = until("the new name in the status", &|it| {
        it.trouble.as_ref().is_some_and(|it| it.contains("renamed to other"))
    });
    assert!(renamed.attached);
    healthy(503);
    rename("other", "eth");
    until("the old name", &|it| *it == well);
    assert!(site.is_guarded());

    // The guarded interface is renamed, and a new interface gets its old name. The gate must guard the new interface,
    // because the settings name it.
    rename("eth", "other");
    site.ip_link(&["add", "eth", "type", "veth", "peer", "name", "end"]);
    until("the other interface guarded", &|it| it.reattached == 1 && it.trouble.is_none());
    assert!(site.is_guarded() && !site.has_xdp("other"));

    // The interface is deleted and made again.
    site.ip_link(&["del", "eth"]);
    site.ip_link(&["del", "other"]);
    let gone = until("the missing interface in the status", &|it| {
        it.trouble.as_deref() == Some("the interface does not exist any more")
    });
    assert!(!gone.attached);
    wait_for("the log line", || gate.logged("not guarding"));
    assert!(gate.succeed(&["status"]).contains("guards nothing"));
    healthy(503);
    site.link();
    until("the interface guarded again", &|it| it.attached && it.trouble.is_none() && it.reattached == 2);
    assert!(site.is_guarded());
    wait_for("the log line", || gate.logged("guarding the interface again"));

    // Another process detaches the gate's XDP program.
    let index = || if_nametoindex("eth").unwrap().cast_signed();
    assert_eq!(inside(&site.server, || xdp::detach_all(index()).unwrap()), 1);
    until("the interface guarded again", &|it| it.attached && it.trouble.is_none() && it.reattached == 3);
    assert!(site.is_guarded());

    // The gate on the new interface must admit one client, refuse another, and count in its metrics how often it was
    // attached again.
    let first = site.connect(LONG).await.unwrap();
    hello(&first).await;
    assert_eq!(site.connect(SHORT).await.unwrap_err(), ConnectionError::TimedOut);
    let line = r#"millrace_gate_reattached_total{interface="eth"} 3"#;
    wait_until(line, || scrape("/metrics").1, |metrics| metrics.contains(line));
    healthy(200);
    assert_eq!(gate.end(Signal::SIGTERM), Some(0));
    assert!(!site.is_guarded());
}

/// Returns the number of packets that the gate refused by any rule, for any of the guarded services (scopes).
fn all_refused(gate: &GateProcess<'_>) -> u64 {
    // exact: callers have waited until the gate has counted all sent packets
    gate.status().scopes.iter().flat_map(|scope| &scope.rules).map(|rule| rule.packets).sum()
}

/// A QUIC connection that sends requests all the time, with key updates.
struct KeyUpdateTalk {
    answers: watch::Receiver<u64>,
    stop: watch::Sender<bool>,
    talking: JoinHandle<()>,
}

impl KeyUpdateTalk {
    fn start(connection: Connection) -> Self {
        let (stop, stopped) = watch::channel(false);
        let (count, answers) = watch::channel(0);
        let talking = tokio::spawn(async move {
            while !*stopped.borrow() {
                hello(&connection).await;
                connection.force_key_update();
                count.send_modify(|count| *count += 1);
            }
        });
        Self { answers, stop, talking }
    }

    /// Waits until requests that are sent from now on are answered.
    async fn goes_on(&mut self) {
        let enough = *self.answers.borrow() + 3;
        let answered = self.answers.wait_for(|count| *count >= enough);
        timeout(LONG, answered).await.expect("answers").expect("the connection was closed");
    }

    async fn end(self) {
        self.stop.send(true).unwrap();
        self.talking.await.expect("a request got no answer");
    }
}

/// Several connections share an address that has used up its quota of connections, and that also floods the server with
/// Initial packets. They change ports, and the gate gets new policies, is killed and started again. The gate must
/// refuse the flood and nothing else, and no XDP program may stay attached when it has ended.
#[tokio::test(flavor = "multi_thread")]
async fn connections_survive_new_policies_and_gate_restarts() {
    const ROUNDS: u64 = 8;
    const BURST: u64 = 50;
    if !is_root() {
        return;
    }
    let site = GateSite::new("outlive", &policy(2));
    let start = || GateProcess::start(&site, &["--policy=gate.toml", "--http=off"]);
    let gate = start();
    let _server = serve(&site);
    let clients = [site.endpoint(LONG), site.endpoint(LONG)];
    let mut talks = Vec::new();
    for client in &clients {
        let connecting = client.connect((SERVER, PORT).into(), "localhost").unwrap();
        talks
            .push(KeyUpdateTalk::start(connecting.await.expect("a connection within the quota was refused")));
    }
    let attacker = inside(&site.clients, || UdpSocket::bind("0.0.0.0:0").unwrap());
    attacker.connect((SERVER, PORT)).unwrap();
    for round in 0..ROUNDS {
        for n in 0..BURST {
            attacker.send(&initial(round * BURST + n)).unwrap();
        }
        for client in &clients {
            client.rebind(inside(&site.clients, || UdpSocket::bind("0.0.0.0:0").unwrap())).unwrap();
        }
        std::fs::write(site.path("gate.toml"), policy(1 + round as u32 % 2)).unwrap();
        gate.succeed(&["reload"]);
        for talk in &mut talks {
            talk.goes_on().await;
        }
        let sent = (round + 1) * BURST;
        wait_until("the end of the burst", || gate.counted("quota").0, |count| *count >= sent);
    }
    let total = ROUNDS * BURST;
    assert_eq!((gate.counted("quota").0, all_refused(&gate)), (total, total));

    assert_eq!(gate.end(Signal::SIGKILL), None);
    wait_for("a clean interface", || !site.is_guarded());
    for talk in &mut talks {
        talk.goes_on().await;
    }
    // The gate that was started again does not know the live connections, and must learn them from their packets.
    let gate = start();
    for talk in &mut talks {
        talk.goes_on().await;
    }
    assert_eq!(all_refused(&gate), 0);
    assert_eq!(gate.end(Signal::SIGTERM), Some(0));
    assert!(!site.is_guarded());
    for mut talk in talks {
        talk.goes_on().await;
        talk.end().await;
    }
}

/// A client of the control socket.
struct ControlClient(BufReader<UnixStream>);

impl ControlClient {
    fn new(socket: &Path) -> Self {
        Self(BufReader::new(UnixStream::connect(socket).unwrap()))
    }

    fn say(&mut self, line: &str) -> Value {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        self.0.read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    }

    fn ask(&mut self, request: Value) -> Value {
        self.say(&request.to_string())
    }
}

#[test]
fn connection_counts_of_a_server_end_with_its_control_connection() {
    if !is_root() {
        return;
    }
    let scope = format!("[[scope]]\nname = \"web\"\nport = {PORT}\nlive = \"published\"\nid_bytes = 8\n");
    let site = GateSite::new("socket", &scope);
    let gate = GateProcess::start(&site, &["--policy=gate.toml", "--http=off"]);
    let socket = site.path("gate.sock");
    let mut one = ControlClient::new(&socket);
    let mut other = ControlClient::new(&socket);
    let count = |verb: &str, client: &str| json!({"do": verb, "scope": "web", "client": client});
    assert_eq!(one.ask(count("inc", "192.0.2.7")), json!({"ok": true, "connections": 1}));
    assert_eq!(one.ask(count("inc", "192.0.2.7")), json!({"ok": true, "connections": 2}));
    assert_eq!(other.ask(count("inc", "::ffff:192.0.2.7")), json!({"ok": true, "connections": 3}));
    assert_eq!(other.ask(count("inc", "2001:db8::1")), json!({"ok": true, "connections": 1}));
    assert_eq!(one.ask(count("dec", "192.0.2.7")), json!({"ok": true, "connections": 2}));
    let id = |verb: &str, id: &str| json!({"do": verb, "scope": "web", "id": id});
    assert_eq!(one.ask(id("publish", "0011223344556677")), json!({"ok": true}));
    assert_eq!(one.ask(id("publish", "0011223344556677")), json!({"ok": true}));
    assert_eq!(one.ask(id("retire", "0011223344556677")), json!({"ok": true}));
    assert_eq!(one.ask(id("publish", "7711223344556677")), json!({"ok": true}));

    for (request, error) in [
        (count("dec", "198.51.100.1"), "no connection that was counted on this connection"),
        (count("inc", "nobody"), "invalid IP address"),
        (id("retire", "0011223344556677"), "was not published on this connection"),
        (id("publish", "xyz"), "in hexadecimal"),
        (json!({"do": "inc", "scope": "wbe", "client": "192.0.2.7"}), "there is no scope \"wbe\""),
        (json!({"do": "fly"}), "unknown variant `fly`"),
        (
            json!({"do": "check_token", "scope": "web", "client": "192.0.2.7:1", "token": "00"}),
            "not made by a gate",
        ),
    ] {
        let answer = one.ask(request.clone());
        assert_eq!(answer["ok"], json!(false), "{request}");
        assert!(answer["error"].as_str().unwrap().contains(error), "{request}: {answer}");
    }
    assert_eq!(one.say("{")["ok"], json!(false));
    assert_eq!(gate.connections(), 3);
    drop(one);
    wait_until("the counts of a server that is gone", || gate.connections(), |count| *count == 2);
    drop(other);
    wait_until("the counts of a server that is gone", || gate.connections(), |count| *count == 0);
}

/// Servers report connections of clients to the gate. The policy has `max_clients = 2`, which limits the reported
/// client addresses to 32. All of them are in one /64, which counts as one client.
#[test]
fn number_of_counted_clients_is_limited_by_max_clients() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("told", &format!("{}[load]\nmax_clients = 2\n", policy(2)));
    let gate = GateProcess::start(&site, &["--policy=gate.toml", "--http=off"]);
    let socket = site.path("gate.sock");
    let mut tellers = [ControlClient::new(&socket), ControlClient::new(&socket)];
    let request = |verb: &str, client: usize| json!({"do": verb, "scope": "web", "client": format!("2001:db8::{client:x}")});
    for client in 0..32 {
        let answer = tellers[client % 2].ask(request("inc", client));
        assert_eq!(answer["ok"], json!(true), "{answer}");
    }
    let refused = tellers[0].ask(request("inc", 32));
    assert!(refused["error"].as_str().unwrap().contains("raise `max_clients`"), "{refused}");
    assert_eq!(tellers[0].ask(request("inc", 0))["ok"], json!(true), "a client that is in the table");
    // One of the 32 places for client addresses becomes free when a server reports the end of its client's connection,
    // or when that server disconnects.
    assert_eq!(tellers[1].ask(request("dec", 1))["ok"], json!(true));
    assert_eq!(tellers[0].ask(request("inc", 32))["ok"], json!(true));
    let [mut one, other] = tellers;
    drop(other);
    wait_until(
        "room for another",
        || one.ask(request("inc", 33))["ok"].clone(),
        |is_there| *is_there == json!(true),
    );
    drop((one, gate));
}

#[test]
fn a_policy_is_checked_without_privilege() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("gate.toml");
    let check = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.args(["gate", "--check", "--policy"]).arg(&file).output().unwrap()
    };
    std::fs::write(&file, policy(2)).unwrap();
    let output = check();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"the policy is usable\n"[..]));
    std::fs::write(&file, "[[scope]]\nname = \"web\"\naddress = \"192.0.2.1\"\n").unwrap();
    let output = check();
    assert_eq!(output.status.code(), Some(0));
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("warning: scope web has no port"));
    std::fs::write(&file, "[[scope]]\nname = \"web\"\nport = 70000\n").unwrap();
    let output = check();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("gate.toml:3: scope[0].port: must be a number from 1 to 65535"), "{said}");
    let no_port = Command::new(env!("CARGO_BIN_EXE_millrace")).args(["gate", "--check", "--port=0"]).output();
    assert_eq!(no_port.unwrap().status.code(), Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn gate_applies_quotas_of_a_server_in_go() {
    if !is_root() {
        return;
    }
    let site =
        GateSite::new("go", &format!("{}count = \"application\"\n", policy(2).replace("rules", "\nrules")));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gate/examples/quic-go");
    let program = site.path("server");
    match Command::new("go").arg("build").arg("-o").arg(&program).arg(".").current_dir(source).output() {
        Err(error) => return println!("SKIP: no Go: {error}"),
        Ok(output) if !output.status.success() => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let wants =
                ["requires go", "unknown directive", "invalid go version", "reading http", "Get \"http"];
            assert!(wants.iter().any(|want| said.contains(want)), "{said}");
            return println!(
                "SKIP: too old a Go, or no module proxy: {}",
                said.lines().next().unwrap_or_default()
            );
        }
        Ok(_) => {}
    }
    let gate = GateProcess::start(&site, &["--policy=gate.toml", "--http=off"]);
    let mut command = site.command(program.to_str().unwrap());
    command.args(["gate.sock", "web", &format!("{SERVER}:{PORT}"), "cert.pem", "key.pem"]);
    let server = GateServerProcess::start(command);
    let open = quota_of_two_holds(&site).await;
    wait_until("both connections", || gate.connections(), |count| *count == 2);
    drop((open, server));
    wait_until("the counts of a server that is gone", || gate.connections(), |count| *count == 0);
}
