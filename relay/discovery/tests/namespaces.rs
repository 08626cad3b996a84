//! Tests the registration and lookup of namespaces with a real etcd, which each test starts and ends.

#![allow(clippy::unwrap_used)]

mod support;

use std::{sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use millrace_moq::Namespace;
use millrace_relay_discovery::{
    Discovery, DiscoveryState, EtcdConfig, EtcdDirectory, EtcdDiscovery, EtcdUser, HttpClient, LookupError,
    LookupLimits, LookupStatus, RelayRecord,
};
use millrace_testkit::async_wait_until;
use nix::sys::signal::Signal;
use rustls::{ClientConfig, RootCertStore, crypto::ring};
use support::Etcd;
use tokio::{sync::mpsc, sync::watch, task::JoinHandle, time::timeout};

/// The shortest lease that etcd grants with its default settings is 2 s.
const LEASE: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(60);
/// Beginning of the keys of registrations for the prefix `/test/` of records.
const REGISTRATIONS: &str = "/test-namespaces/";

fn client() -> HttpClient {
    let builder = ClientConfig::builder_with_provider(ring::default_provider().into());
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    HttpClient::new(Arc::new(builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth()))
}

/// A relay that registers and looks up namespaces.
struct Relay {
    directory: Arc<EtcdDirectory>,
    appeared: mpsc::Receiver<Namespace>,
    found: watch::Receiver<DiscoveryState>,
    task: JoinHandle<()>,
    _own: watch::Sender<Option<RelayRecord>>,
}

impl Relay {
    fn start(etcd: &Etcd, host: &str, run: u64, limits: LookupLimits) -> Self {
        Self::start_as(etcd, host, run, limits, None)
    }

    fn start_as(etcd: &Etcd, host: &str, run: u64, limits: LookupLimits, user: Option<EtcdUser>) -> Self {
        let url = format!("moqt://{host}:4443").parse().unwrap();
        let record = RelayRecord { run, publishes: true, ..RelayRecord::from_url(url).unwrap() };
        let (own, watched) = watch::channel(Some(record));
        let config = EtcdConfig {
            endpoints: vec![etcd.endpoint.clone()],
            prefix: "/test/".into(),
            user,
            lease: LEASE,
        };
        let (discovery, directory, appeared) =
            EtcdDiscovery::new(client(), config, watched).with_directory(limits);
        let (sender, found) = watch::channel(DiscoveryState::default());
        let task = tokio::spawn(Discovery::Etcd(discovery).run(sender));
        Self { directory, appeared, found, task, _own: own }
    }

    /// Starts a relay, and waits until it has found as many others.
    async fn with_others(etcd: &Etcd, host: &str, others: usize) -> Self {
        let mut relay = Self::start(etcd, host, 1, LookupLimits { entries: 100, per_second: 1000 });
        let found = relay.found.wait_for(|state| state.is_registered && state.relays.len() == others);
        timeout(PATIENCE, found).await.expect("the relays find each other").unwrap();
        relay.until("changes are reported", |status| status.followed).await;
        relay
    }

    fn publish(&self, path: &str) {
        self.directory.set_published(&namespace(path), true);
    }

    /// Returns the hosts of the relays that have the namespace, with the registered prefixes.
    async fn lookup(&self, path: &str) -> Result<Vec<(String, String)>, LookupError> {
        let found = self.directory.lookup(&namespace(path)).await?.into_iter();
        Ok(found.map(|(registered, relay)| (relay.key(), registered.typed().to_string())).collect())
    }

    /// Looks up a namespace until the answer is this one.
    async fn until_lookup(&self, path: &str, wanted: &[(String, String)]) {
        let mut ticks = tokio::time::interval(Duration::from_millis(20));
        let looking = async {
            while self.lookup(path).await.as_deref() != Ok(wanted) {
                ticks.tick().await;
            }
        };
        timeout(PATIENCE, looking).await.unwrap_or_else(|_| panic!("{path} is not {wanted:?}"));
    }

    async fn until(&self, what: &str, is_so: impl Fn(&LookupStatus) -> bool) -> LookupStatus {
        async_wait_until(what, || self.directory.status(), is_so).await
    }
}

fn namespace(path: &str) -> Namespace {
    Namespace::from_path(path).unwrap()
}

fn at(host: &str, registered: &str) -> (String, String) {
    (format!("{host}:4443"), registered.to_owned())
}

impl Etcd {
    async fn call(&self, path: &str, body: serde_json::Value) -> serde_json::Value {
        let url = self.endpoint.join(path).unwrap();
        let answer = client().send(&url, Some(serde_json::to_vec(&body).unwrap())).await.unwrap();
        answer.json().await.unwrap()
    }

    /// Returns etcd's revision, and the number of registrations.
    async fn registrations(&self) -> (u64, usize) {
        let [key, end] = [REGISTRATIONS, "/test-namespaces0"].map(|text| BASE64.encode(text));
        let answer = self.call("/v3/kv/range", serde_json::json!({ "key": key, "range_end": end })).await;
        let revision = answer["header"]["revision"].as_str().unwrap().parse().unwrap();
        (revision, answer["kvs"].as_array().map_or(0, Vec::len))
    }

    /// Writes a registration as a relay's run does that has no lease.
    async fn register(&self, host: &str, path: &str, run: u64) {
        let key = BASE64.encode(format!("{REGISTRATIONS}{host}:4443/{}", namespace(path)));
        let value = BASE64.encode(run.to_string());
        self.call("/v3/kv/put", serde_json::json!({ "key": key, "value": value })).await;
    }
}

#[tokio::test]
async fn registered_namespaces_are_found_and_end_with_their_relay() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Relay::with_others(&etcd, "a", 0).await;
    let mut b = Relay::with_others(&etcd, "b", 1).await;
    assert_eq!(b.lookup("live/cam").await, Ok(vec![]));

    // The answer that nobody has the namespace is corrected by the watch, and who has waited is told.
    a.publish("live/cam");
    let appeared = async { while b.appeared.recv().await != Some(namespace("live/cam")) {} };
    timeout(PATIENCE, appeared).await.expect("it is told");
    // exact: only the lookups of this test count, and each has its answer when it returns
    let before = b.directory.status();
    assert_eq!(b.lookup("live/cam").await, Ok(vec![at("a", "live/cam")]));
    // A registered namespace covers those that begin with it. The longest one counts.
    a.publish("live");
    a.until("both are registered", |status| status.registered == 2).await;
    assert_eq!(b.lookup("live/cam/left").await, Ok(vec![at("a", "live/cam")]));
    assert_eq!(b.lookup("live/other").await, Ok(vec![at("a", "live")]));
    assert_eq!(b.lookup("lively").await, Ok(vec![]));
    // exact: see above
    let after = b.directory.status();
    assert_eq!((after.hits - before.hits, after.found, after.absent, after.negatives), (1, 2, 2, 0));

    a.directory.set_published(&namespace("live"), false);
    b.until("the withdrawn one is forgotten", |status| status.known == 2).await;
    assert_eq!(b.lookup("live/other").await, Ok(vec![]));
    // exact: see above
    assert_eq!(b.directory.status().negatives, 1, "answered from memory");

    // A relay that dies without a word is forgotten with its lease.
    a.task.abort();
    b.until("its registration has ended", |status| status.known == 0).await;
    assert_eq!(b.lookup("live/cam").await, Ok(vec![]));
    assert_eq!(etcd.registrations().await.1, 0);
}

