//! Tests of message sessions with different addresses, ciphers and grafts. Other tests end a session because the
//! watchdog process, a daemon, an address or the agreement between the daemons is gone.

use std::{process::Command, thread};

use millrace_messages::{Error, Received, SessionEvent, SessionRefusal, Want};
use nix::sys::signal::{Signal, kill};

use crate::{
    messages::{
        GRAFTS, InterfaceCapture, MessageHost, asks, event, hosts, message, pair, raw, wait_for_keys,
    },
    site::{CLIENT, CLIENT6, GraftSite, SERVER, SERVER6, wait_for, wait_until},
    streams::IN_ORDER,
};

const SECRET: &[u8] = b"what nobody else is to read";

/// Returns settings of two grafts: Selective Repeat and Go-Back-N.
fn grafts() -> String {
    format!("{GRAFTS}{IN_ORDER}")
}

/// Starts both daemons. Each has one peer, whose entry in the settings contains the lines in `more`.
fn hosts_with<'a>(
    site: &'a GraftSite,
    grafts: [&str; 2],
    addresses: [&str; 2],
    more: &str,
) -> [MessageHost<'a>; 2] {
    let hosts = [0, 1].map(|side| {
        let local = addresses[side];
        let remote = addresses[1 - side];
        let peer = format!("{}ports = \"41000-41006\"\n{more}", crate::site::peer(local, remote));
        MessageHost::start_with(site, side, &format!("{}\n{peer}", grafts[side]))
    });
    hosts.iter().for_each(wait_for_keys);
    hosts
}

#[test]
fn messages_pass_over_ipv4_and_ipv6_encrypted_and_in_clear() {
    let table = [
        ([CLIENT, SERVER], "clear = true", "clear"),
        ([CLIENT, SERVER], "cipher = \"aes-128-gcm\"", "aes-128-gcm"),
        ([CLIENT6, SERVER6], "", "chacha20-poly1305"),
        ([CLIENT6, SERVER6], "clear = true", "clear"),
        ([CLIENT6, SERVER6], "cipher = \"aes-128-gcm\"", "aes-128-gcm"),
    ];
    for (at, (addresses, more, sealed)) in table.into_iter().enumerate() {
        let Some(site) = GraftSite::new(&format!("kinds{at}")) else { return };
        let [near_host, _far_host] = hosts_with(&site, [&grafts(); 2], addresses, more);
        // exact: the settings fix the cipher of each session before the daemon's start is complete
        let status = near_host.status();
        assert!(status.sessions.iter().all(|session| session.sealed == sealed), "{status:?}");
        let capture = InterfaceCapture::new(&site, 0);
        for service in ["reliability", "order"] {
            let (mut near, mut far) = pair(&site, &[service]);
            let agreed = near.agreed().unwrap().clone();
            assert_eq!(agreed.is_sealed, sealed != "clear");
            assert!(agreed.local.contains(addresses[0]), "{agreed:?}");
            near.send(SECRET).unwrap();
            assert_eq!(message(&mut far), SECRET);
            // More datagrams than fit into a window are sent, in both directions at the same time.
            let long: Vec<u8> = (0..300_000).map(|at: u32| (at % 251) as u8).collect();
            let sent = long.clone();
            let sender = thread::spawn(move || {
                near.send(&sent).unwrap();
                near
            });
            // The peer sends another text than this host, since the capture sees received packets only after XDP has
            // decrypted them.
            far.send(b"and back").unwrap();
            assert!(message(&mut far) == long, "{more} {service}");
            let mut near = sender.join().unwrap();
            assert_eq!(message(&mut near), b"and back");
        }
        let (all, clear) = capture.count(SECRET);
        assert!(all > 0 && (clear > 0) == (sealed == "clear"), "{sealed}: {clear} of {all} in clear");
    }
}

