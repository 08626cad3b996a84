//! Tests of QUIC connections on which two parts of the server send, quinn and the data plane. An unmodified quinn
//! client must not notice that.

#![allow(clippy::unwrap_used)]

mod hostile;
mod pair;
mod proxy;

use std::{
    net::Ipv4Addr,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use millrace_quic::{
    keys::KeySuite,
    plane::downstream::{EventKind, Label, NewDatagram, Priority},
};
use millrace_testkit::async_wait_until;
use millrace_transport::{Config, Stats, Windows};
use pair::{PairOptions, PairPattern, SeamPair, in_time, local_socket};
use quinn::{Dir, TransportConfig, VarInt};

async fn traffic(suite: KeySuite) {
    let pair = in_time(SeamPair::connect(PairOptions { suite, ..PairOptions::default() })).await;
    pair.owe(0..2000, 3000);
    in_time(async { tokio::join!(pair.receive(0..2000, 3000), pair.echo(100, 5000)) }).await;
    let sent = pair.check();
    let has_heard = |stats: &Stats| stats.acks_for_quinn > 0 && stats.acks_for_data_plane > 0;
    let stats = async_wait_until("acknowledgements", || pair.server.stats(), has_heard).await;
    assert_eq!(pair.server.suite(), Some(suite));
    assert!(stats.data_plane_packets >= 4000, "{stats:?}");
    assert!(stats.quinn_packets >= 500, "{stats:?}");
    assert!(stats.skipped_numbers > 0, "quinn skips one of its first 64 numbers: {stats:?}");
    assert!(sent.numbers.len() >= 4000, "the proxy has seen all packets");
}

#[tokio::test(flavor = "multi_thread")]
async fn quinn_and_data_plane_deliver_with_chacha20() {
    traffic(KeySuite::ChaCha20Poly1305).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quinn_and_data_plane_deliver_with_aes128() {
    traffic(KeySuite::Aes128Gcm).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quinn_and_data_plane_deliver_with_aes256() {
    traffic(KeySuite::Aes256Gcm).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quinn_and_data_plane_deliver_during_key_updates_of_both_ends() {
    let pair = in_time(SeamPair::connect(PairOptions::default())).await;
    let update = async {
        loop {
            pair.server.quic.force_key_update();
            tokio::time::sleep(Duration::from_millis(7)).await; // exact: the pause is the interval between key updates
            pair.client.force_key_update();
            tokio::time::sleep(Duration::from_millis(7)).await; // exact: the pause is the interval between key updates
        }
    };
    // The next key update is possible after three probe timeouts, which are about 100 ms.
    let work = async {
        for round in 0.. {
            let tags = round * 200..(round + 1) * 200;
            pair.owe(tags.clone(), 3000);
            tokio::join!(pair.receive_data(tags, 3000), pair.echo(30, 2000));
            // exact: the loop reads the number of key updates again after the next transfer.
            if pair.server.stats().key_updates >= 6 {
                return;
            }
        }
    };
    in_time(async {
        tokio::select! {
            () = work => {}
            () = update => {}
        }
    })
    .await;
    assert!(pair.check().generations() >= 6);
}

/// The packets of quinn and of the data plane count against the packet limit of a key. quinn's packets alone are too
/// few to cause an update.
#[tokio::test(flavor = "multi_thread")]
async fn keys_are_updated_before_their_packet_limit() {
    let server = Config { max_packets_per_key: 2000, ..Config::default() };
    let pair = in_time(SeamPair::connect(PairOptions { server, ..PairOptions::default() })).await;
    pair.owe(0..3000, 4000);
    in_time(pair.receive(0..3000, 4000)).await;
    let sent = pair.check();
    for generation in 0..sent.generations() {
        let sealed = sent.numbers.values().filter(|used| **used == generation).count();
        assert!(sealed <= 2000, "{sealed} packets with the keys of generation {generation}");
    }
    assert!(sent.generations() >= 4, "{} generations", sent.generations());
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_connection_sends_nothing() {
    let pair = in_time(SeamPair::connect(PairOptions::default())).await;
    pair.owe(0..10, 1000);
    in_time(pair.receive(0..10, 1000)).await;
    pair.client.close(VarInt::from_u32(0), b"");
    in_time(pair.server.quic.closed()).await;
    // exact: a closed connection sends nothing, so the count of its packets cannot change
    let before = pair.server.stats().data_plane_packets;
    pair.owe(10..100, 1000);
    tokio::time::sleep(Duration::from_millis(200)).await; // exact: the pause is the time in which no packet may be sent
    // exact: a closed connection sends no packets that could be counted
    assert_eq!(pair.server.stats().data_plane_packets, before);
}

async fn bad_network(loss: u32) {
    let pair = in_time(SeamPair::connect(PairOptions::default())).await;
    pair.proxy.impair(loss, 50, 50);
    pair.owe(0..300, 5000);
    in_time(async { tokio::join!(pair.receive(0..300, 5000), pair.echo(20, 2000)) }).await;
    pair.check();
    let stats = async_wait_until(
        "losses",
        || pair.server.downstream().stats(),
        |stats| loss == 0 || stats.recovery.packets_lost > 0,
    )
    .await;
    assert_eq!(stats.streams_opened, 300);
}

#[tokio::test(flavor = "multi_thread")]
async fn quinn_and_data_plane_deliver_despite_reordering_and_duplication() {
    bad_network(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quinn_and_data_plane_deliver_despite_five_percent_loss() {
    bad_network(50).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quinn_and_data_plane_deliver_despite_twenty_percent_loss() {
    bad_network(200).await;
}

/// The client moves while it only receives, so that it sends nothing but ACKs. quinn uses another connection ID of the
/// client at each new address, and the client retires the old ones.
#[tokio::test(flavor = "multi_thread")]
async fn data_plane_follows_the_client_to_a_new_address() {
    let pair = in_time(SeamPair::connect(PairOptions::default())).await;
    in_time(pair.echo(3, 1000)).await;
    for round in 0..4 {
        let tags = round * 500..(round + 1) * 500;
        pair.owe(tags.clone(), 8000);
        pair.client_endpoint.rebind(local_socket()).unwrap();
        in_time(pair.receive_data(tags, 8000)).await;
    }
    assert!(pair.check().ids.len() >= 5);
    // exact: the count of address changes is final, since streams have arrived at each new address
    assert_eq!(pair.server.stats().address_changes, 4);
}

/// A NAT drops the mapping of a client that only receives. All packets to the client are lost, the congestion window is
/// full, and probe timeouts double. When the client's next packet arrives, quinn sends a PATH_CHALLENGE, whose
/// acknowledgement reveals the losses. So media is sent before the next probe timeout.
#[tokio::test(flavor = "multi_thread")]
async fn client_behind_a_new_nat_mapping_gets_media_at_its_next_packet() {
    /// Number of probe timeouts that the test waits for. The next probe timeout would come about 3 s later.
    const TIMEOUTS: u64 = 7;
    // On a busy machine round trips and thus probe timeouts are long, so the idle timeout has to be longer than their
    // sum.
    let idle = Duration::from_secs(600);
    let mut options = PairOptions::default();
    options.client.max_idle_timeout(Some(idle.try_into().expect("a time")));
    options.server.idle_timeout = idle;
    let pair = in_time(SeamPair::connect(options)).await;
    in_time(pair.echo(3, 1000)).await;
    pair.owe(0..50, 8000);
    in_time(pair.receive_data(0..50, 8000)).await;
    pair.proxy.impair(1000, 0, 0);
    pair.owe(50..1050, 8000);
    // exact: the test compares this count of probe timeouts with a later count.
    let before = pair.server.downstream().stats().recovery.probe_timeouts;
    async_wait_until(
        "time-outs",
        || pair.server.downstream().stats().recovery.probe_timeouts,
        |timeouts| *timeouts >= before + TIMEOUTS,
    )
    .await;
    pair.proxy.forget();
    pair.proxy.impair(0, 0, 0);
    let begin = Instant::now();
    let (_, first) = in_time(async { tokio::join!(pair.echo(1, 10), pair.client.accept_uni()) }).await;
    let took = begin.elapsed();
    first.expect("the client has no error");
    assert!(took < Duration::from_secs(1), "media {took:?} after the client's packet");
}

#[tokio::test(flavor = "multi_thread")]
async fn packet_size_follows_the_path_mtu_up_and_down() {
    let pair = in_time(SeamPair::connect(PairOptions::default())).await;
    pair.owe(0..1000, 5000);
    in_time(pair.receive(0..1000, 5000)).await;
    in_time(async {
        // exact: the loop reads the path MTU again after the next transfer.
        while pair.server.quic.stats().path.current_mtu < 1452 {
            pair.echo(1, 5000).await;
        }
    })
    .await;
    assert_eq!(pair.check().largest, 1452, "quinn's discovery has found its upper bound");

    // quinn sends too few packets to notice the smaller MTU, so the data plane has to notice it.
    pair.proxy.impairment.max_size.store(1250, Ordering::Relaxed);
    pair.owe(1000..1200, 5000);
    in_time(pair.receive_data(1000..1200, 5000)).await;
    assert_eq!(pair.server.downstream().mtu(), 1200);
    in_time(pair.echo(30, 5000)).await;
    pair.check();
}

/// A relay forwards a client's packets with longer headers, and each copy has to fit into one packet.
#[tokio::test(flavor = "multi_thread")]
async fn client_packets_are_limited_to_1420_bytes_so_forwarded_copies_fit() {
    let pair = in_time(SeamPair::connect(PairOptions::default())).await;
    in_time(async {
        // exact: the loop reads the path MTU again after the next transfer.
        while pair.client.stats().path.current_mtu < 1420 {
            pair.echo(1, 5000).await;
        }
    })
    .await;
    pair.echo(30, 5000).await;
    // exact: path MTU discovery had time to exceed 1420 bytes if the limit allowed it
    let mtu = pair.client.stats().path.current_mtu;
    assert_eq!(mtu, 1420, "the server's limit is below quinn's upper bound of 1452");
}

#[tokio::test(flavor = "multi_thread")]
async fn tiny_flow_control_credit_is_shared_by_quinn_and_data_plane() {
    let mut client = TransportConfig::default();
    client
        .receive_window(VarInt::from_u32(6000))
        .stream_receive_window(VarInt::from_u32(2000))
        .max_concurrent_uni_streams(VarInt::from_u32(3));
    let pair = in_time(SeamPair::connect(PairOptions { client, ..PairOptions::default() })).await;
    pair.owe(0..100, 5000);
    in_time(async { tokio::join!(pair.receive(0..100, 5000), pair.echo(30, 5000)) }).await;
    pair.check();
    // exact: all streams have arrived, so the counts of STREAM frames and credit no longer change
    let stats = pair.server.stats();
    assert!(stats.credit_grants >= 20, "the echo alone takes 25 times quinn's grant: {stats:?}");
    assert!(stats.stream_frames_consumed >= 100, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_sending_of_a_client_ends_a_stream() {
    let pair = in_time(SeamPair::connect(PairOptions::default())).await;
    let keys = pair.owe(0..1, 50 << 20);
    let stop = async {
        loop {
            let mut stream = pair.client.accept_uni().await.unwrap();
            if stream.id().index() == 1 {
                stream.stop(VarInt::from_u32(7)).unwrap();
                return;
            }
        }
    };
    in_time(stop).await;
    let mut events = Vec::new();
    while events.last() != Some(&EventKind::Reset(7)) {
        for event in in_time(pair.server.events()).await {
            assert_eq!(event.key, keys[0]);
            events.push(event.kind);
        }
    }
    assert_eq!(events, [EventKind::Opened, EventKind::Stopped(7), EventKind::Reset(7)]);
    in_time(pair.echo(3, 1000)).await;
    pair.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn datagrams_arrive_while_quinn_and_data_plane_send() {
    let pair = in_time(SeamPair::connect(PairOptions::default())).await;
    for tag in 0..200u64 {
        let payload = PairPattern::bytes(tag, 1000).into();
        let datagram = NewDatagram {
            payload,
            priority: Priority::default(),
            expires: None,
            late: None,
            label: Label::default(),
        };
        pair.server.downstream().send_datagram(datagram).unwrap();
        pair.server.transmit_now();
        let received = in_time(pair.client.read_datagram()).await.unwrap();
        assert_eq!(PairPattern::check(&received), tag);
    }
    in_time(pair.echo(3, 1000)).await;
    pair.check();
}

/// The proxy's socket is connected, like a client's. So it accepts packets only from the server address to which it
/// sends.
#[tokio::test(flavor = "multi_thread")]
async fn server_sends_from_the_address_that_the_client_connected_to() {
    let listen = [Ipv4Addr::UNSPECIFIED, Ipv4Addr::new(127, 0, 0, 2)];
    let pair = in_time(SeamPair::connect(PairOptions { listen, ..PairOptions::default() })).await;
    pair.owe(0..100, 3000);
    in_time(pair.receive(0..100, 3000)).await;
    pair.check();
}

/// A receive window grows if the application reads the data, and does not grow otherwise.
#[tokio::test(flavor = "multi_thread")]
async fn receive_window_grows_only_while_the_application_reads() {
    const LEAST: u64 = 64 << 10;
    let windows = Arc::new(Windows::new(12 * LEAST));
    let server = Config { windows: Arc::clone(&windows), ..Config::default() };
    let pair = in_time(SeamPair::connect(PairOptions { server, ..PairOptions::default() })).await;
    assert_eq!(windows.held(), LEAST);
    let mut unread = pair.client.open_uni().await.unwrap();
    in_time(unread.write_all(&[0; LEAST as usize])).await.unwrap();
    async_wait_until("the sent data", || pair.server.quic.stats().udp_rx.bytes, |bytes| *bytes >= LEAST)
        .await;
    assert_eq!(windows.held(), LEAST, "unread data does not grow the window");
    unread.reset(VarInt::from_u32(0)).unwrap();
    let receive = async {
        let mut stream = pair.server.quic.accept_uni().await.unwrap();
        let _ = stream.read_to_end(1 << 30).await;
    };
    in_time(receive).await;
    in_time(async {
        while windows.held() < 8 * LEAST {
            pair.echo(1, 1 << 20).await;
        }
    })
    .await;
    pair.echo(1, 1 << 20).await;
    // On a slow machine the receive window may have shrunk since it was read.
    assert!(windows.held() <= 8 * LEAST, "a window doubles three times, up to three quarters of the budget");
    pair.client.close(VarInt::from_u32(0), b"");
    in_time(pair.server.quic.closed()).await;
    drop(pair);
    async_wait_until("the return of the window", || windows.held(), |held| *held == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_opens_many_streams_may_open_as_many_as_the_settings_allow() {
    const STREAMS: usize = 300;
    let pair = in_time(SeamPair::connect(PairOptions::default())).await;
    let open = async {
        let mut open = Vec::new();
        for _ in 0..STREAMS {
            let mut stream = pair.client.open_uni().await.unwrap();
            stream.write_all(b"open").await.unwrap();
            open.push(stream);
        }
        open
    };
    let accept = async {
        let mut counted = Vec::new();
        while counted.len() < STREAMS {
            let stream = pair.server.quic.accept_uni().await.unwrap();
            counted.push((stream, pair.server.count_stream(Dir::Uni)));
        }
        counted
    };
    in_time(async { tokio::join!(open, accept) }).await;
}
