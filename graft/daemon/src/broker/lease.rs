//! A session that an application has, or is about to have: from the first word about it until both ends have let go of it.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    time::{Duration, Instant},
};

use millrace_graft::{
    message::{By, Want, Why},
    packet::{
        Runtime, Service,
        choose::{Offer, Refused},
    },
};
use millrace_graft_kernel::joint::Ends;
use tracing::warn;

use super::{far::Say, quality::Quality};

/// Between two tries of a word, at first and at most.
pub const AGAIN: Duration = Duration::from_millis(100);
const AGAIN_MOST: Duration = Duration::from_secs(1);
/// A daemon that says nothing for so long is gone, or cannot be reached any more.
pub const SILENCE: Duration = Duration::from_secs(10);
/// Of what is said to the other daemon, characters.
const REASON_MAX: usize = 160;

pub struct Lease {
    pub peer: usize,
    pub ends: Ends,
    pub service: String,
    pub stage: Stage,
    /// This end has asked for it.
    pub is_own: bool,
    /// Of the application here; `None`: it has gone.
    pub desk: Option<u64>,
    pub user: u32,
    /// The graft that was chosen for it last.
    pub graft: String,
    pub want: Want,
    /// Messages are put in order by the library, from the first one on.
    pub in_order: bool,
    pub since: Instant,
    /// What the other daemon has to answer.
    pub said: Option<Said>,
    pub finish: Option<Said>,
    /// Messages that this end has sent, once it sends no more.
    pub sent: Option<u32>,
    pub has_told_finish: bool,
    /// A change that was asked for and has not come: by whom.
    pub changing: Option<By>,
    /// The other end wants to know what comes here.
    pub is_asked: bool,
    pub quality: Quality,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// `Open` is said.
    Asking,
    /// It was accepted: the graft is to be changed as soon as that can be.
    Waiting,
    /// Both ends change to the graft; at the end that has accepted it, whether they have.
    Swapping(bool),
    /// `Go` is said.
    Going,
    Open,
    /// It is over, and so much is left for the application to read. Whether the other end knows: nothing is said any more then.
    Ending(Instant),
}

/// Until it is answered, or is not to be said any more.
pub struct Said {
    say: Say,
    pub next: Instant,
    pause: Duration,
}

impl Said {
    pub fn new(say: Say) -> Self {
        Self { say, next: Instant::now(), pause: AGAIN }
    }

    pub fn due(&mut self, now: Instant) -> Option<&Say> {
        if now < self.next {
            return None;
        }
        self.next = now + self.pause;
        self.pause = (2 * self.pause).min(AGAIN_MOST);
        Some(&self.say)
    }
}

pub type Denied = (Why, String);

pub fn denied(refused: &Refused) -> Denied {
    let why = match refused {
        Refused::Redundant(_) => Why::Redundant,
        Refused::Impossible(_) => Why::Impossible,
    };
    (why, refused.to_string())
}

impl Lease {
    /// One that the other end has asked for.
    pub fn offered((peer, ends): (usize, Ends), service: String, (desk, user): (u64, u32)) -> Self {
        Self {
            peer,
            ends,
            service,
            stage: Stage::Swapping(false),
            is_own: false,
            desk: Some(desk),
            user,
            graft: String::new(),
            want: Want::default(),
            in_order: false,
            since: Instant::now(),
            said: None,
            finish: None,
            sent: None,
            has_told_finish: false,
            changing: None,
            is_asked: false,
            quality: Quality::default(),
        }
    }

    /// Both ends have begun anew, and no application has sent anything yet.
    pub fn begin(&mut self, runtime: &mut Runtime) {
        if let (Some(seen), Ok(Some(traffic))) = (runtime.see(&self.ends), runtime.traffic(&self.ends)) {
            self.quality.begin(&traffic);
            self.graft = seen.graft;
        }
        if let Err(error) = runtime.tell_room(&self.ends) {
            warn!("nobody says when there is room: {error}");
        }
    }

    pub fn services(&self, offers: &[Offer]) -> Vec<String> {
        let found = offers.iter().find(|offer| offer.graft == self.graft);
        let of_graft = found.into_iter().flat_map(|offer| &offer.services).copied();
        let all: BTreeSet<_> = of_graft.chain(self.in_order.then_some(Service::Order)).collect();
        all.into_iter().map(|service| service.name().to_owned()).collect()
    }

    pub fn may_adapt(&self) -> bool {
        self.want.adapt && self.changing.is_none()
    }
}

/// Adds a lease. The other end draws lives, too, and may say one that is somebody's here.
///
/// # Errors
/// There is one of this life, which stays as it is.
pub fn insert(leases: &mut BTreeMap<u64, Lease>, life: u64, lease: Lease) -> Result<(), Denied> {
    match leases.entry(life) {
        Entry::Vacant(place) => {
            place.insert(lease);
            Ok(())
        }
        Entry::Occupied(_) => Err((Why::Malformed, "another session has this number".to_owned())),
    }
}

/// Whether order is the library's matter with this graft.
pub fn waits(want: &Want, offer: &Offer) -> bool {
    want.services.contains(Service::Order.name()) && !offer.services.contains(&Service::Order)
}

pub fn short(reason: &str) -> String {
    reason.chars().take(REASON_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer that answers our `Open` by an `Open` of the same life would have its listener's user end what our application has.
    #[test]
    fn life_that_is_somebodys_is_refused() {
        let ends =
            |port| Ends { local: ([192, 0, 2, 1], port).into(), remote: ([192, 0, 2, 2], port).into() };
        let mut leases = BTreeMap::new();
        let own = Lease { is_own: true, ..Lease::offered((0, ends(1)), "own".to_owned(), (7, 1000)) };
        insert(&mut leases, 5, own).unwrap();
        for peer in [0, 1] {
            let theirs = Lease::offered((peer, ends(2)), "theirs".to_owned(), (8, 1001));
            assert_eq!(insert(&mut leases, 5, theirs).unwrap_err().0, Why::Malformed);
            let kept = leases.get(&5).unwrap();
            assert!(kept.is_own && kept.desk == Some(7) && kept.user == 1000 && kept.ends == ends(1));
        }
    }
}
