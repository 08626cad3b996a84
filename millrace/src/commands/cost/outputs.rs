//! Flags that select the outputs of reports, and the functions that open these outputs.

use std::io::IsTerminal as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use millrace_cost::log::LogLimits;
use millrace_cost_daemon::losses::ReportLosses;
use millrace_cost_daemon::outputs::{ExportOutput, LogOutput};
use millrace_cost_daemon::web;
use millrace_daemon::address;
use millrace_daemon::http::{access, token::HttpToken};

/// Flags for the outputs besides the terminal and the log: the dashboard, and files written at the end.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub struct OutputArgs {
    /// Serve the dashboard, its data as JSON, and Prometheus metrics on this address; a port alone means 127.0.0.1
    #[arg(long, value_name = "ADDR", value_parser = parse_addr, num_args = 0..=1, default_missing_value = "9720")]
    http: Option<SocketAddr>,
    #[command(flatten)]
    http_access: access::HttpFlags,
    /// Memory for the dashboard's history, MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, requires = "http")]
    http_memory: usize,
    /// Write the stacks of the whole run to FILE at the end, in folded form for flame graphs
    #[arg(long, value_name = "FILE")]
    folded: Option<PathBuf>,
    /// Write a pprof profile of the whole run to FILE at the end
    #[arg(long, value_name = "FILE")]
    pprof: Option<PathBuf>,
    /// Draw a flame graph of the whole run to FILE at the end, as SVG
    #[arg(long, value_name = "FILE")]
    flame: Option<PathBuf>,
}

/// Flags for the log of the reports.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub struct LogArgs {
    /// Log reports with stacks to FILE, as gzipped lines of JSON; `millrace cost replay` shows them
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Size at which the log is renamed to FILE.1, MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, requires = "log")]
    log_size: u64,
    /// Number of log files that are kept, FILE included
    #[arg(long, value_name = "N", default_value_t = 8, requires = "log", value_parser = clap::value_parser!(u32).range(1..))]
    log_files: u32,
}

const MIB: usize = 1 << 20;

impl OutputArgs {
    pub fn needs_stacks(&self) -> bool {
        self.http.is_some() || self.needs_stacks_at_the_end()
    }

    fn needs_stacks_at_the_end(&self) -> bool {
        self.files().iter().any(Option::is_some)
    }

    fn files(&self) -> [Option<&Path>; 3] {
        [&self.folded, &self.pprof, &self.flame].map(Option::as_deref)
    }

    pub fn is_any(&self) -> bool {
        self.needs_stacks()
    }

    /// Returns the first of the given flags whose output consists of stack samples only; `None` if there is none.
    pub fn samples_only_option(&self) -> Option<&'static str> {
        let names = ["--folded", "--pprof", "--flame"];
        self.files().into_iter().zip(names).find_map(|(file, name)| file.map(|_| name))
    }

    pub fn serves(&self) -> bool {
        self.http.is_some()
    }

    /// Returns whether the flags select files that are written when the observation ends.
    pub fn writes(&self) -> bool {
        self.needs_stacks_at_the_end()
    }

    /// Binds the dashboard's address and creates the files, so that a failure is reported at start-up and not when the
    /// observation ends. Starts no thread.
    pub fn open(&self, live: bool, losses: Arc<ReportLosses>) -> anyhow::Result<OpenedOutputs> {
        let dashboard = match self.http {
            Some(addr) => {
                let memory_bytes = self.http_memory.saturating_mul(MIB);
                let access = self.http_access.access()?;
                let config = web::Config { addr, memory_bytes, live, access: access.clone(), losses };
                let dashboard = web::BoundDashboard::new(&config)?;
                eprintln!("millrace: {}", link(dashboard.local_addr(), access.token()));
                Some(dashboard)
            }
            None => None,
        };
        let export = match self.needs_stacks_at_the_end() {
            true => Some(ExportOutput::create(self.files())?),
            false => None,
        };
        Ok(OpenedOutputs { dashboard, export })
    }
}

pub struct OpenedOutputs {
    pub dashboard: Option<web::BoundDashboard>,
    pub export: Option<ExportOutput>,
}

impl LogArgs {
    pub fn is_any(&self) -> bool {
        self.log.is_some()
    }

    pub fn open(&self, losses: Arc<ReportLosses>) -> anyhow::Result<Option<LogOutput>> {
        let Some(path) = &self.log else { return Ok(None) };
        let limits = LogLimits { bytes: self.log_size.saturating_mul(MIB as u64), files: self.log_files };
        LogOutput::create(path, limits, losses).map(Some)
    }
}

/// Returns the dashboard's link. It contains the token only on a terminal, since standard error may go to a log.
fn link(addr: SocketAddr, token: Option<&HttpToken>) -> String {
    match token {
        None => format!("http://{addr}/"),
        Some(token) if std::io::stderr().is_terminal() => format!("http://{addr}/?token={}", token.text()),
        Some(token) => format!("http://{addr}/ (add ?token= and the token from {})", token.path().display()),
    }
}

/// Parses an address to serve on, such as `127.0.0.1:9720` or `[::]:9720`. A port alone means 127.0.0.1.
fn parse_addr(text: &str) -> Result<SocketAddr, String> {
    match text.parse::<u16>() {
        Ok(port) => Ok((IpAddr::V4(Ipv4Addr::LOCALHOST), port).into()),
        Err(_) => address::listen_once(text).map_err(|error| format!("{error}, or a port")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_with_port_only_is_on_loopback() {
        assert_eq!(parse_addr("9720"), Ok(([127, 0, 0, 1], 9720).into()));
        assert_eq!(parse_addr("0.0.0.0:80"), Ok(([0, 0, 0, 0], 80).into()));
        assert!(parse_addr("[::1]:80").is_ok_and(|addr| addr.is_ipv6()));
        for wrong in ["", "localhost", "1.2.3.4", "99999"] {
            assert!(parse_addr(wrong).is_err(), "{wrong}");
        }
    }
}
