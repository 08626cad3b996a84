//! Tests of Retry packets and their tokens.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use millrace_gate::kernel::token::{self, GateKey, Token};
use millrace_gate::kernel::{
    Event, FrameAction, GateRules, LoadedGate, Pass, PolicyRules, Rates, Rule, RuleRate,
};
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use crate::frame::{LongPacketType, TestFrame, VERSIONS, initial, long, long_start, payload_of_answer};
use crate::state::burst;
use crate::{PORT, apply, enforce, gate, judge, passed, reason, refused, root, scope, to_server};

const V4: &str = "192.0.2.7:40000";
const V6: &str = "[2001:db8::7]:40000";
const LIFETIME: Duration = Duration::from_secs(10);

fn policy() -> PolicyRules {
    PolicyRules { modes: enforce(&[Rule::Retry]), token_lifetime: LIFETIME, ..PolicyRules::default() }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs()
}

/// Computes the Retry integrity tag (RFC 9001, section 5.8; RFC 9369, section 3.3.3).
fn integrity_tag(version: u32, pseudo_packet: &[u8]) -> Vec<u8> {
    let (key, nonce) = match version {
        1 => (0xbe0c690b9f66575a1d766b54e368c84e_u128, "461599d35d632bf2239825bb"),
        _ => (0x8fb4b01b56ac48e260fbcbcead7ccc92_u128, "d86969bc2d7c6d9990efb04a"),
    };
    let key = LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &key.to_be_bytes()).expect("a key"));
    let nonce = u128::from_str_radix(nonce, 16).expect("hex").to_be_bytes();
    let nonce = Nonce::try_assume_unique_for_key(&nonce[4..]).expect("a nonce");
    let tag = key.seal_in_place_separate_tag(nonce, Aad::from(pseudo_packet), &mut []).expect("a tag");
    tag.as_ref().to_vec()
}

/// Returns the connection ID and token of the Retry that answers an Initial.
fn retry(gate: &LoadedGate, frame: &TestFrame, version: u32, id: &[u8], from: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let (verdict, action) = judge(gate, &frame.bytes());
    assert_eq!(verdict, Some(("web".to_owned(), refused(Rule::Retry))));
    let FrameAction::Answer(answer) = action else { panic!("{action:?}") };
    assert!(answer.len() < 256);
    let packet = payload_of_answer(frame, &answer);
    let type_bits = if version == 1 { 0xf0 } else { 0xc0 };
    assert_eq!(packet[0] & 0xf0, type_bits);
    let source_at = 6 + from.len() + 1;
    let retry_id = packet[source_at..source_at + 8].to_vec();
    let start = long_start(packet[0], version, from, &retry_id);
    assert_eq!(packet[..start.len()], start);
    let (token, tag) = packet[start.len()..].split_at(token::LEN);
    let pseudo = [&[id.len() as u8], id, &packet[..packet.len() - 16]].concat();
    assert_eq!(tag, integrity_tag(version, &pseudo), "integrity tag");
    (retry_id, token.to_vec())
}

/// Checks this file's [`integrity_tag`] with the Retry packets in appendix A.4 of RFC 9001 and of RFC 9369.
#[test]
fn retry_integrity_tags_match_the_rfcs() {
    for (version, packet, tag) in [
        (1, "ff000000010008f067a5502a4262b5746f6b656e", "04a265ba2eff4d829058fb3f0f2496ba"),
        (2, "cf6b3343cf0008f067a5502a4262b5746f6b656e", "c8646ce8bfe33952d955543665dcc7b6"),
    ] {
        let packet = hex(packet);
        let pseudo = [&[8], &hex("8394c8f03e515708")[..], &packet].concat();
        assert_eq!(integrity_tag(version, &pseudo), hex(tag));
    }
}

fn hex(text: &str) -> Vec<u8> {
    text.as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).expect("text"), 16).expect("hex"))
        .collect()
}

/// Checks the tag and the contents of tokens, for IPv4 and IPv6, QUIC versions 1 and 2, and connection IDs of all
/// lengths. A token is accepted only from its own address and port.
#[test]
fn retry_tokens_are_valid_for_their_address() {
    if !root("tokens") {
        return;
    }
    let gate = gate(policy());
    let keys = gate.token_keys();
    for version in VERSIONS {
        for from in [V4, V6] {
            for len in 0..=20 {
                let id = vec![0xd0; len];
                let source_id = vec![0x50; 20 - len];
                let asked = to_server(from, initial(version, &id, &source_id, &[]));
                let (retry_id, token) = retry(&gate, &asked, version, &id, &source_id);
                let client: SocketAddr = from.parse().expect("an address");
                let checked =
                    token::check(&keys, "web", &token, client, now(), LIFETIME).expect("a good token");
                assert_eq!(checked.original_id(), id);
                assert_eq!(checked.retry_id[..], retry_id);
                let again = initial(version, &retry_id, &source_id, &token);
                assert_eq!(reason(&gate, &to_server(from, again.clone())), passed(Pass::Proved));
                let mut other_port = to_server(from, again.clone());
                other_port.source.set_port(40001);
                retry(&gate, &other_port, version, &retry_id, &source_id);
                let other = if client.is_ipv4() { "192.0.2.8:40000" } else { "[2001:db8::8]:40000" };
                retry(&gate, &to_server(other, again), version, &retry_id, &source_id);
            }
        }
    }
    let invalid = gate.statistics().expect("statistics").event(Event::TokenInvalid);
    assert_eq!(invalid, 2 * 2 * 2 * 21);
}

