use std::path::Path;

use clap::Parser;

use super::*;

#[derive(Parser)]
struct ConfigTestCommand {
    #[command(flatten)]
    settings: Settings,
}

fn config(flags: &[&str], text: &str) -> Result<Config, Vec<(String, String)>> {
    let settings = ConfigTestCommand::parse_from([&["relay"], flags].concat()).settings;
    Config::new(settings, Some(ConfigFile { name: "relay.toml", text }))
        .map_err(|errors| errors.0.into_iter().map(|problem| (problem.place, problem.message)).collect())
}

fn problems(flags: &[&str], text: &str) -> Vec<(String, String)> {
    config(flags, text).expect_err("accepted")
}

#[test]
fn relay_without_settings_listens_on_loopback_only() {
    let config = config(&[], "").unwrap();
    assert_eq!(config.listen, ["127.0.0.1:4443".parse().unwrap(), "[::1]:4443".parse().unwrap()]);
    assert_eq!(config.identity, IdentityConfig::SelfSigned { out: None });
    assert_eq!(config.http, Some("127.0.0.1:9184".parse().unwrap()));
    assert_eq!(config.cipher_suites, CipherSuite::value_variants());
    assert_eq!(config.drafts, tls::PREFERRED);
    assert_eq!(config.key_log_file, None);
    assert!(config.upstream.is_none());
    assert_eq!(config.gate, GateChoice::Auto);
}

#[test]
fn flags_and_file_accept_the_same_values() {
    let by_flags = config(
        &[
            "--listen=127.0.0.1:1,[::1]:2",
            "--engine=kernel",
            "--interface=eth0,eth1",
            "--tls-cert=c.pem",
            "--tls-key=k.pem",
            "--cipher-suites=aes-256-gcm,chacha20-poly1305",
            "--drafts=20,18",
            "--congestion-control=newreno",
            "--cache-bytes=1GiB",
            "--receive-bytes=64MiB",
            "--cache-seconds=2.5",
            "--idle-timeout=7",
            "--max-sessions=3",
            "--max-tracks=4",
            "--max-requests=5",
            "--drain-timeout=0",
            "--shards=3",
            "--gso=off",
            "--upstream=moqt://relay.example:4443",
            "--upstream-tls-disable-verify",
            "--http=off",
            "--log-level=info,millrace=debug",
            "--log-format=json",
            "--log-file=l.log",
            "--key-log-file=keys",
        ],
        "",
    );
    let by_file = config(
        &[],
        r#"
        listen = ["127.0.0.1:1", "[::1]:2"]
        engine = "kernel"
        interface = ["eth0", "eth1"]
        tls-cert = "c.pem"
        tls-key = "k.pem"
        cipher-suites = ["aes-256-gcm", "chacha20-poly1305"]
        drafts = [20, 18]
        congestion-control = "newreno"
        cache-bytes = "1GiB"
        receive-bytes = "64MiB"
        cache-seconds = 2.5
        idle-timeout = 7
        max-sessions = 3
        max-tracks = 4
        max-requests = 5
        drain-timeout = 0
        shards = 3
        gso = "off"
        upstream = ["moqt://relay.example:4443"]
        upstream-tls-disable-verify = true
        http = "off"
        log-level = "info,millrace=debug"
        log-format = "json"
        log-file = "l.log"
        key-log-file = "keys"
        "#,
    );
    let by_flags = by_flags.unwrap();
    assert_eq!(format!("{by_flags:?}"), format!("{:?}", by_file.unwrap()));
    assert_eq!(by_flags.cache_bytes, 1 << 30);
    assert_eq!(by_flags.receive_bytes, 64 << 20);
    assert_eq!(by_flags.cache_age, Duration::from_millis(2500));
    assert_eq!(by_flags.cipher_suites, [CipherSuite::Aes256Gcm, CipherSuite::Chacha20Poly1305]);
    assert_eq!(by_flags.drafts, [Draft::D18, Draft::D20], "in the relay's order of preference");
    assert_eq!(by_flags.shards, 3);
    assert_eq!(by_flags.http, None);
    assert!(by_flags.upstream.unwrap().tls_root.is_none());
}

