//! Tasks that end with their session.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::{runtime::Handle, task::JoinSet, time::timeout};

/// How long tasks may go on after their session, to take in what had arrived and to tell others of the loss.
const GRACE: Duration = Duration::from_secs(5);

/// The tasks of one session.
pub struct Tasks(Mutex<Option<JoinSet<()>>>);

impl Tasks {
    pub fn new() -> Self {
        Self(Mutex::new(Some(JoinSet::new())))
    }

    /// Runs `work` until it or the session is over. Returns `false`, and drops it, if the session is over already.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> bool {
        let mut tasks = self.0.lock();
        let Some(tasks) = tasks.as_mut() else { return false };
        while tasks.try_join_next().is_some() {}
        tasks.spawn(work);
        true
    }

    /// The session is over: no more tasks begin, and those that are left have [`GRACE`] before they are aborted.
    pub fn end(&self) {
        let Some(mut tasks) = self.0.lock().take() else { return };
        // Without a runtime there is nothing to wait for.
        let Ok(runtime) = Handle::try_current() else { return };
        runtime.spawn(async move {
            let all = async { while tasks.join_next().await.is_some() {} };
            let _ = timeout(GRACE, all).await; // dropping the set aborts what is left
        });
    }
}
