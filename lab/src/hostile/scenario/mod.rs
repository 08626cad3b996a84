//! Scenarios of a hostile client: attacks on a relay, each with a name.

mod change;
mod crowd;
mod handshake;
mod media;
mod overlap;
mod requests;
mod silence;
mod web;

use std::{
    panic, thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::{
    peer::{HostilePeer, PeerCounts, PeerTarget},
    watch::{self, Http, LeftObjects},
};
use crate::transport::LabTransport;

/// A scenario: one kind of attack on a relay.
pub struct HostileScenario {
    pub name: &'static str,
    pub about: &'static str,
    /// Transport that the scenario needs; `None` if it works over every transport.
    pub transport: Option<LabTransport>,
    round: fn(&mut ScenarioAttack<'_>) -> Result<()>,
}

/// The scenarios, in the order in which `--list` shows them.
pub const ALL: &[HostileScenario] = &[
    HostileScenario {
        name: "handshakes",
        about: "starts handshakes and never finishes them",
        transport: None,
        round: handshake::unfinished,
    },
    HostileScenario {
        name: "idle-hog",
        about: "completes 300 handshakes at a time, and sends nothing afterwards",
        transport: None,
        round: handshake::idle,
    },
    HostileScenario {
        name: "streams-before-setup",
        about: "opens streams of both kinds without sending SETUP, and disconnects",
        transport: None,
        round: requests::streams_before_setup,
    },
    HostileScenario {
        name: "rendezvous",
        about: "subscribes to tracks without a publisher, with a wait of a minute, and disconnects",
        transport: None,
        round: requests::rendezvous,
    },
    HostileScenario {
        name: "namespaces",
        about: "publishes hundreds of namespaces that contain hundreds of subscribed tracks, and never answers",
        transport: None,
        round: requests::namespaces,
    },
    HostileScenario {
        name: "half-messages",
        about: "sends requests and objects except for their last bytes, and waits",
        transport: None,
        round: requests::half_messages,
    },
    HostileScenario {
        name: "garbage",
        about: "sends malformed frames, requests, streams and datagrams",
        transport: None,
        round: requests::garbage,
    },
    HostileScenario {
        name: "unread-fetches",
        about: "fetches many objects again and again, and gives the relay no credit to send them",
        transport: None,
        round: media::unread_fetches,
    },
    HostileScenario {
        name: "no-acks",
        about: "subscribes to a track and acknowledges no packet",
        transport: None,
        round: media::no_acks,
    },
    HostileScenario {
        name: "optimistic-acks",
        about: "acknowledges packets that were never sent",
        transport: None,
        round: media::optimistic_acks,
    },
    HostileScenario {
        name: "datagrams",
        about: "publishes thousands of datagrams in one group, each twice",
        transport: None,
        round: media::datagrams,
    },
    HostileScenario {
        name: "cache-hog",
        about: "publishes tracks with one large group each, more than a cache holds",
        transport: None,
        round: media::cache_hog,
    },
    HostileScenario {
        name: "silent-copies",
        about: "announces the largest possible object location, and starts groups that never end",
        transport: None,
        round: media::silent_copies,
    },
    HostileScenario {
        name: "vanish",
        about: "publishes and subscribes, and disappears without closing the connection",
        transport: None,
        round: media::vanish,
    },
    HostileScenario {
        name: "overlap",
        about: "sends stream bytes, stream ends and datagrams twice, with other content the second time",
        transport: None,
        round: overlap::overlap,
    },
    HostileScenario {
        name: "path-hop",
        about: "changes its port 500 times a second, and sends nothing but SETUP",
        transport: None,
        round: change::path_hop,
    },
    HostileScenario {
        name: "key-update",
        about: "updates its keys as often as allowed, and sends nothing but SETUP",
        transport: None,
        round: change::key_update,
    },
    HostileScenario {
        name: "id-churn",
        about: "changes the connection IDs of both sides 500 times a second, and sends nothing but SETUP",
        transport: None,
        round: change::id_churn,
    },
    HostileScenario {
        name: "steady",
        about: "sends SETUP and then 500 pings a second from one port: the harmless reference",
        transport: None,
        round: change::steady,
    },
    HostileScenario {
        name: "same-track",
        about: "subscribes to one track 900 times",
        transport: None,
        round: crowd::same_track,
    },
    HostileScenario {
        name: "track-hog",
        about: "publishes 1,100 tracks and subscribes to each of them once",
        transport: None,
        round: crowd::track_hog,
    },
    HostileScenario {
        name: "waiters",
        about: "lets 7,200 subscriptions wait for tracks without a publisher, while namespaces come and go",
        transport: None,
        round: crowd::waiters,
    },
    HostileScenario {
        name: "updates",
        about: "publishes 7,200 tracks, and moves one request from prefix to prefix",
        transport: None,
        round: crowd::updates,
    },
    HostileScenario {
        name: "no-credit",
        about: "gives the relay almost no credit, violates the protocol, and stays connected",
        transport: None,
        round: silence::no_credit,
    },
    HostileScenario {
        name: "web-half-requests",
        about: "starts requests for WebTransport sessions, and never finishes them",
        transport: Some(LabTransport::Webtransport),
        round: web::half_requests,
    },
    HostileScenario {
        name: "web-headers",
        about: "sends requests with headers that are too large, expand when decoded, or are malformed",
        transport: Some(LabTransport::Webtransport),
        round: web::headers,
    },
    HostileScenario {
        name: "web-posts",
        about: "sends POST requests with endless bodies",
        transport: Some(LabTransport::Webtransport),
        round: web::posts,
    },
    HostileScenario {
        name: "web-requests",
        about: "requests session after session on one connection",
        transport: Some(LabTransport::Webtransport),
        round: web::requests,
    },
    HostileScenario {
        name: "web-capsules",
        about: "sends endless capsules, and capsules that would close the session if they were complete",
        transport: Some(LabTransport::Webtransport),
        round: web::capsules,
    },
    HostileScenario {
        name: "web-half-preambles",
        about: "opens streams and never finishes the session ID at their start",
        transport: Some(LabTransport::Webtransport),
        round: web::half_preambles,
    },
    HostileScenario {
        name: "web-strays",
        about: "sends streams and datagrams for sessions that do not exist",
        transport: Some(LabTransport::Webtransport),
        round: web::strays,
    },
    HostileScenario {
        name: "web-streams",
        about: "opens HTTP/3 streams with unknown types",
        transport: Some(LabTransport::Webtransport),
        round: web::streams,
    },
];

/// Returns the scenarios that work over a transport.
pub fn over(transport: LabTransport) -> impl Iterator<Item = &'static HostileScenario> {
    ALL.iter().filter(move |scenario| scenario.is_over(transport))
}

impl HostileScenario {
    pub fn is_over(&self, transport: LabTransport) -> bool {
        self.transport.is_none_or(|only| only == transport)
    }
}

/// Returns the scenario with this name.
pub fn find(name: &str) -> Option<&'static HostileScenario> {
    ALL.iter().find(|scenario| scenario.name == name)
}

