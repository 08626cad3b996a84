//! What ICMP says of packets of IP protocol 253. Of UDP an application hears it by its socket; of these the operator hears it here.

use std::collections::HashMap;
use std::io;
use std::mem::{self, Discriminant};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use millrace_graft_kernel::icmp::{self, What};
use millrace_graft_kernel::joint::{Ends, Protocol, Reason};

use super::live::Live;
use super::{Event, Runtime};

/// A path is taken to be as it was said to be for so long, and the log is told of such a thing no more often, whoever says it.
const KNOWN: Duration = Duration::from_secs(60);
/// At one look.
const MOST: usize = 64;

const IPV4_BYTES: u32 = 20;
const IPV6_BYTES: u32 = 40;
/// As long as UDP's header.
const WIRE_BYTES: u32 = 8;
const FRAME_BYTES: u32 = 16;
const SEALED_BYTES: u32 = 40;

pub(super) struct Hearing {
    errors: io::Result<icmp::Errors>,
    latest: Option<Latest>,
    /// When the log was told of such a thing.
    told: HashMap<Discriminant<What>, Duration>,
}

struct Latest {
    ends: Ends,
    by: Option<IpAddr>,
    what: What,
    at: Duration,
    /// What had been let in by then.
    let_in: u64,
}

impl Runtime {
    /// From now on, if the session is of that protocol.
    pub(super) fn hear(&mut self, ends: &Ends, protocol: Protocol) {
        if protocol == Protocol::Ip253 {
            let open = || Hearing { errors: open(ends), latest: None, told: HashMap::new() };
            self.hearings.entry(pair(ends)).or_insert_with(open);
        }
    }

    /// Of what no session has packets of any more.
    pub(super) fn stop_hearing(&mut self) {
        let live = &self.live;
        let is_used = |of: &(IpAddr, IpAddr)| {
            live.iter().any(|(ends, live)| pair(ends) == *of && live.session.protocol == Protocol::Ip253)
        };
        self.hearings.retain(|of, _| is_used(of));
    }

    pub(super) fn look_at_hearings(&mut self, events: &mut Vec<Event>) {
        let now = self.now();
        for (&(local, remote), hearing) in &mut self.hearings {
            let errors = match &hearing.errors {
                Ok(errors) => errors,
                // There may be a route by now.
                Err(_) => {
                    hearing.errors = icmp::Errors::open(local, remote);
                    continue;
                }
            };
            for _ in 0..MOST {
                let Ok(Some(error)) = errors.next() else { break };
                // Whoever says so has seen a packet of the session, or has guessed its ports.
                let [from, to] = error.ports;
                let ends = Ends { local: SocketAddr::new(local, from), remote: SocketAddr::new(remote, to) };
                let Some(live) = self.live.get(&ends) else { continue };
                let let_in = self.joints.counts(&ends).map_or(0, |counts| let_in(&counts));
                let latest = Latest { ends, by: error.by, what: error.what, at: now, let_in };
                let kind = mem::discriminant(&error.what);
                if hearing.told.get(&kind).is_none_or(|told| now >= *told + KNOWN) {
                    hearing.told.insert(kind, now);
                    let session = live.session.name.clone();
                    events.push(Event::Refused { session, why: latest.words(live) });
                }
                hearing.latest = Some(latest);
            }
        }
    }

    /// Addresses of which nothing is heard, and why not.
    pub(super) fn unheard(&self) -> impl Iterator<Item = String> {
        self.hearings.iter().filter_map(|((_, remote), hearing)| {
            let error = hearing.errors.as_ref().err()?;
            Some(format!("what ICMP says of packets of IP protocol 253 to {remote} is not heard: {error}"))
        })
    }

    /// What is true of a session of late.
    pub(super) fn heard(&self, ends: &Ends, live: &Live, counts: &[(Reason, u64)]) -> Option<String> {
        let latest = self.hearings.get(&pair(ends))?.latest.as_ref().filter(|latest| latest.ends == *ends)?;
        // Whoever is heard again is there.
        let is_there = !matches!(latest.what, What::TooLong { .. }) && let_in(counts) > latest.let_in;
        (!is_there && self.now() < latest.at + KNOWN).then(|| latest.words(live))
    }
}

fn let_in(counts: &[(Reason, u64)]) -> u64 {
    counts.iter().find(|(reason, _)| *reason == Reason::LetIn).map_or(0, |(_, count)| *count)
}

impl Latest {
    fn words(&self, live: &Live) -> String {
        let by = self.by.map_or_else(|| "this host".to_owned(), |by| by.to_string());
        let advice = match self.what {
            What::TooLong { mtu: Some(mtu) } => {
                let most = mtu.saturating_sub(around(&self.ends, live.sealed.is_some()));
                format!(", so datagrams may have {most} bytes at most")
            }
            _ => String::new(),
        };
        format!("{by} says by ICMP: {}{advice}", self.what)
    }
}

/// What is in a packet beside the application's datagram.
fn around(ends: &Ends, is_sealed: bool) -> u32 {
    let ip = if ends.local.is_ipv4() { IPV4_BYTES } else { IPV6_BYTES };
    ip + WIRE_BYTES + if is_sealed { SEALED_BYTES } else { FRAME_BYTES }
}

fn open(ends: &Ends) -> io::Result<icmp::Errors> {
    let (local, remote) = pair(ends);
    icmp::Errors::open(local, remote)
}

fn pair(ends: &Ends) -> (IpAddr, IpAddr) {
    (ends.local.ip(), ends.remote.ip())
}
