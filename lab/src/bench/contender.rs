//! The relays that can be measured, and the command that starts each.

use std::env;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};

use crate::program::product;
use crate::transport::LabTransport;

/// Port that every relay listens on.
pub const PORT: u16 = 4443;

/// Address where Millrace serves its status.
pub const STATUS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9184);

const HOUR: Duration = Duration::from_secs(3600);
/// Validity of a certificate. Browsers that check only the fingerprint reject certificates of 14 days or more.
const VALIDITY: Duration = Duration::from_secs(13 * 86_400);

/// Congestion control that Millrace uses by default.
const DEFAULT: &str = "bbr";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Contender {
    /// Millrace, forwarding in the kernel
    Kernel,
    /// Millrace, forwarding in the kernel, behind its packet gate (XDP)
    KernelGate,
    /// Millrace, forwarding in the kernel, with CUBIC
    KernelCubic,
    /// Millrace, forwarding in the kernel, with `--max-delay=off`
    KernelWhole,
    /// Millrace, forwarding in the kernel, with one shard, on one CPU
    KernelOne,
    /// Millrace, forwarding in userspace
    User,
    /// Millrace, forwarding in userspace, behind its packet gate (XDP)
    UserGate,
    /// Millrace, forwarding in userspace, with CUBIC
    UserCubic,
    /// Millrace, forwarding in userspace, with `--max-delay=off`
    UserWhole,
    /// Millrace, forwarding in userspace, with one shard, on one CPU
    UserOne,
    /// Cloudflare's relay
    MoqRelayIetf,
    /// moq-dev's relay
    MoqRelay,
    /// A plain UDP forwarder: shows the latency and CPU time that the lab and the probe add by themselves
    Forwarder,
    /// A UDP forwarder with as few system calls as possible: recvmmsg, sendmmsg
    Batched,
    /// Millrace's fan-out of RTP, in the kernel
    Fanout,
    /// A bare quinn server, which holds connections and serves nothing; only for the benchmark `memory`
    #[value(skip)]
    Quinn,
}

impl Contender {
    /// Returns the relay's name in a result row.
    pub fn relay(self) -> &'static str {
        match self {
            Self::MoqRelayIetf => "moq-relay-ietf",
            Self::MoqRelay => "moq-relay",
            Self::Forwarder => "udp-forwarder",
            Self::Batched => "udp-batched",
            Self::Fanout => "millrace-fanout",
            Self::Quinn => "quinn",
            _ => "millrace",
        }
    }

    /// Reports whether the clients of this relay speak plain UDP instead of MoQ.
    pub fn is_plain(self) -> bool {
        matches!(self, Self::Forwarder | Self::Batched | Self::Fanout)
    }

    /// Returns the settings of Millrace; `None` for other relays.
    fn setup(self) -> Option<ContenderSetup> {
        let kernel = ContenderSetup {
            engine: "kernel",
            gate: false,
            congestion_control: DEFAULT,
            max_delay: None,
            one_cpu: false,
        };
        let user = ContenderSetup { engine: "user", ..kernel };
        match self {
            Self::Kernel => Some(kernel),
            Self::KernelGate => Some(ContenderSetup { gate: true, ..kernel }),
            Self::KernelCubic => Some(ContenderSetup { congestion_control: "cubic", ..kernel }),
            Self::KernelWhole => Some(ContenderSetup { max_delay: Some("off"), ..kernel }),
            Self::KernelOne => Some(ContenderSetup { one_cpu: true, ..kernel }),
            Self::User => Some(user),
            Self::UserGate => Some(ContenderSetup { gate: true, ..user }),
            Self::UserCubic => Some(ContenderSetup { congestion_control: "cubic", ..user }),
            Self::UserWhole => Some(ContenderSetup { max_delay: Some("off"), ..user }),
            Self::UserOne => Some(ContenderSetup { one_cpu: true, ..user }),
            Self::MoqRelayIetf
            | Self::MoqRelay
            | Self::Forwarder
            | Self::Batched
            | Self::Fanout
            | Self::Quinn => None,
        }
    }

    /// Returns where Millrace forwards media, `kernel` or `user`, as result rows name it; `None` for other relays.
    pub fn engine(self) -> Option<&'static str> {
        self.setup().map(|setup| setup.engine)
    }

    /// Returns whether Millrace runs behind its packet gate; `None` for other relays.
    pub fn gate(self) -> Option<bool> {
        self.setup().map(|setup| setup.gate)
    }

    /// Returns Millrace's congestion control; `None` for other relays, which use their default.
    pub fn congestion_control(self) -> Option<&'static str> {
        self.setup().map(|setup| setup.congestion_control)
    }

    /// Returns Millrace's longest media delay; `None` if it is the default, and for other relays.
    pub fn max_delay(self) -> Option<&'static str> {
        self.setup().and_then(|setup| setup.max_delay)
    }

    /// Returns the name of the transport for a result row; `None` for plain UDP.
    pub fn over(self, transport: LabTransport) -> Option<&'static str> {
        (!self.is_plain()).then(|| transport.name())
    }

    /// Returns the relay's label, followed by the transport unless that is raw QUIC.
    pub fn label_over(self, transport: LabTransport) -> String {
        match transport {
            LabTransport::Raw => self.label(),
            other => format!("{}, {}", self.label(), other.name()),
        }
    }

    pub fn label(self) -> String {
        let Some(ContenderSetup { engine, gate, congestion_control, max_delay, one_cpu }) = self.setup()
        else {
            return self.relay().to_owned();
        };
        let gate = if gate { ", gate" } else { "" };
        let other =
            if congestion_control == DEFAULT { String::new() } else { format!(", {congestion_control}") };
        let whole = if max_delay.is_some() { ", whole" } else { "" };
        let one = if one_cpu { ", one CPU" } else { "" };
        format!("{} ({engine}{gate}{other}{whole}{one})", self.relay())
    }

    /// Returns the command that starts the relay. `http` is the address of Millrace's status.
    pub fn command_line(
        self,
        listen: SocketAddr,
        http: SocketAddr,
        identity: &ContenderIdentity,
    ) -> anyhow::Result<CommandLine> {
        let listen = listen.to_string();
        let http = http.to_string();
        let certificate = identity.certificate.to_string_lossy();
        let key = identity.key.to_string_lossy();
        if let Some(setup) = self.setup() {
            let gate = if setup.gate { "on" } else { "off" };
            let mut arguments = vec!["relay", "--listen", &listen, "--public", "--engine", setup.engine];
            arguments.extend(["--gate", gate, "--congestion-control", setup.congestion_control]);
            arguments.extend(setup.max_delay.iter().flat_map(|delay| ["--max-delay", delay]));
            arguments.extend(["--http", &http, "--http-token-file", "off"]);
            arguments.extend(["--tls-cert", &certificate, "--tls-key", &key, "--log-level", "warn"]);
            let program = product()?;
            if !setup.one_cpu {
                return Ok(CommandLine::new(program, &arguments));
            }
            let program = program.to_string_lossy();
            let pinned = ["--cpu-list", "0", &program].into_iter().chain(arguments).chain(["--shards", "1"]);
            return Ok(CommandLine::new("taskset".into(), &pinned.collect::<Vec<_>>()));
        }
        let (program, arguments) = match self {
            Self::MoqRelayIetf => {
                (find(self.relay())?, vec!["--bind", &listen, "--tls-cert", &certificate, "--tls-key", &key])
            }
            Self::MoqRelay => {
                let mut arguments = vec!["--listen", &listen, "--auth-public", "**"];
                arguments.extend(["--listen-tls-cert", &certificate, "--listen-tls-key", &key]);
                (find(self.relay())?, arguments)
            }
            // The other settings of the fan-out are in a file that `BenchSite::start` writes.
            Self::Fanout => (product()?, vec!["fanout", "run", "--http", "off", "--log-level", "warn"]),
            Self::Quinn => {
                let mut arguments = vec!["bench", "quinn-server", "--listen", &listen];
                arguments.extend(["--tls-cert", &certificate, "--tls-key", &key]);
                (env::current_exe()?, arguments)
            }
            Self::Batched => {
                (env::current_exe()?, vec!["bench", "udp", "forward", "--batched", "--listen", &listen])
            }
            _ => (env::current_exe()?, vec!["bench", "udp", "forward", "--listen", &listen]),
        };
        Ok(CommandLine::new(program, &arguments))
    }
}

