use std::time::Duration;

use crate::kernel::{
    Counting, ListEntry, LiveRule, Rule, RuleRate, TcPosition, VERSION_1, VERSION_2,
    rules::{RuleMode, RulePlace},
};

use super::*;

fn problems(text: &str) -> Vec<String> {
    let errors = Policy::parse(text).expect_err("problems").to_string();
    errors.lines().skip(1).map(|line| line.trim_start().trim_start_matches("policy:").to_owned()).collect()
}

const WEB: &str = "[[scope]]\nname = \"web\"\nport = 443\n";

#[test]
fn documented_policy_example_is_valid() {
    let page = include_str!("../../../docs/guide/gate.md");
    let examples: Vec<_> =
        page.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(examples.len() >= 2, "docs/guide/gate.md has examples");
    for text in examples {
        let scope = if text.contains("[[scope]]") { "" } else { WEB };
        let text = text.replace("block_file = ", "#") + scope;
        Policy::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    }
}

#[test]
fn every_rule_is_documented() {
    let page = include_str!("../../../docs/guide/gate.md");
    for rule in Rule::ALL {
        assert!(page.contains(&format!("`{}`", rule.name())), "docs/guide/gate.md has rule {}", rule.name());
    }
}

#[test]
fn policy_with_only_a_port_has_the_default_rules() {
    let policy = Policy::parse(WEB).unwrap();
    let scope = &policy.rules.scopes[0];
    assert_eq!(scope.places, [RulePlace { address: None, port: Some(443) }]);
    assert_eq!(scope.policy, rules::PolicyRules::default());
}

#[test]
fn policy_file_keys_set_their_configuration_fields() {
    let policy = Policy::parse(
        r#"
        block = ["192.0.2.0/24", "2001:db8::/32"]
        allow = "192.0.2.7"
        [load]
        watch = "first"
        client_prefix_v6 = 56
        network_times = [4, 16]
        max_clients = 1_000
        [interface]
        fragment = "monitor"
        [[scope]]
        name = "web"
        address = ["198.51.100.1", "2001:db8::1"]
        port = [443, 8443]
        live = "published"
        id_bytes = 8
        allow = ["203.0.113.0/24"]
        [scope.rules]
        options = "enforce"
        short = "off"
        quota = { connections = 20, answer = true }
        retry = { above = 500, lifetime = 5 }
        version = { mode = "monitor", speaks = [1, 0x6b3343cf], answer = true }
        source_port = { reflectors = [53, 123] }
        client_initials = { per_second = 10, burst = 30, answer = false }
        unknown_bytes = { mode = "monitor", per_second = 1_000_000 }
        live_packets = { per_second = 7 }
        client_bytes = { per_second = 10 }
        "#,
    )
    .unwrap();
    assert_eq!(policy.load.client_prefix_v4, [32, 24]);
    assert_eq!(policy.load.client_prefix_v6, [56], "a single number is a list of one");
    assert_eq!(policy.load.network_times, [4, 16]);
    assert_eq!(policy.load.max_clients, 1000);
    assert_eq!(policy.load.watch, TcPosition::First);
    assert_eq!(policy.rules.interface.get(Rule::Fragment), RuleMode::Monitor);
    assert_eq!(policy.rules.interface.get(Rule::Headers), RuleMode::Enforce);
    let listed = [
        ("192.0.2.0/24", ListEntry::Block),
        ("2001:db8::/32", ListEntry::Block),
        ("192.0.2.7", ListEntry::Allow),
    ];
    assert_eq!(policy.rules.prefixes, listed.map(|(prefix, entry)| (prefix.parse().unwrap(), entry)));

    let scope = &policy.rules.scopes[0];
    assert_eq!(scope.places.len(), 4);
    assert_eq!(scope.prefixes.len(), 1);
    let web = &scope.policy;
    assert_eq!((web.live, web.counting), (LiveRule::Published { id_len: 8 }, Counting::Application));
    assert_eq!((web.quota, web.retry_above), (Some(20), Some(RuleRate::per_second(500, 500))));
    assert_eq!(web.token_lifetime, Duration::from_secs(5));
    assert_eq!(web.versions, [VERSION_1, VERSION_2]);
    assert_eq!(web.answers, [Rule::Version, Rule::Quota].into());
    assert_eq!(web.reflectors, [53, 123]);
    assert_eq!(web.client_rates.initials, Some(RuleRate::per_second(10, 30)));
    assert_eq!(web.unknown_rates.bytes, Some(RuleRate::per_second(1_000_000, 1_000_000)));
    assert_eq!(web.live_rates.packets, Some(RuleRate::per_second(7, 7)));
    assert_eq!(web.client_rates.bytes, Some(RuleRate::per_second(10, 65_535)), "a datagram always fits");
    let modes = [
        (Rule::Options, RuleMode::Enforce),
        (Rule::Short, RuleMode::Off),
        (Rule::Quota, RuleMode::Enforce),
        (Rule::Version, RuleMode::Monitor),
        (Rule::UnknownBytes, RuleMode::Monitor),
        (Rule::UnknownPackets, RuleMode::Off),
    ];
    for (rule, mode) in modes {
        assert_eq!(web.modes.get(rule), mode, "{}", rule.name());
    }
    let watched = policy.dry_run();
    assert!(
        Rule::ALL.iter().all(|rule| watched.rules.scopes[0].policy.modes.get(*rule) != RuleMode::Enforce)
    );
}

