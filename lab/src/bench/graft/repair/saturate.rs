//! Saturates a path with datagrams of a session with the packet function `congestion`, so that competing traffic can be
//! measured.

use std::time::Duration;

use anyhow::ensure;

use super::datagrams::{DatagramPace, DatagramRun, FunctionListSettings};
use crate::bench::site::BenchSite;

const FUNCTIONS: &[&str] = &["congestion", "window", "number", "repair", "acknowledge"];
/// Payload of a datagram, bytes. With headers, the frame is as long as a full TCP packet.
const BYTES: usize = 1400;

/// Sends over IPv4 from the relay's host to the subscribers' host of the lab network.
///
/// # Errors
///
/// Fails if a datagram was altered or duplicated, or if none arrived.
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
    ensure!(outcome.wrong == 0, "{} datagrams were altered or duplicated", outcome.wrong);
    ensure!(outcome.received > 0, "no datagram arrived");
    Ok(())
}
