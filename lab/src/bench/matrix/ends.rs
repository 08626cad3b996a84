//! Who can be at either end: what each program speaks, and how it is started.

use std::path::PathBuf;
use std::process::{ChildStdin, Command};

use anyhow::Context as _;
use serde_json::json;

use super::super::contender::{PORT, find};
use super::super::process::Process;
use super::super::site::Site;
use super::super::watch::viewer::{LIMIT, Programs};
use crate::program::product;
use crate::transport::Transport;

/// Of the broadcast.
const NAME: &str = "live";
/// Of players that have one: what is late is to be shown all the same.
const BUFFER_MS: u64 = 2000;
/// What drives the browser, and what looks at the page from within.
const SCRIPTS: [(&str, &str); 3] = [
    ("browser.mjs", include_str!("../../../../scripts/browser.mjs")),
    ("page.mjs", include_str!("page.mjs")),
    ("frames.js", include_str!("frames.js")),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Program {
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

/// How a broadcast says what it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// `.catalog`, and tracks named as moq-pub names them
    MoqPub,
    /// `catalog`
    Msf,
    /// `catalog.json`
    Hang,
}

/// How a client comes to the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Way {
    pub transport: Transport,
    pub draft: u8,
}

/// A program, and how it comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    pub program: Program,
    pub way: Way,
}

/// Where programs are started: the lab, and what is at its ends.
pub struct Stage<'a> {
    pub site: &'a Site,
    pub browser: Option<&'a Programs>,
    /// Of the relay's page.
    pub page: std::net::SocketAddr,
}

impl Program {
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

    /// Drafts that it speaks, from the first to the last.
    fn drafts(self) -> (u8, u8) {
        match self {
            Self::Millrace => (18, 22),
            Self::MoqPub | Self::MoqSub => (18, 18),
            Self::MoqCli => (14, 22),
            Self::Chromium => (18, 19),
        }
    }

    fn writes(self) -> &'static [Format] {
        match self {
            Self::Millrace | Self::Chromium => &[Format::MoqPub, Format::Msf, Format::Hang],
            Self::MoqPub | Self::MoqSub => &[Format::MoqPub],
            Self::MoqCli => &[Format::Msf, Format::Hang],
        }
    }

    /// The first that there is counts.
    fn reads(self) -> &'static [Format] {
        match self {
            Self::Millrace => &[Format::MoqPub, Format::Msf],
            Self::MoqPub | Self::MoqSub => &[Format::MoqPub],
            Self::MoqCli => &[Format::Hang, Format::Msf],
            Self::Chromium => &[Format::Msf, Format::Hang],
        }
    }

    /// The file to start, of those that are not a part of this program.
    ///
    /// # Errors
    /// It is not here.
    pub fn find(self, browser: Option<&Programs>) -> anyhow::Result<PathBuf> {
        match self {
            Self::Millrace => Ok(product()?),
            Self::MoqCli => find("moq"),
            Self::Chromium => Ok(browser.context("no Chromium, or no node to drive it")?.node.clone()),
            other => find(other.name()),
        }
    }
}

impl Format {
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

impl End {
    /// Why it cannot be, if it cannot.
    fn hindrance(self) -> Option<String> {
        let Self { program, way } = self;
        let (first, last) = program.drafts();
        match way.transport {
            Transport::Raw if program == Program::Chromium => Some("a browser has no raw QUIC".to_owned()),
            _ if (first..=last).contains(&way.draft) => None,
            _ if first == last => Some(format!("{} speaks draft {first} only", program.name())),
            _ => Some(format!("{} speaks drafts {first} to {last}", program.name())),
        }
    }

    /// Why a player of these cannot play what a publisher has, if it cannot.
    pub fn cannot_play(self, publisher: Self) -> Option<String> {
        publisher.hindrance().or_else(|| self.hindrance()).or_else(|| {
            let (written, read) = (publisher.program.writes(), self.program.reads());
            if read.iter().any(|format| written.contains(format)) {
                return None;
            }
            let (publisher, player) = (publisher.program.name(), self.program.name());
            let (written, read) = (Format::list(written), Format::list(read));
            Some(format!("{publisher} describes its tracks in {written} words, {player} reads {read}"))
        })
    }

    fn url(self, stage: &Stage<'_>) -> anyhow::Result<String> {
        Ok(format!("{}://{}", self.way.transport.scheme(), stage.site.route()?.relay))
    }

    /// Begins to publish; what is written to the other end of the pipe, if it does not film for itself.
    pub fn publish(self, stage: &Stage<'_>) -> anyhow::Result<(Process, ChildStdin)> {
        let node = stage.site.node("pub")?;
        let mut command = node.command(self.program.find(stage.browser)?);
        match self.program {
            Program::Chromium => self.drive(&mut command, stage, true)?,
            Program::MoqCli => {
                self.moq_cli(&mut command, stage)?;
                command.args(["import", "fmp4"]);
            }
            _ => self.simple(&mut command, stage, "publish")?,
        }
        Process::start_fed("publisher", command, stage.site.directory())
    }

    /// Begins to play what the publisher has, to its standard output.
    pub fn play(self, stage: &Stage<'_>, publisher: Self) -> anyhow::Result<Process> {
        let mut command = stage.site.subscribers()?.command(self.program.find(stage.browser)?);
        match self.program {
            Program::Chromium => self.drive(&mut command, stage, false)?,
            Program::MoqCli => {
                let written = publisher.program.writes();
                let format = self.program.reads().iter().find(|format| written.contains(format));
                let format = format.map_or("hang", |format| match format {
                    Format::Msf => "msf",
                    _ => "hang",
                });
                self.moq_cli(&mut command, stage)?;
                let late = format!("{BUFFER_MS}ms");
                command.args(["export", "--catalog-format", format, "fmp4", "--max-age", &late]);
            }
            _ => self.simple(&mut command, stage, "subscribe")?,
        }
        Process::start("player", command, stage.site.directory())
    }

    /// Ours and Cloudflare's, which are told the same.
    fn simple(self, command: &mut Command, stage: &Stage<'_>, ours: &str) -> anyhow::Result<()> {
        if self.program == Program::Millrace {
            command.args([ours, "--draft", &self.way.draft.to_string()]);
        }
        command.args(["--name", NAME, "--tls-disable-verify", &self.url(stage)?]);
        Ok(())
    }

    fn moq_cli(self, command: &mut Command, stage: &Stage<'_>) -> anyhow::Result<()> {
        let version = format!("moq-transport-{}", self.way.draft);
        command.args(["--connect", &self.url(stage)?, "--connect-tls-insecure"]);
        command.args(["--connect-version", &version, "--broadcast", NAME]);
        Ok(())
    }

    fn drive(self, command: &mut Command, stage: &Stage<'_>, publishes: bool) -> anyhow::Result<()> {
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
        // What a browser leaves behind goes with the site.
        command.env("TMPDIR", directory);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(program: Program, transport: Transport, draft: u8) -> End {
        End { program, way: Way { transport, draft } }
    }

    #[test]
    fn what_cannot_meet_says_why() {
        use Program::{Chromium, Millrace, MoqCli, MoqPub, MoqSub};
        use Transport::{Raw, Webtransport};
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
                Some("moq-pub describes its tracks in moq-pub's words, moq-cli reads hang or MSF"),
            ),
        ];
        for (publisher, player, why) in table {
            assert_eq!(player.cannot_play(publisher).as_deref(), why, "{publisher:?} {player:?}");
        }
    }
}
