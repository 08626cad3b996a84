//! Watches on routes. A watch collects the namespaces whose routes have changed, and lists each once however often it
//! changed.

use std::{
    collections::BTreeSet,
    sync::{Arc, Weak},
};

use millrace_moq::Namespace;
use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use super::pages::Pages;

/// The watches on routes, each with the prefix that it watches.
#[derive(Default)]
pub(super) struct RouteWatchers(Vec<(Namespace, Weak<ChangedNamespaces>)>);

/// The changed namespaces of one watch. A namespace that changes several times is in the set once, so the set never
/// needs a limit of its own.
#[derive(Default)]
struct ChangedNamespaces {
    namespaces: Mutex<BTreeSet<Namespace>>,
    notify: Notify,
}

/// A watch on the routes below a prefix. Dropping it ends the watch.
pub struct RouteWatch {
    changed: Arc<ChangedNamespaces>,
    /// The pages of namespaces that existed when the watch began. `None` once all were read.
    present: Option<Pages<Namespace>>,
    /// The time at which the next page of existing namespaces may be read.
    due: Option<Instant>,
}

impl RouteWatchers {
    /// Adds a watch. `present` lists the namespaces that exist below the prefix.
    pub fn add(&mut self, prefix: Namespace, present: Pages<Namespace>) -> RouteWatch {
        let changed = Arc::<ChangedNamespaces>::default();
        self.0.push((prefix, Arc::downgrade(&changed)));
        RouteWatch { changed, present: Some(present), due: None }
    }

    pub fn tell(&mut self, namespace: &Namespace) {
        self.0.retain(|(prefix, changed)| {
            let Some(changed) = changed.upgrade() else { return false };
            if prefix.is_prefix_of(namespace) {
                changed.add([namespace.clone()]);
            }
            true
        });
    }
}

impl ChangedNamespaces {
    fn add(&self, namespaces: impl IntoIterator<Item = Namespace>) {
        self.namespaces.lock().extend(namespaces);
        self.notify.notify_one();
    }
}

impl RouteWatch {
    /// Returns a namespace below the prefix that existed when the watch began, or whose routes have changed since.
    /// `pace` returns the time at which the next page of existing namespaces may be read. Cancel safe.
    pub async fn next(&mut self, pace: impl Fn() -> Instant) -> Namespace {
        loop {
            if let Some(namespace) = self.changed.namespaces.lock().pop_first() {
                return namespace;
            }
            let Some(present) = &mut self.present else {
                // `notify_one` stores a permit, so a change between reading the set and this await is not lost.
                self.changed.notify.notified().await;
                continue;
            };
            if let Some(due) = self.due {
                sleep_until(due).await;
            }
            let page = present();
            self.changed.add(page.found);
            match page.more {
                true => self.due = Some(pace()),
                false => self.present = None,
            }
        }
    }
}
