//! Removes a program's labs when a signal ends it.

use nix::sys::signal::Signal;
use tokio::signal::unix;

use super::{Error, Result, registry};

/// Streams of SIGINT, SIGTERM and SIGHUP. The signals are caught instead of blocked, since children would inherit a
/// blocked signal.
pub(super) struct CaughtSignals([(Signal, unix::Signal); 3]);

impl CaughtSignals {
    /// Catches the signals from now on. It must be called inside an async runtime.
    pub(super) fn catch() -> std::io::Result<Self> {
        let catch = |signal: Signal| {
            unix::signal(unix::SignalKind::from_raw(signal as i32)).map(|stream| (signal, stream))
        };
        Ok(Self([catch(Signal::SIGINT)?, catch(Signal::SIGTERM)?, catch(Signal::SIGHUP)?]))
    }

    pub(super) async fn recv(&mut self) -> Signal {
        let Self([(int, a), (term, b), (hup, c)]) = self;
        tokio::select! {
            _ = a.recv() => *int,
            _ = b.recv() => *term,
            _ = c.recv() => *hup,
        }
    }
}

pub(super) fn runtime() -> Result<tokio::runtime::Runtime> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|source| Error::Io { what: "start a runtime".into(), source })
}

/// Makes SIGINT, SIGTERM and SIGHUP remove all labs of this process, with the processes inside, and end the process. It
/// is meant for programs that use labs as a library and do not handle these signals themselves.
pub fn remove_on_signal() -> Result<()> {
    let io = |source| Error::Io { what: "catch signals".into(), source };
    let runtime = runtime()?;
    let mut signals = {
        let _inside = runtime.enter();
        CaughtSignals::catch().map_err(io)?
    };
    let watch = move || {
        let signal = runtime.block_on(signals.recv());
        if let Err(error) = registry::remove_own() {
            tracing::error!(%error, "lab: the lab could not be removed; `millrace-lab lab clean` tries again");
        }
        std::process::exit(128 + signal as i32);
    };
    std::thread::Builder::new().name("lab signals".into()).spawn(watch).map_err(io)?;
    Ok(())
}
