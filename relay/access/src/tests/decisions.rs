use std::{
    pin::pin,
    sync::Arc,
    task::{Context, Waker},
};

use super::*;
use crate::{
    Access, BudgetLimits, cat,
    grant::{Actions, GrantScope},
    jwt,
    policy::{AccessPolicy, Basis, Presented, RightHolder, SessionStanding, TokenHolder},
    refusal::AccessRefusal,
    rights::{Rights, SessionSubject},
    rules::{AccessRule, CertificateName, ClientCertificate, NameKind, SessionPeer},
};

fn peer() -> SessionPeer {
    SessionPeer {
        address: "192.0.2.7".parse().unwrap(),
        certificate: None,
        path: String::new(),
        authority: None,
    }
}

fn rule(namespace: &str, publish: &[&str], subscribe: &[&str]) -> AccessRule {
    let principals = |all: &[&str]| all.iter().map(|one| one.parse().unwrap()).collect();
    AccessRule {
        namespace: namespace.parse().unwrap(),
        publish: principals(publish),
        subscribe: principals(subscribe),
        path: None,
        authority: None,
    }
}

fn tokens() -> Requirements {
    Requirements { keys: keys(), ..Requirements::default() }
}

fn token(claims: &jwt::JwtClaims) -> Arc<Presented> {
    Presented::new(token::credential_from_text(&jwt::make(claims, &signer()).unwrap()))
}

fn putting(path: &str) -> jwt::JwtClaims {
    jwt::JwtClaims { put: jwt::OneOrMany::One(path.into()), ..jwt::JwtClaims::default() }
}

fn decide(
    policy: &AccessPolicy,
    peer: &SessionPeer,
    tokens: &[Arc<Presented>],
    action: Action,
    path: &str,
) -> Result<RightHolder, AccessRefusal> {
    let resource = resource(path, Some("t"));
    policy.decide(peer, tokens, action, &resource, at(1000)).map(|basis| basis.identity)
}

#[test]
fn policy_without_rules_and_keys_allows_anything() {
    let policy = AccessPolicy::new(vec![], Requirements::default(), false);
    assert!(policy.is_open());
    let client = RightHolder::Client("192.0.2.7".parse().unwrap());
    assert_eq!(decide(&policy, &peer(), &[], Action::Publish, "a"), Ok(client));
    assert!(policy.decide_session(&peer(), &[], at(0)).is_ok());
}

fn host(name: &str) -> CertificateName {
    CertificateName::new(NameKind::Dns, name)
}

#[test]
fn access_rules_apply_only_to_their_principals() {
    let named = |name: &str, until| SessionPeer {
        certificate: Some(ClientCertificate {
            names: vec![host("other"), name.parse().unwrap()],
            not_after: Some(at(until)),
        }),
        ..peer()
    };
    let at_path = |path: &str| SessionPeer { path: path.into(), ..peer() };
    let at_authority = |name: &str| SessionPeer { authority: Some(name.into()), ..peer() };
    let mut scoped = rule("scoped/**", &["anyone"], &[]);
    scoped.path = Some("room/*".parse().unwrap());
    let mut hosted = rule("hosted/**", &["anyone"], &[]);
    hosted.authority = Some("relay.example".parse().unwrap());
    let mut at_port = rule("at-port/**", &["anyone"], &[]);
    at_port.authority = Some("relay.example:443".parse().unwrap());
    let rules = vec![
        rule("public/**", &[], &["anyone"]),
        rule("lan/**", &["cidr:192.0.2.0/24"], &["cidr:198.51.100.0/24"]),
        rule("cert/**", &["cert:cam"], &["cert:*"]),
        rule("common/**", &["cert:cn:cam"], &[]),
        scoped,
        hosted,
        at_port,
    ];
    let policy = AccessPolicy::new(rules, Requirements::default(), true);
    let table = [
        ("anyone", peer(), Action::Subscribe, "public/a", true),
        ("anyone fetches", peer(), Action::Fetch, "public/a", true),
        ("nobody", peer(), Action::Publish, "public/a", false),
        ("elsewhere", peer(), Action::Subscribe, "private", false),
        ("network", peer(), Action::Publish, "lan", true),
        ("another network", peer(), Action::Subscribe, "lan", false),
        ("certificate", named("cam", 2000), Action::Publish, "cert/a", true),
        ("another name", named("mic", 2000), Action::Publish, "cert/a", false),
        ("the name in another place", named("cn:cam", 2000), Action::Publish, "cert/a", false),
        ("the name as mail", named("mail:cam", 2000), Action::Publish, "cert/a", false),
        ("the place that the rule names", named("cn:cam", 2000), Action::Publish, "common/a", true),
        ("another place than the rule names", named("cam", 2000), Action::Publish, "common/a", false),
        ("any name", named("mic", 2000), Action::Subscribe, "cert/a", true),
        ("expired certificate", named("cam", 1000), Action::Publish, "cert/a", false),
        ("no certificate", peer(), Action::Subscribe, "cert/a", false),
        ("path", at_path("/room/1"), Action::Publish, "scoped/a", true),
        ("another path", at_path("/hall/1"), Action::Publish, "scoped/a", false),
        ("no path", peer(), Action::Publish, "scoped/a", false),
        ("authority", at_authority("Relay.Example"), Action::Publish, "hosted/a", true),
        ("authority with a port", at_authority("relay.example:4443"), Action::Publish, "hosted/a", true),
        ("another authority", at_authority("x"), Action::Publish, "hosted/a", false),
        ("the default port, left out", at_authority("relay.example"), Action::Publish, "at-port/a", true),
        ("the default port, written", at_authority("relay.example:443"), Action::Publish, "at-port/a", true),
        ("another port", at_authority("relay.example:4443"), Action::Publish, "at-port/a", false),
    ];
    for (what, peer, action, path, wanted) in table {
        assert_eq!(decide(&policy, &peer, &[], action, path).is_ok(), wanted, "{what}");
    }
}

