//! `millrace fanout` as a process, between a sender and receivers in namespaces of their own. Needs root.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod scene;

use millrace_testkit::net;
use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    process::{Command, Stdio},
    time::Duration,
};

use millrace_fanout::{
    message::{ANSWER_BYTES, Ask, REQUEST_BYTES, Refusal, Request, Say},
    rtcp::{Block, receiver_report},
    rtp::Packet,
    token::Token,
};
use millrace_kernel::tc::{self, Hook};
use net::{Capture, RawSender, root};
use nix::sys::signal::Signal;
use scene::{Client, Fanout, NAME, PORT, Scene, Status, media, wait_for, wait_until};

/// Ten packets reach everybody, over both families; who leaves gets no more, the others do.
#[test]
fn who_asks_is_sent_the_same_until_it_leaves() {
    if !root("who_asks_is_sent_the_same_until_it_leaves") {
        return;
    }
    for family in [4, 6] {
        let scene = Scene::new(family);
        let fanout = scene.start("");
        let mut clients: Vec<_> = (0..8).map(|_| scene.client()).collect();
        clients.iter_mut().for_each(|client| client.subscribe(30));
        for sequence in 0..10 {
            let packet = media(sequence, 1000);
            scene.send(&packet);
            clients.iter().for_each(|client| assert_eq!(client.packet(), packet));
        }
        assert_eq!(clients[0].ask(Ask::Unsubscribe), Say::Ended);
        let last = media(10, 1);
        scene.send(&last);
        clients.iter().skip(1).for_each(|client| assert_eq!(client.packet(), last));
        assert!(clients[0].gets_nothing());
        // A packet is counted when all of its copies are on their way.
        let is_counted = |it: &Status| (it.packets["forwarded"], it.streams[0].events["ended"]) == (11, 1);
        let status = wait_until("all to be counted", || fanout.status(), is_counted);
        let stream = &status.streams[0];
        assert_eq!((stream.receivers.len(), stream.packets, stream.ssrc.as_deref()), (7, 11, None));
        assert_eq!((status.packets["forwarded"], status.copies["sent"]), (11, 87));
        assert_eq!((stream.events["tokens"], stream.events["leases"], stream.events["ended"]), (8, 8, 1));
        assert_eq!(stream.events["user_packets"], 0, "all of it in the kernel");
        assert_eq!(fanout.end(Signal::SIGTERM), Some(0));
    }
}

/// Real media, with sender reports in between on ports of their own.
#[test]
fn what_ffmpeg_sends_reaches_all_byte_for_byte_and_in_order() {
    if !root("what_ffmpeg_sends_reaches_all_byte_for_byte_and_in_order") {
        return;
    }
    if Command::new("ffmpeg").arg("-version").stdout(Stdio::null()).status().is_err() {
        println!("SKIP what_ffmpeg_sends_reaches_all_byte_for_byte_and_in_order: needs ffmpeg");
        return;
    }
    for receivers in [1, 8, 32] {
        let scene = Scene::for_ffmpeg();
        let fanout = scene.start(
            "listen-rtcp-port = 5005\nsender-rtcp-port = 6001\nssrc = \"first\"\nmax-per-address = 32\n",
        );
        let mut clients: Vec<_> = (0..receivers).map(|_| scene.client()).collect();
        clients.iter_mut().for_each(|client| client.subscribe(30));
        let capture = Capture::on(scene.sender_namespace(), &scene.sender_interface());
        let url = format!("rtp://{}?localrtpport=6000&localrtcpport=6001&rtcpport=5005", scene.listen);
        let source = ["-re", "-f", "lavfi", "-i", "testsrc2=size=640x360:rate=25", "-t", "2"];
        let coded = ["-c:v", "mpeg2video", "-b:v", "2M", "-f", "rtp", &url];
        let mut ffmpeg = scene.in_sender("ffmpeg");
        let ffmpeg =
            ffmpeg.args(["-v", "error"]).args(source).args(coded).stderr(Stdio::piped()).spawn().unwrap();
        // The fan-out forgets the sender's SSRC some seconds after the last packet.
        let has_sender = |it: &Status| it.streams[0].ssrc.is_some();
        wait_until("the sender's SSRC", || fanout.status(), has_sender);
        let output = ffmpeg.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let sent = scene.sent(&capture);
        let is_report = |payload: &Vec<u8>| matches!(Packet::read(payload), Some(Packet::Control { .. }));
        let reports = sent.iter().filter(|payload| is_report(payload)).count();
        assert!(reports > 0 && sent.len() > 100, "{reports} reports in {} packets", sent.len());
        for client in &clients {
            let got: Vec<_> = sent.iter().map(|_| client.packet()).collect();
            assert!(got == sent, "in order, byte for byte");
            assert!(client.gets_nothing());
        }
        let is_counted = |it: &Status| it.streams[0].packets == sent.len() as u64;
        let stream = &wait_until("all to be counted", || fanout.status(), is_counted).streams[0];
        assert_eq!(stream.events["user_packets"], 0);
    }
}

