//! Tests of the process `millrace fanout`, with a sender and receivers in network namespaces of their own. They need
//! root.
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
    message::{ANSWER_BYTES, REQUEST_BYTES, ReceiverAction, ReceiverRequest, RequestOutcome, RequestRefusal},
    rtcp::{Block, receiver_report},
    rtp::DatagramKind,
    token::ReceiverToken,
};
use millrace_kernel::tc::{self, KernelHook};
use net::{PacketCapture, RawSender, root};
use nix::sys::signal::Signal;
use scene::{FanoutProcess, FanoutScene, NAME, PORT, ProtocolClient, Status, media, wait_for, wait_until};

/// Ten packets reach all receivers, over IPv4 and IPv6. A receiver that leaves gets no further packet, while the other
/// receivers get every packet.
#[test]
fn rtp_receiver_gets_the_stream_until_leaving() {
    if !root("rtp_receiver_gets_the_stream_until_leaving") {
        return;
    }
    for family in [4, 6] {
        let scene = FanoutScene::new(family);
        let fanout = scene.start("");
        let mut clients: Vec<_> = (0..8).map(|_| scene.client()).collect();
        clients.iter_mut().for_each(|client| client.subscribe(30));
        for sequence in 0..10 {
            let packet = media(sequence, 1000);
            scene.send(&packet);
            clients.iter().for_each(|client| assert_eq!(client.packet(), packet));
        }
        assert_eq!(clients[0].ask(ReceiverAction::Unsubscribe), RequestOutcome::Ended);
        let last = media(10, 1);
        scene.send(&last);
        clients.iter().skip(1).for_each(|client| assert_eq!(client.packet(), last));
        assert!(clients[0].gets_nothing());
        // A packet is counted when all of its copies have been sent.
        let is_counted = |it: &Status| (it.packets["forwarded"], it.streams[0].events["ended"]) == (11, 1);
        let status = wait_until("all packets to be counted", || fanout.status(), is_counted);
        let stream = &status.streams[0];
        assert_eq!((stream.receivers.len(), stream.packets, stream.ssrc.as_deref()), (7, 11, None));
        assert_eq!((status.packets["forwarded"], status.copies["sent"]), (11, 87));
        assert_eq!((stream.events["tokens"], stream.events["leases"], stream.events["ended"]), (8, 8, 1));
        assert_eq!(stream.events["user_packets"], 0, "not all packets were forwarded by the kernel");
        assert_eq!(fanout.end(Signal::SIGTERM), Some(0));
    }
}

/// The media is made by ffmpeg, with RTCP sender reports on ports of their own.
#[test]
fn media_of_ffmpeg_reaches_all_unchanged_and_in_order() {
    if !root("media_of_ffmpeg_reaches_all_unchanged_and_in_order") {
        return;
    }
    if Command::new("ffmpeg").arg("-version").stdout(Stdio::null()).status().is_err() {
        println!("SKIP media_of_ffmpeg_reaches_all_unchanged_and_in_order: needs ffmpeg");
        return;
    }
    for receivers in [1, 8, 32] {
        let scene = FanoutScene::for_ffmpeg();
        let fanout = scene.start(
            "listen-rtcp-port = 5005\nsender-rtcp-port = 6001\nssrc = \"first\"\nmax-per-address = 32\n",
        );
        let mut clients: Vec<_> = (0..receivers).map(|_| scene.client()).collect();
        clients.iter_mut().for_each(|client| client.subscribe(30));
        let capture = PacketCapture::on(scene.sender_namespace(), &scene.sender_interface());
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
        let is_report =
            |payload: &Vec<u8>| matches!(DatagramKind::read(payload), Some(DatagramKind::Control { .. }));
        let reports = sent.iter().filter(|payload| is_report(payload)).count();
        assert!(reports > 0 && sent.len() > 100, "{reports} reports in {} packets", sent.len());
        for client in &clients {
            let got: Vec<_> = sent.iter().map(|_| client.packet()).collect();
            assert!(got == sent, "the packets differ from those sent");
            assert!(client.gets_nothing());
        }
        let is_counted = |it: &Status| it.streams[0].packets == sent.len() as u64;
        let stream = &wait_until("all packets to be counted", || fanout.status(), is_counted).streams[0];
        assert_eq!(stream.events["user_packets"], 0);
    }
}