#[test]
fn token_allows_only_what_a_rule_allows_too() {
    let policy = AccessPolicy::new(vec![rule("live/**", &["token"], &["anyone"])], tokens(), false);
    let good = token(&jwt::JwtClaims { sub: Some("alice".into()), ..putting("live/a") });
    let alice = RightHolder::Token { issuer: None, holder: TokenHolder::Subject("alice".into()) };
    let wide = token(&putting(""));
    let expired = token(&jwt::JwtClaims { exp: Some(1000.0), ..putting("live") });
    let table = [
        ("good", vec![good.clone()], "live/a", Ok(alice)),
        ("outside the token", vec![good], "live/b", Err(AccessRefusal::NotAllowed)),
        ("outside the rule", vec![wide], "vod", Err(AccessRefusal::NotAllowed)),
        ("none", vec![], "live/a", Err(AccessRefusal::NotAllowed)),
        ("expired", vec![expired], "live/a", Err(AccessRefusal::Token(TokenError::Expired))),
    ];
    for (what, tokens, path, wanted) in table {
        assert_eq!(decide(&policy, &peer(), &tokens, Action::Publish, path), wanted, "{what}");
    }
}

#[test]
fn policy_with_keys_and_no_rules_requires_a_token() {
    let policy = AccessPolicy::new(vec![], tokens(), false);
    assert!(!policy.is_open());
    assert_eq!(decide(&policy, &peer(), &[], Action::Subscribe, "a"), Err(AccessRefusal::NotAllowed));
    assert!(decide(&policy, &peer(), &[token(&putting("a"))], Action::Publish, "a").is_ok());
}

#[test]
fn policy_with_roots_and_no_rules_allows_every_certificate() {
    let policy = AccessPolicy::new(vec![], Requirements::default(), true);
    let certificate = Some(ClientCertificate { names: vec![host("cam")], not_after: Some(at(5000)) });
    let known = SessionPeer { certificate, ..peer() };
    let resource = resource("a", Some("t"));
    let basis = policy.decide(&known, &[], Action::Publish, &resource, at(1000));
    assert_eq!(basis, Ok(Basis { identity: RightHolder::Certificate(host("cam")), until: Some(at(5000)) }));
    assert_eq!(decide(&policy, &peer(), &[], Action::Publish, "a"), Err(AccessRefusal::NotAllowed));
    assert_eq!(policy.decide_session(&peer(), &[], at(0)), Err(AccessRefusal::NotAllowed));
}

