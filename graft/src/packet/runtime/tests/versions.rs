//! Tests of functions that are replaced by another version, and of sessions that restart.

use std::net::UdpSocket;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use millrace_graft_kernel::TALLIES;

use super::*;
use crate::ObjectIdentity;

/// Writes a directory with the object file and manifest of a version of the function `tally`, which counts packets that
/// arrive. The second version may be able to continue from the state of the first.
fn put(pool: &Path, version: usize, migrates: &str) {
    let image = TALLIES[version - 1];
    let identity = ObjectIdentity::from_image(image);
    std::fs::write(pool.join("tally.bpf.o"), image).expect("an object");
    let manifest = format!(
        "abi = 3\nname = \"tally\"\nobject = \"tally.bpf.o\"\nsha256 = \"{identity}\"\nabout = \"counts\"\n\
         kernel = \"6.1\"\nstate-version = {version}\n{migrates}"
    );
    std::fs::write(pool.join("tally.toml"), manifest).expect("a manifest");
}

const MIGRATES: &str = "migrates = [1]\n";

fn counted(pool: &Path, side: usize, graft: &str) -> Settings {
    let pool = pool.display();
    let grafts = format!(
        r#"
        [sessions]
        interface = ["eth"]
        pool = ["{pool}"]
        [[graft]]
        name = "counted"
        functions = ["number", "repair", "tally"]
        [[graft]]
        name = "plain"
        functions = ["number"]
        {graft}
        "#
    );
    settings_with(side, &grafts, "counted", "")
}

/// Sends numbered datagrams until `stop` is set. Returns how many were sent.
fn send(socket: &UdpSocket, stop: &AtomicBool) -> u32 {
    (0..)
        .find(|number: &u32| {
            socket.send(&number.to_be_bytes().repeat(50)).expect("sent");
            // exact: this pause between two datagrams sets the sending rate
            std::thread::sleep(Duration::from_millis(1));
            stop.load(Ordering::Relaxed)
        })
        .unwrap_or_default()
        + 1
}

/// Receives datagrams until none arrives for `pause` after the last one was sent.
fn receive(socket: &UdpSocket, pause: Duration, stop: &AtomicBool) -> Vec<u32> {
    socket.set_read_timeout(Some(pause)).expect("a timeout");
    let mut buffer = [0; 300];
    let mut all = Vec::new();
    loop {
        let is_over = stop.load(Ordering::Relaxed);
        let bytes = match socket.recv(&mut buffer) {
            Ok(bytes) => bytes,
            Err(_) if is_over => return all,
            Err(_) => continue,
        };
        let number: [u8; 4] = buffer[..4].try_into().expect("a number");
        assert_eq!(&buffer[..bytes], number.repeat(50), "byte for byte");
        all.push(u32::from_be_bytes(number));
    }
}

/// Steps both runtimes, and sends from both hosts, until `over` returns true. Returns the sent and the received
/// datagrams in each direction.
fn under_traffic(
    site: &RuntimeSite,
    runtimes: &mut [PacketRuntime; 2],
    mut work: impl FnMut(&mut [PacketRuntime; 2]) -> bool,
) -> [(u32, Vec<u32>); 2] {
    let sockets = site.sockets();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stops = StopOnDrop(&stop);
        let threads = [0, 1].map(|from| {
            let [sends, receives] =
                [&sockets[from], &sockets[1 - from]].map(|it| it.try_clone().expect("a socket"));
            let stop = &stop;
            let receiver = scope.spawn(move || receive(&receives, Duration::from_secs(3), stop));
            (scope.spawn(move || send(&sends, stop)), receiver)
        });
        let until = Instant::now() + LONG;
        while !work(runtimes) {
            assert!(Instant::now() < until, "it does not happen");
        }
        drop(stops);
        // Lost packets are retransmitted without a call of `step`, but only `step` announces the latest packets.
        threads.map(|(sender, receiver)| {
            let sent = sender.join().expect("sent");
            while !receiver.is_finished() {
                step(site, runtimes);
            }
            (sent, receiver.join().expect("received"))
        })
    })
}

