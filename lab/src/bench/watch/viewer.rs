//! The viewer of `watch`: headless Chromium in the subscribers' network namespace, which opens a relay's page.

use std::env;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::json;

use super::super::contender::{Contender, PORT, STATUS};
use super::super::process::BenchProcess;
use super::super::site::BenchSite;
use super::seen::PageReport;
use crate::program::product;

/// Scripts that drive the browser, and that record frames inside the page.
const SCRIPTS: [(&str, &str); 3] = [
    ("browser.mjs", include_str!("../../../../scripts/browser.mjs")),
    ("viewer.mjs", include_str!("viewer.mjs")),
    ("eye.js", include_str!("eye.js")),
];
/// Longest wait for the page, and for the first picture.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Time that the browser may take to start and to end.
const SLACK: Duration = Duration::from_secs(30);
/// Address where a Millrace relay listens that serves only the web page. No client connects to this address.
const UNUSED: &str = "127.0.0.1:4444";

/// Programs that the viewer needs: Chromium, and Node.js to drive it.
#[derive(Debug)]
pub struct ViewerPrograms {
    pub chromium: PathBuf,
    pub node: PathBuf,
}

impl ViewerPrograms {
    /// Finds Chromium by `$CHROMIUM` or in `$PATH`, and Node.js in `$PATH`.
    pub fn find() -> anyhow::Result<Self> {
        let chromium = match env::var_os("CHROMIUM").filter(|path| !path.is_empty()) {
            Some(chromium) => chromium.into(),
            None => find("chromium").context("set CHROMIUM=FILE to use a Chromium elsewhere")?,
        };
        Ok(Self { chromium, node: find("node")? })
    }
}

fn find(program: &str) -> anyhow::Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).map(|dir| dir.join(program)).find(|candidate| candidate.is_file());
    match found {
        Some(program) => Ok(program),
        None => bail!("{program} is not in $PATH: install it with scripts/setup.sh web"),
    }
}

/// Settings of the viewer.
pub struct ViewerTask<'a> {
    /// Time to watch, from the first picture on.
    pub watch: Duration,
    /// Length of the player's buffer, ms.
    pub buffer_ms: u32,
    /// File for a screenshot at the end, as PNG; `None` for no screenshot.
    pub screenshot: Option<&'a Path>,
}

pub struct BrowserViewer {
    process: BenchProcess,
    limit: Duration,
}

impl BrowserViewer {
    /// Starts a viewer that opens the page at `page`. The page plays the broadcast of the relay in this lab.
    pub fn start(
        programs: &ViewerPrograms,
        site: &BenchSite,
        page: SocketAddr,
        task: &ViewerTask<'_>,
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
        // The browser's temporary files are in the lab's temporary directory, so they are removed with it.
        command.env("TMPDIR", site.directory());
        let process = BenchProcess::start("viewer", command, site.directory())?;
        Ok(Self { process, limit: LIMIT + task.watch + SLACK })
    }

    pub fn finish(self) -> anyhow::Result<PageReport> {
        serde_json::from_str(&self.process.finish(self.limit)?).context("cannot parse the viewer's report")
    }
}

/// A running relay, and the process that serves the page. For Millrace this is the relay itself.
pub struct ServedPage {
    pub page: SocketAddr,
    processes: Vec<BenchProcess>,
}

impl ServedPage {
    /// Starts the relay, and a server for its page if needed. `further` are additional arguments for Millrace.
    pub fn start(site: &BenchSite, contender: Contender, further: &[&str]) -> anyhow::Result<Self> {
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

    /// Fails if one of the processes has ended.
    pub fn check_runs(&mut self) -> anyhow::Result<()> {
        self.processes.iter_mut().try_for_each(BenchProcess::check_runs)
    }
}

/// Starts a Millrace relay that only serves the web page, for runs with relays of other projects.
fn serve_page(site: &BenchSite, page: SocketAddr) -> anyhow::Result<BenchProcess> {
    let mut command = site.relay()?.command(product()?);
    command.args(["relay", "--listen", UNUSED, "--engine", "user", "--log-level", "warn"]);
    command.args(["--http", &page.to_string(), "--http-token-file", "off"]);
    BenchProcess::start("page", command, site.directory())
}