/// Settings of Millrace for one result row.
#[derive(Clone, Copy)]
struct ContenderSetup {
    engine: &'static str,
    gate: bool,
    congestion_control: &'static str,
    /// Longest delay of media before they are dropped; `None` for the default.
    max_delay: Option<&'static str>,
    /// Whether the relay has one shard and runs on the first CPU only.
    one_cpu: bool,
}

#[derive(Debug)]
pub struct CommandLine {
    pub program: PathBuf,
    pub arguments: Vec<String>,
}

impl CommandLine {
    fn new(program: PathBuf, arguments: &[&str]) -> Self {
        Self { program, arguments: arguments.iter().map(|&argument| argument.to_owned()).collect() }
    }
}

/// Finds a program in `$MILLRACE_PEERS/bin`, in `target/peers/bin` or in `$PATH`.
pub fn find(program: &str) -> anyhow::Result<PathBuf> {
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
        None => bail!(
            "{program} is not in $MILLRACE_PEERS/bin, target/peers/bin or $PATH: build it with `make peers`"
        ),
    }
}

/// Files with a certificate for the relay's address, and with the certificate's private key.
#[derive(Debug)]
pub struct ContenderIdentity {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl ContenderIdentity {
    /// Creates a certificate in a directory of its own. moq-relay watches that directory, and would reload its
    /// certificate for each line of a log file there.
    pub fn create(directory: &Path, address: Ipv4Addr) -> anyhow::Result<Self> {
        let mut params = rcgen::CertificateParams::new(["localhost".to_owned(), address.to_string()])?;
        let start = SystemTime::now() - HOUR;
        params.not_before = start.into();
        params.not_after = (start + VALIDITY).into();
        let key = rcgen::KeyPair::generate()?;
        let made = params.self_signed(&key).context("cannot make a certificate")?;
        std::fs::create_dir(directory)?;
        let identity = Self { certificate: directory.join("cert.pem"), key: directory.join("key.pem") };
        std::fs::write(&identity.certificate, made.pem())?;
        std::fs::write(&identity.key, key.serialize_pem())?;
        Ok(identity)
    }
}
