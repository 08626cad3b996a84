//! What can go wrong with a gate.

/// Why something could not be done, causes included: there is no source that would say them again.
#[derive(Debug, thiserror::Error)]
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
    #[error(
        "section [load] of the policy is not the one that the gate was loaded with: start anew to change it"
    )]
    Load,
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    #[error(transparent)]
    Kernel(#[from] millrace_kernel::Error),
}
