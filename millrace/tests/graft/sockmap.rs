//! Connections that are carried and go past TCP on loopback (`loopback = "sockmap"`): what still holds, and what the documentation
//! says that it breaks.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::{Shutdown, TcpStream},
    os::fd::AsFd as _,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use millrace_graft::status::Sockmap;
use nix::{
    errno::Errno,
    fcntl::{SpliceFFlags, splice},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use socket2::SockRef;

use crate::{
    agreement::keys,
    carried::{
        at, carry, client, connect, connect_seen, ended, exchange, fill, hash, noise, read_all, rule, server,
        slow_reader, verdict, wait_for_end, wait_for_ended, wait_for_resets, wait_for_state,
    },
    site::{CLIENT, CLIENT6, Daemon, LONG, PORT, SERVER, SERVER6, Site, wait_for, wait_until},
};

/// Both daemons, with a warm carrier and past TCP. `more`: of the client's `[carry]`, and of its rules.
fn bypassed<'a>(site: &'a Site, more: [&str; 2]) -> [Daemon<'a>; 2] {
    let known = keys(site);
    let with = |text: String| text.replace("[carry]", "[carry]\nloopback = \"sockmap\"");
    site.configure_on(0, &with(format!("{}{}", client(&known[1], more[0]), more[1])));
    site.configure_on(1, &with(server(&known[0], "")));
    let far = Daemon::start_on(site, 1);
    let near = Daemon::start_on(site, 0);
    wait_for_state(&near, "warm");
    [near, far]
}

/// The same hosts as they are by default.
fn by_tcp(site: &Site) -> [Daemon<'_>; 2] {
    for side in [0, 1] {
        let text = std::fs::read_to_string(site.path(&format!("graft{side}.toml"))).unwrap();
        let (_, text) = text.split_once('\n').unwrap();
        site.configure_on(side, &text.replace("loopback = \"sockmap\"\n", ""));
    }
    let far = Daemon::start_on(site, 1);
    let near = Daemon::start_on(site, 0);
    wait_for_state(&near, "warm");
    [near, far]
}

fn sockmap(daemon: &Daemon<'_>) -> Sockmap {
    carry(daemon).sockmap.unwrap()
}

fn count(daemon: &Daemon<'_>, verdict: &str) -> u64 {
    sockmap(daemon).verdicts[verdict]
}

fn wait_for_none(daemon: &Daemon<'_>) {
    wait_until("the end of sockets", || sockmap(daemon), |it| it.sockets == 0);
}

fn say_and_hear(mut from: &TcpStream, to: &TcpStream) {
    from.write_all(b"something").unwrap();
    let mut heard = [0; 9];
    patiently(|| (&*to).read_exact(&mut heard)).unwrap();
    assert_eq!(&heard, b"something");
}

/// A read that waits may say EAGAIN before anything has come.
fn patiently<T>(mut read: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let start = Instant::now();
    loop {
        match read() {
            Err(error) if error.kind() == ErrorKind::WouldBlock && start.elapsed() < LONG => {}
            done => return done,
        }
    }
}

