//! What can go wrong with grafts and sessions.

use millrace_base::settings::Problems;

use crate::refusal::Refusal;

/// Why something could not be done, causes included: there is no source that would say them again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: {message}")]
    File { path: String, message: String },
    #[error("the settings are not usable: {0}")]
    Settings(String),
    /// The error names the file, and has everything that is wrong with it.
    #[error(transparent)]
    Problems(#[from] Problems),
    #[error("graft {name}: {message}")]
    Graft { name: String, message: String },
    #[error("there is no graft {name}; there are: {known}")]
    Unknown { name: String, known: String },
    #[error("there is no function {name}; there are: {known}")]
    NoFunction { name: String, known: String },
    #[error("graft {graft}: {joint} takes {ns} ns for a packet, and its budget is {budget_ns}")]
    Budget { graft: String, joint: &'static str, ns: u64, budget_ns: u32 },
    #[error("there is no session {name}; there are: {known}")]
    NoSession { name: String, known: String },
    #[error(
        "session {session}: function {function} keeps version {to} of its state, and does not know how to go on from {from}. \
         `--stateless` has the session begin anew, and says what was lost"
    )]
    NoState { session: String, function: String, from: u32, to: u32 },
    #[error(
        "graft {graft} paces, and packets of {interface} wait in the queueing discipline {kind}, which does not look at when they \
         are to leave: `tc qdisc replace dev {interface} root fq`"
    )]
    NotPaced { graft: String, interface: String, kind: String },
    #[error("the system has no random numbers")]
    NoRandom,
    #[error("session {0} is being swapped")]
    Busy(String),
    #[error("there is no interface {name}: {source}")]
    Interface { name: String, r#source: nix::Error },
    #[error("graft {name}: {refusal}")]
    Refused { name: String, refusal: Refusal },
    #[error("graft {0} is not loaded")]
    NotLoaded(String),
    #[error("graft {0} is loaded already; `swap {0}` loads it anew")]
    Loaded(String),
    #[error("graft {name} is used by {user}")]
    Used { name: String, user: String },
    #[error(transparent)]
    Kernel(#[from] millrace_graft_kernel::Error),
}

impl Error {
    /// Says what is wrong with settings, for a list of problems.
    pub(crate) fn into_words(self) -> String {
        match self {
            Self::Settings(words) => words,
            other => other.to_string(),
        }
    }
}