/// The address of somebody who never asked, in requests with whatever token.
#[test]
fn a_forged_address_gets_less_than_was_sent_in_its_name() {
    if !root("a_forged_address_gets_less_than_was_sent_in_its_name") {
        return;
    }
    let scene = Scene::new(4);
    let fanout = scene.start("");
    let victim = scene.client();
    let capture = Capture::on(scene.receiver_namespace(), &scene.receiver_interface());
    let raw = RawSender::new(scene.sender_namespace(), &scene.sender_interface());
    let to = net::link_address(scene.relay_namespace(), &scene.relay_interface());
    const REQUESTS: usize = 100;
    for number in 0..REQUESTS {
        let token = Token((number as u64).to_be_bytes());
        for what in [Ask::Subscribe { seconds: 30 }, Ask::Unsubscribe] {
            let request = Request { what, token, transaction: 7, stream: NAME.into() };
            raw.send(&net::frame(to, None, (victim.address(), scene.listen), &request.encode()));
        }
        scene.send(&media(number as u16, 1000));
    }
    let is_counted = |it: &Status| {
        let counts = (it.streams[0].events["tokens"], it.packets["forwarded"]);
        counts == (2 * REQUESTS as u64, REQUESTS as u64)
    };
    let status = wait_until("an answer to each", || fanout.status(), is_counted);
    let mut payloads = Vec::new();
    wait_for("an answer", || {
        payloads.extend(capture.frames().iter().filter_map(|frame| scene::payload(frame)));
        !payloads.is_empty()
    });
    assert!(payloads.iter().all(|payload| payload.len() == ANSWER_BYTES), "no media");
    let bytes: usize = payloads.iter().map(|payload| payload.len()).sum();
    assert!(bytes < 2 * REQUESTS * REQUEST_BYTES / 3, "{bytes}");
    assert_eq!((status.streams[0].receivers.len(), status.copies["sent"]), (0, 0));
}

/// Junk, and what is meant as a request and is none, is counted and not answered.
#[test]
fn nobody_is_answered_who_does_not_ask_properly() {
    if !root("nobody_is_answered_who_does_not_ask_properly") {
        return;
    }
    let scene = Scene::new(4);
    let fanout = scene.start("");
    let client = scene.client();
    let good = Request { what: Ask::Unsubscribe, token: Token([9; 8]), transaction: 1, stream: NAME.into() };
    let report = receiver_report(1, &block(1, 0), 0);
    for junk in [&good.encode()[..REQUEST_BYTES - 1], b"MRF1", &[0; 200], &media(1, 100), &report] {
        client.send(junk);
    }
    let is_counted = |it: &Status| {
        let events = &it.streams[0].events;
        (events["malformed"], events["foreign"]) == (2, 3)
    };
    wait_until("a count of each", || fanout.status(), is_counted);
    assert!(client.gets_nothing());
    let other = Request { stream: "other".into(), ..good };
    client.send(&other.encode());
    assert_eq!(client.answer(1).what, Say::Refused { why: Refusal::Unknown, seconds: 0 });
}

