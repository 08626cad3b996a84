//! `millrace relay`: flags, configuration file, start-up.

use std::path::{Path, PathBuf};

use anyhow::Context;

use super::{
    config::{Config, File, Settings},
    tls,
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
    let config = load(args.settings, args.config.as_deref())?;
    let _certificate = tls::identity(&config.identity, names(&config)).context("certificate")?;
    if let Some(root) = config.upstream.as_ref().and_then(|upstream| upstream.tls_root.as_ref()) {
        tls::roots(root).context("upstream-tls-root")?;
    }
    if args.check {
        println!("the settings are usable");
        return Ok(());
    }
    anyhow::bail!("not in this build yet")
}

fn load(flags: Settings, path: Option<&Path>) -> anyhow::Result<Config> {
    let Some(path) = path else { return Ok(Config::new(flags, None)?) };
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let name = path.to_string_lossy();
    Ok(Config::new(flags, Some(File { name: &name, text: &text }))?)
}

/// Names that a self-signed certificate is good for.
fn names(config: &Config) -> Vec<String> {
    let hostname = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let addresses = config.listen.iter().map(|addr| addr.ip()).filter(|ip| !ip.is_unspecified());
    let fixed = ["localhost", "127.0.0.1", "::1", hostname.trim()].map(str::to_owned);
    let mut names: Vec<_> = fixed.into_iter().chain(addresses.map(|ip| ip.to_string())).collect();
    names.retain(|name| !name.is_empty());
    names.sort_unstable();
    names.dedup();
    names
}
