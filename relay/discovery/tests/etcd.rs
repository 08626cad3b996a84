//! Tests discovery with a real etcd, which each test starts and ends.

#![allow(clippy::unwrap_used)]

mod support;

use std::{fs, net::TcpListener, sync::Arc, time::Duration};

use millrace_relay_discovery::{
    Discovery, DiscoveryState, EtcdConfig, EtcdDiscovery, HttpClient, RelayRecord,
};
use nix::sys::signal::Signal;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{ClientConfig, RootCertStore, crypto::ring, pki_types::PrivateKeyDer};
use support::Etcd;
use tokio::{sync::watch, task::JoinHandle, time::timeout};

const PREFIX: &str = "/millrace/relays/";
/// The shortest lease that etcd grants with its default settings is 2 s.
const LEASE: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(60);

impl Etcd {
    /// Starts a relay's discovery with this etcd. The first endpoint in its settings does not answer.
    fn discover(&self, record: RelayRecord) -> Running {
        self.discover_by(HttpClient::new(Arc::new(client(RootCertStore::empty()))), record)
    }

    fn discover_by(&self, client: HttpClient, record: RelayRecord) -> Running {
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let endpoints = vec![format!("http://{nobody}").parse().unwrap(), self.endpoint.clone()];
        let (own, watched) = watch::channel(Some(record));
        let config = EtcdConfig { endpoints, prefix: PREFIX.into(), user: None, lease: LEASE };
        let (sender, found) = watch::channel(DiscoveryState::default());
        let discovery = Discovery::Etcd(EtcdDiscovery::new(client, config, watched));
        Running { own, found, task: tokio::spawn(discovery.run(sender)) }
    }

    /// Sends a request to etcd's JSON gateway.
    async fn call(&self, path: &str, body: serde_json::Value) -> serde_json::Value {
        let client = HttpClient::new(Arc::new(client(RootCertStore::empty())));
        let url = self.endpoint.join(path).unwrap();
        let answer = client.send(&url, Some(serde_json::to_vec(&body).unwrap())).await.unwrap();
        answer.json().await.unwrap()
    }
}

struct Running {
    own: watch::Sender<Option<RelayRecord>>,
    found: watch::Receiver<DiscoveryState>,
    task: JoinHandle<()>,
}

impl Running {
    async fn until(&mut self, what: &str, is_so: impl Fn(&DiscoveryState) -> bool) -> DiscoveryState {
        let waited = timeout(PATIENCE, self.found.wait_for(|state| is_so(state))).await;
        let state = waited.map(|state| state.expect("discovery runs").clone());
        state.unwrap_or_else(|_| panic!("not in time: {what}; {:?}", self.found.borrow()))
    }

    async fn until_found(&mut self, hosts: &[&str]) -> DiscoveryState {
        self.until(&format!("{hosts:?} are found"), |state| found(state) == hosts).await
    }
}

fn client(roots: RootCertStore) -> ClientConfig {
    let builder = ClientConfig::builder_with_provider(ring::default_provider().into());
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    builder.with_root_certificates(roots).with_no_client_auth()
}

fn record(host: &str, run: u64) -> RelayRecord {
    let url = format!("moqt://{host}:4443").parse().unwrap();
    RelayRecord { run, region: Some("eu".into()), ..RelayRecord::from_url(url).unwrap() }
}

fn found(state: &DiscoveryState) -> Vec<&str> {
    state.relays.iter().filter_map(|relay| relay.url.host_str()).collect()
}

#[tokio::test]
async fn relays_find_each_other_and_forget_relays_that_died() {
    let Some(etcd) = Etcd::start() else { return };
    let mut a = etcd.discover(record("a", 1));
    a.until("a is registered", |state| state.is_registered).await;
    assert!(a.found.borrow().relays.is_empty(), "its own record is not among those found");
    let mut b = etcd.discover(record("b", 2));
    let mut c = etcd.discover(record("c", 3));
    a.until_found(&["b", "c"]).await;
    let seen = b.until_found(&["a", "c"]).await;
    assert_eq!(seen.relays[0].region.as_deref(), Some("eu"));

    // A relay that shuts down marks its record as draining, and removes the record at the end.
    c.until("c is registered", |state| state.is_registered).await;
    c.own.send(Some(RelayRecord { draining: true, ..record("c", 3) })).unwrap();
    a.until("c drains", |state| state.relays.iter().any(|relay| relay.draining)).await;
    c.own.send(None).unwrap();
    c.until("its record is withdrawn", |state| !state.is_registered).await;
    a.until_found(&["b"]).await;

    // A relay that dies without removing its record is forgotten when its lease ends.
    b.task.abort();
    a.until_found(&[]).await;
}