#[test]
fn client_without_any_possible_right_gets_no_session() {
    let with_tokens = AccessPolicy::new(vec![], tokens(), false);
    let good = token(&jwt::JwtClaims { exp: Some(2000.0), ..putting("a") });
    let (basis, standing) = with_tokens.decide_session(&peer(), &[Arc::clone(&good)], at(1000)).unwrap();
    assert_eq!((basis.until, standing), (Some(at(2000)), SessionStanding::Proven));
    // The session gets an error, because the token that it relied on has expired.
    let late = with_tokens.decide_session(&peer(), &[good], at(2000));
    assert_eq!(late, Err(AccessRefusal::Token(TokenError::Expired)));
    // A session without tokens is accepted, since its requests may bring some.
    let (_, standing) = with_tokens.decide_session(&peer(), &[], at(1000)).unwrap();
    assert_eq!(standing, SessionStanding::Unproven);
    let lan = AccessPolicy::new(vec![rule("**", &[], &["cidr:10.0.0.0/8"])], Requirements::default(), false);
    assert_eq!(lan.decide_session(&peer(), &[], at(0)), Err(AccessRefusal::NotAllowed));
}

#[test]
fn jwt_is_accepted_if_its_root_overlaps_the_connections_path() {
    let policy = AccessPolicy::new(vec![], tokens(), false);
    let rooted = token(&jwt::JwtClaims { root: "demo".into(), ..putting("room") });
    for (path, wanted) in
        [("", true), ("/demo", true), ("/demo/room/1", true), ("/other", false), ("/demon", false)]
    {
        let peer = SessionPeer { path: path.into(), ..peer() };
        let found = decide(&policy, &peer, &[Arc::clone(&rooted)], Action::Publish, "demo/room");
        assert_eq!(found.is_ok(), wanted, "{path}");
    }
}

#[test]
fn malformed_and_repeated_tokens_are_refused() {
    let policy = AccessPolicy::new(vec![], tokens(), false);
    let good = token(&putting("a"));
    let other = token(&putting("b"));
    let bad = Presented::new(token::credential_from_text("bad"));
    let now = at(1000);
    assert_eq!(policy.check_tokens(&[Arc::clone(&good), other], now), Ok(()));
    assert_eq!(policy.check_tokens(&[Arc::clone(&good), good], now), Err(AccessRefusal::Repeated));
    assert_eq!(policy.check_tokens(&[bad], now).unwrap_err().name(), "token_malformed");
}

/// Checks that a relay whose settings name files of keys or root certificates stays closed when these files are gone.
#[test]
fn policy_whose_key_or_root_files_are_unreadable_allows_nothing() {
    let tokens = Requirements { wants_keys: true, ..Requirements::default() };
    let without_keys = AccessPolicy::new(vec![], tokens, false);
    assert!(!without_keys.is_open() && without_keys.reads_tokens());
    assert_eq!(decide(&without_keys, &peer(), &[], Action::Publish, "a"), Err(AccessRefusal::NotAllowed));
    let shown = [token(&putting("a"))];
    let refused = decide(&without_keys, &peer(), &shown, Action::Publish, "a");
    assert_eq!(refused, Err(AccessRefusal::Token(TokenError::Signature)));

    let certificate = Some(ClientCertificate { names: vec![host("cam")], not_after: None });
    let known = SessionPeer { certificate, ..peer() };
    for rules in [vec![], vec![rule("**", &["cert:cam"], &[])]] {
        let mut policy = AccessPolicy::new(rules, Requirements::default(), true);
        assert!(decide(&policy, &known, &[], Action::Publish, "a").is_ok());
        policy.doubts_certificates = true;
        assert_eq!(decide(&policy, &known, &[], Action::Publish, "a"), Err(AccessRefusal::NotAllowed));
        assert!(policy.decide_session(&known, &[], at(0)).is_err());
    }
}

fn key_of(secret: u8, issuer: Option<&str>) -> AccessKey {
    let key = keys::read_secret(&[secret; 32]).unwrap();
    match issuer {
        Some(issuer) => key.bound_to(issuer.into()),
        None => key,
    }
}

fn token_by(secret: u8, claims: &jwt::JwtClaims) -> Arc<Presented> {
    let signer = Signer::read_secret(&[secret; 32]).unwrap();
    Presented::new(token::credential_from_text(&jwt::make(claims, &signer).unwrap()))
}

fn said_by(issuer: Option<&str>, subject: &str) -> jwt::JwtClaims {
    let issuer = issuer.map(str::to_owned);
    jwt::JwtClaims { iss: issuer, sub: Some(subject.into()), jti: Some("1".into()), ..putting("a") }
}

