//! Fills a path with datagrams by the packet function `congestion`, so that other traffic can be measured on it.

use std::time::Duration;

use anyhow::ensure;

use super::datagrams::{DatagramPace, DatagramRun, FunctionListSettings};
use crate::bench::site::BenchSite;

const FUNCTIONS: &[&str] = &["congestion", "window", "number", "repair", "acknowledge"];
/// Payload, bytes. With headers the frame is as long as TCP's packets.
const BYTES: usize = 1400;

/// Sends from the relay to the subscribers of the site, over IPv4.
///
/// # Errors
/// Fails also if a datagram was altered, or none arrived.
pub fn saturate(site: &BenchSite, rtt_ms: u32, sending: Duration) -> anyhow::Result<()> {
    let retry_us = u64::from(rtt_ms) * 1500 + 50_000;
    let parameters = format!(
        "[sessions.parameters.window]\npackets = 256\n[sessions.parameters.repair]\ntries = 0\nretry_us = {retry_us}\n"
    );
    let run = DatagramRun { pace: DatagramPace::Window, bytes: BYTES, sending, grace: Duration::ZERO };
    let outcome = run.measure(
        site,
        &FunctionListSettings { functions: FUNCTIONS, parameters, ..FunctionListSettings::default() },
    )?;
    ensure!(outcome.wrong == 0, "{} datagrams were not as they were sent, or came twice", outcome.wrong);
    ensure!(outcome.received > 0, "no datagram came");
    Ok(())
}
