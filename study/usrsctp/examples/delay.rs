//! Measures the delay of messages that two confined processes exchange by SCTP, over a path with delay and loss: `delay
//! [SECONDS] [RTT_MS] [LOSS_PERCENT] [MESSAGES_PER_SECOND]`.

use std::{
    collections::VecDeque,
    env,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixDatagram,
    },
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::bail;
use millrace_base::control::ControlEnd;
use millrace_study_usrsctp::{
    confine::{CPU_IDLE, Confined, Hello, hello},
    process::{ServeMessage, run},
};
use rustix::net::{RecvFlags, SendFlags, recv, send};

const BYTES: usize = 200;
const PAUSE: Duration = Duration::from_millis(1);
/// Longest wait at the end for messages that SCTP has not delivered yet.
const OWED: Duration = Duration::from_secs(60);

/// A confined process, and the application's end of the socket pair that it shares with the process.
struct ConfinedEnd {
    application: OwnedFd,
    _process: Confined,
    _control: ControlEnd,
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "process") {
        return run();
    }
    let value = |at: usize, usual: f64| arguments.get(at).map_or(Ok(usual), |text| text.parse());
    let seconds = value(0, 15.0)?;
    let rtt_ms = value(1, 300.0)?;
    let loss = value(2, 2.0)?;
    let rate = value(3, 200.0)?;
    let (near_wire, near_path) = UnixDatagram::pair()?;
    let (far_wire, far_path) = UnixDatagram::pair()?;
    let near = begin(&near_wire)?;
    let far = begin(&far_wire)?;
    let one_way = Duration::from_secs_f64(rtt_ms / 2000.0);
    let is_over = AtomicBool::new(false);
    let base = Instant::now();
    let messages = (seconds * rate) as usize;
    let due = |number: usize| Duration::from_secs_f64(number as f64 / rate);
    let mut delays = thread::scope(|scope| {
        scope.spawn(|| carry(&near_path, &far_path, one_way, loss / 100.0, &is_over));
        scope.spawn(|| carry(&far_path, &near_path, one_way, 0.0, &is_over));
        scope.spawn(|| {
            for number in 0..messages {
                thread::sleep(due(number).saturating_sub(base.elapsed()));
                while send(&near.application, &[0; BYTES], SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_err()
                {
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    thread::sleep(PAUSE);
                }
            }
        });
        let mut delays = Vec::new();
        let mut buffer = [0; BYTES];
        while delays.len() < messages && base.elapsed() < due(messages) + OWED {
            match recv(&far.application, &mut buffer[..], RecvFlags::DONTWAIT) {
                // Messages arrive in order, so the number of earlier messages gives the time at which this message was
                // due to be sent.
                Ok(_) => delays.push(base.elapsed().saturating_sub(due(delays.len()))),
                Err(_) => thread::sleep(PAUSE),
            }
        }
        is_over.store(true, Ordering::Relaxed);
        delays
    });
    delays.sort_unstable();
    let at = |part: f64| {
        delays.get((part * (delays.len().saturating_sub(1)) as f64) as usize).copied().unwrap_or_default()
    };
    println!(
        "{} of {messages} came: p50 {:?}, p99 {:?}, most {:?}",
        delays.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    );
    Ok(())
}

/// Starts a confined process for a session whose packets are sent and received on `wire`.
fn begin(wire: &UnixDatagram) -> anyhow::Result<ConfinedEnd> {
    let (process, control) = Confined::start(["process"], CPU_IDLE)?;
    loop {
        match hello(&control)? {
            Some(Hello::Yes { .. }) => break,
            Some(Hello::No { why }) => bail!("{why}"),
            None => thread::sleep(PAUSE),
        }
    }
    let (own, theirs) = ControlEnd::pair()?;
    let serve = ServeMessage { packet_bytes: 1200, parameters: Default::default() };
    control.send(&serve, &[wire.as_fd(), theirs.as_fd()])?;
    Ok(ConfinedEnd { application: own.as_fd().try_clone_to_owned()?, _process: process, _control: control })
}

/// Forwards packets after `delay`, except for a share `loss` of them, which is dropped.
fn carry(from: &UnixDatagram, to: &UnixDatagram, delay: Duration, loss: f64, is_over: &AtomicBool) {
    let mut random = fastrand::Rng::with_seed(7);
    let mut waiting = VecDeque::<(Instant, Vec<u8>)>::new();
    let mut packet = [0; 2048];
    // An error is ignored: without the time-out this loop would only use more CPU time.
    let _ = from.set_read_timeout(Some(PAUSE));
    while !is_over.load(Ordering::Relaxed) {
        if let Ok(length) = from.recv(&mut packet)
            && random.f64() >= loss
        {
            waiting.push_back((Instant::now() + delay, packet.get(..length).unwrap_or_default().to_vec()));
        }
        while let Some((_, bytes)) = waiting.front().filter(|(due, _)| *due <= Instant::now()) {
            // A send error is ignored: a full socket loses packets like a full queue on a real path.
            let _ = to.send(bytes);
            waiting.pop_front();
        }
    }
}
