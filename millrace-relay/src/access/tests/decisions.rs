use std::sync::Arc;

use super::*;
use crate::access::{
    jwt,
    policy::{Basis, Identity, Policy, Presented},
    refusal::Refusal,
    rules::{Certificate, Peer, Rule},
};

fn peer() -> Peer {
    Peer { address: "192.0.2.7".parse().unwrap(), certificate: None, path: String::new(), authority: None }
}

fn rule(namespace: &str, publish: &[&str], subscribe: &[&str]) -> Rule {
    let principals = |all: &[&str]| all.iter().map(|one| one.parse().unwrap()).collect();
    Rule {
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

fn token(claims: &jwt::Claims) -> Arc<Presented> {
    Presented::new(token::of_text(&jwt::make(claims, &signer()).unwrap()))
}

fn putting(path: &str) -> jwt::Claims {
    jwt::Claims { put: jwt::OneOrMany::One(path.into()), ..jwt::Claims::default() }
}

fn decide(
    policy: &Policy,
    peer: &Peer,
    tokens: &[Arc<Presented>],
    action: Action,
    path: &str,
) -> Result<Identity, Refusal> {
    let resource = resource(path, Some("t"));
    policy.decide(peer, tokens, (action, &resource), at(1000)).map(|basis| basis.identity)
}

#[test]
fn without_rules_and_keys_anyone_may_do_anything() {
    let policy = Policy::new(vec![], Requirements::default(), false);
    assert!(policy.is_open());
    let client = Identity::Client("192.0.2.7".parse().unwrap());
    assert_eq!(decide(&policy, &peer(), &[], Action::Publish, "a"), Ok(client));
    assert!(policy.decide_session(&peer(), &[], at(0)).is_ok());
}

#[test]
fn rules_by_principal() {
    let named = |name: &str, until| Peer {
        certificate: Some(Certificate {
            names: vec!["other".into(), name.into()],
            not_after: Some(at(until)),
        }),
        ..peer()
    };
    let at_path = |path: &str| Peer { path: path.into(), ..peer() };
    let at_authority = |name: &str| Peer { authority: Some(name.into()), ..peer() };
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
        scoped,
        hosted,
        at_port,
    ];
    let policy = Policy::new(rules, Requirements::default(), true);
    let table = [
        ("anyone", peer(), Action::Subscribe, "public/a", true),
        ("anyone fetches", peer(), Action::Fetch, "public/a", true),
        ("nobody", peer(), Action::Publish, "public/a", false),
        ("elsewhere", peer(), Action::Subscribe, "private", false),
        ("network", peer(), Action::Publish, "lan", true),
        ("another network", peer(), Action::Subscribe, "lan", false),
        ("certificate", named("cam", 2000), Action::Publish, "cert/a", true),
        ("another name", named("mic", 2000), Action::Publish, "cert/a", false),
        ("any name", named("mic", 2000), Action::Subscribe, "cert/a", true),
        ("expired certificate", named("cam", 1000), Action::Publish, "cert/a", false),
        ("no certificate", peer(), Action::Subscribe, "cert/a", false),
        ("path", at_path("/room/1"), Action::Publish, "scoped/a", true),
        ("another path", at_path("/hall/1"), Action::Publish, "scoped/a", false),
        ("no path", peer(), Action::Publish, "scoped/a", false),
        ("authority", at_authority("Relay.Example"), Action::Publish, "hosted/a", true),
        ("authority with a port", at_authority("relay.example:4443"), Action::Publish, "hosted/a", true),
        ("another authority", at_authority("x"), Action::Publish, "hosted/a", false),
        ("the port that goes unsaid", at_authority("relay.example"), Action::Publish, "at-port/a", true),
        ("the port, said", at_authority("relay.example:443"), Action::Publish, "at-port/a", true),
        ("another port", at_authority("relay.example:4443"), Action::Publish, "at-port/a", false),
    ];
    for (what, peer, action, path, wanted) in table {
        assert_eq!(decide(&policy, &peer, &[], action, path).is_ok(), wanted, "{what}");
    }
}

#[test]
fn tokens_go_as_far_as_rules_let_them() {
    let policy = Policy::new(vec![rule("live/**", &["token"], &["anyone"])], tokens(), false);
    let good = token(&jwt::Claims { sub: Some("alice".into()), ..putting("live/a") });
    let wide = token(&putting(""));
    let expired = token(&jwt::Claims { exp: Some(1000.0), ..putting("live") });
    let table = [
        ("good", vec![good.clone()], "live/a", Ok(Identity::Token("alice".into()))),
        ("outside the token", vec![good], "live/b", Err(Refusal::NotAllowed)),
        ("outside the rule", vec![wide], "vod", Err(Refusal::NotAllowed)),
        ("none", vec![], "live/a", Err(Refusal::NotAllowed)),
        ("expired", vec![expired], "live/a", Err(Refusal::Token(TokenError::Expired))),
    ];
    for (what, tokens, path, wanted) in table {
        assert_eq!(decide(&policy, &peer(), &tokens, Action::Publish, path), wanted, "{what}");
    }
}

#[test]
fn keys_without_rules_leave_everything_to_tokens() {
    let policy = Policy::new(vec![], tokens(), false);
    assert!(!policy.is_open());
    assert_eq!(decide(&policy, &peer(), &[], Action::Subscribe, "a"), Err(Refusal::NotAllowed));
    assert!(decide(&policy, &peer(), &[token(&putting("a"))], Action::Publish, "a").is_ok());
}

#[test]
fn a_certificate_authority_without_rules_lets_every_certificate_in() {
    let policy = Policy::new(vec![], Requirements::default(), true);
    let certificate = Some(Certificate { names: vec!["cam".into()], not_after: Some(at(5000)) });
    let known = Peer { certificate, ..peer() };
    let resource = resource("a", Some("t"));
    let basis = policy.decide(&known, &[], (Action::Publish, &resource), at(1000));
    assert_eq!(basis, Ok(Basis { identity: Identity::Certificate("cam".into()), until: Some(at(5000)) }));
    assert_eq!(decide(&policy, &peer(), &[], Action::Publish, "a"), Err(Refusal::NotAllowed));
    assert_eq!(policy.decide_session(&peer(), &[], at(0)), Err(Refusal::NotAllowed));
}

#[test]
fn sessions_are_for_those_who_could_do_something() {
    let with_tokens = Policy::new(vec![], tokens(), false);
    let good = token(&jwt::Claims { exp: Some(2000.0), ..putting("a") });
    let basis = with_tokens.decide_session(&peer(), &[Arc::clone(&good)], at(1000)).unwrap();
    assert_eq!(basis.until, Some(at(2000)));
    // What it relied on is over.
    let late = with_tokens.decide_session(&peer(), &[good], at(2000));
    assert_eq!(late, Err(Refusal::Token(TokenError::Expired)));
    // Its requests may bring tokens.
    assert!(with_tokens.decide_session(&peer(), &[], at(1000)).is_ok());
    let lan = Policy::new(vec![rule("**", &[], &["cidr:10.0.0.0/8"])], Requirements::default(), false);
    assert_eq!(lan.decide_session(&peer(), &[], at(0)), Err(Refusal::NotAllowed));
}

#[test]
fn the_connections_path_and_a_tokens_root_overlap() {
    let policy = Policy::new(vec![], tokens(), false);
    let rooted = token(&jwt::Claims { root: "demo".into(), ..putting("room") });
    for (path, wanted) in
        [("", true), ("/demo", true), ("/demo/room/1", true), ("/other", false), ("/demon", false)]
    {
        let peer = Peer { path: path.into(), ..peer() };
        let found = decide(&policy, &peer, &[Arc::clone(&rooted)], Action::Publish, "demo/room");
        assert_eq!(found.is_ok(), wanted, "{path}");
    }
}

#[test]
fn bad_and_repeated_tokens_are_refused_before_anything_is_decided() {
    let policy = Policy::new(vec![], tokens(), false);
    let (good, other) = (token(&putting("a")), token(&putting("b")));
    let bad = Presented::new(token::of_text("bad"));
    let now = at(1000);
    assert_eq!(policy.check_tokens(&[Arc::clone(&good), other], now), Ok(()));
    assert_eq!(policy.check_tokens(&[Arc::clone(&good), good], now), Err(Refusal::Repeated));
    assert_eq!(policy.check_tokens(&[bad], now).unwrap_err().name(), "token_malformed");
}
