//! What a relay shows its upstream relay, which lets nobody else subscribe.

use std::{fs, path::Path};

use millrace_moq::{Parameters, code};
use millrace_relay::access::{
    Principal, Rule,
    jwt::{self, Claims, OneOrMany},
    keys::Signer,
};
use millrace_relay_daemon::{
    config::{KeyFile, Upstream},
    status::Status,
};

use super::peer::{End, Relay, header, with_publisher};

const SECRETS: [&[u8]; 2] =
    [b"the one that the upstream relay has ok", b"another that it has never heard of ok"];

/// What the edge shows.
#[derive(Clone, Copy, Debug)]
enum Shown {
    Nothing,
    /// Made with one of the secrets, for this namespace.
    Token(usize, &'static str),
    /// Of one of the authorities, for this name.
    Certificate(usize, &'static str),
}

/// What becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Served,
    /// It has a session, and may not subscribe.
    Admitted,
    /// Its session is refused.
    Refused,
    /// There is no connection.
    Unknown,
}

fn token(secret: usize, namespace: &str) -> String {
    let claims = Claims { get: OneOrMany::Many(vec![namespace.to_owned()]), ..Claims::default() };
    jwt::make(&claims, &Signer::read_secret(SECRETS[secret]).unwrap()).unwrap()
}

/// Who signs certificates, and its own as PEM.
fn authority() -> (rcgen::Issuer<'static, rcgen::KeyPair>, String) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let pem = params.self_signed(&key).unwrap().pem();
    (rcgen::Issuer::new(params, key), pem)
}

/// A relay that everybody may publish at, and whoever shows something good may subscribe at.
fn origin(dir: &Path, authority: &str) -> Relay {
    let (secret, roots) = (dir.join("secret"), dir.join("roots.pem"));
    fs::write(&secret, SECRETS[0]).unwrap();
    fs::write(&roots, authority).unwrap();
    Relay::with(|config| {
        config.access.rules = vec![Rule {
            namespace: "live/**".parse().unwrap(),
            publish: vec![Principal::Anyone],
            subscribe: vec![Principal::Token, "cert:edge.example".parse().unwrap()],
            path: None,
            authority: None,
        }];
        config.access.keys = vec![KeyFile { path: secret, is_secret: true, issuer: None }];
        config.access.client_ca = Some(roots);
    })
}

#[tokio::test]
async fn an_edge_gets_from_its_upstream_what_it_may() {
    let table = [
        (Shown::Nothing, Outcome::Admitted),
        (Shown::Token(0, "live"), Outcome::Served),
        (Shown::Token(0, "other"), Outcome::Admitted),
        (Shown::Token(1, "live"), Outcome::Refused),
        (Shown::Certificate(0, "edge.example"), Outcome::Served),
        (Shown::Certificate(0, "other.example"), Outcome::Admitted),
        (Shown::Certificate(1, "edge.example"), Outcome::Unknown),
    ];
    let authorities = [authority(), authority()];
    for (shown, outcome) in table {
        let dir = tempfile::tempdir().unwrap();
        let origin = origin(dir.path(), &authorities[0].1);
        let (mut publisher, _namespace, track) = with_publisher(&origin).await;
        let url = origin.url();
        let path = |name: &str| dir.path().join(name);
        let mut upstream = Upstream { url, tls_root: None, token: None, identity: None };
        match shown {
            Shown::Nothing => {}
            Shown::Token(secret, namespace) => {
                fs::write(path("token"), token(secret, namespace) + "\n").unwrap();
                upstream.token = Some(path("token"));
            }
            Shown::Certificate(authority, name) => {
                let key = rcgen::KeyPair::generate().unwrap();
                let params = rcgen::CertificateParams::new([name.to_owned()]).unwrap();
                let cert = params.signed_by(&key, &authorities[authority].0).unwrap();
                fs::write(path("edge.pem"), cert.pem()).unwrap();
                fs::write(path("edge.key"), key.serialize_pem()).unwrap();
                upstream.identity = Some((path("edge.pem"), path("edge.key")));
            }
        }
        let edge = Relay::with(|config| config.upstream = Some(upstream));
        let mut subscriber = edge.peer().await;
        if outcome != Outcome::Served {
            match outcome {
                Outcome::Admitted => {
                    let all_in = |status: &Status| {
                        status.sessions.iter().filter(|session| session.identity.is_some()).count() == 2
                    };
                    origin.until("the edge is in", all_in).await;
                    edge.until("the edge knows", |status| status.sessions.iter().any(|one| one.upstream))
                        .await;
                }
                Outcome::Refused => {
                    origin.until("it is refused", |status| !status.access.refused.is_empty()).await;
                }
                Outcome::Unknown | Outcome::Served => {}
            }
            let refused = subscriber.try_subscribe(&track, Parameters::default()).await.err().unwrap();
            if outcome == Outcome::Admitted {
                assert_eq!(refused.code, code::Request::UNAUTHORIZED, "{shown:?}");
            }
            assert!(publisher.requests.try_recv().is_err(), "{shown:?}");
            continue;
        }
        let waiting = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
        let (subscribed, _upstream) =
            tokio::join!(subscriber.try_subscribe(&track, waiting), publisher.accept_subscribe(&track, 1));
        let _request = subscribed.unwrap();
        let mut subgroup = publisher.subgroup(header(1, 0)).await;
        subgroup.object(0, 1200).await;
        subgroup.finish();
        assert_eq!(subscriber.next_subgroup().await.all().await, (vec![0], End::Fin), "{shown:?}");
    }
}
