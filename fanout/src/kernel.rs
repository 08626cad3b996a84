//! The fan-out of RTP over UDP: at TC ingress, from one sender to many receivers, before any process wakes.
//!
//! 1. [`Fanout::load`] with all streams, then [`Fanout::attach`] to each interface that their packets arrive on.
//!    [`Fanout::open`] and [`Fanout::close`] while it runs.
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
mod rows;
mod stream;
mod trace;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use libbpf_rs::{MapCore as _, MapFlags, MapHandle};

pub use config::{Config, Ssrc, StreamConfig};
pub use outcome::{Counters, FurtherRun, LegOutcome, Outcome};
pub use stream::{Cap, Leg, Media, Report, Stream};
pub use trace::{Event, Tracing, What};

use millrace_kernel::Error;
use millrace_kernel::clock;
use millrace_kernel::fan::{self, Attachments};
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{Loaded, embedded, write};
use millrace_kernel::stack;
use millrace_kernel::tc::Mechanism;
use rows::{Row, Rows};
use stream::Tables;

const OBJECT: &str = "fanout.bpf.o";

/// The program, loaded. It fans out from [`attach`](Self::attach) on and until it is dropped.
pub struct Fanout {
    attachments: Attachments,
    object: Mutex<Loaded>,
    streams: Vec<Arc<Stream>>,
    tables: Arc<Tables>,
    places: MapHandle,
    rows: Mutex<Rows>,
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
        let tables = Arc::new(Tables { streams: object.table("streams")?, legs: object.table("legs")? });
        let [.., (_, streams), (_, legs), _] = config.map_sizes();
        let mut fanout = Self {
            attachments: Attachments::default(),
            streams: Vec::new(),
            tables,
            places: object.handle("places")?,
            rows: Mutex::new(Rows::new(streams, legs)),
            trace: trace::Trace::new(&mut object)?,
            object: Mutex::new(object),
            mechanism: config.mechanism,
        };
        fanout.streams = config.streams.iter().map(|stream| fanout.open(stream)).collect::<Result<_, _>>()?;
        Ok(fanout)
    }

    /// One more stream, or another one in the place of one that arrives there: from then on what comes is the new one's. May wait for
    /// a second, where only what was closed a moment ago is free.
    pub fn open(&self, config: &StreamConfig) -> Result<Arc<Stream>, Error> {
        config.check()?;
        let row = self.take_row(config.max_receivers)?;
        let stream = Arc::new(Stream::new(self.tables.clone(), row, config));
        self.place(&stream)?;
        Ok(stream)
    }

    /// Has what arrives where it does be this stream's: again, where another one was opened there.
    pub fn place(&self, stream: &Stream) -> Result<(), Error> {
        let mut places = stream.places().iter();
        places.try_for_each(|at| {
            write(&self.places, "places", place(*at).as_bytes(), &stream.index().to_ne_bytes())
        })
    }

    /// Nothing is fanned out of it any more. Whoever has a [`Leg`] of it drops it first.
    pub fn close(&self, stream: &Stream) -> Result<(), Error> {
        for at in stream.places() {
            let key = place(*at);
            let found = self.places.lookup(key.as_bytes(), MapFlags::ANY);
            let found = found.map_err(|source| Error::Read { what: "places", source })?;
            if found.is_some_and(|index| index == stream.index().to_ne_bytes()) {
                self.places
                    .delete(key.as_bytes())
                    .map_err(|source| Error::Write { what: "places", source })?;
            }
        }
        self.rows().give_back(stream.index(), now());
        Ok(())
    }

    fn take_row(&self, receivers: u32) -> Result<Row, Error> {
        loop {
            let taken = self.rows().take(receivers, now());
            match taken {
                Ok(row) => return Ok(row),
                Err(Some(wait)) => std::thread::sleep(wait),
                Err(None) => return Err(Error::Full { what: "streams and their receivers" }),
            }
        }
    }

    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fans out what arrives on an Ethernet interface of the calling thread's network namespace, with its routes.
    ///
    /// Switches the forwarding flag of the loopback interface on, as [`Relay::attach`](millrace_relay_kernel::program::Relay::attach) does.
    pub fn attach(&self, ifindex: i32) -> Result<Mechanism, Error> {
        let ethernet = stack::has_ethernet(ifindex)
            .map_err(|source| Error::Read { what: "the interfaces", source: source.into() })?;
        if !ethernet {
            return Err(Error::Bare { ifindex });
        }
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

    /// In the order of [`Config::streams`]; without those that were opened later.
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

fn now() -> Duration {
    Duration::from_nanos(clock::monotonic_ns())
}

fn place(at: SocketAddr) -> intf::At {
    let (family, address) = fan::bytes(at.ip());
    intf::At { address, port: at.port().to_be_bytes(), family, pad: 0 }
}

#[cfg(test)]
mod tests;
