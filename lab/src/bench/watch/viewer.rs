//! The viewer: headless Chromium in the subscribers' namespace, on a relay's page.

use std::env;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::json;

use super::super::contender::{Contender, PORT, STATUS};
use super::super::process::Process;
use super::super::site::Site;
use super::seen::Seen;
use crate::program::product;

/// What drives the browser, and what looks at the page from within.
const SCRIPTS: [(&str, &str); 3] = [
    ("browser.mjs", include_str!("../../../../scripts/browser.mjs")),
    ("viewer.mjs", include_str!("viewer.mjs")),
    ("eye.js", include_str!("eye.js")),
];
/// Until the page is there, and until there is a picture.
pub const LIMIT: Duration = Duration::from_secs(60);
/// To begin and to end a browser.
const SLACK: Duration = Duration::from_secs(30);
/// Of the Millrace that only has the page.
const UNUSED: &str = "127.0.0.1:4444";

/// The programs that it needs.
#[derive(Debug)]
pub struct Programs {
    pub chromium: PathBuf,
    pub node: PathBuf,
}

impl Programs {
    /// `$CHROMIUM`, or in the search path.
    pub fn find() -> anyhow::Result<Self> {
        let chromium = match env::var_os("CHROMIUM").filter(|path| !path.is_empty()) {
            Some(chromium) => chromium.into(),
            None => find("chromium").context("or name one with CHROMIUM=FILE")?,
        };
        Ok(Self { chromium, node: find("node")? })
    }
}

fn find(program: &str) -> anyhow::Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).map(|dir| dir.join(program)).find(|candidate| candidate.is_file());
    match found {
        Some(program) => Ok(program),
        None => bail!("there is no {program} in $PATH (scripts/setup.sh web)"),
    }
}

/// What it is to do.
pub struct Task<'a> {
    /// From the first picture on.
    pub watch: Duration,
    /// The player's.
    pub buffer_ms: u32,
    /// Where the end is kept as PNG.
    pub screenshot: Option<&'a Path>,
}

pub struct Viewer {
    process: Process,
    limit: Duration,
}

impl Viewer {
    /// On the page at `page`, which plays what the site's relay has.
    pub fn start(
        programs: &Programs,
        site: &Site,
        page: SocketAddr,
        task: &Task<'_>,
    ) -> anyhow::Result<Self> {
        for (name, script) in SCRIPTS {
            std::fs::write(site.directory().join(name), script)?;
        }
        let asked = json!({
            "chromium": programs.chromium,
            "url": format!("http://{page}/"),
            "web": { "port": PORT, "local": null },
            "certificate": site.certificate(),
            "latencyMs": task.buffer_ms,
            "limitMs": LIMIT.as_millis() as u64,
            "watchMs": task.watch.as_millis() as u64,
            "screenshot": task.screenshot,
        });
        let mut command = site.subscribers()?.command(&programs.node);
        command.arg(site.directory().join("viewer.mjs")).arg(asked.to_string());
        // What a browser leaves behind goes with the site.
        command.env("TMPDIR", site.directory());
        let process = Process::start("viewer", command, site.directory())?;
        Ok(Self { process, limit: LIMIT + task.watch + SLACK })
    }

    pub fn finish(self) -> anyhow::Result<Seen> {
        serde_json::from_str(&self.process.finish(self.limit)?).context("the viewer's words")
    }
}

/// A relay, and who has the page: the relay itself if it is Millrace.
pub struct Served {
    pub page: SocketAddr,
    processes: Vec<Process>,
}

impl Served {
    /// `further`: arguments of a relay that is Millrace.
    pub fn start(site: &Site, contender: Contender, further: &[&str]) -> anyhow::Result<Self> {
        let node = site.relay()?;
        let page = SocketAddr::new(node.addr_v4().into(), STATUS.port());
        let (mut server, relay) = match contender.engine() {
            Some(_) => (site.start_relay_with_page(contender, page, further)?, None),
            None => (serve_page(site, page)?, Some(site.start_relay(contender)?)),
        };
        let answers = || node.enter(|| TcpStream::connect(page).is_ok()).unwrap_or(false);
        server.wait_until("serving its page", LIMIT, answers)?;
        Ok(Self { page, processes: [server].into_iter().chain(relay).collect() })
    }

    /// An error if one of them has ended.
    pub fn check_runs(&mut self) -> anyhow::Result<()> {
        self.processes.iter_mut().try_for_each(Process::check_runs)
    }
}

/// By a Millrace that relays nothing.
fn serve_page(site: &Site, page: SocketAddr) -> anyhow::Result<Process> {
    let mut command = site.relay()?.command(product()?);
    command.args(["relay", "--listen", UNUSED, "--engine", "user", "--log-level", "warn"]);
    command.args(["--http", &page.to_string(), "--http-token-file", "off"]);
    Process::start("page", command, site.directory())
}
