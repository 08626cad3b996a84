//! Strict redirection: the kernel holds an application's SYN until the server was reached, so that `connect()` has the
//! same result as without the tunnel broker.

use std::{collections::HashMap, io, net::SocketAddr, os::fd::AsFd as _, sync::Arc, time::Duration};

use millrace_graft_kernel::{
    hold::{self, Hold, HoldSyn, HoldSyns},
    hook::RedirectedConnection,
};
use millrace_graft_proto::carry::frame::{CarryFrame, CarryReason, OpenFrame};
use parking_lot::Mutex;
use tokio::{
    net::TcpStream,
    sync::oneshot,
    time::{timeout, timeout_at},
};
use tracing::{debug, warn};

use super::{
    carrier::PeerCarrier,
    carrier_error::CarrierError,
    context::CarryContext,
    kernel_events::KernelEvents,
    listeners::{BoundListeners, Listeners, canonical},
    meter::TransferMeter,
    probe::AnswerDeadline,
    pump::{PumpEnd, TunnelPump, prepare},
    redirected,
    stream::CarrierStream,
    syn::SynSender,
    warnings::warn_on_error,
    watch::TunnelRecord,
};

/// Time limit for the tunnel broker's listener to accept the connection of an admitted SYN. The application may have
/// given up meanwhile.
const ADMISSION: Duration = Duration::from_secs(5);

/// The SYNs that the kernel holds, and the listeners at which admitted SYNs arrive.
pub struct Strict {
    hold: Hold,
    listeners: Listeners,
    wire: SynSender,
    /// Channels of the tasks that wait for admitted connections, by the client's address.
    admitted: Mutex<HashMap<SocketAddr, oneshot::Sender<TcpStream>>>,
}

/// The BPF program that holds SYNs, and its listeners, before tasks use them.
pub struct StrictPrograms {
    hold: Hold,
    asks: HoldSyns,
    pub listeners: BoundListeners,
}

impl StrictPrograms {
    /// Loads the program and attaches it to new listeners.
    pub fn load() -> anyhow::Result<Self> {
        let (hold, asks) = Hold::load()?;
        let listeners = BoundListeners::bind()?;
        listeners.sockets().try_for_each(|socket| hold.attach(socket))?;
        Ok(Self { hold, asks, listeners })
    }
}

impl Strict {
    /// Makes the held SYNs available to tasks. Must be called inside of a tokio runtime.
    pub fn new(programs: StrictPrograms) -> anyhow::Result<(Self, KernelEvents<HoldSyn>)> {
        let StrictPrograms { hold, asks, listeners } = programs;
        let listeners = listeners.serve()?;
        let wire = SynSender::new(None)?;
        Ok((Self { hold, listeners, wire, admitted: Mutex::default() }, KernelEvents::new(asks)?))
    }

    /// Returns the names of the BPF program's verdicts on held SYNs, and how many SYNs got each.
    pub fn verdicts(&self) -> impl Iterator<Item = (String, u64)> {
        let counts = self.hold.verdicts().unwrap_or_default();
        hold::VERDICTS.into_iter().map(str::to_owned).zip(counts)
    }

    /// Admits the SYN, and waits for its connection. Returns `None` if the application does not connect in time.
    async fn admit(&self, ask: &HoldSyn) -> Option<TcpStream> {
        let from = canonical(ask.from);
        let (sender, receiver) = oneshot::channel();
        self.admitted.lock().insert(from, sender);
        // The BPF filter has to let the SYN pass before the tunnel broker sends this SYN once more.
        let sent = self.hold.let_in(ask.from).map_err(io::Error::other).and_then(|()| self.resend_syn(ask));
        if let Err(error) = sent {
            // The kernel repeats the application's SYN a second later, so a SYN that the tunnel broker could not send
            // again is only logged.
            debug!(%from, "an application's held SYN could not be sent again: {error}");
        }
        let local = timeout(ADMISSION, receiver).await.ok().and_then(Result::ok);
        self.admitted.lock().remove(&from);
        self.forget(ask);
        local
    }

