//! Tests of clients that violate the protocol.

use millrace_quic::{
    keys::{DirectionKey, HeaderKey},
    packet::{self, ConnectionId},
    varint,
};
use quinn::{ConnectionError, TransportErrorCode};

use crate::{
    pair::{ID_LEN, PairOptions, PairSent, SeamPair, in_time, short_packet},
    proxy::Towards,
};

/// A sender of forged packets with the client's keys. The real client's packets no longer reach the server.
struct Hostile<'a> {
    pair: &'a SeamPair,
    id: ConnectionId,
    header: HeaderKey,
    key: DirectionKey,
    generation: u16,
    /// The next packet number, which is larger than any of the real client's.
    next: u64,
}

impl<'a> Hostile<'a> {
    /// Cuts the path of the real client, so that only forged packets reach the server.
    fn new(pair: &'a SeamPair) -> Self {
        pair.proxy.impair(1000, 0, 0);
        let genuine = pair.proxy.seen(Towards::Server);
        // The client may have updated its keys, so the newest generation is used.
        let sent = PairSent::open(&genuine, pair.suite, &pair.secrets, "CLIENT_TRAFFIC_SECRET_0");
        let newest = sent.numbers.values().max().copied().unwrap();
        let first = pair.secrets.secret(pair.suite, "CLIENT_TRAFFIC_SECRET_0");
        let secret = (0..newest).fold(first.clone(), |secret, _| secret.next());
        let id = genuine.iter().rev().find_map(|datagram| short_packet(datagram)).expect("a 1-RTT packet");
        Self {
            pair,
            id: ConnectionId::new(&id[1..1 + ID_LEN]).unwrap(),
            header: first.header_key(),
            key: secret.packet_key(),
            generation: newest as u16,
            next: 5000,
        }
    }

    async fn send(&mut self, frames: &[u8]) {
        let mut forged = Vec::new();
        packet::start(&self.id, &mut forged);
        forged.extend_from_slice(frames);
        packet::finish(&mut forged, 0, ID_LEN, self.generation, self.next, &self.key, &self.header);
        self.next += 1;
        self.pair.proxy.forge(&forged).await;
    }

    /// Returns the largest packet number that the server has sent.
    fn largest(&self) -> u64 {
        let datagrams = self.pair.proxy.seen(Towards::Client);
        let sent = PairSent::open(&datagrams, self.pair.suite, &self.pair.secrets, "SERVER_TRAFFIC_SECRET_0");
        *sent.numbers.last_key_value().expect("the server has sent something").0
    }
}

/// Returns a connection over which quinn and the data plane have sent data.
async fn used() -> SeamPair {
    let pair = in_time(SeamPair::connect(PairOptions::default())).await;
    pair.owe(0..10, 3000);
    in_time(async { tokio::join!(pair.receive(0..10, 3000), pair.echo(3, 1000)) }).await;
    pair.check();
    pair
}

/// Returns the error code with which the server closed the connection.
async fn verdict(pair: &SeamPair) -> TransportErrorCode {
    match in_time(pair.server.quic.closed()).await {
        ConnectionError::TransportError(error) => error.code,
        other => panic!("closed for another reason: {other}"),
    }
}

/// Returns the error code with which the server closes the connection when the client sends these frames.
async fn verdict_on(frames: &[u8]) -> TransportErrorCode {
    let pair = used().await;
    Hostile::new(&pair).send(frames).await;
    verdict(&pair).await
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledgement_of_an_unsent_packet_closes_the_connection() {
    let code = verdict_on(&[0x02, 0x80, 0x01, 0x00, 0x00, 0, 0, 0]).await;
    assert_eq!(code, TransportErrorCode::PROTOCOL_VIOLATION);
}

#[tokio::test(flavor = "multi_thread")]
async fn max_stream_data_for_an_unopened_stream_closes_the_connection() {
    let code = verdict_on(&[0x11, 0x40, 3 + 4 * 50, 0x44, 0]).await;
    assert_eq!(code, TransportErrorCode::STREAM_STATE_ERROR);
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_sending_for_an_unopened_stream_closes_the_connection() {
    let code = verdict_on(&[0x05, 0x40, 3 + 4 * 50, 1]).await;
    assert_eq!(code, TransportErrorCode::STREAM_STATE_ERROR);
}

/// Each PING makes quinn send an ACK, which the client never acknowledges. While one older packet is in flight, the
/// server cannot forget the numbers of these ACK packets.
#[tokio::test(flavor = "multi_thread")]
async fn connection_of_a_client_without_acknowledgements_is_closed() {
    let pair = used().await;
    let mut client = Hostile::new(&pair);
    pair.owe(10..11, 100);
    in_time(async {
        while pair.server.quic.close_reason().is_none() {
            for _ in 0..16 {
                client.send(&[0x01, 0, 0]).await;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(pair.server.quic.close_reason(), Some(ConnectionError::LocallyClosed));
}

/// A malicious peer acknowledges packets that it did not receive, so that the sender exceeds the path's capacity (RFC
/// 9000, section 21.4).
#[tokio::test(flavor = "multi_thread")]
async fn connection_of_a_client_that_acknowledges_skipped_packets_is_closed() {
    let pair = used().await;
    let mut client = Hostile::new(&pair);
    pair.owe(10..2000, 3000);
    in_time(async {
        while pair.server.quic.close_reason().is_none() {
            let largest = client.largest();
            let mut all = vec![0x02];
            for field in [largest, 0, 0, largest] {
                varint::encode(field, &mut all);
            }
            client.send(&all).await;
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(verdict(&pair).await, TransportErrorCode::PROTOCOL_VIOLATION);
    let stats = pair.server.stats(); // exact: the packet counts of a closed connection no longer change
    assert!(stats.data_plane_packets < 400, "{stats:?}");
}
