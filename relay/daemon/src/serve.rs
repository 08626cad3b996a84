//! Runs the relay from start-up to its end: handles signals, changed certificates, and settings that are read again.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use millrace_daemon::{daemon::EndSignals, log, memory::MemoryTrimmer, notify, pem};
use millrace_relay::access::{AccessPolicy, keys};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{error, info, warn};

use super::{
    access,
    config::{self, Config},
    http,
    server::{self, RunningServer},
    status::StatusSource,
    takeover::{RunningPredecessor, Successor, ThisProgram},
    tls,
};

const PREDECESSOR: &str =
    "the process before this one still serves clients: upgrade again when it has ended, or end it";
const SECOND_SIGNAL: &str = "ended by a second signal while sessions were open";

/// Time between two checks whether files have changed: certificates, token keys, revocations.
const LOOKS: Duration = Duration::from_millis(500);
/// The least time for which the outcome of an upgrade can be asked for at the old HTTP address.
const OUTCOME: Duration = Duration::from_secs(2);

/// Serves until a signal arrives, then drains. `again` reads the settings again on SIGHUP.
///
/// # Errors
/// Fails if the relay cannot start, or if a second signal ends it before the drain is over.
pub async fn serve(
    mut config: Config,
    identity: server::RelayIdentity,
    logs: &log::Handle,
    again: impl Fn() -> anyhow::Result<Config>,
    predecessor: &mut Option<RunningPredecessor>,
) -> anyhow::Result<()> {
    let program = ThisProgram::read();
    // Signal handlers are installed first, so that a signal during start-up does not end the process without a drain.
    let mut ends = EndSignals::new()?;
    let mut reload = signal(SignalKind::hangup())?;
    let mut upgrade = signal(SignalKind::user_defined2())?;
    // The watches note the state of the files before the relay starts, so that a change during its start is noticed.
    let mut watch = tls::CertificateWatch::new(&config.identity, server::names(&config));
    let mut watched = access::AccessFileWatch::new(&config.access, &identity.policy);
    log_access(&identity.policy, &config.access);
    let made = config.identity.clone();
    if let config::IdentityConfig::SelfSigned { .. } = config.identity {
        info!(
            sha256 = tls::fingerprint(&identity.certificate),
            "the relay has a self-signed certificate, for trying out: clients accept it with --tls-fingerprint SHA256"
        );
    }
    for complaint in pem::complaints(&identity.certificate) {
        warn!("the certificate of the relay, {}: {complaint}", config.identity);
    }
    let certificate = Arc::clone(&identity.certificate);
    if let Some(path) = &config.key_log_file {
        warn!(path = %path.display(), "the relay writes TLS secrets to a file: whoever reads it can decrypt all sessions");
    }
    if config.upstream.as_ref().is_some_and(|upstream| upstream.tls_root.is_none()) {
        warn!("the upstream relay's certificate is not verified: anyone on the path can pose as that relay");
    }
    let settings = config.clone();
    let (server, mut http) = match predecessor {
        None => {
            let server = Arc::new(RunningServer::start(config, identity)?);
            let http = start_http(&server, &settings, None).await?;
            (server, http)
        }
        Some(predecessor) => {
            let inherited = predecessor.take_sockets(&config.listen)?;
            // Other relays see one relay, which moves from one session to another.
            if let Some(cluster) = &mut config.cluster {
                cluster.hop = cluster.hop.or(predecessor.hop());
            }
            let server = Arc::new(RunningServer::prepare(config, identity, inherited)?);
            // The sockets of the private link and of HTTP are made before the predecessor stops, too.
            predecessor.join(&server)?;
            let socket = predecessor.take_http(settings.http);
            let has_http = socket.is_some();
            let early = if has_http { None } else { start_http(&server, &settings, None).await? };
            tokio::task::block_in_place(|| predecessor.until_go(has_http))?;
            server.begin(&settings);
            let http = if has_http { start_http(&server, &settings, socket).await? } else { early };
            (server, http)
        }
    };
    // The certificate file is written only after everything else has started: a relay that fails to start must not
    // replace another relay's file.
    let mut written = tls::WrittenCertificate::default();
    written.write(&made, &certificate).context("tls-self-signed-out")?;
    server.warn_if_public();
    let (engine, reason) = server.engine();
    for addr in server.local_addrs() {
        info!(%addr, engine, reason, "serving MoQ sessions");
    }
    // systemd starts units that are ordered after the relay only now, when it serves sessions.
    notify::ready();
    loop {
        let reloading = keep_up(&server, &made, &mut written, &mut watch, &mut watched, &mut reload, || {
            logs.reopen();
            change(&server, again())
        });
        tokio::select! {
            _ = ends.next() => break,
            _ = upgrade.recv() => {}
            never = reloading => match never {},
        }
        notify::reloading();
        // A successor passes packets on to one process only.
        let started = match predecessor.as_ref().is_some_and(RunningPredecessor::is_alive) {
            true => Err(anyhow!("{PREDECESSOR}")),
            false => Successor::start(&program, &server, http.as_ref()).await,
        };
        let mut successor = match started {
            Ok(successor) => successor,
            failed => {
                server.upgrades.note(&failed);
                let error = failed.err().map(|error| format!("{error:#}"));
                error!(error, "no successor can take over, so this process goes on as before");
                notify::ready();
                continue;
            }
        };
        // What only one process can have is free before the successor begins.
        let socket = match successor.has_http() {
            true => http.take().and_then(|http| http.socket.try_clone().ok()),
            false => None,
        };
        written = tls::WrittenCertificate::default();
        let open = Config { gate: config::GateChoice::Off, ..settings.clone() };
        tokio::task::block_in_place(|| server.change_gate(&open))?;
        let begun = successor.begin(&server);
        server.upgrades.note(&begun);
        if begun.is_ok() {
            info!(
                pid = successor.pid(),
                "the successor has taken over: this process serves the sessions that it has until they leave"
            );
            notify::replaced(successor.pid());
            tokio::select! {
                () = server.drain() => {
                    // The command that has asked for the upgrade learns its outcome here if the successor has another
                    // HTTP address.
                    if http.is_some() {
                        tokio::time::sleep(OUTCOME).await;
                    }
                    return Ok(());
                }
                () = successor.ended() => {}
                _ = ends.next() => {
                    server.stop().await;
                    return Ok(());
                }
            }
        }
        error!("the successor has ended, so this process goes on in its place");
        server.resume(&settings);
        if socket.is_some() {
            http = start_http(&server, &settings, socket).await?;
        }
        written.write(&made, &certificate).context("tls-self-signed-out")?;
        notify::replaced(std::process::id());
    }
    notify::stopping();
    tokio::select! {
        // A second signal ends the drain early, unless it comes so soon that it counts as a copy of the first one.
        () = server.drain() => info!("the drain is over: all sessions are closed, the relay ends"),
        _ = ends.next_signal() => bail!(SECOND_SIGNAL),
    }
    Ok(())
}

