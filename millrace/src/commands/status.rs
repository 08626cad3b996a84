//! `millrace status`: asks a running relay and shows the answer as tables.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, bail};
use millrace_daemon::address;
use millrace_daemon::http::fetch;
use millrace_daemon::{
    http::token::{Token, TokenFile},
    render::{print, width},
};
use millrace_relay_daemon::{status::Status, text};

use super::screen;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    asked: Asked,
    /// Print the status as JSON
    #[arg(long)]
    json: bool,
    /// Show it again every second, until q
    #[arg(long)]
    watch: bool,
}

/// The relay that is asked.
#[derive(Debug, clap::Args)]
pub struct Asked {
    /// Where the relay serves its status
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:9184", value_parser = address::ask)]
    http: SocketAddr,
    /// The file that holds the relay's token [default: as the relay of the same user]
    #[arg(long, value_name = "FILE")]
    http_token_file: Option<TokenFile>,
}

impl Asked {
    /// What it says about itself.
    pub fn ask(&self) -> anyhow::Result<Status> {
        let token = self.http_token_file.clone().unwrap_or_default().read()?;
        ask(self.http, token.as_ref())
    }
}

pub fn run(args: Args) -> anyhow::Result<()> {
    let mut before = None;
    let mut shown = |width| {
        let status = args.asked.ask()?;
        let text = if args.json {
            serde_json::to_string_pretty(&status)? + "\n"
        } else {
            text::render(&status, before.as_ref(), width)
        };
        before = Some(status);
        Ok(text)
    };
    match args.watch {
        true if args.json => loop {
            print(&shown(width())?)?;
            std::thread::sleep(Duration::from_secs(1));
        },
        true => screen::every_second(|room| shown(room.columns)),
        false => print(&shown(width())?),
    }
}

/// What the relay at `addr` says about itself.
pub fn ask(addr: SocketAddr, token: Option<&Token>) -> anyhow::Result<Status> {
    let (code, body) = fetch(addr, "/status", token.map(Token::text)).with_context(|| {
        format!("no relay answers on http://{addr}/status; is one running, with this --http?")
    })?;
    if code != 200 {
        bail!("http://{addr}/status answered {code}: {}", body.trim_end());
    }
    serde_json::from_str(&body).with_context(|| format!("http://{addr}/status is not a relay's status"))
}
