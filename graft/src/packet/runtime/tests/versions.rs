//! Functions that come in another version, and sessions that begin anew.

use std::net::UdpSocket;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use millrace_graft_kernel::TALLIES;

use super::*;
use crate::Identity;

/// A pool with a version of `tally`, which counts what arrives; of the second one, that it goes on from the first, or not.
fn put(pool: &Path, version: usize, migrates: &str) {
    let image = TALLIES[version - 1];
    let identity = Identity::of(image);
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

/// Sends numbered datagrams until it is told to stop; returns how many.
fn send(socket: &UdpSocket, stop: &AtomicBool) -> u32 {
    (0..)
        .find(|number: &u32| {
            socket.send(&number.to_be_bytes().repeat(50)).expect("sent");
            std::thread::sleep(Duration::from_millis(1)); // exact: paces the sender
            stop.load(Ordering::Relaxed)
        })
        .unwrap_or_default()
        + 1
}

/// What has come, until nothing does any more for a while after the last was sent.
fn receive(socket: &UdpSocket, pause: Duration, stop: &AtomicBool) -> Vec<u32> {
    socket.set_read_timeout(Some(pause)).expect("a timeout");
    let (mut buffer, mut all) = ([0; 300], Vec::new());
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

/// Both daemons work, both ends send, until `over`; then what was sent and has come, by direction.
fn under_traffic(
    site: &Site,
    runtimes: &mut [Runtime; 2],
    mut work: impl FnMut(&mut [Runtime; 2]) -> bool,
) -> [(u32, Vec<u32>); 2] {
    /// However the work ends.
    struct Stops<'a>(&'a AtomicBool);
    impl Drop for Stops<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let sockets = site.sockets();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stops = Stops(&stop);
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
        // What is asked for again needs nobody here, but what was sent last has to be said.
        threads.map(|(sender, receiver)| {
            let sent = sender.join().expect("sent");
            while !receiver.is_finished() {
                step(site, runtimes);
            }
            (sent, receiver.join().expect("received"))
        })
    })
}

fn step(site: &Site, runtimes: &mut [Runtime; 2]) -> Vec<Event> {
    let each = runtimes.iter_mut().enumerate();
    each.flat_map(|(side, runtime)| {
        site.inside(side, || runtime.step(Duration::from_millis(1))).expect("a step")
    })
    .collect()
}

/// Until both ends have keys.
fn open(site: &Site, runtimes: &mut [Runtime; 2]) {
    let until = Instant::now() + LONG;
    while !runtimes.iter().all(Runtime::is_open) {
        assert!(Instant::now() < until, "no keys");
        step(site, runtimes);
    }
}

fn tally(runtime: &Runtime, version: usize) -> Vec<u64> {
    let key = format!("tally@{}", &Identity::of(TALLIES[version - 1]).to_string()[..16]);
    let ends = *runtime.live.keys().next().expect("a session");
    let state = runtime.joints.state(&ends, &key).expect("a state").expect("one");
    // Of the first version one word of 4 bytes.
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    state.chunks(8).map(word).collect()
}

