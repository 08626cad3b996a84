//! Runs several measurements at the same time, for those that do not need the whole machine.

use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::anyhow;

/// Runs all jobs on `workers` threads, started in their order, and returns the results in the same order. After the
/// first error, no further job is started.
pub fn at_once<J: Sync, T: Send>(
    workers: usize,
    jobs: &[J],
    work: impl Fn(&J) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let take = || -> anyhow::Result<Vec<(usize, T)>> {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(at) else { return Ok(done) };
            match work(job) {
                Ok(came) => done.push((at, came)),
                Err(error) => {
                    next.store(jobs.len(), Ordering::Relaxed);
                    return Err(error);
                }
            }
        }
    };
    let done = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers.min(jobs.len())).map(|_| scope.spawn(take)).collect();
        let ended = workers.into_iter().map(std::thread::ScopedJoinHandle::join);
        let parts = ended.map(|ended| ended.map_err(|_| anyhow!("a measurement panicked"))?);
        parts.collect::<anyhow::Result<Vec<_>>>()
    })?;
    let mut done: Vec<_> = done.into_iter().flatten().collect();
    done.sort_by_key(|(at, _)| *at);
    Ok(done.into_iter().map(|(_, came)| came).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::ensure;

    #[test]
    fn each_job_runs_once_and_results_keep_their_order() {
        let jobs: Vec<u32> = (0..100).collect();
        let done = at_once(7, &jobs, |job| Ok(job * 2)).unwrap();
        assert_eq!(done, jobs.iter().map(|job| job * 2).collect::<Vec<_>>());
        assert!(at_once(7, &[0_u32; 0], |job| Ok(*job)).unwrap().is_empty());
    }

    #[test]
    fn error_of_one_job_ends_all_jobs() {
        let begun = AtomicUsize::new(0);
        let failed = at_once(1, &[1, 2, 3, 4], |job| {
            begun.fetch_add(1, Ordering::Relaxed);
            ensure!(*job != 2, "two");
            Ok(())
        });
        assert_eq!(failed.unwrap_err().to_string(), "two");
        assert_eq!(begun.into_inner(), 2);
    }
}
