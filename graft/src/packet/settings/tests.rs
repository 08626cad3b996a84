use super::*;
use crate::settings::DaemonSettings;

const TEXT: &str = r#"
    [sessions]
    interface = ["eth0"]
    [sessions.parameters.repair]
    retry_us = 20000
    [[graft]]
    name = "complete"
    functions = ["number", "repair"]
    [[graft]]
    name = "newest"
    functions = ["number", "order"]
    budget-ns = 5000
    fallback = "newest"
    [agreement]
    key = "host.key"
    [[peer]]
    name = "far"
    key = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    [peer.sessions]
    local = "10.0.0.1"
    remote = "10.0.0.2"
    ports = "40000"
    [[session]]
    name = "telemetry"
    local = "10.0.0.1:7000"
    remote = "10.0.0.2:6000"
    peer = "far"
    graft = "complete"
"#;

fn parse(text: &str) -> Result<Settings, String> {
    let directory = tempfile::tempdir().expect("a directory");
    let all = DaemonSettings::parse(text, directory.path()).and_then(DaemonSettings::into_sessions);
    all.map_err(|error| error.to_string())
}

#[test]
fn each_list_of_functions_has_its_own_identity() {
    let settings = parse(TEXT).expect("settings");
    let ids: BTreeSet<_> = settings.grafts.values().map(|graft| graft.list.id).collect();
    assert_eq!(ids.len(), 2);
    let services = [FunctionService::Once, FunctionService::Reliability, FunctionService::PartialReliability];
    assert_eq!(settings.grafts["complete"].services, services.into());
    assert_eq!(settings.sessions[0].peer, "far");
    assert!(!settings.peers[0].has_pool() && !settings.grafts.contains_key(CANONICAL));
    assert_eq!(settings.host_key.expect("a key").renew, Duration::from_secs(600));
}

