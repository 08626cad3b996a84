//! Where reports go.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use millrace_cost::export;
use millrace_cost::log::{self, Writer};
use millrace_cost::merge::Merge;
use millrace_cost::report::Report;

use super::text;
use super::web;

/// Something that reports go to. They are shared, since some are looked at later.
pub trait Sink {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()>;

    /// There are no more.
    fn finish(&mut self) -> anyhow::Result<()> {
        Ok(())
    }
}

/// Outputs besides the terminal.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct Args {
    /// Serve the dashboard, its data as JSON, and Prometheus metrics here; a port alone is on loopback
    #[arg(long, value_name = "ADDR", value_parser = parse_addr, num_args = 0..=1, default_missing_value = "9720")]
    http: Option<SocketAddr>,
    /// What the dashboard can look back to is limited by this memory, MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, requires = "http")]
    http_memory: usize,
    /// At the end, write the stacks of all the time in folded form, for flame graphs
    #[arg(long, value_name = "FILE")]
    folded: Option<PathBuf>,
    /// At the end, write a profile of all the time for pprof
    #[arg(long, value_name = "FILE")]
    pprof: Option<PathBuf>,
    /// At the end, draw a flame graph of all the time, as SVG
    #[arg(long, value_name = "FILE")]
    flame: Option<PathBuf>,
}

/// A log of what was reported.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct LogArgs {
    /// Log reports with stacks to FILE, as gzipped lines of JSON; `millrace cost replay` shows them
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// A log of this size becomes FILE.1, MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, requires = "log")]
    log_size: u64,
    /// So many files are kept, FILE among them
    #[arg(long, value_name = "N", default_value_t = 8, requires = "log", value_parser = clap::value_parser!(u32).range(1..))]
    log_files: u32,
}

const MIB: usize = 1 << 20;

impl Args {
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

    /// What cannot be opened is an error now, not at the end.
    pub fn open(&self, live: bool) -> anyhow::Result<Opened> {
        let dashboard = match self.http {
            Some(addr) => {
                let memory_bytes = self.http_memory.saturating_mul(MIB);
                let dashboard = web::Dashboard::start(&web::Config { addr, memory_bytes, live })?;
                eprintln!("millrace: http://{}/", dashboard.local_addr);
                Some(dashboard)
            }
            None => None,
        };
        let export = match self.needs_stacks_at_the_end() {
            true => Some(Export::create(self.files())?),
            false => None,
        };
        Ok(Opened { dashboard, export })
    }
}

pub(super) struct Opened {
    pub dashboard: Option<web::Dashboard>,
    pub export: Option<Export>,
}

impl LogArgs {
    pub fn is_any(&self) -> bool {
        self.log.is_some()
    }

    pub fn open(&self) -> anyhow::Result<Option<Log>> {
        let Some(path) = &self.log else { return Ok(None) };
        let limits = log::Limits { bytes: self.log_size.saturating_mul(MIB as u64), files: self.log_files };
        Ok(Some(Log(Some(Writer::create(path, limits)?))))
    }
}

/// `9720`, `127.0.0.1:9720`, `[::]:9720`.
fn parse_addr(text: &str) -> Result<SocketAddr, String> {
    match text.parse::<u16>() {
        Ok(port) => Ok((IpAddr::V4(Ipv4Addr::LOCALHOST), port).into()),
        Err(_) => text.parse().map_err(|_| format!("{text:?} is neither a port nor ADDRESS:PORT")),
    }
}

/// A report per line.
pub(super) struct JsonLines {
    pub stacks: bool,
}

impl Sink for JsonLines {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        let mut out = io::stdout().lock();
        let written = match report.stacks.is_some() && !self.stacks {
            true => serde_json::to_writer(&mut out, &report.without_stacks()),
            false => serde_json::to_writer(&mut out, &**report),
        };
        written.map_err(io::Error::from)?;
        out.write_all(b"\n")?;
        Ok(out.flush()?)
    }
}

/// One report after the other.
pub(super) struct Text {
    /// There is only one.
    pub one: bool,
}

impl Sink for Text {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(text::report(report).as_bytes())?;
        if !self.one {
            writeln!(out)?;
        }
        Ok(out.flush()?)
    }
}

/// `None` when finished.
pub(super) struct Log(Option<Writer>);

impl Sink for Log {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        Ok(self.0.as_mut().map_or(Ok(()), |writer| writer.write(report))?)
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        Ok(self.0.take().map_or(Ok(()), Writer::finish)?)
    }
}

/// Files of the whole time, written at the end.
pub(super) struct Export {
    merge: Merge,
    folded: Option<File>,
    pprof: Option<File>,
    flame: Option<File>,
}

impl Export {
    fn create([folded, pprof, flame]: [Option<&Path>; 3]) -> anyhow::Result<Self> {
        let create = |path: Option<&Path>| {
            path.map(|path| File::create(path).with_context(|| path.display().to_string())).transpose()
        };
        Ok(Self {
            merge: Merge::default(),
            folded: create(folded)?,
            pprof: create(pprof)?,
            flame: create(flame)?,
        })
    }
}

impl Sink for Export {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        self.merge.add(report);
        Ok(())
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        let Some(report) = std::mem::take(&mut self.merge).finish() else { return Ok(()) };
        if let (Some(mut file), Some(stacks)) = (self.folded.take(), &report.stacks) {
            file.write_all(export::folded(stacks).as_bytes()).context("folded stacks")?;
        }
        if let Some(file) = self.pprof.take() {
            let mut file = BufWriter::new(file);
            export::pprof(&report, &mut file).and_then(|()| file.flush()).context("pprof")?;
        }
        if let Some(mut file) = self.flame.take() {
            file.write_all(export::svg(&report).as_bytes()).context("flame graph")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_on_loopback() {
        assert_eq!(parse_addr("9720"), Ok(([127, 0, 0, 1], 9720).into()));
        assert_eq!(parse_addr("0.0.0.0:80"), Ok(([0, 0, 0, 0], 80).into()));
        assert!(parse_addr("[::1]:80").is_ok_and(|addr| addr.is_ipv6()));
        for wrong in ["", "localhost", "1.2.3.4", "99999"] {
            assert!(parse_addr(wrong).is_err(), "{wrong}");
        }
    }
}
