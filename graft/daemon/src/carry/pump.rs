//! One connection: bytes between an application's socket and a stream of a carrier, both ways, in one task.
//!
//! It holds at most a window of bytes in each direction, and always reads the stream on, since confirmations of one direction
//! come behind the bytes of the other. When the carrier is gone it waits for another, and goes on where the other end says.

use std::{io, io::IoSlice, sync::Arc, sync::atomic::Ordering::Relaxed, time::Duration};

use bytes::{Bytes, BytesMut};
use millrace_graft_proto::carry::{
    frame::{Frame, Open, Reason, head_of_data},
    ledger::{Incoming, Outgoing, Untrue},
};
use tokio::{
    io::Interest,
    net::TcpStream,
    sync::mpsc,
    time::{Instant, sleep_until, timeout, timeout_at},
};

use super::{
    broken::Broken,
    carrier::Carrier,
    context::Context,
    meter::Meter,
    silence::{Came, Due, Silence},
    stream::{LEAD_LEAST, Stream},
    table::Resumption,
    watch::Seen,
};

/// For another carrier. Who waits longer has given up.
const HOLD: Duration = Duration::from_secs(30);
/// Of what is read or sent at once.
const PIECE_LEAST: usize = 2 << 10;
const PIECE_MOST: usize = 64 << 10;
const BATCH: usize = 128 << 10;
/// Of what has come, that are given to the application at once.
const PIECES_MOST: usize = 64;
/// Delivered bytes that are confirmed at once; fewer are a moment later, together.
const WORTH: u64 = 64 << 10;
const MOMENT: Duration = Duration::from_millis(5);

/// What became of a connection.
#[derive(Debug)]
pub enum Ended {
    /// Both applications have said all.
    Done,
    /// This end's application has reset it.
    Reset,
    /// The other's has.
    PeerReset,
    /// It never was one.
    Refused(Reason),
    /// No carrier came for it.
    Lost,
    /// The other broker says what cannot be.
    Malformed,
}

impl Ended {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Reset => "reset",
            Self::PeerReset => "peer-reset",
            Self::Refused(reason) => reason.name(),
            Self::Lost => "lost",
            Self::Malformed => "malformed",
        }
    }
}

impl From<Untrue> for Ended {
    fn from(_: Untrue) -> Self {
        Self::Malformed
    }
}

/// How another carrier is had.
pub enum Role {
    /// By this end, which has the client.
    Client { open: Open, carrier: Arc<Carrier> },
    /// By the other.
    Server { streams: mpsc::Receiver<Resumption> },
}

pub struct Pump<'a> {
    context: &'a Context,
    local: &'a TcpStream,
    stream: Stream,
    role: Role,
    pub out: Outgoing,
    inn: Incoming,
    /// Whether the server was reached.
    is_accepted: bool,
    /// When a delivery is confirmed that alone is not worth it.
    confirm_at: Option<Instant>,
    /// Until when something has to come, and what had come when that was set.
    answer_by: Option<(Instant, u64)>,
    /// Of a pool's connection, while it carries this one.
    silence: Option<Silence>,
    came: Came,
    heard_when_asked: u64,
    piece: usize,
    times: Times,
    meter: Meter,
}

/// What of its time was the carrier's.
struct Times {
    began: Instant,
    busy: Duration,
    /// Since when something waits to be confirmed.
    busy_since: Option<Instant>,
    heard: Option<Instant>,
}

impl Times {
    fn new() -> Self {
        Self { began: Instant::now(), busy: Duration::ZERO, busy_since: None, heard: None }
    }

    fn note_unconfirmed(&mut self, is_some: bool) {
        match (self.busy_since, is_some) {
            (None, true) => self.busy_since = Some(Instant::now()),
            (Some(since), false) => {
                self.busy += since.elapsed();
                self.busy_since = None;
            }
            _ => {}
        }
    }
}

impl Drop for Pump<'_> {
    fn drop(&mut self) {
        self.context.table.kept.fetch_sub(self.out.unconfirmed(), Relaxed);
        // What was refused never was one.
        if self.is_accepted {
            self.meter.end();
        }
    }
}

