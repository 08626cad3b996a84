//! `millrace relay`: flags, configuration file, start-up.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{error, info, warn};

use super::{
    config::{self, Config, File, Settings},
    http, log,
    server::{self, Server},
    status::StatusSource,
    tls,
};

const SECOND_SIGNAL: &str = "ended by a second signal while sessions were open";

/// How often the certificate files are looked at.
const CERTIFICATE_LOOKS: Duration = Duration::from_secs(2);

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
    let identity = identity(&config)?;
    if args.check {
        println!("the settings are usable");
        return Ok(());
    }
    let logs = log::start(&config.log).context("log")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let again = move || load(args.settings.clone(), args.config.as_deref());
    runtime.block_on(serve(config, identity, &logs, again))
}

/// Reads everything that the settings name.
fn identity(config: &Config) -> anyhow::Result<server::Identity> {
    let certificate = tls::identity(&config.identity, names(config)).context("certificate")?;
    let root = config.upstream.as_ref().and_then(|upstream| upstream.tls_root.as_ref());
    let upstream_roots =
        root.map(|root| tls::roots(root)).transpose().context("upstream-tls-root")?.map(Arc::new);
    let key_log = config.key_log_file.as_ref().map(|path| tls::KeyLogFile::open(path));
    let key_log = key_log.transpose().context("key-log-file")?;
    Ok(server::Identity {
        certificate,
        upstream_roots,
        key_log: key_log.map(|file| Arc::new(file) as Arc<dyn rustls::KeyLog>),
    })
}

async fn serve(
    config: Config,
    identity: server::Identity,
    logs: &log::Handle,
    again: impl Fn() -> anyhow::Result<Config>,
) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut reload = signal(SignalKind::hangup())?;
    let watch = tls::Watch::new(&config.identity);
    let http_addr = config.http;
    if config.identity == config::Identity::SelfSigned {
        info!(sha256 = tls::fingerprint(&identity.certificate), "self-signed certificate, for trying out");
    }
    if let Some(path) = &config.key_log_file {
        warn!(path = %path.display(), "TLS secrets are written to a file: all sessions can be decrypted");
    }
    if config.upstream.as_ref().is_some_and(|upstream| upstream.tls_root.is_none()) {
        warn!("the upstream relay's certificate is not verified");
    }
    let server = Arc::new(Server::start(config, identity)?);
    let _http = match http_addr {
        Some(addr) => {
            let source = Arc::clone(&server) as Arc<dyn StatusSource>;
            let http = http::start(addr, source, Arc::clone(server.tracer())).await?;
            info!(addr = %http.local_addr, "metrics, health and status");
            if !http.local_addr.ip().is_loopback() {
                warn!("http answers beyond this machine, to anyone");
            }
            Some(http)
        }
        None => None,
    };
    let (engine, reason) = server.engine();
    for addr in server.local_addrs() {
        info!(%addr, engine, reason, "serving");
    }
    let reloading = keep_up(&server, watch, &mut reload, || {
        logs.reopen();
        change(&server, again());
    });
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        never = reloading => match never {},
    }
    tokio::select! {
        () = server.drain() => info!("drained"),
        _ = terminate.recv() => bail!(SECOND_SIGNAL),
        _ = interrupt.recv() => bail!(SECOND_SIGNAL),
    }
    Ok(())
}

/// Shows new sessions the certificate that is in the files now, and does what SIGHUP asks for.
async fn keep_up(
    server: &Server,
    mut watch: Option<tls::Watch>,
    reload: &mut Signal,
    on_reload: impl Fn(),
) -> std::convert::Infallible {
    let mut looks = tokio::time::interval(CERTIFICATE_LOOKS);
    loop {
        let asked = tokio::select! {
            _ = looks.tick() => false,
            _ = reload.recv() => true,
        };
        if asked {
            tokio::task::block_in_place(&on_reload);
        }
        match watch.as_mut().and_then(|watch| watch.look(asked)) {
            Some(Ok(certificate)) => {
                info!(sha256 = tls::fingerprint(&certificate), "new certificate");
                server.set_certificate(&certificate);
            }
            Some(Err(error)) => error!(%error, "the new certificate is not usable, the old one stays"),
            None => {}
        }
    }
}

/// Runs with the engine, the gate and on the interfaces that the settings name now.
fn change(server: &Server, config: anyhow::Result<Config>) {
    if let Ok(config) = &config
        && let Err(error) = server.change_gate(config)
    {
        error!(%error, "the settings are not usable now, the gate stays as it is");
    }
    let changed = config.and_then(|config| Ok(server.change_engine(&config)?));
    let (engine, reason) = server.engine();
    match changed {
        Ok(()) => info!(engine, reason, "settings read again"),
        Err(error) => error!(
            error = format!("{error:#}"),
            engine, reason, "the settings are not usable now, the engine stays as it is"
        ),
    }
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
