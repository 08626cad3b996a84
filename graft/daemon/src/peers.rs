//! The worker process that connects to the daemons of peers about sessions. It parses what they send, and cannot use BPF:
//! it passes messages and the secrets of connections to the worker process for sessions.

use std::{
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::ensure;
use millrace_base::control::ControlEnd;
use millrace_daemon::{
    daemon::{DaemonFrame, Reloads},
    log,
};
use millrace_graft::{packet::Settings, settings::DaemonSettings, status};
use parking_lot::Mutex;
use rustix::thread::CapabilitySet;
use tracing::warn;

use super::{
    broker::{FIGURES, FromPeer, PeerEvent, PeerLinks, ToPeer, check_peers, receive},
    control::Status,
    worker::{Served, WorkerProcess},
};

/// Capabilities that this process keeps: to use a port below 1024.
pub const KEPT: CapabilitySet = CapabilitySet::NET_BIND_SERVICE;
/// Capacity of the queue of messages from peers. A message that finds it full is dropped, and its sender repeats it.
const EVENTS: usize = 4096;
/// Pause before the record of a new connection is sent again, for which the socket to the other process had no room.
const AGAIN: Duration = Duration::from_millis(5);

/// Runs the worker process until its supervisor or a signal ends it. `config` is the path of the settings file.
pub async fn run(config: PathBuf, frame: DaemonFrame) -> anyhow::Result<()> {
    let settings = DaemonSettings::read(&config)?.into_sessions()?;
    let (heard, events) = sync_channel(EVENTS);
    let links = Arc::new(PeerLinks::start(&settings, &heard)?);
    let partner = Arc::<Mutex<_>>::default();
    let forwarder = Forwarder { links: links.clone(), partner: partner.clone(), events };
    let thread = thread::Builder::new().name("forward".into()).spawn(move || forwarder.run())?;
    let daemon =
        Arc::new(PeersDaemon { config, settings, links, partner, thread, reloads: Reloads::default() });
    frame.run(&Arc::new(Served(daemon))).await
}

/// Connection to the worker process for sessions.
type Partner = Arc<Mutex<Option<Arc<ControlEnd>>>>;

struct PeersDaemon {
    config: PathBuf,
    settings: Settings,
    links: Arc<PeerLinks>,
    partner: Partner,
    thread: JoinHandle<()>,
    reloads: Reloads,
}

/// The thread that passes events of peers, and figures of the connections with them, to the worker process for sessions.
struct Forwarder {
    links: Arc<PeerLinks>,
    partner: Partner,
    events: Receiver<(usize, PeerEvent)>,
}

impl Forwarder {
    fn run(self) {
        let mut due = Instant::now();
        loop {
            match self.events.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok((peer, event)) => self.pass(peer, event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if Instant::now() >= due {
                due = Instant::now() + FIGURES;
                self.links.daemons.iter().for_each(|daemon| {
                    self.tell(&FromPeer::Figures(daemon.name().to_owned(), daemon.figures()));
                });
            }
        }
    }

    fn pass(&self, peer: usize, event: PeerEvent) {
        let Some(daemon) = self.links.daemons.get(peer) else { return };
        let name = daemon.name().to_owned();
        match event {
            PeerEvent::Said(say) => drop(self.tell(&FromPeer::Said(name, say))),
            PeerEvent::Connected(exported) => {
                let record = FromPeer::Connected(name, exported.0);
                // The record is not kept for a process that does not run: when one starts, all connections are made anew.
                while self.tell(&record) == Told::NoRoom {
                    thread::sleep(AGAIN);
                }
            }
        }
    }

    fn tell(&self, record: &FromPeer) -> Told {
        let Some(partner) = self.partner.lock().clone() else { return Told::Nobody };
        match partner.send(record, &[]) {
            Ok(()) => Told::Sent,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Told::NoRoom,
            Err(_) => Told::Nobody,
        }
    }
}

/// The outcome of sending a record to the worker process for sessions.
#[derive(Debug, PartialEq, Eq)]
enum Told {
    Sent,
    /// The buffer of the socket is full.
    NoRoom,
    /// The process does not run, or has ended.
    Nobody,
}

impl WorkerProcess for PeersDaemon {
    fn share(&self) -> anyhow::Result<Status> {
        let in_place = status::Status { log_lines_dropped: log::dropped(), ..status::Status::default() };
        Ok(Status { in_place, ..Status::default() })
    }

    fn read_settings(&self) -> anyhow::Result<()> {
        let new = DaemonSettings::read(&self.config)?.into_sessions()?;
        check_peers(&self.settings.peers, Some(&self.settings.host_key), &new).map_err(anyhow::Error::msg)
    }

    fn reloads(&self) -> &Reloads {
        &self.reloads
    }

    fn tick(&self) -> anyhow::Result<()> {
        ensure!(!self.thread.is_finished(), "the thread that passes on messages of peers has ended");
        Ok(())
    }

    fn linked(self: &Arc<Self>, _name: &str, partner: OwnedFd) {
        let partner = Arc::new(ControlEnd::from(partner));
        *self.partner.lock() = Some(partner.clone());
        // The other process has just started, and needs the secrets of connections.
        self.links.daemons.iter().for_each(|daemon| daemon.close());
        let links = self.links.clone();
        let reads = move || {
            receive(&partner, |ToPeer { peer, say }| {
                let to = links.daemons.iter().find(|daemon| daemon.name() == peer);
                to.into_iter().for_each(|daemon| daemon.say(&say));
            });
        };
        if let Err(error) = thread::Builder::new().name("sessions".into()).spawn(reads) {
            warn!("no thread for messages to peers: {error}");
        }
    }
}
