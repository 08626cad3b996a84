//! The relays that can be measured, and how each is started.

use std::env;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// Port that every relay listens on.
pub const PORT: u16 = 4443;

/// Where Millrace says what it does.
pub const STATUS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9184);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Contender {
    /// Millrace, forwarding in the kernel
    Kernel,
    /// The same behind its gate
    KernelGate,
    /// Millrace, forwarding in the kernel, with BBR
    KernelBbr,
    /// Millrace, forwarding in userspace
    User,
    /// The same behind its gate
    UserGate,
    /// Millrace, forwarding in userspace, with BBR
    UserBbr,
    /// Cloudflare's relay
    MoqRelayIetf,
    /// moq-dev's relay
    MoqRelay,
    /// A plain UDP forwarder: what the lab and the probe add by themselves
    Forwarder,
}

impl Contender {
    /// The row's `relay`.
    pub fn relay(self) -> &'static str {
        match self {
            Self::Kernel | Self::KernelGate | Self::KernelBbr => "millrace",
            Self::User | Self::UserGate | Self::UserBbr => "millrace",
            Self::MoqRelayIetf => "moq-relay-ietf",
            Self::MoqRelay => "moq-relay",
            Self::Forwarder => "udp-forwarder",
        }
    }

    /// The row's `engine`; only Millrace has several.
    pub fn engine(self) -> Option<&'static str> {
        match self {
            Self::Kernel | Self::KernelGate | Self::KernelBbr => Some("kernel"),
            Self::User | Self::UserGate | Self::UserBbr => Some("user"),
            _ => None,
        }
    }

    /// The row's `gate`; only Millrace has one.
    pub fn gate(self) -> Option<bool> {
        self.engine().map(|_| matches!(self, Self::KernelGate | Self::UserGate))
    }

    /// The row's `congestion_control`; only Millrace's is chosen here.
    pub fn congestion_control(self) -> Option<&'static str> {
        let bbr = matches!(self, Self::KernelBbr | Self::UserBbr);
        self.engine().map(|_| if bbr { "bbr" } else { "cubic" })
    }

    pub fn label(self) -> String {
        if let (Some(engine), Some("bbr")) = (self.engine(), self.congestion_control()) {
            return format!("{} ({engine}, bbr)", self.relay());
        }
        match (self.engine(), self.gate()) {
            (Some(engine), Some(true)) => format!("{} ({engine}, gate)", self.relay()),
            (Some(engine), _) => format!("{} ({engine})", self.relay()),
            (None, _) => self.relay().to_owned(),
        }
    }

    pub fn command_line(self, listen: SocketAddr, identity: &Identity) -> anyhow::Result<CommandLine> {
        let (listen, http) = (listen.to_string(), STATUS.to_string());
        let certificate = identity.certificate.to_string_lossy();
        let key = identity.key.to_string_lossy();
        let (program, arguments) = match self {
            Self::Kernel
            | Self::KernelGate
            | Self::KernelBbr
            | Self::User
            | Self::UserGate
            | Self::UserBbr => {
                let engine = self.engine().unwrap_or_default();
                let gate = if self.gate() == Some(true) { "on" } else { "off" };
                let mut arguments = vec!["relay", "--listen", &listen, "--public", "--engine", engine];
                arguments.extend(["--gate", gate]);
                arguments.extend(["--http", &http, "--http-token-file", "off"]);
                arguments.extend(["--congestion-control", self.congestion_control().unwrap_or("cubic")]);
                arguments.extend(["--tls-cert", &certificate, "--tls-key", &key, "--log-level", "warn"]);
                (env::current_exe()?, arguments)
            }
            Self::MoqRelayIetf => {
                (find(self.relay())?, vec!["--bind", &listen, "--tls-cert", &certificate, "--tls-key", &key])
            }
            Self::MoqRelay => {
                let mut arguments = vec!["--listen", &listen, "--auth-public", "**"];
                arguments.extend(["--listen-tls-cert", &certificate, "--listen-tls-key", &key]);
                (find(self.relay())?, arguments)
            }
            Self::Forwarder => (env::current_exe()?, vec!["bench", "udp", "forward", "--listen", &listen]),
        };
        Ok(CommandLine { program, arguments: arguments.into_iter().map(str::to_owned).collect() })
    }
}

#[derive(Debug)]
pub struct CommandLine {
    pub program: PathBuf,
    pub arguments: Vec<String>,
}

/// In `$MILLRACE_PEERS/bin`, `target/peers/bin` or the search path.
fn find(program: &str) -> anyhow::Result<PathBuf> {
    let peers = env::var_os("MILLRACE_PEERS").map(|peers| PathBuf::from(peers).join("bin"));
    let built = env::current_dir().map(|dir| dir.join("target/peers/bin")).ok();
    let path = env::var_os("PATH").unwrap_or_default();
    let found = peers
        .into_iter()
        .chain(built)
        .chain(env::split_paths(&path))
        .map(|dir| dir.join(program))
        .find(|candidate| candidate.is_file());
    match found {
        Some(program) => Ok(program),
        None => bail!("{program} is not in $MILLRACE_PEERS/bin, target/peers/bin or $PATH (make peers)"),
    }
}

/// A certificate for the relay's address, as files.
#[derive(Debug)]
pub struct Identity {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Identity {
    /// In a directory of its own: moq-relay watches the certificate's directory, and would take each line of
    /// its log there for a new certificate.
    pub fn create(directory: &Path, address: Ipv4Addr) -> anyhow::Result<Self> {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned(), address.to_string()])
            .context("cannot make a certificate")?;
        std::fs::create_dir(directory)?;
        let identity = Self { certificate: directory.join("cert.pem"), key: directory.join("key.pem") };
        std::fs::write(&identity.certificate, made.cert.pem())?;
        std::fs::write(&identity.key, made.signing_key.serialize_pem())?;
        Ok(identity)
    }
}
