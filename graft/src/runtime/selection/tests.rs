use std::cell::Cell;

use super::*;
use crate::{flow::tests::flow, paths::Monitor};

/// A model that chooses cubic for short paths. For long paths it chooses a carrier, or pcc if there is no carrier.
const MODEL: &str = r#"{"version":1,"about":"a test","candidates":["pcc","cubic","carried-warm"],"tree":{"split":{"by":"rtt","at":50,"unknown":"below",
    "below":{"leaf":{"number":0,"examples":9,"usual":2,"ranking":[{"candidate":"cubic","right":1,"utility":1},{"candidate":"pcc","right":0,"utility":0},
        {"candidate":"carried-warm","right":0,"utility":0}]}},
    "above":{"leaf":{"number":1,"examples":9,"usual":2,"ranking":[{"candidate":"carried-warm","right":1,"utility":1},
        {"candidate":"pcc","right":0.5,"utility":0.5},{"candidate":"cubic","right":0,"utility":0}]}}}}}"#;

fn settings(tier: &str) -> Settings {
    let rule = |name: &str, peer: &str, how: &str| {
        format!(
            "[[rule]]\nname = \"{name}\"\nside = \"client\"\nport = [80, 443]\nagree = false\npeer = \"{peer}\"\n{how}\n"
        )
    };
    let text = rule("near", "10.0.0.0/8", &format!("select = \"loss\"\nsize-kib = 64\ntier = \"{tier}\""))
        + &rule("other", "0.0.0.0/0", "congestion = \"reno\"");
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::write(directory.path().join("model.json"), MODEL).expect("a file");
    let key = directory.path().join("host.key");
    std::fs::write(&key, "not read").expect("a file");
    let carry = if tier == "chosen" { "[agreement]\nkey = \"host.key\"\n[carry]\n" } else { "" };
    let file = directory.path().join("graft.toml");
    std::fs::write(&file, format!("model = \"model.json\"\n{carry}{text}")).expect("a file");
    Settings::read(&file).expect("settings")
}

fn path(peer: &str, rtt_min_us: u32, idle_s: u64) -> PeerPath {
    let mut monitor = Monitor::new(crate::settings::default_classes());
    let report = millrace_graft_proto::measure::PathReport { answered: 1, rtt_min_us, ..Default::default() };
    monitor.note_probe(peer.parse().expect("an address"), report, 1);
    PeerPath { idle_s, delivery_rate: Some(1_250_000), ..monitor.paths().remove(0) }
}

struct SelectionBench {
    settings: Settings,
    selection: RuntimeSelection,
    carriers: BTreeMap<IpAddr, bool>,
    kinds: Kinds,
    lacks: &'static str,
    waits: Cell<bool>,
    chance: f64,
}

impl SelectionBench {
    fn new(tier: &str) -> Self {
        let settings = settings(tier);
        let selection = RuntimeSelection::new("bbr");
        let carriers = BTreeMap::new();
        let kinds = Kinds::default();
        Self { settings, selection, carriers, kinds, lacks: "", waits: Cell::new(false), chance: 0.0 }
    }

    fn choose(&mut self, paths: &[PeerPath], is_all: bool) -> Vec<SelectionOrder> {
        let world = SelectionWorld {
            settings: &self.settings,
            controls: &|control| control != self.lacks,
            carriers: &self.carriers,
            kinds: &self.kinds,
            chance: &|| self.chance,
            is_granted: &|_, _| self.waits.get(),
        };
        self.selection.choose(&world, paths, is_all)
    }

    /// Reports a connection of the first rule that is not tunnelled, from its beginning to its end.
    fn connect(&mut self, id: u64, peer: &str, choice: &PathCandidates, explored: bool, busy_ms: u64) {
        let told = self.begin(id, peer, choice, explored);
        let what = SelectedEventKind::Ended;
        let busy = Some(Duration::from_millis(busy_ms));
        self.selection.note(&SelectedEvent { what, sent: 64 << 10, busy, ..told }, &self.settings);
    }

    fn now(&self) -> status::SelectionStatus {
        // exact: no other thread changes this `RuntimeSelection`, so its status cannot change meanwhile
        self.selection.status()
    }

