//! The worker process that tunnels TCP connections. It speaks with the brokers of peers, and so parses what they send: it
//! loads its BPF programs and attaches them, and then drops the capability for that, before it opens a socket.

use std::{os::fd::OwnedFd, path::PathBuf, sync::Arc};

use anyhow::{Context as _, bail};
use millrace_daemon::{
    daemon::{DaemonFrame, Reloads},
    log,
};
use millrace_graft::{Settings, status};
use millrace_graft_kernel::{CallerRule, SelectionMaps, hook::RedirectRule};
use millrace_graft_tunnel::{TunnelBroker, TunnelPrograms};
use millrace_kernel::prefix::Prefix;
use parking_lot::Mutex;
use rustix::thread::CapabilitySet;
use tracing::info;

use super::{
    confine::{BpfUse, confine},
    control::{GraftAnswer, GraftRequest, PeerReport, Status},
    tunnel_reports::Reporter,
    usable::usable,
    worker::{Served, WorkerProcess, another},
};

/// Capabilities that this process keeps: to listen on a port below 1024, to send copies of SYNs, to read the firewall's
/// rules and repair the gateway's routes, and to open sockets that belong to an application's user.
const KEPT: CapabilitySet = CapabilitySet::NET_BIND_SERVICE
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::NET_ADMIN)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETGID);

/// Arguments with which the worker process starts.
pub struct TunnelSetup {
    /// Path of the settings file.
    pub config: PathBuf,
    /// Interfaces behind which there are hosts whose connections are tunnelled, in addition to those of the settings.
    pub interfaces: Vec<String>,
}

/// The worker process, after it has dropped its capabilities and before it runs.
pub struct ConfinedTunnel {
    setup: TunnelSetup,
    settings: Settings,
    programs: TunnelPrograms,
}

impl ConfinedTunnel {
    /// Loads the programs, and drops the capabilities that are not needed any more. Must be called before any other
    /// thread is started. `kept` has the descriptors that the worker process `grafts` has left with the supervisor.
    ///
    /// # Errors
    /// The settings are not usable, the kernel refuses a program, or a capability cannot be dropped.
    pub fn load(setup: TunnelSetup, kept: Vec<OwnedFd>) -> anyhow::Result<Self> {
        let settings = usable(&setup.config, &setup.interfaces)?.in_place;
        settings.follow_cgroups();
        let shared = SelectionMaps::from_descriptors(kept).context("the part grafts has not run yet")?;
        let programs = TunnelPrograms::load(&settings, &shared)?;
        confine(KEPT, BpfUse::OfDescriptors)?;
        Ok(Self { setup, settings, programs })
    }

    /// Runs the worker process until its supervisor or a signal ends it.
    pub async fn run(self, frame: DaemonFrame) -> anyhow::Result<()> {
        let Self { setup, settings, programs } = self;
        let broker = Arc::new(TunnelBroker::start(&settings, programs)?);
        let reporter = Reporter::start(broker.clone())?;
        let settings = Mutex::new(settings);
        let daemon = TunnelDaemon { setup, settings, reporter, broker, reloads: Reloads::default() };
        frame.run(&Arc::new(Served(Arc::new(daemon)))).await
    }
}

struct TunnelDaemon {
    setup: TunnelSetup,
    settings: Mutex<Settings>,
    /// The thread that reports. It uses the broker, so this field is dropped first.
    reporter: Reporter,
    broker: Arc<TunnelBroker>,
    reloads: Reloads,
}

impl WorkerProcess for TunnelDaemon {
    fn share(&self) -> anyhow::Result<Status> {
        let in_place = status::Status {
            trouble: self.broker.trouble().into_iter().collect(),
            log_lines_dropped: log::dropped(),
            carry: Some(self.broker.status()),
            ..status::Status::default()
        };
        Ok(Status { in_place, ..Status::default() })
    }

    fn page(&self) -> anyhow::Result<String> {
        Ok(millrace_graft_tunnel::metrics::encode(self.broker.status())?)
    }

    fn answer(&self, request: GraftRequest) -> anyhow::Result<Option<GraftAnswer>> {
        match request {
            GraftRequest::Why { peer } => {
                let in_place =
                    status::PeerExplanation { carrier: self.broker.carrier_to(peer), ..Default::default() };
                Ok(Some(GraftAnswer::Why(PeerReport { in_place, ..PeerReport::default() }.into())))
            }
            GraftRequest::Hook { cgroup, side, ports, peers, strict } => {
                self.broker.hook(&cgroup, side, redirect_rules(&ports, &peers, strict)?)?;
                Ok(None)
            }
            _ => bail!(another()),
        }
    }

    fn read_settings(&self) -> anyhow::Result<()> {
        let new = usable(&self.setup.config, &self.setup.interfaces)?.in_place;
        let mut settings = self.settings.lock();
        settings.can_become(&new)?;
        new.follow_cgroups();
        self.broker.apply(&new)?;
        *settings = new;
        info!("the new settings of tunnelled connections are in force");
        Ok(())
    }

    fn reloads(&self) -> &Reloads {
        &self.reloads
    }

    fn tick(&self) -> anyhow::Result<()> {
        let settings = self.settings.lock();
        settings.follow_cgroups();
        self.broker.tick(settings.redirect_rules());
        Ok(())
    }

    fn linked(self: &Arc<Self>, _name: &str, partner: OwnedFd) {
        self.reporter.renew(partner.into());
    }
}

fn redirect_rules(ports: &[(u16, u16)], peers: &[String], strict: bool) -> anyhow::Result<Vec<RedirectRule>> {
    let peers: Vec<Prefix> = peers
        .iter()
        .map(|peer| peer.parse().with_context(|| format!("peer {peer:?}")))
        .collect::<Result<_, _>>()?;
    let of = |peer: &Prefix| {
        ports
            .iter()
            .map(|(first, last)| RedirectRule {
                peer: *peer,
                ports: *first..=*last,
                caller: CallerRule::default(),
                strict,
                choice: 0,
                in_place: false,
            })
            .collect::<Vec<_>>()
    };
    Ok(peers.iter().flat_map(of).collect())
}