    fn resend_syn(&self, ask: &HoldSyn) -> io::Result<()> {
        self.wire.send(ask.from, self.listeners.original_destination(ask.from)?, &ask.syn)
    }

    /// Refuses the connection with a reset, as if nobody listened at the server's port.
    fn refuse(&self, ask: &HoldSyn) {
        let refused = self
            .listeners
            .original_destination(ask.from)
            .and_then(|at| self.wire.refuse(at, ask.from, &ask.syn));
        if let Err(error) = refused {
            warn!("a refusal (TCP reset) cannot be sent to an application: {error}");
        }
        self.forget(ask);
    }

    fn forget(&self, ask: &HoldSyn) {
        warn_on_error("a held SYN cannot be removed from the kernel's table", self.hold.forget(ask.from));
    }
}

/// Accepts the connections whose SYNs were admitted, for as long as the tunnel broker runs.
pub async fn accept(strict: Arc<Strict>) {
    loop {
        let (local, from) = strict.listeners.next().await;
        let _ = hold::release(local.as_fd()); // removes the listener's BPF filter from the accepted socket
        let waits = strict.admitted.lock().remove(&from);
        // If no task waits any more, the connection is dropped here, which resets it.
        if let (Ok(()), Some(waits)) = (prepare(&local), waits) {
            let _ = waits.send(local);
        }
    }
}

/// Handles the SYNs that the kernel reports, for as long as the tunnel broker runs.
pub async fn answer_all(context: Arc<CarryContext>, strict: Arc<Strict>, mut asks: KernelEvents<HoldSyn>) {
    while let Some(come) = asks.next().await {
        for ask in come {
            let context = context.clone();
            let strict = strict.clone();
            tokio::spawn(async move { begin(&context, &strict, &ask).await });
        }
    }
}

async fn begin(context: &CarryContext, strict: &Strict, ask: &HoldSyn) {
    let Some((arrival, place)) = redirected::enter(context, canonical(ask.from)) else {
        strict.refuse(ask);
        return;
    };
    let from = canonical(ask.from);
    let carrier = context.carriers.carrier_to(arrival.server.ip());
    let meter = redirected::meter(context, &arrival);
    let watched = redirected::watch(context, &arrival, from, carrier.as_deref(), &meter);
    let mut seen = None;
    let ended = match reach(context, from, carrier, &arrival).await {
        Ok(reached) => match strict.admit(ask).await {
            Some(local) => join(context, local, reached, meter, &mut seen).await,
            None => PumpEnd::Reset,
        },
        Err(CarryReason::Refused) => {
            strict.refuse(ask);
            PumpEnd::Refused(CarryReason::Refused)
        }
        Err(reason) => {
            // The kernel repeats the SYN until the application gives up, so the next SYN is handled again.
            context.hooks.expect(ask.from, &arrival);
            strict.forget(ask);
            PumpEnd::Refused(reason)
        }
    };
    context.watch.end(&watched, seen);
    redirected::leave(context, place, &ended);
}

/// A tunnelled connection whose server was reached. It is reset if it is dropped unused.
enum ReachedServer {
    Carried(Box<OpenedStream>, Arc<PeerCarrier>),
    InPlace(TcpStream),
}

/// A stream on which the peer's tunnel broker has reached the server.
pub struct OpenedStream {
    open: OpenFrame,
    stream: Option<CarrierStream>,
}

impl OpenedStream {
    /// Tunnels the connection until it ends. Returns how the connection ended, and its measurements. There are no
    /// measurements if the stream was already used.
    pub async fn join(
        &mut self,
        context: &CarryContext,
        local: &TcpStream,
        carrier: Arc<PeerCarrier>,
        meter: TransferMeter,
    ) -> (PumpEnd, Option<TunnelRecord>) {
        let Some(stream) = self.stream.take() else { return (PumpEnd::Reset, None) };
        let _counted = context.carriers.count(&carrier.peer.name);
        let mut pump = TunnelPump::accepted(context, local, stream, self.open, carrier, meter);
        let ended = pump.run().await;
        (ended, Some(pump.tunnel_record()))
    }
}