#[test]
fn retry_token_with_any_change_is_refused_by_the_bpf_program() {
    if !root("forged_tokens") {
        return;
    }
    let gate = gate(policy());
    let id = [1; 8];
    let (retry_id, token) = retry(&gate, &to_server(V4, initial(1, &id, &[], &[])), 1, &id, &[]);
    for at in 0..token.len() {
        let mut forged = token.clone();
        forged[at] ^= 0x40;
        retry(&gate, &to_server(V4, initial(1, &retry_id, &[], &forged)), 1, &retry_id, &[]);
    }
    for other in [&token[1..], &[token.clone(), vec![0]].concat(), &[9; 72], &[9; 200]] {
        retry(&gate, &to_server(V4, initial(1, &retry_id, &[], other)), 1, &retry_id, &[]);
    }
    assert_eq!(reason(&gate, &to_server(V4, initial(1, &retry_id, &[], &token))), passed(Pass::Proved));
}

/// Checks that a token is valid only with the connection ID of its Retry, and only for the guarded application (scope)
/// that it was made for.
#[test]
fn retry_token_is_refused_with_another_connection_id_or_application() {
    if !root("retry_token_is_refused_with_another_connection_id_or_application") {
        return;
    }
    let gate = gate(policy());
    let rules = GateRules {
        scopes: vec![scope("web", PORT, policy()), scope("dns", 853, policy())],
        ..GateRules::default()
    };
    gate.apply(&rules).expect("rules");
    for from in [V4, V6] {
        let (retry_id, token) =
            retry(&gate, &to_server(from, initial(1, &[1; 8], &[], &[])), 1, &[1; 8], &[]);
        let longer = [retry_id.as_slice(), &[0]].concat();
        for id in [&[2; 8][..], &retry_id[..7], &longer, &[]] {
            retry(&gate, &to_server(from, initial(1, id, &[], &token)), 1, id, &[]);
        }
        let mut elsewhere = to_server(from, initial(1, &retry_id, &[], &token));
        elsewhere.destination.set_port(853);
        let (verdict, _) = judge(&gate, &elsewhere.bytes());
        assert_eq!(verdict, Some(("dns".to_owned(), refused(Rule::Retry))));
        let again = to_server(from, initial(1, &retry_id, &[], &token));
        for _ in 0..2 {
            assert_eq!(reason(&gate, &again), passed(Pass::Proved), "also when it is sent again");
        }
    }
}

/// Checks that the program accepts tokens that Rust makes, within their lifetime.
#[test]
fn retry_token_is_valid_within_its_lifetime_until_two_newer_keys_exist() {
    if !root("age_and_keys") {
        return;
    }
    let gate = gate(policy());
    let client = V4.parse().expect("an address");
    let token = |issued, index: u8, key: &GateKey| {
        token::Token::new(client, &[1; 8], issued).expect("a token").seal(index, key, "web").to_vec()
    };
    let accepts = |token: Vec<u8>| {
        let (verdict, _) = judge(&gate, &to_server(V4, initial(1, &[0; 8], &[], &token)).bytes());
        verdict == Some(("web".to_owned(), passed(Pass::Proved)))
    };
    let keys: Vec<GateKey> = (1..4).map(|byte| GateKey::new([byte; 16])).collect();
    let mut accepted = Vec::new();
    for key in &keys {
        gate.rotate_token_key(key.clone()).expect("a key");
        accepted.push(
            [0, 1].into_iter().find(|&i| gate.token_keys().get(i.into()) == Some(key)).expect("an index"),
        );
        // A token key stays valid until two newer keys have been added.
        for (age, (key, index)) in keys.iter().zip(&accepted).rev().enumerate() {
            assert_eq!(accepts(token(now(), *index, key)), age < 2, "age {age}");
        }
    }
    let key = &keys[2];
    let index = accepted[2];
    assert!(accepts(token(now() - 5, index, key)));
    assert!(!accepts(token(now() - 15, index, key)));
    assert!(!accepts(token(now() + 5, index, key)));
}

