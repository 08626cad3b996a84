//! The worker process that parses what peers send when they negotiate agreements, and answers to probes of paths. It
//! holds no capability for BPF programs, and asks the worker process for TCP for each effect on this host: see
//! [`link`](super::link).

use std::{collections::BTreeMap, os::unix::net::UnixStream, path::PathBuf, sync::Arc, time::Duration};

use anyhow::bail;
use millrace_daemon::{
    daemon::{self, DaemonFrame, Observed, Reloads},
    log,
    rights::{keep_capabilities, refuse_calls},
};
use millrace_graft::{
    settings::{AgreementSettings, class_of},
    status,
};
use parking_lot::Mutex;
use rustix::thread::CapabilitySet;
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};
use tokio::time::{MissedTickBehavior, interval};
use tracing::{error, info};

use super::{
    agreement::{AgreementHost, AgreementTasks},
    control::{GraftAnswer, GraftRequest, Status},
    daemon::usable,
    link::LinkRequest,
    metrics,
    probe::{ProbeStatus, ProbeTarget, Probes},
};

/// Capabilities that this process keeps: to listen on a port below 1024, and to probe a path by ICMP.
const KEPT: CapabilitySet = CapabilitySet::NET_BIND_SERVICE.union(CapabilitySet::NET_RAW);
/// Interval at which this process asks whether the rules have changed that are negotiated with peers.
const LOOK: Duration = Duration::from_millis(500);

/// Arguments with which the worker process starts.
pub struct TunnelSetup {
    /// Path of the settings file.
    pub config: PathBuf,
    /// Interfaces behind which there are hosts whose connections are tunnelled, in addition to those of the settings.
    pub interfaces: Vec<String>,
}

/// Flags of `openat` that change or create a file.
const WRITES: [i32; 4] = [libc::O_WRONLY, libc::O_RDWR, libc::O_CREAT, libc::O_TRUNC];

/// System calls that this process never makes, in addition to those that no confined process makes. A process of root
/// without any capability could otherwise write to files of root, and connect to sockets of root's daemons.
const REFUSED: &[libc::c_long] = {
    use libc::*;
    &[
        SYS_bpf,
        SYS_perf_event_open,
        SYS_io_uring_setup,
        SYS_openat2,
        SYS_kill,
        SYS_tkill,
        SYS_rt_sigqueueinfo,
        SYS_rt_tgsigqueueinfo,
        SYS_pidfd_send_signal,
        SYS_truncate,
        SYS_renameat2,
        SYS_unlinkat,
        SYS_linkat,
        SYS_symlinkat,
        SYS_mkdirat,
        SYS_mknodat,
        SYS_fchmod,
        SYS_fchmodat,
        SYS_fchown,
        SYS_fchownat,
        SYS_setxattr,
    ]
};

/// Older names of some of these calls, which only some machines have.
#[cfg(target_arch = "x86_64")]
const REFUSED_OLD: &[libc::c_long] = {
    use libc::*;
    &[
        SYS_open,
        SYS_creat,
        SYS_rename,
        SYS_renameat,
        SYS_unlink,
        SYS_link,
        SYS_symlink,
        SYS_mkdir,
        SYS_rmdir,
        SYS_mknod,
        SYS_chmod,
        SYS_chown,
        SYS_lchown,
    ]
};
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_OLD: &[libc::c_long] = &[];

/// Drops the capabilities that this process does not need, for good. From then on it cannot start programs, change
/// files, send signals or open Unix sockets. Must be called before any other thread is started.
///
/// # Errors
/// The kernel refuses a step.
pub fn confine() -> anyhow::Result<()> {
    keep_capabilities(KEPT)?;
    let value = |number: i32| u64::from(number.unsigned_abs());
    let has = |flag| {
        SeccompCondition::new(2, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(value(flag)), value(flag))
    };
    let writes = WRITES.map(|flag| SeccompRule::new(vec![has(flag)?]));
    let unix = value(libc::AF_UNIX);
    let is_unix = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, unix)?;
    let mut calls: BTreeMap<_, _> =
        REFUSED.iter().chain(REFUSED_OLD).map(|call| (*call, Vec::new())).collect();
    calls.insert(libc::SYS_openat, writes.into_iter().collect::<Result<_, _>>()?);
    calls.insert(libc::SYS_socket, vec![SeccompRule::new(vec![is_unix])?]);
    refuse_calls(calls)
}

/// Runs the worker process until its supervisor or a signal ends it.
pub async fn run(setup: TunnelSetup, frame: DaemonFrame) -> anyhow::Result<()> {
    let daemon = Arc::new(TunnelDaemon::new(setup)?);
    let mut agreements = AgreementSetup::default();
    agreements.follow(&daemon).await?;
    // A task of its own waits for the other process, so that requests are served meanwhile.
    let following = tokio::spawn(follow(daemon.clone(), agreements));
    let done = frame.run(&daemon).await;
    daemon.host.link.end();
    following.abort();
    done
}

/// Follows the settings and the rules in force, for as long as this process runs.
async fn follow(daemon: Arc<TunnelDaemon>, mut agreements: AgreementSetup) {
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = looks.tick() => {}
            () = daemon.host.news.notified() => {}
        }
        daemon.host.look();
        for (peer, report) in daemon.probes.take_fresh() {
            daemon.host.link.tell(&LinkRequest::NoteProbe { peer, report });
        }
        daemon.probes.start_due(&daemon.host.settings().probes);
        if let Err(error) = agreements.follow(&daemon).await {
            error!("cannot negotiate grafts with peers: {error:#}");
        }
    }
}

