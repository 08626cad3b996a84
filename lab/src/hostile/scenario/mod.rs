//! Scenarios of a hostile client.

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

/// A scenario: an attack of a hostile client on a relay.
pub struct HostileScenario {
    pub name: &'static str,
    pub about: &'static str,
    /// Transport that the scenario needs; `None`: any.
    pub transport: Option<LabTransport>,
    round: fn(&mut ScenarioAttack<'_>) -> Result<()>,
}

/// The scenarios.
pub const ALL: &[HostileScenario] = &[
    HostileScenario {
        name: "handshakes",
        about: "begins handshakes and never goes on with them",
        transport: None,
        round: handshake::unfinished,
    },
    HostileScenario {
        name: "idle-hog",
        about: "does 300 handshakes at a time, and sends nothing after them",
        transport: None,
        round: handshake::idle,
    },
    HostileScenario {
        name: "streams-before-setup",
        about: "opens streams of both kinds without saying SETUP, and leaves",
        transport: None,
        round: requests::streams_before_setup,
    },
    HostileScenario {
        name: "rendezvous",
        about: "subscribes to tracks that nobody publishes, to wait a minute, and leaves",
        transport: None,
        round: requests::rendezvous,
    },
    HostileScenario {
        name: "namespaces",
        about: "publishes hundreds of namespaces over hundreds of tracks that are subscribed to, and never answers",
        transport: None,
        round: requests::namespaces,
    },
    HostileScenario {
        name: "half-messages",
        about: "sends request streams and object headers up to their last byte, and waits",
        transport: None,
        round: requests::half_messages,
    },
    HostileScenario {
        name: "garbage",
        about: "sends frames, requests, streams and datagrams that are malformed",
        transport: None,
        round: requests::garbage,
    },
    HostileScenario {
        name: "unread-fetches",
        about: "fetches much, time and again, and gives no credit to send any of it",
        transport: None,
        round: media::unread_fetches,
    },
    HostileScenario {
        name: "no-acks",
        about: "subscribes to a track and acknowledges nothing",
        transport: None,
        round: media::no_acks,
    },
    HostileScenario {
        name: "optimistic-acks",
        about: "acknowledges packets that have not been sent",
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
        about: "publishes tracks of one large group each, more than a cache holds",
        transport: None,
        round: media::cache_hog,
    },
    HostileScenario {
        name: "silent-copies",
        about: "announces the largest possible object, and begins groups that never end",
        transport: None,
        round: media::silent_copies,
    },
    HostileScenario {
        name: "vanish",
        about: "publishes and subscribes, and is gone without a word",
        transport: None,
        round: media::vanish,
    },
    HostileScenario {
        name: "overlap",
        about: "publishes bytes, ends and datagrams again that are not the same the second time",
        transport: None,
        round: overlap::overlap,
    },
    HostileScenario {
        name: "path-hop",
        about: "comes from another port 500 times a second, after SETUP and nothing else",
        transport: None,
        round: change::path_hop,
    },
    HostileScenario {
        name: "key-update",
        about: "updates its keys as often as it may, after SETUP and nothing else",
        transport: None,
        round: change::key_update,
    },
    HostileScenario {
        name: "id-churn",
        about: "changes the connection IDs of both ends 500 times a second, after SETUP and nothing else",
        transport: None,
        round: change::id_churn,
    },
    HostileScenario {
        name: "steady",
        about: "sends 500 packets a second from one port, after SETUP and nothing else: the reference for the others",
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
        about: "publishes 1,100 tracks and watches each of them once",
        transport: None,
        round: crowd::track_hog,
    },
    HostileScenario {
        name: "waiters",
        about: "has 7,200 subscriptions wait for tracks that nobody publishes, while publishers come and go",
        transport: None,
        round: crowd::waiters,
    },
    HostileScenario {
        name: "updates",
        about: "moves one request from prefix to prefix, over 7,200 tracks",
        transport: None,
        round: crowd::updates,
    },
    HostileScenario {
        name: "no-credit",
        about: "gives the relay almost no credit, breaks the protocol, and stays",
        transport: None,
        round: silence::no_credit,
    },
    HostileScenario {
        name: "web-half-requests",
        about: "asks for sessions of WebTransport, and never ends what it asks",
        transport: Some(LabTransport::Webtransport),
        round: web::half_requests,
    },
    HostileScenario {
        name: "web-headers",
        about: "asks with headers that are too large, expand, or lead nowhere",
        transport: Some(LabTransport::Webtransport),
        round: web::headers,
    },
    HostileScenario {
        name: "web-posts",
        about: "asks for something else, with a body without end",
        transport: Some(LabTransport::Webtransport),
        round: web::posts,
    },
    HostileScenario {
        name: "web-requests",
        about: "asks for session after session on one connection",
        transport: Some(LabTransport::Webtransport),
        round: web::requests,
    },
    HostileScenario {
        name: "web-capsules",
        about: "sends capsules without end, and such as close the session but for their last byte",
        transport: Some(LabTransport::Webtransport),
        round: web::capsules,
    },
    HostileScenario {
        name: "web-half-preambles",
        about: "opens streams that do not say to which session they belong",
        transport: Some(LabTransport::Webtransport),
        round: web::half_preambles,
    },
    HostileScenario {
        name: "web-strays",
        about: "sends streams and datagrams of sessions that there are not",
        transport: Some(LabTransport::Webtransport),
        round: web::strays,
    },
    HostileScenario {
        name: "web-streams",
        about: "opens streams of HTTP/3 with unknown types",
        transport: Some(LabTransport::Webtransport),
        round: web::streams,
    },
];

/// Returns the scenarios of a transport.
pub fn over(transport: LabTransport) -> impl Iterator<Item = &'static HostileScenario> {
    ALL.iter().filter(move |scenario| scenario.is_over(transport))
}

