//! Observations of a path that a host can make: probe packets at even intervals, and TCP's own measurements of an
//! earlier connection.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millrace_graft_kernel::SocketPrograms;
use millrace_graft_proto::measure::{PathReport, PathSample};

use crate::train::runs::MeasuredPath;

use crate::bench::graft::flow::BegunTransfer;
use crate::lab::LabNode;

const PROBES: usize = 400;
const PERIOD: Duration = Duration::from_millis(20);
/// Delay beyond which a packet counts as lost.
const LATE: Duration = Duration::from_secs(2);
const EARLIER_BYTES: u64 = 256 << 10;
const EARLIER_LIMIT: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(50);

/// Observes the path from the sender of the data to its receiver.
pub fn look(from: &LabNode, to: &LabNode) -> anyhow::Result<MeasuredPath> {
    let report = probe(from, to)?;
    let rate = delivery_rate(from, to)?;
    let answered = report.answered > 0;
    let known = |figure: f64| answered.then_some(figure);
    Ok(MeasuredPath {
        rtt_ms: known(f64::from(report.rtt_min_us) / 1e3),
        rate_mbit: rate.map(|bytes| bytes as f64 * 8.0 / 1e6),
        loss_percent: known(report.loss_percent),
        burstiness: known(report.burstiness),
        reordering_percent: known(f64::from(report.reordered) * 100.0 / f64::from(report.answered.max(1))),
        queue_ms_s: known((report.queue_growth_us_s / 1e3).max(0.0)),
        paths: 1,
    })
}

fn probe(from: &LabNode, to: &LabNode) -> anyhow::Result<PathReport> {
    let echo = to.enter(|| UdpSocket::bind((to.addr_v4(), 0)))??;
    let sender = from.enter(|| UdpSocket::bind((from.addr_v4(), 0)))??;
    let at = SocketAddr::new(to.addr_v4().into(), echo.local_addr()?.port());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let echoing = scope.spawn(|| answer(&echo, &over));
        let receiving = scope.spawn(|| receive(&sender, &over));
        let start = Instant::now();
        let mut sent = Vec::new();
        for number in 0..PROBES {
            std::thread::sleep((PERIOD * number as u32).saturating_sub(start.elapsed()));
            sent.push(Instant::now());
            // A send error is ignored: a packet that the queue does not take is lost like any other.
            let _ = sender.send_to(&number.to_be_bytes(), at);
        }
        std::thread::sleep(LATE);
        over.store(true, Ordering::Relaxed);
        let answers = receiving.join().map_err(|_| anyhow::anyhow!("a receiver panicked"))??;
        echoing.join().map_err(|_| anyhow::anyhow!("an echo panicked"))??;
        let micros = |at: Instant| u64::try_from(at.duration_since(start).as_micros()).unwrap_or(u64::MAX);
        let answered =
            |number: usize| answers.iter().find(|(of, _)| *of == number).map(|(_, at)| micros(*at));
        let samples: Vec<PathSample> = sent
            .iter()
            .enumerate()
            .map(|(number, sent)| PathSample { sent_us: micros(*sent), answered_us: answered(number) })
            .collect();
        Ok(PathReport::from_samples(&samples))
    })
}

fn answer(socket: &UdpSocket, over: &AtomicBool) -> std::io::Result<()> {
    each(socket, over, |number, from| {
        let _ = socket.send_to(&number.to_be_bytes(), from);
    })
}

fn receive(socket: &UdpSocket, over: &AtomicBool) -> std::io::Result<Vec<(usize, Instant)>> {
    let mut answers = Vec::new();
    each(socket, over, |number, _| answers.push((number, Instant::now())))?;
    Ok(answers)
}

fn each(
    socket: &UdpSocket,
    over: &AtomicBool,
    mut work: impl FnMut(usize, SocketAddr),
) -> std::io::Result<()> {
    socket.set_read_timeout(Some(LOOK))?;
    let mut buffer = [0; size_of::<usize>()];
    while !over.load(Ordering::Relaxed) {
        if let Ok((_, from)) = socket.recv_from(&mut buffer) {
            work(usize::from_be_bytes(buffer), from);
        }
    }
    Ok(())
}

/// Returns the highest delivery rate that the kernel measured for a TCP connection on this path, bytes per second.
fn delivery_rate(from: &LabNode, to: &LabNode) -> anyhow::Result<Option<u64>> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let looking = scope.spawn(|| from.enter(|| watch(to.addr_v4().into(), &over)));
        let moved = BegunTransfer::open(from, to, "cubic")
            .and_then(|flow| flow.transfer(EARLIER_BYTES, EARLIER_LIMIT));
        over.store(true, Ordering::Relaxed);
        let seen = looking
            .join()
            .map_err(|_| anyhow::anyhow!("the thread that reads the kernel's figures panicked"))??;
        moved?;
        seen
    })
}

fn watch(peer: std::net::IpAddr, over: &AtomicBool) -> anyhow::Result<Option<u64>> {
    let sockets = SocketPrograms::load()?;
    let mut most = None;
    while !over.load(Ordering::Relaxed) {
        let all = sockets.read()?;
        let of_peer = all.iter().filter(|socket| socket.remote.ip().to_canonical() == peer);
        most = of_peer.filter_map(|socket| socket.delivery_rate).max().max(most);
        std::thread::sleep(LOOK);
    }
    Ok(most)
}