#[test]
fn number_of_shards_is_bounded_and_follows_the_cpus_by_default() {
    let cpus = std::thread::available_parallelism().unwrap().get();
    for text in ["", "shards = \"auto\""] {
        assert_eq!(config(&[], text).unwrap().shards, cpus.min(16));
    }
    assert_eq!(config(&["--shards=64"], "shards = 1").unwrap().shards, 64);
    for given in ["0", "65", "-1", "many"] {
        let found = problems(&[], &format!("shards = \"{given}\""));
        let message = format!("`{given}` is neither auto nor a number from 1 to 64");
        assert_eq!(found, [("relay.toml:1: shards".to_owned(), message)]);
    }
}

#[test]
fn relay_flag_overrides_the_file() {
    let config =
        config(&["--max-sessions=1", "--listen=127.0.0.1:9"], "max-sessions = 2\nlisten = []").unwrap();
    assert_eq!(config.max_sessions, 1);
    assert_eq!(config.listen, ["127.0.0.1:9".parse().unwrap()]);
}

#[test]
fn every_problem_is_reported_with_key_and_line() {
    let text = "lisen = [\"[::]:4443\"]\n\
                cache-bytes = \"12 parsecs\"\n\
                tls-cert = \"c.pem\"\n\
                idle-timeout = 0\n\
                gso = \"perhaps\"\n\
                max-tracks = -1\n\
                colour = 1\n\
                interface = [\"eth0\", \"eth0\"]\n";
    let found = problems(&["--max-requests=0"], text);
    let places: Vec<&str> = found.iter().map(|(place, _)| place.as_str()).collect();
    let in_file = |line: usize, key: &str| format!("relay.toml:{line}: {key}");
    for (line, key) in [
        (1, "lisen"),
        (2, "cache-bytes"),
        (3, "tls-cert"),
        (4, "idle-timeout"),
        (5, "gso"),
        (6, "max-tracks"),
        (7, "colour"),
        (8, "interface"),
    ] {
        assert!(places.contains(&in_file(line, key).as_str()), "{key} in {places:?}");
    }
    assert!(places.contains(&"--max-requests"));
    assert_eq!(found.len(), 9, "{found:?}");
    let message = |place: &str| &found.iter().find(|(at, _)| at == place).unwrap().1;
    assert_eq!(message("relay.toml:1: lisen"), "unknown key; did you mean `listen`?");
    assert!(message("relay.toml:7: colour").starts_with("unknown key"));
    assert_eq!(message("relay.toml:5: gso"), "`perhaps` is none of auto, on, off");
}

#[test]
fn problem_of_a_flag_names_the_flag_not_the_file() {
    let found = problems(&["--idle-timeout=0"], "idle-timeout = 5");
    assert_eq!(found, [("--idle-timeout".to_owned(), "must be more than 0".to_owned())]);
}

#[test]
fn broken_toml_names_the_line() {
    let found = problems(&[], "engine = \"user\"\nlisten = [\n\nmax-tracks = = 3\n");
    assert!(found.iter().all(|(place, _)| place.starts_with("relay.toml:")), "{found:?}");
    assert!(found.iter().any(|(place, _)| place.starts_with("relay.toml:4")), "{found:?}");
}

#[test]
fn contradictory_relay_settings_are_refused() {
    let table = [
        ("tls-key = 'k'", "tls-key"),
        ("tls-cert = 'c'\ntls-key = 'k'\ntls-self-signed = true", "tls-self-signed"),
        ("tls-self-signed = false", "tls-self-signed"),
        ("webtransport = false\nweb-origin = ['https://example.org']", "web-origin"),
        ("web-origin = ['https://example.org/']", "web-origin"),
        ("web-origin = ['example.org']", "web-origin"),
        ("listen = []", "listen"),
        ("listen = ['[::1]:1', '[::1]:1']", "listen"),
        ("cipher-suites = []", "cipher-suites"),
        ("cipher-suites = ['aes-128-gcm', 'aes-128-gcm']", "cipher-suites"),
        ("drafts = []", "drafts"),
        ("drafts = [18, 18]", "drafts"),
        ("upstream = ['http://x:1']", "upstream"),
        ("upstream = []", "upstream"),
        ("upstream = ['moqt://a', 'moqt://b', 'moqt://a']", "upstream"),
        ("upstream-tls-root = 'r'", "upstream-tls-root"),
        ("upstream-tls-disable-verify = true", "upstream-tls-disable-verify"),
        ("log-level = 'a=b=c'", "log-level"),
    ];
    for (text, key) in table {
        let found = problems(&[], text);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        assert!(found[0].0.ends_with(&format!(": {key}")), "{text}: {found:?}");
    }
}

