//! `millrace graft hook`: runs a command in a cgroup of its own, whose TCP connections the daemon tunnels.

use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};
use millrace_daemon::cgroup::own_cgroup;
use millrace_graft::SideSetting;
use millrace_graft_daemon::control::{self, GraftRequest};
use millrace_kernel::prefix::Prefix;

#[derive(Debug, clap::Args)]
pub struct HookArgs {
    /// Port or range such as 8000-8100 that the command connects to, or that it serves with --serve; repeatable
    #[arg(long, value_delimiter = ',', value_name = "PORT", required = true, value_parser = ports)]
    port: Vec<(u16, u16)>,
    /// Let tunnelled connections reach COMMAND, a server, which sees the clients' own addresses
    #[arg(long)]
    serve: bool,
    /// Let connections of COMMAND succeed only after the server has accepted them through the tunnel
    #[arg(long, conflicts_with = "serve")]
    strict: bool,
    /// Tunnel only connections with peers in this prefix, such as 203.0.113.0/24, repeatable
    #[arg(long, value_delimiter = ',', value_name = "PREFIX")]
    peer: Vec<Prefix>,
    /// Socket of the running daemon, whose settings must have a section [carry]
    #[arg(long, value_name = "PATH", default_value = control::DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Command to run, with its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

fn ports(text: &str) -> Result<(u16, u16), String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if 0 < first && first <= last => Ok((first, last)),
        _ => Err("must be 1 to 65535, or a range such as 8000-8100".to_owned()),
    }
}

/// Replaces this process with the command, inside the new cgroup. The daemon removes the cgroup when it has no process
/// any more.
pub fn run(args: HookArgs) -> anyhow::Result<()> {
    let Some((program, arguments)) = args.command.split_first() else { bail!("name a command to run") };
    let before = own_cgroup().context("no cgroup of version 2 is mounted here")?;
    let cgroup = before.join(format!("millrace-hook-{}", std::process::id()));
    fs::create_dir(&cgroup).with_context(|| format!("cannot make cgroup {}", cgroup.display()))?;
    let hooked = enter(&cgroup)
        .with_context(|| format!("cannot enter cgroup {}", cgroup.display()))
        .and_then(|()| ask(&args, &cgroup));
    let error = match hooked {
        Ok(()) => anyhow::Error::from(Command::new(program).args(arguments).exec()).context(program.clone()),
        Err(error) => error,
    };
    // The command was not started. The cgroup can only be removed after this process has left it.
    let _ = enter(&before);
    let _ = fs::remove_dir(&cgroup);
    Err(error)
}

/// Asks the daemon to tunnel the connections of the cgroup's processes.
fn ask(args: &HookArgs, cgroup: &Path) -> anyhow::Result<()> {
    let everybody = vec![millrace_graft_kernel::everybody()];
    let peers = if args.peer.is_empty() { &everybody } else { &args.peer };
    let request = GraftRequest::Hook {
        cgroup: cgroup.to_owned(),
        side: if args.serve { SideSetting::Server } else { SideSetting::Client },
        ports: args.port.clone(),
        peers: peers.iter().map(ToString::to_string).collect(),
        strict: args.strict,
    };
    control::ask(&args.socket, &request).map(drop)
}

/// Moves this process into the cgroup.
fn enter(cgroup: &Path) -> std::io::Result<()> {
    fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string())
}

#[cfg(test)]
mod tests {
    use super::ports;

    #[test]
    fn hook_port_is_parsed_as_one_port_or_a_range() {
        assert_eq!(ports("443"), Ok((443, 443)));
        assert_eq!(ports("8000-8100"), Ok((8000, 8100)));
        for wrong in ["", "0", "9-8", "0-1", "1-65536", "a"] {
            assert!(ports(wrong).is_err(), "{wrong}");
        }
    }
}