#[tokio::test]
async fn namespaces_are_registered_in_batches_and_again_under_a_new_lease() {
    const MANY: usize = 500;
    let Some(etcd) = Etcd::start() else { return };
    let mut a = Relay::with_others(&etcd, "a", 0).await;
    let (before, _) = etcd.registrations().await;
    (0..MANY).for_each(|number| a.publish(&format!("live/{number}")));
    a.until("all are registered", |status| status.registered == MANY as u64).await;
    let (after, count) = etcd.registrations().await;
    assert_eq!(count, MANY);
    // Each transaction is a revision. Besides, etcd counts keep-alives and the like in none.
    assert!((5..=8).contains(&(after - before)), "{before} to {after}");
    // Many relays' worth of registrations is found by one request for each namespace.
    let b = Relay::with_others(&etcd, "b", 1).await;
    assert_eq!(b.lookup("live/499").await, Ok(vec![at("a", "live/499")]));

    let leases = etcd.call("/v3/lease/leases", serde_json::json!({})).await;
    for lease in leases["leases"].as_array().expect("leases") {
        etcd.call("/v3/lease/revoke", serde_json::json!({ "ID": lease["ID"] })).await;
    }
    timeout(PATIENCE, a.found.wait_for(|state| state.failures > 0)).await.unwrap().unwrap();
    let again = async { while etcd.registrations().await.1 < MANY {} };
    timeout(PATIENCE, again).await.expect("all are registered again");
    b.until_lookup("live/499", &[at("a", "live/499")]).await;
}

