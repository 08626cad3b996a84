use super::*;
use crate::token::Token;

const SECOND: Duration = Duration::from_secs(1);
const NOW: Duration = Duration::from_secs(1000);

fn limits() -> Limits {
    Limits {
        receivers: 4,
        per_address: 2,
        lease: 30 * SECOND,
        pause: 60 * SECOND,
        breaker: Some(breaker::Settings { interval: SECOND }),
    }
}

fn at(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

struct Scene {
    mint: Mint,
    all: Receivers,
    /// To whoever asks.
    sent: Sent,
}

impl Scene {
    fn new() -> Self {
        Self { mint: Mint::new([7; 32]), all: Receivers::new("live", limits()), sent: Sent::default() }
    }

    fn ask(&mut self, what: Ask, token: Token, who: SocketAddr, now: Duration) -> (Say, Option<Command>) {
        let request = Request { what, token, transaction: 5, stream: "live".into() };
        let (answer, command) = self.all.ask(&self.mint, &request, who, self.sent, now);
        assert_eq!(answer.transaction, 5);
        (answer.what, command)
    }

    /// By whoever hears the answers.
    fn subscribe(&mut self, who: SocketAddr, seconds: u16, now: Duration) -> (Say, Option<Command>) {
        let what = Ask::Subscribe { seconds };
        let (Say::Prove(token), None) = self.ask(what, Token::default(), who, now) else {
            panic!("no token")
        };
        self.ask(what, token, who, now)
    }
}

#[test]
fn without_proof_nothing_is_kept() {
    let mut scene = Scene::new();
    let (one, other) = (at("192.0.2.1:5000"), at("192.0.2.2:5000"));
    let what = Ask::Subscribe { seconds: 10 };
    let (Say::Prove(token), None) = scene.ask(what, Token::default(), one, NOW) else { panic!() };
    for (who, token) in [(one, Token::default()), (other, token), (at("192.0.2.1:5001"), token)] {
        assert!(matches!(scene.ask(what, token, who, NOW), (Say::Prove(_), None)), "{who}");
        assert!(matches!(scene.ask(Ask::Unsubscribe, token, who, NOW), (Say::Prove(_), None)), "{who}");
    }
    assert!(scene.all.entries.is_empty());
    let (say, command) = scene.ask(what, token, one, NOW);
    assert!(matches!(say, Say::Lease { seconds: 10, .. }), "{say:?}");
    assert_eq!(command, Some(Command::Add { who: one, until: NOW + 10 * SECOND }));
    // Who forges the address of a receiver ends nothing.
    assert!(matches!(scene.ask(Ask::Unsubscribe, Token::default(), one, NOW), (Say::Prove(_), None)));
    assert!(scene.all.is_leased(one));
}

#[test]
fn a_lease_is_renewed_or_ends() {
    let mut scene = Scene::new();
    let who = at("[2001:db8::1]:5000");
    let (Say::Lease { seconds: 30, token }, Some(_)) = scene.subscribe(who, 999, NOW) else {
        panic!("longest")
    };
    let later = NOW + 20 * SECOND;
    let (say, command) = scene.ask(Ask::Subscribe { seconds: 15 }, token, who, later);
    assert!(matches!(say, Say::Lease { seconds: 15, .. }));
    assert_eq!(command, Some(Command::Renew { who, until: later + 15 * SECOND }));
    let none = |_| Sent::default();
    assert_eq!(scene.all.tick(later + 14 * SECOND, none), []);
    let over = Command::Remove { who, why: Why::Expired };
    assert_eq!(scene.all.tick(later + 15 * SECOND, none), [over]);
    assert!(!scene.all.is_leased(who));
    assert!(matches!(scene.subscribe(who, 0, later), (Say::Lease { seconds: 1, .. }, Some(_))), "shortest");
}

#[test]
fn who_unsubscribes_is_gone() {
    let mut scene = Scene::new();
    let who = at("192.0.2.1:5000");
    let (Say::Lease { token, .. }, _) = scene.subscribe(who, 10, NOW) else { panic!() };
    let gone = Some(Command::Remove { who, why: Why::Asked });
    assert_eq!(scene.ask(Ask::Unsubscribe, token, who, NOW), (Say::Ended, gone));
    assert_eq!(scene.ask(Ask::Unsubscribe, token, who, NOW), (Say::Ended, None));
}

#[test]
fn receivers_are_bounded() {
    let mut scene = Scene::new();
    let refused = |why| (Say::Refused { why, seconds: 30 }, None);
    for who in ["192.0.2.1:1", "192.0.2.1:65535", "192.0.2.2:1"] {
        assert!(matches!(scene.subscribe(at(who), 10, NOW), (Say::Lease { .. }, Some(_))), "{who}");
    }
    assert_eq!(scene.subscribe(at("192.0.2.1:2"), 10, NOW), refused(Refusal::FullAddress));
    assert!(matches!(scene.subscribe(at("192.0.2.3:1"), 10, NOW), (Say::Lease { .. }, Some(_))));
    assert_eq!(scene.subscribe(at("192.0.2.4:1"), 10, NOW), refused(Refusal::Full));
    assert!(matches!(scene.subscribe(at("192.0.2.3:1"), 10, NOW), (Say::Lease { .. }, Some(_))), "renews");
    let other = Request {
        what: Ask::Subscribe { seconds: 1 },
        token: Token::default(),
        transaction: 0,
        stream: "other".into(),
    };
    let (answer, _) = scene.all.ask(&scene.mint, &other, at("192.0.2.9:1"), Sent::default(), NOW);
    assert_eq!(answer.what, Say::Refused { why: Refusal::Unknown, seconds: 0 });
}

/// Whoever has many addresses of a network gets a multiple of one client's, and not all.
#[test]
fn networks_are_bounded() {
    let addresses = |text: &str, count: u32| -> Vec<SocketAddr> {
        (0..count).map(|n| at(&text.replace("N", &format!("{n:x}")))).collect()
    };
    let v4 = (0..200).map(|n| at(&format!("[::ffff:192.0.2.{n}]:1"))).collect();
    let table = [
        ("a /64", addresses("[2001:db8:0:1::N]:1", 300), 2),
        ("a /56", addresses("[2001:db8:0:N::1]:1", 256), 16),
        ("a /48", addresses("[2001:db8:0:N::1]:1", 3000), 128),
        ("a /24", v4, 16),
    ];
    for (whose, all, want) in table {
        let mut scene = Scene::new();
        scene.all.set_limits(Limits { receivers: 10_000, ..limits() });
        let answers = all.iter().map(|who| scene.subscribe(*who, 10, NOW).0);
        assert_eq!(answers.filter(|answer| matches!(answer, Say::Lease { .. })).count(), want, "{whose}");
        let other = scene.subscribe(at("[2001:db8:1::1]:1"), 10, NOW).0;
        assert!(matches!(other, Say::Lease { .. }), "{whose}: {other:?}");
    }
}

#[test]
fn who_is_cut_off_waits() {
    let mut scene = Scene::new();
    let who = at("192.0.2.1:5000");
    let (Say::Lease { token, .. }, _) = scene.subscribe(who, 30, NOW) else { panic!() };
    let cut = Command::Remove { who, why: Why::Cut(Trip::Silent) };
    let mut now = NOW;
    let commands: Vec<_> = (1..=6)
        .flat_map(|packets| {
            now += SECOND;
            scene.all.tick(now, |_| Sent { packets, bytes: 1200 * packets })
        })
        .collect();
    assert_eq!(commands, [cut]);
    assert_eq!(scene.all.paused(now).count(), 1);
    assert_eq!(scene.all.leased().count(), 0);
    let until = now + 60 * SECOND;
    let wait = (Say::Refused { why: Refusal::Cut, seconds: 60 }, None);
    assert_eq!(scene.ask(Ask::Subscribe { seconds: 9 }, token, who, now), wait);
    assert_eq!(scene.ask(Ask::Unsubscribe, token, who, now), (Say::Ended, None), "no way around");
    assert_eq!(scene.ask(Ask::Subscribe { seconds: 9 }, token, who, now), wait);
    assert_eq!(scene.all.tick(until, |_| Sent::default()), []);
    assert!(matches!(scene.subscribe(who, 9, until), (Say::Lease { .. }, Some(Command::Add { .. }))));
}

#[test]
fn loss_cuts_off_and_reports_of_others_do_not() {
    let mut scene = Scene::new();
    let who = at("192.0.2.1:5000");
    scene.subscribe(who, 30, NOW);
    let report = |scene: &mut Scene, who, second: u32| {
        let heard = Heard { highest: second, fraction_lost: 128, round_trip: None };
        let sent = Sent { packets: 1000 * u64::from(second), bytes: 1_200_000 * u64::from(second) };
        scene.all.heard(who, Some(heard), sent, NOW + second * SECOND)
    };
    for second in 1..20 {
        assert_eq!(report(&mut scene, at("192.0.2.66:5000"), second), None);
    }
    let cut: Vec<_> = (1..=4).filter_map(|second| report(&mut scene, who, second)).collect();
    assert_eq!(cut, [Command::Remove { who, why: Why::Cut(Trip::Congestion) }]);
    assert_eq!(report(&mut scene, who, 5), None, "it is cut off");
}

#[test]
fn whom_an_operator_has_named_stays() {
    let mut scene = Scene::new();
    let (plain, judged) = (at("192.0.2.1:1"), at("192.0.2.1:2"));
    assert_eq!(scene.all.pin(plain, false), Command::Add { who: plain, until: FOREVER });
    scene.all.pin(judged, true);
    let mut now = NOW;
    let mut commands = Vec::new();
    for packets in 1..=6 {
        now += SECOND;
        commands.extend(scene.all.tick(now, |_| Sent { packets, bytes: packets }));
    }
    assert_eq!(commands, [Command::Remove { who: judged, why: Why::Cut(Trip::Silent) }]);
    let again = scene.all.tick(now + 60 * SECOND, |_| Sent::default());
    assert_eq!(again, [Command::Add { who: judged, until: FOREVER }], "it cannot prove itself");
    // It may ask, and gets what it has.
    assert!(matches!(scene.subscribe(plain, 10, now), (Say::Lease { .. }, None)));
    let token = scene.mint.token("live", plain, now.as_secs());
    assert_eq!(scene.ask(Ask::Unsubscribe, token, plain, now), (Say::Ended, None));
    assert!(scene.all.is_leased(plain));
}

/// A receiver that reports nothing, and leaves and comes again before three intervals are over: it is cut off as if it had stayed. Its time
/// away is none in which it was silent.
#[test]
fn who_comes_again_is_judged_as_before() {
    for leaves in [true, false] {
        let mut scene = Scene::new();
        let who = at("192.0.2.1:5000");
        let (Say::Lease { token, .. }, _) = scene.subscribe(who, 1, NOW) else { panic!() };
        let cut = Command::Remove { who, why: Why::Cut(Trip::Silent) };
        let (mut now, mut commands, mut stayed) = (NOW, Vec::new(), 0);
        while commands.is_empty() {
            // Half a second there, one away; or the lease ends by itself.
            let packets = |part: u64| Sent { packets: 10 * part, bytes: 12_000 * part };
            for part in 1..=2 {
                (now, stayed) = (now + SECOND / 4, stayed + 1);
                commands.extend(scene.all.tick(now, |_| packets(part)));
            }
            if !commands.is_empty() {
                break;
            }
            scene.sent = packets(2);
            if leaves {
                let (_, command) = scene.ask(Ask::Unsubscribe, token, who, now);
                assert_eq!(command, Some(Command::Remove { who, why: Why::Asked }));
            } else {
                now += SECOND;
                let expired = scene.all.tick(now, |_| packets(2));
                assert_eq!(expired, [Command::Remove { who, why: Why::Expired }]);
            }
            now += SECOND;
            let (say, command) = scene.ask(Ask::Subscribe { seconds: 1 }, token, who, now);
            assert!(matches!((say, command), (Say::Lease { .. }, Some(Command::Add { .. }))));
        }
        assert_eq!(commands, [cut]);
        // The first tick begins the count, and more than three seconds there trip it; a second more each time where the lease ends.
        let wanted = if leaves { 15..=16 } else { 7..=8 };
        assert!(wanted.contains(&stayed), "after {stayed} quarters of a second there");
    }
}

#[test]
fn who_stays_away_begins_anew_and_is_forgotten() {
    let mut scene = Scene::new();
    let who = at("192.0.2.1:5000");
    let (Say::Lease { token, .. }, _) = scene.subscribe(who, 30, NOW) else { panic!() };
    scene.all.tick(NOW + SECOND, |_| Sent { packets: 5, bytes: 6000 });
    scene.ask(Ask::Unsubscribe, token, who, NOW + 2 * SECOND);
    assert_eq!(scene.all.left.len(), 1);
    assert_eq!(scene.all.tick(NOW + 6 * SECOND, |_| Sent::default()), []);
    assert_eq!(scene.all.left.len(), 0);
}

/// What is remembered of those who left is bounded, by address and in all, and takes no place of others.
#[test]
fn who_leaves_counts_for_its_address_alone() {
    let mut scene = Scene::new();
    for port in [1, 2] {
        let who = at(&format!("192.0.2.1:{port}"));
        let (Say::Lease { token, .. }, _) = scene.subscribe(who, 30, NOW) else { panic!() };
        scene.ask(Ask::Unsubscribe, token, who, NOW);
    }
    let refused = (Say::Refused { why: Refusal::FullAddress, seconds: 30 }, None);
    assert_eq!(scene.subscribe(at("192.0.2.1:3"), 10, NOW), refused);
    assert!(
        matches!(scene.subscribe(at("192.0.2.1:2"), 10, NOW), (Say::Lease { .. }, Some(_))),
        "it comes again"
    );
    for host in 2..100 {
        let who = at(&format!("192.0.2.{host}:1"));
        let (Say::Lease { token, .. }, Some(_)) = scene.subscribe(who, 10, NOW) else { panic!("{who}") };
        scene.ask(Ask::Unsubscribe, token, who, NOW);
        assert!(scene.all.left.len() <= 4);
    }
}

/// By settings that are new: who is there stays, whoever is named or not named any more.
#[test]
fn limits_and_names_may_change() {
    let mut scene = Scene::new();
    let (one, other) = (at("192.0.2.1:5000"), at("192.0.2.2:5000"));
    scene.subscribe(one, 10, NOW);
    scene.all.pin(other, false);
    scene.all.set_limits(Limits { receivers: 1, lease: 5 * SECOND, ..limits() });
    assert!(matches!(
        scene.subscribe(one, 10, NOW),
        (Say::Lease { seconds: 5, .. }, Some(Command::Renew { .. }))
    ));
    assert!(matches!(scene.subscribe(at("192.0.2.3:1"), 10, NOW), (Say::Refused { .. }, None)));
    assert_eq!(scene.all.unpin(one), None, "it has asked");
    assert_eq!(scene.all.unpin(other), Some(Command::Remove { who: other, why: Why::Unnamed }));
    assert_eq!(scene.all.leased().collect::<Vec<_>>(), [(one, false)]);
}

#[test]
fn a_lease_that_the_kernel_has_no_room_for_is_none() {
    let mut scene = Scene::new();
    let who = at("192.0.2.1:5000");
    let (say, Some(Command::Add { .. })) = scene.subscribe(who, 10, NOW) else { panic!() };
    let answer = scene.all.take_back(who, Answer { what: say, transaction: 5 });
    assert_eq!(answer, Answer { what: Say::Refused { why: Refusal::Full, seconds: 30 }, transaction: 5 });
    assert!(!scene.all.is_leased(who));
}
