//! Handles the requests of applications. Each connection of an application serves one session or one listener.

use std::{
    io,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use millrace_base::control::ControlReceived;
use millrace_graft::packet::PacketRuntime;
use millrace_messages::{
    SessionRefusal, Want,
    wire::{BrokerReply, BrokerRequest, NAME_MAX},
};
use tracing::info;

use super::{SessionBroker, client_listener::ClientProcess, line::ClientLine};

/// Time limit for a new connection to send its first request, and for an application to close the connection of an
/// ended session.
const PATIENCE: Duration = Duration::from_secs(10);
/// Limit of requests that are handled from one connection before the next connection is served.
const REQUESTS: usize = 4;

/// The connection of one application to the daemon.
pub struct ClientConnection {
    line: ClientLine,
    pub caller: ClientProcess,
    pub role: ClientRole,
    /// Time at which the application connected, or at which its session ended.
    since: Instant,
    /// True once the application did not read its messages in time, after which it is disconnected.
    is_deaf: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientRole {
    New,
    /// The application listens for sessions of one service. `peer` is the index, in the settings, of the peer that
    /// opens them.
    Listener {
        peer: usize,
        service: String,
    },
    /// The application uses the session with this session ID.
    Session(u64),
    /// The session is over. The application may still read messages, and then closes the connection.
    Done,
}

impl ClientConnection {
    pub fn new(line: ClientLine, caller: ClientProcess) -> Self {
        Self { line, caller, role: ClientRole::New, since: Instant::now(), is_deaf: false }
    }

    /// Creates the connection of a session that arrived at a listener.
    pub fn for_session(line: ClientLine, caller: ClientProcess, id: u64) -> Self {
        Self { role: ClientRole::Session(id), ..Self::new(line, caller) }
    }

    /// Marks the session as over.
    pub fn finish(&mut self) {
        (self.role, self.since) = (ClientRole::Done, Instant::now());
    }

    /// Reports whether the time limit for a first request, or for closing after the session's end, has passed.
    pub fn is_tired(&self, now: Instant) -> bool {
        matches!(self.role, ClientRole::New | ClientRole::Done) && now > self.since + PATIENCE
    }

    /// Sends a message, and returns whether the kernel accepted it.
    pub fn tell(&self, reply: &BrokerReply, descriptors: &[BorrowedFd<'_>]) -> bool {
        self.line.send(reply, descriptors).is_ok()
    }
}

impl SessionBroker {
    pub(super) fn read_clients(&mut self, runtime: &mut PacketRuntime) {
        // Handling a request may remove connections from the map, so the map's keys are copied first.
        let clients: Vec<_> = self.clients.keys().copied().collect();
        for client in clients {
            for _ in 0..REQUESTS {
                let Some(found) = self.clients.get(&client) else { break };
                if found.is_deaf {
                    self.leave(client);
                    break;
                }
                match found.line.receive() {
                    ControlReceived::Nothing => break,
                    ControlReceived::Record(request, _) => self.serve(runtime, client, request),
                    ControlReceived::Malformed(why) => {
                        self.refuse(
                            client,
                            SessionRefusal::Malformed,
                            format!("the message is not a valid request: {why}"),
                        );
                        self.leave(client);
                    }
                    ControlReceived::End => self.leave(client),
                }
            }
        }
    }

    fn serve(&mut self, runtime: &mut PacketRuntime, client: u64, request: BrokerRequest) {
        let Some(role) = self.clients.get(&client).map(|client| client.role.clone()) else { return };
        let served = match (request, role) {
            (BrokerRequest::Open { peer, service, want }, ClientRole::New) => {
                self.ask(runtime, client, &peer, service, want)
            }
            (BrokerRequest::Listen { peer, service }, ClientRole::New) => self.listen(client, &peer, service),
            (BrokerRequest::Renegotiate { want }, ClientRole::Session(id)) => {
                self.renegotiate(runtime, id, want)
            }
            (BrokerRequest::Finish { messages }, ClientRole::Session(id)) => {
                self.finish(id, messages);
                Ok(())
            }
            // The application sent this request before it learned that its session is over.
            (_, ClientRole::Done) => Ok(()),
            _ => Err((
                SessionRefusal::Malformed,
                "this connection does not take the request: each has one session or one listener".to_owned(),
            )),
        };
        if let Err((why, reason)) = served {
            self.refuse(client, why, reason);
        }
    }

    pub(super) fn refuse(&mut self, client: u64, why: SessionRefusal, reason: String) {
        *self.refusals.entry(why.name().to_owned()).or_default() += 1;
        // A longer reason for the refusal would not fit into one message on the control socket.
        let reason = reason.chars().take(800).collect();
        self.tell(client, &BrokerReply::Refused { why, reason });
    }

    /// Sends a message to the application at this connection. An application that does not read is disconnected.
    pub(super) fn tell(&mut self, client: u64, reply: &BrokerReply) {
        let Some(found) = self.clients.get_mut(&client) else { return };
        // The socket is full if the application does not read. Requests that an application sent before it disconnected
        // are still handled.
        let told = found.line.send(reply, &[]);
        found.is_deaf |= told.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
    }

    fn listen(&mut self, client: u64, peer: &str, service: String) -> Result<(), (SessionRefusal, String)> {
        let peer = self.permitted(client, peer, &service)?;
        let role = ClientRole::Listener { peer, service };
        // Only one application may listen for the sessions of a service.
        if self.clients.values().any(|other| other.role == role) {
            return Err((
                SessionRefusal::Exhausted,
                "another application listens for this service".to_owned(),
            ));
        }
        let Some(found) = self.clients.get_mut(&client) else { return Ok(()) };
        info!(user = found.caller.user, ?role, "an application listens for sessions");
        found.role = role;
        self.tell(client, &BrokerReply::Listening);
        Ok(())
    }

    fn ask(
        &mut self,
        runtime: &mut PacketRuntime,
        client: u64,
        peer: &str,
        service: String,
        want: Want,
    ) -> Result<(), (SessionRefusal, String)> {
        want.check().map_err(|reason| (SessionRefusal::Malformed, reason))?;
        let peer = self.permitted(client, peer, &service)?;
        self.begin(runtime, client, peer, service, want)
    }

    /// Returns the peer's index in the settings if the application's user may have sessions with the peer, else the
    /// refusal.
    fn permitted(&self, client: u64, peer: &str, service: &str) -> Result<usize, (SessionRefusal, String)> {
        if service.is_empty() || service.len() > NAME_MAX || peer.len() > NAME_MAX {
            return Err((SessionRefusal::Malformed, format!("names have 1 to {NAME_MAX} bytes")));
        }
        let at = self.peers.iter().position(|known| known.name == peer);
        // A user without permission must not learn which peers exist.
        let Some(caller) = self.clients.get(&client).map(|client| &client.caller) else {
            return Err((SessionRefusal::NotAllowed, String::new()));
        };
        match at.and_then(|at| Some((at, self.peers.get(at)?))) {
            Some((at, found)) if found.allows(caller.user, &caller.groups) => Ok(at),
            _ if caller.user != 0 => {
                let user = caller.user;
                let line = "the daemon's settings allow users by `users` or `groups` in [[peer]]";
                Err((
                    SessionRefusal::NotAllowed,
                    format!("user {user} may not open sessions with peer {peer}: {line}"),
                ))
            }
            _ => {
                let known: Vec<_> = self.peers.iter().map(|peer| peer.name.as_str()).collect();
                Err((
                    SessionRefusal::Unknown,
                    format!("there is no peer {peer}; there are: {}", known.join(", ")),
                ))
            }
        }
    }
}
