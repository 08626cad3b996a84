//! Link addresses of the next hops of sessions that have several paths.
//!
//! The kernel passes a packet to the program that chooses its path only after it has resolved the next hop's link
//! address on the route of the session's own addresses. If that route is cut, the kernel soon forgets the link address,
//! and no packet would be sent on any path. The link address is therefore written to the kernel again as long as
//! another path works.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use millrace_kernel::neighbour::{LinkAddress, NextHop};

/// Interval at which routes are looked up again.
const ROUTES: Duration = Duration::from_secs(1);

/// Pairs of a local and a remote address whose next hop is needed, and whether another path of the sessions between
/// them is up.
pub(super) type WantedHop = BTreeMap<(IpAddr, IpAddr), bool>;

#[derive(Default)]
/// The next hops of all sessions with several paths, by local and remote address.
pub(super) struct Hops(BTreeMap<(IpAddr, IpAddr), Hop>);

#[derive(Default)]
struct Hop {
    next: Option<NextHop>,
    looked: Option<Duration>,
    known: Option<LinkAddress>,
}

impl Hops {
    pub fn look(&mut self, now: Duration, wanted: &WantedHop) {
        self.0.retain(|pair, _| wanted.contains_key(pair));
        for (pair, is_another_there) in wanted {
            let hop = self.0.entry(*pair).or_default();
            hop.find(now, pair.0, pair.1);
            hop.keep(*is_another_there);
        }
    }
}

impl Hop {
    fn find(&mut self, now: Duration, local: IpAddr, remote: IpAddr) {
        if self.looked.is_some_and(|looked| now < looked + ROUTES) {
            return;
        }
        self.looked = Some(now);
        let next = NextHop::find_route(local, remote).ok();
        if next != self.next {
            (self.next, self.known) = (next, None);
        }
    }

    fn keep(&mut self, is_another_there: bool) {
        let Some(next) = self.next else { return };
        match (next.link_address(), &self.known) {
            (Ok(Some(now)), _) => self.known = Some(now),
            (Ok(None), Some(known)) if is_another_there => {
                // The interface may be about to disappear, so a failed write is tried again at the next check.
                let _ = next.set_link_address(known);
            }
            _ => {}
        }
    }
}
