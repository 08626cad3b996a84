#![allow(clippy::unwrap_used)]

use std::{net::SocketAddr, sync::mpsc, thread};

use millrace_quic::packet::ConnectionId;
use millrace_testkit::wait_for;
use millrace_transport::offload::{OffloadIngress, OpeningSide};

use super::*;

/// A recorded call of a method of the test's connection.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Done {
    Keys(u16),
    OpenKeys(u16),
    Id(u8, bool),
    Stopped,
    Released,
    Path(u16),
    Returned(Vec<u64>),
    Gone(Vec<u64>),
    Dropped(u64),
    Waited,
}

#[derive(Clone, Default)]
struct CommandLog(Arc<Mutex<Vec<Done>>>);

impl CommandLog {
    fn add(&self, done: Done) {
        self.0.lock().push(done);
    }

    fn take(&self) -> Vec<Done> {
        std::mem::take(&mut *self.0.lock())
    }
}

#[derive(Default)]
struct FakeSubject {
    place: ConnectionCommands,
    log: CommandLog,
    state: Mutex<SubjectState>,
    /// True if [`CommandSubject::set_path`] panics.
    panics: bool,
}

/// Simulates program runs: they may use a previous path or previous keys until the next wait.
#[derive(Default)]
struct SubjectState {
    path_waits: bool,
    installed: [bool; 2],
    waits: [bool; 2],
}

impl FakeSubject {
    fn waited(&self) {
        let mut state = self.state.lock();
        state.path_waits = false;
        state.waits = [false; 2];
    }
}

impl CommandSubject for FakeSubject {
    fn place(&self) -> &ConnectionCommands {
        &self.place
    }

    fn retire_keys(&self, generation: u16) -> bool {
        let mut state = self.state.lock();
        let parity = usize::from(generation & 1);
        if std::mem::take(&mut state.installed[parity]) {
            state.waits[parity] = true;
        }
        state.waits[parity]
    }

    fn set_keys(&self, generation: u16, _keys: &QuicKeys) {
        let mut state = self.state.lock();
        let parity = usize::from(generation & 1);
        assert!(!state.waits[parity], "keys {generation} are written while the old ones are in use");
        state.installed[parity] = true;
        self.log.add(Done::Keys(generation));
    }

    fn set_open_keys(&self, generation: u16, _keys: &QuicKeys) {
        self.log.add(Done::OpenKeys(generation));
    }

    fn set_id(&self, id: &ConnectionId, is_used: bool) {
        self.log.add(Done::Id(id[0], is_used));
    }

    fn stop_opening(&self) {
        self.log.add(Done::Stopped);
    }

    fn on_released(&self) {
        self.log.add(Done::Released);
    }

    fn path_waits(&self) -> bool {
        self.state.lock().path_waits
    }

    fn set_path(&self, path: &OffloadPath) {
        assert!(!self.panics, "for the test");
        let mut state = self.state.lock();
        assert!(!std::mem::replace(&mut state.path_waits, true), "a path is written while it is in use");
        self.log.add(Done::Path(path.remote.port()));
    }

    fn on_returned(&self, keys: &[StreamKey]) {
        self.log.add(Done::Returned(keys.iter().map(|key| key.0).collect()));
    }

    fn on_gone(&self, tags: &[u64]) {
        self.log.add(Done::Gone(tags.to_vec()));
    }
}

struct Delegated(u64, CommandLog);

impl Delegation for Delegated {
    fn set_max_offset(&self, _max: u64) {}

    fn is_of(&self, _ingress: &Arc<dyn OffloadIngress>) -> bool {
        false
    }

    fn close(&self) -> OpeningSide {
        OpeningSide::Userspace
    }

    fn on_opened(&self) {}
}

impl Drop for Delegated {
    fn drop(&mut self) {
        self.1.add(Done::Dropped(self.0));
    }
}

type Both = (Arc<CommandQueue<FakeSubject, u32>>, Taker<FakeSubject, u32>);

fn path(port: u16) -> OffloadPath {
    let at = |port| SocketAddr::from(([192, 0, 2, 1], port));
    OffloadPath { local: at(4443), remote: at(port), id: ConnectionId::default(), traffic_class: 0 }
}

fn keys() -> QuicKeys {
    QuicKeys::chacha20_poly1305(&[0; 32], &[0; 12], &[0; 32])
}

/// Takes one batch of queued commands and carries it out. Returns the number of connections in the batch.
fn work((queue, taker): &Both, all: &[&Arc<FakeSubject>]) -> usize {
    queue.wake(); // makes `take` return without waiting for a command
    let batch = taker.take(Instant::now()).unwrap();
    let connections = batch.connections.len();
    batch.carry_out(false, || {
        all.iter().for_each(|fake| fake.waited());
        all[0].log.add(Done::Waited);
    });
    connections
}