#[tokio::test]
async fn found_relays_stay_while_etcd_does_not_answer() {
    let Some(etcd) = Etcd::start() else { return };
    let mut a = etcd.discover(record("a", 1));
    let mut b = etcd.discover(record("b", 2));
    a.until_found(&["b"]).await;
    b.until("b is registered", |state| state.is_registered).await;
    etcd.signal(Signal::SIGSTOP);
    let away = a.until("the failure is noted", |state| state.error().is_some()).await;
    assert_eq!(found(&away), ["b"]);
    assert!(away.failures > 0);
    etcd.signal(Signal::SIGCONT);
    // While the etcd process was stopped, time passed, so the relays' leases may have ended. If so, the relays take new
    // leases.
    a.until("etcd answers again", |state| state.error().is_none() && state.is_registered).await;
    b.until("b is registered again", |state| state.error().is_none() && state.is_registered).await;
    a.until_found(&["b"]).await;
}

#[tokio::test]
async fn lost_lease_is_replaced_by_a_new_one() {
    let Some(etcd) = Etcd::start() else { return };
    let mut a = etcd.discover(record("a", 1));
    let mut b = etcd.discover(record("b", 2));
    b.until_found(&["a"]).await;
    a.until("a is registered", |state| state.is_registered).await;
    let leases = etcd.call("/v3/lease/leases", serde_json::json!({})).await;
    for lease in leases["leases"].as_array().expect("leases") {
        etcd.call("/v3/lease/revoke", serde_json::json!({ "ID": lease["ID"] })).await;
    }
    a.until("the lost lease is noticed", |state| state.failures > 0).await;
    a.until("a is registered again", |state| state.is_registered).await;
    b.until_found(&["a"]).await;
}

#[tokio::test]
async fn invalid_records_are_not_used() {
    use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
    let Some(etcd) = Etcd::start() else { return };
    let mut a = etcd.discover(record("a", 1));
    a.until("a is registered", |state| state.is_registered).await;
    let good = |host: &str| serde_json::to_string(&record(host, 7)).unwrap();
    let records = [
        ("b:4443", "not JSON".to_owned()),
        ("c:4443", good("stolen")),
        ("d:4443", r#"{"url":"file:///etc/passwd"}"#.to_owned()),
        ("e:4443", format!("{}{}", good("e"), " ".repeat(5000))),
        ("", good("f")),
        // A record under this relay's own key, written by another process, is not used as another relay's.
        ("a:4443", good("a")),
        ("z:4443", good("z")),
    ];
    for (key, value) in records {
        let key = BASE64.encode(format!("{PREFIX}{key}"));
        etcd.call("/v3/kv/put", serde_json::json!({ "key": key, "value": BASE64.encode(value) })).await;
    }
    let seen = a.until_found(&["z"]).await;
    let unusable: Vec<_> = seen.unusable.iter().filter_map(|why| why.split_once(": ")).collect();
    let keys: Vec<_> = unusable.iter().map(|(key, _)| *key).collect();
    assert_eq!(keys, ["", "a:4443", "b:4443", "c:4443", "d:4443", "e:4443"], "{unusable:?}");
}

#[tokio::test]
async fn etcd_is_reached_over_mutual_tls() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let key = || KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, key()).unwrap();
    fs::write(file("ca.pem"), authority.pem()).unwrap();
    let server_key = key();
    let server =
        CertificateParams::new(vec![Etcd::address().to_string()]).unwrap().signed_by(&server_key, &authority);
    fs::write(file("server.pem"), server.unwrap().pem()).unwrap();
    fs::write(file("server.key"), server_key.serialize_pem()).unwrap();
    let etcd = Etcd::with(
        "https",
        &[
            "--client-cert-auth",
            "--trusted-ca-file",
            &file("ca.pem"),
            "--cert-file",
            &file("server.pem"),
            "--key-file",
            &file("server.key"),
        ],
    );
    let Some(etcd) = etcd else { return };
    let mut roots = RootCertStore::empty();
    roots.add(authority.der().clone()).unwrap();
    let relay_key = key();
    let relay = CertificateParams::new(vec!["a".into()]).unwrap().signed_by(&relay_key, &authority).unwrap();
    let with = ClientConfig::builder_with_provider(ring::default_provider().into());
    let with = with.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots.clone());
    let private = PrivateKeyDer::try_from(relay_key.serialize_der()).unwrap();
    let with = with.with_client_auth_cert(vec![relay.der().clone()], private).unwrap();
    let mut known = etcd.discover_by(HttpClient::new(Arc::new(with)), record("a", 1));
    known.until("it is registered", |state| state.is_registered).await;
    let mut unknown = etcd.discover_by(HttpClient::new(Arc::new(client(roots))), record("b", 1));
    unknown.until("it is refused", |state| state.error().is_some()).await;
    assert!(!unknown.found.borrow().is_registered);
    // No request is sent to a server whose certificate is not trusted.
    let stranger = HttpClient::new(Arc::new(client(RootCertStore::empty())));
    let mut stranger = etcd.discover_by(stranger, record("c", 1));
    let refused = stranger.until("the server is not trusted", |state| state.error().is_some()).await;
    assert!(refused.error().expect("an error").contains("certificate"), "{:?}", stranger.found.borrow());
}