/// Whatever has come before.
fn assert_is_reset(mut stream: &TcpStream) {
    let mut piece = vec![0; 1 << 20];
    loop {
        match patiently(|| stream.read(&mut piece)) {
            Ok(0) => panic!("a reset looks like an end"),
            Ok(_) => {}
            Err(error) => return assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
    }
}

#[test]
fn past_tcp_both_ends_see_each_other_and_all_bytes() {
    let Some(site) = Site::new("past") else { return };
    let [near, far] = bypassed(&site, ["", ""]);
    for daemon in [&near, &far] {
        let names = ["loopback = \\\"sockmap\\\"", "loopback = \"sockmap\""];
        let is_said = |log: &String| names.iter().any(|name| log.contains(name)) && log.contains("splice()");
        wait_until("what is said of it", || daemon.log(), is_said);
        assert!(daemon.succeed(&["status"]).contains("loopback: sockmap"));
    }
    for (server, client) in [(SERVER, CLIENT), (SERVER6, CLIENT6)] {
        let listener = site.listen_on(at(server, PORT));
        for length in [10, 0, 1, 100_000, 3_000_000] {
            let (here, there) = connect_seen(&site, &listener, client);
            exchange(&here, &there, length);
        }
    }
    wait_for_end(&near, &far);
    wait_for_ended([&near, &far], "done", 10);
    for daemon in [&near, &far] {
        wait_for_none(daemon);
        // Both ends of each, and nothing else: daemons have connections of their own.
        assert_eq!(count(daemon, "entered"), 20);
        assert!(count(daemon, "passed-on") > 0, "{:?}", sockmap(daemon));
        assert_eq!((count(daemon, "no-room"), count(daemon, "early")), (0, 0));
    }
}

/// The first bytes are on their way when the other end of the hop is hardly there: what goes by TCP is not overtaken.
#[test]
fn past_tcp_what_is_said_first_comes_first() {
    let Some(site) = Site::new("past-first") else { return };
    const MESSAGES: u32 = 2000;
    let [near, far] = bypassed(&site, ["", ""]);
    let listener = site.listen();
    let say = |mut to: &TcpStream| {
        for number in 0..MESSAGES {
            to.write_all(&number.to_be_bytes()).unwrap();
        }
        to.shutdown(Shutdown::Write).unwrap();
    };
    let hear = |from: &TcpStream| {
        let heard = read_all(from);
        let numbers = heard.chunks(4).map(|it| u32::from_be_bytes(it.try_into().unwrap()));
        assert!(numbers.eq(0..MESSAGES), "{} bytes", heard.len());
    };
    for _ in 0..30 {
        // It speaks before the server has accepted, and the server as soon as it has.
        let here = site.try_connect(at(SERVER, PORT)).unwrap();
        here.set_read_timeout(Some(LONG)).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| say(&here));
            let (there, _) = listener.accept().unwrap();
            there.set_read_timeout(Some(LONG)).unwrap();
            let back = scope.spawn({
                let there = there.try_clone().unwrap();
                move || say(&there)
            });
            hear(&there);
            hear(&here);
            back.join().unwrap();
        });
    }
    assert_eq!(verdict(&near, "led"), 30);
    assert!(count(&near, "passed-on") > 0 && count(&far, "passed-on") > 0);
}

#[test]
fn past_tcp_who_half_closes_reads_on() {
    let Some(site) = Site::new("past-half") else { return };
    let [near, far] = bypassed(&site, ["", ""]);
    let listener = site.listen();
    for closes_here in [true, false] {
        let (here, there, _) = connect(&site, &listener);
        let (mut first, mut second) = if closes_here { (&here, &there) } else { (&there, &here) };
        first.write_all(b"question").unwrap();
        first.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read_all(second), b"question");
        let said = noise(9, 200_000);
        second.write_all(&said).unwrap();
        second.shutdown(Shutdown::Write).unwrap();
        // All of it, and the end, has come before the first byte is read: the connection is over for the kernel by then.
        wait_for_end(&near, &far);
        assert_eq!(hash(&read_all(first)), hash(&said));
    }
    wait_for_ended([&near, &far], "done", 2);
}

#[test]
fn past_tcp_a_reset_is_a_reset_at_the_other_end() {
    let Some(site) = Site::new("past-reset") else { return };
    let [near, far] = bypassed(&site, ["", ""]);
    let listener = site.listen();
    for number in 0..4 {
        let (here, there, _) = connect(&site, &listener);
        say_and_hear(&here, &there);
        say_and_hear(&there, &here);
        let (resets, other) = if number % 2 == 0 { (here, there) } else { (there, here) };
        // In both directions much may be under way.
        if number > 1 {
            for end in [&resets, &other] {
                end.set_nonblocking(true).unwrap();
                while (&*end).write(&[7; 100_000]).is_ok() {}
            }
            other.set_nonblocking(false).unwrap();
        }
        SockRef::from(&resets).set_linger(Some(Duration::ZERO)).unwrap();
        drop(resets);
        assert_is_reset(&other);
    }
    for daemon in [&near, &far] {
        wait_for_resets([daemon], 4);
        wait_for_none(daemon);
    }
}

