//! `millrace relay`: flags and configuration file.

use std::path::{Path, PathBuf};

use anyhow::Context;
use millrace_daemon::{log, pem, render::print};
use millrace_relay::access::keys;
use millrace_relay_daemon::{
    config::{Config, Errors, File, Settings},
    lasting,
    serve::serve,
    server::Identity,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::status;

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
    /// TOML file with the same names as the flags; flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the settings, certificate and key included, and exit
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    settings: Settings,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Have a running relay of this machine read its settings and certificates again, as SIGHUP does
    Reload(status::Asked),
}

pub fn run(args: Args) -> anyhow::Result<()> {
    if let Some(Verb::Reload(asked)) = &args.verb {
        return reload(asked);
    }
    let config = load(args.settings.clone(), args.config.as_deref())?;
    let identity = Identity::read(&config)?;
    if args.check {
        let complaints = pem::complaints(&identity.certificate).into_iter();
        let complaints = complaints.map(|it| format!("{}: {it}", config.identity));
        let warnings = complaints.chain(config.access.shared_trust());
        let warnings: String = warnings.map(|it| format!("warning: {it}\n")).collect();
        let keys = match config.access.keys.is_empty() {
            true => String::new(),
            false => format!("keys of tokens: {}\n", keys::describe(&identity.policy.tokens.keys)),
        };
        return print(&format!("{warnings}{keys}the settings are usable\n"));
    }
    let logs = log::start(&config.log).context("log")?;
    let identity = Identity { lasting: lasting::read_or_make(&config)?, ..identity };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let again = move || load(args.settings.clone(), args.config.as_deref());
    runtime.block_on(serve(config, identity, &logs, again))
}

/// Everything that is wrong with the settings, a line each.
pub fn problems(args: Args) -> Vec<String> {
    let Some(error) = load(args.settings, args.config.as_deref()).err() else { return Vec::new() };
    match error.downcast::<Errors>() {
        Ok(Errors(problems)) => problems.iter().map(ToString::to_string).collect(),
        Err(error) => vec![format!("{error:#}")],
    }
}

fn reload(asked: &status::Asked) -> anyhow::Result<()> {
    let status = asked.ask()?;
    let pid = i32::try_from(status.pid)
        .ok()
        .filter(|pid| *pid > 0)
        .context("the relay does not say which process it is")?;
    kill(Pid::from_raw(pid), Signal::SIGHUP).with_context(|| format!("process {pid} cannot be told"))?;
    print(&format!("process {pid} reads its settings again; its log says what came of it\n"))
}

fn load(flags: Settings, path: Option<&Path>) -> anyhow::Result<Config> {
    let Some(path) = path else { return Ok(Config::new(flags, None)?) };
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let name = path.to_string_lossy();
    Ok(Config::new(flags, Some(File { name: &name, text: &text }))?)
}
