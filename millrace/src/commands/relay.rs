//! `millrace relay`: reads flags and configuration file, and runs the relay or checks its settings.

use std::{
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use millrace_daemon::{log, pem, render::print};
use millrace_relay::access::keys;
use millrace_relay_daemon::{
    config::{Config, ConfigErrors, ConfigFile, Settings},
    lasting,
    serve::serve,
    server::RelayIdentity,
    status::Status,
    takeover::RunningPredecessor,
    text::lately,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::status;
use crate::causes::chain;

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct RelayCommandArgs {
    #[command(subcommand)]
    verb: Option<RelayVerb>,
    /// TOML file whose keys are the names of the flags; flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the settings, including certificate and key, and exit
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    settings: Settings,
}

#[derive(Debug, clap::Subcommand)]
enum RelayVerb {
    /// Make a running relay of this machine read its settings and certificates again, like SIGHUP
    Reload(status::AskedRelay),
    /// Make a running relay of this machine start the installed program as its successor, like SIGUSR2
    ///
    /// The successor serves new clients. The running process goes on until its clients have left.
    Upgrade(status::AskedRelay),
}

/// Time between two looks at the relay's status during an upgrade.
const LOOK: Duration = Duration::from_millis(50);
/// The longest time that an upgrade may take.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(90);

pub fn run(args: RelayCommandArgs) -> anyhow::Result<()> {
    match &args.verb {
        Some(RelayVerb::Reload(asked)) => return reload(asked),
        Some(RelayVerb::Upgrade(asked)) => return upgrade(asked),
        None => {}
    }
    if args.check {
        return start(args, &mut None);
    }
    let mut predecessor = RunningPredecessor::take()?;
    start(args, &mut predecessor).inspect_err(|error| {
        predecessor.iter().for_each(|predecessor| predecessor.failed(chain(error)));
    })
}

fn start(args: RelayCommandArgs, predecessor: &mut Option<RunningPredecessor>) -> anyhow::Result<()> {
    let config = load(args.settings.clone(), args.config.as_deref())?;
    let identity = RelayIdentity::read(&config)?;
    if args.check {
        let complaints = pem::complaints(&identity.certificate).into_iter();
        let complaints = complaints.map(|it| format!("{}: {it}", config.identity));
        let warnings = complaints.chain(config.access.shared_trust());
        let warnings: String = warnings.map(|it| format!("warning: {it}\n")).collect();
        let keys = match config.access.keys.is_empty() {
            true => String::new(),
            false => format!("token keys: {}\n", keys::describe(&identity.policy.tokens.keys)),
        };
        return print(&format!("{warnings}{keys}{}the settings are usable\n", running(&config)));
    }
    // The log starts after the first reading of the settings, whose errors go to standard error.
    let logs = log::start(&config.log).context("log")?;
    let lasting = lasting::read_or_make(&config)?;
    let inherited = predecessor.as_ref().map(|it| (it.secret(), it.next_generation()));
    let (secret, generation) = inherited.unzip();
    let generation = generation.unwrap_or_default();
    let identity = RelayIdentity { lasting: lasting.or(secret), generation, ..identity };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let again = move || load(args.settings.clone(), args.config.as_deref());
    runtime.block_on(serve(config, identity, &logs, again, predecessor))
}

/// Returns a line for each interface with the share of packets that the kernel forwards, as a running relay reports it.
/// The text is empty if no relay answers at the address of `http`.
fn running(config: &Config) -> String {
    let file = config.http_access.http_token_file.clone().unwrap_or_default();
    let token = file.read().ok().flatten();
    let status = config.http.and_then(|addr| status::ask(addr, token.as_ref()).ok());
    let interfaces = status.map(|status| status.shares.interfaces).unwrap_or_default();
    interfaces
        .iter()
        .map(|(name, share)| format!("running, {name}, last 10 s: {}\n", lately(share)))
        .collect()
}

/// Returns all faults in the settings, one text each.
pub fn problems(args: RelayCommandArgs) -> Vec<String> {
    let Some(error) = load(args.settings, args.config.as_deref()).err() else { return Vec::new() };
    match error.downcast::<ConfigErrors>() {
        Ok(ConfigErrors(problems)) => problems.iter().map(ToString::to_string).collect(),
        Err(error) => vec![format!("{error:#}")],
    }
}

/// Sends a signal to the process of a relay's status, and returns its ID. The kernel lets only root and the relay's user
/// do so.
fn signal(status: &Status, signal: Signal) -> anyhow::Result<u32> {
    let pid = i32::try_from(status.pid)
        .ok()
        .filter(|pid| *pid > 0)
        .context("the relay's status has no process ID")?;
    kill(Pid::from_raw(pid), signal).with_context(|| format!("cannot send {signal} to process {pid}"))?;
    Ok(status.pid)
}

fn upgrade(asked: &status::AskedRelay) -> anyhow::Result<()> {
    let before = asked.ask()?;
    // The signal would end a process that does not know it.
    ensure!(before.upgrade.is_some(), "the running relay is of a version without upgrades: restart it");
    let pid = signal(&before, Signal::SIGUSR2)?;
    let began = Instant::now();
    let mut has_succeeded = false;
    while began.elapsed() < UPGRADE_TIMEOUT {
        sleep(LOOK);
        // While the successor takes the HTTP server over, nobody answers.
        let Ok(now) = asked.ask() else { continue };
        if now.pid != pid {
            let next = now.pid;
            return print(&format!(
                "process {next} serves new clients; process {pid} goes on until its clients have left\n"
            ));
        }
        let is_news = |upgrade: &_| Some(upgrade) != before.upgrade.as_ref();
        let Some(upgrade) = now.upgrade.filter(is_news) else { continue };
        if let Some(error) = upgrade.error {
            bail!("process {pid} goes on, since its successor cannot take over: {error}");
        }
        // A successor with another HTTP address leaves this one to the process that drains. One that takes this address
        // over may answer only the next request: the old process still answers those that it has accepted.
        if !std::mem::replace(&mut has_succeeded, true) {
            continue;
        }
        return print(&format!(
            "a process with another HTTP address serves new clients; process {pid} goes on until its clients have left\n"
        ));
    }
    bail!("no successor has taken over from process {pid} within {} s", UPGRADE_TIMEOUT.as_secs())
}

fn reload(asked: &status::AskedRelay) -> anyhow::Result<()> {
    let pid = signal(&asked.ask()?, Signal::SIGHUP)?;
    print(&format!("process {pid} reads its settings again; its log has the result\n"))
}

fn load(flags: Settings, path: Option<&Path>) -> anyhow::Result<Config> {
    let Some(path) = path else { return Ok(Config::new(flags, None)?) };
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let name = path.to_string_lossy();
    Ok(Config::new(flags, Some(ConfigFile { name: &name, text: &text }))?)
}