/// Restricts key 1 to tokens of issuer studio-a, key 2 to those of studio-b, and key 4 to those of both. Key 3 is not
/// restricted.
#[test]
fn signing_key_bound_to_an_issuer_verifies_only_that_issuers_tokens() {
    let tokens = Requirements {
        keys: vec![
            key_of(1, Some("studio-a")),
            key_of(2, Some("studio-b")),
            key_of(3, None),
            key_of(4, Some("studio-a")),
            key_of(4, Some("studio-b")),
        ],
        // Issuer studio-c has keys in the settings, but none of these keys could be read.
        bound: ["studio-a", "studio-b", "studio-c"].map(str::to_owned).into(),
        ..Requirements::default()
    };
    let policy = AccessPolicy::new(vec![], tokens.clone(), false);
    let listed = Requirements { issuers: vec!["studio-d".into()], ..tokens };
    let listed = AccessPolicy::new(vec![], listed, false);
    let table = [
        (&policy, 1, Some("studio-a"), true),
        (&policy, 1, Some("studio-b"), false),
        (&policy, 1, None, false),
        (&policy, 2, Some("studio-a"), false),
        (&policy, 3, Some("studio-a"), false),
        (&policy, 3, Some("studio-c"), false),
        (&policy, 3, Some("studio-d"), true),
        (&policy, 3, None, true),
        (&policy, 4, Some("studio-a"), true),
        (&policy, 4, Some("studio-b"), true),
        (&policy, 4, Some("studio-d"), false),
        (&listed, 1, Some("studio-a"), true),
        (&listed, 1, Some("studio-d"), false),
        (&listed, 3, Some("studio-d"), true),
        (&listed, 3, Some("studio-e"), false),
        (&listed, 3, None, false),
    ];
    for (policy, secret, issuer, wanted) in table {
        let shown = [token_by(secret, &said_by(issuer, "alice"))];
        let found = decide(policy, &peer(), &shown, Action::Publish, "a");
        assert_eq!(found.is_ok(), wanted, "{secret} {issuer:?}: {found:?}");
    }
}

#[test]
fn revoked_token_id_applies_to_one_issuer_or_to_all_issuers() {
    let revoked = |all: &[&str], of: &[(&str, &str)]| Requirements {
        keys: vec![key_of(3, None)],
        revoked: all.iter().map(|id| (*id).to_owned()).collect(),
        revoked_of: of.iter().map(|(issuer, id)| ((*issuer).to_owned(), [(*id).to_owned()].into())).collect(),
        ..Requirements::default()
    };
    let table = [
        (revoked(&["1"], &[]), Some("x"), true),
        (revoked(&["2"], &[]), Some("x"), false),
        (revoked(&[], &[("x", "1")]), Some("x"), true),
        (revoked(&[], &[("y", "1")]), Some("x"), false),
        (revoked(&[], &[("x", "1")]), None, false),
    ];
    for (tokens, issuer, wanted) in table {
        let policy = AccessPolicy::new(vec![], tokens, false);
        let shown = [token_by(3, &said_by(issuer, "alice"))];
        let found = decide(&policy, &peer(), &shown, Action::Publish, "a");
        let expected = Err(AccessRefusal::Token(TokenError::Revoked));
        assert_eq!(found == expected, wanted, "{issuer:?}: {found:?}");
    }
}

fn subject(access: &Arc<Access>) -> Arc<SessionSubject> {
    SessionSubject::new(access, peer(), Vec::new(), false, access.session())
}

fn may(action: Action, id: &str) -> Credential {
    let scope = GrantScope {
        actions: Actions::from_actions(&[action, Action::RequestUpdate]),
        namespace: vec![],
        closed: false,
        track: None,
    };
    let claims = cat::CatClaims { id: Some(id.into()), scopes: vec![scope], ..cat::CatClaims::default() };
    Credential { kind: KIND_CAT, value: cat::make(&claims, &signer(), false).unwrap().into() }
}

fn revoking(ids: &[&str]) -> AccessPolicy {
    let revoked = ids.iter().map(|id| (*id).to_owned()).collect();
    AccessPolicy::new(vec![], Requirements { revoked, ..tokens() }, false)
}

