//! `millrace-lab lab receivers`: runs many subscribers in one process.

use std::{
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use millrace_client::session::{parse_url, path_of};
use millrace_daemon::{address, duration};
use millrace_moq::{Namespace, TrackName};
use millrace_relay::status::Status;
use tokio::signal::unix::{SignalKind, signal};
use url::Url;

use super::{
    ReceiverControl, ReceiverRun, Settings,
    moves::WaveSettings,
    report::{KernelShare, ReceiversReport},
};

use crate::{hostile::watch::Http, stats::Percentiles};

#[derive(Debug, clap::Args)]
pub struct ReceiversArgs {
    /// The relay: moqt://HOST[:PORT]; its certificate is not verified
    url: String,
    /// Namespace of the track
    #[arg(long, value_name = "NAMESPACE", required_unless_present = "idle")]
    name: Option<String>,
    /// Name of the track
    #[arg(long, default_value = "objects", value_name = "TRACK")]
    track: String,
    /// Stay connected without subscribing to a track
    #[arg(long, conflicts_with_all = ["name", "track", "move_every"])]
    idle: bool,
    /// Number of subscribers
    #[arg(long, default_value_t = 100, value_name = "N")]
    sessions: usize,
    /// Number of sockets that the subscribers share, each with its own port
    #[arg(long, default_value_t = 16, value_name = "N")]
    sockets: usize,
    /// Addresses of this host that the sockets use in turn
    #[arg(long, value_delimiter = ',', value_name = "ADDR")]
    from: Vec<IpAddr>,
    /// Number of streams that the relay may have open on each session
    #[arg(long, default_value_t = 128, value_name = "N")]
    streams: u32,
    /// Time after which the subscribers leave; by default they stay until the end of the track
    #[arg(long, value_parser = duration::parse, value_name = "TIME")]
    duration: Option<Duration>,
    /// Interval at which sessions move to another local address, starting when all subscribers are connected
    #[arg(long, value_parser = duration::parse, value_name = "TIME")]
    move_every: Option<Duration>,
    /// Share of the sessions that move to another local address in each interval, percent
    #[arg(long, default_value_t = 100.0, value_name = "PERCENT", requires = "move_every")]
    move_share: f64,
    /// Time between the first and the last session's move in an interval; 0 moves all at once
    #[arg(long, default_value = "1s", value_parser = duration::parse, value_name = "TIME", requires = "move_every")]
    move_within: Duration,
    /// Address of the relay's /status, to also report how much of the media its kernel programs sent
    #[arg(long, value_name = "ADDR:PORT", value_parser = address::ask)]
    status: Option<SocketAddr>,
    /// File with the relay's token [default: that of this user's relay; none if it does not exist]
    #[arg(long, value_name = "FILE")]
    http_token_file: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the subscribers and prints a report.
///
/// # Errors
///
/// Fails if the settings are invalid, if no socket can be opened, or if no session received an object.
pub fn run(args: &ReceiversArgs) -> Result<()> {
    let settings = args.settings()?;
    let http = Http::from_address(args.status, args.http_token_file.as_deref())?;
    let before = http.as_ref().map(Http::status).transpose()?;
    let control = Arc::new(ReceiverControl::default());
    stop_on_signal(Arc::clone(&control))?;
    let mut report = ReceiverRun::new(settings, control)?.run()?;
    if let (Some(http), Some(before)) = (&http, &before) {
        report.kernel = Some(kernel_since(before, &http.status()?));
    }
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => show(&report),
    }
    match args.idle {
        true => ensure!(report.connected > 0, "no session was connected: {}", first_reason(&report)),
        false => ensure!(report.served > 0, "no session received an object: {}", first_reason(&report)),
    }
    Ok(())
}

impl ReceiversArgs {
    fn settings(&self) -> Result<Settings> {
        let url = parse_url(&self.url)?;
        ensure!(url.scheme() == "moqt", "{url}: receivers support only raw QUIC, moqt://");
        ensure!(self.sessions > 0, "--sessions must be at least 1");
        ensure!((0.0..=100.0).contains(&self.move_share), "--move-share must be 0 to 100");
        ensure!(self.move_every.is_none() || self.sockets > 1, "--sockets must be at least 2 for moves");
        ensure!(self.move_every != Some(Duration::ZERO), "--move-every must be more than 0");
        let wave = WaveSettings { share: self.move_share / 100.0, within: self.move_within };
        Ok(Settings {
            relay: resolve(&url)?,
            host: host_of(&url),
            path: path_of(&url).to_owned(),
            track: self.track()?,
            subscribes_at_once: true,
            sessions: self.sessions,
            sockets: self.sockets,
            from: self.from.clone(),
            streams: self.streams,
            duration: self.duration,
            moves: self.move_every.map(|every| (every, wave)),
        })
    }

    fn track(&self) -> Result<Option<TrackName>> {
        let Some(name) = &self.name else { return Ok(None) };
        Ok(Some(TrackName::new(Namespace::from_path(name)?, self.track.clone())?))
    }
}

fn host_of(url: &Url) -> String {
    url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned()
}

fn resolve(url: &Url) -> Result<SocketAddr> {
    let host = host_of(url);
    let port = url.port().unwrap_or(443);
    match (host.as_str(), port).to_socket_addrs()?.next() {
        Some(addr) => Ok(addr),
        None => bail!("{host} has no address"),
    }
}

/// Ends the sessions on SIGINT and SIGTERM, so that the report is still printed.
fn stop_on_signal(control: Arc<ReceiverControl>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let [mut int, mut term] = {
        let _inside = runtime.enter();
        [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?]
    };
    let watch = move || {
        runtime.block_on(async {
            tokio::select! {
                _ = int.recv() => {}
                _ = term.recv() => {}
            }
        });
        control.stop();
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch).context("cannot watch signals")?;
    Ok(())
}

fn kernel_since(before: &Status, after: &Status) -> KernelShare {
    let sent = |of: fn(&Status) -> u64| of(after).saturating_sub(of(before)) as f64;
    let kernel = sent(|status| status.totals.kernel.packets);
    let user = sent(|status| status.totals.data_plane.packets);
    let ready = after.sessions.iter().filter(|session| session.kernel_ready == Some(true)).count();
    KernelShare { sent_percent: 100.0 * kernel / (kernel + user).max(1.0), ready: ready as u64 }
}

fn first_reason(report: &ReceiversReport) -> &str {
    report.ended_early.keys().next().map_or("the track had no objects", String::as_str)
}

fn show(report: &ReceiversReport) {
    let ReceiversReport { sessions, connected, subscribed, served, .. } = report;
    println!("{sessions} sessions: {connected} connected, {subscribed} subscribed, {served} served");
    for (reason, count) in &report.ended_early {
        println!("  {count} ended early: {reason}");
    }
    let ReceiversReport { objects, duplicates, missing, late, streams_cut, .. } = report;
    println!(
        "{objects} objects: {missing} missing, {duplicates} duplicates, {late} late; {streams_cut} streams cut short"
    );
    let times = [
        ("first object", report.first_object_ms),
        ("from the publisher", report.latency_ms),
        ("media again after a move", report.resumed_ms),
    ];
    for (what, times) in times {
        if let Some(Percentiles { p50, p90, p99, max }) = times {
            println!("{what}: p50 {p50:.1} ms, p90 {p90:.1}, p99 {p99:.1}, max {max:.1}");
        }
    }
    if !report.moves.is_empty() {
        let ReceiversReport { moves, not_resumed, packets_too_late, .. } = report;
        println!(
            "{} moves: no object after {not_resumed}; {packets_too_late} packets to addresses that sessions had left",
            moves.iter().map(|moved| moved.sessions).sum::<u64>()
        );
    }
    println!("{} bytes of memory for each session", report.bytes_per_session);
    if let Some(KernelShare { sent_percent, ready }) = report.kernel {
        println!(
            "kernel: sent {sent_percent:.1} % of the relay's media packets, could send to {ready} sessions"
        );
    }
}