/// Checks that a Retry is sent only above a rate, only for new connections, and only to packets that can be answered.
#[test]
fn retry_is_sent_only_under_load() {
    if !root("only_under_load") {
        return;
    }
    let calm = RuleRate { amount: 1, per: Duration::from_secs(1000), burst: 5 };
    let gate = gate(PolicyRules { retry_above: Some(calm), ..policy() });
    let open = |n: u8, from| to_server(from, initial(1, &[n; 8], &[], &[]));
    for n in 0..5 {
        assert_eq!(reason(&gate, &open(n, V4)), passed(Pass::New));
    }
    // The same Initial may be repeated 32 times (REPEATS_MAX) without opening another connection.
    for _ in 0..32 {
        assert_eq!(reason(&gate, &open(4, V4)), passed(Pass::New));
    }
    retry(&gate, &open(4, V4), 1, &[4; 8], &[]);
    retry(&gate, &open(5, V4), 1, &[5; 8], &[]);
    // The same Initial from another address opens another connection.
    retry(&gate, &open(4, V6), 1, &[4; 8], &[]);
    for kind in [LongPacketType::ZeroRtt, LongPacketType::Handshake] {
        let other = to_server(V4, long(kind, 1, &[6; 8], &[], &[], 1200));
        // The gate does not know live connections here, so a Handshake packet may belong to one.
        let want = if kind == LongPacketType::ZeroRtt { refused(Rule::Retry) } else { passed(Pass::Unknown) };
        assert_eq!(reason(&gate, &other), want);
    }
    assert_eq!(gate.statistics().expect("statistics").event(Event::NotAnswered), 0);
    let mut options = open(6, V4);
    options.options = 1;
    assert_eq!(reason(&gate, &options), refused(Rule::Retry));
    assert_eq!(gate.statistics().expect("statistics").event(Event::NotAnswered), 1);
    apply(&gate, PolicyRules { retry_above: None, ..policy() });
    retry(&gate, &open(7, V4), 1, &[7; 8], &[]);
}

/// Checks that packets with a forged source address use up other token buckets than packets of the client that has
/// validated this address.
#[test]
fn packets_from_forged_addresses_use_no_rate_of_the_validated_client() {
    if !root("packets_from_forged_addresses_use_no_rate_of_the_validated_client") {
        return;
    }
    let one_packet = initial(1, &[1; 8], &[], &[]).len() as u64;
    for (rule, client_rates) in [
        (Rule::ClientInitials, Rates { initials: burst(3), ..Rates::default() }),
        (Rule::ClientPackets, Rates { packets: burst(3), ..Rates::default() }),
        (Rule::ClientBytes, Rates { bytes: burst(3 * one_packet), ..Rates::default() }),
    ] {
        let gate = gate(PolicyRules { modes: enforce(&[rule]), client_rates, ..policy() });
        let key = GateKey::new([1; 16]);
        gate.rotate_token_key(key.clone()).expect("a key");
        let index =
            [0, 1].into_iter().find(|&i| gate.token_keys().get(i.into()) == Some(&key)).expect("an index");
        let proved = |n: u8| {
            let mut token = Token::new(V4.parse().expect("an address"), &[7; 8], now()).expect("a token");
            token.retry_id = [n; 8];
            to_server(V4, initial(1, &[n; 8], &[], &token.seal(index, &key, "web")))
        };
        let forged = |n: u8| to_server(V4, initial(1, &[n; 8], &[], &[]));
        for n in 0..6 {
            let want = if n < 3 { passed(Pass::New) } else { refused(rule) };
            assert_eq!(reason(&gate, &forged(n)), want, "{rule:?}");
        }
        for n in 10..16 {
            let want = if n < 13 { passed(Pass::Proved) } else { refused(rule) };
            assert_eq!(reason(&gate, &proved(n)), want, "{rule:?}: no more than anybody");
        }
    }
}

/// Checks that the gate sends no Retry on an interface whose driver strips VLAN tags: without its tag, the Retry would
/// go to another network.
#[test]
fn no_retry_is_sent_where_the_interface_strips_vlan_tags() {
    if !root("no_retry_is_sent_where_the_interface_strips_vlan_tags") {
        return;
    }
    // BPF_PROG_TEST_RUN uses the loopback interface.
    const LOOPBACK: i32 = 1;
    let gate = gate(policy());
    let asked = to_server(V4, initial(1, &[1; 8], &[], &[]));
    let unanswered = || gate.statistics().expect("statistics").event(Event::NotAnswered);
    retry(&gate, &asked, 1, &[1; 8], &[]);
    gate.set_untagged(LOOPBACK, true).expect("set");
    for n in 1..4 {
        assert_eq!(reason(&gate, &asked), refused(Rule::Retry));
        assert_eq!(unanswered(), n);
    }
    assert!(!gate.hides_tags(LOOPBACK).expect("there are no VLANs on it"));
    retry(&gate, &asked, 1, &[1; 8], &[]);
    assert_eq!(unanswered(), 3);
}

/// Checks that a Retry has the same VLAN tags as the Initial that it answers, up to two.
#[test]
fn retry_has_the_vlan_tags_of_the_initial_that_it_answers() {
    if !root("tags") {
        return;
    }
    let gate = gate(policy());
    for tags in [vec![0x8100], vec![0x88a8, 0x8100]] {
        for from in [V4, V6] {
            let mut frame = to_server(from, initial(1, &[1; 8], &[2; 20], &[]));
            frame.tags.clone_from(&tags);
            retry(&gate, &frame, 1, &[1; 8], &[2; 20]);
        }
    }
}
