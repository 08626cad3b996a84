//! Publishers and players that `bench matrix` pairs with each other: the transports, drafts and formats that each
//! supports, and how each program is started.

use std::path::PathBuf;
use std::process::{ChildStdin, Command};

use anyhow::Context as _;
use serde_json::json;

use super::super::contender::{PORT, find};
use super::super::process::BenchProcess;
use super::super::site::BenchSite;
use super::super::watch::viewer::{LIMIT, ViewerPrograms};
use crate::program::product;
use crate::transport::LabTransport;

/// Name of the broadcast that is published.
const NAME: &str = "live";
/// Jitter buffer of the players that have one, ms. It is large, so that a player shows late media instead of skipping
/// them.
const BUFFER_MS: u64 = 2000;
/// Scripts that drive the browser, and that record frames inside the page.
const SCRIPTS: [(&str, &str); 3] = [
    ("browser.mjs", include_str!("../../../../scripts/browser.mjs")),
    ("page.mjs", include_str!("page.mjs")),
    ("frames.js", include_str!("frames.js")),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MatrixProgram {
    /// millrace publish and subscribe
    Millrace,
    /// Cloudflare's publisher
    MoqPub,
    /// Cloudflare's player
    MoqSub,
    /// moq-dev's publisher and player
    MoqCli,
    /// The relay's page in Chromium
    Chromium,
}

/// Format of a broadcast's catalog, by the catalog track's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CatalogFormat {
    /// `.catalog`, with tracks named as moq-pub does
    MoqPub,
    /// `catalog` (MSF)
    Msf,
    /// `catalog.json` (hang)
    Hang,
}

/// Transport and MoQ draft of a client's connection to the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientTransport {
    pub transport: LabTransport,
    pub draft: u8,
}

/// A program with its connection to the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixEnd {
    pub program: MatrixProgram,
    pub way: ClientTransport,
}

/// Environment in which programs are started: the lab, and what the programs need.
pub struct MatrixStage<'a> {
    pub site: &'a BenchSite,
    pub browser: Option<&'a ViewerPrograms>,
    /// Address where the relay serves its web page.
    pub page: std::net::SocketAddr,
}

impl MatrixProgram {
    pub fn name(self) -> &'static str {
        match self {
            Self::Millrace => "millrace",
            Self::MoqPub => "moq-pub",
            Self::MoqSub => "moq-sub",
            Self::MoqCli => "moq-cli",
            Self::Chromium => "Chromium",
        }
    }

    pub fn publishes(self) -> bool {
        self != Self::MoqSub
    }

    pub fn plays(self) -> bool {
        self != Self::MoqPub
    }

    /// Returns the lowest and the highest draft that the program supports.
    fn drafts(self) -> (u8, u8) {
        match self {
            Self::Millrace => (18, 22),
            Self::MoqPub | Self::MoqSub => (18, 18),
            Self::MoqCli => (14, 22),
            Self::Chromium => (18, 19),
        }
    }

    fn writes(self) -> &'static [CatalogFormat] {
        match self {
            Self::Millrace | Self::Chromium => {
                &[CatalogFormat::MoqPub, CatalogFormat::Msf, CatalogFormat::Hang]
            }
            Self::MoqPub | Self::MoqSub => &[CatalogFormat::MoqPub],
            Self::MoqCli => &[CatalogFormat::Msf, CatalogFormat::Hang],
        }
    }

    /// Returns the catalog formats that the program reads, the preferred one first.
    fn reads(self) -> &'static [CatalogFormat] {
        match self {
            Self::Millrace => &[CatalogFormat::MoqPub, CatalogFormat::Msf],
            Self::MoqPub | Self::MoqSub => &[CatalogFormat::MoqPub],
            Self::MoqCli => &[CatalogFormat::Hang, CatalogFormat::Msf],
            Self::Chromium => &[CatalogFormat::Msf, CatalogFormat::Hang],
        }
    }

    /// Returns the path of the program.
    ///
    /// # Errors
    ///
    /// Fails if the program is not installed.
    pub fn find(self, browser: Option<&ViewerPrograms>) -> anyhow::Result<PathBuf> {
        match self {
            Self::Millrace => Ok(product()?),
            Self::MoqCli => find("moq"),
            Self::Chromium => Ok(browser.context("no Chromium, or no Node.js to drive it")?.node.clone()),
            other => find(other.name()),
        }
    }
}

impl CatalogFormat {
    fn name(self) -> &'static str {
        match self {
            Self::MoqPub => "moq-pub's",
            Self::Msf => "MSF",
            Self::Hang => "hang",
        }
    }

    fn list(all: &[Self]) -> String {
        all.iter().map(|format| format.name()).collect::<Vec<_>>().join(" or ")
    }
}

impl MatrixEnd {
    /// Returns the reason why the program does not support this connection, if so.
    fn hindrance(self) -> Option<String> {
        let Self { program, way } = self;
        let (first, last) = program.drafts();
        match way.transport {
            LabTransport::Raw if program == MatrixProgram::Chromium => {
                Some("a browser has no raw QUIC".to_owned())
            }
            _ if (first..=last).contains(&way.draft) => None,
            _ if first == last => Some(format!("{} speaks draft {first} only", program.name())),
            _ => Some(format!("{} speaks drafts {first} to {last}", program.name())),
        }
    }

    /// Returns the reason why this player cannot play the publisher's broadcast, if so.
    pub fn cannot_play(self, publisher: Self) -> Option<String> {
        publisher.hindrance().or_else(|| self.hindrance()).or_else(|| {
            let written = publisher.program.writes();
            let read = self.program.reads();
            if read.iter().any(|format| written.contains(format)) {
                return None;
            }
            let publisher = publisher.program.name();
            let player = self.program.name();
            let written = CatalogFormat::list(written);
            let read = CatalogFormat::list(read);
            Some(format!("{publisher} writes its catalog in {written} format, {player} reads {read}"))
        })
    }