/// The kernel looks at the time itself: a process that hangs sends nothing.
#[test]
fn a_lease_that_is_not_renewed_ends_in_the_kernel() {
    if !root("a_lease_that_is_not_renewed_ends_in_the_kernel") {
        return;
    }
    let scene = Scene::new(4);
    let fanout = scene.start("");
    let mut client = scene.client();
    // A busy machine may be late for the lease: then there is another.
    wait_for("a packet within a lease", || {
        client.subscribe(2);
        scene.send(&media(1, 100));
        client.drain() > 0
    });
    fanout.signal(Signal::SIGSTOP);
    wait_for("the end of the lease", || {
        client.drain();
        scene.send(&media(2, 100));
        client.gets_nothing()
    });
    fanout.signal(Signal::SIGCONT);
    let is_over = |it: &Status| it.streams[0].receivers.is_empty();
    wait_until("the end of it in userspace", || fanout.status(), is_over);
    wait_until("copies that the kernel did not send", || fanout.status(), |it| it.copies["ended"] > 0);
    client.subscribe(30);
    scene.send(&media(3, 100));
    assert_eq!(client.packet(), media(3, 100));
    wait_for("a word of it", || fanout.logged("its lease is over"));
}

#[test]
fn a_receiver_gets_no_more_than_its_cap() {
    if !root("a_receiver_gets_no_more_than_its_cap") {
        return;
    }
    let scene = Scene::new(4);
    // A packet of 1000 bytes takes 8 seconds, but for the first 64 KiB.
    let fanout = scene.start("max-kbit-per-s = 1\nburst-kib = 64\n");
    let mut client = scene.client();
    client.subscribe(30);
    for sequence in 0..200 {
        scene.send(&media(sequence, 988));
    }
    let status = wait_until("all packets", || fanout.status(), |it| it.packets["forwarded"] == 200);
    let receiver = &status.streams[0].receivers[0];
    assert!((63..75).contains(&receiver.packets), "{receiver:?}");
    assert_eq!(receiver.dropped["rate"], 200 - receiver.packets);
    let mut got = 0;
    wait_for("all that were sent", || {
        got += client.drain() as u64;
        got >= receiver.packets
    });
    assert_eq!(got + client.drain() as u64, receiver.packets);
    let shown = fanout.succeed(&["status"]);
    assert!(shown.contains("rate "), "{shown}");
}

fn block(highest: u32, fraction_lost: u8) -> Block {
    Block { ssrc: scene::SSRC, fraction_lost, highest, jitter: 0, last_report: 0, delay: 0 }
}

/// One receiver is silent, one reports that half is lost, one that all is well: only that one stays.
#[test]
fn who_does_not_report_or_loses_much_is_cut_off_and_waits() {
    if !root("who_does_not_report_or_loses_much_is_cut_off_and_waits") {
        return;
    }
    let scene = Scene::new(4);
    let fanout = scene.start("report-interval-s = 1\nlease-s = 300\npause-s = 300\n");
    let [mut silent, mut lossy, mut well] = [scene.client(), scene.client(), scene.client()];
    [&mut silent, &mut lossy, &mut well].into_iter().for_each(|client| client.subscribe(300));
    let mut sequence = 0;
    let status = wait_for("two cuts", || {
        for _ in 0..50 {
            sequence += 1;
            scene.send(&media(sequence, 1000));
        }
        lossy.send(&receiver_report(1, &block(sequence.into(), 128), 0));
        well.send(&receiver_report(2, &block(sequence.into(), 0), 0));
        std::thread::sleep(Duration::from_millis(100)); // exact: paces the sender, and reports
        let status = fanout.status();
        if status.streams[0].paused.len() == 2 { Ok(status) } else { Err(status) }
    });
    let stream = &status.streams[0];
    assert_eq!((stream.events["cut_silent"], stream.events["cut_congestion"]), (1, 1));
    assert_eq!(stream.receivers.len(), 1);
    assert_eq!(stream.receivers[0].address, well.address());
    assert!(stream.events["reports_passed"] > 0);
    for client in [&mut silent, &mut lossy] {
        client.drain();
        let Say::Refused { why: Refusal::Cut, seconds } = client.ask(Ask::Subscribe { seconds: 30 }) else {
            panic!("it has to wait")
        };
        assert!((1..=300).contains(&seconds));
    }
    well.drain();
    scene.send(&media(9, 10));
    // Behind what may still have been under way.
    wait_for("what was sent last", || well.packet() == media(9, 10));
    assert!(silent.gets_nothing() && lossy.gets_nothing());
    wait_for("a word of it", || fanout.logged("cut off") && fanout.logged("reason=\"silent\""));
    // What they reported came to the sender, as it was.
    let mut buffer = [0; 2048];
    let len = scene.sender.recv(&mut buffer).unwrap();
    assert!(matches!(Packet::read(&buffer[..len]), Some(Packet::Control { ssrc: 1 | 2, .. })));
}

