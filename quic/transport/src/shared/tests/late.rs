//! Tests of a connection that gets its offload late, and loses it.

use std::{any::Any, net::SocketAddr, ops::Range, sync::atomic::Ordering::SeqCst};

use millrace_moq::data::Position;
use millrace_quic::{
    packet::ConnectionId,
    plane::{
        downstream::{AskedRange, NewStream, OffloadBudget, StreamKey},
        source::{Source, SourceEnd, SourceExtent},
    },
    webtransport::Binding,
};

use super::*;
use crate::offload::{
    BeforeOffload, ConnectionStatus, DatagramCopy, Declined, Delegation, OffloadIngress, OffloadOpenings,
    OffloadOrigin, OffloadOwner, OffloadPath as Way, OffloadResult, OffloadSentPacket, OffloadedFrame,
    OpeningRequest, OpeningSide, StreamCopy,
};
use crate::stack::AckTimes;

const SECRET: [u8; 32] = [7; 32];

/// A recorded call to the fake offload.
#[derive(Clone, Debug, PartialEq, Eq)]
enum OffloadCall {
    Keys(u16, Vec<u8>),
    OpenKeys(u16),
    Id(u8),
    Way(SocketAddr),
    Session(u32),
    Delegated(u64),
    Recalled(u64),
    Release,
}

#[derive(Default)]
struct FakeOffload {
    word: AtomicU64,
    told: Mutex<Vec<OffloadCall>>,
    /// Total bytes of congestion window and flow control credit that the offload may use.
    granted: Mutex<OffloadBudget>,
    /// Total bytes of congestion window and flow control credit that the offload has used.
    used: Mutex<OffloadBudget>,
    sent: Mutex<Vec<(Instant, OffloadSentPacket)>>,
    /// True once the offload is prepared to decrypt the peer's packets.
    has_ingress: AtomicBool,
}

impl FakeOffload {
    fn add(&self, told: OffloadCall) {
        self.told.lock().push(told);
    }

    fn take(&self) -> Vec<OffloadCall> {
        std::mem::take(&mut *self.told.lock())
    }

    /// Sends bytes of the stream that was delegated under `key`, if the budget allows. Returns the packet's number.
    fn send(&self, now: Instant, key: StreamKey, id: u64, bytes: Range<u64>) -> Option<u64> {
        let len = bytes.end - bytes.start;
        let granted = *self.granted.lock();
        let mut used = self.used.lock();
        let after = OffloadBudget { bytes: used.bytes + len + 40, data: used.data + len };
        if after.bytes > granted.bytes || after.data > granted.data {
            return None;
        }
        *used = after;
        let number = self.word.fetch_add(1, SeqCst) & ((1 << 48) - 1);
        let carried =
            OffloadedFrame::Stream { id, offset: bytes.start, len: len as u16, fin: false, credit: len };
        self.sent
            .lock()
            .push((now, OffloadSentPacket { tag: key.0, number, size: len as u16 + 40, carried }));
        Some(number)
    }
}

