//! Errors about settings, grafts and packet sessions.

use millrace_base::settings::Problems;

use crate::refusal::LoadRefusal;

/// The reason why something failed, with its causes in the text. The error has no `source`, since that would repeat the
/// causes.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("{path}: {message}")]
    File { path: String, message: String },
    #[error("the settings are not usable: {0}")]
    Settings(String),
    /// The error names the settings file, and lists everything that is wrong with it.
    #[error(transparent)]
    Problems(#[from] Problems),
    #[error("graft {name}: {message}")]
    Graft { name: String, message: String },
    #[error("there is no graft {name}; there are: {known}")]
    Unknown { name: String, known: String },
    #[error("there is no function {name}; there are: {known}")]
    NoFunction { name: String, known: String },
    #[error("graft {graft}: {hook} takes {ns} ns for a packet, and its budget is {budget_ns}")]
    Budget { graft: String, hook: &'static str, ns: u64, budget_ns: u32 },
    #[error("there is no session {name}; there are: {known}")]
    NoSession { name: String, known: String },
    #[error(
        "session {session}: function {function} keeps version {to} of its state, and cannot continue from version {from}. \
         `--stateless` restarts the session, and reports what was lost"
    )]
    NoState { session: String, function: String, from: u32, to: u32 },
    #[error(
        "graft {graft} paces, and packets of {interface} wait in the queueing discipline {kind}, which ignores their time stamps \
         of departure: `tc qdisc replace dev {interface} root fq`"
    )]
    NotPaced { graft: String, interface: String, kind: String },
    #[error("the system has no random numbers for keys")]
    NoRandom,
    #[error("session {0} is being swapped already: try again when that is done")]
    Busy(String),
    #[error("there is no interface {name}: {source}")]
    Interface { name: String, r#source: nix::Error },
    #[error("graft {name}: {refusal}")]
    Refused { name: String, refusal: LoadRefusal },
    #[error("graft {0} is not loaded: load it with `graft load {0}`")]
    NotLoaded(String),
    #[error("graft {0} is loaded already; `swap {0}` loads it again")]
    Loaded(String),
    #[error("graft {name} is used by {user}: remove that use first")]
    Used { name: String, user: String },
    #[error(transparent)]
    Kernel(#[from] millrace_graft_kernel::Error),
}

impl Error {
    /// Returns the text for a list of problems with settings.
    pub(crate) fn into_words(self) -> String {
        match self {
            Self::Settings(words) => words,
            other => other.to_string(),
        }
    }
}