/// Streams and receivers come, go and change; who stays misses nothing, and gets all of it from the kernel. What cannot be leaves all as it was.
#[test]
fn settings_that_are_read_again_lose_nothing() {
    if !root("settings_that_are_read_again_lose_nothing") {
        return;
    }
    let scene = Scene::new(4);
    let fanout = scene.start("");
    let (mut client, named) = (scene.client(), scene.client());
    client.subscribe(60);
    let mut sequence = 0;
    let mut pass = |client: &Client<'_>| {
        for _ in 0..50 {
            sequence += 1;
            scene.send(&media(sequence, 100));
            assert_eq!(client.packet(), media(sequence, 100));
        }
    };
    pass(&client);
    // One more stream, a named receiver, fewer receivers than there were to be.
    let other = |port: u16, host: IpAddr| {
        format!(
            "[[stream]]\nname = \"other\"\nlisten = \"{}\"\nsender = \"{}:9\"\n",
            SocketAddr::new(host, port),
            scene.listen.ip()
        )
    };
    let name = format!(
        "max-receivers = 2\n[[stream.receiver]]\naddress = \"{}\"\nbreaker = false\n",
        named.address()
    );
    fanout.write(&(scene.config(&name) + &other(5010, scene.listen.ip())));
    assert_eq!(fanout.succeed(&["reload"]), "the settings were read again\n");
    pass(&client);
    wait_for("what the named one gets", || {
        scene.send(&media(9000, 100));
        named.drain() > 0
    });
    client.drain();
    let status = fanout.status(); // exact: the reload was answered
    assert_eq!((status.streams.len(), status.streams[0].receivers.len()), (2, 2));
    // A stream that cannot be: of two new ones the second, and the first is taken back.
    let bad = [
        (
            scene.config("")
                + &other(5012, scene.listen.ip())
                + &other(5014, [192, 0, 2, 9].into()).replace("other", "third"),
            "cannot listen on 192.0.2.9:5014",
        ),
        // In another one's place, by another name, in front of one that cannot be.
        (
            scene.config("").replace("\"live\"", "\"new\"") + &other(5014, [192, 0, 2, 9].into()),
            "cannot listen on 192.0.2.9:5014",
        ),
        (
            scene.config("").replace("interface = [", "interface = [\"lo\", "),
            "interface does not change while it runs",
        ),
        ("nothing".to_owned(), "fanout.toml"),
    ];
    for (config, said) in bad {
        fanout.write(&config);
        let error = fanout.fail(&["reload"]);
        assert!(error.contains(said), "{error}");
        pass(&client);
        assert_eq!(fanout.status().streams.len(), 2); // exact: the reload was answered
        assert!(fanout.succeed(&["status"]).contains("the latest reload failed"));
        assert_eq!(fanout.fetch("/healthz"), (503, "trouble\n".to_owned())); // exact: the reload was answered
    }
    // By a signal; nobody is named any more, and the other stream is gone.
    fanout.write(&scene.config(""));
    fanout.signal(Signal::SIGHUP);
    let is_alone = |it: &Status| it.streams.len() == 1 && it.streams[0].receivers.len() == 1;
    wait_until("the settings of before", || fanout.status(), is_alone);
    wait_until("good health", || fanout.fetch("/healthz"), |health| *health == (200, "ok\n".to_owned()));
    named.drain();
    pass(&client);
    assert!(named.gets_nothing());
    let status = fanout.status(); // exact: all that was sent has come
    assert_eq!(status.streams[0].receivers.len(), 1);
    assert_eq!(status.streams[0].events["user_packets"], 0, "all of it went by the kernel");
    // Another stream arrives where this one did: who wants that has to ask for it.
    fanout.write(&scene.config("").replace("\"live\"", "\"new\""));
    fanout.succeed(&["reload"]);
    scene.send(&media(9001, 100));
    assert!(client.gets_nothing());
    fanout.write(&scene.config(""));
    fanout.succeed(&["reload"]);
    client.subscribe(60);
    pass(&client);
}

