//! Link addresses of the next hops of sessions with several paths.
//!
//! A packet gets to its path behind the place where the kernel waits for the link address of the next hop by the session's own addresses.
//! When that way is cut, the kernel forgets it before long, and nothing would leave, by whatever path. So it is told what it knew,
//! for as long as another path is there.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use millrace_kernel::neighbour::{LinkAddress, NextHop};

/// Routes are looked up anew.
const ROUTES: Duration = Duration::from_secs(1);

/// From whom, and to whom; whether another path is there.
pub(super) type Wanted = BTreeMap<(IpAddr, IpAddr), bool>;

#[derive(Default)]
pub(super) struct Hops(BTreeMap<(IpAddr, IpAddr), Hop>);

#[derive(Default)]
struct Hop {
    next: Option<NextHop>,
    looked: Option<Duration>,
    known: Option<LinkAddress>,
}

impl Hops {
    pub fn look(&mut self, now: Duration, wanted: &Wanted) {
        self.0.retain(|pair, _| wanted.contains_key(pair));
        for (pair, is_another_there) in wanted {
            let hop = self.0.entry(*pair).or_default();
            hop.find(now, *pair);
            hop.keep(*is_another_there);
        }
    }
}

impl Hop {
    fn find(&mut self, now: Duration, (local, remote): (IpAddr, IpAddr)) {
        if self.looked.is_some_and(|looked| now < looked + ROUTES) {
            return;
        }
        self.looked = Some(now);
        let next = NextHop::of(local, remote).ok();
        if next != self.next {
            (self.next, self.known) = (next, None);
        }
    }

    fn keep(&mut self, is_another_there: bool) {
        let Some(next) = self.next else { return };
        match (next.link_address(), &self.known) {
            (Ok(Some(now)), _) => self.known = Some(now),
            (Ok(None), Some(known)) if is_another_there => {
                // What fails is tried again at the next look: the interface may be about to go.
                let _ = next.set_link_address(known);
            }
            _ => {}
        }
    }
}