#[test]
fn relay_listening_beyond_loopback_needs_access_rules_or_public_option() {
    let rule = "[[allow]]\nnamespace = '**'\nsubscribe = ['anyone']\n";
    let table = [
        ("127.0.0.1:1", "", true),
        ("127.3.4.5:1", "", true),
        ("[::1]:1", "", true),
        ("[::ffff:127.0.0.1]:1", "", true),
        ("0.0.0.0:1", "", false),
        ("[::]:1", "", false),
        ("192.0.2.1:1", "", false),
        ("192.0.2.1:1", "public = false\n", false),
        ("192.0.2.1:1", "public = true\n", true),
        ("192.0.2.1:1", "token-keys = ['k']\n", true),
        ("192.0.2.1:1", "token-secrets = ['k']\n", true),
        ("192.0.2.1:1", "[[issuer]]\nname = 'a'\nkeys = ['k']\n", true),
        ("192.0.2.1:1", "client-ca = 'c'\n", true),
        ("192.0.2.1:1", rule, true),
    ];
    for (addr, text, wanted) in table {
        let found = config(&[&format!("--listen={addr}")], text);
        assert_eq!(found.is_ok(), wanted, "{addr} {text}: {found:?}");
        if let Err(problems) = found {
            assert!(problems[0].1.contains("--public") && problems[0].1.contains(addr), "{problems:?}");
        }
    }
    assert!(config(&["--listen=0.0.0.0:1", "--public"], "").is_ok());
    // Without settings the relay listens on loopback, so it needs no access rules.
    assert!(config(&[], "").is_ok());
}

#[test]
fn allow_rules_config_is_parsed_and_each_problem_named() {
    let good = "token-keys = ['k']\nclient-ca = 'c'\n\
                [[allow]]\nnamespace = 'live/**'\npublish = ['token', 'cert:cam']\nsubscribe = ['anyone']\n\
                [[allow]]\nnamespace = '*'\nsubscribe = ['cidr:10.0.0.0/8']\npath = 'room/*'\nauthority = 'x'\n";
    let rules = config(&[], good).unwrap().access.rules;
    assert_eq!((rules.len(), rules[0].publish.len(), rules[1].path.is_some()), (2, 2, true));
    let table = [
        ("[[allow]]\npublish = ['anyone']", "missing field `namespace`"),
        ("[[allow]]\nnamespace = 'a'", "allows nothing"),
        ("[[allow]]\nnamespace = 'a'\npublish = ['all']", "none of anyone, token"),
        ("[[allow]]\nnamespace = '**/a'\npublish = ['anyone']", "only at the end"),
        ("[[allow]]\nnamespace = 'a'\npublsh = ['anyone']", "unknown field `publsh`"),
        ("[[allow]]\nnamespace = 'a'\npublish = ['cidr:10.0.0.0/33']", "is no network"),
        (
            "[[allow]]\nnamespace = 'a'\npublish = ['anyone']\nauthority = 'https://a'",
            "neither HOST nor HOST:PORT",
        ),
        ("[[allow]]\nnamespace = 'a'\npublish = ['token']", "needs token-keys"),
        ("[[allow]]\nnamespace = 'a'\npublish = ['cert:x']", "needs client-ca"),
        ("allow = 'anyone'", "a list of tables"),
        ("token-revoked = 'r'", "needs token-keys"),
        ("token-audience = ['a']", "needs token-keys"),
        ("token-issuer = ['a']", "needs token-keys"),
        ("issuer = 'a'", "a list of tables"),
        ("[[issuer]]\nname = ''\nkeys = ['k']", "name is empty"),
        ("[[issuer]]\nname = 'a'\nrevoked = 'r'", "has no key"),
        ("[[issuer]]\nname = 'a'\nkey = ['k']", "unknown field `key`"),
        ("[[issuer]]\nname = 'a'\nkeys = ['k']\n[[issuer]]\nname = 'a'\nkeys = ['l']", "a is given twice"),
        ("[[issuer]]\nname = 'a'\nkeys = ['k', 'k']", "k is given twice"),
        ("token-keys = ['k']\ntoken-secrets = ['s']\ntoken-issuer = ['a', 'b']", "each of 2 files of keys"),
        (
            "token-keys = ['k']\ntoken-issuer = ['a']\n[[issuer]]\nname = 'a'\nkeys = ['l']",
            "leave it out here",
        ),
        ("token-issuer = ['b']\n[[issuer]]\nname = 'a'\nkeys = ['l']", "and neither is set"),
        ("unproven-sessions = 0", "must be 1 to 5000"),
        ("max-sessions = 300\nunproven-sessions = 151", "must be 1 to 150, half of max-sessions"),
        ("session-requests = 0", "must be at least 1"),
        ("upstream-token = 't'", "needs upstream"),
        ("upstream = ['moqt://a']\nupstream-tls-cert = 'c'", "need each other"),
        ("upstream = ['https://a']\nupstream-tls-cert = 'c'", "need each other"),
        ("upstream = ['moqt://user:secret@a']", "a relay's address has no user and no password"),
        ("upstream = ['moqt://user:secret@a:99999']", "`moqt://...@a:99999`: invalid port number"),
        ("upstream = ['http://a']", "moqt://HOST:PORT or https://HOST:PORT"),
    ];
    for (text, wanted) in table {
        let found = problems(&[], text);
        assert!(found.len() == 1 && found[0].1.contains(wanted), "{text}: {found:?}");
    }
}