/// Whom the operator has named need not ask, and has its breaker only if wanted.
#[test]
fn a_named_receiver_need_not_ask() {
    if !root("a_named_receiver_need_not_ask") {
        return;
    }
    let scene = Scene::new(4);
    let client = scene.client();
    let named = format!(
        "max-receivers = 0\n[[stream.receiver]]\naddress = \"{}\"\nbreaker = false\n",
        client.address()
    );
    let fanout = scene.start(&named);
    let packet = media(1, 500);
    wait_for("a packet, once the link address is known", || {
        scene.send(&packet);
        client.drain() > 0
    });
    assert!(fanout.status().streams[0].receivers[0].pinned); // exact: the settings say so
}

/// While somebody else has taken the program away userspace sends, to the same receivers; each packet goes one way.
#[test]
fn nothing_is_lost_when_the_program_is_detached_under_traffic() {
    if !root("nothing_is_lost_when_the_program_is_detached_under_traffic") {
        return;
    }
    let scene = Scene::new(4);
    let fanout = scene.start("");
    let mut client = scene.client();
    client.subscribe(60);
    let index = net::ifindex(scene.relay_namespace(), &scene.relay_interface());
    let detach = || net::inside(scene.relay_namespace(), || tc::detach_all(index, Hook::Ingress).unwrap());
    let mut got = BTreeSet::new();
    let mut sequence = 0;
    let mut send = || {
        for _ in 0..50 {
            sequence += 1;
            scene.send(&media(sequence, 200));
            assert!(got.insert(client.packet()), "twice");
        }
    };
    for round in 1..=3 {
        send();
        assert_eq!(detach(), 1);
        send();
        let is_back = |it: &Status| it.interfaces[0].reattached == round;
        wait_until("the program again", || fanout.status(), is_back);
    }
    send();
    assert_eq!(got.len(), usize::from(sequence));
    let is_counted = |it: &Status| {
        let counts = it.streams[0].events["user_packets"] + it.packets["forwarded"];
        it.streams[0].packets >= u64::from(sequence) && counts >= u64::from(sequence)
    };
    let status = wait_until("all to be counted", || fanout.status(), is_counted);
    let stream = &status.streams[0];
    assert_eq!(stream.packets, u64::from(sequence), "counted once each");
    assert_eq!(stream.events["user_packets"] + status.packets["forwarded"], u64::from(sequence));
    assert!(stream.events["user_packets"] > 0 && status.packets["forwarded"] > 0);
}

/// However it ends.
#[test]
fn nothing_stays_attached() {
    if !root("nothing_stays_attached") {
        return;
    }
    let scene = Scene::new(4);
    let index = net::ifindex(scene.relay_namespace(), &scene.relay_interface());
    let attached = || net::inside(scene.relay_namespace(), || tc::count(index, Hook::Ingress).unwrap());
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGKILL] {
        let fanout = scene.start("");
        let mut client = scene.client();
        client.subscribe(60);
        assert_eq!(attached(), 1, "{signal}");
        fanout.end(signal);
        wait_until("nothing to be attached", attached, |count| *count == 0);
        scene.send(&media(1, 100));
        assert!(client.gets_nothing());
    }
}

/// XDP is the gate's; both do their work, and each goes on when the other one is killed.
#[test]
fn the_gate_may_guard_the_same_interface() {
    if !root("the_gate_may_guard_the_same_interface") {
        return;
    }
    let scene = Scene::new(4);
    let gate = scene.start_gate();
    let fanout = scene.start("");
    let mut client = scene.client();
    client.subscribe(60);
    scene.send(&media(1, 1000));
    assert_eq!(client.packet(), media(1, 1000));
    gate.end(Signal::SIGKILL);
    scene.send(&media(2, 1000));
    assert_eq!(client.packet(), media(2, 1000));
    let gate = scene.start_gate();
    fanout.end(Signal::SIGKILL);
    let fanout = scene.start("");
    client.subscribe(60);
    scene.send(&media(3, 1000));
    assert_eq!(client.packet(), media(3, 1000));
    drop((gate, fanout));
}

