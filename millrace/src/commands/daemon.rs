//! What daemons have in common: gate, grafts, packet grafts.

use std::path::{Path, PathBuf};

use millrace_daemon::{
    daemon::Front,
    http::{ListenAddr, access},
    log::{self, Format},
};

/// Their flags. The defaults of `--socket` and `--http` are each daemon's own (`mut_arg`).
#[derive(Debug, clap::Args)]
pub struct Flags {
    /// Socket that commands ask
    #[arg(long, value_name = "PATH", default_value = "")]
    socket: PathBuf,
    /// A group whose members may use the socket; only its owner without
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// Where /metrics, /healthz and /status are served, or "off"
    #[arg(long, value_name = "ADDR:PORT", default_value = "off")]
    http: ListenAddr,
    #[command(flatten)]
    http_access: access::Flags,
    /// A level (error, warn, info, debug, trace) or directives (info,millrace::graft=debug)
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: String,
    #[arg(long, value_enum, default_value_t = Format::Text)]
    log_format: Format,
}

impl Flags {
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn front(&self) -> Front {
        Front {
            socket: self.socket.clone(),
            socket_group: self.socket_group.clone(),
            http: self.http.0,
            http_access: self.http_access.clone(),
        }
    }

    /// Logs as the flags say, until `serve` has ended.
    pub fn run(&self, serve: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
        let settings = log::Settings { level: self.log_level.clone(), format: self.log_format, file: None };
        let _log = log::start(&settings)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(serve)
    }
}