/// State of a running round of a scenario.
pub struct ScenarioAttack<'a> {
    pub target: &'a PeerTarget,
    pub counts: PeerCounts,
    /// First part of the names of tracks and namespaces that the round publishes.
    pub namespace: String,
    /// Packets per second, for scenarios that send at a rate.
    pub packets_per_s: u32,
}

impl ScenarioAttack<'_> {
    /// Opens a session with the relay.
    pub fn peer(&self) -> Result<HostilePeer> {
        HostilePeer::establish(self.target)
    }

    /// Closes the connection, and adds its counts of data sent and received to the round's.
    pub fn close(&mut self, peer: HostilePeer) -> Result<()> {
        self.counts.add(peer.close()?);
        Ok(())
    }

    /// Drops the connection without closing it, and adds its counts of data sent and received to the round's.
    pub fn vanish(&mut self, peer: HostilePeer) {
        self.counts.add(peer.counts);
    }
}

/// Result of one round of a scenario.
#[derive(Clone, Debug, Serialize)]
pub struct ScenarioRound {
    pub counts: PeerCounts,
    /// Reason why a client's round ended early, for the first such client. In most cases the relay closed the
    /// connection, which it is allowed to do.
    pub ended: Option<String>,
    pub seconds: f64,
    /// Numbers of sessions, streams and other objects that the relay holds after the round; `None` if its status was
    /// not read.
    pub left: Option<LeftObjects>,
}