#[tokio::test]
async fn registrations_of_an_earlier_run_are_neither_written_nor_used() {
    let Some(etcd) = Etcd::start() else { return };
    let limits = LookupLimits { entries: 100, per_second: 1000 };
    let viewer = Relay::with_others(&etcd, "viewer", 0).await;
    let old = Relay::start(&etcd, "a", 1, limits);
    old.publish("old");
    old.until("it is registered", |status| status.registered == 1).await;
    let mut found = viewer.found.clone();
    timeout(PATIENCE, found.wait_for(|state| state.relays.len() == 1)).await.unwrap().unwrap();
    assert_eq!(viewer.lookup("old").await, Ok(vec![at("a", "old")]));

    // The relay starts again, while its earlier run still goes on somewhere.
    let new = Relay::start(&etcd, "a", 2, limits);
    new.publish("new");
    new.until("it is registered", |status| status.registered == 1).await;
    timeout(PATIENCE, found.wait_for(|state| state.relays[0].run == 2)).await.unwrap().unwrap();
    old.publish("late");
    old.until("the earlier run is refused", |status| status.failed_writes > 0).await;
    assert_eq!(etcd.registrations().await.1, 2);
    assert_eq!(viewer.lookup("new").await, Ok(vec![at("a", "new")]));
    assert_eq!(viewer.lookup("late").await, Ok(vec![]));
    // The store still has this one, and the record that it belongs to is of another run.
    assert_eq!(viewer.lookup("old").await, Ok(vec![]));
    let recalled = viewer.directory.recall(&namespace("old")).unwrap();
    assert_eq!(
        recalled.iter().map(|(key, usable)| (&*key.relay, *usable)).collect::<Vec<_>>(),
        [("a:4443", false)]
    );

    // What anybody else writes for an unknown relay, or with no sense, is not used either.
    etcd.register("nobody", "new", 7).await;
    etcd.register("a", "strange", 1).await;
    viewer.until("the change has arrived", |status| status.known >= 2).await;
    assert_eq!(viewer.lookup("new").await, Ok(vec![at("a", "new")]));
    assert_eq!(viewer.lookup("strange").await, Ok(vec![]));

    // An earlier run that loses its lease does not replace the record of the later one.
    let leases = etcd.call("/v3/lease/leases", serde_json::json!({})).await;
    let mut early = old.found.clone();
    for lease in leases["leases"].as_array().expect("leases") {
        let keys = serde_json::json!({ "ID": lease["ID"], "keys": true });
        let held = etcd.call("/v3/lease/timetolive", keys).await;
        let holds = |key: &str| {
            held["keys"].as_array().is_some_and(|keys| keys.iter().any(|held| *held == BASE64.encode(key)))
        };
        if holds(&format!("{REGISTRATIONS}a:4443/old")) {
            etcd.call("/v3/lease/revoke", serde_json::json!({ "ID": lease["ID"] })).await;
        }
    }
    let superseded =
        |state: &DiscoveryState| state.error().is_some_and(|error| error.contains("another run"));
    timeout(PATIENCE, early.wait_for(superseded)).await.unwrap().unwrap();
    assert_eq!(viewer.found.borrow().relays[0].run, 2);
}

#[tokio::test]
async fn store_outage_leaves_known_namespaces_and_refuses_unknown_ones() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Relay::with_others(&etcd, "a", 0).await;
    let mut b = Relay::with_others(&etcd, "b", 1).await;
    a.publish("live");
    a.until("it is registered", |status| status.registered == 1).await;
    assert_eq!(b.lookup("live").await, Ok(vec![at("a", "live")]));
    etcd.signal(Signal::SIGSTOP);
    // The signal takes effect a moment later.
    timeout(PATIENCE, b.found.wait_for(|state| state.error().is_some())).await.unwrap().unwrap();
    // Many that ask for the same get one answer, and etcd is asked once.
    let unknown = namespace("unknown");
    let asking = (0..50).map(|_| (Arc::clone(&b.directory), unknown.clone()));
    let asking: Vec<_> = asking
        .map(|(directory, unknown)| tokio::spawn(async move { directory.lookup(&unknown).await }))
        .collect();
    let begun = std::time::Instant::now();
    for asked in asking {
        let answer = timeout(PATIENCE, asked).await.unwrap().unwrap();
        assert!(
            matches!(&answer, Err(LookupError::Store(why)) if why.contains("did not answer")),
            "{answer:?}"
        );
    }
    assert!(begun.elapsed() < Duration::from_secs(30), "one time-out for all: {:?}", begun.elapsed());
    // exact: all lookups have returned
    assert_eq!(b.directory.status().failed, 50);
    assert_eq!(b.lookup("live").await, Ok(vec![at("a", "live")]), "what is known stays");
    etcd.signal(Signal::SIGCONT);
    b.until_lookup("unknown", &[]).await;
}