#[test]
fn another_version_takes_over_what_the_first_one_knew_and_nothing_is_lost() {
    let Some(site) = Site::new("version") else { return };
    let pools = [0, 1].map(|_| tempfile::tempdir().expect("a directory"));
    pools.iter().for_each(|pool| put(pool.path(), 1, ""));
    let read = |side: usize| counted(pools[side].path(), side, "");
    let mut runtimes =
        [0, 1].map(|side| site.inside(side, || Runtime::start(read(side))).expect("a runtime"));
    open(&site, &mut runtimes);
    let (mut swapped, mut refused, mut steps, mut kept) = (0, 0, 0, [0; 2]);
    let passed = under_traffic(&site, &mut runtimes, |runtimes| {
        steps += 1;
        // One end has the other version first, and asks in vain.
        if steps == 100 {
            put(pools[0].path(), 2, MIGRATES);
            site.inside(0, || runtimes[0].apply(read(0))).expect("applied");
        }
        for event in step(&site, runtimes) {
            match event {
                Event::NotSwapped { why, .. } => {
                    assert_eq!(why, Why::Refused);
                    refused += 1;
                    put(pools[1].path(), 2, MIGRATES);
                    site.inside(1, || runtimes[1].apply(read(1))).expect("applied");
                }
                Event::Swapped { graft, change, .. } => {
                    assert_eq!((graft.as_str(), change.migrated), ("counted", vec!["tally".to_owned()]));
                    assert!(!change.stateless);
                    swapped += 1;
                }
                other => assert!(matches!(other, Event::Keys { .. }), "{other:?}"),
            }
        }
        // The version before is there until nothing of it can be under way any more.
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
        // Each version has counted what was sent in its epoch.
        assert!(kept[side] >= moved, "{moved} {kept:?}");
        assert_eq!(packets - moved + kept[side], came, "{packets} {moved} {kept:?}");
        let session = now(runtime).sessions.remove(0);
        assert_eq!((session.swaps, session.lost_sent, session.lost_received), (1, 0, 0));
        assert_eq!(session.changed.expect("a change").migrated, ["tally"]);
    }
}

#[test]
fn without_a_way_for_its_state_a_session_stays_or_begins_anew() {
    let Some(site) = Site::new("noway") else { return };
    let pools = [0, 1].map(|_| tempfile::tempdir().expect("a directory"));
    pools.iter().for_each(|pool| put(pool.path(), 2, MIGRATES));
    let read = |side: usize, more: &str| counted(pools[side].path(), side, more);
    let mut runtimes =
        [0, 1].map(|side| site.inside(side, || Runtime::start(read(side, ""))).expect("a runtime"));
    pools.iter().for_each(|pool| put(pool.path(), 1, ""));
    let error = runtimes[0].apply(read(0, "")).expect_err("no way back").to_string();
    assert!(
        error.starts_with(
            "session s: function tally keeps version 1 of its state, and does not know how to go on from 2"
        ) && error.contains("--stateless"),
        "{error}"
    );
    assert_eq!(runtimes[0].loaded.len(), 3, "all stays as it was");
    // What the settings say counts for a reload.
    for (side, runtime) in runtimes.iter_mut().enumerate() {
        let mut settings = read(side, "");
        settings.grafts.get_mut("counted").expect("a graft").anew = true;
        site.inside(side, || runtime.apply(settings)).expect("applied");
    }
    let counted =
        site.until(&mut runtimes, || (), |side, event| side == 0 && matches!(event, Event::Counted { .. }));
    let losses = Losses { sent: Some(0), received: Some(0) };
    assert_eq!(counted, Event::Counted { session: "s".into(), losses });
    assert_eq!(tally(&runtimes[0], 1), [0]);
}

/// All that was sent has come, or was told to be lost, or not sent: no more and no less.
#[test]
fn what_is_lost_where_a_session_begins_anew_is_counted() {
    let Some(site) = Site::new("lost") else { return };
    let grafts = "interface = [\"eth\"]\n[[graft]]\nname = \"plain\"\nfunctions = [\"number\"]\n\
                  [[graft]]\nname = \"newest\"\nfunctions = [\"number\", \"order\"]\n";
    for (round, line) in ["clear = true", ""].into_iter().enumerate() {
        let mut runtimes = [0, 1].map(|side| {
            let settings = settings_with(side, grafts, "plain", line);
            site.inside(side, || Runtime::start(settings)).expect("a runtime")
        });
        open(&site, &mut runtimes);
        let (mut steps, mut proposed, mut told) = (0, 0, 0);
        let passed = under_traffic(&site, &mut runtimes, |runtimes| {
            steps += 1;
            if steps > 100 && told == 2 * proposed && proposed < 3 {
                let graft = ["newest", "newest", "plain"][proposed];
                // As soon as the epoch before is over.
                proposed += usize::from(site.inside(0, || runtimes[0].swap_anew("s", graft)).is_ok());
            }
            for event in step(&site, runtimes) {
                if let Event::Counted { losses, .. } = event {
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
            let (lost, paused) = (status[from].lost_sent, count(from, "paused"));
            println!("{round} {from}: sent {sent}, came {}, lost {lost}, paused {paused}", came.len());
            assert_eq!(u64::from(*sent), came.len() as u64 + lost + paused, "{:?}", status[from]);
            assert_eq!(lost, status[1 - from].lost_received);
            assert!(status[from].changed.as_ref().is_some_and(|change| change.stateless));
        }
    }
}