#[test]
fn max_queue_delay_is_set_globally_or_by_namespace_and_priority() {
    let ms = |ms| Some(Duration::from_millis(ms));
    let queue = config(&[], "").unwrap().queue;
    assert_eq!((queue.policy, queue.delays.default, queue.bytes), (DropPolicy::Live, ms(250), 16 << 20));
    let text = "max-delay = 0.5\nqueue-bytes = '1MiB'\n\
                [[delay]]\nnamespace = 'live/**'\npriority = '0-99'\nmax-delay = 1\n\
                [[delay]]\nmax-delay = 'off'\n";
    let queue = config(&[], text).unwrap().queue;
    assert_eq!((queue.delays.default, queue.bytes), (ms(500), 1 << 20));
    let rules: Vec<_> =
        queue.delays.rules.iter().map(|rule| (rule.priority.clone(), rule.max_delay)).collect();
    assert_eq!(rules, [(0..=99, ms(1000)), (0..=255, None)]);
    assert_eq!(config(&["--max-delay=off"], "max-delay = 3").unwrap().queue.delays.default, None);
    assert_eq!(config(&["--drop-policy=tail"], "").unwrap().queue.delays.default, None);
    let table = [
        ("max-delay = 0", "must be more than 0, or `off`"),
        ("max-delay = 'soon'", "is not a time up to 365d"),
        ("drop-policy = 'head'", "is none of live, tail"),
        ("drop-policy = 'tail'\nmax-delay = 1", "has no effect with drop-policy tail"),
        ("drop-policy = 'tail'\n[[delay]]\nmax-delay = 1", "has no effect with drop-policy tail"),
        ("queue-bytes = 0", "must be more than 0"),
        ("datagram-bytes = 0", "must be more than 0"),
        ("delay = 1", "a list of tables"),
        ("[[delay]]\nnamespace = 'a'", "missing field `max-delay`"),
        ("[[delay]]\nmax-delay = 1\npriority = '9-3'", "or a range of them"),
        ("[[delay]]\nmax-delay = 1\npriority = '256'", "is not a priority"),
        ("[[delay]]\nmax-delay = 1\nnamespace = '**/a'", "only at the end"),
        ("[[delay]]\nmax-delay = 1\nlevel = 2", "unknown field `level`"),
    ];
    for (text, wanted) in table {
        let found = problems(&[], text);
        assert!(found.len() == 1 && found[0].1.contains(wanted), "{text}: {found:?}");
    }
}

