//! The viewer of `millrace-lab bench restarts` and `failover`. It plays a track of generated objects, and prints a line
//! for each object that the player outputs.

use std::collections::HashSet;
use std::io::{self, Write as _};
use std::pin::Pin;
use std::task::{Context, Poll};

use anyhow::{Context as _, bail};
use millrace_client::payload;
use millrace_client::session::{Remote, parse_url};
use millrace_client::subscribe::{SubscribeOptions, play};
use millrace_client::tls::CertificateTrust;
use millrace_moq::Namespace;
use tokio::io::AsyncWrite;

pub const NAMESPACE: &str = "bench";
pub const TRACK: &str = "objects";

#[derive(Debug, clap::Args)]
pub struct ViewerArgs {
    url: String,
    /// Connect again when the session ends
    #[arg(long, num_args = 0..=1, default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    reconnect: bool,
}

/// An object that the player has output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ShownObject {
    /// Time of arrival by the clock of `payload::now`, ns.
    pub arrived_ns: u64,
    pub sent_ns: u64,
    pub sequence: u64,
}

pub fn run(args: &ViewerArgs) -> anyhow::Result<()> {
    let remote = Remote::new(parse_url(&args.url)?, CertificateTrust::Anyone);
    let options = SubscribeOptions {
        track: Some(TRACK.to_owned()),
        reconnect: args.reconnect,
        ..SubscribeOptions::new(remote, Namespace::from_path(NAMESPACE)?)
    };
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        // The publisher may start later than the viewer, so the viewer tries again.
        loop {
            match play(&options, PayloadLines, std::future::pending()).await {
                Err(error) if error.may_pass() && options.reconnect => continue,
                Err(error) if error.to_string().contains("nobody publishes") => {
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
                Err(error) => return Err(error.into()),
                Ok(()) => bail!("the track ended"),
            }
        }
    })
}

/// Output of the player. It checks each payload and prints a line for it.
struct PayloadLines;

impl AsyncWrite for PayloadLines {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let stamp = payload::check(bytes).map_err(|_| io::Error::other("an object is damaged"))?;
        let arrived = payload::now().as_nanos();
        let sent = stamp.sent.as_nanos();
        let mut out = io::stdout().lock();
        writeln!(out, "{arrived} {sent} {}", stamp.sequence)?;
        out.flush()?;
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Parses the lines that a viewer has written so far. An incomplete last line is left out.
pub fn parse(output: &[u8]) -> anyhow::Result<Vec<ShownObject>> {
    let text = std::str::from_utf8(output)?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let line = |line: &str| {
        let mut numbers = line.split(' ').map(str::parse::<u64>);
        let mut next = || numbers.next().context("too few numbers")?.context("no number");
        Ok(ShownObject { arrived_ns: next()?, sent_ns: next()?, sequence: next()? })
    };
    whole.lines().map(line).collect()
}

/// Counts objects that arrived more than once. Two objects count as the same if their numbers and times of sending are
/// equal.
pub fn duplicates(seen: &[ShownObject]) -> usize {
    let distinct: HashSet<_> = seen.iter().map(|one| (one.sent_ns, one.sequence)).collect();
    seen.len() - distinct.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_last_line_of_viewer_output_is_not_parsed_yet() {
        let seen = parse(b"10 5 0\n20 15 1\n30 2").unwrap();
        assert_eq!(seen.len(), 2);
        assert_eq!(seen[1], ShownObject { arrived_ns: 20, sent_ns: 15, sequence: 1 });
        assert!(parse(b"").unwrap().is_empty() && parse(b"a b c\n").is_err());
    }

    #[test]
    fn same_sequence_number_of_another_publisher_is_no_duplicate() {
        let seen = parse(b"10 5 0\n20 15 0\n30 15 0\n").unwrap();
        assert_eq!(duplicates(&seen), 1);
    }
}
