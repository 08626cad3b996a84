//! What applications ask for, each at a desk of its own: a connection is a session, or a listener.

use std::{
    io,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use millrace_base::control::Received;
use millrace_graft::{
    message::{
        Want, Why,
        wire::{NAME_MAX, Request, Word},
    },
    packet::Runtime,
};
use tracing::info;

use super::{Broker, door::Caller, line::Line};

/// For a new connection to say what it is, and for one whose session is over to go.
const PATIENCE: Duration = Duration::from_secs(10);
/// Of one desk, before the others have their turn.
const REQUESTS: usize = 4;

pub struct Desk {
    line: Line,
    pub caller: Caller,
    pub role: Role,
    /// When it came, or its session was over.
    since: Instant,
    is_deaf: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    New,
    /// For sessions that the peer of this number opens.
    Listener {
        peer: usize,
        service: String,
    },
    /// The life of its session.
    Session(u64),
    /// Its session is over: it may read, and go.
    Done,
}

impl Desk {
    pub fn new(line: Line, caller: Caller) -> Self {
        Self { line, caller, role: Role::New, since: Instant::now(), is_deaf: false }
    }

    /// Makes one for a session that came to a listener.
    pub fn of_session(line: Line, caller: Caller, life: u64) -> Self {
        Self { role: Role::Session(life), ..Self::new(line, caller) }
    }

    /// Notes that its session is over.
    pub fn finish(&mut self) {
        (self.role, self.since) = (Role::Done, Instant::now());
    }

    /// Reports whether it has neither said what it is, nor gone, in time.
    pub fn is_tired(&self, now: Instant) -> bool {
        matches!(self.role, Role::New | Role::Done) && now > self.since + PATIENCE
    }

    /// Whether it has been taken; who does not read is let go.
    pub fn tell(&self, word: &Word, descriptors: &[BorrowedFd<'_>]) -> bool {
        self.line.send(word, descriptors).is_ok()
    }
}

impl Broker {
    pub(super) fn read_desks(&mut self, runtime: &mut Runtime) {
        let desks: Vec<_> = self.desks.keys().copied().collect();
        for desk in desks {
            for _ in 0..REQUESTS {
                let Some(found) = self.desks.get(&desk) else { break };
                if found.is_deaf {
                    self.leave(desk);
                    break;
                }
                match found.line.receive() {
                    Received::Nothing => break,
                    Received::Record(request, _) => self.serve(runtime, desk, request),
                    Received::Malformed(why) => {
                        self.refuse(desk, Why::Malformed, format!("not a request: {why}"));
                        self.leave(desk);
                    }
                    Received::End => self.leave(desk),
                }
            }
        }
    }

    fn serve(&mut self, runtime: &mut Runtime, desk: u64, request: Request) {
        let Some(role) = self.desks.get(&desk).map(|desk| desk.role.clone()) else { return };
        let served = match (request, role) {
            (Request::Open { peer, service, want }, Role::New) => {
                self.ask(runtime, desk, &peer, service, want)
            }
            (Request::Listen { peer, service }, Role::New) => self.listen(desk, &peer, service),
            (Request::Renegotiate { want }, Role::Session(life)) => self.renegotiate(runtime, life, want),
            (Request::Finish { messages }, Role::Session(life)) => {
                self.finish(life, messages);
                Ok(())
            }
            (_, Role::Done) => Ok(()),
            _ => Err((Why::Malformed, "this connection is for something else".to_owned())),
        };
        if let Err((why, reason)) = served {
            self.refuse(desk, why, reason);
        }
    }

    pub(super) fn refuse(&mut self, desk: u64, why: Why, reason: String) {
        *self.refusals.entry(why.name().to_owned()).or_default() += 1;
        // As much as fits a record.
        let reason = reason.chars().take(800).collect();
        self.tell(desk, &Word::Refused { why, reason });
    }

    /// Who does not read is let go.
    pub(super) fn tell(&mut self, desk: u64, word: &Word) {
        let Some(found) = self.desks.get_mut(&desk) else { return };
        // One that has gone may have said something before.
        let told = found.line.send(word, &[]);
        found.is_deaf |= told.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
    }

    fn listen(&mut self, desk: u64, peer: &str, service: String) -> Result<(), (Why, String)> {
        let peer = self.permitted(desk, peer, &service)?;
        let role = Role::Listener { peer, service };
        if self.desks.values().any(|other| other.role == role) {
            return Err((Why::Exhausted, "another application listens for this service".to_owned()));
        }
        let Some(found) = self.desks.get_mut(&desk) else { return Ok(()) };
        info!(user = found.caller.user, ?role, "an application listens");
        found.role = role;
        self.tell(desk, &Word::Listening);
        Ok(())
    }

    fn ask(
        &mut self,
        runtime: &mut Runtime,
        desk: u64,
        peer: &str,
        service: String,
        want: Want,
    ) -> Result<(), (Why, String)> {
        want.check().map_err(|reason| (Why::Malformed, reason))?;
        let peer = self.permitted(desk, peer, &service)?;
        self.begin(runtime, desk, peer, service, want)
    }

    /// The peer's number, if the caller may have sessions with it.
    fn permitted(&self, desk: u64, peer: &str, service: &str) -> Result<usize, (Why, String)> {
        if service.is_empty() || service.len() > NAME_MAX || peer.len() > NAME_MAX {
            return Err((Why::Malformed, format!("names have 1 to {NAME_MAX} bytes")));
        }
        let at = self.peers.iter().position(|known| known.name == peer);
        // Who may not is not told which peers there are.
        let Some(caller) = self.desks.get(&desk).map(|desk| &desk.caller) else {
            return Err((Why::NotAllowed, String::new()));
        };
        match at.and_then(|at| Some((at, self.peers.get(at)?))) {
            Some((at, found)) if found.allows(caller.user, &caller.groups) => Ok(at),
            _ if caller.user != 0 => {
                let (user, line) =
                    (caller.user, "`users` or `groups` of a [[peer]] in the daemon's settings name who may");
                Err((Why::NotAllowed, format!("user {user} may have no sessions with a peer {peer}: {line}")))
            }
            _ => {
                let known: Vec<_> = self.peers.iter().map(|peer| peer.name.as_str()).collect();
                Err((Why::Unknown, format!("there is no peer {peer}; there are: {}", known.join(", "))))
            }
        }
    }
}
