use super::*;
use crate::token::ReceiverToken;

const SECOND: Duration = Duration::from_secs(1);
const NOW: Duration = Duration::from_secs(1000);

fn limits() -> ReceiverLimits {
    ReceiverLimits {
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

struct ReceiverScene {
    mint: Mint,
    all: StreamReceivers,
    /// The traffic that the test passes for every receiver that sends a request, as if it had been sent to this
    /// receiver.
    sent: ReceiverSent,
}

impl ReceiverScene {
    fn new() -> Self {
        Self {
            mint: Mint::new([7; 32]),
            all: StreamReceivers::new("live", limits()),
            sent: ReceiverSent::default(),
        }
    }

    fn ask(
        &mut self,
        what: ReceiverAction,
        token: ReceiverToken,
        who: SocketAddr,
        now: Duration,
    ) -> (RequestOutcome, Option<Command>) {
        let request = ReceiverRequest { what, token, transaction: 5, stream: "live".into() };
        let (answer, command) = self.all.ask(&self.mint, &request, who, self.sent, now);
        assert_eq!(answer.transaction, 5);
        (answer.what, command)
    }

    /// Sends a request twice, the second time with the token from the first answer, as a receiver with a genuine
    /// address does.
    fn subscribe(
        &mut self,
        who: SocketAddr,
        seconds: u16,
        now: Duration,
    ) -> (RequestOutcome, Option<Command>) {
        let what = ReceiverAction::Subscribe { seconds };
        let (RequestOutcome::Prove(token), None) = self.ask(what, ReceiverToken::default(), who, now) else {
            panic!("no token")
        };
        self.ask(what, token, who, now)
    }
}

#[test]
fn subscription_without_proof_of_address_leaves_no_state() {
    let mut scene = ReceiverScene::new();
    let one = at("192.0.2.1:5000");
    let other = at("192.0.2.2:5000");
    let what = ReceiverAction::Subscribe { seconds: 10 };
    let (RequestOutcome::Prove(token), None) = scene.ask(what, ReceiverToken::default(), one, NOW) else {
        panic!()
    };
    for (who, token) in [(one, ReceiverToken::default()), (other, token), (at("192.0.2.1:5001"), token)] {
        assert!(matches!(scene.ask(what, token, who, NOW), (RequestOutcome::Prove(_), None)), "{who}");
        assert!(
            matches!(
                scene.ask(ReceiverAction::Unsubscribe, token, who, NOW),
                (RequestOutcome::Prove(_), None)
            ),
            "{who}"
        );
    }
    assert!(scene.all.entries.is_empty());
    let (say, command) = scene.ask(what, token, one, NOW);
    assert!(matches!(say, RequestOutcome::Lease { seconds: 10, .. }), "{say:?}");
    assert_eq!(command, Some(Command::Add { who: one, until: NOW + 10 * SECOND }));
    // A forged address without a token ends no lease.
    assert!(matches!(
        scene.ask(ReceiverAction::Unsubscribe, ReceiverToken::default(), one, NOW),
        (RequestOutcome::Prove(_), None)
    ));
    assert!(scene.all.is_leased(one));
}

#[test]
fn receiver_lease_is_renewed_or_expires() {
    let mut scene = ReceiverScene::new();
    let who = at("[2001:db8::1]:5000");
    let (RequestOutcome::Lease { seconds: 30, token }, Some(_)) = scene.subscribe(who, 999, NOW) else {
        panic!("longest")
    };
    let later = NOW + 20 * SECOND;
    let (say, command) = scene.ask(ReceiverAction::Subscribe { seconds: 15 }, token, who, later);
    assert!(matches!(say, RequestOutcome::Lease { seconds: 15, .. }));
    assert_eq!(command, Some(Command::Renew { who, until: later + 15 * SECOND }));
    let none = |_| ReceiverSent::default();
    assert_eq!(scene.all.tick(later + 14 * SECOND, none), []);
    let over = Command::Remove { who, why: RemovalReason::Expired };
    assert_eq!(scene.all.tick(later + 15 * SECOND, none), [over]);
    assert!(!scene.all.is_leased(who));
    assert!(
        matches!(scene.subscribe(who, 0, later), (RequestOutcome::Lease { seconds: 1, .. }, Some(_))),
        "shortest"
    );
}

#[test]
fn unsubscribed_receiver_is_removed() {
    let mut scene = ReceiverScene::new();
    let who = at("192.0.2.1:5000");
    let (RequestOutcome::Lease { token, .. }, _) = scene.subscribe(who, 10, NOW) else { panic!() };
    let gone = Some(Command::Remove { who, why: RemovalReason::Asked });
    assert_eq!(scene.ask(ReceiverAction::Unsubscribe, token, who, NOW), (RequestOutcome::Ended, gone));
    assert_eq!(scene.ask(ReceiverAction::Unsubscribe, token, who, NOW), (RequestOutcome::Ended, None));
}

#[test]
fn number_of_receivers_is_limited() {
    let mut scene = ReceiverScene::new();
    let refused = |why| (RequestOutcome::Refused { why, seconds: 30 }, None);
    for who in ["192.0.2.1:1", "192.0.2.1:65535", "192.0.2.2:1"] {
        assert!(
            matches!(scene.subscribe(at(who), 10, NOW), (RequestOutcome::Lease { .. }, Some(_))),
            "{who}"
        );
    }
    assert_eq!(scene.subscribe(at("192.0.2.1:2"), 10, NOW), refused(RequestRefusal::FullAddress));
    assert!(matches!(scene.subscribe(at("192.0.2.3:1"), 10, NOW), (RequestOutcome::Lease { .. }, Some(_))));
    assert_eq!(scene.subscribe(at("192.0.2.4:1"), 10, NOW), refused(RequestRefusal::Full));
    assert!(
        matches!(scene.subscribe(at("192.0.2.3:1"), 10, NOW), (RequestOutcome::Lease { .. }, Some(_))),
        "renews"
    );
    let other = ReceiverRequest {
        what: ReceiverAction::Subscribe { seconds: 1 },
        token: ReceiverToken::default(),
        transaction: 0,
        stream: "other".into(),
    };
    let (answer, _) = scene.all.ask(&scene.mint, &other, at("192.0.2.9:1"), ReceiverSent::default(), NOW);
    assert_eq!(answer.what, RequestOutcome::Refused { why: RequestRefusal::Unknown, seconds: 0 });
}

/// Clients from many addresses of one network share a multiple of one client's limit, which is less than the stream's.
#[test]
fn number_of_receivers_in_one_network_is_limited() {
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
        let mut scene = ReceiverScene::new();
        scene.all.set_limits(ReceiverLimits { receivers: 10_000, ..limits() });
        let answers = all.iter().map(|who| scene.subscribe(*who, 10, NOW).0);
        assert_eq!(
            answers.filter(|answer| matches!(answer, RequestOutcome::Lease { .. })).count(),
            want,
            "{whose}"
        );
        let other = scene.subscribe(at("[2001:db8:1::1]:1"), 10, NOW).0;
        assert!(matches!(other, RequestOutcome::Lease { .. }), "{whose}: {other:?}");
    }
}

#[test]
fn receiver_that_was_cut_off_waits_before_it_may_return() {
    let mut scene = ReceiverScene::new();
    let who = at("192.0.2.1:5000");
    let (RequestOutcome::Lease { token, .. }, _) = scene.subscribe(who, 30, NOW) else { panic!() };
    let cut = Command::Remove { who, why: RemovalReason::Cut(Trip::Silent) };
    let mut now = NOW;
    let commands: Vec<_> = (1..=6)
        .flat_map(|packets| {
            now += SECOND;
            scene.all.tick(now, |_| ReceiverSent { packets, bytes: 1200 * packets })
        })
        .collect();
    assert_eq!(commands, [cut]);
    assert_eq!(scene.all.paused(now).count(), 1);
    assert_eq!(scene.all.leased().count(), 0);
    let until = now + 60 * SECOND;
    let wait = (RequestOutcome::Refused { why: RequestRefusal::Cut, seconds: 60 }, None);
    assert_eq!(scene.ask(ReceiverAction::Subscribe { seconds: 9 }, token, who, now), wait);
    assert_eq!(
        scene.ask(ReceiverAction::Unsubscribe, token, who, now),
        (RequestOutcome::Ended, None),
        "no way around"
    );
    assert_eq!(scene.ask(ReceiverAction::Subscribe { seconds: 9 }, token, who, now), wait);
    assert_eq!(scene.all.tick(until, |_| ReceiverSent::default()), []);
    assert!(matches!(
        scene.subscribe(who, 9, until),
        (RequestOutcome::Lease { .. }, Some(Command::Add { .. }))
    ));
}

#[test]
fn receiver_is_cut_off_only_by_rtcp_reports_from_its_own_address() {
    let mut scene = ReceiverScene::new();
    let who = at("192.0.2.1:5000");
    scene.subscribe(who, 30, NOW);
    let report = |scene: &mut ReceiverScene, who, second: u32| {
        let heard = ReceiverReport { highest: second, fraction_lost: 128, round_trip: None };
        let sent = ReceiverSent { packets: 1000 * u64::from(second), bytes: 1_200_000 * u64::from(second) };
        scene.all.on_report(who, Some(heard), sent, NOW + second * SECOND)
    };
    for second in 1..20 {
        assert_eq!(report(&mut scene, at("192.0.2.66:5000"), second), None);
    }
    let cut: Vec<_> = (1..=4).filter_map(|second| report(&mut scene, who, second)).collect();
    assert_eq!(cut, [Command::Remove { who, why: RemovalReason::Cut(Trip::Congestion) }]);
    assert_eq!(report(&mut scene, who, 5), None, "it is cut off");
}

#[test]
fn pinned_receiver_needs_no_lease() {
    let mut scene = ReceiverScene::new();
    let plain = at("192.0.2.1:1");
    let judged = at("192.0.2.1:2");
    assert_eq!(scene.all.pin(plain, false), Command::Add { who: plain, until: FOREVER });
    scene.all.pin(judged, true);
    let mut now = NOW;
    let mut commands = Vec::new();
    for packets in 1..=6 {
        now += SECOND;
        commands.extend(scene.all.tick(now, |_| ReceiverSent { packets, bytes: packets }));
    }
    assert_eq!(commands, [Command::Remove { who: judged, why: RemovalReason::Cut(Trip::Silent) }]);
    let again = scene.all.tick(now + 60 * SECOND, |_| ReceiverSent::default());
    assert_eq!(again, [Command::Add { who: judged, until: FOREVER }], "it cannot prove itself");
    // A receiver that the operator has named may also ask for the stream. The relay answers with the receiver's
    // permanent lease.
    assert!(matches!(scene.subscribe(plain, 10, now), (RequestOutcome::Lease { .. }, None)));
    let token = scene.mint.token("live", plain, now.as_secs());
    assert_eq!(scene.ask(ReceiverAction::Unsubscribe, token, plain, now), (RequestOutcome::Ended, None));
    assert!(scene.all.is_leased(plain));
}

/// A receiver that sends no RTCP report, leaves, and returns before three report intervals are over is cut off as if it
/// had stayed. Its time away does not count as time without a report.
#[test]
fn receiver_that_leaves_and_returns_keeps_its_circuit_breaker_state() {
    for leaves in [true, false] {
        let mut scene = ReceiverScene::new();
        let who = at("192.0.2.1:5000");
        let (RequestOutcome::Lease { token, .. }, _) = scene.subscribe(who, 1, NOW) else { panic!() };
        let cut = Command::Remove { who, why: RemovalReason::Cut(Trip::Silent) };
        let mut now = NOW;
        let mut commands = Vec::new();
        let mut stayed = 0;
        while commands.is_empty() {
            // The receiver has a lease for half a second. Then it either leaves for one second, or lets its lease end
            // and returns a second later.
            let packets = |part: u64| ReceiverSent { packets: 10 * part, bytes: 12_000 * part };
            for part in 1..=2 {
                (now, stayed) = (now + SECOND / 4, stayed + 1);
                commands.extend(scene.all.tick(now, |_| packets(part)));
            }
            if !commands.is_empty() {
                break;
            }
            scene.sent = packets(2);
            if leaves {
                let (_, command) = scene.ask(ReceiverAction::Unsubscribe, token, who, now);
                assert_eq!(command, Some(Command::Remove { who, why: RemovalReason::Asked }));
            } else {
                now += SECOND;
                let expired = scene.all.tick(now, |_| packets(2));
                assert_eq!(expired, [Command::Remove { who, why: RemovalReason::Expired }]);
            }
            now += SECOND;
            let (say, command) = scene.ask(ReceiverAction::Subscribe { seconds: 1 }, token, who, now);
            assert!(matches!((say, command), (RequestOutcome::Lease { .. }, Some(Command::Add { .. }))));
        }
        assert_eq!(commands, [cut]);
        // The circuit breaker trips after more than three seconds without an RTCP report, counted from the first tick.
        // Only time with a lease counts, and each lease that ends by itself adds one second.
        let wanted = if leaves { 15..=16 } else { 7..=8 };
        assert!(wanted.contains(&stayed), "after {stayed} quarters of a second there");
    }
}

#[test]
fn receiver_that_unsubscribed_is_forgotten_4_seconds_later() {
    let mut scene = ReceiverScene::new();
    let who = at("192.0.2.1:5000");
    let (RequestOutcome::Lease { token, .. }, _) = scene.subscribe(who, 30, NOW) else { panic!() };
    scene.all.tick(NOW + SECOND, |_| ReceiverSent { packets: 5, bytes: 6000 });
    scene.ask(ReceiverAction::Unsubscribe, token, who, NOW + 2 * SECOND);
    assert_eq!(scene.all.left.len(), 1);
    assert_eq!(scene.all.tick(NOW + 6 * SECOND, |_| ReceiverSent::default()), []);
    assert_eq!(scene.all.left.len(), 0);
}

/// The number of receivers that left and are remembered is limited, per address and in total. They do not reduce the
/// number of present receivers.
#[test]
fn number_of_unsubscribed_receivers_remembered_is_limited() {
    let mut scene = ReceiverScene::new();
    for port in [1, 2] {
        let who = at(&format!("192.0.2.1:{port}"));
        let (RequestOutcome::Lease { token, .. }, _) = scene.subscribe(who, 30, NOW) else { panic!() };
        scene.ask(ReceiverAction::Unsubscribe, token, who, NOW);
    }
    let refused = (RequestOutcome::Refused { why: RequestRefusal::FullAddress, seconds: 30 }, None);
    assert_eq!(scene.subscribe(at("192.0.2.1:3"), 10, NOW), refused);
    assert!(
        matches!(scene.subscribe(at("192.0.2.1:2"), 10, NOW), (RequestOutcome::Lease { .. }, Some(_))),
        "it comes again"
    );
    for host in 2..100 {
        let who = at(&format!("192.0.2.{host}:1"));
        let (RequestOutcome::Lease { token, .. }, Some(_)) = scene.subscribe(who, 10, NOW) else {
            panic!("{who}")
        };
        scene.ask(ReceiverAction::Unsubscribe, token, who, NOW);
        assert!(scene.all.left.len() <= 4);
    }
}

/// Changes the settings at run time: present receivers stay, and the operator adds receivers to the settings and
/// removes them.
#[test]
fn stream_limits_and_receivers_may_change_at_run_time() {
    let mut scene = ReceiverScene::new();
    let one = at("192.0.2.1:5000");
    let other = at("192.0.2.2:5000");
    scene.subscribe(one, 10, NOW);
    scene.all.pin(other, false);
    scene.all.set_limits(ReceiverLimits { receivers: 1, lease: 5 * SECOND, ..limits() });
    assert!(matches!(
        scene.subscribe(one, 10, NOW),
        (RequestOutcome::Lease { seconds: 5, .. }, Some(Command::Renew { .. }))
    ));
    assert!(matches!(scene.subscribe(at("192.0.2.3:1"), 10, NOW), (RequestOutcome::Refused { .. }, None)));
    assert_eq!(scene.all.unpin(one), None, "it has asked");
    assert_eq!(scene.all.unpin(other), Some(Command::Remove { who: other, why: RemovalReason::Unnamed }));
    assert_eq!(scene.all.leased().collect::<Vec<_>>(), [(one, false)]);
}

#[test]
fn receiver_gets_no_lease_if_the_kernel_table_is_full() {
    let mut scene = ReceiverScene::new();
    let who = at("192.0.2.1:5000");
    let (say, Some(Command::Add { .. })) = scene.subscribe(who, 10, NOW) else { panic!() };
    let answer = scene.all.take_back(who, RelayAnswer { what: say, transaction: 5 });
    assert_eq!(
        answer,
        RelayAnswer {
            what: RequestOutcome::Refused { why: RequestRefusal::Full, seconds: 30 },
            transaction: 5
        }
    );
    assert!(!scene.all.is_leased(who));
}
