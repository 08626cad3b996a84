//! Tests with ten thousand sessions.

use super::*;

const SESSIONS: u16 = 10_000;
const FIRST_PORT: u16 = 10_000;

fn settings(side: usize, sessions: u16, line: &str) -> Settings {
    let mut text = format!(
        "[sessions]\nmax-sessions = {SESSIONS}\ninterface = [\"eth\"]\n[[graft]]\nname = \"once\"\nfunctions = [\"number\"]\n\
         [[graft]]\nname = \"newest\"\nfunctions = [\"number\", \"order\"]\n"
    );
    for at in 0..sessions {
        let port = FIRST_PORT + at;
        text += &format!(
            "[[session]]\nname = \"s{at}\"\nlocal = \"10.97.0.{}:{port}\"\nremote = \"10.97.0.{}:{port}\"\n\
             peer = \"far\"\ngraft = \"once\"\n{line}\n",
            side + 1,
            2 - side,
        );
    }
    with_peer(side, &text)
}

/// Opens the sockets of one session.
fn sockets(site: &RuntimeSite, at: u16) -> [UdpSocket; 2] {
    [0, 1].map(|side| {
        let address = |side: usize| format!("10.97.0.{}:{}", side + 1, FIRST_PORT + at);
        let socket = site.inside(side, || UdpSocket::bind(address(side)).expect("bind"));
        socket.connect(address(1 - side)).expect("connect");
        socket.set_read_timeout(Some(LONG)).expect("timeout");
        socket
    })
}

/// Steps both runtimes until the given condition is true.
fn until_it_is(site: &RuntimeSite, runtimes: &mut [PacketRuntime; 2], is: impl Fn(&PacketRuntime) -> bool) {
    let until = Instant::now() + 3 * LONG;
    while !runtimes.iter().all(&is) {
        assert!(Instant::now() < until, "it is not so");
        step(site, runtimes);
    }
}

/// Ten thousand sessions exist, and each of them passes datagrams and changes its graft (list of packet functions).
/// They take as much kernel memory as was computed from the settings beforehand.
#[test]
fn ten_thousand_sessions_work_within_the_stated_memory() {
    let Some(site) = RuntimeSite::new("many") else { return };
    let stated = settings(0, 1, "clear = true").memory().expect("bytes");
    let mut runtimes = [0, 1].map(|side| {
        let settings = settings(side, SESSIONS, "clear = true");
        site.inside(side, || PacketRuntime::start(settings)).expect("a runtime")
    });
    assert_eq!(now(&mut runtimes[0]).memory_bytes, stated);
    // The runtime greets one session after the other, so this takes a while.
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
    let wanted = |_, event: &PacketEvent| matches!(event, PacketEvent::Swapped { session, graft, .. } if *session == last && graft == "newest");
    site.until(&mut runtimes, || (), wanted);
    let status = now(&mut runtimes[0]);
    assert_eq!(
        (status.sessions.len(), status.sessions_max, status.trouble),
        (SESSIONS.into(), SESSIONS.into(), vec![])
    );
    let passed = status.sessions.iter().filter(|session| session.packets.get("sent") == Some(&1)).count();
    assert_eq!(passed, 3, "each of those that were used has its own counts");
    // The runtime accepts new settings with only three sessions. It keeps the kernel memory, so settings with all
    // sessions can be applied again.
    let few = settings(0, 3, "clear = true");
    site.inside(0, || runtimes[0].apply(few)).expect("fewer");
    let all = settings(0, SESSIONS, "clear = true");
    site.inside(0, || runtimes[0].apply(all)).expect("all of them again");
    let status = now(&mut runtimes[0]);
    assert_eq!((status.sessions.len(), status.memory_bytes), (SESSIONS.into(), stated));
}

/// Each of a thousand sessions has keys of its own.
#[test]
fn thousand_sessions_have_keys_of_their_own() {
    const SEALED: u16 = 1000;
    let Some(site) = RuntimeSite::new("keys") else { return };
    let mut runtimes = [0, 1].map(|side| {
        let settings = settings(side, SEALED, "");
        site.inside(side, || PacketRuntime::start(settings)).expect("a runtime")
    });
    until_it_is(&site, &mut runtimes, PacketRuntime::is_open);
    let mut buffer = [0; 100];
    for at in [0, SEALED - 1] {
        let [near, far] = sockets(&site, at);
        near.send(b"payload").expect("sent");
        assert_eq!(far.recv(&mut buffer).expect("received"), 7);
    }
}
