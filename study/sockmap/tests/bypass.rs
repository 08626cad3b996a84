//! Tests bytes that are passed between two sockets without TCP: what still works, and what breaks.
//!
//! Tier: test-all, since it is no part of the product.

#![allow(clippy::unwrap_used)]

mod support;

use std::{
    io::{self, ErrorKind, Read, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use millrace_study_sockmap::Bypass;
use millrace_testkit::wait_for;
use nix::{
    errno::Errno,
    fcntl::{SpliceFFlags, splice},
};

use support::{broker, cgroup, connect};

const WINDOW: u64 = 256 << 10;
const LONG: Duration = Duration::from_secs(60);

fn is_there(test: &str) -> bool {
    let is_there = cgroup().is_some();
    if !is_there {
        println!("SKIP {test}: needs root and cgroup v2");
    }
    is_there
}

/// Reads some bytes. A blocking read may fail with EAGAIN before anything has arrived, so it is repeated.
fn read_some(mut stream: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    let start = Instant::now();
    loop {
        match stream.read(buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock && start.elapsed() < LONG => {}
            done => return done,
        }
    }
}

/// The broker's reads of one connection, which the BPF programs are told of.
struct Told<'a> {
    bypass: &'a Bypass,
    from: SocketAddr,
    to: SocketAddr,
}

impl<'a> Told<'a> {
    /// Call this before both ends may have closed the connection: its addresses are unknown from then on.
    fn new(bypass: &'a Bypass, stream: &TcpStream) -> Self {
        Self { bypass, from: stream.peer_addr().unwrap(), to: stream.local_addr().unwrap() }
    }
}

/// Reads all bytes until the end. For the broker's `stream`, it also tells the BPF programs how many bytes were read.
fn read_all(stream: &TcpStream, told: Option<Told>) -> Vec<u8> {
    let mut all = Vec::new();
    let mut piece = vec![0; 64 << 10];
    loop {
        let length = read_some(stream, &mut piece).unwrap();
        if length == 0 {
            return all;
        }
        all.extend(&piece[..length]);
        told.iter().for_each(|told| told.bypass.take(told.from, told.to, all.len() as u64).unwrap());
    }
}

#[test]
fn sockmap_bypass_delivers_bytes_once_and_in_order() {
    if !is_there("sockmap_bypass_delivers_bytes_once_and_in_order") {
        return;
    }
    const NUMBERS: u32 = 20_000;
    let say = |mut to: &TcpStream| {
        (0..NUMBERS).for_each(|number| to.write_all(&number.to_be_bytes()).unwrap());
        to.shutdown(Shutdown::Write).unwrap();
    };
    let is_all = |heard: Vec<u8>| {
        let numbers = heard.chunks(4).map(|it| u32::from_be_bytes(it.try_into().unwrap()));
        assert!(numbers.eq(0..NUMBERS), "{} bytes", heard.len());
    };
    for address in ["127.0.0.1:0", "[::1]:0"] {
        let Some((listener, Some(bypass))) = broker(address, Some(WINDOW)) else {
            println!("SKIP sockmap_bypass_delivers_bytes_once_and_in_order, {address}: no such address");
            continue;
        };
        for _ in 0..10 {
            let (application, broker) = connect(&listener);
            let told = Told::new(&bypass, &broker);
            thread::scope(|scope| {
                scope.spawn(|| say(&application));
                scope.spawn(|| say(&broker));
                scope.spawn(|| is_all(read_all(&application, None)));
                is_all(read_all(&broker, Some(told)));
            });
        }
        assert_eq!(bypass.count("entered").unwrap(), 20, "{address}");
        assert!(bypass.count("passed-on").unwrap() > 0, "{address}");
    }
}

/// If the broker reads nothing, the application's bytes go by TCP after one window. TCP then blocks the application.
#[test]
fn sockmap_bypass_falls_back_to_tcp_if_the_broker_reads_nothing() {
    if !is_there("sockmap_bypass_falls_back_to_tcp_if_the_broker_reads_nothing") {
        return;
    }
    let (listener, bypass) = broker("127.0.0.1:0", Some(WINDOW)).unwrap();
    let (mut application, broker) = connect(&listener);
    application.set_nonblocking(true).unwrap();
    let bytes: Vec<u8> = (0..64_usize << 20).map(|at| (at / 251) as u8).collect();
    let mut sent = 0;
    while let Ok(length) = application.write(&bytes[sent..(sent + (16 << 10)).min(bytes.len())]) {
        sent += length;
    }
    assert!(sent < 32 << 20, "{sent} bytes were taken without a reader");
    let bypass = bypass.unwrap();
    assert!(bypass.count("full").unwrap() > 0);
    let told = Told::new(&bypass, &broker);
    application.shutdown(Shutdown::Write).unwrap();
    assert!(read_all(&broker, Some(told)) == bytes[..sent]);
}

#[test]
fn splice_misses_data_that_sockmap_has_redirected() {
    if !is_there("splice_misses_data_that_sockmap_has_redirected") {
        return;
    }
    const LENGTH: usize = 5000;
    for (window, wanted) in [(None, Ok(LENGTH)), (Some(WINDOW), Err(Errno::EAGAIN))] {
        let (listener, _bypass) = broker("127.0.0.1:0", window).unwrap();
        let (application, mut broker) = connect(&listener);
        broker.write_all(&[7; LENGTH]).unwrap();
        let mut seen = [0; LENGTH];
        wait_for("all bytes", || application.peek(&mut seen).is_ok_and(|seen| seen == LENGTH));
        let (_read, write) = nix::unistd::pipe().unwrap();
        // A blocking socket would make splice wait forever.
        application.set_nonblocking(true).unwrap();
        let moved = splice(&application, None, &write, None, LENGTH, SpliceFFlags::SPLICE_F_NONBLOCK);
        assert_eq!(moved, wanted, "window {window:?}");
    }
}