impl Offload for FakeOffload {
    fn numbers(&self) -> &AtomicU64 {
        &self.word
    }
    fn release(self: Arc<Self>) {
        self.add(OffloadCall::Release);
    }
    fn is_active(&self) -> bool {
        true
    }
    fn set_session(&self, session: u32) {
        self.add(OffloadCall::Session(session));
    }
    fn set_binding(&self, _binding: Binding) {}
    fn set_seal_keys(self: Arc<Self>, generation: u16, secret: &TrafficSecret, _header: &[u8; 32]) {
        self.add(OffloadCall::Keys(generation, secret.key_material().key.to_vec()));
    }
    fn on_key_update(&self) {}
    fn set_open_keys(self: Arc<Self>, generation: u16, _secret: &TrafficSecret, _header: &[u8; 32]) {
        self.add(OffloadCall::OpenKeys(generation));
    }
    fn on_open_generation(&self, _generation: u16) {}
    fn add_id(self: Arc<Self>, id: &ConnectionId) {
        self.add(OffloadCall::Id(id[0]));
    }
    fn remove_id(self: Arc<Self>, _id: &ConnectionId) {}
    fn set_path(self: Arc<Self>, path: Way) {
        self.add(OffloadCall::Way(path.remote));
    }
    fn set_mtu(&self, _bytes: u32) {}
    fn set_max_datagram(&self, _bytes: u32) {}
    fn grant(&self, total: OffloadBudget) -> OffloadBudget {
        *self.granted.lock() = total;
        *self.used.lock()
    }
    fn stop(&self) {
        *self.granted.lock() = OffloadBudget::default();
    }
    fn set_waiting(&self, _level: Option<u16>) {}
    fn set_deferral(&self, _bytes: u32, _total: u64) {}
    fn read_deferred(&self) -> bool {
        false
    }
    fn arrival(&self, now: Instant, _end: [u8; 8]) -> Instant {
        now
    }
    fn on_received(&self, _number: u64) -> bool {
        true
    }
    fn leave(&self, _stream: u64, _bytes: &Range<u64>, _fin: bool) {}
    fn has_ingress(&self) -> bool {
        self.has_ingress.load(SeqCst)
    }
    fn ingress(
        self: Arc<Self>,
        _origin: OffloadOrigin,
        _seen: BeforeOffload,
        _held: Arc<dyn Any + Send + Sync>,
    ) -> Option<Arc<dyn OffloadIngress>> {
        None
    }
    fn openings(
        self: Arc<Self>,
        _alias: u64,
        _last: (u64, u64),
        _seen: BeforeOffload,
        _held: Arc<dyn Any + Send + Sync>,
    ) -> Option<Arc<dyn OffloadOpenings>> {
        // The table of tracks is full.
        self.has_ingress.store(true, SeqCst);
        None
    }
    fn accept(&self, _stream: u64) -> Option<Arc<dyn OffloadIngress>> {
        None
    }
    fn set_stream_bits(&self, _bits: u32) {}
    fn set_streams(&self, next: u64, _limit: u64) -> u64 {
        next
    }
    fn prepare(
        self: Arc<Self>,
        _ingress: &Arc<dyn OffloadIngress>,
        _request: &OpeningRequest,
    ) -> Result<Box<dyn Delegation>, Declined> {
        Err(Declined("the fake offload opens no streams".into()))
    }
    fn delegate(
        self: Arc<Self>,
        _ingress: &Arc<dyn OffloadIngress>,
        stream: &StreamCopy,
    ) -> Result<Box<dyn Delegation>, Declined> {
        self.add(OffloadCall::Delegated(stream.id));
        Ok(Box::new(IdleOffload))
    }
    fn delegate_datagrams(
        self: Arc<Self>,
        _ingress: &Arc<dyn OffloadIngress>,
        _datagrams: &DatagramCopy,
    ) -> Result<Box<dyn Delegation>, Declined> {
        Ok(Box::new(IdleOffload))
    }
    fn recall(self: Arc<Self>, key: StreamKey, _delegation: Option<Box<dyn Delegation>>) {
        self.add(OffloadCall::Recalled(key.0));
    }
    fn drain(&self, now: Instant, read: &mut dyn FnMut(Instant, OffloadSentPacket)) {
        self.sent.lock().drain(..).for_each(|(at, sent)| read(at.min(now), sent));
    }
    fn short_of_room(&self) -> u64 {
        0
    }
    fn status(&self) -> ConnectionStatus {
        ConnectionStatus { sent: 1, copies: vec![("sent", 1)], ..ConnectionStatus::default() }
    }
}

/// A fake [`OffloadIngress`], [`OffloadOpenings`] and [`Delegation`] that does nothing.
struct IdleOffload;

impl OffloadResult for IdleOffload {
    fn is_over(&self) -> bool {
        false
    }
}

impl OffloadIngress for IdleOffload {
    fn advance(&self, _position: &Position) {}
    fn is_contradicted(&self) -> bool {
        false
    }
    fn set_exclusive(&self, _exclusive: bool) {}
    fn serial(&self) -> u64 {
        0
    }
    fn on_adopted(&self) {}
    fn claim_object(&self, _object: (u64, u64)) -> bool {
        true
    }
    fn skip_to(&self, _largest: (u64, u64)) {}
}

