//! Errors that occur while grafts are loaded into the kernel or used there.

/// An error in a graft's object file, or an error that the kernel returned. Its text already includes the message of
/// the kernel or of libbpf, so `source` returns `None`.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("this is not an object file of BPF programs: {0:#}")]
    Open(libbpf_rs::Error),
    #[error("{0}")]
    Form(String),
    #[error("the graft has no parameter {0}")]
    NoParameter(String),
    #[error("parameter {name}: {value} does not fit its {bytes} bytes")]
    Parameter { name: String, value: u64, bytes: usize },
    /// The kernel refused a program. `log` is the end of the log of libbpf and the verifier.
    #[error("the kernel refused the graft: {source:#}\n{log}")]
    Load { r#source: libbpf_rs::Error, log: String },
    #[error("the kernel refused to register congestion control {name}: {source}{}", remedy(*.source))]
    Register { name: String, r#source: nix::Error },
    #[error(
        "congestion control {0} cannot replace {1}: a graft can only be replaced by one of the same name"
    )]
    OtherName(String, String),
    #[error("cannot attach to cgroup {path}: {source:#}")]
    Cgroup { path: String, r#source: libbpf_rs::Error },
    #[error("cannot open cgroup {path}: {source}")]
    NoCgroup { path: String, r#source: std::io::Error },
    #[error("too many rules: {have}, at most {room}")]
    Rules { have: usize, room: usize },
    #[error("cannot pin the graft in {path}: {source}")]
    Pin { path: String, r#source: std::io::Error },
    #[error("this kernel cannot pin congestion controls: that needs Linux 6.4")]
    NoLinks,
    #[error("cannot iterate over the TCP sockets: {0}")]
    Walk(std::io::Error),
    #[error("a system call on a BPF object or a socket failed: {0}")]
    Descriptor(std::io::Error),
    #[error("cannot change the state of a session: {0:#}")]
    State(libbpf_rs::Error),
    #[error("the function cannot take over the state of the previous version")]
    NoMigration,
    #[error("function {0} is not loaded")]
    NoFunction(String),
    #[error("function {0} is loaded already")]
    Function(String),
    #[error("too many {what}: {have}, at most {room}")]
    Room { what: &'static str, have: usize, room: usize },
    #[error("there is no interface {0}")]
    NoInterface(String),
    #[error("cannot add the rules and routes that deliver marked packets to this host: {0}")]
    Routing(std::io::Error),
    #[error("there is no session {local} - {remote}")]
    NoSession { local: std::net::SocketAddr, remote: std::net::SocketAddr },
    #[error("there is a session {local} - {remote} already")]
    Session { local: std::net::SocketAddr, remote: std::net::SocketAddr },
    #[error("the addresses {local} and {remote} are of different families")]
    Families { local: std::net::SocketAddr, remote: std::net::SocketAddr },
    #[error("cannot send a message of a session: {0}")]
    Say(std::io::Error),
    #[error("the session is not encrypted, so it has no keys")]
    Clear,
    #[error("the session has no keys of this phase")]
    NoKeys,
    #[error("the clock of a session cannot be set: {0}")]
    Clock(nix::Error),
    #[error(transparent)]
    Kernel(#[from] millrace_kernel::Error),
}

fn remedy(error: nix::Error) -> &'static str {
    match error {
        nix::Error::EEXIST => "; a control of that name is registered already",
        nix::Error::EPERM => "; it needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN",
        _ => "",
    }
}

impl Error {
    /// Returns the verifier's log, if the verifier ran.
    pub fn log(&self) -> Option<&str> {
        match self {
            Self::Load { log, .. } => Some(log),
            _ => None,
        }
    }
}