#[tokio::test]
async fn lookups_of_random_names_are_limited_and_keep_known_namespaces() {
    let Some(etcd) = Etcd::start() else { return };
    let a = Relay::with_others(&etcd, "a", 0).await;
    a.publish("live");
    a.until("it is registered", |status| status.registered == 1).await;
    let mut b = Relay::start(&etcd, "b", 1, LookupLimits { entries: 10, per_second: 10 });
    timeout(PATIENCE, b.found.wait_for(|state| state.relays.len() == 1)).await.unwrap().unwrap();
    b.until("changes are reported", |status| status.followed).await;
    assert_eq!(b.lookup("live").await, Ok(vec![at("a", "live")]));
    let begun = std::time::Instant::now();
    for number in 0..500 {
        let answer = b.lookup(&format!("random/{number}")).await;
        assert!(matches!(answer, Ok(_) | Err(LookupError::TooMany)), "{answer:?}");
    }
    // exact: all lookups have returned
    let status = b.directory.status();
    let most = 20.0 + begun.elapsed().as_secs_f64() * 10.0;
    assert!(status.absent as f64 <= most && status.limited + status.absent == 500, "{most} {status:?}");
    assert!(status.known == 1 && status.known_absent <= 10, "{status:?}");
    assert_eq!(b.lookup("live").await, Ok(vec![at("a", "live")]));
}

/// The roles are those of the guide, `docs/guide/cluster.md`.
#[tokio::test]
async fn relay_writes_only_what_its_role_in_etcd_allows() {
    let Some(etcd) = Etcd::start() else { return };
    Relay::with_others(&etcd, "before", 0).await.task.abort(); // etcd answers from now on
    let range = |prefix: &str| {
        let end = format!("{}0", prefix.trim_end_matches('/')); // the character behind the slash
        serde_json::json!({ "permType": "READ", "key": BASE64.encode(prefix), "range_end": BASE64.encode(end) })
    };
    for host in ["a", "b"] {
        let role = format!("relay-{host}");
        etcd.call("/v3/auth/role/add", serde_json::json!({ "name": role })).await;
        let own = serde_json::json!({ "permType": "READWRITE", "key": BASE64.encode(format!("/test/{host}:4443")) });
        let mut registrations = range(&format!("{REGISTRATIONS}{host}:4443/"));
        registrations["permType"] = "READWRITE".into();
        for permission in [own, registrations, range("/test/"), range(REGISTRATIONS)] {
            etcd.call("/v3/auth/role/grant", serde_json::json!({ "name": role, "perm": permission })).await;
        }
    }
    for (user, role) in [("root", "root"), ("relay-a", "relay-a"), ("relay-b", "relay-b")] {
        if user == "root" {
            etcd.call("/v3/auth/role/add", serde_json::json!({ "name": "root" })).await;
        }
        etcd.call("/v3/auth/user/add", serde_json::json!({ "name": user, "password": "secret" })).await;
        etcd.call("/v3/auth/user/grant", serde_json::json!({ "user": user, "role": role })).await;
    }
    etcd.call("/v3/auth/enable", serde_json::json!({})).await;
    let limits = LookupLimits { entries: 100, per_second: 1000 };
    let user = |name: &str| Some(EtcdUser { name: name.to_owned(), password: "secret".to_owned() });
    let a = Relay::start_as(&etcd, "a", 1, limits, user("relay-a"));
    let b = Relay::start_as(&etcd, "b", 1, limits, user("relay-b"));
    a.publish("live");
    a.until("it is registered", |status| status.registered == 1).await;
    b.until_lookup("live", &[at("a", "live")]).await;
    // A relay cannot write the record of another one, and one without a user can write nothing.
    for user in [user("relay-b"), None] {
        let mut stranger = Relay::start_as(&etcd, "a", 9, limits, user);
        let refused = timeout(PATIENCE, stranger.found.wait_for(|state| state.error().is_some()));
        let refused = refused.await.unwrap().unwrap().clone();
        let error = refused.error().unwrap();
        assert!(error.contains("permission denied") || error.contains("user name is empty"), "{error}");
        assert!(!refused.is_registered);
    }
    assert_eq!(b.lookup("live").await, Ok(vec![at("a", "live")]));
    assert!(b.found.borrow().relays.iter().all(|relay| relay.run == 1));
}
