//! Link addresses of the next hops of sessions that have several paths.
//!
//! The kernel hands a packet to its path only after it has resolved the link address of the next hop by the session's
//! own addresses. If that path is cut, the kernel soon forgets the link address, and no packet would leave by any
//! path. The address is therefore restored in the kernel as long as another path is up.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use millrace_kernel::neighbour::{LinkAddress, NextHop};

/// Interval at which routes are looked up again.
const ROUTES: Duration = Duration::from_secs(1);

/// Pairs of a local and a remote address whose next hop matters, and whether another path is up.
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
                // The interface may be about to go, so a failure is tried again at the next check.
                let _ = next.set_link_address(known);
            }
            _ => {}
        }
    }
}