/// Result of a scenario.
#[derive(Clone, Debug, Serialize)]
pub struct ScenarioReport {
    pub scenario: String,
    pub before: Option<LeftObjects>,
    pub rounds: Vec<ScenarioRound>,
}

/// Number of clients and rounds of a scenario.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Number of clients that run the scenario at the same time.
    pub clients: usize,
    pub repeat: ScenarioRepeat,
    /// Packets per second of each client, for scenarios that send at a rate.
    pub packets_per_s: u32,
}

/// Number of rounds of a scenario, or time for which rounds are repeated.
#[derive(Clone, Copy, Debug)]
pub enum ScenarioRepeat {
    Rounds(u32),
    /// Repeats rounds as long as they start within this time.
    For(Duration),
}

impl Default for Effort {
    fn default() -> Self {
        Self { clients: 1, repeat: ScenarioRepeat::Rounds(1), packets_per_s: 500 }
    }
}

/// Runs `scenario` as often as `effort` says. With `http` (access to the relay's status), checks after each round that
/// the relay has released the clients' sessions, streams and other objects.
///
/// # Errors
///
/// Fails if the relay cannot be reached before or after a round, or if it still holds such objects after a round.
pub fn run(
    scenario: &HostileScenario,
    target: &PeerTarget,
    effort: Effort,
    http: Option<&Http>,
) -> Result<ScenarioReport> {
    // Without this check, a relay that is down would look like the effect of the scenario.
    HostilePeer::establish(target).context("the relay does not answer before the first round")?.close()?;
    let before = http.map(watch::look).transpose()?;
    let mut report = ScenarioReport { scenario: scenario.name.to_owned(), before, rounds: Vec::new() };
    let began = Instant::now();
    let has_more = |done: usize| match effort.repeat {
        ScenarioRepeat::Rounds(rounds) => done < rounds as usize,
        ScenarioRepeat::For(time) => began.elapsed() < time,
    };
    while has_more(report.rounds.len()) {
        let mut round = attack(scenario, target, effort);
        // After each round the relay must still serve a new client.
        HostilePeer::establish(target).context("the relay no longer answers after a round")?.close()?;
        if let (Some(http), Some(before)) = (http, &before) {
            round.left = Some(watch::settle(http, before)?);
        }
        report.rounds.push(round);
    }
    Ok(report)
}

/// Runs `scenario` once with all clients at the same time.
fn attack(scenario: &HostileScenario, target: &PeerTarget, effort: Effort) -> ScenarioRound {
    let began = Instant::now();
    let client = || {
        let mut attack = ScenarioAttack {
            target,
            counts: PeerCounts::default(),
            namespace: format!("hostile-{:08x}", fastrand::u32(..)),
            packets_per_s: effort.packets_per_s,
        };
        let ended = (scenario.round)(&mut attack).err().map(|error| format!("{error:#}"));
        (attack.counts, ended)
    };
    let mut counts = PeerCounts::default();
    let mut ended = None;
    thread::scope(|scope| {
        let clients: Vec<_> = (0..effort.clients).map(|_| scope.spawn(client)).collect();
        for client in clients {
            let (sent, early) = client.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
            counts.add(sent);
            // The report names only one reason why a client's round ended early, so only the first reason is kept.
            ended = ended.take().or(early);
        }
    });
    ScenarioRound { counts, ended, seconds: began.elapsed().as_secs_f64(), left: None }
}

/// Time for which the client waits until the relay has processed what it was sent, if no message confirms that.
const MOMENT: Duration = Duration::from_millis(300);
