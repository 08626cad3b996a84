//! The same messages by SCTP: a message session whose graft is a process, between two daemons.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure};
use millrace_graft::message::{Error, Received, Session, Why};

use super::super::peers::Peers;
use super::datagrams::{Outcome, Pace, Receiving, Run, message};
use crate::bench::site::Site;

const START: Duration = Duration::from_secs(60);
const TURN: Duration = Duration::from_millis(50);
/// Until all has come that the association still owes at the end: what it cannot send in time waits.
const ALL: Duration = Duration::from_secs(60);

/// `None`: the library is not installed.
pub fn measure(site: &Site, run: &Run, session: &str) -> anyhow::Result<Option<Outcome>> {
    ensure!(matches!(run.pace, Pace::Rate(_)), "messages have a rate");
    let grafts = "[[graft]]\nname = \"sctp\"\nfunctions = [\"sctp\"]\n";
    let peers = Peers::start(site, grafts, &format!("clear = true\n{session}"))?;
    let listener = peers.asks("far").listen()?;
    let mut near = match peers.opened(&["order", "congestion-control"]) {
        Err(Error::Refused { why: Why::Impossible, reason }) if reason.contains("libusrsctp") => {
            return Ok(None);
        }
        opened => opened?,
    };
    let mut far = listener.accept()?;
    far.set_timeout(Some(TURN));
    // The association is there before the clock runs, as of all others.
    near.send(&[])?;
    far_has_one(&mut far)?;
    let (base, is_over) = (Instant::now(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| take_all(&mut far, base, run.bytes, &is_over));
        let mut sent = 0;
        let sending = (|| {
            while let Some(due) = run.due(sent, base) {
                std::thread::sleep((base + due).saturating_duration_since(Instant::now()));
                near.send(&message(sent, due, run.bytes))?;
                sent += 1;
            }
            near.finish()?;
            Ok::<_, anyhow::Error>(())
        })();
        let finished = Instant::now();
        while sending.is_ok() && !receiving.is_finished() && finished.elapsed() < ALL {
            std::thread::sleep(TURN);
        }
        is_over.store(true, Ordering::Relaxed);
        let outcome = receiving.join().map_err(|_| anyhow!("the receiver panicked"))??;
        sending?;
        Ok(Some(Outcome { sent, ..outcome }))
    })
}

fn far_has_one(far: &mut Session) -> anyhow::Result<()> {
    let begin = Instant::now();
    loop {
        match far.receive() {
            Ok(_) => return Ok(()),
            Err(Error::TimedOut) if begin.elapsed() < START => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn take_all(far: &mut Session, base: Instant, bytes: usize, is_over: &AtomicBool) -> anyhow::Result<Outcome> {
    let mut receiving = Receiving::default();
    while !is_over.load(Ordering::Relaxed) {
        match far.receive() {
            Ok(Received::Message(got)) => receiving.take(&got, base, bytes),
            Ok(Received::Finished) => break,
            Err(Error::TimedOut) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(receiving.outcome)
}
