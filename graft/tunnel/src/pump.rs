//! One tunnelled connection: moves bytes both ways between an application's socket and a stream of a carrier, in one
//! task.
//!
//! A pump holds at most a window of bytes in each direction. It always reads the stream, since frames that acknowledge
//! one direction's bytes (`Confirm`) are queued behind data of the other direction. When the carrier fails, the pump
//! waits for another one, and continues from the byte that the other host names.

use std::{io, io::IoSlice, sync::Arc, sync::atomic::Ordering::Relaxed, time::Duration};

use bytes::{Bytes, BytesMut};
use millrace_graft_proto::carry::{
    frame::{CarryFrame, CarryReason, OpenFrame, head_of_data},
    ledger::{IncomingBytes, OutgoingBytes, Untrue},
};
use tokio::{
    io::Interest,
    net::TcpStream,
    sync::mpsc,
    time::{Instant, sleep_until, timeout, timeout_at},
};

use super::{
    carrier::PeerCarrier,
    carrier_error::CarrierError,
    context::CarryContext,
    meter::TransferMeter,
    probe::AnswerDeadline,
    silence::{BytesArrived, CarrierSilence, SilenceAction},
    stream::{CarrierStream, LEAD_LEAST},
    table::Resumption,
    watch::TunnelRecord,
};

/// Time limit for getting another carrier after one has failed. The peer has the same limit, and gives up the
/// connection then.
const HOLD: Duration = Duration::from_secs(30);
/// Smallest and largest size of one read from the application, and size of one batch of frames (`BATCH`), in bytes.
const PIECE_LEAST: usize = 2 << 10;
const PIECE_MOST: usize = 64 << 10;
const BATCH: usize = 128 << 10;
/// Limit of received buffers that are written to the application's socket in one system call.
const PIECES_MOST: usize = 64;
/// Number of delivered bytes that are acknowledged (frame `Confirm`) immediately. Fewer bytes are acknowledged together
/// after `MOMENT`.
const WORTH: u64 = 64 << 10;
const MOMENT: Duration = Duration::from_millis(5);

/// How a tunnelled connection ended.
#[derive(Debug)]
pub enum PumpEnd {
    /// Both applications have sent everything.
    Done,
    /// The application on this host has reset the connection.
    Reset,
    /// The application on the other host has reset the connection.
    PeerReset,
    /// The server or the peer's tunnel broker refused the connection, so it was never established.
    Refused(CarryReason),
    /// The carrier was lost, and no other one was available in time.
    Lost,
    /// The other broker has sent a frame that the protocol forbids.
    Malformed,
}

impl PumpEnd {
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

impl From<Untrue> for PumpEnd {
    fn from(_: Untrue) -> Self {
        Self::Malformed
    }
}

/// Whether this host is the client's or the server's. It determines how the connection gets another stream when its
/// stream is lost.
pub enum PumpRole {
    /// The client is on this host. The pump itself opens a stream of another carrier.
    Client { open: OpenFrame, carrier: Arc<PeerCarrier> },
    /// The server is on this host. The client's host opens another stream, which arrives in the channel `streams`.
    Server { streams: mpsc::Receiver<Resumption> },
}

/// Moves the bytes of one connection. The client's host sends `Open`, and no data moves before the server's host
/// answers `Accepted`. When a stream is lost, each host tells the other on the next stream how many bytes it has
/// received. The sender continues with the byte after those.
pub struct TunnelPump<'a> {
    context: &'a CarryContext,
    local: &'a TcpStream,
    stream: CarrierStream,
    role: PumpRole,
    pub out: OutgoingBytes,
    inn: IncomingBytes,
    /// True once the peer's tunnel broker has reached the server.
    is_accepted: bool,
    /// Time at which delivered bytes are acknowledged (frame `Confirm`) although they are fewer than `WORTH`.
    confirm_at: Option<Instant>,
    answer_by: Option<AnswerDeadline>,
    /// State of silence detection on the pool's connection that carries this tunnelled connection. `None` on QUIC.
    silence: Option<CarrierSilence>,
    /// Kinds of frames that have arrived since `silence` was last updated.
    came: BytesArrived,
    /// The carrier's [`answers`](PeerCarrier::answers) when this host last sent the frame `Ask`.
    answers_when_asked: u64,
    /// Size of the next read from the application, in bytes.
    piece: usize,
    times: PumpTimes,
    meter: TransferMeter,
}

/// Time at which a connection began, and for how long in total it had sent bytes that were not acknowledged yet.
struct PumpTimes {
    began: Instant,
    busy: Duration,
    /// Time since which there are sent bytes that the other host has not acknowledged, or `None`.
    busy_since: Option<Instant>,
    /// Time at which data last arrived from the other host.
    heard: Option<Instant>,
}