#[test]
fn byte_amounts_with_unknown_units_or_overflow_are_refused() {
    let table = [
        ("1024", Some(1024)),
        ("3KiB", Some(3 << 10)),
        ("256 MiB", Some(256 << 20)),
        ("", None),
        ("-1", None),
        ("1.5GiB", None),
        ("17179869184GiB", None),
        ("1kb", None),
    ];
    for (text, want) in table {
        assert_eq!(text.parse().ok(), want.map(ByteCount), "{text}");
    }
    for text in ["-1", "NaN", "inf", "1e99", "soon"] {
        assert!(text.parse::<DurationValue>().is_err(), "{text}");
    }
}

#[test]
fn settings_reference_has_every_relay_key() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/settings.md");
    let text = std::fs::read_to_string(path).unwrap();
    for key in keys() {
        assert!(text.contains(&format!("| `{key}` |")), "docs/reference/settings.md lacks {key}");
    }
    assert!(text.contains("[[allow]]") && text.contains("[[delay]]"));
}

#[test]
fn bitrate_ladder_config_is_parsed_and_invalid_ladders_refused() {
    use millrace_relay::AdaptiveMode;
    let text = "adaptive = \"ladder\"\n\
                [[ladder]]\n\
                namespace = \"live/*\"\n\
                tracks = [{ name = \"hi\", bitrate = 5000000 }, { name = \"lo\", bitrate = 800000 }]\n";
    let AdaptiveMode::Ladders(rules) = config(&[], text).unwrap().adaptive else { panic!("no ladders") };
    assert_eq!(rules[0].tracks, [("hi".to_owned(), 5_000_000), ("lo".to_owned(), 800_000)]);
    let AdaptiveMode::Catalogs(rules) = config(&["--adaptive=catalog"], text).unwrap().adaptive else {
        panic!("no catalogs")
    };
    assert_eq!(rules.len(), 1, "the file's ladders come first");
    assert_eq!(config(&[], "").unwrap().adaptive, AdaptiveMode::Off);
    let places = |flags: &[&str], text: &str| -> Vec<String> {
        problems(flags, text).into_iter().map(|(place, _)| place).collect()
    };
    assert_eq!(places(&["--adaptive=ladder"], ""), ["--adaptive"]);
    assert_eq!(places(&["--adaptive=off"], text), ["--ladder"]);
    assert_eq!(places(&[], "ladder = 3"), ["--ladder"]);
    let bad = [
        "tracks = [{ name = \"a\", bitrate = 1 }]",
        "tracks = [{ name = \"a\", bitrate = 1 }, { name = \"b\", bitrate = 1 }]",
        "tracks = [{ name = \"a\", bitrate = 1 }, { name = \"a\", bitrate = 2 }]",
        "tracks = [{ name = \"a\", bitrate = 0 }, { name = \"b\", bitrate = 1 }]",
        "tracks = [{ name = \"a\" }]",
        "colour = 1",
    ];
    for bad in bad {
        let places = places(&["--adaptive=catalog"], &format!("[[ladder]]\n{bad}"));
        assert_eq!(places, ["relay.toml:1: ladder"], "{bad}");
    }
}

#[test]
fn issuer_config_binds_token_keys_and_revocations_to_the_issuer() {
    let text = "token-keys = ['k']\ntoken-secrets = ['s']\ntoken-revoked = 'r'\n\
                [[issuer]]\nname = 'a'\nkeys = ['ka']\nrevoked = 'ra'\n\
                [[issuer]]\nname = 'b'\nsecrets = ['sb']\n";
    let access = config(&[], text).unwrap().access;
    let keys: Vec<_> = access.keys.iter().map(ToString::to_string).collect();
    let wanted = ["token-keys k", "token-secrets s", "[[issuer]] a: keys ka", "[[issuer]] b: secrets sb"];
    assert_eq!(keys, wanted);
    let revoked: Vec<_> = access.revoked.iter().map(ToString::to_string).collect();
    assert_eq!(revoked, ["token-revoked r", "[[issuer]] a: revoked ra"]);
    assert!(access.shared_trust().is_some_and(|warning| warning.contains("[[issuer]]")));
    let one = "token-keys = ['k']\n[[issuer]]\nname = 'a'\nkeys = ['ka']\n";
    assert_eq!(config(&[], one).unwrap().access.shared_trust(), None);
    // Several keys of one issuer are allowed, and so is one key of several issuers.
    assert!(config(&[], "token-keys = ['k', 'l']\ntoken-issuer = ['a']").is_ok());
    assert!(config(&[], "token-keys = ['k']\ntoken-issuer = ['a', 'b']").is_ok());
}