    fn begin(&mut self, id: u64, peer: &str, choice: &PathCandidates, explored: bool) -> SelectedEvent {
        let candidate =
            if explored { choice.grant.clone().expect("a grant") } else { choice.candidate.clone() };
        let told = SelectedEvent {
            what: SelectedEventKind::Began,
            side: millrace_graft_kernel::RuleSide::Client,
            local: "10.9.9.9:5000".parse().expect("an address"),
            remote: (peer.parse::<IpAddr>().expect("an address"), 80).into(),
            cookie: id,
            is_elsewhere: false,
            time_ns: id,
            rule: 1,
            serial: choice.serial,
            explored,
            congestion: candidate.congestion,
            command: Some("curl".to_owned()),
            duration: Duration::from_millis(100),
            sent: 0,
            received: 0,
            busy: None,
            heard: None,
            socket: crate::paths::tests::socket(7, id, 1000, 1, 0),
        };
        self.selection.note(&told, &self.settings);
        told
    }
}

fn only(orders: &[SelectionOrder]) -> (IpAddr, PathCandidates) {
    match orders {
        [SelectionOrder::Choose { peer, rule: 1, choice }] => (*peer, choice.clone()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn congestion_control_is_chosen_by_measured_round_trip_of_each_path() {
    let mut bench = SelectionBench::new("in-place");
    let paths = [path("10.0.0.1", 10_000, 0), path("10.0.0.2", 100_000, 0), path("192.0.2.1", 100_000, 0)];
    let orders = bench.choose(&paths, true);
    let told: Vec<_> = orders
        .iter()
        .map(|order| match order {
            SelectionOrder::Choose { peer, rule, choice } => (
                peer.to_string(),
                *rule,
                choice.candidate.congestion.clone().unwrap_or_default(),
                choice.candidate.carried,
            ),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        told,
        [
            ("10.0.0.1".to_owned(), 1, "cubic".to_owned(), false),
            ("10.0.0.2".to_owned(), 1, "pcc".to_owned(), false)
        ]
    );
    assert_eq!(bench.choose(&paths, true), [], "nothing has changed");
    let far = bench.selection.chosen_for_peer("10.0.0.2".parse().expect("an address"));
    assert_eq!((far[0].candidate.as_str(), far[0].why.as_str()), ("pcc", "learned"));
    assert_eq!(far[0].way, ["rtt is 100 ms: more than 50 ms"]);
    bench.lacks = "pcc";
    let (peer, choice) = only(&bench.choose(&paths, true));
    assert_eq!(
        (peer.to_string().as_str(), choice.candidate.congestion.as_deref()),
        ("10.0.0.2", Some("cubic"))
    );
    let orders = bench.choose(&paths[..1], true);
    assert_eq!(orders, [SelectionOrder::Forget { peer: "10.0.0.2".parse().expect("an address"), rule: 1 }]);
}

/// The model prefers the carrier on this path while the carrier is ready ("warm"). Connections that the broker refuses
/// use the best congestion control without a tunnel.
#[test]
fn ready_carrier_is_chosen_else_the_best_congestion_control() {
    let mut bench = SelectionBench::new("chosen");
    let near = path("10.0.0.1", 10_000, 0);
    let far = path("10.0.0.2", 100_000, 0);
    bench.carriers = [(near.peer, true), (far.peer, false)].into();
    let (_, cold) = only(&bench.choose(std::slice::from_ref(&far), false));
    assert_eq!(
        (cold.candidate.carried, cold.candidate.congestion.as_deref()),
        (false, Some("pcc")),
        "it is cold"
    );
    bench.carriers.insert(far.peer, true);
    let (_, warm) = only(&bench.choose(std::slice::from_ref(&far), false));
    assert_eq!((warm.candidate.carried, warm.candidate.congestion.as_deref()), (true, Some("pcc")));
    let (_, close) = only(&bench.choose(std::slice::from_ref(&near), false));
    assert_eq!((close.candidate.carried, close.candidate.congestion.as_deref()), (false, Some("cubic")));
    let mut never = SelectionBench::new("in-place");
    never.carriers.clone_from(&bench.carriers);
    assert!(
        !only(&never.choose(&[far], false)).1.candidate.carried,
        "the rule does not leave it to the model"
    );
}

#[test]
fn wrong_choice_of_a_model_is_replaced_within_fifty_connections() {
    let mut bench = SelectionBench::new("in-place");
    bench.chance = 1.0;
    let far = path("10.0.0.2", 100_000, 0);
    let (_, mut choice) = only(&bench.choose(std::slice::from_ref(&far), true));
    assert_eq!(choice.candidate.congestion.as_deref(), Some("pcc"));
    let mut wrong = 0;
    for id in 0..50 {
        let is_wrong = choice.candidate.congestion.is_some();
        wrong += u32::from(is_wrong);
        bench.connect(id, "10.0.0.2", &choice, false, if is_wrong { 5000 } else { 200 });
        if let [SelectionOrder::Choose { choice: fresh, .. }] =
            &bench.choose(std::slice::from_ref(&far), false)[..]
        {
            choice = fresh.clone();
        }
    }
    assert_eq!(wrong, 4);
    let now = &bench.selection.chosen_for_peer(far.peer)[0];
    assert_eq!((now.candidate.as_str(), now.why.as_str()), ("bbr", "found"));
    let status = bench.now();
    assert_eq!((status.reasons["learned"], status.outcomes["bad"]), (4, 4), "{status:?}");
    assert_eq!(status.reasons["doubted"] + status.reasons["found"], 46);
    assert_eq!(status.connections["in-place/bbr"], 46);
    let last = bench
        .selection
        .connection(["10.9.9.9:5000".parse().expect("an end"), "10.0.0.2:80".parse().expect("an end")], 0);
    let last = last.expect("a connection");
    assert_eq!((last.candidate.as_str(), last.why.as_str()), ("bbr", "found"));
    assert_eq!(last.ended.expect("over").is_bad, Some(false));
}

/// A permission to try another congestion control is for one connection. The next permission is given only after enough
/// further connections. Connections come in any order.
#[test]
fn at_most_two_percent_of_connections_try_another_congestion_control() {
    let mut bench = SelectionBench::new("in-place");
    let far = path("10.0.0.2", 100_000, 0);
    let (_, mut choice) = only(&bench.choose(std::slice::from_ref(&far), true));
    let mut connections = 0_u64;
    let mut explored = 0_u64;
    let mut id = 0;
    for round in 0..400 {
        for _ in 0..round % 23 {
            // The first connection after a choice with a permission uses the permission: it tries the second congestion
            // control.
            let takes = choice.grant.is_some();
            bench.connect(id, "10.0.0.2", &choice, takes, 200);
            choice.grant = choice.grant.filter(|_| !takes);
            (connections, explored, id) = (connections + 1, explored + u64::from(takes), id + 1);
            assert!(explored * 100 <= connections * 2, "{explored} of {connections}");
        }
        bench.waits.set(choice.grant.is_some());
        if let [SelectionOrder::Choose { choice: fresh, .. }] =
            &bench.choose(std::slice::from_ref(&far), false)[..]
        {
            choice = fresh.clone();
        }
    }
    let status = bench.now();
    assert!(
        explored > 40 && status.reasons["explored"] == explored,
        "{explored} of {connections}: {status:?}"
    );
    assert!(status.paths[0].tried.len() > 1 && status.gain.is_some(), "{status:?}");
}

#[test]
fn learned_connection_costs_change_only_the_choice_for_their_peer() {
    let mut bench = SelectionBench::new("in-place");
    bench.chance = 1.0;
    let paths = [path("10.0.0.1", 100_000, 0), path("10.0.0.2", 100_000, 0)];
    let orders = bench.choose(&paths, true);
    assert_eq!(orders.len(), 2);
    let SelectionOrder::Choose { choice, .. } = orders[0].clone() else { panic!("{orders:?}") };
    (0..3000).for_each(|id| bench.connect(id, "10.0.0.1", &choice, false, 9000));
    let (peer, _) = only(&bench.choose(&paths, true));
    assert_eq!(peer, paths[0].peer);
    assert_eq!(bench.selection.chosen_for_peer(paths[1].peer)[0].why, "learned");
    // An event about a connection with an unknown serial number of the choice has no effect, and its peer is not
    // remembered.
    let unknown = PathCandidates { serial: 999, ..choice };
    bench.connect(1, "10.7.7.7", &unknown, false, 1);
    assert_eq!(bench.selection.serial_of((0, "10.7.7.7".parse().expect("an address"))), 0);
}

/// A list of sockets may lack a connection whose end the kernel reports later.
#[test]
fn connection_missing_in_two_socket_lists_is_removed_without_a_report() {
    let mut bench = SelectionBench::new("in-place");
    let far = path("10.0.0.2", 100_000, 0);
    let (_, choice) = only(&bench.choose(std::slice::from_ref(&far), true));
    bench.begin(1, "10.0.0.2", &choice, false);
    bench.selection.prune(|_| false, 0);
    bench.selection.prune(|id| id == 1, 0);
    bench.selection.prune(|_| false, 0);
    assert!(bench.selection.has_live());
    bench.selection.prune(|_| false, 0);
    assert!(!bench.selection.has_live());
    assert_eq!(bench.now().forgotten, 1);
}

/// No list of sockets contains connections of other network namespaces.
#[test]
fn connections_of_other_namespaces_are_kept_until_a_report_is_lost() {
    let mut bench = SelectionBench::new("in-place");
    let far = path("10.0.0.2", 100_000, 0);
    let (_, choice) = only(&bench.choose(std::slice::from_ref(&far), true));
    let told = bench.begin(1, "10.0.0.2", &choice, false);
    bench.selection.note(&SelectedEvent { cookie: 2, is_elsewhere: true, ..told }, &bench.settings);
    (0..3).for_each(|_| bench.selection.prune(|id| id == 1, 0));
    assert_eq!(bench.now().live["in-place/pcc"], 2);
    (0..3).for_each(|_| bench.selection.prune(|id| id == 1, 1));
    let status = bench.now();
    assert_eq!((status.live["in-place/pcc"], status.forgotten), (1, 1));
}

#[test]
fn number_of_chosen_paths_is_bounded_to_the_most_recent() {
    let mut bench = SelectionBench::new("in-place");
    let paths: Vec<_> = (0..CHOICES as u32 + 9)
        .map(|at| {
            let peer = IpAddr::from(std::net::Ipv4Addr::from_bits(0x0a00_0000 + at));
            PeerPath { peer, idle_s: u64::from(at), ..path("10.0.0.1", 100_000, 0) }
        })
        .collect();
    assert_eq!(bench.choose(&paths, true).len(), CHOICES);
    assert_eq!(bench.selection.chosen_for_peer(paths[CHOICES].peer), []);
    // A connection now uses a path for which nothing was chosen. The table of choices is full, so the choice for the
    // least recently used path is removed.
    let mut later = paths;
    later[CHOICES].idle_s = 0;
    let orders = bench.choose(&later, true);
    assert!(
        matches!(&orders[..], [SelectionOrder::Forget { .. }, SelectionOrder::Choose { .. }]),
        "{}",
        orders.len()
    );
    assert_eq!(bench.choose(&[], true).len(), CHOICES, "all are forgotten");
}

#[test]
fn connections_without_a_known_size_are_not_judged() {
    let mut bench = SelectionBench::new("in-place");
    let far = path("10.0.0.2", 100_000, 0);
    bench.choose(std::slice::from_ref(&far), true);
    bench.selection.end(1, &flow(0, 0, 0, 0), None, false);
    assert_eq!(bench.now().outcomes["not-judged"], 1);
}

/// A runtime uses the costs that the previous runtime has measured, if the model is the same.
#[test]
fn learned_outcomes_are_used_after_a_restart_of_the_runtime() {
    let mut bench = SelectionBench::new("in-place");
    bench.chance = 1.0;
    let far = path("10.0.0.2", 100_000, 0);
    let (_, choice) = only(&bench.choose(std::slice::from_ref(&far), true));
    (0..4).for_each(|id| bench.connect(id, "10.0.0.2", &choice, false, 5000));
    let mut learned = Learned::default();
    bench.selection.remember(&mut learned);
    let places = learned.places.len();
    let rates = learned.rates.clone();
    assert_eq!((places, rates.len()), (1, 1));

    let mut next = SelectionBench::new("in-place");
    next.chance = 1.0;
    next.selection.recall(&learned, &next.settings);
    assert_eq!(next.choose(&[], true), [], "nobody is there yet, and nothing is forgotten");
    only(&next.choose(std::slice::from_ref(&far), true));
    let [before, after] = [&bench, &next].map(|it| it.selection.chosen_for_peer(far.peer).remove(0));
    assert_eq!((after.candidate.as_str(), after.why.as_str()), ("bbr", "doubted"));
    assert_eq!((after.tried, after.connections), (before.tried, 4));
    let mut again = Learned::default();
    next.selection.remember(&mut again);
    assert_eq!(again, learned);

    let mut other = SelectionBench::new("in-place");
    learned.model = Some("another".to_owned());
    other.selection.recall(&learned, &other.settings);
    only(&other.choose(std::slice::from_ref(&far), true));
    assert_eq!(other.selection.chosen_for_peer(far.peer)[0].why, "learned", "its leaves are others");
}