    fn url(self, stage: &MatrixStage<'_>) -> anyhow::Result<String> {
        Ok(format!("{}://{}", self.way.transport.scheme(), stage.site.route()?.relay))
    }

    /// Starts the publisher. Returns the pipe to which media are written; a program with its own camera ignores the
    /// pipe.
    pub fn publish(self, stage: &MatrixStage<'_>) -> anyhow::Result<(BenchProcess, ChildStdin)> {
        let node = stage.site.node("pub")?;
        let mut command = node.command(self.program.find(stage.browser)?);
        match self.program {
            MatrixProgram::Chromium => self.drive(&mut command, stage, true)?,
            MatrixProgram::MoqCli => {
                self.moq_cli(&mut command, stage)?;
                command.args(["import", "fmp4"]);
            }
            _ => self.simple(&mut command, stage, "publish")?,
        }
        BenchProcess::start_fed("publisher", command, stage.site.directory())
    }

    /// Starts a player of the publisher's broadcast. It writes media to standard output.
    pub fn play(self, stage: &MatrixStage<'_>, publisher: Self) -> anyhow::Result<BenchProcess> {
        let mut command = stage.site.subscribers()?.command(self.program.find(stage.browser)?);
        match self.program {
            MatrixProgram::Chromium => self.drive(&mut command, stage, false)?,
            MatrixProgram::MoqCli => {
                let written = publisher.program.writes();
                let format = self.program.reads().iter().find(|format| written.contains(format));
                let format = format.map_or("hang", |format| match format {
                    CatalogFormat::Msf => "msf",
                    _ => "hang",
                });
                self.moq_cli(&mut command, stage)?;
                let late = format!("{BUFFER_MS}ms");
                command.args(["export", "--catalog-format", format, "fmp4", "--max-age", &late]);
            }
            _ => self.simple(&mut command, stage, "subscribe")?,
        }
        BenchProcess::start("player", command, stage.site.directory())
    }

    /// Adds the arguments that Millrace's programs and Cloudflare's share.
    fn simple(self, command: &mut Command, stage: &MatrixStage<'_>, ours: &str) -> anyhow::Result<()> {
        if self.program == MatrixProgram::Millrace {
            command.args([ours, "--draft", &self.way.draft.to_string()]);
        }
        command.args(["--name", NAME, "--tls-disable-verify", &self.url(stage)?]);
        Ok(())
    }

    fn moq_cli(self, command: &mut Command, stage: &MatrixStage<'_>) -> anyhow::Result<()> {
        let version = format!("moq-transport-{}", self.way.draft);
        command.args(["--connect", &self.url(stage)?, "--connect-tls-insecure"]);
        command.args(["--connect-version", &version, "--broadcast", NAME]);
        Ok(())
    }

    fn drive(self, command: &mut Command, stage: &MatrixStage<'_>, publishes: bool) -> anyhow::Result<()> {
        let directory = stage.site.directory();
        for (name, script) in SCRIPTS {
            std::fs::write(directory.join(name), script)?;
        }
        let tab = if publishes { "publish" } else { "watch" };
        let asked = json!({
            "chromium": stage.browser.map(|browser| &browser.chromium),
            "url": format!("http://{}/#{tab}/{NAME}", stage.page),
            "publishes": publishes,
            "web": { "port": PORT, "local": null },
            "certificate": stage.site.certificate(),
            "protocol": format!("moqt-{}", self.way.draft),
            "latencyMs": BUFFER_MS,
            "limitMs": LIMIT.as_millis() as u64,
        });
        command.arg(directory.join("page.mjs")).arg(asked.to_string());
        // The browser's temporary files are in the lab's temporary directory, so they are removed with it.
        command.env("TMPDIR", directory);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(program: MatrixProgram, transport: LabTransport, draft: u8) -> MatrixEnd {
        MatrixEnd { program, way: ClientTransport { transport, draft } }
    }

    #[test]
    fn incompatible_publishers_and_players_are_skipped_with_a_reason() {
        use LabTransport::{Raw, Webtransport};
        use MatrixProgram::{Chromium, Millrace, MoqCli, MoqPub, MoqSub};
        let table = [
            (end(Millrace, Raw, 18), end(MoqSub, Raw, 18), None),
            (end(MoqCli, Webtransport, 22), end(Millrace, Raw, 19), None),
            (end(Millrace, Raw, 17), end(MoqCli, Raw, 17), Some("millrace speaks drafts 18 to 22")),
            (end(Chromium, Raw, 18), end(Millrace, Raw, 18), Some("a browser has no raw QUIC")),
            (end(Millrace, Webtransport, 18), end(Chromium, Raw, 18), Some("a browser has no raw QUIC")),
            (end(MoqPub, Raw, 19), end(MoqCli, Raw, 19), Some("moq-pub speaks draft 18 only")),
            (end(MoqCli, Raw, 22), end(Chromium, Webtransport, 22), Some("Chromium speaks drafts 18 to 19")),
            (
                end(MoqPub, Raw, 18),
                end(MoqCli, Raw, 18),
                Some("moq-pub writes its catalog in moq-pub's format, moq-cli reads hang or MSF"),
            ),
        ];
        for (publisher, player, why) in table {
            assert_eq!(player.cannot_play(publisher).as_deref(), why, "{publisher:?} {player:?}");
        }
    }
}
