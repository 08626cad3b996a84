//! The tasks of a session, which end with it.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::{runtime::Handle, task::JoinSet, time::timeout};

/// How long a session's tasks may run after the session has ended, to process received data and to tell tracks that
/// their publisher is lost.
const GRACE: Duration = Duration::from_secs(5);

/// The tasks of one session.
pub struct Tasks(Mutex<Option<JoinSet<()>>>);

impl Tasks {
    pub fn new() -> Self {
        Self(Mutex::new(Some(JoinSet::new())))
    }

    /// Runs `work` until it is done or the session is over. Returns false, and drops `work`, if the session is already
    /// over.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> bool {
        let mut tasks = self.0.lock();
        let Some(tasks) = tasks.as_mut() else { return false };
        while tasks.try_join_next().is_some() {}
        tasks.spawn(work);
        true
    }

    /// Ends the session's tasks. New ones are refused, and running ones are aborted after [`GRACE`].
    pub fn end(&self) {
        let Some(mut tasks) = self.0.lock().take() else { return };
        // Outside a tokio runtime, as in unit tests, the tasks get no time to end: they are aborted at once.
        let Ok(runtime) = Handle::try_current() else { return };
        runtime.spawn(async move {
            let all = async { while tasks.join_next().await.is_some() {} };
            let _ = timeout(GRACE, all).await; // Dropping the task set aborts the tasks that are left.
        });
    }
}