/// Selective Repeat delivers messages out of order, so the library delays a message until all messages before it have
/// arrived. The interface's queue is too short for a window, so many packets are lost and sent again.
#[test]
fn library_orders_messages_when_selective_repeat_delivers_out_of_order() {
    const SENT: u32 = 1000;
    let Some(site) = GraftSite::new("order") else { return };
    let [near_host, _far_host] = hosts_with(&site, [&grafts(); 2], [CLIENT, SERVER], "");
    let (mut near, mut far) = pair(&site, &["order", "reliability"]);
    for session in [&mut near, &mut far] {
        let agreed = session.agreed().unwrap();
        assert_eq!(agreed.graft, "selective");
        assert!(agreed.in_order && agreed.services.iter().any(|service| service == "order"), "{agreed:?}");
    }
    let tc = |arguments: &str| crate::site::ip(&format!("netns exec {} tc {arguments}", site.namespaces[0]));
    tc("qdisc add dev eth root tbf rate 20mbit burst 8k limit 20k");
    let written = |number: u32| -> Vec<u8> {
        let length = (number as usize * 7919) % 3500;
        number.to_be_bytes().into_iter().chain((0..length).map(|at| (at as u32 ^ number) as u8)).collect()
    };
    let sender = thread::spawn(move || {
        (0..SENT).for_each(|number| near.send(&written(number)).unwrap());
        near
    });
    for number in 0..SENT {
        assert!(message(&mut far) == written(number), "message {number}");
        if number < 50 {
            far.send(&written(number)).unwrap();
        }
    }
    let mut near = sender.join().unwrap();
    (0..50).for_each(|number| assert!(message(&mut near) == written(number), "message {number} back"));
    near.finish().unwrap();
    assert_eq!(far.receive().unwrap(), Received::Finished);
    // exact: all messages have arrived, so retransmissions of lost packets are already counted
    let resent: u64 = near_host.status().sessions.iter().filter_map(|it| it.packets.get("resent")).sum();
    assert!(resent > 0, "no packet was lost, so retransmission was not tested");
    // The service `order` cannot be added to an open session.
    let (mut near, _far) = pair(&site, &["reliability"]);
    near.renegotiate(Want { services: ["order".to_owned()].into(), ..Want::default() }).unwrap();
    let refused = event(&mut near, |event| {
        matches!(event, SessionEvent::Refused { .. } | SessionEvent::Changed { .. })
    });
    let is_told = matches!(&refused, SessionEvent::Refused { reason, .. } if reason.contains("from a session's first one on"));
    assert!(is_told, "{refused:?}");
}

/// The two hosts' settings of the graft `fec` (forward error correction) have different numbers of parity packets. The
/// session must be refused with a reason.
#[test]
fn different_parity_settings_are_refused_with_a_reason() {
    let Some(site) = GraftSite::new("parity") else { return };
    let grafts = [2, 3].map(|parity| {
        format!(
            "[sessions]\ninterface = [\"eth\"]\n[sessions.parameters.fec]\nparity = {parity}\n\
             [[graft]]\nname = \"parity\"\nfunctions = [\"number\", \"fec\"]\n"
        )
    });
    let [near_host, _far] = hosts_with(&site, [&grafts[0], &grafts[1]], [CLIENT, SERVER], "");
    let _listener = asks(&site, 1, "test").listen().unwrap();
    let refused = asks(&site, 0, "test").service("recovery").initiate().expect_err("another parity");
    let is_told = matches!(&refused, Error::Refused { why: SessionRefusal::Unreachable, reason } if reason.contains("parity"));
    assert!(is_told, "{refused:?}");
    // exact: the daemon counts the refusal of a session before the application learns of it
    assert_eq!(near_host.status().refusals.get("unreachable"), Some(&1));
}

/// The daemon must replace its watchdog process after it was killed. The new process must hold all sockets that the
/// daemon has handed to applications.
#[test]
fn killed_watchdog_process_is_replaced() {
    let Some(site) = GraftSite::new("watchdog") else { return };
    let [near_host, _far_host] = hosts(&site, "");
    let (mut near, mut far) = pair(&site, &["reliability"]);
    let listener = asks(&site, 1, "other").listen().unwrap();
    let (_control, socket) = raw(&site, 0, "other");
    let _theirs = listener.accept().unwrap();
    let first = watchdog_of(&near_host);
    kill(first, Signal::SIGKILL).unwrap();
    wait_for("another watchdog", || near_host.log().contains("another one is started"));
    wait_until("another process", || watchdog_of(&near_host), |watchdog| *watchdog != first);
    // The daemon gives the new watchdog process all sockets before it answers this status request.
    let _ = near_host.lent();
    near.send(SECRET).unwrap();
    assert_eq!(message(&mut far), SECRET);
    // After the daemon's death, datagrams sent without the library must be encrypted until sending fails, as with the
    // first watchdog process.
    let capture = InterfaceCapture::new(&site, 0);
    let sender = thread::spawn(move || {
        let mut sent = 0_u64;
        loop {
            match socket.send(SECRET) {
                Ok(_) => sent += 1,
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return sent,
                Err(_) => {}
            }
        }
    });
    wait_for("something to be sent", || capture.count(SECRET).0 > 0);
    near_host.signal(Signal::SIGKILL);
    assert!(sender.join().unwrap() > 0);
    assert_eq!(capture.count(SECRET).1, 0);
    let over = wait_for("the library to notice", || near.send(SECRET).err());
    assert!(matches!(over, Error::Over(_)), "{over}");
}