impl Delegation for IdleOffload {
    fn set_max_offset(&self, _max: u64) {}
    fn is_of(&self, _ingress: &Arc<dyn OffloadIngress>) -> bool {
        false
    }
    fn close(&self) -> OpeningSide {
        OpeningSide::Userspace
    }
    fn on_opened(&self) {}
}

/// The data source of a stream, whose length in bytes the test increases. All its bytes are 1.
#[derive(Default)]
struct Bytes(AtomicU64);

impl Source for Bytes {
    fn extent(&self) -> SourceExtent {
        SourceExtent { len: self.0.load(SeqCst), end: SourceEnd::Open }
    }
    fn read(&self, _offset: u64, buf: &mut [u8]) -> usize {
        buf.fill(1);
        buf.len()
    }
    fn received_at(&self, _offset: u64) -> Option<Instant> {
        None
    }
}

/// Returns a server's connection after its handshake, which may send, and the present time.
fn scene() -> (Arc<SharedConnection>, Instant) {
    let shared = fresh_with(Some(SocketAddr::from(([127, 0, 0, 1], 4443))));
    let mut params = vec![0x04, 4];
    varint::encode(1_000_000, &mut params);
    params.extend([0x07, 4]);
    varint::encode(1_000_000, &mut params);
    params.extend([0x09, 1, 10]);
    shared.on_peer_params(&params, true).unwrap();
    let secret = TrafficSecret::new(KeySuite::ChaCha20Poly1305, &SECRET).unwrap();
    let mut state = shared.state.lock();
    state.offload.as_mut().unwrap().on_keys(Some(&secret), Some(secret.clone()));
    state.plane.set_secret(Some(secret));
    drop(state);
    shared.open();
    (Arc::new(shared), Instant::now())
}

/// Returns the call by which the fake offload should have got the keys of a generation.
fn keys(generation: u16) -> OffloadCall {
    let first = TrafficSecret::new(KeySuite::ChaCha20Poly1305, &SECRET).unwrap();
    let secret = (0..generation).fold(first, |secret, _| secret.next());
    OffloadCall::Keys(generation, secret.key_material().key.to_vec())
}

fn next(shared: &SharedConnection) -> (u16, u64) {
    shared.state.lock().numbers.peek()
}

fn remote(shared: &SharedConnection) -> SocketAddr {
    shared.state.lock().plane.path.remote
}

fn way(shared: &SharedConnection) -> Way {
    let local = SocketAddr::from(([127, 0, 0, 1], 4443));
    let state = shared.state.lock();
    let remote = state.plane.path.remote;
    let id = state.plane.path.id;
    Way { local, remote, id, traffic_class: state.plane.offload_class() }
}

/// Sends, in place of quinn, a packet that elicits no ACK, with the keys of `generation`.
fn quinns(shared: &SharedConnection, now: Instant, generation: u16, number: u64) -> u64 {
    shared.on_quinn_packet(now, generation, number, b"12345678", &[0x00], 100)
}

/// Receives a packet of the peer for this connection ID.
fn receive(shared: &SharedConnection, now: Instant, number: u64, id: u8) {
    let arrival = OpenedArrival { now, size: 40, end: [0; 8] };
    shared.on_received(arrival, 0, number, &[id; 8], &mut BytesMut::from(&[0x01][..]));
}

/// Opens a stream with `bytes` bytes, and makes the data plane send them.
fn stream(shared: &SharedConnection, now: Instant, bytes: u64) -> (StreamKey, Arc<Bytes>) {
    let source = Arc::new(Bytes(AtomicU64::new(bytes)));
    let key = shared.downstream().open(NewStream {
        source: Arc::clone(&source) as _,
        priority: Priority::default(),
        owner: 1,
        object_timeout: None,
        subgroup_timeout: None,
        max_delay: None,
        asked: AskedRange::Nothing,
        label: Label::default(),
    });
    shared.transmit_now(now);
    (key, source)
}

fn acknowledge_all(shared: &SharedConnection, now: Instant) {
    let largest = next(shared).1 - 1;
    let mut state = shared.state.lock();
    state.ack.ranges = vec![0..=largest];
    // `acknowledge` returns false, because the ACK ranges include skipped packet numbers.
    let _known = state.acknowledge(AckTimes { now, arrived: now });
    shared.arm(&mut state, now);
}

