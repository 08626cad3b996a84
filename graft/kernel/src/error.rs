//! What can go wrong with a graft that comes from a file.

/// The kernel's or libbpf's own words included: nothing is left to a source, where it would be said again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("it is not an object file of BPF programs: {0:#}")]
    Open(libbpf_rs::Error),
    #[error("{0}")]
    Form(String),
    #[error("it has no parameter {0}")]
    NoParameter(String),
    #[error("parameter {name}: {value} does not fit its {bytes} bytes")]
    Parameter { name: String, value: u64, bytes: usize },
    /// `log` is the end of what libbpf and the verifier said.
    #[error("the kernel refused it: {source:#}\n{log}")]
    Load { r#source: libbpf_rs::Error, log: String },
    #[error("the kernel does not register congestion control {name}: {source}{}", remedy(*.source))]
    Register { name: String, r#source: nix::Error },
    #[error(
        "congestion control {0} is not {1}, which it would replace: a graft is replaced by one of the same name"
    )]
    OtherName(String, String),
    #[error("cannot attach to cgroup {path}: {source:#}")]
    Cgroup { path: String, r#source: libbpf_rs::Error },
    #[error("cannot open cgroup {path}: {source}")]
    NoCgroup { path: String, r#source: std::io::Error },
    #[error("{have} rules are more than there is room for, {room}")]
    Rules { have: usize, room: usize },
    #[error("cannot keep it in {path}: {source}")]
    Pin { path: String, r#source: std::io::Error },
    #[error("this kernel does not keep congestion controls by links: that needs Linux 6.4")]
    NoLinks,
    #[error("cannot walk over the sockets: {0}")]
    Walk(std::io::Error),
    #[error("cannot keep a descriptor: {0}")]
    Descriptor(std::io::Error),
    #[error("cannot change the state of a session: {0:#}")]
    State(libbpf_rs::Error),
    #[error("its state cannot be made out of that of the version before")]
    NoMigration,
    #[error("function {0} is not loaded")]
    NoFunction(String),
    #[error("function {0} is loaded already")]
    Function(String),
    #[error("{have} {what} are more than there is room for, {room}")]
    Room { what: &'static str, have: usize, room: usize },
    #[error("there is no interface {0}")]
    NoInterface(String),
    #[error("marked packets cannot be routed to this host: {0}")]
    Routing(std::io::Error),
    #[error("there is no session {local} - {remote}")]
    NoSession { local: std::net::SocketAddr, remote: std::net::SocketAddr },
    #[error("there is a session {local} - {remote} already")]
    Session { local: std::net::SocketAddr, remote: std::net::SocketAddr },
    #[error("the addresses {local} and {remote} are of different families")]
    Families { local: std::net::SocketAddr, remote: std::net::SocketAddr },
    #[error("cannot send a word of a session: {0}")]
    Say(std::io::Error),
    #[error("the session is not sealed")]
    Clear,
    #[error("the session has no such keys")]
    NoKeys,
    #[error("the clock of a session cannot be set: {0}")]
    Clock(nix::Error),
    #[error(transparent)]
    Kernel(#[from] millrace_kernel::Error),
}

fn remedy(error: nix::Error) -> &'static str {
    match error {
        nix::Error::EEXIST => "; another one of that name is there",
        nix::Error::EPERM => "; it needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN",
        _ => "",
    }
}

impl Error {
    /// What the verifier said, if it was asked.
    pub fn log(&self) -> Option<&str> {
        match self {
            Self::Load { log, .. } => Some(log),
            _ => None,
        }
    }
}
