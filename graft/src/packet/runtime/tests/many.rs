//! Ten thousand sessions.

use super::*;

const SESSIONS: u16 = 10_000;
const FIRST_PORT: u16 = 10_000;

fn settings(side: usize, sessions: u16, line: &str) -> Settings {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::write(directory.path().join("key"), "00112233445566778899aabbccddeeff").expect("a key");
    let mut text = format!(
        "sessions = {SESSIONS}\ninterface = [\"eth\"]\n[[graft]]\nname = \"once\"\nfunctions = [\"number\"]\n\
         [[graft]]\nname = \"newest\"\nfunctions = [\"number\", \"order\"]\n"
    );
    for at in 0..sessions {
        let port = FIRST_PORT + at;
        text += &format!(
            "[[session]]\nname = \"s{at}\"\nlocal = \"10.97.0.{}:{port}\"\nremote = \"10.97.0.{}:{port}\"\n\
             key-file = \"key\"\ngraft = \"once\"\n{line}\n",
            side + 1,
            2 - side,
        );
    }
    Settings::parse(&text, directory.path()).expect("settings")
}

/// As of a session.
fn sockets(site: &Site, at: u16) -> [UdpSocket; 2] {
    [0, 1].map(|side| {
        let address = |side: usize| format!("10.97.0.{}:{}", side + 1, FIRST_PORT + at);
        let socket = site.inside(side, || UdpSocket::bind(address(side)).expect("bind"));
        socket.connect(address(1 - side)).expect("connect");
        socket.set_read_timeout(Some(LONG)).expect("timeout");
        socket
    })
}

/// Both work until it is so.
fn until_it_is(site: &Site, runtimes: &mut [Runtime; 2], is: impl Fn(&Runtime) -> bool) {
    let until = Instant::now() + 3 * LONG;
    while !runtimes.iter().all(&is) {
        assert!(Instant::now() < until, "it is not so");
        for (side, runtime) in runtimes.iter_mut().enumerate() {
            site.inside(side, || runtime.step(Duration::from_millis(5))).expect("a step");
        }
    }
}

/// All of them are there, any of them passes datagrams and changes its graft, and what they take in the kernel is what was said before the
/// first of them was there.
#[test]
fn ten_thousand_sessions_are_as_one() {
    let Some(site) = Site::new("many") else { return };
    let stated = settings(0, 1, "clear = true").memory().expect("bytes");
    let mut runtimes = [0, 1].map(|side| {
        let settings = settings(side, SESSIONS, "clear = true");
        site.inside(side, || Runtime::start(settings)).expect("a runtime")
    });
    assert_eq!(now(&mut runtimes[0]).memory_bytes, stated);
    // Greeted one after the other, all of them in a while.
    until_it_is(&site, &mut runtimes, |runtime| runtime.live.values().all(|live| live.peer.is_some()));
    let mut buffer = [0; 100];
    for at in [0, SESSIONS / 2, SESSIONS - 1] {
        let [near, far] = sockets(&site, at);
        for (from, to) in [(&near, &far), (&far, &near)] {
            from.send(b"payload").expect("sent");
            assert_eq!(to.recv(&mut buffer).expect("received"), 7);
        }
    }
    let last = format!("s{}", SESSIONS - 1);
    site.inside(0, || runtimes[0].swap(&last, "newest")).expect("proposed");
    let wanted = |_, event: &Event| matches!(event, Event::Swapped { session, graft, .. } if *session == last && graft == "newest");
    site.until(&mut runtimes, || (), wanted);
    let status = now(&mut runtimes[0]);
    assert_eq!(
        (status.sessions.len(), status.sessions_max, status.trouble),
        (SESSIONS.into(), SESSIONS.into(), vec![])
    );
    let passed = status.sessions.iter().filter(|session| session.packets.get("sent") == Some(&1)).count();
    assert_eq!(passed, 3, "each of those that were used has its own counts");
    // One more is too many; fewer are no trouble, and leave their places to others.
    let few = settings(0, 3, "clear = true");
    site.inside(0, || runtimes[0].apply(few)).expect("fewer");
    let all = settings(0, SESSIONS, "clear = true");
    site.inside(0, || runtimes[0].apply(all)).expect("all of them again");
    let status = now(&mut runtimes[0]);
    assert_eq!((status.sessions.len(), status.memory_bytes), (SESSIONS.into(), stated));
}

/// Each has keys of its own.
#[test]
fn a_thousand_sessions_are_sealed() {
    const SEALED: u16 = 1000;
    let Some(site) = Site::new("keys") else { return };
    let mut runtimes = [0, 1].map(|side| {
        let settings = settings(side, SEALED, "");
        site.inside(side, || Runtime::start(settings)).expect("a runtime")
    });
    until_it_is(&site, &mut runtimes, Runtime::is_open);
    let mut buffer = [0; 100];
    for at in [0, SEALED - 1] {
        let [near, far] = sockets(&site, at);
        near.send(b"payload").expect("sent");
        assert_eq!(far.recv(&mut buffer).expect("received"), 7);
    }
}