#[test]
fn queued_path_changes_of_a_connection_coalesce_into_one_command() {
    let both = CommandQueue::new();
    let fake = Arc::new(FakeSubject::default());
    for port in 1..=10_000 {
        both.0.set_path(Arc::clone(&fake), path(port));
        assert_eq!(both.0.len(), 1);
    }
    assert_eq!((both.0.commands(), both.0.coalesced()), (10_000, 9_999));
    assert_eq!(work(&both, &[&fake]), 1);
    assert_eq!(both.0.len(), 0);
    assert_eq!(fake.log.take(), [Done::Path(10_000)], "nobody uses another one yet");
    both.0.set_path(Arc::clone(&fake), path(1));
    work(&both, &[&fake]);
    assert_eq!(fake.log.take(), [Done::Waited, Done::Path(1)]);
    assert_eq!(work(&both, &[&fake]), 0);
    assert!(fake.log.take().is_empty());
}

#[test]
fn commands_not_waiting_for_program_runs_precede_one_shared_wait() {
    const MANY: u16 = 1000;
    let both: Both = CommandQueue::new();
    let log = CommandLog::default();
    let fakes: Vec<_> =
        (0..MANY).map(|_| Arc::new(FakeSubject { log: log.clone(), ..FakeSubject::default() })).collect();
    let all: Vec<_> = fakes.iter().collect();
    let move_all = |to: u16| {
        fakes.iter().for_each(|fake| both.0.set_path(Arc::clone(fake), path(to)));
    };
    move_all(1);
    work(&both, &all);
    assert!(!log.take().contains(&Done::Waited));
    move_all(2);
    assert_eq!(both.0.len(), usize::from(MANY));
    let newcomer = Arc::new(FakeSubject { log: log.clone(), ..FakeSubject::default() });
    both.0.set_path(Arc::clone(&newcomer), path(3));
    (0..2).for_each(|generation| both.0.set_keys(Arc::clone(&newcomer), generation, keys()));
    work(&both, &all);
    let done = log.take();
    assert_eq!(done[..4], [Done::Keys(0), Done::Keys(1), Done::Path(3), Done::Waited]);
    assert_eq!(done[4..], vec![Done::Path(2); usize::from(MANY)]);
}

#[test]
fn queued_send_keys_are_replaced_only_by_newer_key_generations() {
    let both = CommandQueue::new();
    let fake = Arc::new(FakeSubject::default());
    let put = |generation| both.0.set_keys(Arc::clone(&fake), generation, keys());
    [0, 1].into_iter().for_each(put);
    work(&both, &[&fake]);
    assert_eq!(fake.log.take(), [Done::Keys(0), Done::Keys(1)]);
    // Only the keys of the two newest generations stay queued.
    [2, 3, 4, 5, 6, 3].into_iter().for_each(put);
    assert_eq!(both.0.len(), 1);
    assert_eq!(both.0.coalesced(), 4);
    work(&both, &[&fake]);
    assert_eq!(fake.log.take(), [Done::Waited, Done::Keys(6), Done::Keys(5)]);
}

#[test]
fn streams_recalled_from_the_kernel_return_after_program_runs_end() {
    let both = CommandQueue::new();
    let fake = Arc::new(FakeSubject::default());
    for key in [7, 8] {
        let delegated = Box::new(Delegated(key, fake.log.clone()));
        both.0.recall(Arc::clone(&fake), StreamKey(key), Some(delegated));
        both.0.set_path(Arc::clone(&fake), path(key as u16));
    }
    both.0.remove_connection(Arc::clone(&fake), 9);
    work(&both, &[&fake]);
    let dropped = [7, 8].map(Done::Dropped);
    let returned = Done::Returned(vec![7, 8]);
    let [first, second] = dropped;
    assert_eq!(
        fake.log.take(),
        [Done::Gone(vec![9]), first, second, Done::Path(8), Done::Waited, returned],
        "what was to be returned is not used any more before anything is waited for"
    );
}

/// A panic while one connection's command is carried out must not lose the streams of other connections, nor end the
/// engine's thread.
#[test]
fn panicking_command_of_a_connection_does_not_stop_other_connections() {
    let both = CommandQueue::new();
    let log = CommandLog::default();
    let fake = |panics| Arc::new(FakeSubject { log: log.clone(), panics, ..FakeSubject::default() });
    let faulty = fake(true);
    let other = fake(false);
    for (fake, key) in [(&faulty, 7), (&other, 8)] {
        both.0.set_path(Arc::clone(fake), path(key as u16));
        both.0.recall(Arc::clone(fake), StreamKey(key), Some(Box::new(Delegated(key, log.clone()))));
        both.0.release(Arc::clone(fake));
    }
    work(&both, &[&faulty, &other]);
    let returned = |key| [Done::Returned(vec![key]), Done::Released];
    let begun =
        [Done::Stopped, Done::Dropped(7), Done::Stopped, Done::Dropped(8), Done::Path(8), Done::Waited];
    assert_eq!(log.take(), [&begun[..], &returned(7), &returned(8)].concat());
    both.0.set_path(Arc::clone(&other), path(9));
    work(&both, &[&faulty, &other]);
    assert_eq!(log.take(), [Done::Path(9)]);
}

