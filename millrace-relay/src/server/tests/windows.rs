//! A client that was fast once keeps nobody else slow.

use millrace_proto::moq::{self, data::encode_object_header};
use millrace_transport::Windows;

use super::*;

const LEAST: u64 = 64 << 10;

struct Publisher {
    connection: Arc<Connection>,
    session: u64,
    sent: u64,
    _streams: (SendStream, Request),
}

impl Publisher {
    async fn start(relay: &Relay, number: u64) -> Self {
        let (connection, _, control) = relay.establish().await;
        let session = *relay.server.shared.sessions.lock().keys().max().unwrap();
        let (send, mut recv) = open_request(&connection, Publish { request_id: 0, ..publish(number) }).await;
        recv.read_chunk(1, true).await.unwrap().unwrap();
        Self { connection, session, sent: number, _streams: (control, (send, recv)) }
    }

    /// Sends a group, as fast as it is read.
    async fn send(&mut self) {
        const OBJECT: usize = 256 << 10;
        let number = self.sent % 2;
        let header = SubgroupHeader {
            alias: number,
            group: self.sent,
            subgroup: SubgroupId::Zero,
            priority: None,
            properties: false,
            end_of_group: false,
            first_object: true,
        };
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        encode_object_header(None, 0, None, OBJECT as u64, moq::Status::Normal, &mut bytes);
        bytes.resize(bytes.len() + OBJECT, 7);
        let mut stream = open_stream(&self.connection, &bytes).await;
        stream.finish().unwrap();
        self.sent += 2;
    }

    /// Bytes of the receive window.
    fn held(&self, relay: &Relay) -> u64 {
        let sessions = relay.server.shared.sessions.lock();
        sessions
            .get(&self.session)
            .map_or(0, |session| session.connection().receive_window(Instant::now()).held)
    }

    async fn grow(&mut self, relay: &Relay) {
        time::timeout(PATIENCE, async {
            while self.held(relay) < 4 * LEAST {
                self.send().await;
            }
        })
        .await
        .expect("a larger window");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_windows_make_room_when_others_want_it() {
    // The four connections of both ends begin with a third of it, and windows grow to three quarters.
    let windows = Arc::new(Windows::new(12 * LEAST));
    let relay = Relay::with(Access::open(), |transport| {
        transport.windows = Arc::clone(&windows);
        // Of the publishers, whose streams are quinn's.
        transport.control_streams = 1 << 20;
    });
    let shared = &relay.server.shared;
    let later = || Instant::now() + Duration::from_secs(31);
    let mut fast = Publisher::start(&relay, 0).await;
    fast.grow(&relay).await;
    let mut other = Publisher::start(&relay, 1).await;
    windows.take_pressed();
    shared.reclaim_window(later());
    assert!(fast.connection.quic.close_reason().is_none(), "nobody wants it");
    let closed = time::timeout(PATIENCE, async {
        loop {
            other.send().await;
            shared.reclaim_window(Instant::now());
            shared.reclaim_window(later());
            if let Some(reason) = fast.connection.quic.close_reason() {
                return reason;
            }
        }
    });
    let quinn::ConnectionError::ApplicationClosed(closed) = closed.await.expect("an end") else {
        panic!("closed otherwise");
    };
    assert_eq!(closed.error_code, crate::wire::var(code::Session::DATA_STREAM_TIMEOUT.0));
    assert_eq!(relay.server.status().receive.reclaimed, 1); // exact: it was counted before it was closed
    until("its window back", || fast.held(&relay) == 0).await;
    other.grow(&relay).await;
    assert!(other.connection.quic.close_reason().is_none());
}