impl Drop for OpenedStream {
    fn drop(&mut self) {
        self.stream.iter_mut().for_each(CarrierStream::reset);
    }
}

/// Result of an attempt to open a tunnelled connection before any of its bytes are sent.
pub enum TunnelAttempt {
    Opened(Box<OpenedStream>),
    Refused(CarryReason),
    /// The carrier permits no more connections now, or the peer does not answer.
    Nothing,
}

pub async fn attempt(
    context: &CarryContext,
    client: SocketAddr,
    server: SocketAddr,
    carrier: &Arc<PeerCarrier>,
) -> TunnelAttempt {
    let open = OpenFrame { id: context.table.next_id(), server, client };
    let mut opened = OpenedStream { open, stream: redirected::stream(carrier).await };
    let Some(stream) = &mut opened.stream else { return TunnelAttempt::Nothing };
    let Some(answered) = answer(context, stream, open, carrier).await else { return TunnelAttempt::Nothing };
    match answered {
        Ok(CarryFrame::Accepted { received: 0 }) => TunnelAttempt::Opened(Box::new(opened)),
        Ok(CarryFrame::Refused(reason)) => TunnelAttempt::Refused(reason),
        other => {
            debug!(%server, "the peer's broker answers a new connection wrongly: {other:?}");
            TunnelAttempt::Nothing
        }
    }
}

/// Asks the peer's tunnel broker to open the connection. Returns `None` if the peer has not even acknowledged the
/// question for too long.
async fn answer(
    context: &CarryContext,
    stream: &mut CarrierStream,
    open: OpenFrame,
    carrier: &Arc<PeerCarrier>,
) -> Option<Result<CarryFrame, CarrierError>> {
    let mut deadline = AnswerDeadline::new(carrier);
    let mut is_suspect = false;
    let question = CarryFrame::Open(open);
    let answer = stream.ask(&question);
    tokio::pin!(answer);
    // After the first missed deadline, the carrier is suspected to be dead and gets no other connections. After the
    // second one in a row, this attempt to use it fails.
    loop {
        match timeout_at(deadline.at, &mut answer).await {
            Ok(answered) => return Some(answered),
            Err(_) if !deadline.is_missed(carrier) => is_suspect = false,
            Err(_) if is_suspect => return None,
            Err(_) => {
                context.carriers.suspect(carrier);
                is_suspect = true;
            }
        }
    }
}

/// Connects to the server by a carrier. Without a carrier, or if the peer's tunnel broker does not tunnel the
/// connection, it connects by plain TCP.
async fn reach(
    context: &CarryContext,
    from: SocketAddr,
    carrier: Option<Arc<PeerCarrier>>,
    arrival: &RedirectedConnection,
) -> Result<ReachedServer, CarryReason> {
    let server = arrival.server;
    let owner = arrival.owner;
    let client = SocketAddr::new(arrival.local, from.port());
    if let Some(carrier) = carrier
        && context.openings.let_out(client, server, owner).await
    {
        match attempt(context, client, server, &carrier).await {
            TunnelAttempt::Opened(opened) => return Ok(ReachedServer::Carried(opened, carrier)),
            TunnelAttempt::Refused(reason) if !reason.is_brokers() => return Err(reason),
            TunnelAttempt::Refused(reason) => {
                debug!(%server, "the peer's broker refuses the connection: {}", reason.name())
            }
            TunnelAttempt::Nothing => {}
        }
    }
    match redirected::connect(context, server, owner).await {
        Ok(remote) => Ok(ReachedServer::InPlace(remote)),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Err(CarryReason::Refused),
        Err(_) => Err(CarryReason::Unreachable),
    }
}

async fn join(
    context: &CarryContext,
    mut local: TcpStream,
    reached: ReachedServer,
    meter: TransferMeter,
    seen: &mut Option<TunnelRecord>,
) -> PumpEnd {
    match reached {
        ReachedServer::InPlace(mut remote) => redirected::join(&mut local, &mut remote).await,
        ReachedServer::Carried(mut opened, carrier) => {
            let ended;
            (ended, *seen) = opened.join(context, &local, carrier, meter).await;
            ended
        }
    }
}