#[test]
fn connection_is_released_after_its_streams_are_returned() {
    let both = CommandQueue::new();
    let fake = Arc::new(FakeSubject::default());
    both.0.recall(Arc::clone(&fake), StreamKey(7), None);
    both.0.release(Arc::clone(&fake));
    both.0.set_open_keys(Arc::clone(&fake), 3, keys());
    work(&both, &[&fake]);
    let expected = [Done::OpenKeys(3), Done::Stopped, Done::Waited, Done::Returned(vec![7]), Done::Released];
    assert_eq!(fake.log.take(), expected);
    both.0.release(Arc::clone(&fake));
    work(&both, &[&fake]);
    assert_eq!(fake.log.take(), [Done::Stopped, Done::Waited, Done::Released], "also without any stream");
}

#[test]
fn connection_ids_and_receive_keys_are_set_without_awaiting_program_runs() {
    let both = CommandQueue::new();
    let fake = Arc::new(FakeSubject::default());
    let id = |number: u8| ConnectionId::new(&[number; 8]).unwrap();
    both.0.set_id(Arc::clone(&fake), id(1), true);
    work(&both, &[&fake]);
    assert_eq!(fake.log.take(), [Done::Id(1, true)]);
    // A peer cycles through all its connection IDs.
    for number in 2..=250 {
        both.0.set_id(Arc::clone(&fake), id(number), true);
        both.0.set_id(Arc::clone(&fake), id(number - 1), false);
        both.0.set_open_keys(Arc::clone(&fake), u16::from(number), keys());
        let pending = fake.place.0.lock();
        assert!(pending.ids.len() <= 2, "{:?}", pending.ids);
    }
    work(&both, &[&fake]);
    let ids = [Done::Id(1, false), Done::Id(250, true)];
    assert_eq!(fake.log.take(), [[Done::OpenKeys(250), Done::OpenKeys(249)], ids].concat());
    both.0.set_id(Arc::clone(&fake), id(250), false);
    both.0.set_id(Arc::clone(&fake), id(250), true);
    work(&both, &[&fake]);
    assert_eq!(fake.log.take(), [Done::Id(250, true)]);
}

#[test]
fn command_added_during_a_batch_is_in_the_next_batch() {
    let both = CommandQueue::new();
    let fake = Arc::new(FakeSubject::default());
    both.0.set_path(Arc::clone(&fake), path(1));
    let batch = both.1.take(Instant::now()).unwrap();
    both.0.set_path(Arc::clone(&fake), path(2));
    assert_eq!(both.0.len(), 1);
    let mut has_waited = false;
    batch.carry_out(false, || has_waited = true);
    assert!(!has_waited, "nothing was there before");
    work(&both, &[&fake]);
    assert_eq!(fake.log.take(), [Done::Path(1), Done::Waited, Done::Path(2)]);
}

#[test]
fn operator_commands_are_taken_before_queued_connection_commands() {
    let both = CommandQueue::new();
    let fakes = [(); 100].map(|()| Arc::new(FakeSubject::default()));
    fakes.iter().for_each(|fake| both.0.set_path(Arc::clone(fake), path(1)));
    both.0.order(5);
    let batch = both.1.take(Instant::now()).unwrap();
    assert_eq!((batch.orders, batch.connections.len()), (vec![5], 100));
}

#[test]
fn queue_thread_is_woken_by_commands_and_by_close() {
    let (queue, taker): Both = CommandQueue::new();
    let (told, orders) = mpsc::channel();
    let thread = thread::spawn(move || {
        let forever = Instant::now() + std::time::Duration::from_secs(3600);
        while let Some(batch) = taker.take(forever) {
            batch.orders.into_iter().for_each(|order| told.send(order).unwrap());
        }
    });
    for order in 0..3 {
        queue.order(order);
        assert_eq!(orders.recv(), Ok(order));
    }
    queue.close();
    wait_for("the thread to end", || thread.is_finished());
    queue.order(4);
    assert!(queue.waiting.lock().orders.is_empty(), "nobody would ever take it");
}

/// Several threads set connections' network paths at once. Each connection must end up with the last path that was set
/// for it.
#[test]
fn latest_queued_path_of_a_connection_applies() {
    const LAST: u16 = 2000;
    let (queue, taker): Both = CommandQueue::new();
    let fakes = [(); 4].map(|()| Arc::new(FakeSubject::default()));
    thread::scope(|scope| {
        for fake in &fakes {
            let queue = &queue;
            scope.spawn(move || {
                (1..=LAST).for_each(|port| queue.set_path(Arc::clone(fake), path(port)));
            });
        }
        let is_last = |fake: &Arc<FakeSubject>| fake.log.0.lock().last() == Some(&Done::Path(LAST));
        wait_for("the last paths", || {
            assert!(queue.len() <= fakes.len());
            let batch = taker.take(Instant::now()).unwrap();
            batch.carry_out(false, || fakes.iter().for_each(|fake| fake.waited()));
            fakes.iter().all(is_last)
        });
    });
    for fake in fakes {
        let ports = fake.log.take();
        let is_ascending = ports.is_sorted_by_key(|done| match done {
            Done::Path(port) => *port,
            other => panic!("{other:?}"),
        });
        assert!(is_ascending, "{ports:?}");
    }
}
