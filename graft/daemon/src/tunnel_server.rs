//! Answers the reports of the worker process `tunnel`, in the worker process `grafts`. No report is trusted: see
//! [`tunnel_link`](super::tunnel_link).

use std::{io, os::unix::net::UnixStream, sync::Arc, thread, time::Duration};

use anyhow::Context as _;
use millrace_daemon::socket::converse;

use super::{
    daemon::GraftDaemon,
    tunnel_link::{BYTES_MAX, TunnelAnswer, TunnelReport},
};

/// Shortest time between two reports that are read.
const SPACING: Duration = Duration::from_millis(10);

/// Answers the reports of a connection, in the worker process `grafts`. When the latest connection has ended, all
/// tunnelled connections are forgotten.
pub fn serve(daemon: Arc<GraftDaemon>, stream: UnixStream) -> io::Result<()> {
    let number = daemon.begin_reports();
    let serve = move || {
        converse(&stream, BYTES_MAX, |line| {
            thread::sleep(SPACING);
            let report: TunnelReport =
                serde_json::from_slice(line).context("not a report of the part tunnel")?;
            report.check()?;
            Ok(Some(TunnelAnswer { lessons: daemon.note_report(report) }))
        });
        daemon.end_reports(number);
    };
    thread::Builder::new().name("tunnel".into()).spawn(serve).map(drop)
}