/// `millrace fanout receive` stands in for a player that cannot ask: it is handed the same bytes, and reports are made.
#[test]
fn a_player_is_handed_what_it_cannot_ask_for() {
    if !root("a_player_is_handed_what_it_cannot_ask_for") {
        return;
    }
    let scene = Scene::new(4);
    let fanout = scene.start("report-interval-s = 1\n");
    let player = scene.player();
    let to = player.local_addr().unwrap();
    let mut process = scene
        .in_receiver(env!("CARGO_BIN_EXE_millrace"))
        .args(["fanout", "receive", &format!("--to={to}"), "--lease=3s", &format!("{}/{NAME}", scene.listen)])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("a receiver", || fanout.status(), |it| it.streams[0].receivers.len() == 1);
    let mut sequence = 0;
    let mut buffer = [0; 2048];
    let status = wait_for("ten reports, over some leases", || {
        sequence += 1;
        let packet = media(sequence, 700);
        scene.send(&packet);
        let len = player.recv(&mut buffer).unwrap();
        assert_eq!(buffer[..len], packet);
        std::thread::sleep(Duration::from_millis(50)); // exact: paces the sender
        let status = fanout.status();
        let events = &status.streams[0].events;
        if events["reports"] >= 10 && events["leases"] > 3 { Ok(status) } else { Err(status) }
    });
    let receiver = &status.streams[0].receivers[0];
    assert_eq!(receiver.lost_percent, Some(0.0));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(process.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert!(wait_for("its end", || process.try_wait().unwrap()).success());
    let is_over = |it: &Status| it.streams[0].receivers.is_empty() && it.streams[0].events["ended"] == 1;
    wait_until("its word", || fanout.status(), is_over);
}

/// Status, metrics, and what became of single packets.
#[test]
fn operators_see_what_happens() {
    if !root("operators_see_what_happens") {
        return;
    }
    let scene = Scene::new(4);
    let fanout = scene.start("");
    let mut client = scene.client();
    client.subscribe(60);
    let trace = fanout.begin(&["trace", "--stream", NAME, "--every=2", "--count=3", "--json"]);
    let mut sequence = 0;
    let mut trace = Some(trace);
    let output = wait_for("end of the trace", || {
        sequence += 1;
        scene.send(&media(sequence, 300));
        let process = trace.as_mut()?;
        process.try_wait().unwrap()?;
        Some(trace.take()?.wait_with_output().unwrap())
    });
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3, "{text}");
    for line in &lines {
        assert_eq!((line["outcome"].as_str(), line["stream"].as_str()), (Some("sent"), Some(NAME)));
        assert_eq!(line["receiver"].as_str(), Some(client.address().to_string().as_str()));
        assert_eq!((line["bytes"].as_u64(), line["sequence"].as_u64().unwrap() % 2), (Some(312), 0));
    }
    for line in [
        format!(r#"millrace_fanout_receivers{{stream="{NAME}"}} 1"#),
        format!(r#"millrace_fanout_events_total{{stream="{NAME}",event="leases"}} 1"#),
        format!(r#"millrace_fanout_interfaces{{interface="{}"}} 1"#, scene.relay_interface()),
    ] {
        wait_until(&line, || fanout.get("/metrics"), |metrics| metrics.contains(&line));
    }
    wait_until("good health", || fanout.get("/healthz"), |health| health == "ok\n");
    let shown = fanout.succeed(&["status"]);
    assert!(shown.contains(&client.address().to_string()), "{shown}");
    let said = fanout.fail(&["trace", "--stream", "other"]);
    assert!(said.contains("there is no stream \"other\""), "{said}");
}

/// An interface that is not there, an address of another host: said at the start, with what it is about.
#[test]
fn what_cannot_work_is_said_at_the_start() {
    if !root("what_cannot_work_is_said_at_the_start") {
        return;
    }
    let scene = Scene::new(4);
    let config = scene.config("");
    for (text, said) in [
        (config.replace(&scene.relay_interface(), "nowhere0"), "there is no interface nowhere0"),
        (
            config.replace(
                &scene.listen.to_string(),
                &SocketAddr::new(IpAddr::from([192, 0, 2, 1]), PORT).to_string(),
            ),
            "cannot listen on 192.0.2.1:5004",
        ),
    ] {
        let error = Fanout::fails(&scene, &text);
        assert!(error.contains(said), "{error}");
    }
}
