//! Tests that the protocol and the traffic profile of a connection between two sockets are recognised by its first
//! bytes.
//!
//! Tier: test-all, since it is no part of the product.

#![allow(clippy::unwrap_used)]

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
};

use millrace_graft_proto::select::profile::TrafficProfile;
use millrace_study_ndpi::{Ndpi, NdpiSample, parse, profile};

const HELLO: &[u8] = include_bytes!("../src/client_hello.bin");
const ALERT: &[u8] = &[21, 3, 3, 0, 2, 2, 40];
const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: archive.example\r\nUser-Agent: curl/8.0\r\nAccept: */*\r\n\r\n";
const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nyes";
const SSH: &[u8] = b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n";

/// Segments in their order. The flag is true if the client sends the segment.
type SpokenSegments = &'static [(bool, &'static [u8])];

/// Sends `bytes` over a connection, and adds the received bytes to `sample`, the record of the connection's first
/// bytes.
fn pass(from: &mut TcpStream, to: &mut TcpStream, is_client: bool, bytes: &[u8], sample: &mut NdpiSample) {
    from.write_all(bytes).unwrap();
    let mut got = vec![0; bytes.len()];
    to.read_exact(&mut got).unwrap();
    sample.take(is_client, &got);
}

#[test]
fn ndpi_profiles_ssh_http_and_tls_connections_by_their_first_bytes() {
    let ndpi = match Ndpi::load() {
        Ok(ndpi) => ndpi,
        Err(error) => {
            return println!("SKIP ndpi_profiles_ssh_http_and_tls_connections_by_their_first_bytes: {error}");
        }
    };
    let table: [(&str, SpokenSegments, _); 3] = [
        ("SSH", &[(false, SSH), (true, SSH)], TrafficProfile::Time),
        ("HTTP", &[(true, GET), (false, OK)], TrafficProfile::TimeAndLoss),
        ("TLS", &[(true, HELLO), (false, ALERT)], TrafficProfile::TimeAndLoss),
    ];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for (protocol, said, purpose) in table {
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let mut sample = NdpiSample::new(7100);
        for (is_client, bytes) in said {
            match is_client {
                true => pass(&mut client, &mut server, true, bytes, &mut sample),
                false => pass(&mut server, &mut client, false, bytes, &mut sample),
            }
        }
        let (port, segments) = parse(sample.record()).unwrap();
        let found = ndpi.look(port, segments).unwrap();
        assert_eq!((found.protocol.as_str(), profile(&found)), (protocol, Some(purpose)), "{found:?}");
    }
}