impl<'a> Pump<'a> {
    pub fn new(
        context: &'a Context,
        local: &'a TcpStream,
        mut stream: Stream,
        (role, meter): (Role, Meter),
    ) -> Self {
        let mut answer_by = None;
        match &role {
            Role::Client { open, carrier } => {
                stream.sender.push(&Frame::Open(*open));
                answer_by = Some((Instant::now() + carrier.patience(), carrier.heard()));
            }
            Role::Server { .. } => stream.sender.push(&Frame::Accepted { received: 0 }),
        }
        let is_accepted = matches!(role, Role::Server { .. });
        let mut pump = Self::with(context, local, stream, (role, meter), is_accepted);
        pump.answer_by = answer_by;
        pump
    }

    fn with(
        context: &'a Context,
        local: &'a TcpStream,
        stream: Stream,
        (role, meter): (Role, Meter),
        is_accepted: bool,
    ) -> Self {
        if meter.yields() {
            stream.yield_to_others();
        }
        Self {
            context,
            local,
            stream,
            role,
            out: Outgoing::default(),
            inn: Incoming::default(),
            is_accepted,
            confirm_at: None,
            answer_by: None,
            silence: None,
            came: Came::default(),
            heard_when_asked: 0,
            piece: PIECE_LEAST,
            times: Times::new(),
            meter,
        }
    }

    /// At the client's end, of a stream by which the server was reached already.
    pub fn accepted(
        context: &'a Context,
        local: &'a TcpStream,
        stream: Stream,
        (open, carrier, meter): (Open, Arc<Carrier>, Meter),
    ) -> Self {
        Self::with(context, local, stream, (Role::Client { open, carrier }, meter), true)
    }

    /// Until it is over, on as many carriers as that takes. What was received is known then.
    pub async fn run(&mut self) -> Ended {
        loop {
            let ended = match self.go_on().await {
                Ok(()) => {
                    self.stream.release();
                    return self.finish();
                }
                Err(Stop::Ended(ended)) => ended,
                Err(Stop::Broken(Broken::Lost)) => {
                    self.stream.leave();
                    match self.resume().await {
                        Ok(true) => {
                            self.context.table.resumed.fetch_add(1, Relaxed);
                            continue;
                        }
                        Ok(false) => return self.finish(),
                        Err(ended) => ended,
                    }
                }
                Err(Stop::Broken(Broken::Reset)) => Ended::PeerReset,
                Err(Stop::Broken(_)) => Ended::Malformed,
            };
            self.stream.reset();
            return ended;
        }
    }

    /// Bytes that have come, with the end.
    pub fn received(&self) -> u64 {
        self.inn.received()
    }

    /// How it went until now.
    pub fn seen(&self) -> Seen {
        let since = self.times.busy_since.map(|since| since.elapsed());
        Seen {
            sent: self.out.confirmed(),
            received: self.inn.received(),
            busy: self.times.busy + since.unwrap_or_default(),
            heard: self.times.heard.map(|heard| heard - self.times.began),
            turns: self.meter.turns(),
        }
    }

    fn finish(&mut self) -> Ended {
        let _ = socket2::SockRef::from(self.local).set_linger(None);
        Ended::Done
    }

    /// By both ends, and confirmed.
    fn is_all_said(&self) -> bool {
        self.out.is_done() && self.inn.is_done()
    }

    fn is_done(&self) -> bool {
        self.is_all_said() && self.stream.sender.is_empty()
    }

    async fn go_on(&mut self) -> Result<(), Stop> {
        self.silence = None;
        loop {
            // Some may have come with the first frame of the stream.
            self.hear()?;
            self.note_silence();
            self.fill();
            if self.is_done() {
                return Ok(());
            }
            let room = self.out.room(self.context.table.window());
            let (sends, waits) = (!self.stream.sender.is_empty(), self.inn.front().is_some());
            let is_all_said = self.is_all_said();
            let Stream { sender, receiver, .. } = &mut self.stream;
            tokio::select! {
                ready = self.local.readable(), if room > 0 => {
                    ready?;
                    self.read(room)?;
                }
                ready = self.local.ready(Interest::ERROR), if room == 0 => {
                    ready?;
                    self.check()?;
                }
                ready = self.local.writable(), if waits => {
                    ready?;
                    self.deliver()?;
                }
                sent = sender.send(), if sends => {
                    sent?;
                    self.silence.iter_mut().for_each(Silence::said);
                }
                received = receiver.receive(), if !is_all_said => received?,
                () = until(self.confirm_at) => self.confirm(1),
                () = until(self.answer_by.map(|(at, _)| at)) => self.suspect(),
                () = until(self.silence.as_ref().map(Silence::at)) => self.ask().await?,
                called = called(&mut self.role) => match called {
                    Some(resumption) => self.switch(resumption)?,
                    None => return Err(Broken::Lost.into()),
                },
            }
        }
    }

