//! `millrace graft sessions`: shows and changes sessions of datagrams in a running daemon.

use std::{fmt::Write as _, path::PathBuf};

use anyhow::Context as _;
use clap::Subcommand;
use millrace_daemon::{
    expect_answer,
    render::{
        Fit::{Name, Text, Whole},
        line, print, table, width,
    },
};
use millrace_graft::packet::{PeerStatus, SessionChange, Status};
use millrace_graft_daemon::control::{self, DEFAULT_SOCKET, GraftAnswer, GraftRequest};

#[derive(Debug, clap::Args)]
pub struct SessionsCommandArgs {
    #[command(subcommand)]
    verb: SessionsVerb,
}

#[derive(Debug, Subcommand)]
enum SessionsVerb {
    /// Show sessions of datagrams, counts of what happened to their packets, and the processing time of a packet
    Status {
        #[command(flatten)]
        socket: SessionsSocketArg,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Change both ends of a session to another graft, without losing a datagram
    Swap {
        /// Name of the session
        session: String,
        /// Name of the graft that the session changes to
        graft: String,
        /// Restart the session with new packet numbers and without the state of its packet functions, and report how
        /// many datagrams were lost
        #[arg(long)]
        stateless: bool,
        #[command(flatten)]
        socket: SessionsSocketArg,
    },
}

#[derive(Debug, clap::Args)]
struct SessionsSocketArg {
    /// Socket of the running daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
}

pub fn run(args: SessionsCommandArgs) -> anyhow::Result<()> {
    match args.verb {
        SessionsVerb::Status { socket, json } => {
            let status =
                expect_answer!(control::ask(&socket.socket, &GraftRequest::Status)?, GraftAnswer::Status)?;
            let part = status.parts.iter().find(|part| part.name == control::SESSIONS);
            let state = part.map_or("off", |part| part.state.as_str());
            let missing = || format!("the daemon reports no sessions: its part `sessions` is {state}");
            let status = status.sessions.with_context(missing)?;
            print(&if json { serde_json::to_string_pretty(&status)? + "\n" } else { text(&status, width()) })
        }
        SessionsVerb::Swap { session, graft, stateless, socket } => {
            let request =
                GraftRequest::SwapSession { session: session.clone(), graft: graft.clone(), stateless };
            let done = expect_answer!(control::ask(&socket.socket, &request)?, GraftAnswer::SessionSwapped)?;
            let ms = done.agreed_us as f64 / 1e3;
            print(&format!(
                "{session}: both ends use {graft}; agreed in {ms:.1} ms, changed here in {} us\n{}",
                done.cut_us,
                change(&session, &done.change)
            ))
        }
    }
}

/// Returns lines about a session's latest change of its graft: lost datagrams, migrated state, and the reason of the
/// rule that changed it. The text is empty if the session kept its state and no rule changed it.
fn change(session: &str, change: &SessionChange) -> String {
    let count = |lost: Option<u64>| lost.map_or("unknown".to_owned(), |lost| lost.to_string());
    if change.stateless {
        let [sent, received] = [change.lost_sent, change.lost_received].map(count);
        return format!(
            "{session}: restarted; lost datagrams: {sent} sent by this end, {received} sent by the peer\n"
        );
    }
    let mut out = String::new();
    if !change.migrated.is_empty() {
        let _ = writeln!(out, "{session}: continues with the state of {}", change.migrated.join(", "));
    }
    if let Some(why) = &change.why {
        let _ = writeln!(out, "{session}: changed by its rule, as {why}");
    }
    out
}

/// Formats a number of bytes in MiB.
pub fn memory(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Formats the status of all sessions as lines of at most `width` columns.
pub fn text(status: &Status, width: usize) -> String {
    let mut out = String::new();
    let interfaces: Vec<_> =
        status.interfaces.iter().map(|(name, mode)| format!("{name} ({mode})")).collect();
    line(&mut out, width, &format!("attached to {}", interfaces.join(", ")));
    let have = status.sessions.len();
    let most = status.sessions_max;
    line(
        &mut out,
        width,
        &format!("{have} of {most} sessions, {} in the kernel", memory(status.memory_bytes)),
    );
    for trouble in &status.trouble {
        line(&mut out, width, &format!("TROUBLE: {trouble}"));
    }
    let rows = status.sessions.iter().map(|session| {
        let means = session.mean_ns.iter().map(|(hook, ns)| format!("{hook} {ns}"));
        vec![
            session.name.clone(),
            session.graft.clone(),
            session.functions.join("+"),
            session.sealed.clone(),
            session.round_trip_us.map_or("-".to_owned(), |us| format!("{:.1}", us as f64 / 1e3)),
            means.collect::<Vec<_>>().join(", "),
            session.over_budget.to_string(),
        ]
    });
    let head = [
        ("SESSION", Name),
        ("GRAFT", Name),
        ("FUNCTIONS", Text),
        ("SEALED", Name),
        ("RTT ms", Whole),
        ("MEAN ns", Text),
        ("OVER BUDGET", Whole),
    ];
    table(&mut out, width, &head, rows);
    let mut paths = status.sessions.iter().flat_map(|session| {
        session.paths.iter().map(|path| {
            vec![
                session.name.clone(),
                path.interface.clone(),
                path.local.clone(),
                path.remote.clone(),
                if path.is_up { "yes" } else { "no" }.to_owned(),
                path.weight.to_string(),
                path.sent.to_string(),
                path.came.to_string(),
            ]
        })
    });
    if let Some(first) = paths.next() {
        let head = [
            ("SESSION", Name),
            ("PATH", Name),
            ("LOCAL", Name),
            ("REMOTE", Name),
            ("UP", Name),
            ("WEIGHT", Whole),
            ("SENT", Whole),
            ("RECEIVED", Whole),
        ];
        table(&mut out, width, &head, [first].into_iter().chain(paths));
    }
    if !status.peers.is_empty() {
        let head = [
            ("PEER", Name),
            ("ADDRESS", Name),
            ("THERE", Name),
            ("ROUND TRIP", Whole),
            ("LOSS", Whole),
            ("LENT", Whole),
        ];
        table(&mut out, width, &head, status.peers.iter().map(peer));
    }
    for session in &status.sessions {
        let mut packets = String::new();
        for (reason, count) in &session.packets {
            let _ = write!(packets, " {reason} {count},");
        }
        line(&mut out, width, &format!("{}:{}", session.name, packets.trim_end_matches(',')));
        if let Some(latest) = &session.changed {
            out += &change(&session.name, latest);
        }
    }
    out
}

/// Returns a peer's cells in the table of peers; unknown values are `-`.
fn peer(peer: &PeerStatus) -> Vec<String> {
    let unknown = || "-".to_owned();
    vec![
        peer.name.clone(),
        peer.remote.clone(),
        if peer.is_there { "yes" } else { "no" }.to_owned(),
        peer.round_trip_us.map_or_else(unknown, |us| format!("{:.1} ms", us as f64 / 1e3)),
        peer.loss_percent.map_or_else(unknown, |percent| format!("{percent:.1} %")),
        format!("{} of {}", peer.lent, peer.pooled_sockets),
    ]
}