/// Forged requests have arbitrary tokens and the address of a host that never sent a request.
#[test]
fn victim_of_forged_requests_receives_less_than_the_forger_sent() {
    if !root("victim_of_forged_requests_receives_less_than_the_forger_sent") {
        return;
    }
    let scene = FanoutScene::new(4);
    let fanout = scene.start("");
    let victim = scene.client();
    let capture = PacketCapture::on(scene.receiver_namespace(), &scene.receiver_interface());
    let raw = RawSender::new(scene.sender_namespace(), &scene.sender_interface());
    let to = net::link_address(scene.relay_namespace(), &scene.relay_interface());
    const REQUESTS: usize = 100;
    for number in 0..REQUESTS {
        let token = ReceiverToken((number as u64).to_be_bytes());
        for what in [ReceiverAction::Subscribe { seconds: 30 }, ReceiverAction::Unsubscribe] {
            let request = ReceiverRequest { what, token, transaction: 7, stream: NAME.into() };
            raw.send(&net::frame(to, None, victim.address(), scene.listen, &request.encode()));
        }
        scene.send(&media(number as u16, 1000));
    }
    let is_counted = |it: &Status| {
        let counts = (it.streams[0].events["tokens"], it.packets["forwarded"]);
        counts == (2 * REQUESTS as u64, REQUESTS as u64)
    };
    let status = wait_until("an answer to each request", || fanout.status(), is_counted);
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

/// Junk and malformed requests are counted and not answered.
#[test]
fn malformed_requests_get_no_answer() {
    if !root("malformed_requests_get_no_answer") {
        return;
    }
    let scene = FanoutScene::new(4);
    let fanout = scene.start("");
    let client = scene.client();
    let good = ReceiverRequest {
        what: ReceiverAction::Unsubscribe,
        token: ReceiverToken([9; 8]),
        transaction: 1,
        stream: NAME.into(),
    };
    let report = receiver_report(1, &block(1, 0), 0);
    for junk in [&good.encode()[..REQUEST_BYTES - 1], b"MRF1", &[0; 200], &media(1, 100), &report] {
        client.send(junk);
    }
    let is_counted = |it: &Status| {
        let events = &it.streams[0].events;
        (events["malformed"], events["foreign"]) == (2, 3)
    };
    wait_until("a count of each request", || fanout.status(), is_counted);
    assert!(client.gets_nothing());
    let other = ReceiverRequest { stream: "other".into(), ..good };
    client.send(&other.encode());
    assert_eq!(client.answer(1).what, RequestOutcome::Refused { why: RequestRefusal::Unknown, seconds: 0 });
}

/// The kernel itself checks when a receiver's lease (the time for which it requested the stream) ends. Even if the
/// fan-out process hangs, nothing is forwarded after the lease.
#[test]
fn kernel_stops_sending_when_the_lease_expires() {
    if !root("kernel_stops_sending_when_the_lease_expires") {
        return;
    }
    let scene = FanoutScene::new(4);
    let fanout = scene.start("");
    let mut client = scene.client();
    // On a busy machine the lease may end before the packet is sent. The client then subscribes again.
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
    wait_until("the end of the lease in userspace", || fanout.status(), is_over);
    wait_until("copies sent by userspace", || fanout.status(), |it| it.copies["ended"] > 0);
    client.subscribe(30);
    scene.send(&media(3, 100));
    assert_eq!(client.packet(), media(3, 100));
    wait_for("the end of the lease in the log", || fanout.logged("the lease has ended"));
}

#[test]
fn sending_rate_to_a_fanout_receiver_is_limited_beyond_its_burst() {
    if !root("sending_rate_to_a_fanout_receiver_is_limited_beyond_its_burst") {
        return;
    }
    let scene = FanoutScene::new(4);
    // The receiver's limit is 1 kbit/s, so a packet of 1000 bytes takes 8 seconds. A burst of 64 KiB is exempt from it.
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
    wait_for("all copies within the receiver's rate", || {
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

/// One receiver sends no reports, one reports half of the packets lost, and one reports no loss. Only the last receiver
/// still gets packets at the end.
#[test]
fn receiver_without_rtcp_reports_or_with_half_loss_is_cut_off() {
    if !root("receiver_without_rtcp_reports_or_with_half_loss_is_cut_off") {
        return;
    }
    let scene = FanoutScene::new(4);
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
        // exact: this pause sets the sending rate of RTP packets and RTCP reports
        std::thread::sleep(Duration::from_millis(100));
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
        let RequestOutcome::Refused { why: RequestRefusal::Cut, seconds } =
            client.ask(ReceiverAction::Subscribe { seconds: 30 })
        else {
            panic!("a receiver that was cut off was admitted at once")
        };
        assert!((1..=300).contains(&seconds));
    }
    well.drain();
    scene.send(&media(9, 10));
    // These packets follow all packets that may still be in flight, so a receiver that gets nothing was cut off.
    wait_for("the last packets", || well.packet() == media(9, 10));
    assert!(silent.gets_nothing() && lossy.gets_nothing());
    wait_for("the log line", || fanout.logged("cut off") && fanout.logged("reason=\"silent\""));
    // The RTP sender gets the receivers' RTCP reports unchanged.
    let mut buffer = [0; 2048];
    let len = scene.sender.recv(&mut buffer).unwrap();
    assert!(matches!(DatagramKind::read(&buffer[..len]), Some(DatagramKind::Control { ssrc: 1 | 2, .. })));
}

/// Reloads add, remove and change streams and receivers. Receivers whose settings do not change get every packet from
/// the kernel. Invalid settings change nothing.
#[test]
fn fanout_reload_loses_no_packet_of_unchanged_receivers() {
    if !root("fanout_reload_loses_no_packet_of_unchanged_receivers") {
        return;
    }
    let scene = FanoutScene::new(4);
    let fanout = scene.start("");
    let mut client = scene.client();
    let named = scene.client();
    client.subscribe(60);
    let mut sequence = 0;
    let mut pass = |client: &ProtocolClient<'_>| {
        for _ in 0..50 {
            sequence += 1;
            scene.send(&media(sequence, 100));
            assert_eq!(client.packet(), media(sequence, 100));
        }
    };
    pass(&client);
    // The new settings add a stream, name one receiver, and lower the largest number of receivers.
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
    wait_for("the packets of the named receiver", || {
        scene.send(&media(9000, 100));
        named.drain() > 0
    });
    client.drain();
    // exact: the reload command has returned, so the lists of streams and receivers are final
    let status = fanout.status();
    assert_eq!((status.streams.len(), status.streams[0].receivers.len()), (2, 2));
    // The second of two new streams is invalid, so the first is removed again.
    let bad = [
        (
            scene.config("")
                + &other(5012, scene.listen.ip())
                + &other(5014, [192, 0, 2, 9].into()).replace("other", "third"),
            "cannot listen on 192.0.2.9:5014",
        ),
        // These settings rename the stream, and list an invalid stream after it.
        (
            scene.config("").replace("\"live\"", "\"new\"") + &other(5014, [192, 0, 2, 9].into()),
            "cannot listen on 192.0.2.9:5014",
        ),
        (
            scene.config("").replace("interface = [", "interface = [\"lo\", "),
            "interface: it cannot change while the daemon runs",
        ),
        ("nothing".to_owned(), "fanout.toml"),
    ];
    for (config, said) in bad {
        fanout.write(&config);
        let error = fanout.fail(&["reload"]);
        assert!(error.contains(said), "{error}");
        pass(&client);
        // exact: the failed reload command has returned, so the number of streams is final
        assert_eq!(fanout.status().streams.len(), 2);
        assert!(fanout.succeed(&["status"]).contains("the latest reload failed"));
        // exact: the failed reload command has returned, so the daemon's health is final
        assert_eq!(fanout.fetch("/healthz"), (503, "trouble\n".to_owned()));
    }
    // The settings are reloaded by a signal; they no longer name a receiver, and no longer have the second stream.
    fanout.write(&scene.config(""));
    fanout.signal(Signal::SIGHUP);
    let is_alone = |it: &Status| it.streams.len() == 1 && it.streams[0].receivers.len() == 1;
    wait_until("the previous settings", || fanout.status(), is_alone);
    wait_until("good health", || fanout.fetch("/healthz"), |health| *health == (200, "ok\n".to_owned()));
    named.drain();
    pass(&client);
    assert!(named.gets_nothing());
    // exact: the counts of receivers and packets are final, since all sent packets have arrived
    let status = fanout.status();
    assert_eq!(status.streams[0].receivers.len(), 1);
    assert_eq!(status.streams[0].events["user_packets"], 0, "not all packets were forwarded by the kernel");
    // Another stream arrives at the same port, so its receivers must send requests of their own.
    fanout.write(&scene.config("").replace("\"live\"", "\"new\""));
    fanout.succeed(&["reload"]);
    scene.send(&media(9001, 100));
    assert!(client.gets_nothing());
    fanout.write(&scene.config(""));
    fanout.succeed(&["reload"]);
    client.subscribe(60);
    pass(&client);
}

/// A receiver named in the settings needs no request. It is cut off for loss only if the settings say so.
#[test]
fn receiver_named_in_the_settings_needs_no_request() {
    if !root("receiver_named_in_the_settings_needs_no_request") {
        return;
    }
    let scene = FanoutScene::new(4);
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
    // exact: `pinned` is set from the start for a receiver that the settings name
    assert!(fanout.status().streams[0].receivers[0].pinned);
}

/// While the fan-out's BPF program is detached, the userspace process sends to the same receivers. Each packet is sent
/// either by the kernel or by userspace.
#[test]
fn userspace_sends_all_packets_while_fanout_bpf_program_is_detached() {
    if !root("userspace_sends_all_packets_while_fanout_bpf_program_is_detached") {
        return;
    }
    let scene = FanoutScene::new(4);
    let fanout = scene.start("");
    let mut client = scene.client();
    client.subscribe(60);
    let index = net::ifindex(scene.relay_namespace(), &scene.relay_interface());
    let detach =
        || net::inside(scene.relay_namespace(), || tc::detach_all(index, KernelHook::Ingress).unwrap());
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
        wait_until("the program to be attached again", || fanout.status(), is_back);
    }
    send();
    assert_eq!(got.len(), usize::from(sequence));
    let is_counted = |it: &Status| {
        let counts = it.streams[0].events["user_packets"] + it.packets["forwarded"];
        it.streams[0].packets >= u64::from(sequence) && counts >= u64::from(sequence)
    };
    let status = wait_until("all packets to be counted", || fanout.status(), is_counted);
    let stream = &status.streams[0];
    assert_eq!(stream.packets, u64::from(sequence), "a packet was not counted exactly once");
    assert_eq!(stream.events["user_packets"] + status.packets["forwarded"], u64::from(sequence));
    assert!(stream.events["user_packets"] > 0 && status.packets["forwarded"] > 0);
}

/// However the fan-out's process ends, by SIGTERM, SIGINT or SIGKILL, its BPF program must be detached.
#[test]
fn ended_fanout_leaves_nothing_attached() {
    if !root("ended_fanout_leaves_nothing_attached") {
        return;
    }
    let scene = FanoutScene::new(4);
    let index = net::ifindex(scene.relay_namespace(), &scene.relay_interface());
    let attached = || net::inside(scene.relay_namespace(), || tc::count(index, KernelHook::Ingress).unwrap());
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGKILL] {
        let fanout = scene.start("");
        let mut client = scene.client();
        client.subscribe(60);
        assert_eq!(attached(), 1, "{signal}");
        fanout.end(signal);
        wait_until("the program to be detached", attached, |count| *count == 0);
        scene.send(&media(1, 100));
        assert!(client.gets_nothing());
    }
}