    /// What is to go next, if nothing is.
    fn fill(&mut self) {
        if !self.stream.sender.is_empty() {
            return;
        }
        let (mut filled, mut lead) = (0, None);
        while filled < BATCH && !self.is_far_ahead(&mut lead) {
            match self.out.give(PIECE_MOST) {
                Some(Frame::Data(bytes)) => {
                    filled += bytes.len();
                    self.stream.sender.push_bytes(head_of_data(bytes.len()));
                    self.stream.sender.push_bytes(bytes);
                }
                Some(frame) => self.stream.sender.push(&frame),
                None => break,
            }
        }
        if filled > 0 {
            self.confirm(1);
        }
    }

    /// What is confirmed then wakes it again. `lead`: what may be ahead, looked up once, and only where it matters.
    fn is_far_ahead(&self, lead: &mut Option<u64>) -> bool {
        let ahead = self.out.ahead();
        ahead >= LEAD_LEAST && ahead >= *lead.get_or_insert_with(|| self.stream.sender.lead())
    }

    fn confirm(&mut self, worth: u64) {
        if let Some(frame) = self.inn.confirmation(worth) {
            self.stream.sender.push(&frame);
        }
        if worth <= 1 {
            self.confirm_at = None;
        }
    }

    /// From the application.
    fn read(&mut self, room: u64) -> Result<(), Stop> {
        let most = usize::try_from(room).unwrap_or(PIECE_MOST).min(self.piece);
        let mut buffer = BytesMut::with_capacity(most);
        match self.local.try_read_buf(&mut buffer) {
            Ok(0) => self.out.end(),
            Ok(length) => {
                self.context.table.kept.fetch_add(length as u64, Relaxed);
                self.meter.note(true, &buffer);
                self.out.take(fitted(buffer));
                self.times.note_unconfirmed(true);
                let is_full = length == self.piece;
                self.piece =
                    if is_full { (2 * length).min(PIECE_MOST) } else { PIECE_LEAST.max(self.piece / 2) };
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// An application that has reset its socket is noticed also while nothing is read from it.
    fn check(&self) -> Result<(), Stop> {
        match self.local.take_error()? {
            Some(error) => Err(error.into()),
            None => {
                let nothing = || Err::<(), _>(io::ErrorKind::WouldBlock.into());
                let _ = self.local.try_io(Interest::ERROR, nothing);
                Ok(())
            }
        }
    }

    /// To the application.
    fn deliver(&mut self) -> Result<(), Stop> {
        while self.inn.front().is_some() {
            let fronts = self.inn.fronts().take(PIECES_MOST);
            let pieces: Vec<_> = fronts.map(|it| IoSlice::new(it)).collect();
            match self.local.try_write_vectored(&pieces) {
                Ok(length) => {
                    self.inn.deliver(length);
                    self.context.table.received.fetch_add(length as u64, Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        self.end_if_due();
        self.confirm(WORTH);
        if self.confirm_at.is_none() {
            self.confirm_at = Some(Instant::now() + MOMENT);
        }
        Ok(())
    }

    fn end_if_due(&mut self) {
        if self.inn.end_is_due() {
            // An application that is gone already is noticed otherwise.
            let _ = socket2::SockRef::from(self.local).shutdown(std::net::Shutdown::Write);
            self.inn.deliver_end();
            self.confirm(1);
        }
    }

    /// Frames that have come. Behind the last of this connection there may be the first of the next one by the same stream.
    fn hear(&mut self) -> Result<(), Stop> {
        while !self.is_all_said() {
            let Some(frame) = self.stream.receiver.frame()? else { break };
            self.answer_by = None;
            self.came.hear(&frame);
            match frame {
                Frame::Ask if self.stream.asked.is_some() => self.answer(),
                Frame::Answer if self.stream.asked.is_some() => {}
                Frame::Data(bytes) if self.is_accepted => {
                    self.times.heard = Some(Instant::now());
                    self.meter.note(false, &bytes);
                    self.inn.receive(bytes)?;
                }
                Frame::End if self.is_accepted => self.inn.end()?,
                Frame::Confirm { delivered } => self.confirmed(delivered)?,
                Frame::Accepted { received: 0 } if !self.is_accepted => self.is_accepted = true,
                Frame::Refused(reason) if !self.is_accepted => return Err(Ended::Refused(reason).into()),
                _ => return Err(Ended::Malformed.into()),
            }
        }
        self.end_if_due();
        Ok(())
    }

    fn confirmed(&mut self, delivered: u64) -> Result<(), Untrue> {
        let before = self.out.confirmed();
        self.out.confirm(delivered)?;
        let more = self.out.confirmed() - before;
        self.context.table.sent.fetch_add(more, Relaxed);
        self.context.table.kept.fetch_sub(more, Relaxed);
        self.times.note_unconfirmed(self.out.unconfirmed() > 0);
        Ok(())
    }

    /// The time for an answer is over. If nothing at all has come by this carrier, it carries no more connections for now.
    fn suspect(&mut self) {
        let Some((_, heard)) = self.answer_by.take() else { return };
        if let Role::Client { carrier, .. } = &self.role
            && carrier.heard() == heard
        {
            self.context.carriers.suspect(carrier);
        }
    }

    fn note_silence(&mut self) {
        let Some(asked) = self.stream.asked else { return };
        let (heard, now) = (self.stream.heard(), Instant::now());
        let came = std::mem::take(&mut self.came);
        match &mut self.silence {
            Some(silence) => silence.note(heard, &came, now),
            None => self.silence = Some(Silence::new(self.patience(asked), heard, now)),
        }
    }

    /// Where another carrier may go on at once, it costs little to leave one by which nothing comes at all. If only this connection is silent, its
    /// answer may be in a long queue behind others.
    fn patience(&self, asked: Duration) -> Duration {
        let Role::Client { carrier, .. } = &self.role else { return asked };
        let is_asked = self.silence.as_ref().is_some_and(Silence::is_asked);
        let is_silent = !is_asked || carrier.heard() == self.heard_when_asked;
        match is_silent && self.context.carriers.has_several(&carrier.far.peer) {
            true => carrier.patience().min(asked),
            false => asked,
        }
    }

    /// Once, however often it is asked while nothing goes.
    fn answer(&mut self) {
        if self.stream.sender.is_empty() {
            self.stream.sender.push(&Frame::Answer);
        }
    }

    /// Nothing has come for a while.
    async fn ask(&mut self) -> Result<(), Stop> {
        let patience = self.stream.asked.map(|asked| self.patience(asked));
        let (Some(silence), Some(patience)) = (&mut self.silence, patience) else { return Ok(()) };
        silence.set_patience(patience);
        match silence.due(Instant::now()) {
            Due::Nothing => {}
            Due::Ask => {
                self.stream.sender.push(&Frame::Ask);
                if let Role::Client { carrier, .. } = &self.role {
                    self.heard_when_asked = carrier.heard();
                }
            }
            Due::Tell => self.stream.sender.push(&Frame::Answer),
            Due::Lost => {
                // After a time in which this process did not run there may be something.
                let received = timeout(Duration::ZERO, self.stream.receiver.receive()).await;
                if let Ok(received) = received {
                    return Ok(received?);
                }
                if let Role::Client { carrier, .. } = &self.role {
                    self.doubt(carrier, self.heard_when_asked);
                }
                return Err(Broken::Lost.into());
            }
        }
        Ok(())
    }

    /// Of a carrier by which nothing has come at all since it was asked, others are not to wait for the same.
    fn doubt(&self, carrier: &Arc<Carrier>, heard_when_asked: u64) {
        if carrier.heard() == heard_when_asked {
            carrier.doubt();
            self.context.carriers.suspect(carrier);
        }
    }

    /// Goes on with another stream, from what the other end has received.
    fn switch(&mut self, (stream, received): Resumption) -> Result<(), Stop> {
        self.stream.leave();
        self.take_up(stream);
        self.stream.sender.push(&Frame::Accepted { received: self.inn.received() });
        self.go_on_from(received)?;
        Ok(())
    }

    fn take_up(&mut self, stream: Stream) {
        if self.meter.yields() {
            stream.yield_to_others();
        }
        (self.stream, self.silence) = (stream, None);
    }

    fn go_on_from(&mut self, received: u64) -> Result<(), Untrue> {
        self.inn.resume();
        self.confirm_at = Some(Instant::now());
        self.out.rewind(received)
    }

    /// The carrier is gone. Returns whether it goes on; if not, there is nothing left to do.
    async fn resume(&mut self) -> Result<bool, Ended> {
        let by = Instant::now() + HOLD;
        if let Role::Server { streams } = &mut self.role {
            let resumption = timeout_at(by, streams.recv()).await.ok().flatten().ok_or(Ended::Lost)?;
            self.take_up(resumption.0);
            self.stream.sender.push(&Frame::Accepted { received: self.inn.received() });
            self.go_on_from(resumption.1)?;
            return Ok(true);
        }
        timeout_at(by, self.resume_by_client()).await.map_err(|_| Ended::Lost)?
    }

    async fn resume_by_client(&mut self) -> Result<bool, Ended> {
        loop {
            let Role::Client { open, carrier } = &mut self.role else { return Err(Ended::Lost) };
            let mut carriers = self.context.carriers.watch(&carrier.far.peer).ok_or(Ended::Lost)?;
            let fresh = carriers.wait_for(|it| it.as_ref().is_some_and(|it| !it.is_closed())).await;
            // The peer's entry in the settings is another now, or gone.
            let Some(fresh) = fresh.ok().and_then(|fresh| fresh.clone()) else { continue };
            let same_run = fresh.far.run == carrier.far.run;
            *carrier = fresh;
            let Ok(mut stream) = carrier.open().await else { continue };
            let (carrier, heard_when_asked) = (carrier.clone(), carrier.heard());
            let question = Frame::Resume { id: open.id, received: self.inn.received() };
            match stream.ask(&question).await {
                Ok(Frame::Accepted { received }) => {
                    self.is_accepted = true;
                    self.answer_by = None;
                    self.take_up(stream);
                    self.go_on_from(received)?;
                    return Ok(!self.is_all_said());
                }
                // It has never heard of it: nothing of it can have reached the server.
                Ok(Frame::Refused(Reason::Unknown)) if !self.is_accepted && same_run => {
                    let Ok(stream) = carrier.open().await else { continue };
                    let open = *open;
                    self.take_up(stream);
                    self.stream.sender.push(&Frame::Open(open));
                    self.out.rewind(0)?;
                    return Ok(true);
                }
                Ok(_) | Err(Broken::Malformed(_)) => return Err(Ended::Lost),
                Err(error) => {
                    stream.leave();
                    if matches!(error, Broken::TimedOut) {
                        self.doubt(&carrier, heard_when_asked);
                    }
                }
            }
        }
    }
}

/// No larger than what is in it, or not by much.
fn fitted(buffer: BytesMut) -> Bytes {
    match buffer.len() < buffer.capacity() / 2 {
        true => Bytes::copy_from_slice(&buffer),
        false => buffer.freeze(),
    }
}

enum Stop {
    Ended(Ended),
    Broken(Broken),
}

impl From<Ended> for Stop {
    fn from(ended: Ended) -> Self {
        Self::Ended(ended)
    }
}

impl From<Untrue> for Stop {
    fn from(untrue: Untrue) -> Self {
        Self::Ended(untrue.into())
    }
}

impl From<Broken> for Stop {
    fn from(broken: Broken) -> Self {
        Self::Broken(broken)
    }
}

/// Of this end's socket.
impl From<io::Error> for Stop {
    fn from(_: io::Error) -> Self {
        Self::Ended(Ended::Reset)
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// To another stream: at the server's end one that has come, at the client's one that is to be had.
async fn called(role: &mut Role) -> Option<Resumption> {
    match role {
        Role::Server { streams } => match streams.recv().await {
            Some(resumption) => Some(resumption),
            None => std::future::pending().await,
        },
        Role::Client { carrier, .. } => {
            carrier.left().await;
            None
        }
    }
}

/// What a broker's socket is, whoever is at its other end: it is reset when it is dropped before all was said, also when this process is killed; urgent
/// data comes in order with the rest.
pub fn prepare(socket: &TcpStream) -> io::Result<()> {
    let socket = socket2::SockRef::from(socket);
    socket.set_linger(Some(Duration::ZERO))?;
    socket.set_tcp_nodelay(true)?;
    socket.set_out_of_band_inline(true)
}