impl PumpTimes {
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

impl Drop for TunnelPump<'_> {
    fn drop(&mut self) {
        self.context.table.kept.fetch_sub(self.out.unconfirmed(), Relaxed);
        // A refused connection was never established, so its byte counts do not matter for predictions.
        if self.is_accepted {
            self.meter.end();
        }
    }
}

impl<'a> TunnelPump<'a> {
    pub fn new(
        context: &'a CarryContext,
        local: &'a TcpStream,
        mut stream: CarrierStream,
        role: PumpRole,
        meter: TransferMeter,
    ) -> Self {
        let mut answer_by = None;
        match &role {
            PumpRole::Client { open, carrier } => {
                stream.sender.push(&CarryFrame::Open(*open));
                answer_by = Some(AnswerDeadline::new(carrier));
            }
            PumpRole::Server { .. } => stream.sender.push(&CarryFrame::Accepted { received: 0 }),
        }
        let is_accepted = matches!(role, PumpRole::Server { .. });
        let mut pump = Self::with(context, local, stream, role, meter, is_accepted);
        pump.answer_by = answer_by;
        pump
    }

    fn with(
        context: &'a CarryContext,
        local: &'a TcpStream,
        stream: CarrierStream,
        role: PumpRole,
        meter: TransferMeter,
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
            out: OutgoingBytes::default(),
            inn: IncomingBytes::default(),
            is_accepted,
            confirm_at: None,
            answer_by: None,
            silence: None,
            came: BytesArrived::default(),
            answers_when_asked: 0,
            piece: PIECE_LEAST,
            times: PumpTimes::new(),
            meter,
        }
    }

    /// Creates the pump on the client's host, with a stream on which the peer's tunnel broker has already connected to
    /// the server.
    pub fn accepted(
        context: &'a CarryContext,
        local: &'a TcpStream,
        stream: CarrierStream,
        open: OpenFrame,
        carrier: Arc<PeerCarrier>,
        meter: TransferMeter,
    ) -> Self {
        Self::with(context, local, stream, PumpRole::Client { open, carrier }, meter, true)
    }

    /// Runs the connection to its end, on one carrier after the other if carriers are lost.
    pub async fn run(&mut self) -> PumpEnd {
        loop {
            let ended = match self.go_on().await {
                Ok(()) => {
                    self.stream.release();
                    return self.finish();
                }
                Err(PumpStop::Ended(ended)) => ended,
                Err(PumpStop::Broken(CarrierError::Lost)) => {
                    // The stream's reset tells the other end that the connection continues on another stream.
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
                Err(PumpStop::Broken(CarrierError::Reset)) => PumpEnd::PeerReset,
                Err(PumpStop::Broken(_)) => PumpEnd::Malformed,
            };
            self.stream.reset();
            return ended;
        }
    }

    /// Returns the number of received bytes. The end of the data counts as one byte.
    pub fn received(&self) -> u64 {
        self.inn.received()
    }

    /// Returns the durations and byte counts of the connection so far.
    pub fn tunnel_record(&self) -> TunnelRecord {
        let since = self.times.busy_since.map(|since| since.elapsed());
        TunnelRecord {
            sent: self.out.confirmed(),
            received: self.inn.received(),
            busy: self.times.busy + since.unwrap_or_default(),
            heard: self.times.heard.map(|heard| heard - self.times.began),
            turns: self.meter.turns(),
        }
    }

    fn finish(&mut self) -> PumpEnd {
        let _ = socket2::SockRef::from(self.local).set_linger(None);
        PumpEnd::Done
    }

    /// Reports whether both applications have sent everything, and all of it was delivered and acknowledged.
    fn is_all_said(&self) -> bool {
        self.out.is_done() && self.inn.is_done()
    }

    fn is_done(&self) -> bool {
        self.is_all_said() && self.stream.sender.is_empty()
    }

    async fn go_on(&mut self) -> Result<(), PumpStop> {
        self.silence = None;
        loop {
            // Frames that have arrived together with the first frame of the stream are handled before the task waits.
            self.receive_frames()?;
            self.note_silence();
            self.fill();
            if self.is_done() {
                return Ok(());
            }
            let room = self.out.room(self.context.table.window());
            let sends = !self.stream.sender.is_empty();
            let waits = self.inn.front().is_some();
            let is_all_said = self.is_all_said();
            let CarrierStream { sender, receiver, .. } = &mut self.stream;
            tokio::select! {
                // Nothing is read while the window is full, so the application gets back-pressure.
                ready = self.local.readable(), if room > 0 => {
                    ready?;
                    self.read(room)?;
                }
                // The application's reset must be noticed even while nothing is read from it.
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
                    self.silence.iter_mut().for_each(CarrierSilence::on_sent);
                }
                // After this connection's last frame, frames of the next tunnelled connection may arrive on the same
                // pool connection, so reading stops.
                received = receiver.receive(), if !is_all_said => received?,
                () = wait_until(self.confirm_at) => self.confirm(1),
                () = wait_until(self.answer_by.as_ref().map(|deadline| deadline.at)) => self.suspect(),
                () = wait_until(self.silence.as_ref().map(CarrierSilence::next_deadline)) => self.ask().await?,
                called = called(&mut self.role) => match called {
                    Some(resumption) => self.switch(resumption)?,
                    None => return Err(CarrierError::Lost.into()),
                },
            }
        }
    }

    /// Queues the next frames if the sender's queue is empty.
    fn fill(&mut self) {
        if !self.stream.sender.is_empty() {
            return;
        }
        let mut filled = 0;
        let mut lead = None;
        // Only as much data is queued as the carrier can send soon, so that frames that acknowledge received bytes do
        // not wait behind it.
        while filled < BATCH && !self.is_far_ahead(&mut lead) {
            match self.out.give(PIECE_MOST) {
                Some(CarryFrame::Data(bytes)) => {
                    filled += bytes.len();
                    self.stream.sender.push_bytes(head_of_data(bytes.len()));
                    self.stream.sender.push_bytes(bytes);
                }
                Some(frame) => self.stream.sender.push(&frame),
                None => break,
            }
        }
        // An acknowledgement (`Confirm`) that is sent along with data costs hardly anything, so even a single received
        // byte is acknowledged.
        if filled > 0 {
            self.confirm(1);
        }
    }

    /// Reports whether too many sent bytes are not acknowledged yet. If so, the next frame `Confirm` wakes the task.
    /// `lead` caches the limit, which is looked up only once `LEAD_LEAST` bytes are unacknowledged.
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

    /// Reads from the application's socket.
    fn read(&mut self, room: u64) -> Result<(), PumpStop> {
        let most = usize::try_from(room).unwrap_or(PIECE_MOST).min(self.piece);
        let mut buffer = BytesMut::with_capacity(most);
        match self.local.try_read_buf(&mut buffer) {
            Ok(0) => self.out.end(),
            Ok(length) => {
                self.context.table.kept.fetch_add(length as u64, Relaxed);
                self.meter.note(true, &buffer);
                self.out.take(fitted(buffer));
                self.times.note_unconfirmed(true);
                // A read that fills its buffer doubles the size of the next one, and a smaller read halves it.
                let is_full = length == self.piece;
                self.piece =
                    if is_full { (2 * length).min(PIECE_MOST) } else { PIECE_LEAST.max(self.piece / 2) };
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Detects that the application has reset its socket, even while nothing is read from it.
    fn check(&self) -> Result<(), PumpStop> {
        match self.local.take_error()? {
            Some(error) => Err(error.into()),
            None => {
                // The result `WouldBlock` clears the socket's readiness flag, so that the task does not wake up for it
                // again.
                let nothing = || Err::<(), _>(io::ErrorKind::WouldBlock.into());
                let _ = self.local.try_io(Interest::ERROR, nothing);
                Ok(())
            }
        }
    }

    /// Writes received bytes to the application's socket.
    fn deliver(&mut self) -> Result<(), PumpStop> {
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
            // If the application has disconnected, the next read or write returns an error.
            let _ = socket2::SockRef::from(self.local).shutdown(std::net::Shutdown::Write);
            self.inn.deliver_end();
            self.confirm(1);
        }
    }

    /// Handles the frames that have arrived, up to the last one of this connection. The first frame of the stream's
    /// next connection may follow it.
    fn receive_frames(&mut self) -> Result<(), PumpStop> {
        while !self.is_all_said() {
            let Some(frame) = self.stream.receiver.frame()? else { break };
            // Any frame shows that the other end has received `Open` or `Resume`.
            self.answer_by = None;
            self.came.on_frame(&frame);
            match frame {
                CarryFrame::Ask if self.stream.asked.is_some() => self.answer(),
                CarryFrame::Answer if self.stream.asked.is_some() => {}
                CarryFrame::Data(bytes) if self.is_accepted => {
                    self.times.heard = Some(Instant::now());
                    self.meter.note(false, &bytes);
                    self.inn.receive(bytes)?;
                }
                CarryFrame::End if self.is_accepted => self.inn.end()?,
                CarryFrame::Confirm { delivered } => self.confirmed(delivered)?,
                CarryFrame::Accepted { received: 0 } if !self.is_accepted => self.is_accepted = true,
                CarryFrame::Refused(reason) if !self.is_accepted => {
                    return Err(PumpEnd::Refused(reason).into());
                }
                _ => return Err(PumpEnd::Malformed.into()),
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

    /// Marks the carrier as suspected to be dead if the peer's first answer is overdue and the peer has
    /// acknowledged nothing. A suspected carrier gets no new connections.
    fn suspect(&mut self) {
        if let PumpRole::Client { carrier, .. } = &self.role
            && self.answer_by.as_mut().is_some_and(|deadline| deadline.is_missed(carrier))
        {
            self.answer_by = None;
            self.context.carriers.suspect(carrier);
        }
    }

    fn note_silence(&mut self) {
        let Some(asked) = self.stream.asked else { return };
        let heard = self.stream.heard();
        let now = Instant::now();
        let came = std::mem::take(&mut self.came);
        match &mut self.silence {
            Some(silence) => silence.note(heard, &came, now),
            None => self.silence = Some(CarrierSilence::new(self.patience(asked), heard, now)),
        }
    }

    /// Returns the time without arrivals after which the stream is given up. That time is shorter while the whole
    /// carrier is silent and another carrier could replace it. If only this connection is silent, its answer may be in
    /// a long queue behind data of other connections.
    fn patience(&self, asked: Duration) -> Duration {
        let PumpRole::Client { carrier, .. } = &self.role else { return asked };
        let is_asked = self.silence.as_ref().is_some_and(CarrierSilence::is_asked);
        let is_silent = !is_asked || carrier.answers() == self.answers_when_asked;
        match is_silent && self.context.carriers.has_several(&carrier.peer.name) {
            true => carrier.patience().min(asked),
            false => asked,
        }
    }

    /// Queues the frame `Answer`, unless frames are already waiting to be sent. The other end may therefore send any
    /// number of `Ask` frames.
    fn answer(&mut self) {
        if self.stream.sender.is_empty() {
            self.stream.sender.push(&CarryFrame::Answer);
        }
    }

    /// Handles silence of the pool's connection: sends `Ask` or `Answer` to the other end, or gives up the stream.
    async fn ask(&mut self) -> Result<(), PumpStop> {
        let patience = self.stream.asked.map(|asked| self.patience(asked));
        let (Some(silence), Some(patience)) = (&mut self.silence, patience) else { return Ok(()) };
        silence.set_patience(patience);
        match silence.due_action(Instant::now()) {
            SilenceAction::Nothing => {}
            SilenceAction::Ask => {
                self.stream.sender.push(&CarryFrame::Ask);
                if let PumpRole::Client { carrier, .. } = &self.role {
                    self.answers_when_asked = carrier.answers();
                }
            }
            SilenceAction::Tell => self.stream.sender.push(&CarryFrame::Answer),
            SilenceAction::Lost => {
                // If this process was not scheduled for a while, data may have arrived in the socket unnoticed, so the
                // socket is read first.
                let received = timeout(Duration::ZERO, self.stream.receiver.receive()).await;
                if let Ok(received) = received {
                    return Ok(received?);
                }
                if let PumpRole::Client { carrier, .. } = &self.role {
                    self.doubt(carrier, self.answers_when_asked);
                }
                return Err(CarrierError::Lost.into());
            }
        }
        Ok(())
    }

    /// Marks the carrier as suspected to be dead if the peer has answered nothing since this host sent `Ask`. Other
    /// connections then need not wait for their own time-outs.
    fn doubt(&self, carrier: &Arc<PeerCarrier>, answers_when_asked: u64) {
        if carrier.answers() == answers_when_asked {
            carrier.doubt();
            self.context.carriers.suspect(carrier);
        }
    }

    /// Switches to another stream, and sends again from the first byte that the other host has not received.
    fn switch(&mut self, (stream, received): Resumption) -> Result<(), PumpStop> {
        self.stream.leave();
        self.take_up(stream);
        self.stream.sender.push(&CarryFrame::Accepted { received: self.inn.received() });
        self.go_on_from(received)?;
        Ok(())
    }

    fn take_up(&mut self, stream: CarrierStream) {
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

    /// Resumes the connection on another carrier. Returns false if all bytes were already delivered and acknowledged,
    /// so that nothing is left to do.
    async fn resume(&mut self) -> Result<bool, PumpEnd> {
        let by = Instant::now() + HOLD;
        if let PumpRole::Server { streams } = &mut self.role {
            let resumption = timeout_at(by, streams.recv()).await.ok().flatten().ok_or(PumpEnd::Lost)?;
            self.take_up(resumption.0);
            self.stream.sender.push(&CarryFrame::Accepted { received: self.inn.received() });
            self.go_on_from(resumption.1)?;
            return Ok(true);
        }
        timeout_at(by, self.resume_by_client()).await.map_err(|_| PumpEnd::Lost)?
    }

    async fn resume_by_client(&mut self) -> Result<bool, PumpEnd> {
        loop {
            let PumpRole::Client { open, carrier } = &mut self.role else { return Err(PumpEnd::Lost) };
            let mut carriers = self.context.carriers.watch(&carrier.peer.name).ok_or(PumpEnd::Lost)?;
            let fresh = carriers.wait_for(|it| it.as_ref().is_some_and(|it| !it.is_closed())).await;
            // The channel has closed: the settings have changed the peer, or do not name it any more.
            let Some(fresh) = fresh.ok().and_then(|fresh| fresh.clone()) else { continue };
            // If the peer's tunnel broker was restarted in the meantime, it cannot know whether the connection had
            // already reached the server.
            let same_run = fresh.peer.run == carrier.peer.run;
            *carrier = fresh;
            let Ok(mut stream) = carrier.open().await else { continue };
            let carrier = carrier.clone();
            let answers_when_asked = carrier.answers();
            let question = CarryFrame::Resume { id: open.id, received: self.inn.received() };
            match stream.ask(&question).await {
                Ok(CarryFrame::Accepted { received }) => {
                    self.is_accepted = true;
                    self.answer_by = None;
                    self.take_up(stream);
                    self.go_on_from(received)?;
                    return Ok(!self.is_all_said());
                }
                // The other broker does not know the connection, so none of its bytes can have reached the
                // server.
                Ok(CarryFrame::Refused(CarryReason::Unknown)) if !self.is_accepted && same_run => {
                    let Ok(stream) = carrier.open().await else { continue };
                    let open = *open;
                    self.take_up(stream);
                    self.stream.sender.push(&CarryFrame::Open(open));
                    self.out.rewind(0)?;
                    return Ok(true);
                }
                Ok(_) | Err(CarrierError::Malformed(_)) => return Err(PumpEnd::Lost),
                Err(error) => {
                    stream.leave();
                    if matches!(error, CarrierError::TimedOut) {
                        self.doubt(&carrier, answers_when_asked);
                    }
                }
            }
        }
    }
}

/// Returns the bytes in a buffer of at most twice their size, so that little memory is wasted.
fn fitted(buffer: BytesMut) -> Bytes {
    match buffer.len() < buffer.capacity() / 2 {
        true => Bytes::copy_from_slice(&buffer),
        false => buffer.freeze(),
    }
}

enum PumpStop {
    Ended(PumpEnd),
    Broken(CarrierError),
}

impl From<PumpEnd> for PumpStop {
    fn from(ended: PumpEnd) -> Self {
        Self::Ended(ended)
    }
}

impl From<Untrue> for PumpStop {
    fn from(untrue: Untrue) -> Self {
        Self::Ended(untrue.into())
    }
}

impl From<CarrierError> for PumpStop {
    fn from(broken: CarrierError) -> Self {
        Self::Broken(broken)
    }
}

/// Treats an error of the application's socket as a reset of the connection.
impl From<io::Error> for PumpStop {
    fn from(_: io::Error) -> Self {
        Self::Ended(PumpEnd::Reset)
    }
}

async fn wait_until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Waits until the connection should move to another stream. On the server's host, returns the stream that the peer has
/// opened for it. On the client's host, returns `None`: the pump has to open a stream itself.
async fn called(role: &mut PumpRole) -> Option<Resumption> {
    match role {
        PumpRole::Server { streams } => match streams.recv().await {
            Some(resumption) => Some(resumption),
            None => std::future::pending().await,
        },
        PumpRole::Client { carrier, .. } => {
            carrier.wait_until_left().await;
            None
        }
    }
}

/// Sets the options of a tunnel broker's socket. A linger time of zero resets the connection when the socket is dropped
/// before all data is sent, also when this process is killed. Urgent data is delivered in order with other data.
pub fn prepare(socket: &TcpStream) -> io::Result<()> {
    let socket = socket2::SockRef::from(socket);
    socket.set_linger(Some(Duration::ZERO))?;
    socket.set_tcp_nodelay(true)?;
    socket.set_out_of_band_inline(true)
}