fn is_over(rights: &Rights) -> bool {
    pin!(rights.ended()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Gets permissions for two actions that follow from a request. Each ends when the token that it rests on is revoked. A
/// new token of the request also keeps both.
#[tokio::test]
async fn derived_access_right_ends_with_the_token_that_granted_it() {
    let access = Access::new(revoking(&[]), BudgetLimits::default());
    let track = || resource("a", Some("t"));
    let subject = subject(&access);
    let brought = vec![may(Action::Subscribe, "s"), may(Action::Fetch, "f")];
    let (request, _) = subject.request(brought, 1, false).unwrap();
    request.ask(Action::Subscribe, track()).unwrap();
    let fetch = request.derive(Action::Fetch, track()).unwrap();
    let low = request.derive(Action::Subscribe, resource("a", Some("low"))).unwrap();
    assert_eq!(request.derive(Action::Publish, track()).err(), Some(AccessRefusal::NotAllowed));
    assert_eq!(request.ask(Action::Fetch, track()), Err(AccessRefusal::NotAllowed), "a request asks once");
    assert!(![&request, &fetch, &low].into_iter().any(|rights| is_over(rights)));
    access.set_policy(revoking(&["f"]));
    assert_eq!([is_over(&request), is_over(&fetch), is_over(&low)], [false, true, false]);
    // After an update with a newer token, the permissions of the request and of the action that follows from it stay,
    // although the previous token is revoked.
    request.update(vec![may(Action::Subscribe, "s2")]).unwrap();
    access.set_policy(revoking(&["f", "s"]));
    assert_eq!([is_over(&request), is_over(&low)], [false, false]);
    // Tokens that update the permission of an action that follows from the request have no effect on the permission of
    // the request.
    low.update(vec![may(Action::Subscribe, "low")]).unwrap();
    access.set_policy(revoking(&["s2"]));
    assert_eq!([is_over(&request), is_over(&low)], [true, false]);
}

/// Checks that a permission keeps its namespace or track when a change to one that is not allowed is refused.
#[tokio::test]
async fn permission_keeps_its_namespace_when_a_change_to_another_is_refused() {
    let policy = AccessPolicy::new(vec![rule("a/**", &[], &["anyone"])], Requirements::default(), false);
    let access = Access::new(policy, BudgetLimits::default());
    let (request, _) = subject(&access).request(vec![], 1, false).unwrap();
    assert_eq!(
        request.move_to(resource("a", None)),
        Err(AccessRefusal::NotAllowed),
        "the request has asked for no right yet"
    );
    request.ask(Action::SubscribeNamespace, resource("a", None)).unwrap();
    assert_eq!(request.move_to(resource("b", None)), Err(AccessRefusal::NotAllowed));
    assert!(!is_over(&request));
    request.move_to(resource("a/b", None)).unwrap();
    access.set_policy(AccessPolicy::new(vec![rule("a", &[], &["anyone"])], Requirements::default(), false));
    assert!(is_over(&request), "the right is on a/b now");
}

/// Builds different identities from tokens whose issuers and subjects contain the characters that separate the parts of
/// an identity's text. Without escaping, two of them would have the same text.
#[test]
fn issuers_and_subjects_with_separators_give_distinct_identity_texts() {
    let policy = AccessPolicy::new(
        vec![],
        Requirements { keys: vec![key_of(3, None)], ..Requirements::default() },
        false,
    );
    let of = |claims: &jwt::JwtClaims| {
        decide(&policy, &peer(), &[token_by(3, claims)], Action::Publish, "a").unwrap()
    };
    let without_subject = jwt::JwtClaims { sub: None, ..said_by(None, "") };
    let identities = [
        of(&said_by(Some("a"), "b/c")),
        of(&said_by(Some("a/b"), "c")),
        of(&said_by(None, "a/b/c")),
        of(&said_by(Some(""), "a/b/c")),
        of(&said_by(Some("a"), "b%2Fc")),
        of(&without_subject),
        of(&said_by(None, "#1")),
        of(&jwt::JwtClaims { jti: None, ..without_subject.clone() }),
        of(&jwt::JwtClaims { iss: Some("a".into()), ..without_subject }),
    ];
    for (nth, one) in identities.iter().enumerate() {
        for other in &identities[nth + 1..] {
            assert!(one != other && one.to_string() != other.to_string(), "{one} {other}");
        }
    }
    assert_eq!(of(&said_by(Some("https://a.example"), "alice")).to_string(), "token:https://a.example/alice");
}