impl HostileScenario {
    pub fn is_over(&self, transport: LabTransport) -> bool {
        self.transport.is_none_or(|only| only == transport)
    }
}

/// Returns the scenario of this name.
pub fn find(name: &str) -> Option<&'static HostileScenario> {
    ALL.iter().find(|scenario| scenario.name == name)
}

/// A running round.
pub struct ScenarioAttack<'a> {
    pub target: &'a PeerTarget,
    pub counts: PeerCounts,
    /// First part of the names that it publishes.
    pub namespace: String,
    /// Packets per second of scenarios that send at a rate.
    pub packets_per_s: u32,
}

impl ScenarioAttack<'_> {
    /// Opens a session with the relay.
    pub fn peer(&self) -> Result<HostilePeer> {
        HostilePeer::establish(self.target)
    }

    /// Closes the connection.
    pub fn close(&mut self, peer: HostilePeer) -> Result<()> {
        self.counts.add(peer.close()?);
        Ok(())
    }

    /// Leaves without closing the connection.
    pub fn vanish(&mut self, peer: HostilePeer) {
        self.counts.add(peer.counts);
    }
}

/// Result of a round.
#[derive(Clone, Debug, Serialize)]
pub struct ScenarioRound {
    pub counts: PeerCounts,
    /// Reason of the first client whose round ended early. Mostly the relay closed the connection, as it may.
    pub ended: Option<String>,
    pub seconds: f64,
    /// State of the relay after it had let go, if it was asked.
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
    /// Clients that run it at the same time.
    pub clients: usize,
    pub repeat: ScenarioRepeat,
    /// Packets per second of each client, in scenarios that send at a rate.
    pub packets_per_s: u32,
}

/// Number of rounds, or time, of a scenario.
#[derive(Clone, Copy, Debug)]
pub enum ScenarioRepeat {
    Rounds(u32),
    /// Repeats rounds that begin within this time.
    For(Duration),
}

impl Default for Effort {
    fn default() -> Self {
        Self { clients: 1, repeat: ScenarioRepeat::Rounds(1), packets_per_s: 500 }
    }
}

/// Does `scenario` so many times. With `http`, the relay has to let go of everything after each round.
///
/// # Errors
/// The relay cannot be reached before or after a round, or it holds on to something.
pub fn run(
    scenario: &HostileScenario,
    target: &PeerTarget,
    effort: Effort,
    http: Option<&Http>,
) -> Result<ScenarioReport> {
    HostilePeer::establish(target).context("no relay answers")?.close()?;
    let before = http.map(watch::look).transpose()?;
    let mut report = ScenarioReport { scenario: scenario.name.to_owned(), before, rounds: Vec::new() };
    let began = Instant::now();
    let has_more = |done: usize| match effort.repeat {
        ScenarioRepeat::Rounds(rounds) => done < rounds as usize,
        ScenarioRepeat::For(time) => began.elapsed() < time,
    };
    while has_more(report.rounds.len()) {
        let mut round = attack(scenario, target, effort);
        // A client that comes next must be served.
        HostilePeer::establish(target).context("the relay does not answer any more")?.close()?;
        if let (Some(http), Some(before)) = (http, &before) {
            round.left = Some(watch::settle(http, before)?);
        }
        report.rounds.push(round);
    }
    Ok(report)
}

/// Runs `scenario` once with each client, all at the same time.
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
            ended = ended.take().or(early);
        }
    });
    ScenarioRound { counts, ended, seconds: began.elapsed().as_secs_f64(), left: None }
}

/// Wait for something on the relay that no message confirms.
const MOMENT: Duration = Duration::from_millis(300);
