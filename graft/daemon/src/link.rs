//! The connection between two worker processes for TCP: `agreements`, which parses what peers send and holds no
//! privilege for BPF, and `grafts`, which holds the BPF programs and parses nothing of a peer.
//!
//! `agreements` sends requests, one after the other, and `grafts` answers each. `grafts` trusts no request: the peer has to
//! be one of the settings, the rules are those of its own settings, and texts, lists and the rate of requests are
//! bounded.

use std::{
    net::IpAddr,
    os::unix::net::UnixStream,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use anyhow::bail;
use millrace_daemon::socket::{Conversation, another_answer};
use millrace_graft::{
    AgreementSession, ComparedStatements, NegotiationEnds, agreements::NegotiationState, status::Negotiated,
};
use millrace_graft_proto::{
    measure::PathReport,
    message::{PathVerdict, Statement},
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::task::block_in_place;
use tracing::warn;

/// A request of the worker process `agreements` to the worker process `grafts`. A request without a documented answer is
/// answered by success or an error.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum LinkRequest {
    /// Requests the revision of the rules that are negotiated with peers. The answer is [`LinkAnswer::Revision`].
    Revision {
        /// Number of hosts that have connected since the last request, and have not shown a known key.
        strangers: u64,
    },
    /// Asks whether an agreement with the peer is in force. With `called_at`, only an agreement over a connection that
    /// this host has opened counts, with the peer's daemon of this epoch. The answer is [`LinkAnswer::IsAgreed`].
    IsAgreed {
        /// Name of the peer.
        peer: String,
        /// Random number that the peer's daemon chose when it started.
        called_at: Option<u64>,
    },
    /// Requests this host's statement to a peer. The answer is [`LinkAnswer::Statement`].
    Statement(NegotiationEnds),
    /// Compares a peer's statement with this host's. The answer is [`LinkAnswer::Considered`].
    Consider {
        /// Connection of the negotiation.
        ends: NegotiationEnds,
        /// The peer's statement.
        theirs: Box<Statement>,
    },
    /// Puts an agreement in force. The answer is [`LinkAnswer::Bound`].
    Bind {
        /// Connection of the negotiation.
        ends: NegotiationEnds,
        /// ID of the agreement if it is renewed.
        session: Option<AgreementSession>,
        /// Revision of this host's statement to which the peer has agreed.
        revision: u64,
        /// The peer's statement.
        theirs: Box<Statement>,
        /// Durations of the steps of the negotiation.
        timing: Negotiated,
    },
    /// Records that a negotiation has ended, or could not begin.
    End {
        /// Name of the peer.
        peer: String,
        /// ID of the agreement, if one was in force.
        session: Option<AgreementSession>,
        /// Outcome of the negotiation.
        state: NegotiationState,
    },
    /// Records measurements of the path to a peer.
    NotePath {
        /// Name of the peer.
        peer: String,
        /// Measurements of the path.
        verdict: PathVerdict,
    },
    /// Records the result of a probe.
    NoteProbe {
        /// Address of the probed host.
        peer: IpAddr,
        /// Measurements of the path.
        report: PathReport,
    },
    /// Ends all agreements, since keys or addresses of the settings have changed.
    ReleaseAll,
    /// Stores a graft that was fetched from a peer, if it has the hash and the signature that the settings want, and
    /// reads the settings and grafts again.
    Keep {
        /// Name of the graft in the settings.
        graft: String,
        /// The graft's manifest in TOML.
        manifest: String,
        /// The graft's object file, in Base64.
        image: String,
    },
}

/// The answer to a [`LinkRequest`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkAnswer {
    /// Revision of the rules that are negotiated with peers.
    Revision(u64),
    /// True if an agreement with the peer is in force.
    IsAgreed(bool),
    /// This host's statement, and the revision from which it was made.
    Statement(Box<Statement>, u64),
    /// The terms or a refusal, and changes of TCP options on the path.
    Considered(ComparedStatements),
    /// ID of the agreement in force, or `None` if the settings have changed since the statement.
    Bound(Option<AgreementSession>),
}

/// The connection to the worker process `grafts`, in the worker process `agreements`.
#[derive(Default)]
pub struct GraftsLink {
    conversation: Mutex<Option<Conversation>>,
    has_ended: AtomicBool,
}

impl GraftsLink {
    /// Uses this connection from now on.
    pub fn renew(&self, stream: UnixStream) {
        *self.conversation.lock() = Some(Conversation::over(stream, "part grafts"));
    }

    /// Makes present and later requests fail, so that no task waits while this process ends.
    pub fn end(&self) {
        self.has_ended.store(true, Relaxed);
    }

    /// Sends a request, and waits for the answer. If the other process hangs, this waits until it continues or has
    /// ended.
    ///
    /// # Errors
    /// The other process refuses the request, or does not run.
    pub fn ask(&self, request: &LinkRequest) -> anyhow::Result<Option<LinkAnswer>> {
        // `block_in_place` moves the tasks that wait for this thread to another one.
        block_in_place(|| {
            let mut conversation = self.conversation.lock();
            let Some(open) = conversation.as_mut() else { bail!("the part grafts is not connected") };
            let answer = open.ask_while(request, || !self.has_ended.load(Relaxed));
            if open.has_ended() {
                *conversation = None;
            }
            answer
        })
    }

    /// Returns the revision of the rules that are negotiated with peers. `strangers` is the number of hosts that have
    /// connected since the last call, and have not shown a known key.
    ///
    /// # Errors
    /// The other process does not run.
    pub fn revision(&self, strangers: u64) -> anyhow::Result<u64> {
        match self.ask(&LinkRequest::Revision { strangers })? {
            Some(LinkAnswer::Revision(revision)) => Ok(revision),
            _ => Err(another_answer()),
        }
    }

    /// Sends a request whose answer is yes or no. The answer is no if the process `grafts` does not run.
    pub fn is_agreed(&self, peer: &str, called_at: Option<u64>) -> bool {
        let asked = self.ask(&LinkRequest::IsAgreed { peer: peer.to_owned(), called_at });
        matches!(asked, Ok(Some(LinkAnswer::IsAgreed(true))))
    }

    /// Returns this host's statement to a peer, and the revision from which it was made.
    pub fn statement(&self, ends: &NegotiationEnds) -> anyhow::Result<(Statement, u64)> {
        match self.ask(&LinkRequest::Statement(ends.clone()))? {
            Some(LinkAnswer::Statement(statement, revision)) => Ok((*statement, revision)),
            _ => Err(another_answer()),
        }
    }

    /// Sends a request without an answer. An error is logged.
    pub fn tell(&self, request: &LinkRequest) {
        if let Err(error) = self.ask(request) {
            warn!("the part grafts has not recorded the state of an agreement: {error:#}");
        }
    }
}