/// The offload decrypts the peer's packets for other tracks, too, so it needs the keys although it has no room for this
/// one.
#[test]
fn offload_gets_receive_keys_and_ids_although_it_cannot_open_the_track() {
    let (shared, now) = scene();
    receive(&shared, now, 1, 4);
    let offload = Arc::new(FakeOffload::default());
    shared.on_offload(now, Arc::clone(&offload) as _);
    let open = || shared.with_offload(|offload| offload.openings(7, (0, 0)).is_some());
    offload.take();
    assert!(!open());
    let told = offload.take();
    assert_eq!(told[..2], [0, 1].map(OffloadCall::OpenKeys));
    assert_eq!(told.last(), Some(&OffloadCall::Id(4)));
    assert!(!open());
    assert!(offload.take().is_empty(), "it has them");
}

#[test]
fn offload_added_mid_connection_gets_current_keys_path_and_packet_number() {
    let (shared, now) = scene();
    for number in 0..1000 {
        quinns(&shared, now, if number < 500 { 0 } else { 3 }, number);
    }
    [(1, 1), (2, 2), (3, 2)].into_iter().for_each(|(number, id)| receive(&shared, now, number, id));
    let moved: SocketAddr = "127.0.0.1:9".parse().unwrap();
    shared.on_remote(now, moved);
    shared.set_session(5);

    let before = next(&shared);
    let fake = Arc::new(FakeOffload::default());
    assert!(before.0 == 3 && before.1 >= 1000, "{before:?}");
    shared.on_offload(now, Arc::clone(&fake) as _);
    assert_eq!(fake.word.load(SeqCst), u64::from(before.0) << 48 | before.1);
    let told = fake.take();
    let expected = [
        OffloadCall::Session(5),
        OffloadCall::Id(1),
        OffloadCall::Id(2),
        keys(3),
        keys(4),
        OffloadCall::Way(moved),
    ];
    assert_eq!(told, expected, "the offload gets the present state only");
    assert_eq!(*fake.granted.lock(), OffloadBudget::default(), "no budget before the path is in use");
    shared.on_path(now, &way(&shared));
    assert!(fake.granted.lock().bytes > 0);

    // quinn and the offload draw from one packet number counter.
    let drawn = fake.word.fetch_add(1, SeqCst) & 0xffff_ffff_ffff;
    assert_eq!(drawn, before.1);
    assert!(quinns(&shared, now, 3, 1000) > drawn);
    quinns(&shared, now, 4, 1001);
    assert_eq!(fake.take(), [keys(5)]);
    assert_eq!(fake.word.load(SeqCst) >> 48, 4);
}

#[test]
fn packet_numbers_stay_unique_when_offloads_are_released_and_replaced() {
    let (shared, now) = scene();
    let mut numbers = std::collections::BTreeSet::new();
    let mut sent = 0;
    for round in 0..20 {
        let generation = round / 3;
        let mut draw = |numbers: &mut std::collections::BTreeSet<u64>| {
            assert!(numbers.insert(quinns(&shared, now, generation, sent)), "round {round}");
            sent += 1;
        };
        (0..50).for_each(|_| draw(&mut numbers));
        let fake = Arc::new(FakeOffload::default());
        shared.on_offload(now, Arc::clone(&fake) as _);
        let kernel = |numbers: &mut std::collections::BTreeSet<u64>| {
            assert!(numbers.insert(fake.word.fetch_add(1, SeqCst) & 0xffff_ffff_ffff), "round {round}");
        };
        (0..10).for_each(|_| {
            kernel(&mut numbers);
            draw(&mut numbers);
        });
        shared.on_offload_recalled(now);
        // The offload may still send after the release was requested, because its BPF program may be running at that
        // moment.
        (0..10).for_each(|_| {
            kernel(&mut numbers);
            draw(&mut numbers);
        });
        shared.on_released(now);
    }
}

