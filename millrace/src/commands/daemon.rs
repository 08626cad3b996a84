//! Flags and start-up code that the commands of the daemons share: gate, grafts and fan-out.

use std::path::{Path, PathBuf};

use millrace_daemon::{
    daemon::DaemonFront,
    http::{ListenAddr, access},
    log::{self, LogFormat},
};

/// Flags of a daemon. Each daemon sets its own defaults of `--socket` and `--http` with clap's `mut_arg`.
#[derive(Debug, clap::Args)]
pub struct DaemonFlags {
    /// Path of the control socket
    #[arg(long, value_name = "PATH", default_value = "")]
    socket: PathBuf,
    /// Group whose members may use the control socket; without it only the owner may
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// Address of the HTTP server with /metrics, /healthz and /status, or "off"
    #[arg(long, value_name = "ADDR:PORT", default_value = "off")]
    http: ListenAddr,
    #[command(flatten)]
    http_access: access::HttpFlags,
    /// Log level (error, warn, info, debug, trace) or directives (info,millrace::graft=debug)
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: String,
    /// Format of log lines
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

impl DaemonFlags {
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn front(&self) -> DaemonFront {
        DaemonFront {
            socket: self.socket.clone(),
            socket_group: self.socket_group.clone(),
            http: self.http.0,
            http_access: self.http_access.clone(),
        }
    }

    /// Sets up logging and runs `serve` to its end.
    pub fn run(&self, serve: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
        let settings = log::Settings { level: self.log_level.clone(), format: self.log_format, file: None };
        // The log's guard is kept until the daemon ends: dropping it flushes the log.
        let _log = log::start(&settings)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(serve)
    }
}