/// The gate owns the interface's XDP hook. Gate and fan-out both work, and each continues when the other one is killed.
#[test]
fn gate_and_fan_out_share_an_interface() {
    if !root("gate_and_fan_out_share_an_interface") {
        return;
    }
    let scene = FanoutScene::new(4);
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

/// `millrace fanout receive` sends requests and reception reports for a player that cannot send them. The player gets
/// each RTP packet unchanged.
#[test]
fn receive_command_passes_the_stream_to_a_player() {
    if !root("receive_command_passes_the_stream_to_a_player") {
        return;
    }
    let scene = FanoutScene::new(4);
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
        // exact: this pause between two packets sets the sending rate
        std::thread::sleep(Duration::from_millis(50));
        let status = fanout.status();
        let events = &status.streams[0].events;
        if events["reports"] >= 10 && events["leases"] > 3 { Ok(status) } else { Err(status) }
    });
    let receiver = &status.streams[0].receivers[0];
    assert_eq!(receiver.lost_percent, Some(0.0));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(process.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert!(wait_for("its end", || process.try_wait().unwrap()).success());
    let is_over = |it: &Status| it.streams[0].receivers.is_empty() && it.streams[0].events["ended"] == 1;
    wait_until("its log line", || fanout.status(), is_over);
}

/// Status, metrics and traces must show the same packets that the test has sent.
#[test]
fn status_metrics_and_trace_show_the_traffic() {
    if !root("status_metrics_and_trace_show_the_traffic") {
        return;
    }
    let scene = FanoutScene::new(4);
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
    assert!(said.contains("no stream is called \"other\""), "{said}");
}

/// The settings name an interface that does not exist, or the address of another host. The error at start-up must name
/// it.
#[test]
fn invalid_settings_fail_at_the_start() {
    if !root("invalid_settings_fail_at_the_start") {
        return;
    }
    let scene = FanoutScene::new(4);
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
        let error = FanoutProcess::fails(&scene, &text);
        assert!(error.contains(said), "{error}");
    }
}
