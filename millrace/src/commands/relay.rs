//! `millrace relay`: flags and configuration file.

use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::{
    log,
    relay::{
        config::{Config, File, Settings},
        serve::serve,
        server::Identity,
        tls,
    },
    render::print,
};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// TOML file with the same names as the flags; flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the settings, certificate and key included, and exit
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    settings: Settings,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    let config = load(args.settings.clone(), args.config.as_deref())?;
    let identity = Identity::read(&config)?;
    if args.check {
        let complaints = tls::complaints(&identity.certificate).into_iter();
        let warnings: String = complaints.map(|it| format!("warning: the certificate: {it}\n")).collect();
        return print(&format!("{warnings}the settings are usable\n"));
    }
    let logs = log::start(&config.log).context("log")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let again = move || load(args.settings.clone(), args.config.as_deref());
    runtime.block_on(serve(config, identity, &logs, again))
}

fn load(flags: Settings, path: Option<&Path>) -> anyhow::Result<Config> {
    let Some(path) = path else { return Ok(Config::new(flags, None)?) };
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let name = path.to_string_lossy();
    Ok(Config::new(flags, Some(File { name: &name, text: &text }))?)
}