fn tally(runtime: &PacketRuntime, version: usize) -> Vec<u64> {
    let key = format!("tally@{}", &ObjectIdentity::from_image(TALLIES[version - 1]).to_string()[..16]);
    let ends = *runtime.live.keys().next().expect("a session");
    let state = runtime.hooks.state(&ends, &key).expect("a state").expect("one");
    // The state of the first version is a number of 4 bytes.
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    state.chunks(8).map(word).collect()
}

#[test]
fn new_function_version_takes_over_state_without_loss() {
    let Some(site) = RuntimeSite::new("version") else { return };
    let pools = [0, 1].map(|_| tempfile::tempdir().expect("a directory"));
    pools.iter().for_each(|pool| put(pool.path(), 1, ""));
    let read = |side: usize| counted(pools[side].path(), side, "");
    let mut runtimes =
        [0, 1].map(|side| site.inside(side, || PacketRuntime::start(read(side))).expect("a runtime"));
    have_keys(&site, &mut runtimes);
    let mut swapped = 0;
    let mut refused = 0;
    let mut steps = 0;
    let mut kept = [0; 2];
    let passed = under_traffic(&site, &mut runtimes, |runtimes| {
        steps += 1;
        // Only one end has loaded the second version of the function, so the other end refuses its proposal.
        if steps == 100 {
            put(pools[0].path(), 2, MIGRATES);
            site.inside(0, || runtimes[0].apply(read(0))).expect("applied");
        }
        for event in step(&site, runtimes) {
            match event {
                PacketEvent::NotSwapped { why, .. } => {
                    assert_eq!(why, ListRefusal::Refused);
                    refused += 1;
                    put(pools[1].path(), 2, MIGRATES);
                    site.inside(1, || runtimes[1].apply(read(1))).expect("applied");
                }
                PacketEvent::Swapped { graft, change, .. } => {
                    assert_eq!((graft.as_str(), change.migrated), ("counted", vec!["tally".to_owned()]));
                    assert!(!change.stateless);
                    swapped += 1;
                }
                other => assert!(matches!(other, PacketEvent::Keys { .. }), "{other:?}"),
            }
        }
        // The previous version stays loaded until none of its packets can be in flight any more.
        for (runtime, kept) in runtimes.iter().zip(&mut kept).filter(|(runtime, _)| runtime.loaded.len() == 4)
        {
            *kept = tally(runtime, 1)[0];
        }
        swapped == 2 && runtimes.iter().all(|runtime| runtime.loaded.len() == 3)
    });
    assert_eq!(refused, 1);
    for (sent, came) in &passed {
        let mut came = came.clone();
        came.sort_unstable();
        assert_eq!(came, (0..*sent).collect::<Vec<_>>(), "each of them once");
    }
    for (side, runtime) in runtimes.iter_mut().enumerate() {
        let came = passed[1 - side].1.len() as u64;
        let [packets, _, moved] = tally(runtime, 2)[..] else { panic!("a state") };
        assert!(moved > 0 && packets > moved, "{packets} {moved}");
        // Each version of the function `tally` has counted the packets that were sent while the session's function
        // list contained that version.
        assert!(kept[side] >= moved, "{moved} {kept:?}");
        assert_eq!(packets - moved + kept[side], came, "{packets} {moved} {kept:?}");
        let session = now(runtime).sessions.remove(0);
        assert_eq!((session.swaps, session.lost_sent, session.lost_received), (1, 0, 0));
        assert_eq!(session.changed.expect("a change").migrated, ["tally"]);
    }
}