/// Starts the HTTP server of the settings, if they have one, on a socket that was taken over or a new one.
async fn start_http(
    server: &Arc<RunningServer>,
    settings: &Config,
    socket: Option<OwnedFd>,
) -> anyhow::Result<Option<http::HttpServer>> {
    let Some(addr) = settings.http else { return Ok(None) };
    let source = Arc::clone(server) as Arc<dyn StatusSource>;
    let access = settings.http_access.access()?;
    let token = access.token().map(|token| token.path().display().to_string());
    let tracer = Arc::clone(server.tracer());
    let http = match socket {
        Some(socket) => http::take_over(socket, source, tracer, access)?,
        None => http::start(addr, source, tracer, access).await?,
    };
    info!(addr = %http.local_addr, token, "HTTP serves metrics, health and status");
    match (http.local_addr.ip().is_loopback(), &token) {
        (false, None) => warn!(
            "the HTTP server answers requests from other hosts without a token: set http-token-file, or listen on loopback"
        ),
        (false, Some(_)) => warn!(
            "the HTTP server answers requests from other hosts without encryption: its token can be read on the path"
        ),
        (true, _) => {}
    }
    Ok(Some(http))
}

/// Watches the certificate and the files of access rights, and handles SIGHUP. New sessions use the latest certificate.
async fn keep_up(
    server: &RunningServer,
    made: &config::IdentityConfig,
    written: &mut tls::WrittenCertificate,
    watch: &mut tls::CertificateWatch,
    watched: &mut access::AccessFileWatch,
    reload: &mut Signal,
    on_reload: impl Fn() -> anyhow::Result<config::AccessConfig>,
) -> std::convert::Infallible {
    let mut looks = tokio::time::interval(LOOKS);
    let mut memory = MemoryTrimmer::default();
    loop {
        let asked = tokio::select! {
            _ = looks.tick() => false,
            _ = reload.recv() => true,
        };
        if asked {
            notify::reloading();
            // Reading files and attaching BPF programs block, so other tasks of this worker thread move to another one
            // first.
            watched.change(tokio::task::block_in_place(&on_reload));
            // READY=1 also follows a failed reload, because systemd would otherwise wait for it until its time-out.
            notify::ready();
        }
        // The allocator keeps the memory of closed sessions, so free memory is returned to the system from time to
        // time.
        if memory.is_time(Instant::now()) {
            tokio::task::block_in_place(|| memory.look());
        }
        if let Some(loaded) = watched.look(asked) {
            server.set_access(loaded);
        }
        match watch.look(asked) {
            Some(Ok(certificate)) => {
                server.set_certificate(&certificate);
                info!(
                    sha256 = tls::fingerprint(&certificate),
                    "a new certificate is in use for new sessions"
                );
                // The new certificate is in use already, so an error only means that clients read the old file.
                if let Err(error) = written.write(made, &certificate) {
                    error!(%error, "cannot write the new certificate to the file of tls-self-signed-out");
                }
            }
            Some(Err(error)) => {
                error!(%error, "the new certificate is not usable, so the old one stays in use")
            }
            None => {}
        }
    }
}

