//! ICMP errors about packets of IP protocol 253. For UDP, applications receive such errors on their sockets; for IP
//! protocol 253 they are reported to the operator here.

use std::collections::HashMap;
use std::io;
use std::mem::{self, Discriminant};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use millrace_graft_kernel::icmp::{self, IcmpErrorKind};
use millrace_graft_kernel::packet::{PacketReason, SessionEnds, WireProtocol};

use super::live::LiveSession;
use super::{PacketEvent, PacketRuntime};

/// Time for which an ICMP error counts as a description of the path. Errors of one kind are logged at most once in this
/// time, whoever sends them.
const KNOWN: Duration = Duration::from_secs(60);
/// Limit of ICMP errors that are read from a socket in one check.
const MOST: usize = 64;

const IPV4_BYTES: u32 = 20;
const IPV6_BYTES: u32 = 40;
/// Size in bytes of the UDP header, or of the header that replaces it in packets of IP protocol 253.
const WIRE_BYTES: u32 = 8;
const FRAME_BYTES: u32 = 16;
const SEALED_BYTES: u32 = 40;

/// The socket that receives ICMP errors between two addresses, and the latest error.
pub(super) struct IcmpReceiver {
    errors: io::Result<icmp::IcmpErrors>,
    latest: Option<Latest>,
    /// Time at which each kind of error was last logged.
    logged: HashMap<Discriminant<IcmpErrorKind>, Duration>,
}

/// The latest ICMP error about a session's packets.
struct Latest {
    ends: SessionEnds,
    by: Option<IpAddr>,
    what: IcmpErrorKind,
    at: Duration,
    /// Number of the session's packets that this host had accepted when the error arrived.
    let_in: u64,
}

impl PacketRuntime {
    /// Starts to receive ICMP errors about the session, if it uses IP protocol 253.
    pub(super) fn listen_on(&mut self, ends: &SessionEnds, protocol: WireProtocol) {
        if protocol == WireProtocol::Ip253 {
            let open = || IcmpReceiver { errors: open(ends), latest: None, logged: HashMap::new() };
            self.icmp_receivers.entry(pair(ends)).or_insert_with(open);
        }
    }

    /// Closes the sockets for addresses between which no session of IP protocol 253 exists any more.
    pub(super) fn close_icmp_receivers(&mut self) {
        let live = &self.live;
        let is_used = |of: &(IpAddr, IpAddr)| {
            live.iter().any(|(ends, live)| pair(ends) == *of && live.session.protocol == WireProtocol::Ip253)
        };
        self.icmp_receivers.retain(|of, _| is_used(of));
    }

    pub(super) fn read_icmp_errors(&mut self, events: &mut Vec<PacketEvent>) {
        let now = self.now();
        for (&(local, remote), receiver) in &mut self.icmp_receivers {
            let errors = match &receiver.errors {
                Ok(errors) => errors,
                // A socket that failed is opened again, since a route may exist by now.
                Err(_) => {
                    receiver.errors = icmp::IcmpErrors::open(local, remote);
                    continue;
                }
            };
            for _ in 0..MOST {
                let Ok(Some(error)) = errors.next() else { break };
                // An error must contain the ports of a session: its sender has seen a packet of that session, or has
                // guessed the ports.
                let [from, to] = error.ports;
                let ends =
                    SessionEnds { local: SocketAddr::new(local, from), remote: SocketAddr::new(remote, to) };
                let Some(live) = self.live.get(&ends) else { continue };
                let let_in = self.hooks.counts(&ends).map_or(0, |counts| let_in(&counts));
                let latest = Latest { ends, by: error.by, what: error.what, at: now, let_in };
                let kind = mem::discriminant(&error.what);
                if receiver.logged.get(&kind).is_none_or(|logged| now >= *logged + KNOWN) {
                    receiver.logged.insert(kind, now);
                    let session = live.session.name.clone();
                    events.push(PacketEvent::Refused { session, why: latest.words(live) });
                }
                receiver.latest = Some(latest);
            }
        }
    }

    /// Returns the addresses for which ICMP errors cannot be received, with the reasons for that.
    pub(super) fn icmp_trouble(&self) -> impl Iterator<Item = String> {
        self.icmp_receivers.iter().filter_map(|((_, remote), receiver)| {
            let error = receiver.errors.as_ref().err()?;
            Some(format!(
                "ICMP errors about packets of IP protocol 253 to {remote} cannot be received: {error}"
            ))
        })
    }

    /// Returns the latest ICMP error about a session, if it is still valid.
    pub(super) fn explain_silence(
        &self,
        ends: &SessionEnds,
        live: &LiveSession,
        counts: &[(PacketReason, u64)],
    ) -> Option<String> {
        let latest = self.icmp_receivers.get(&pair(ends))?.latest.as_ref().filter(|it| it.ends == *ends)?;
        // A packet that has arrived after the error proves that the other end is reachable.
        let is_there =
            !matches!(latest.what, IcmpErrorKind::TooLong { .. }) && let_in(counts) > latest.let_in;
        (!is_there && self.now() < latest.at + KNOWN).then(|| latest.words(live))
    }
}

fn let_in(counts: &[(PacketReason, u64)]) -> u64 {
    counts.iter().find(|(reason, _)| *reason == PacketReason::LetIn).map_or(0, |(_, count)| *count)
}

impl Latest {
    fn words(&self, live: &LiveSession) -> String {
        let by = self.by.map_or_else(|| "this host".to_owned(), |by| by.to_string());
        let advice = match self.what {
            IcmpErrorKind::TooLong { mtu: Some(mtu) } => {
                let most = mtu.saturating_sub(around(&self.ends, live.keying.cipher.is_some()));
                format!(", so datagrams may have {most} bytes at most")
            }
            _ => String::new(),
        };
        format!("{by} says by ICMP: {}{advice}", self.what)
    }
}

/// Returns the number of bytes of all headers around the application's datagram.
fn around(ends: &SessionEnds, is_sealed: bool) -> u32 {
    let ip = if ends.local.is_ipv4() { IPV4_BYTES } else { IPV6_BYTES };
    ip + WIRE_BYTES + if is_sealed { SEALED_BYTES } else { FRAME_BYTES }
}

fn open(ends: &SessionEnds) -> io::Result<icmp::IcmpErrors> {
    let (local, remote) = pair(ends);
    icmp::IcmpErrors::open(local, remote)
}

fn pair(ends: &SessionEnds) -> (IpAddr, IpAddr) {
    (ends.local.ip(), ends.remote.ip())
}
