//! `millrace relay`: reads flags and configuration file, and runs the relay or checks its settings.

use std::path::{Path, PathBuf};

use anyhow::Context;
use millrace_daemon::{log, pem, render::print};
use millrace_relay::access::keys;
use millrace_relay_daemon::{
    config::{Config, ConfigErrors, ConfigFile, Settings},
    lasting,
    serve::serve,
    server::RelayIdentity,
    text::lately,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::status;

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
}

pub fn run(args: RelayCommandArgs) -> anyhow::Result<()> {
    if let Some(RelayVerb::Reload(asked)) = &args.verb {
        return reload(asked);
    }
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
    let identity = RelayIdentity { lasting: lasting::read_or_make(&config)?, ..identity };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let again = move || load(args.settings.clone(), args.config.as_deref());
    runtime.block_on(serve(config, identity, &logs, again))
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

fn reload(asked: &status::AskedRelay) -> anyhow::Result<()> {
    let status = asked.ask()?;
    let pid = i32::try_from(status.pid)
        .ok()
        .filter(|pid| *pid > 0)
        .context("the relay's status has no process ID")?;
    kill(Pid::from_raw(pid), Signal::SIGHUP)
        .with_context(|| format!("cannot send SIGHUP to process {pid}"))?;
    print(&format!("process {pid} reads its settings again; its log has the result\n"))
}

fn load(flags: Settings, path: Option<&Path>) -> anyhow::Result<Config> {
    let Some(path) = path else { return Ok(Config::new(flags, None)?) };
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let name = path.to_string_lossy();
    Ok(Config::new(flags, Some(ConfigFile { name: &name, text: &text }))?)
}