/// The hash of a function list includes the parameter `parity`, since both ends need the same value. It does not
/// include other parameters.
#[test]
fn list_identity_depends_on_parity_settings() {
    let id = |parameters: &str| {
        let text = TEXT.replace(r#"["number", "repair"]"#, r#"["number", "fec"]"#);
        let settings = parse(&text.replace("retry_us = 20000", parameters)).expect(parameters);
        settings.grafts["complete"].list.id
    };
    let default = id("tries = 3");
    assert_eq!(id("tries = 3\n[sessions.parameters.fec]\nparity = 1"), default, "it is the default");
    assert_eq!(id("tries = 3\n[sessions.parameters.fec]\npackets = 16"), default, "parity packets say it");
    let others: BTreeSet<_> = (2..=4)
        .map(|parity| id(&format!("tries = 3\n[sessions.parameters.fec]\nparity = {parity}")))
        .collect();
    assert!(others.len() == 3 && !others.contains(&default), "{others:?}");
}

/// Sessions are sealed unless their settings have `clear`.
#[test]
fn session_encryption_settings_are_read() {
    let table = [
        ("", Some(AeadCipher::Chacha20Poly1305)),
        ("cipher = \"aes-128-gcm\"", Some(AeadCipher::Aes128Gcm)),
        ("cipher = \"chacha20-poly1305\"", Some(AeadCipher::Chacha20Poly1305)),
        ("clear = false", Some(AeadCipher::Chacha20Poly1305)),
        ("clear = true", None),
    ];
    for (line, want) in table {
        let settings = parse(&format!("{TEXT}{line}\n")).expect(line);
        assert_eq!(settings.sessions[0].cipher, want, "{line}");
    }
}

#[test]
fn invalid_session_path_settings_are_refused() {
    let path = |local: &str, remote: &str, interface: &str| {
        format!("[[session.path]]\nlocal = \"{local}\"\nremote = \"{remote}\"\ninterface = \"{interface}\"\n")
    };
    let own = path("10.0.0.1", "10.0.0.2", "eth0");
    let second = path("10.1.0.1", "10.1.0.2", "eth0");
    let settings = parse(&format!("{TEXT}{second}{own}")).expect("paths");
    let paths = settings.sessions[0].paths.clone().expect("paths");
    assert_eq!((paths.each[0].local.to_string(), paths.is_redundant), ("10.0.0.1".to_owned(), false));
    for (lines, want) in [
        (own.clone(), "2 to 4 of them"),
        (own.repeat(5), "2 to 4 of them"),
        (second.repeat(2), "the session's own addresses, local = \"10.0.0.1\""),
        (own.repeat(2), "is there twice"),
        (format!("{own}{}", path("fd00::1", "fd00::2", "eth0")), "of another family"),
        (format!("{own}{}", path("10.1.0.1", "10.1.0.2", "eth9")), "eth9 is not one of `interface`"),
        ("paths = \"redundant\"\n".to_owned(), "2 to 4 of them"),
        (format!("paths = \"both\"\n{own}{second}"), "not \"both\""),
    ] {
        let refused = parse(&format!("{TEXT}{lines}")).expect_err(want);
        assert!(refused.contains(want), "{refused}");
    }
    let other = "[[session]]\nname = \"b\"\nlocal = \"10.1.0.1:7000\"\nremote = \"10.1.0.2:6000\"\npeer = \"far\"\ngraft = \"complete\"\n";
    let refused = parse(&format!("{TEXT}{own}{second}{other}")).expect_err("taken");
    assert!(refused.contains("another session has them"), "{refused}");
    let bare = TEXT
        .replace(r#"["number", "repair"]"#, "[]")
        .replace("[sessions.parameters.repair]\n    retry_us = 20000", "");
    let redundant = format!("{bare}clear = true\npaths = \"redundant\"\n{own}{second}");
    let refused = parse(&redundant).expect_err("twice");
    assert!(refused.contains("the function number"), "{refused}");
}

#[test]
fn round_trip_time_rules_are_read_and_invalid_ones_are_refused() {
    let measured = TEXT.replace("\"repair\"]", "\"repair\", \"acknowledge\"]");
    let measured = measured.replace("\"order\"]", "\"order\", \"acknowledge\"]");
    let rule = |rest: &str| format!("[[session.when]]\n{rest}\n");
    let one = rule("rtt-ms = 300\ngraft = \"newest\"");
    let settings = parse(&(measured.clone() + &one)).expect("a rule");
    let [when] = &settings.sessions[0].when[..] else { panic!("one rule") };
    let ms = Duration::from_millis;
    assert_eq!((when.rtt, when.until, when.hold), (ms(300), ms(240), ms(1000)));
    let table = [
        (
            rule("rtt-ms = 300\nuntil-rtt-ms = 300\ngraft = \"newest\""),
            "until-rtt-ms, 300, is less than rtt-ms, 300",
        ),
        (rule("rtt-ms = 0\ngraft = \"newest\""), "is less than rtt-ms"),
        (
            rule("rtt-ms = 4\ngraft = \"other\""),
            "session telemetry: [[session.when]]: there is no graft other",
        ),
        (one.clone() + &rule("rtt-ms = 200\ngraft = \"complete\""), "in the order of their rtt-ms"),
        (
            one.clone() + &rule("rtt-ms = 400\nuntil-rtt-ms = 240\ngraft = \"complete\""),
            "in the order of their rtt-ms",
        ),
    ];
    for (rules, want) in table {
        let error = parse(&(measured.clone() + &rules)).expect_err(want);
        assert!(error.contains(want), "{error}");
    }
    let error = parse(&(TEXT.to_owned() + &one)).expect_err("nobody knows the round trip");
    assert!(error.contains("does not have the function acknowledge"), "{error}");
}

/// Adds a line to the section `[sessions]`.
fn with(line: &str, text: &str) -> String {
    text.replacen("[sessions]", &format!("[sessions]\n{line}"), 1)
}

/// Each session takes the same amount of memory, whichever graft (list of packet functions) it uses.
#[test]
fn memory_of_sessions_is_known_before_it_is_allocated() {
    let of = |head: &str, text: &str| parse(&with(head, text)).expect(head).memory().expect("bytes");
    let [few, many] = ["max-sessions = 64", "max-sessions = 10064"].map(|head| of(head, TEXT));
    let each = (many - few) / 10_000;
    // Each session takes memory for the state of all functions, and at least 24 KB for the packets that the function
    // `repair` stores.
    assert!((16_464 + 24_000..48_000).contains(&each), "{each}");
    assert_eq!(
        of("memory-mib = 71", TEXT) - of("memory-mib = 48", TEXT),
        10 * 1024 * 2072,
        "no parity is kept"
    );
    assert!(
        of("", TEXT) > of("", &TEXT.replace("repair\"]", "order\"]")),
        "what no graft names takes nothing"
    );
}

#[test]
fn sessions_beyond_the_memory_for_stored_packets_are_refused() {
    let session = |port: usize| {
        format!(
            "[[session]]\nname = \"{port}\"\nlocal = \"10.0.0.1:7000\"\nremote = \"10.0.0.3:{port}\"\npeer = \"far\"\ngraft = \"newest\"\n"
        )
    };
    let more = |count: usize| TEXT.to_owned() + &(1..=count).map(session).collect::<String>();
    parse(&more(15)).expect("16 in all");
    let error = parse(&more(16)).expect_err("17");
    assert!(
        error.contains(
            "17 sessions, and graft complete keeps what it has sent: 2.3 MiB for each, 39 MiB in all; memory-mib has room for 16: \
             set memory-mib = 39"
        ),
        "{error}"
    );
    parse(&with("memory-mib = 39", &more(16))).expect("as it says");
    let without = more(16).replace("\"number\", \"repair\"", "\"number\"");
    parse(&without).expect("nothing is kept");
    let many = |count: usize| more(count).replace("\"number\", \"repair\"", "\"number\"");
    let error = parse(&many(64)).expect_err("65");
    assert!(error.contains("65 sessions are more than max-sessions = 64: set max-sessions = 65"), "{error}");
    let settings = parse(&with("max-sessions = 10000", &many(9999))).expect("10,000");
    assert_eq!((settings.room.sessions, settings.room.storing_sessions), (10_000, 16));
    for sessions in [0, 16_385] {
        let error = parse(&with(&format!("max-sessions = {sessions}"), &many(1))).expect_err("out of range");
        assert!(error.contains("max-sessions is from 1 to 16384"), "{error}");
    }
}

const PEER: &str = "[[peer]]\nname = \"station\"\nkey = \"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\"\n[peer.sessions]\nlocal = \"10.0.0.1\"\nremote = \"10.0.0.7\"\nports = \"41000-41008\"\n";

#[test]
fn peer_in_the_settings_adds_a_pool_of_sessions() {
    let settings = parse(&format!("{TEXT}\n{PEER}")).expect("settings");
    assert_eq!(settings.sessions.len(), 9);
    assert!(settings.sessions[1..].iter().all(|session| session.graft == CANONICAL));
    assert!(settings.grafts[CANONICAL].functions.is_empty());
    assert_eq!(settings.sessions[1].name, "station/41001");
    let table = [
        (format!("{TEXT}\n{PEER}{PEER}"), "two peers are called station"),
        (
            format!("{TEXT}\n{PEER}").replace("41000-", "40000-"),
            "peer station: 10.0.0.1:40000 is another peer's, too",
        ),
        (
            format!("{TEXT}\n{PEER}").replace("\"40000\"", "\"7000\"").replace("2:6000", "2:7000"),
            "session telemetry uses the port that is reserved for the daemons",
        ),
        (format!("{TEXT}\n{PEER}paths = \"redundant\"\n"), "peer station: path: there are 2 to 4 of them"),
        (
            format!("{TEXT}\n{PEER}[[peer.sessions.path]]\nlocal = \"10.0.0.1\"\n"),
            "peer[1].sessions.path[0].remote: is missing",
        ),
        (
            format!("{TEXT}\n{PEER}")
                .replace("10.0.0.1:7000", "10.0.0.1:41001")
                .replace("10.0.0.2:6000", "10.0.0.7:41001"),
            "session station/41001 has the addresses and ports of another one",
        ),
        (format!("{TEXT}\n{PEER}").replace("newest", CANONICAL), "give this one another name"),
        (format!("{TEXT}\n{PEER}").replace("41008", "41090"), "are more than max-sessions = 64"),
    ];
    for (text, wanted) in table {
        let error = parse(&text).expect_err(wanted);
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn sessions_of_a_pool_have_the_peers_paths() {
    let path = |local: &str, remote: &str| {
        format!("[[peer.sessions.path]]\nlocal = \"{local}\"\nremote = \"{remote}\"\ninterface = \"eth0\"\n")
    };
    let own = path("10.0.0.1", "10.0.0.7");
    let second = path("10.1.0.1", "10.1.0.7");
    let settings = parse(&format!("{TEXT}\n{PEER}{second}{own}")).expect("paths");
    assert_eq!(settings.sessions[0].paths, None);
    for session in &settings.sessions[1..] {
        let paths = session.paths.as_ref().expect("paths");
        assert_eq!(
            paths.each.iter().map(|path| path.local.to_string()).collect::<Vec<_>>(),
            ["10.0.0.1", "10.1.0.1"]
        );
    }
    let many = PEER.replace("41008", "41101");
    for (text, wanted) in [
        (format!("{PEER}{own}"), "peer station: path: there are 2 to 4 of them"),
        (format!("{PEER}{second}{second}"), "the session's own addresses, local = \"10.0.0.1\""),
        (
            with("max-sessions = 200\nmemory-mib = 300", &format!("{TEXT}\n{many}{second}{own}")),
            "101 sessions have several paths",
        ),
    ] {
        let text = if text.contains("[sessions]") { text } else { format!("{TEXT}\n{text}") };
        let error = parse(&text).expect_err(wanted);
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn invalid_settings_are_refused() {
    let table = [
        ("[\"eth0\"]", "[]", "interface has to name at least one interface"),
        ("[\"number\", \"repair\"]", "[\"repair\"]", "function repair needs number in front of it"),
        ("[\"number\", \"repair\"]", "[\"repair\", \"number\"]", "repair needs number in front of it"),
        (
            "[\"number\", \"repair\"]",
            "[\"window\", \"number\", \"repair\"]",
            "function window needs acknowledge behind it",
        ),
        ("[\"number\", \"repair\"]", "[\"number\", \"number\"]", "number is in it twice"),
        (
            "[\"number\", \"repair\"]",
            "[\"seal\"]",
            "there is no function seal; there are: acknowledge, congestion, fec, gobackn, number, order, pace, partial, repair, window",
        ),
        ("fallback = \"newest\"", "fallback = \"complete\"", "does not have the service PartialOrder"),
        ("fallback = \"newest\"", "fallback = \"none\"", "there is no graft none"),
        ("name = \"newest\"", "name = \"complete\"", "two grafts are called complete"),
        ("graft = \"complete\"", "graft = \"some\"", "session telemetry: there is no graft some"),
        ("\"10.0.0.2:6000\"", "\"[::1]:6000\"", "different families"),
        ("\"10.0.0.2:6000\"", "\"10.0.0.2\"", "session[0].remote: is an address and a port"),
        (
            "peer = \"far\"",
            "key-file = \"session.key\"",
            "key-file left Millrace: keys of sessions come from TLS",
        ),
        ("peer = \"far\"", "peer = \"fat\"", "session telemetry: there is no [[peer]] fat"),
        ("[agreement]\n    key = \"host.key\"", "", "need an [agreement] with this host's key"),
        ("[sessions]", "[sessions]\n    renew-s = 4", "renew-s is from 5 to 86400"),
        ("key = \"ba78", "host = \"ba78", "peer far: host needs authority in [agreement]"),
        ("peer = ", "clear = true\ncipher = \"aes-128-gcm\"\npeer = ", "clear and cipher exclude each other"),
        ("peer = ", "cipher = \"rot13\"\npeer = ", "not \"rot13\""),
        ("peer = ", "rings = true\npeer = ", "rings left Millrace: remove it"),
        ("peer = ", "protocol = \"253\"\npeer = ", "protocol left Millrace: remove it"),
        ("[sessions.parameters.repair]", "[sessions.parameters.mend]", "there is no function mend"),
        (
            "functions = [\"number\", \"repair\"]",
            "functions = [\"window\", \"number\", \"acknowledge\"]\n[sessions.parameters.window]\npackets = 2\n[sessions.parameters.acknowledge]\nevery = 3",
            "a window of 2 packets would be full before 3 are acknowledged",
        ),
    ];
    for (from, to, wanted) in table {
        let text = TEXT.replacen(from, to, 1);
        assert_ne!(text, TEXT, "{from}");
        let error = parse(&text).expect_err(wanted);
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn removed_setting_names_its_replacement() {
    let former = TEXT
        .replace("[sessions]\n", "mode = \"auto\"\nsessions = 9\nmemory-mib = 9\n")
        .replace("[sessions.parameters.", "[parameters.")
        .replace("[peer.sessions]\n", "users = [\"root\"]\n")
        .replace("host.key\"\n", "host.key\"\nrenew-s = 9\n");
    let error = parse(&former).expect_err("former settings");
    for (key, wanted) in [
        ("mode", "write `[sessions]`, and `mode = ...` under it"),
        ("sessions", "write `[sessions]`, and `max-sessions = ...` under it"),
        ("memory-mib", "write `[sessions]`, and `memory-mib = ...` under it"),
        ("interface", "write `[sessions]`, and `interface = ...` under it"),
        ("parameters", "write `[sessions.parameters.NAME]` instead of `[parameters.NAME]`"),
        ("agreement.renew-s", "write `renew-s = ...` under `[sessions]`"),
        (
            "peer[0].users",
            "write `[peer.sessions]` behind this peer's other keys, and `users = ...` under it",
        ),
        (
            "peer[0].local",
            "write `[peer.sessions]` behind this peer's other keys, and `local = ...` under it",
        ),
    ] {
        let moved = "has moved, since sessions share the settings file of all grafts";
        assert!(error.contains(&format!(": {key}: {moved}: {wanted}")), "{key}: {error}");
    }
}

#[test]
fn every_settings_error_is_reported_with_its_line_number() {
    for (changes, wanted) in [
        (
            [
                ("interface = [\"eth0\"]", "interface = [7]"),
                ("budget-ns = 5000", "budget = 5"),
                ("10.0.0.2:6000", "10.0.0.2"),
            ],
            [
                "settings:3: sessions.interface[0]: is text in quotes",
                "settings:12: graft[1].budget: unknown key; did you mean `budget-ns`?",
                "settings:26: session[0].remote: is an address and a port",
            ],
        ),
        (
            [
                ("[\"number\", \"repair\"]", "[\"repair\"]"),
                ("[\"number\", \"order\"]", "[\"seal\"]"),
                ("10.0.0.2:6000", "[::1]:6000"),
            ],
            [
                "settings:6: graft complete: function repair needs number",
                "settings:9: there is no function seal",
                "settings:23: ",
            ],
        ),
    ] {
        let text = changes.iter().fold(TEXT.to_owned(), |text, (from, to)| text.replacen(from, to, 1));
        let error = parse(&text).expect_err("problems");
        assert_eq!(error.lines().count(), 4, "{error}");
        assert!(wanted.iter().all(|wanted| error.contains(wanted)), "{error}");
    }
}
