//! Tests of the credentials that a relay presents to its upstream relay, which requires them for subscribing.

use std::{fs, path::Path};

use millrace_moq::{Parameters, code};
use millrace_relay::access::{
    AccessRule, Principal,
    jwt::{self, JwtClaims, OneOrMany},
    keys::Signer,
};
use millrace_relay_daemon::{
    config::{KeyFile, UpstreamConfig},
    status::Status,
};

use super::peer::{PeerStreamEnd, TestRelay, header, with_publisher};

const SECRETS: [&[u8]; 2] =
    [b"the one that the upstream relay has ok", b"another that it has never heard of ok"];

/// The credential that the edge relay presents to its upstream relay.
#[derive(Clone, Copy, Debug)]
enum ShownCredential {
    Nothing,
    /// A token: the index of the secret that signs it, and the namespace that its owner may subscribe to.
    Token(usize, &'static str),
    /// A client certificate: the index of the authority that issues it, and the name that it is issued for.
    Certificate(usize, &'static str),
}

/// The result when the edge relay connects to its upstream relay and subscribes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CredentialOutcome {
    Served,
    /// The edge relay gets a session without the right to subscribe.
    Admitted,
    /// The edge relay's session is refused.
    Refused,
    /// The edge relay gets no connection.
    Unknown,
}

fn token(secret: usize, namespace: &str) -> String {
    let claims = JwtClaims { get: OneOrMany::Many(vec![namespace.to_owned()]), ..JwtClaims::default() };
    jwt::make(&claims, &Signer::read_secret(SECRETS[secret]).unwrap()).unwrap()
}

/// Makes a certificate authority. Returns it with its certificate in PEM.
fn authority() -> (rcgen::Issuer<'static, rcgen::KeyPair>, String) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let pem = params.self_signed(&key).unwrap().pem();
    (rcgen::Issuer::new(params, key), pem)
}

/// Starts an upstream relay where anyone may publish, and only clients with a valid token or certificate may subscribe.
fn origin(dir: &Path, authority: &str) -> TestRelay {
    let secret = dir.join("secret");
    let roots = dir.join("roots.pem");
    fs::write(&secret, SECRETS[0]).unwrap();
    fs::write(&roots, authority).unwrap();
    TestRelay::with(|config| {
        config.access.rules = vec![AccessRule {
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
async fn edge_gets_tracks_that_its_credentials_allow() {
    let table = [
        (ShownCredential::Nothing, CredentialOutcome::Admitted),
        (ShownCredential::Token(0, "live"), CredentialOutcome::Served),
        (ShownCredential::Token(0, "other"), CredentialOutcome::Admitted),
        (ShownCredential::Token(1, "live"), CredentialOutcome::Refused),
        (ShownCredential::Certificate(0, "edge.example"), CredentialOutcome::Served),
        (ShownCredential::Certificate(0, "other.example"), CredentialOutcome::Admitted),
        (ShownCredential::Certificate(1, "edge.example"), CredentialOutcome::Unknown),
    ];
    let authorities = [authority(), authority()];
    for (shown, outcome) in table {
        let dir = tempfile::tempdir().unwrap();
        let origin = origin(dir.path(), &authorities[0].1);
        let (mut publisher, _namespace, track) = with_publisher(&origin).await;
        let url = origin.url();
        let path = |name: &str| dir.path().join(name);
        let mut upstream = UpstreamConfig { urls: vec![url], tls_root: None, token: None, identity: None };
        match shown {
            ShownCredential::Nothing => {}
            ShownCredential::Token(secret, namespace) => {
                fs::write(path("token"), token(secret, namespace) + "\n").unwrap();
                upstream.token = Some(path("token"));
            }
            ShownCredential::Certificate(authority, name) => {
                let key = rcgen::KeyPair::generate().unwrap();
                let params = rcgen::CertificateParams::new([name.to_owned()]).unwrap();
                let cert = params.signed_by(&key, &authorities[authority].0).unwrap();
                fs::write(path("edge.pem"), cert.pem()).unwrap();
                fs::write(path("edge.key"), key.serialize_pem()).unwrap();
                upstream.identity = Some((path("edge.pem"), path("edge.key")));
            }
        }
        let edge = TestRelay::with(|config| config.upstream = Some(upstream));
        let mut subscriber = edge.peer().await;
        if outcome != CredentialOutcome::Served {
            match outcome {
                CredentialOutcome::Admitted => {
                    let all_in = |status: &Status| {
                        status.sessions.iter().filter(|session| session.identity.is_some()).count() == 2
                    };
                    origin.until("the edge's session at the origin", all_in).await;
                    edge.until("the session in the edge's status", |status| {
                        status.sessions.iter().any(|one| one.upstream)
                    })
                    .await;
                }
                CredentialOutcome::Refused => {
                    origin
                        .until("the refusal in the edge's status", |status| !status.access.refused.is_empty())
                        .await;
                }
                CredentialOutcome::Unknown | CredentialOutcome::Served => {}
            }
            let refused = subscriber.try_subscribe(&track, Parameters::default()).await.err().unwrap();
            if outcome == CredentialOutcome::Admitted {
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
        assert_eq!(subscriber.next_subgroup().await.all().await, (vec![0], PeerStreamEnd::Fin), "{shown:?}");
    }
}
