//! Tests of sessions that applications use as streams of bytes.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    thread,
};

use millrace_messages::{Error, Session, SessionEvent, Stream, Want};

use crate::messages::{event, hosts, pair};
use crate::site::{GraftSite, ip};

/// Settings of the graft Go-Back-N, in addition to the grafts that the function `hosts` configures.
pub const IN_ORDER: &str = "[[graft]]\nname = \"all\"\nfunctions = [\"window\", \"gobackn\", \"number\", \"acknowledge\"]\n\
                        [sessions.parameters.gobackn]\nretry_us = 20000\n";

fn streams(site: &GraftSite) -> (Stream, Stream) {
    let (near, far) = pair(site, &["reliability", "order"]);
    (Stream::new(near).unwrap(), Stream::new(far).unwrap())
}

/// Returns bytes whose values depend on their position.
fn bytes(from: usize, to: usize) -> Vec<u8> {
    (from..to).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect()
}

/// Writes the bytes in pieces of every size.
fn write_all(to: &mut Stream, all: usize) {
    let mut at = 0;
    for size in (1..).map(|number: usize| number * 7919 % 40_000 + 1) {
        let end = all.min(at + size);
        to.write_all(&bytes(at, end)).unwrap();
        at = end;
        if at == all {
            return to.flush().unwrap();
        }
    }
}

fn read_to_end(from: &mut Stream, all: usize) {
    let mut got = Vec::new();
    from.read_to_end(&mut got).unwrap();
    assert_eq!(got.len(), all);
    assert!(got == bytes(0, all), "other bytes");
}

/// Bytes are sent in both directions at once over a queue that is too short and drops packets. One direction ends
/// first.
#[test]
fn stream_bytes_arrive_in_order_and_each_direction_ends_by_itself() {
    let Some(site) = GraftSite::new("stream") else { return };
    let _hosts = hosts(&site, IN_ORDER);
    let (mut near, mut far) = streams(&site);
    for namespace in &site.namespaces {
        ip(&format!("netns exec {namespace} tc qdisc add dev eth root tbf rate 40mbit burst 8k limit 16k"));
    }
    const THERE: usize = 1_500_000;
    const BACK: usize = 300_000;
    let reading = thread::spawn(move || {
        read_to_end(&mut far, THERE);
        // The end that has finished sending can still receive.
        write_all(&mut far, BACK);
        far.close().unwrap();
    });
    write_all(&mut near, THERE);
    near.finish().unwrap();
    let error = near.write(b"more").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
    read_to_end(&mut near, BACK);
    reading.join().unwrap();
    assert_eq!(near.read(&mut [0; 10]).unwrap(), 0, "the end of the stream was not reported again");
}

#[test]
fn stream_requires_reliability_and_order() {
    let Some(site) = GraftSite::new("no-stream") else { return };
    let _hosts = hosts(&site, IN_ORDER);
    let refused = |session: Session, missing: &str| {
        let error = Stream::new(session).map(drop).unwrap_err();
        assert!(matches!(&error, Error::NotAStream { .. }) && error.to_string().contains(missing), "{error}");
    };
    let (near, far) = pair(&site, &["reliability"]);
    refused(near, "selective has no order");
    drop(far);
    let (mut near, _far) = streams(&site);
    assert_eq!(near.write(&[1; 20_000]).unwrap(), 16_384);
    let want = Want { services: ["partial-order".to_owned()].into(), ..Want::default() };
    near.session().renegotiate(want).unwrap();
    event(near.session(), |event| matches!(event, SessionEvent::Changed { .. }));
    let error = near.write(b"more").unwrap_err();
    assert!(error.to_string().contains("newest has no reliability"), "{error}");
}

/// A stream that was aborted must not look complete to its reader.
#[test]
fn aborted_stream_reports_no_regular_end() {
    let Some(site) = GraftSite::new("cut") else { return };
    let _hosts = hosts(&site, IN_ORDER);
    let (mut near, mut far) = streams(&site);
    near.write_all(b"the beginning").unwrap();
    let mut got = [0; 13];
    far.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"the beginning");
    // Dropping the sender's end of the stream without closing it acts like the death of its process.
    drop(near);
    let error = far.read(&mut got).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
}