#[test]
fn policy_errors_name_line_key_and_remedy() {
    let table: [(&str, &[&str]); 25] = [
        (
            "max_ids = 1\n[load]\nwacth = \"last\"\n[[scope]]\nname = \"web\"\nport = \"443\"\n",
            &[
                "1: max_ids: unknown key",
                "3: load.wacth: unknown key; did you mean `watch`?",
                "6: scope[0].port: must be a number from 1 to 65535",
            ],
        ),
        ("", &["1: the policy has no scope"]),
        ("[[scope]\n", &["1: unclosed array table", "1: scope[0]: needs a name"]),
        ("[[scope]]\nport = 443\n", &["1: scope[0]: needs a name"]),
        ("[[scope]]\nname = \"web\"\n", &["1: scope[0]: scope web needs a port"]),
        ("[[scope]]\nname = \"interface\"\nport = 1\n", &["1: scope[0]: the scope name \"interface\""]),
        (
            "[[scope]]\nname = \"web\"\nport = \"443\"\n",
            &["3: scope[0].port: must be a number from 1 to 65535"],
        ),
        (
            "[[scope]]\nname = \"web\"\nport = [443, 0]\n",
            &["3: scope[0].port[1]: must be a number from 1 to 65535"],
        ),
        (
            "[[scope]]\nname = \"web\"\naddress = [\"192.0.2.1\", \"::\"]\n",
            &["3: scope[0].address: packets cannot be sent to 0.0.0.0 or ::"],
        ),
        (
            "[load]\nmax_ids = 0\nmax_clients = 4294967295\nsamples_per_second = 0\n[[scope]]\nname = \"web\"\nport = 443\n",
            &["2: load.max_ids: is 1 to 16777216", "3: load.max_clients: is 1 to 16777216"],
        ),
        (
            "[[scope]]\nname = \"web\"\nport = 443\n[scope.rules]\nversion = { speaks = [1, 2, 3, 4, 5] }\n",
            &["5: scope[0].rules.version: `speaks` has 5 numbers; at most 4 are allowed"],
        ),
        (
            "[[scope]]\nname = \"web\"\nport = 443\nlive = \"unknown\"\nidle_timeout = 3\n",
            &["5: scope[0].idle_timeout: has no effect with live"],
        ),
        (
            "[[scope]]\nname = \"web\"\nport = 443\nlive = \"published\"\nidle_timeout = 3\n",
            &["4: scope[0].live: needs the length", "5: scope[0].idle_timeout: has no effect"],
        ),
        (
            "[[scope]]\nname = \"web\"\nport = 443\n[scope.rules]\nquoat = \"off\"\nquota = \"enforce\"\nretry = \"on\"\n",
            &[
                "5: scope[0].rules.quoat: unknown key; did you mean `quota`?",
                "6: scope[0].rules.quota: needs numbers: `quota = { connections = 20 }`",
                "7: scope[0].rules.retry: is \"off\", \"monitor\" or \"enforce\"",
            ],
        ),
        (
            "[[scope]]\nname = \"web\"\nport = 443\n[scope.rules]\nclient_bytes = { per_second = 10, burst = 100 }\n",
            &["5: scope[0].rules.client_bytes.burst: must be at least 65535"],
        ),
        (
            "[[scope]]\nname = \"web\"\nport = 443\n[scope.rules]\nquota = { connections = 2, answer = \"yes\" }\nclient_packets = { per_second = 10, answer = true }\n",
            &[
                "5: scope[0].rules.quota.answer: is true or false, without quotes",
                "6: scope[0].rules.client_packets.answer: unknown key; known here: mode, per_second, burst",
            ],
        ),
        (
            "[[scope]]\nname = \"a\"\nport = 443\n[[scope]]\nname = \"b\"\nport = 443\n",
            &["4: scope[1]: scopes a and b have the same"],
        ),
        ("block = [\"10.0.0.0/33\"]\n", &["1: block[0]: \"10.0.0.0/33\" is no address prefix"]),
        ("block_file = \"/nowhere/list\"\n", &["1: block_file: /nowhere/list: No such file"]),
        ("[load]\nwatch = \"front\"\n", &["2: load.watch: is \"first\" or \"last\""]),
        ("[load]\nclient_prefix_v4 = 33\n", &["2: load.client_prefix_v4: an address has 32 bits"]),
        (
            "[load]\nclient_prefix_v6 = []\n",
            &["2: load.client_prefix_v6: must be one number, or a list of up to 3"],
        ),
        ("[load]\nclient_prefix_v6 = [64, 64]\n", &["2: load.client_prefix_v6: must begin with a client"]),
        ("[load]\nnetwork_times = 8\n", &["2: load.network_times: must be two numbers, such as [8, 64]"]),
        ("[load]\nnetwork_times = [8, 1]\n", &["2: load.network_times: must be two numbers from 2 to"]),
    ];
    for (text, want) in table {
        let said = problems(text);
        assert_eq!(said.len(), want.len(), "{text}\n{said:?}");
        for (said, want) in said.iter().zip(want) {
            assert!(said.starts_with(want), "{text}\n{said}");
        }
    }
}