/// Logs how tokens are verified, and warns of keys that verify tokens of several issuers.
fn log_access(policy: &AccessPolicy, access: &config::AccessConfig) {
    if policy.is_open() {
        return;
    }
    let tokens = &policy.tokens;
    info!(
        rules = policy.rule_count(),
        keys = keys::describe(&tokens.keys),
        revoked = tokens.revoked_count(),
        "access rules are in force"
    );
    if let Some(warning) = access.shared_trust() {
        warn!("the access rules: {warning}");
    }
}

/// Applies new settings of the engine, the packet gate and the interfaces, as far as a running relay can change them.
/// Returns the settings of access.
fn change(server: &RunningServer, config: anyhow::Result<Config>) -> anyhow::Result<config::AccessConfig> {
    let (engine, reason) = server.engine();
    let config = match config.and_then(|config| Ok(config.in_force(&server.running())?)) {
        Ok(config) => config,
        Err(error) => {
            let reason = format!("{error:#}");
            error!(
                error = reason,
                engine, "the new settings are not usable, so the relay keeps the old settings"
            );
            let done = Err(error);
            server.reloads.note(&done);
            return done;
        }
    };
    // Each part is changed on its own, so that an error in one does not keep the others from the new settings.
    let gate = server.change_gate(&config);
    if let Err(error) = &gate {
        error!(%error, "the new settings of the gate are not usable, so the gate stays as it is");
    }
    server.set_delays(&config);
    let changed = server.change_engine(&config).map_err(anyhow::Error::from);
    match &changed {
        Ok(()) => {
            let (engine, reason) = server.engine();
            info!(engine, reason, "the settings were read again and are in force");
        }
        Err(error) => error!(
            error = format!("{error:#}"),
            engine, reason, "the new settings of the engine are not usable, so the engine stays as it is"
        ),
    }
    // The status shows only the first error, while the log has all errors.
    server.reloads.note(&gate.context("gate").and(changed));
    Ok(config.access)
}
