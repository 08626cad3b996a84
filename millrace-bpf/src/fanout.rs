//! The fan-out of RTP over UDP: at TC ingress, from one sender to many receivers, before any process wakes.
//!
//! 1. [`Fanout::load`] with all streams, then [`Fanout::attach`] to each interface that their packets arrive on.
//! 2. [`Stream::add`] for each receiver, once it has proved its address, with the end of its lease, which [`Leg::renew`] puts
//!    off. The program itself looks at the time: whoever is not renewed is sent nothing, whatever became of this process.
//! 3. What the program takes of a sender's packets it drops behind the copies: it is done with. What it leaves to userspace
//!    (super-packets, odd headers, everything while it is not attached) arrives at a socket that is bound to the stream's
//!    address, and userspace fans it out, by [`Leg::admit`] for the same caps.
//!
//! Receivers of a stream lie in a row of one array: what the program reads of one is valid if its epoch is the same before
//! and after, so an entry is handed out again at once, and nobody waits for runs of the program.

mod config;
mod intf;
mod outcome;
mod stream;
mod trace;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use config::{Config, Ssrc, StreamConfig};
pub use outcome::{Counters, FurtherRun, LegOutcome, Outcome};
pub use stream::{Cap, Leg, Media, Report, Stream};
pub use trace::{Event, Tracing, What};

use crate::Error;
use crate::fan::{self, Attachments};
use crate::intf::Plain;
use crate::object::{Loaded, embedded, write};
use crate::tc::Mechanism;
use stream::Tables;

const OBJECT: &str = "fanout.bpf.o";

/// The program, loaded. It fans out from [`attach`](Self::attach) on and until it is dropped.
pub struct Fanout {
    attachments: Attachments,
    object: Mutex<Loaded>,
    streams: Vec<Arc<Stream>>,
    trace: trace::Trace,
    mechanism: Option<Mechanism>,
}

impl Fanout {
    pub fn load(config: &Config) -> Result<Self, Error> {
        config.check()?;
        let mut open = embedded!("fanout.bpf.o").open()?;
        open.configure(&intf::Config {
            max_copies_per_run: config.max_copies_per_run,
            max_runs: config.max_runs,
        })?;
        for (map, entries) in config.map_sizes() {
            open.map(map)?
                .set_max_entries(entries.max(1))
                .map_err(|source| Error::Open { object: OBJECT, source })?;
        }
        let mut object = open.load()?;
        let streams = streams(&mut object, config)?;
        let trace = trace::Trace::new(&mut object)?;
        let mechanism = config.mechanism;
        Ok(Self {
            attachments: Attachments::default(),
            object: Mutex::new(object),
            streams,
            trace,
            mechanism,
        })
    }

    /// Fans out what arrives on an Ethernet interface of the calling thread's network namespace, with its routes.
    ///
    /// Switches the forwarding flag of the loopback interface on, as [`Relay::attach`](crate::relay::Relay::attach) does.
    pub fn attach(&self, ifindex: i32) -> Result<Mechanism, Error> {
        let object = self.object();
        self.attachments.attach(&object.program("fanout_ingress")?, ifindex, self.mechanism)
    }

    /// Whether it is attached to an interface: somebody else may have detached it, and interfaces come and go.
    pub fn is_attached(&self, ifindex: i32) -> bool {
        self.attachments.has(ifindex)
    }

    /// Detaches from every interface.
    pub fn detach(&self) {
        self.attachments.clear();
    }

    /// In the order of [`Config::streams`].
    pub fn streams(&self) -> &[Arc<Stream>] {
        &self.streams
    }

    /// Has the program report on single packets, until told otherwise; `None`: no more.
    pub fn set_tracing(&self, tracing: Option<Tracing>) {
        self.trace.set(tracing);
    }

    /// Hands over the events since the last call. Returns how many were lost for want of room since then. No system call.
    pub fn drain_events(&self, read: impl FnMut(Event)) -> u64 {
        self.trace.drain(read)
    }

    pub fn counters(&self) -> Result<Counters, Error> {
        let raw = self.object().counters("outcomes")?;
        Counters::new(&raw).ok_or(Error::Missing { object: OBJECT, what: "counter for each outcome" })
    }

    fn object(&self) -> MutexGuard<'_, Loaded> {
        self.object.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn streams(object: &mut Loaded, config: &Config) -> Result<Vec<Arc<Stream>>, Error> {
    let tables = Arc::new(Tables { streams: object.table("streams")?, legs: object.table("legs")? });
    let places = object.handle("places")?;
    let (mut streams, mut first) = (Vec::new(), 0);
    for (index, stream) in (0..).zip(&config.streams) {
        streams.push(Arc::new(Stream::new(tables.clone(), index, first, stream)));
        first += stream.max_receivers;
        let ports = [Some(stream.listen.port()), stream.listen_rtcp_port];
        for port in ports.into_iter().flatten() {
            let at = place(SocketAddr::new(stream.listen.ip(), port));
            write(&places, "places", at.as_bytes(), &index.to_ne_bytes())?;
        }
    }
    Ok(streams)
}

fn place(at: SocketAddr) -> intf::At {
    let (family, address) = fan::bytes(at.ip());
    intf::At { address, port: at.port().to_be_bytes(), family, pad: 0 }
}

#[cfg(test)]
mod tests;