#[test]
fn too_many_reflectors_are_reported_with_their_line() {
    let ports: Vec<_> = (1..=33).collect();
    let text = format!("{WEB}[scope.rules]\nsource_port = {{ reflectors = {ports:?} }}\n");
    let line = text.lines().count();
    let want = format!("{line}: scope[0].rules.source_port: `reflectors` has 33 numbers");
    let said = problems(&text);
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].starts_with(&want), "{said:?}");
}

#[test]
fn application_without_a_port_in_the_policy_is_accepted_with_a_warning() {
    assert_eq!(Policy::parse(WEB).unwrap().warnings(), [""; 0]);
    let policy =
        Policy::parse(&format!("{WEB}[[scope]]\nname = \"all\"\naddress = \"192.0.2.1\"\n")).unwrap();
    let said = policy.warnings();
    assert_eq!(said.len(), 1);
    assert!(said[0].starts_with("scope all has no port"), "{said:?}");
}

#[test]
fn block_lists_and_token_keys_are_read_from_files_beside_the_policy() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    file("gate.toml", &format!("block_file = \"block\"\ntoken_keys = \"keys\"\n{WEB}"));
    file("block", "# spammers\n192.0.2.0/24\n\n2001:db8::1 # one more\n");
    file("keys", "00112233445566778899aabbccddeeff\n* ffeeddccbbaa99887766554433221100 # new\n");
    let policy = Policy::load(&dir.path().join("gate.toml")).unwrap();
    assert_eq!(policy.rules.prefixes.len(), 2);
    let keys = policy.token_keys.unwrap();
    assert_eq!(keys.current, 1);
    assert_eq!(
        keys.slots[0],
        GateKey::new([0, 17, 34, 51, 68, 85, 102, 119, 136, 153, 170, 187, 204, 221, 238, 255])
    );

    file("block", "192.0.2.0/24\nnonsense\n");
    file("keys", "00112233445566778899aabbccddeeff\n");
    let said = Policy::load(&dir.path().join("gate.toml")).unwrap_err().to_string();
    for part in
        ["gate.toml:1: block_file: ", "block:2: \"nonsense\"", "gate.toml:2: token_keys: ", "two lines"]
    {
        assert!(said.contains(part), "{part} is not in\n{said}");
    }
}