/// From the client to the server, by what the broker has taken; the other way, by what the application has not read.
#[test]
fn past_tcp_a_slow_reader_costs_one_window() {
    let Some(site) = Site::new("past-slow") else { return };
    let ends = bypassed(&site, ["window-kib = 256", ""]);
    slow_reader(&site, &ends);
    let listener = site.listen();
    let (here, mut there, _) = connect(&site, &listener);
    let sent = noise(3, 64 << 20);
    let written = fill(&mut there, &sent, || carry(&ends[1]).kept_bytes > 128 << 10);
    assert!(written < 32 << 20, "{written}");
    there.shutdown(Shutdown::Write).unwrap();
    assert_eq!(hash(&read_all(&here)), hash(&sent[..written]));
    assert!(count(&ends[0], "full") > 0, "{:?}", sockmap(&ends[0]));
}

/// The peer's broker has no rule for the port: the connection is passed on to plain TCP, with what was taken of it.
#[test]
fn past_tcp_what_is_not_carried_goes_in_place() {
    let Some(site) = Site::new("past-place") else { return };
    let more = rule("client", PORT + 1).replace("\"client\"\ns", "\"more\"\ns");
    let [near, far] = bypassed(&site, ["", &more]);
    let listener = site.listen_on(at(SERVER, PORT + 1));
    for number in 0..3 {
        // It is asked in place for 2 s after each.
        wait_for("a led one", || {
            let (here, there, _) = connect(&site, &listener);
            exchange(&here, &there, 3_000_000);
            (verdict(&near, "led") > number).then_some(())
        });
    }
    wait_for("ends", || ended(&near, "done") >= 3);
    wait_for_ended([&far], "not-listed", 3);
    assert_eq!(ended(&near, "done"), 3, "{:?}", carry(&near));
    wait_for_none(&near);
}

