//! Connections that are led strictly: the application's SYN waits until the server was reached, so that `connect()` says what a
//! connection in place would say.

use std::{collections::HashMap, io, net::SocketAddr, os::fd::AsFd as _, sync::Arc, time::Duration};

use millrace_graft_kernel::{
    hold::{self, Ask, Hold},
    hook::Arrival,
};
use millrace_graft_proto::carry::frame::{Frame, Open, Reason};
use parking_lot::Mutex;
use tokio::{net::TcpStream, sync::oneshot, time::timeout};
use tracing::{debug, warn};

use super::{
    asking::Asking,
    broken::Broken,
    carrier::Carrier,
    context::Context,
    led,
    listeners::{Listeners, canonical},
    meter::Meter,
    pump::{Ended, Pump, prepare},
    said,
    stream::Stream,
    syn::Wire,
    watch::Seen,
};

/// For a SYN that was let in to become a connection. Its application may have given up.
const ADMISSION: Duration = Duration::from_secs(5);

pub struct Strict {
    hold: Hold,
    listeners: Listeners,
    wire: Wire,
    admitted: Mutex<HashMap<SocketAddr, oneshot::Sender<TcpStream>>>,
}

impl Strict {
    pub fn new() -> anyhow::Result<(Self, Asking<Ask>)> {
        let (hold, asks) = Hold::load()?;
        let (listeners, wire) = (Listeners::bind()?, Wire::new(None)?);
        listeners.sockets().try_for_each(|socket| hold.attach(socket))?;
        Ok((Self { hold, listeners, wire, admitted: Mutex::default() }, Asking::new(asks)?))
    }

    pub fn listeners(&self) -> &Listeners {
        &self.listeners
    }

    /// SYNs, by what became of them.
    pub fn verdicts(&self) -> impl Iterator<Item = (String, u64)> {
        let counts = self.hold.verdicts().unwrap_or_default();
        hold::VERDICTS.into_iter().map(str::to_owned).zip(counts)
    }

    /// Lets the SYN in. `None`: nobody is there any more.
    async fn admit(&self, ask: &Ask) -> Option<TcpStream> {
        let from = canonical(ask.from);
        let (sender, receiver) = oneshot::channel();
        self.admitted.lock().insert(from, sender);
        let sent = self.hold.let_in(ask.from).map_err(io::Error::other).and_then(|()| self.again(ask));
        if let Err(error) = sent {
            // It comes again by itself, a second later.
            debug!(%from, "a SYN could not be sent again: {error}");
        }
        let local = timeout(ADMISSION, receiver).await.ok().and_then(Result::ok);
        self.admitted.lock().remove(&from);
        self.forget(ask);
        local
    }

    fn again(&self, ask: &Ask) -> io::Result<()> {
        self.wire.send(ask.from, self.listeners.at(ask.from)?, &ask.syn)
    }

    /// As if nobody listened.
    fn refuse(&self, ask: &Ask) {
        let refused = self.listeners.at(ask.from).and_then(|at| self.wire.refuse(at, ask.from, &ask.syn));
        if let Err(error) = refused {
            warn!("an application cannot be told that it is refused: {error}");
        }
        self.forget(ask);
    }

    fn forget(&self, ask: &Ask) {
        said("what is known of a SYN cannot be taken from the kernel", self.hold.forget(ask.from));
    }
}

/// Those that were let in, for as long as the broker runs.
pub async fn accept(strict: Arc<Strict>) {
    loop {
        let (local, from) = strict.listeners.next().await;
        let _ = hold::release(local.as_fd()); // it would let everything pass
        let waits = strict.admitted.lock().remove(&from);
        // Else whoever has asked for it has not waited: it is reset.
        if let (Ok(()), Some(waits)) = (prepare(&local), waits) {
            let _ = waits.send(local);
        }
    }
}

/// Those that ask, for as long as the broker runs.
pub async fn answer_all(context: Arc<Context>, strict: Arc<Strict>, mut asks: Asking<Ask>) {
    while let Some(come) = asks.next().await {
        for ask in come {
            let (context, strict) = (context.clone(), strict.clone());
            tokio::spawn(async move { begin(&context, &strict, &ask).await });
        }
    }
}