struct TunnelDaemon {
    setup: TunnelSetup,
    host: Arc<AgreementHost>,
    probes: Probes,
    reloads: Reloads,
    /// Reason why agreements do not run although the settings have [agreement].
    disagrees: Mutex<Option<String>>,
}

impl TunnelDaemon {
    fn new(setup: TunnelSetup) -> anyhow::Result<Self> {
        let settings = usable(&setup.config, &setup.interfaces)?.in_place;
        let host = Arc::new(AgreementHost::new(settings));
        Ok(Self {
            setup,
            host,
            probes: Probes::default(),
            reloads: Reloads::default(),
            disagrees: Mutex::default(),
        })
    }

    fn probed(&self) -> Vec<ProbeStatus> {
        let classes = self.host.settings().classes;
        self.probes.all(|rtt_us| class_of(&classes, rtt_us))
    }
}

/// The running tasks that negotiate agreements with peers, and the settings for which they were started.
#[derive(Default)]
struct AgreementSetup {
    running: Option<AgreementTasks>,
    settings: Option<AgreementSettings>,
}

impl AgreementSetup {
    /// Restarts the tasks that negotiate agreements with peers, if the settings of agreements have changed.
    async fn follow(&mut self, daemon: &Arc<TunnelDaemon>) -> anyhow::Result<()> {
        let settings = daemon.host.agreement();
        if settings == self.settings {
            return Ok(());
        }
        if let Some(mut running) = self.running.take() {
            // All tasks that negotiate agreements end before the present agreements are cancelled, so that no task puts
            // another one into force after that.
            running.end().await;
            daemon.host.link.tell(&LinkRequest::ReleaseAll);
        }
        self.settings = settings.clone();
        let Some(settings) = settings else { return Ok(()) };
        let started = AgreementTasks::start(daemon.host.clone(), settings).await;
        *daemon.disagrees.lock() =
            started.as_ref().err().map(|error| format!("cannot negotiate grafts with peers: {error:#}"));
        let running = started?;
        if let Some(at) = running.listens {
            info!(%at, "listening for peers that negotiate grafts");
        }
        self.running = Some(running);
        Ok(())
    }
}

impl Observed for TunnelDaemon {
    type Status = status::Status;

    fn status(&self) -> anyhow::Result<status::Status> {
        let trouble = self.disagrees.lock().iter().cloned().collect();
        Ok(status::Status { trouble, log_lines_dropped: log::dropped(), ..status::Status::default() })
    }

    fn metrics(&self) -> anyhow::Result<String> {
        Ok(metrics::of_probes(self.probed())?)
    }

    fn is_well(&self) -> bool {
        self.disagrees.lock().is_none()
    }
}

impl daemon::Daemon for TunnelDaemon {
    type Request = GraftRequest;
    type Answer = GraftAnswer;
    type Caller = ();

    fn caller(&self) {}

    fn answer(&self, (): &mut (), request: GraftRequest) -> anyhow::Result<Option<GraftAnswer>> {
        match request {
            GraftRequest::Status => {
                let share = Status { in_place: self.status()?, ..Status::default() };
                Ok(Some(GraftAnswer::Status(share.into())))
            }
            GraftRequest::Metrics => Ok(Some(GraftAnswer::Metrics(self.metrics()?))),
            GraftRequest::Reload => daemon::Daemon::reload(self).map(|()| None),
            GraftRequest::Probe { peer, udp_port, period_ms, duration_ms } => {
                let ms = Duration::from_millis;
                let target = ProbeTarget { peer, udp_port };
                self.probes.start(target, ms(period_ms), ms(duration_ms))?;
                info!(%peer, by = target.protocol_name(), "probing the network path to a peer");
                Ok(None)
            }
            GraftRequest::Probes => Ok(Some(GraftAnswer::Probed(self.probed()))),
            _ => bail!("another part of the daemon serves this request"),
        }
    }

    fn read_settings(&self) -> anyhow::Result<()> {
        self.host.set_settings(usable(&self.setup.config, &self.setup.interfaces)?.in_place);
        Ok(())
    }

    fn reloads(&self) -> &Reloads {
        &self.reloads
    }

    fn tick(&self) -> anyhow::Result<()> {
        Ok(())
    }

    fn linked(self: &Arc<Self>, partner: UnixStream) {
        self.host.renew_link(partner);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::ErrorKind::PermissionDenied, net::TcpListener, process::Command};

    use super::*;

    #[test]
    fn confined_thread_reads_files_and_listens_but_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        File::create(&file).unwrap();
        let socket = directory.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        // The filter and the capabilities are those of one thread, so other tests are not affected.
        let confined = std::thread::spawn(move || {
            confine().unwrap();
            assert!(File::open(&file).is_ok() && TcpListener::bind("127.0.0.1:0").is_ok());
            let kind = |refused: std::io::Result<()>| refused.unwrap_err().kind();
            assert_eq!(kind(File::create(&file).map(drop)), PermissionDenied);
            assert_eq!(kind(File::options().append(true).open(&file).map(drop)), PermissionDenied);
            assert_eq!(kind(std::fs::remove_file(&file)), PermissionDenied);
            assert_eq!(kind(UnixStream::connect(&socket).map(drop)), PermissionDenied);
            assert_eq!(kind(Command::new("true").status().map(drop)), PermissionDenied);
            let signal = nix::sys::signal::kill(nix::unistd::Pid::this(), None);
            assert_eq!(signal, Err(nix::errno::Errno::EPERM));
        });
        confined.join().unwrap();
    }
}