#[test]
fn bytes_not_sent_by_a_released_offload_are_sent_by_data_plane() {
    let (shared, now) = scene();
    let fake = Arc::new(FakeOffload::default());
    shared.on_offload(now, Arc::clone(&fake) as _);
    shared.on_path(now, &way(&shared));
    let (key, source) = stream(&shared, now, 500);
    acknowledge_all(&shared, now);
    fake.take();
    let ingress: Arc<dyn OffloadIngress> = Arc::new(IdleOffload);
    assert!(shared.with_offload(|offload| offload.delegate(key, &ingress, 0, 500)));
    let OffloadCall::Delegated(id) = fake.take()[0] else { panic!("not delegated") };
    // exact: no other thread changes the count of stream bytes
    let sent = |shared: &SharedConnection| shared.downstream().stats().stream_bytes;
    fake.send(now, key, id, 500..600).unwrap();

    source.0.store(900, SeqCst);
    shared.on_offload_recalled(now);
    assert_eq!(
        fake.take(),
        [OffloadCall::Recalled(key.0), OffloadCall::Release],
        "streams are recalled before the release"
    );
    assert_eq!(fake.send(now, key, id, 600..700), None, "the budget was withdrawn");
    assert!(
        !shared.with_offload(|offload| offload.delegate(key, &ingress, 0, 600)),
        "no stream is delegated during a release"
    );
    let number = next(&shared).1;
    shared.on_returned(now, &[key]);
    shared.on_released(now);
    assert_eq!(Arc::strong_count(&fake), 1, "the connection has dropped the offload");
    shared.downstream().wake(key);
    shared.transmit_now(now);
    assert_eq!(sent(&shared), 900, "each byte was sent once");
    assert_eq!(shared.with_offload(|offload| offload.unregistered(now)), Some(0));
    assert!(next(&shared).1 > number);

    // A second offload is also allowed to send on the stream.
    acknowledge_all(&shared, now);
    let other = Arc::new(FakeOffload::default());
    shared.on_offload(now, Arc::clone(&other) as _);
    assert!(
        other.take().contains(&OffloadCall::Way(remote(&shared))),
        "the second offload gets the path, too"
    );
    assert_eq!(*other.granted.lock(), OffloadBudget::default(), "no budget before the path is in use");
    shared.on_path(now, &way(&shared));
    assert!(shared.with_offload(|offload| offload.delegate(key, &ingress, 0, 900)));
    other.send(now, key, id, 900..950).unwrap();
    source.0.store(950, SeqCst);
    shared.transmit_now(now);
    assert_eq!(sent(&shared), 950);
}

#[test]
fn offload_gets_a_send_budget_only_for_the_present_path() {
    let (shared, now) = scene();
    let first = Arc::new(FakeOffload::default());
    shared.on_offload(now, Arc::clone(&first) as _);
    let old = way(&shared);
    shared.on_path(now, &old);
    shared.on_offload_recalled(now);
    // The peer changes its address while the offload is being released.
    let moved: SocketAddr = "127.0.0.1:9".parse().unwrap();
    shared.on_remote(now, moved);
    shared.transmit_now(now);
    let told: Vec<_> = first.take().into_iter().filter(|told| matches!(told, OffloadCall::Way(_))).collect();
    assert_eq!(told, [OffloadCall::Way(old.remote)]);
    shared.on_released(now);
    let second = Arc::new(FakeOffload::default());
    shared.on_offload(now, Arc::clone(&second) as _);
    assert!(second.take().contains(&OffloadCall::Way(moved)));
    shared.on_path(now, &old);
    assert_eq!(
        *second.granted.lock(),
        OffloadBudget::default(),
        "the path was set at the first offload only"
    );
    shared.on_path(now, &way(&shared));
    assert!(second.granted.lock().bytes > 0);
    assert_eq!(remote(&shared), moved);
}

#[test]
fn offload_added_to_a_closed_connection_gets_no_send_budget() {
    let (shared, now) = scene();
    shared.close();
    let fake = Arc::new(FakeOffload::default());
    shared.on_offload(now, Arc::clone(&fake) as _);
    shared.on_path(now, &way(&shared));
    assert_eq!(*fake.granted.lock(), OffloadBudget::default());
    shared.on_released(now);
    assert_eq!(shared.offload_status().unwrap().sent, 1, "the offload was not recalled yet");
    shared.on_offload_recalled(now);
    shared.on_released(now);
    assert_eq!(shared.offload_status().unwrap().sent, 1, "counts of a released offload are kept");
    assert_eq!(Arc::strong_count(&fake), 1);
}
