//! `millrace graft packets`.

use std::{fmt::Write as _, path::PathBuf};

use clap::Subcommand;
use millrace_daemon::{
    expect_answer,
    render::{
        Fit::{Name, Text, Whole},
        line, print, table, width,
    },
};
use millrace_graft::{
    message::DEFAULT_SOCKET as DEFAULT_MESSAGES_SOCKET,
    packet::{Change, PeerStatus, Settings, Status},
};
use millrace_graft_daemon::{
    broker::keeper,
    packets::{self, Answer, DEFAULT_SOCKET, Request, Setup},
};

use super::daemon;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Hold sessions and their grafts in the kernel, as a settings file says
    Run(Run),
    /// Holds what a daemon has lent, and ends it when the daemon is gone. Started by the daemon
    #[command(hide = true)]
    Keep,
    /// Show sessions, what became of their packets, and how long these took
    Status {
        #[command(flatten)]
        socket: SocketArg,
        #[arg(long)]
        json: bool,
    },
    /// Have both ends of a session change to another graft, without a loss
    Swap {
        session: String,
        graft: String,
        /// The session begins anew: numbers and what functions know. Says how many datagrams were lost
        #[arg(long)]
        stateless: bool,
        #[command(flatten)]
        socket: SocketArg,
    },
    /// Have the settings read again
    Reload {
        #[command(flatten)]
        socket: SocketArg,
    },
}

#[derive(Debug, clap::Args)]
#[command(
    mut_arg("socket", |arg| arg.default_value(DEFAULT_SOCKET)),
    mut_arg("http", |arg| arg.default_value("127.0.0.1:9188"))
)]
struct Run {
    /// TOML file with interfaces, grafts and sessions
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Check the settings and exit
    #[arg(long)]
    check: bool,
    /// Socket where applications ask for sessions with the peers of the settings; all users may, the settings say who gets any
    #[arg(long, value_name = "PATH", default_value = DEFAULT_MESSAGES_SOCKET)]
    messages_socket: PathBuf,
    #[command(flatten)]
    daemon: daemon::Flags,
}

#[derive(Debug, clap::Args)]
struct SocketArg {
    /// Socket of the running daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    match args.verb {
        Verb::Run(args) => run_daemon(args),
        Verb::Keep => keeper::run(),
        Verb::Status { socket, json } => {
            let status = expect_answer!(packets::ask(&socket.socket, &Request::Status)?, Answer::Status)?;
            print(&if json { serde_json::to_string_pretty(&status)? + "\n" } else { text(&status, width()) })
        }
        Verb::Swap { session, graft, stateless, socket } => {
            let request = Request::Swap { session: session.clone(), graft: graft.clone(), stateless };
            let done = expect_answer!(packets::ask(&socket.socket, &request)?, Answer::Swapped)?;
            let ms = done.agreed_us as f64 / 1e3;
            print(&format!(
                "{session}: both ends use {graft}; agreed in {ms:.1} ms, changed here in {} us\n{}",
                done.cut_us,
                change(&session, &done.change)
            ))
        }
        Verb::Reload { socket } => {
            packets::ask(&socket.socket, &Request::Reload)?;
            print("the settings were read again\n")
        }
    }
}

/// How a session came to its graft, as a line; empty where there is nothing to say.
fn change(session: &str, change: &Change) -> String {
    let count = |lost: Option<u64>| lost.map_or("unknown".to_owned(), |lost| lost.to_string());
    if change.stateless {
        let [sent, received] = [change.lost_sent, change.lost_received].map(count);
        return format!(
            "{session}: begun anew; lost of what was sent {sent}, of what was to come {received}\n"
        );
    }
    let mut out = String::new();
    if !change.migrated.is_empty() {
        let _ = writeln!(out, "{session}: goes on with the state of {}", change.migrated.join(", "));
    }
    if let Some(why) = &change.why {
        let _ = writeln!(out, "{session}: by its rule, as {why}");
    }
    out
}

fn run_daemon(args: Run) -> anyhow::Result<()> {
    if args.check {
        let settings = Settings::read(&args.config)?;
        let (room, memory) = (settings.room, memory(settings.memory()?));
        return print(&format!(
            "the settings are usable: {memory} in the kernel, for {} sessions, of which {} may keep packets\n",
            room.sessions, room.keepers
        ));
    }
    let front = args.daemon.front();
    args.daemon.run(packets::run(Setup { config: args.config, messages: args.messages_socket, front }))
}

fn memory(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// No wider than that.
fn text(status: &Status, width: usize) -> String {
    let mut out = String::new();
    let interfaces: Vec<_> =
        status.interfaces.iter().map(|(name, mode)| format!("{name} ({mode})")).collect();
    line(&mut out, width, &format!("attached to {}", interfaces.join(", ")));
    let (have, most) = (status.sessions.len(), status.sessions_max);
    line(
        &mut out,
        width,
        &format!("{have} of {most} sessions, {} in the kernel", memory(status.memory_bytes)),
    );
    for trouble in &status.trouble {
        line(&mut out, width, &format!("TROUBLE: {trouble}"));
    }
    let rows = status.sessions.iter().map(|session| {
        let means = session.mean_ns.iter().map(|(joint, ns)| format!("{joint} {ns}"));
        vec![
            session.name.clone(),
            session.graft.clone(),
            session.functions.join("+"),
            session.protocol.clone(),
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
        ("PROTOCOL", Name),
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

/// Not known: `-`.
fn peer(peer: &PeerStatus) -> Vec<String> {
    let unknown = || "-".to_owned();
    vec![
        peer.name.clone(),
        peer.remote.clone(),
        if peer.is_there { "yes" } else { "no" }.to_owned(),
        peer.round_trip_us.map_or_else(unknown, |us| format!("{:.1} ms", us as f64 / 1e3)),
        peer.loss_percent.map_or_else(unknown, |percent| format!("{percent:.1} %")),
        format!("{} of {}", peer.lent, peer.seats),
    ]
}
