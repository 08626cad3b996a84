//! What a hostile client does.

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
    peer::{Counts, Peer, Target},
    watch::{self, Http, Left},
};
use crate::transport::Transport;

/// Something that a hostile client does to a relay.
pub struct Scenario {
    pub name: &'static str,
    pub about: &'static str,
    /// What it is about, if that is not anything.
    pub transport: Option<Transport>,
    round: fn(&mut Attack<'_>) -> Result<()>,
}

/// All of them.
pub const ALL: &[Scenario] = &[
    Scenario {
        name: "handshakes",
        about: "begins handshakes and never goes on with them",
        transport: None,
        round: handshake::unfinished,
    },
    Scenario {
        name: "idle-hog",
        about: "does 300 handshakes at a time, and says nothing behind them",
        transport: None,
        round: handshake::idle,
    },
    Scenario {
        name: "streams-before-setup",
        about: "opens streams of both kinds without saying SETUP, and leaves",
        transport: None,
        round: requests::streams_before_setup,
    },
    Scenario {
        name: "rendezvous",
        about: "subscribes to tracks that nobody publishes, to wait a minute, and leaves",
        transport: None,
        round: requests::rendezvous,
    },
    Scenario {
        name: "namespaces",
        about: "publishes hundreds of namespaces over hundreds of tracks that are subscribed to, and never answers",
        transport: None,
        round: requests::namespaces,
    },
    Scenario {
        name: "half-messages",
        about: "sends request streams and object headers up to their last byte, and waits",
        transport: None,
        round: requests::half_messages,
    },
    Scenario {
        name: "garbage",
        about: "sends frames, requests, streams and datagrams that are malformed",
        transport: None,
        round: requests::garbage,
    },
    Scenario {
        name: "unread-fetches",
        about: "fetches much, time and again, and gives no credit to send any of it",
        transport: None,
        round: media::unread_fetches,
    },
    Scenario {
        name: "no-acks",
        about: "subscribes to a track and acknowledges nothing",
        transport: None,
        round: media::no_acks,
    },
    Scenario {
        name: "optimistic-acks",
        about: "acknowledges packets that have not been sent",
        transport: None,
        round: media::optimistic_acks,
    },
    Scenario {
        name: "datagrams",
        about: "publishes thousands of datagrams in one group, each twice",
        transport: None,
        round: media::datagrams,
    },
    Scenario {
        name: "cache-hog",
        about: "publishes tracks of one large group each, more than a cache holds",
        transport: None,
        round: media::cache_hog,
    },
    Scenario {
        name: "silent-copies",
        about: "claims the largest object that there can be, and begins groups that never end",
        transport: None,
        round: media::silent_copies,
    },
    Scenario {
        name: "vanish",
        about: "publishes and subscribes, and is gone without a word",
        transport: None,
        round: media::vanish,
    },
    Scenario {
        name: "overlap",
        about: "publishes bytes, ends and datagrams again that are not the same the second time",
        transport: None,
        round: overlap::overlap,
    },
    Scenario {
        name: "path-hop",
        about: "comes from another port 500 times a second, after SETUP and nothing else",
        transport: None,
        round: change::path_hop,
    },
    Scenario {
        name: "key-update",
        about: "updates its keys as often as it may, after SETUP and nothing else",
        transport: None,
        round: change::key_update,
    },
    Scenario {
        name: "id-churn",
        about: "changes the connection IDs of both ends 500 times a second, after SETUP and nothing else",
        transport: None,
        round: change::id_churn,
    },
    Scenario {
        name: "steady",
        about: "sends 500 packets a second from one port, after SETUP and nothing else: what the others are compared with",
        transport: None,
        round: change::steady,
    },
    Scenario {
        name: "same-track",
        about: "subscribes to one track 900 times",
        transport: None,
        round: crowd::same_track,
    },
    Scenario {
        name: "track-hog",
        about: "publishes 1,100 tracks and watches each of them once",
        transport: None,
        round: crowd::track_hog,
    },
    Scenario {
        name: "waiters",
        about: "has 7,200 subscriptions wait for tracks that nobody publishes, while publishers come and go",
        transport: None,
        round: crowd::waiters,
    },
    Scenario {
        name: "updates",
        about: "moves one request from prefix to prefix, over 7,200 tracks",
        transport: None,
        round: crowd::updates,
    },
    Scenario {
        name: "no-credit",
        about: "lets the relay send next to nothing, breaks the protocol, and stays",
        transport: None,
        round: silence::no_credit,
    },
    Scenario {
        name: "web-half-requests",
        about: "asks for sessions of WebTransport, and never ends what it asks",
        transport: Some(Transport::Webtransport),
        round: web::half_requests,
    },
    Scenario {
        name: "web-headers",
        about: "asks with headers that are too large, expand, or lead nowhere",
        transport: Some(Transport::Webtransport),
        round: web::headers,
    },
    Scenario {
        name: "web-posts",
        about: "asks for something else, with a body without end",
        transport: Some(Transport::Webtransport),
        round: web::posts,
    },
    Scenario {
        name: "web-requests",
        about: "asks for session after session on one connection",
        transport: Some(Transport::Webtransport),
        round: web::requests,
    },
    Scenario {
        name: "web-capsules",
        about: "sends capsules without end, and such as close the session but for their last byte",
        transport: Some(Transport::Webtransport),
        round: web::capsules,
    },
    Scenario {
        name: "web-half-preambles",
        about: "opens streams that do not say to which session they belong",
        transport: Some(Transport::Webtransport),
        round: web::half_preambles,
    },
    Scenario {
        name: "web-strays",
        about: "sends streams and datagrams of sessions that there are not",
        transport: Some(Transport::Webtransport),
        round: web::strays,
    },
    Scenario {
        name: "web-streams",
        about: "opens streams of HTTP/3 with types that mean nothing",
        transport: Some(Transport::Webtransport),
        round: web::streams,
    },
];

/// Those that there are over a transport.
pub fn over(transport: Transport) -> impl Iterator<Item = &'static Scenario> {
    ALL.iter().filter(move |scenario| scenario.is_over(transport))
}

