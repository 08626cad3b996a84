//! Datagrams as many as the path carries, by the packet function `congestion`: for measurements of others beside them.

use std::time::Duration;

use anyhow::ensure;

use super::datagrams::{Graft, Pace, Run};
use crate::bench::site::Site;

const FUNCTIONS: &[&str] = &["congestion", "window", "number", "repair", "acknowledge"];
/// With headers and frame as long as TCP's packets.
const BYTES: usize = 1400;

/// From the relay to the subscribers of the site, over IPv4.
///
/// # Errors
/// Also where something came otherwise than it was sent, or nothing did.
pub fn saturate(site: &Site, rtt_ms: u32, sending: Duration) -> anyhow::Result<()> {
    let retry_us = u64::from(rtt_ms) * 1500 + 50_000;
    let parameters = format!(
        "[parameters.window]\npackets = 256\n[parameters.repair]\ntries = 0\nretry_us = {retry_us}\n"
    );
    let run = Run { pace: Pace::Window, bytes: BYTES, sending, grace: Duration::ZERO };
    let outcome = run.measure(site, &Graft { functions: FUNCTIONS, parameters, ..Graft::default() })?;
    ensure!(outcome.wrong == 0, "{} datagrams were not as they were sent, or came twice", outcome.wrong);
    ensure!(outcome.received > 0, "no datagram came");
    Ok(())
}