#[test]
fn unproven_sessions_limit_defaults_to_at_most_half_of_max_sessions() {
    let of = |text: &str| config(&[], text).unwrap().access.limits.unproven.sessions;
    assert_eq!(of(""), 1024);
    assert_eq!(of("max-sessions = 300"), 150);
    assert_eq!(of("max-sessions = 1"), 1);
    assert_eq!(of("unproven-sessions = 7"), 7);
}

/// Reloaded settings are checked together with those that only a restart can change.
#[test]
fn reloaded_settings_are_checked_against_the_running_unreloadable_ones() {
    let queue = config(&[], "").unwrap().queue;
    let running = |listen: &str| RunningConfig {
        listen: vec![listen.parse().unwrap()],
        max_sessions: 7,
        queue: queue.clone(),
    };
    let public = running("192.0.2.1:1");
    let local = running("127.0.0.1:1");
    let loopback = |text: &str| config(&["--listen=127.0.0.1:9"], text).unwrap();
    let refused = loopback("").in_force(&public).unwrap_err().to_string();
    assert!(refused.contains("192.0.2.1:1") && refused.contains("--public"), "{refused}");
    assert!(loopback("").in_force(&local).is_ok());
    for text in ["token-keys = ['k']", "client-ca = 'c'", "public = true"] {
        let taken = loopback(&format!("max-sessions = 9\n{text}")).in_force(&public).unwrap();
        assert_eq!((taken.listen, taken.max_sessions), (public.listen.clone(), 7), "{text}");
    }
    // If reloaded settings name another drop-policy, their `[[delay]]` tables do not replace those of the policy in
    // use.
    let delay = |text: &str| loopback(text).in_force(&local).unwrap().queue.delays.default;
    assert_eq!(delay("max-delay = 3"), Some(Duration::from_secs(3)));
    assert_eq!(delay("drop-policy = 'tail'"), queue.delays.default);
    assert!(queue.delays.default.is_some());
}

#[test]
fn configured_peers_form_a_cluster_and_use_the_upstream_credentials() {
    assert!(config(&[], "").unwrap().cluster.is_none());
    let peers = r"
        upstream-token = 't'
        upstream-tls-disable-verify = true
        cluster-peer = ['moqt://a:1']
        [[peer]]
        url = 'moqt://b:1'
        cost = 7
        namespaces = ['live/**']
    ";
    let both = config(&["--cluster-hop=41"], peers).unwrap();
    let cluster = both.cluster.unwrap();
    assert_eq!(
        (cluster.hop, cluster.cost, cluster.max_routes),
        (Some(millrace_moq::HopId(41)), None, 10_000)
    );
    let [first, second] = &cluster.peers[..] else { panic!("{:?}", cluster.peers) };
    assert_eq!((first.url.authority(), first.cost, first.namespaces.len()), ("a:1", None, 0));
    assert_eq!((second.url.authority(), second.cost, second.namespaces.len()), ("b:1", Some(7), 1));
    let upstream = both.upstream.unwrap();
    assert!(upstream.urls.is_empty() && upstream.token.is_some() && upstream.tls_root.is_none());
    assert!(config(&["--cluster"], "").unwrap().cluster.unwrap().peers.is_empty());
    for (text, key) in [
        ("cluster-hop = 0\ncluster = true", "cluster-hop"),
        ("cluster-cost = 2", "cluster-cost"),
        ("cluster-routes = 0\ncluster = true", "cluster-routes"),
        ("cluster-peer = ['moqt://a', 'moqt://a']", "cluster-peer"),
        ("cluster = false\ncluster-peer = ['moqt://a']", "cluster-peer"),
        ("[[peer]]\nurl = 'moqt://a'\nprice = 1", "peer"),
        ("[[peer]]\nurl = 'http://a'", "peer"),
    ] {
        let found = problems(&[], text);
        assert!(found.iter().any(|(place, _)| place.ends_with(key)), "{text}: {found:?}");
    }
}