/// The daemon and its watchdog process are killed at the same moment. The library itself must detect that the
/// daemon is gone, and send nothing afterwards.
#[test]
fn library_sends_nothing_after_daemon_and_watchdog_are_killed() {
    let Some(site) = GraftSite::new("both") else { return };
    let [near_host, _far_host] = hosts(&site, "");
    let (mut near, mut far) = pair(&site, &["reliability"]);
    near.send(SECRET).unwrap();
    assert_eq!(message(&mut far), SECRET);
    let watchdog = watchdog_of(&near_host);
    // The watchdog process is stopped first, so that it cannot shut down the sockets after the daemon's death.
    kill(watchdog, Signal::SIGSTOP).unwrap();
    near_host.signal(Signal::SIGKILL);
    kill(watchdog, Signal::SIGKILL).unwrap();
    event(
        &mut near,
        |event| matches!(event, SessionEvent::Closed { reason } if reason.contains("daemon has closed")),
    );
    let capture = InterfaceCapture::new(&site, 0);
    for _ in 0..100 {
        assert!(matches!(near.send(SECRET), Err(Error::Over(_))));
    }
    assert_eq!(capture.count(SECRET).1, 0);
    event(
        &mut far,
        |event| matches!(event, SessionEvent::Closed { reason } if reason.contains("no message came")),
    );
}

/// Returns the watchdog process, a child of the daemon's process for sessions.
fn watchdog_of(host: &MessageHost<'_>) -> nix::unistd::Pid {
    let daemon = host.part().to_string();
    wait_for("its watchdog", || {
        let found = Command::new("ps").args(["-o", "pid=,args=", "--ppid", &daemon]).output().unwrap();
        let found = String::from_utf8(found.stdout).unwrap();
        let line = found.lines().find(|line| line.contains("sessions-keep")).ok_or(&found)?;
        Ok::<_, String>(nix::unistd::Pid::from_raw(line.split_whitespace().next().unwrap().parse().unwrap()))
    })
}

/// One host loses the session's address. It closes the session at once and names the unacknowledged datagrams. The peer
/// closes its end when it receives no messages for some time.
#[test]
fn session_ends_when_its_address_is_removed() {
    let Some(site) = GraftSite::new("moved") else { return };
    let _hosts = hosts(&site, "");
    let (mut near, mut far) = pair(&site, &["reliability"]);
    near.send(b"before").unwrap();
    assert_eq!(message(&mut far), b"before");
    let ip = |arguments: &str| crate::site::ip(&format!("netns exec {} {arguments}", site.namespaces[0]));
    // A slow queue delays the sent packets, so that they are unacknowledged.
    ip("tc qdisc add dev eth root tbf rate 8kbit burst 2k limit 100k");
    (0..5).for_each(|_| near.send(&[7; 1000]).unwrap());
    ip(&format!("ip addr del {CLIENT}/24 dev eth"));
    let closed = event(&mut near, |event| matches!(event, SessionEvent::Closed { .. }));
    let SessionEvent::Closed { reason } = &closed else { panic!("{closed:?}") };
    assert!(reason.contains("this host does not have the session's any more"), "{reason}");
    assert!(reason.contains("datagrams have not been acknowledged"), "{reason}");
    assert!(near.send(b"after").is_err());
    let closed = event(&mut far, |event| matches!(event, SessionEvent::Closed { .. }));
    let is_told =
        matches!(&closed, SessionEvent::Closed { reason } if reason.contains("an address has changed"));
    assert!(is_told && far.send(b"after").is_err(), "{closed:?}");
}
