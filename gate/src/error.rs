//! Errors of a gate.

/// The reason why an operation failed. The text includes all causes, so there is no `source`, which would repeat them.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("there is no interface {name}: {source}")]
    Interface { name: String, r#source: nix::Error },
    #[error("interface {name}: {source}")]
    Attach { name: String, r#source: millrace_kernel::Error },
    #[error("interface {0} is guarded by this gate already: name it once")]
    Twice(String),
    #[error("the network namespace of interfaces cannot be entered: {0}")]
    Namespace(std::io::Error),
    #[error("there is no scope \"{name}\"; there are {}", known.join(", "))]
    NoScope { name: String, known: Vec<String> },
    #[error("section [load] of the policy has changed: restart the gate to apply it")]
    Load,
    #[error("cannot start a thread of the gate: {0}")]
    Thread(std::io::Error),
    #[error(transparent)]
    Kernel(#[from] millrace_kernel::Error),
}