async fn begin(context: &Context, strict: &Strict, ask: &Ask) {
    let Some((arrival, place)) = led::enter(context, canonical(ask.from)) else {
        strict.refuse(ask);
        return;
    };
    let (from, carrier) = (canonical(ask.from), context.carriers.to(arrival.far.ip()));
    let meter = led::meter(context, &arrival);
    let (watched, mut seen) = (led::watch(context, &arrival, (from, carrier.as_deref()), &meter), None);
    let ended = match reach(context, (from, carrier), &arrival).await {
        Ok(reached) => match strict.admit(ask).await {
            Some(local) => join(context, local, reached, (meter, &mut seen)).await,
            None => Ended::Reset,
        },
        Err(Reason::Refused) => {
            strict.refuse(ask);
            Ended::Refused(Reason::Refused)
        }
        Err(reason) => {
            // Its SYN comes again, until the application gives up.
            context.hooks.expect(ask.from, &arrival);
            strict.forget(ask);
            Ended::Refused(reason)
        }
    };
    context.watch.end(&watched, seen);
    led::leave(context, place, &ended);
}

/// A server that was reached. It is reset if nothing becomes of it.
enum Reached {
    Carried(Box<Opened>, Arc<Carrier>),
    InPlace(TcpStream),
}

/// A stream by which the server was reached.
pub struct Opened {
    open: Open,
    stream: Option<Stream>,
}

impl Opened {
    /// `None` of what was seen: its stream was gone already.
    pub async fn join(
        &mut self,
        context: &Context,
        local: &TcpStream,
        (carrier, meter): (Arc<Carrier>, Meter),
    ) -> (Ended, Option<Seen>) {
        let Some(stream) = self.stream.take() else { return (Ended::Reset, None) };
        let _counted = context.carriers.count(&carrier.far.peer);
        let mut pump = Pump::accepted(context, local, stream, (self.open, carrier, meter));
        let ended = pump.run().await;
        (ended, Some(pump.seen()))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.stream.iter_mut().for_each(Stream::reset);
    }
}

/// What a carrier has made of a connection of which nothing has gone anywhere.
pub enum Tried {
    Opened(Box<Opened>),
    Refused(Reason),
    /// It takes none now, or nothing comes back.
    Nothing,
}

pub async fn attempt(
    context: &Context,
    (client, server): (SocketAddr, SocketAddr),
    carrier: &Arc<Carrier>,
) -> Tried {
    let open = Open { id: context.table.next_id(), server, client };
    let mut opened = Opened { open, stream: led::stream(carrier).await };
    let Some(stream) = &mut opened.stream else { return Tried::Nothing };
    let Some(answered) = answer(context, stream, open, carrier).await else { return Tried::Nothing };
    match answered {
        Ok(Frame::Accepted { received: 0 }) => Tried::Opened(Box::new(opened)),
        Ok(Frame::Refused(reason)) => Tried::Refused(reason),
        other => {
            debug!(%server, "not carried: {other:?}");
            Tried::Nothing
        }
    }
}

/// `None`: nothing at all has come back by the carrier, for long enough.
async fn answer(
    context: &Context,
    stream: &mut Stream,
    open: Open,
    carrier: &Arc<Carrier>,
) -> Option<Result<Frame, Broken>> {
    let (heard, question) = (carrier.heard(), Frame::Open(open));
    let answer = stream.ask(&question);
    tokio::pin!(answer);
    // First others are to go elsewhere, then this one.
    for patience in [carrier.patience(), 2 * carrier.patience()] {
        match timeout(patience, &mut answer).await {
            Ok(answered) => return Some(answered),
            Err(_) if carrier.heard() != heard => return Some(answer.await),
            Err(_) => context.carriers.suspect(carrier),
        }
    }
    None
}

/// By a carrier, and where there is none, or the peer's broker does not carry it, in place.
async fn reach(
    context: &Context,
    (from, carrier): (SocketAddr, Option<Arc<Carrier>>),
    arrival: &Arrival,
) -> Result<Reached, Reason> {
    let (server, owner) = (arrival.far, arrival.owner);
    let client = SocketAddr::new(arrival.near, from.port());
    if let Some(carrier) = carrier
        && context.openings.let_out((client, server), owner).await
    {
        match attempt(context, (client, server), &carrier).await {
            Tried::Opened(opened) => return Ok(Reached::Carried(opened, carrier)),
            Tried::Refused(reason) if !reason.is_brokers() => return Err(reason),
            Tried::Refused(reason) => debug!(%server, "not carried: {}", reason.name()),
            Tried::Nothing => {}
        }
    }
    match led::connect(context, (server, owner)).await {
        Ok(remote) => Ok(Reached::InPlace(remote)),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Err(Reason::Refused),
        Err(_) => Err(Reason::Unreachable),
    }
}

async fn join(
    context: &Context,
    mut local: TcpStream,
    reached: Reached,
    (meter, seen): (Meter, &mut Option<Seen>),
) -> Ended {
    match reached {
        Reached::InPlace(mut remote) => led::join(&mut local, &mut remote).await,
        Reached::Carried(mut opened, carrier) => {
            let ended;
            (ended, *seen) = opened.join(context, &local, (carrier, meter)).await;
            ended
        }
    }
}
