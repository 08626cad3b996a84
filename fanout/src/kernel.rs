//! Fans out RTP over UDP at TC ingress, from one sender to many receivers, before any process wakes up.
//!
//! [`Fanout::load`] loads the program with all streams. [`Fanout::attach`] is called for each interface that their
//! packets arrive on. [`Fanout::open`] and [`Fanout::close`] change streams while the program runs.
//!
//! [`SenderStream::add`] is called for each receiver that has proved its address, with the end of its lease.
//! [`ReceiverCopy::renew`] extends the lease. The program checks the lease itself, so a receiver whose lease is not
//! renewed is sent nothing, even if this process has died.
//!
//! The program drops the sender's packets after it has copied them. Other packets (super-packets, unusual headers,
//! everything while the program is not attached) arrive at a socket that is bound to the stream's address. Userspace
//! fans them out, and calls [`ReceiverCopy::admit`], which applies the same rate limit to each receiver.
//!
//! The receivers of a stream are consecutive entries of one array. The program has read a consistent entry if the epoch
//! is the same before and after. An entry can therefore be reused at once, without waiting for runs of the program.

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
pub use outcome::{CopyOutcome, FanoutCounters, FurtherRun, Outcome};
pub use stream::{Cap, FanoutMedia, ReceiverCopy, SenderReport, SenderStream};
pub use trace::{CopyEvent, CopyEventKind, FanoutTraceSelection};

use millrace_kernel::Error;
use millrace_kernel::clock;
use millrace_kernel::fan::{self, Attachments};
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{LoadedObject, embedded, write};
use millrace_kernel::stack;
use millrace_kernel::tc::{KernelHook, Mechanism};
use rows::{StreamRow, StreamRows};
use stream::Tables;

const OBJECT: &str = "fanout.bpf.o";

/// The loaded BPF program. It fans out packets from the first [`attach`](Self::attach) until it is dropped.
pub struct Fanout {
    attachments: Attachments,
    object: Mutex<LoadedObject>,
    streams: Vec<Arc<SenderStream>>,
    tables: Arc<Tables>,
    places: MapHandle,
    rows: Mutex<StreamRows>,
    trace: trace::FanoutTraceRing,
    mechanism: Option<Mechanism>,
}

impl Fanout {
    /// Loads the program with its streams. Needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN.
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
        let tables =
            Arc::new(Tables { streams: object.table("streams")?, receivers: object.table("receivers")? });
        let [.., (_, streams), (_, receivers), _] = config.map_sizes();
        let mut fanout = Self {
            attachments: Attachments::default(),
            streams: Vec::new(),
            tables,
            places: object.handle("places")?,
            rows: Mutex::new(StreamRows::new(streams, receivers)),
            trace: trace::FanoutTraceRing::new(&mut object)?,
            object: Mutex::new(object),
            mechanism: config.mechanism,
        };
        fanout.streams = config.streams.iter().map(|stream| fanout.open(stream)).collect::<Result<_, _>>()?;
        Ok(fanout)
    }

    /// Opens a stream. If another stream has the same address, packets belong to the new one from then on. The call
    /// may wait for up to a second if the only free table entries belonged to streams that were just closed.
    pub fn open(&self, config: &StreamConfig) -> Result<Arc<SenderStream>, Error> {
        config.check()?;
        let row = self.take_row(config.max_receivers)?;
        let stream = Arc::new(SenderStream::new(self.tables.clone(), row, config));
        self.place(&stream)?;
        Ok(stream)
    }

    /// Directs packets for the stream's address to this stream again, after another stream was opened at this address.
    pub fn place(&self, stream: &SenderStream) -> Result<(), Error> {
        let mut places = stream.places().iter();
        places.try_for_each(|at| {
            write(&self.places, "places", place(*at).as_bytes(), &stream.index().to_ne_bytes())
        })
    }

    /// Stops fanning out a stream. All [`ReceiverCopy`]s of the stream have to be dropped before.
    pub fn close(&self, stream: &SenderStream) -> Result<(), Error> {
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

    fn take_row(&self, receivers: u32) -> Result<StreamRow, Error> {
        loop {
            let taken = self.rows().take(receivers, now());
            match taken {
                Ok(row) => return Ok(row),
                Err(Some(wait)) => std::thread::sleep(wait),
                Err(None) => return Err(Error::Full { what: "streams and their receivers" }),
            }
        }
    }

    fn rows(&self) -> MutexGuard<'_, StreamRows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fans out the packets that arrive on an Ethernet interface of the calling thread's network namespace, with its
    /// routes.
    ///
    /// The call switches on the forwarding flag of the loopback interface, as `RelayProgram::attach` of
    /// `millrace-relay-kernel` does.
    pub fn attach(&self, ifindex: i32) -> Result<Mechanism, Error> {
        let ethernet = stack::has_ethernet(ifindex)
            .map_err(|source| Error::Read { what: "the interfaces", source: source.into() })?;
        if !ethernet {
            return Err(Error::Bare { ifindex });
        }
        let object = self.object();
        self.attachments.attach(
            &object.program("fanout_ingress")?,
            ifindex,
            KernelHook::Ingress,
            self.mechanism,
        )
    }

    /// Reports whether the program is attached to an interface. Another program may have detached it, and the interface
    /// may be gone.
    pub fn is_attached(&self, ifindex: i32) -> bool {
        self.attachments.has(ifindex)
    }

    /// Detaches the program from every interface.
    pub fn detach(&self) {
        self.attachments.clear();
    }

    /// Returns the streams in the order of [`Config::streams`], without those that were opened later.
    pub fn streams(&self) -> &[Arc<SenderStream>] {
        &self.streams
    }

    /// Makes the program write events about the packets that the filter selects, until the filter is changed by another
    /// call; `None` stops the events.
    pub fn set_tracing(&self, tracing: Option<FanoutTraceSelection>) {
        self.trace.set(tracing);
    }

    /// Passes the events since the last call to `read`, without a system call. Returns how many events were lost since
    /// then because the ring was full.
    pub fn drain_events(&self, read: impl FnMut(CopyEvent)) -> u64 {
        self.trace.drain(read)
    }

    /// Returns how many packets and copies were sent or dropped since the program was loaded, by the reason.
    pub fn counters(&self) -> Result<FanoutCounters, Error> {
        let raw = self.object().counters("outcomes")?;
        FanoutCounters::new(&raw).ok_or(Error::Missing { object: OBJECT, what: "counter for each outcome" })
    }

    fn object(&self) -> MutexGuard<'_, LoadedObject> {
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
