//! Connections that are led strictly: the application's SYN waits until the server was reached, so that `connect()` says what a
//! connection in place would say.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use millrace_bpf::graft::{
    hold::{self, Ask, Asks, Hold},
    hook::Arrival,
};
use millrace_proto::graft::carry::frame::{Frame, Open, Reason};
use parking_lot::Mutex;
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::TcpStream,
    sync::oneshot,
    time::timeout,
};
use tracing::{debug, warn};

use super::{
    carrier::Carrier,
    context::Context,
    led::{self, Listeners, canonical},
    pump::{Ended, Pump, prepare},
    stream::Stream,
    syn::Wire,
};

/// For a SYN that was let in to become a connection. Its application may have given up.
const ADMISSION: Duration = Duration::from_secs(5);

/// SYNs that were held back, as they come.
pub struct Asking {
    asks: Asks,
    descriptor: AsyncFd<OwnedFd>,
}

pub struct Strict {
    hold: Hold,
    listeners: Listeners,
    wire: Wire,
    admitted: Mutex<HashMap<SocketAddr, oneshot::Sender<TcpStream>>>,
}

impl Strict {
    pub fn new() -> anyhow::Result<(Self, Asking)> {
        let (hold, asks) = Hold::load()?;
        let (listeners, wire) = (Listeners::bind()?, Wire::new()?);
        listeners.sockets().try_for_each(|socket| hold.attach(socket))?;
        let descriptor = register(asks.descriptor().try_clone_to_owned()?)?;
        Ok((Self { hold, listeners, wire, admitted: Mutex::default() }, Asking { asks, descriptor }))
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
        if let Err(error) = self.hold.forget(ask.from) {
            warn!("what is known of a SYN cannot be taken from the kernel: {error}");
        }
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
pub async fn answer(context: Arc<Context>, strict: Arc<Strict>, asks: Asking) {
    while let Ok(mut ready) = asks.descriptor.readable().await {
        ready.clear_ready();
        let come = asks.asks.take().unwrap_or_else(|error| {
            warn!("SYNs cannot be read: {error}");
            Vec::new()
        });
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
    let ended = match reach(context, canonical(ask.from), arrival).await {
        Ok(reached) => match strict.admit(ask).await {
            Some(local) => join(context, local, reached).await,
            None => Ended::Reset,
        },
        Err(Reason::Refused) => {
            strict.refuse(ask);
            Ended::Refused(Reason::Refused)
        }
        Err(reason) => {
            // Its SYN comes again, until the application gives up.
            context.hooks.expect(ask.from, arrival);
            strict.forget(ask);
            Ended::Refused(reason)
        }
    };
    led::leave(context, place, &ended);
}

/// A server that was reached. It is reset if nothing becomes of it.
enum Reached {
    Carried(Box<Opened>, Arc<Carrier>),
    InPlace(TcpStream),
}

/// A stream by which the server was reached.
struct Opened {
    open: Open,
    stream: Option<Stream>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.stream.iter_mut().for_each(Stream::reset);
    }
}

/// By a carrier, and where there is none, or the peer's broker does not carry it, in place.
async fn reach(context: &Context, from: SocketAddr, arrival: Arrival) -> Result<Reached, Reason> {
    let server = arrival.far;
    if let Some(carrier) = context.carriers.to(server.ip()) {
        let client = SocketAddr::new(arrival.near, from.port());
        let mut opened = Opened {
            open: Open { id: context.table.next_id(), server, client },
            stream: led::stream(&carrier).await,
        };
        if let Some(stream) = &mut opened.stream {
            match stream.ask(&Frame::Open(opened.open)).await {
                Ok(Frame::Accepted { received: 0 }) => {
                    return Ok(Reached::Carried(Box::new(opened), carrier));
                }
                Ok(Frame::Refused(reason)) if !reason.is_brokers() => return Err(reason),
                // Nothing of the application's has gone anywhere.
                other => debug!(%server, "not carried: {other:?}"),
            }
        }
    }
    match led::connect(context, server).await {
        Ok(remote) => Ok(Reached::InPlace(remote)),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Err(Reason::Refused),
        Err(_) => Err(Reason::Unreachable),
    }
}

async fn join(context: &Context, mut local: TcpStream, reached: Reached) -> Ended {
    match reached {
        Reached::InPlace(mut remote) => led::join(&mut local, &mut remote).await,
        Reached::Carried(mut opened, carrier) => {
            let Some(stream) = opened.stream.take() else { return Ended::Reset };
            let _counted = context.carriers.count(&carrier.far.peer);
            Pump::accepted(context, &local, stream, (opened.open, carrier.clone())).run().await
        }
    }
}

/// Deprecated in favour of an unsafe function, for types whose descriptor may change or close while they are registered: this one does not.
#[allow(deprecated)]
fn register(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(descriptor, Interest::READABLE)
}