#[test]
fn session_without_a_state_migration_refuses_update_or_restarts() {
    let Some(site) = RuntimeSite::new("noway") else { return };
    let pools = [0, 1].map(|_| tempfile::tempdir().expect("a directory"));
    pools.iter().for_each(|pool| put(pool.path(), 2, MIGRATES));
    let read = |side: usize, more: &str| counted(pools[side].path(), side, more);
    let mut runtimes =
        [0, 1].map(|side| site.inside(side, || PacketRuntime::start(read(side, ""))).expect("a runtime"));
    pools.iter().for_each(|pool| put(pool.path(), 1, ""));
    let error = runtimes[0].apply(read(0, "")).expect_err("no way back").to_string();
    assert!(
        error.starts_with(
            "session s: function tally keeps version 1 of its state, and cannot continue from version 2"
        ) && error.contains("--stateless"),
        "{error}"
    );
    assert_eq!(runtimes[0].loaded.len(), 3, "all stays as it was");
    // After the settings were read again, the session has the graft (list of packet functions) that they name.
    for (side, runtime) in runtimes.iter_mut().enumerate() {
        let mut settings = read(side, "");
        settings.grafts.get_mut("counted").expect("a graft").anew = true;
        site.inside(side, || runtime.apply(settings)).expect("applied");
    }
    let counted = site.until(
        &mut runtimes,
        || (),
        |side, event| side == 0 && matches!(event, PacketEvent::Counted { .. }),
    );
    let losses = PacketLosses { sent: Some(0), received: Some(0) };
    assert_eq!(counted, PacketEvent::Counted { session: "s".into(), losses });
    assert_eq!(tally(&runtimes[0], 1), [0]);
}

/// Each datagram either arrived, was reported as lost, or was never sent.
#[test]
fn datagrams_lost_in_a_stateless_graft_change_are_counted() {
    let Some(site) = RuntimeSite::new("lost") else { return };
    let grafts = "[sessions]\ninterface = [\"eth\"]\n[[graft]]\nname = \"plain\"\nfunctions = [\"number\"]\n\
                  [[graft]]\nname = \"newest\"\nfunctions = [\"number\", \"order\"]\n";
    for (round, line) in ["clear = true", ""].into_iter().enumerate() {
        let mut runtimes = [0, 1].map(|side| {
            let settings = settings_with(side, grafts, "plain", line);
            site.inside(side, || PacketRuntime::start(settings)).expect("a runtime")
        });
        have_keys(&site, &mut runtimes);
        let mut steps = 0;
        let mut proposed = 0;
        let mut told = 0;
        let passed = under_traffic(&site, &mut runtimes, |runtimes| {
            steps += 1;
            if steps > 100 && told == 2 * proposed && proposed < 3 {
                let graft = ["newest", "newest", "plain"][proposed];
                // The next change of the function list can begin when no packet of the previous function list can be in
                // flight.
                proposed += usize::from(site.inside(0, || runtimes[0].swap_anew("s", graft)).is_ok());
            }
            for event in step(&site, runtimes) {
                if let PacketEvent::Counted { losses, .. } = event {
                    assert!(losses.sent.is_some() && losses.received.is_some(), "{losses:?}");
                    told += 1;
                }
            }
            told == 6
        });
        let status = runtimes.each_mut().map(|it| now(it).sessions.remove(0));
        for (from, (sent, came)) in passed.iter().enumerate() {
            let count = |of: usize, reason: &str| status[of].packets.get(reason).copied().unwrap_or_default();
            assert!(came.windows(2).all(|pair| pair[0] < pair[1]), "once, in order");
            let lost = status[from].lost_sent;
            let paused = count(from, "paused");
            println!("{round} {from}: sent {sent}, came {}, lost {lost}, paused {paused}", came.len());
            assert_eq!(u64::from(*sent), came.len() as u64 + lost + paused, "{:?}", status[from]);
            assert_eq!(lost, status[1 - from].lost_received);
            assert!(status[from].changed.as_ref().is_some_and(|change| change.stateless));
        }
    }
}