#[test]
fn discovery_config_selects_etcd_or_a_relay_list() {
    let found =
        |text: &str| config(&[], text).unwrap().cluster.expect("a cluster").discovery.expect("a store");
    let etcd = found(
        "cluster-url = 'moqt://a:4443'
        [discovery]
        etcd = ['https://etcd-1:2379', 'http://127.0.0.1:2379']
        region = 'north'
        lease = '30s'
        namespaces = ['live/**']
        user = 'relay-a'
        password-file = '/etc/millrace/etcd'
        routing = 'lookup'
        lookup-rate = 7",
    );
    let DiscoveryStore::Etcd { endpoints, prefix, lease, user } = &etcd.store else { panic!("{etcd:?}") };
    assert_eq!((endpoints.len(), &**prefix, lease.as_secs()), (2, "/millrace/relays/", 30));
    assert_eq!((etcd.region.as_deref(), etcd.region_cost, etcd.namespaces.len()), (Some("north"), 10, 1));
    assert_eq!(user.as_ref().map(|(name, _)| &**name), Some("relay-a"));
    let lookup = etcd.lookup.expect("lookups");
    assert_eq!((lookup.idle.as_secs(), lookup.rate), (30, 7));
    for list in ["/etc/millrace/relays", "https://relays.example/list"] {
        let store = found(&format!("[discovery]\nlist = '{list}'\ninterval = '1m'")).store;
        let DiscoveryStore::List { interval, .. } = store else { panic!("{store:?}") };
        assert_eq!(interval.as_secs(), 60);
    }
    for (text, wanted) in [
        ("", "needs one of etcd and list"),
        ("etcd = ['http://a']\nlist = '/b'", "needs one of etcd and list"),
        ("etcd = ['moqt://a']", "moqt://a begins with neither http:// nor https://"),
        ("etcd = ['http://a']\nlease = '1s'", "lease is not from 2s to 1h"),
        ("etcd = ['http://a']\nlease = '0s'", "lease is zero"),
        ("etcd = ['http://a']\nprefix = '/a'", "does not end with a slash"),
        ("etcd = ['http://a']\ninterval = '1s'", "interval has no effect"),
        ("etcd = ['http://a']\nuser = 'c'", "user and password-file need each other"),
        ("etcd = ['http://a']\nidle = '1s'", "idle has no effect without routing"),
        ("etcd = ['http://a']\nrouting = 'lookup'\nlookup-rate = 0", "lookup-rate is zero"),
        ("etcd = ['http://a']\nrouting = 'gossip'", "unknown variant `gossip`"),
        ("list = '/a'\nrouting = 'lookup'", "routing = \"lookup\" needs etcd"),
        ("list = '/a'\nuser = 'b'", "user has no effect"),
        ("list = 'relays'", "neither an http:// or https:// URL nor an absolute path"),
        ("list = '/a'\nlease = '5s'", "lease has no effect"),
        ("list = '/a'\ntls-cert = '/b'", "tls-cert and tls-key need each other"),
        ("list = '/a'\nnamespaces = ['**/a']", "\"**/a\""),
        ("list = '/a'\nregoin = 'b'", "unknown field `regoin`"),
    ] {
        let found = problems(&[], &format!("[discovery]\n{text}"));
        let is_it = |(place, message): &(String, String)| {
            place.ends_with(":1: discovery") && message.contains(wanted)
        };
        assert!(found.iter().any(is_it), "{text}: {found:?}");
    }
    for (flags, text, wanted) in [
        (&[][..], "[discovery]\netcd = ['http://a']", "etcd needs the URL of this relay"),
        (&["--cluster-url=moqt://a/?b"], "[discovery]\nlist = '/c'", "has more than a host"),
        (&["--cluster-url=moqt://a"], "cluster-peer = ['moqt://b']", "has no effect without [discovery]"),
        (&["--cluster-url=moqt://a"], "", "has no effect without cluster"),
    ] {
        let found = problems(flags, text);
        let is_it =
            |(place, message): &(String, String)| place.contains("cluster-url") && message.contains(wanted);
        assert!(found.iter().any(is_it), "{flags:?} {text}: {found:?}");
    }
    let alone = problems(&["--cluster=false"], "[discovery]\nlist = '/a'");
    let is_it = |(place, message): &(String, String)| {
        place.contains("discovery") && message.contains("has no effect")
    };
    assert!(alone.iter().any(is_it), "{alone:?}");
}