#[test]
fn past_tcp_strict_connections_say_what_the_server_says() {
    let Some(site) = Site::new("past-strict") else { return };
    let strict = rule("client", PORT + 2).replace("\"client\"\ns", "\"strict\"\ns");
    let [near, far] = bypassed(&site, ["", &format!("{strict}connect = \"strict\"\n")]);
    // The server's side of it.
    let text = std::fs::read_to_string(site.path("graft1.toml")).unwrap();
    let text = text.split_once('\n').unwrap().1.to_owned();
    let more = rule("server", PORT + 2).replace("\"server\"\ns", "\"strict\"\ns");
    site.configure_on(1, &format!("{text}{more}"));
    far.succeed(&["reload"]);
    wait_for_state(&near, "warm");
    let error = site.try_connect(at(SERVER, PORT + 2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    let listener = site.listen_on(at(SERVER, PORT + 2));
    let (here, there, _) = connect(&site, &listener);
    exchange(&here, &there, 1_000_000);
    wait_for_ended([&near], "done", 1);
    assert!(count(&near, "entered") >= 2 && count(&near, "passed-on") > 0, "{:?}", sockmap(&near));
}

#[test]
fn past_tcp_nothing_is_left_of_a_daemon_that_was_killed() {
    let Some(site) = Site::new("past-killed") else { return };
    let [near, _far] = bypassed(&site, ["", ""]);
    let listener = site.listen();
    let (here, there, _) = connect(&site, &listener);
    say_and_hear(&here, &there);
    say_and_hear(&there, &here);
    near.kill();
    // Neither end takes it for the whole.
    assert_is_reset(&here);
    assert_is_reset(&there);
    let (next, other, seen) = connect(&site, &listener);
    assert_eq!((seen.ip().to_string(), next.local_addr().unwrap()), (CLIENT.to_owned(), seen));
    exchange(&next, &other, 100_000);
}

/// What splice says of a socket that has bytes to be read.
fn spliced(stream: &TcpStream, length: usize) -> nix::Result<usize> {
    let mut ready = [PollFd::new(stream.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut ready, PollTimeout::try_from(LONG).unwrap()), Ok(1));
    // Until all of it has come.
    let mut seen = vec![0; length];
    wait_for("all bytes", || stream.peek(&mut seen).is_ok_and(|seen| seen == length));
    let (read, write) = nix::unistd::pipe().unwrap();
    // Else it waits for as long as the socket may.
    stream.set_nonblocking(true).unwrap();
    let moved = splice(stream, None, &write, None, length, SpliceFFlags::SPLICE_F_NONBLOCK);
    stream.set_nonblocking(false).unwrap();
    drop(read);
    moved
}

/// As `docs/carried.md` says. Without it, and that is the default, it does what it does with TCP.
#[test]
fn past_tcp_splice_does_not_see_what_is_there() {
    let Some(site) = Site::new("past-splice") else { return };
    const LENGTH: usize = 5000;
    let said = noise(2, LENGTH);
    let answered = |site: &Site| {
        let listener = site.listen();
        let (here, mut there, _) = connect(site, &listener);
        there.write_all(&said).unwrap();
        let moved = spliced(&here, LENGTH);
        (here, moved)
    };
    let [near, far] = bypassed(&site, ["", ""]);
    if !sockmap(&near).both_ways {
        println!("SKIP past_tcp_splice_does_not_see_what_is_there: before Linux 6.13 this goes by TCP");
        return;
    }
    let (mut here, moved) = answered(&site);
    assert_eq!(moved, Err(Errno::EAGAIN));
    let mut got = vec![0; LENGTH];
    patiently(|| here.read_exact(&mut got)).unwrap();
    assert_eq!(hash(&got), hash(&said), "read() has all of it");
    drop((near, far, here));

    let [near, far] = by_tcp(&site);
    let (_here, moved) = answered(&site);
    assert_eq!(moved, Ok(LENGTH));
    for daemon in [&near, &far] {
        assert_eq!(carry(daemon).sockmap, None);
        assert!(!daemon.log().contains("sockmap") && !daemon.succeed(&["status"]).contains("sockmap"));
    }
}

/// What a read says that waits when the other end resets, and what the one after it says.
fn read_while_it_is_reset(here: &TcpStream, there: TcpStream) -> [Option<ErrorKind>; 2] {
    thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        let reader = scope.spawn(move || {
            tell.send(nix::unistd::gettid()).unwrap();
            [(); 2].map(|()| (&*here).read(&mut [0]).err().map(|error| error.kind()))
        });
        let (task, call) = (told.recv().unwrap(), nix::libc::SYS_recvfrom.to_string());
        wait_for("a reader that waits", || {
            let of = |what: &str| std::fs::read_to_string(format!("/proc/self/task/{task}/{what}")).unwrap();
            of("syscall").split(' ').next() == Some(&call) && of("stat").contains(") S ")
        });
        SockRef::from(&there).set_linger(Some(Duration::ZERO)).unwrap();
        drop(there);
        reader.join().unwrap()
    })
}

/// As `docs/carried.md` says.
#[test]
fn past_tcp_a_read_that_waits_may_say_that_there_is_nothing() {
    let Some(site) = Site::new("past-read") else { return };
    let [near, far] = bypassed(&site, ["", ""]);
    let listener = site.listen();
    let (here, there, _) = connect(&site, &listener);
    say_and_hear(&here, &there);
    let said = read_while_it_is_reset(&here, there);
    assert_eq!(said, [Some(ErrorKind::WouldBlock), Some(ErrorKind::ConnectionReset)]);
    drop((near, far));
    // By TCP the first says so.
    let [_near, _far] = by_tcp(&site);
    let (here, there, _) = connect(&site, &listener);
    say_and_hear(&here, &there);
    assert_eq!(read_while_it_is_reset(&here, there)[0], Some(ErrorKind::ConnectionReset));
}