impl Scenario {
    pub fn is_over(&self, transport: Transport) -> bool {
        self.transport.is_none_or(|only| only == transport)
    }
}

/// The scenario of this name.
pub fn find(name: &str) -> Option<&'static Scenario> {
    ALL.iter().find(|scenario| scenario.name == name)
}

/// One round under way.
pub struct Attack<'a> {
    pub target: &'a Target,
    pub counts: Counts,
    /// Names of what it publishes begin with this one.
    pub namespace: String,
    /// Packets per second of scenarios that send at a rate.
    pub packets_per_s: u32,
}

impl Attack<'_> {
    /// A session with the relay.
    pub fn peer(&self) -> Result<Peer> {
        Peer::establish(self.target)
    }

    /// Closes the connection.
    pub fn close(&mut self, peer: Peer) -> Result<()> {
        self.counts.add(peer.close()?);
        Ok(())
    }

    /// Leaves without a word.
    pub fn vanish(&mut self, peer: Peer) {
        self.counts.add(peer.counts);
    }
}

/// What came of a round.
#[derive(Clone, Debug, Serialize)]
pub struct Round {
    pub counts: Counts,
    /// Why it ended early, if it did, of the first client of which it is known: mostly since the relay closed the connection, as it may.
    pub ended: Option<String>,
    pub seconds: f64,
    /// What the relay held when it had let go, if it was asked.
    pub left: Option<Left>,
}

/// What came of a scenario.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub scenario: String,
    pub before: Option<Left>,
    pub rounds: Vec<Round>,
}

/// How a scenario is done.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Clients that do it at the same time.
    pub clients: usize,
    pub repeat: Repeat,
    /// Packets that each client sends in a second in scenarios that send at a rate.
    pub packets_per_s: u32,
}

/// How often a scenario is done.
#[derive(Clone, Copy, Debug)]
pub enum Repeat {
    Rounds(u32),
    /// In rounds that begin before so much time is over.
    For(Duration),
}

impl Default for Effort {
    fn default() -> Self {
        Self { clients: 1, repeat: Repeat::Rounds(1), packets_per_s: 500 }
    }
}

/// Does `scenario` so many times. With `http`, the relay has to let go of everything after each round.
///
/// # Errors
/// The relay cannot be reached before or after a round, or it holds on to something.
pub fn run(scenario: &Scenario, target: &Target, effort: Effort, http: Option<&Http>) -> Result<Report> {
    Peer::establish(target).context("no relay answers")?.close()?;
    let before = http.map(watch::look).transpose()?;
    let mut report = Report { scenario: scenario.name.to_owned(), before, rounds: Vec::new() };
    let began = Instant::now();
    let has_more = |done: usize| match effort.repeat {
        Repeat::Rounds(rounds) => done < rounds as usize,
        Repeat::For(time) => began.elapsed() < time,
    };
    while has_more(report.rounds.len()) {
        let mut round = attack(scenario, target, effort);
        // Whoever comes next is served.
        Peer::establish(target).context("the relay does not answer any more")?.close()?;
        if let (Some(http), Some(before)) = (http, &before) {
            round.left = Some(watch::settle(http, before)?);
        }
        report.rounds.push(round);
    }
    Ok(report)
}

/// Does `scenario` once with each client, all at the same time.
fn attack(scenario: &Scenario, target: &Target, effort: Effort) -> Round {
    let began = Instant::now();
    let client = || {
        let mut attack = Attack {
            target,
            counts: Counts::default(),
            namespace: format!("hostile-{:08x}", fastrand::u32(..)),
            packets_per_s: effort.packets_per_s,
        };
        let ended = (scenario.round)(&mut attack).err().map(|error| format!("{error:#}"));
        (attack.counts, ended)
    };
    let (mut counts, mut ended) = (Counts::default(), None);
    thread::scope(|scope| {
        let clients: Vec<_> = (0..effort.clients).map(|_| scope.spawn(client)).collect();
        for client in clients {
            let (sent, early) = client.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
            counts.add(sent);
            ended = ended.take().or(early);
        }
    });
    Round { counts, ended, seconds: began.elapsed().as_secs_f64(), left: None }
}

/// For what has to be under way on the relay before a scenario goes on, where nothing says that it is.
const MOMENT: Duration = Duration::from_millis(300);
