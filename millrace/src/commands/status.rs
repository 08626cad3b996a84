//! `millrace status`: asks a running relay for its status, and prints it as tables or JSON.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, bail};
use millrace_daemon::address;
use millrace_daemon::http::fetch;
use millrace_daemon::{
    http::token::{HttpToken, TokenFile},
    render::{print, width},
};
use millrace_relay_daemon::{status::Status, text};

use super::screen;

#[derive(Debug, clap::Args)]
pub struct StatusArgs {
    #[command(flatten)]
    asked: AskedRelay,
    /// Print the status as JSON
    #[arg(long)]
    json: bool,
    /// Show the status again every second, until q is pressed
    #[arg(long)]
    watch: bool,
}

/// The relay to ask.
#[derive(Debug, clap::Args)]
pub struct AskedRelay {
    /// Address of the relay's HTTP server
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:9184", value_parser = address::ask)]
    http: SocketAddr,
    /// File with the token of the relay's HTTP server [default: the file that a relay of this user creates]
    #[arg(long, value_name = "FILE")]
    http_token_file: Option<TokenFile>,
}

impl AskedRelay {
    /// Asks the relay for its status.
    pub fn ask(&self) -> anyhow::Result<Status> {
        let token = self.http_token_file.clone().unwrap_or_default().read()?;
        ask(self.http, token.as_ref())
    }

    /// Fetches the page `path` of the relay's HTTP server. Returns the status code and the body.
    pub fn fetch(&self, path: &str) -> anyhow::Result<(u16, String)> {
        let token = self.http_token_file.clone().unwrap_or_default().read()?;
        fetch(self.http, path, token.as_ref().map(HttpToken::text))
            .with_context(|| format!("no relay answers on http://{}{path}", self.http))
    }
}

pub fn run(args: StatusArgs) -> anyhow::Result<()> {
    // The previous status, from which the rates of counters are computed.
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

/// Asks the relay at `addr` for its status.
pub fn ask(addr: SocketAddr, token: Option<&HttpToken>) -> anyhow::Result<Status> {
    let (code, body) = fetch(addr, "/status", token.map(HttpToken::text)).with_context(|| {
        format!("no relay answers on http://{addr}/status; is one running, with this --http?")
    })?;
    if code != 200 {
        bail!("http://{addr}/status answered {code}: {}", body.trim_end());
    }
    serde_json::from_str(&body).with_context(|| format!("http://{addr}/status is not a relay's status"))
}
