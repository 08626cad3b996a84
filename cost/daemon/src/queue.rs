//! Runs outputs that may block in threads of their own behind bounded queues, so that they delay neither the observer
//! nor other outputs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow};
use millrace_cost::report::Report;

use super::losses::ReportLosses;
use super::sink::ReportSink;

/// Largest number of reports that wait for an output. With the usual period of 1 s, this is the same number of seconds.
const QUEUE: usize = 8;

/// An output of reports that runs in a thread of its own. If its queue is full, further reports are dropped and
/// counted.
pub struct Queued {
    output: &'static str,
    /// The queue; `None` after the last report.
    reports: Option<SyncSender<Arc<Report>>>,
    /// Number of reports that the thread has taken from the queue.
    taken: Arc<AtomicU64>,
    /// Receives the sink's result when its thread ends.
    ended: Receiver<anyhow::Result<()>>,
    losses: Arc<ReportLosses>,
}

impl Queued {
    /// Starts the thread that writes the reports. `output` is the output's name in `losses`.
    pub fn start(
        output: &'static str,
        mut sink: impl ReportSink + Send + 'static,
        losses: Arc<ReportLosses>,
    ) -> anyhow::Result<Self> {
        losses.register(output);
        let (reports, incoming) = mpsc::sync_channel::<Arc<Report>>(QUEUE);
        let (end, ended) = mpsc::channel();
        let taken = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&taken);
        let mut all = move || {
            let mut taken = incoming.iter().inspect(|_| _ = counter.fetch_add(1, Relaxed));
            taken.try_for_each(|report| sink.report(&report))?;
            sink.finish(None)
        };
        thread::Builder::new()
            .name(format!("cost-{output}"))
            // Sending fails only if `Queued` was dropped, which happens at the end of the process.
            .spawn(move || drop(end.send(all())))
            .context("cannot start a thread")?;
        Ok(Self { output, reports: Some(reports), taken, ended, losses })
    }
}

const TOO_SLOW: &str = "too slow, so reports are dropped";

impl ReportSink for Queued {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        // A slow output must not delay the observer, so a report is dropped if the output's queue is full.
        match self.reports.as_ref().map(|reports| reports.try_send(Arc::clone(report))) {
            Some(Ok(())) => Ok(()),
            Some(Err(TrySendError::Full(_))) => {
                self.losses.add(self.output, 1, TOO_SLOW);
                Ok(())
            }
            // The output's thread has ended early: return its error.
            Some(Err(TrySendError::Disconnected(_))) | None => self.finish(None),
        }
    }

    fn finish(&mut self, patience: Option<Duration>) -> anyhow::Result<()> {
        // Dropping the sender ends the thread's loop once it has written the reports that are already queued.
        if self.reports.take().is_none() {
            return Ok(());
        }
        let ended = match patience {
            // An output that takes reports is waited for, also on a machine without CPU to spare.
            Some(patience) => loop {
                let taken = self.taken.load(Relaxed);
                match self.ended.recv_timeout(patience) {
                    Err(RecvTimeoutError::Timeout) if self.taken.load(Relaxed) > taken => {}
                    ended => break ended,
                }
            },
            None => self.ended.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match ended {
            Ok(ended) => ended,
            Err(RecvTimeoutError::Timeout) => {
                Err(anyhow!("{}: the output did not take its last reports in time", self.output))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(anyhow!("{}: the output's thread ended early", self.output))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tests::example;

    /// An output for the tests. Before it writes a report, it waits for a message of the test on the channel `enter`.
    /// Then it sends the report's number to the channel `taken`.
    struct Gated {
        enter: Receiver<()>,
        taken: mpsc::Sender<u64>,
    }

    impl ReportSink for Gated {
        fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
            self.enter.recv()?;
            Ok(self.taken.send(report.sequence)?)
        }
    }

    fn gated() -> (Queued, mpsc::Sender<()>, Receiver<u64>) {
        let (enter, entered) = mpsc::channel();
        let (taken, seen) = mpsc::channel();
        let queued =
            Queued::start("test", Gated { enter: entered, taken }, Arc::new(ReportLosses::new(true)));
        (queued.expect("a thread"), enter, seen)
    }

    fn report(sequence: u64) -> Arc<Report> {
        Arc::new(Report { sequence, ..example() })
    }

    #[test]
    fn stalled_output_does_not_delay_other_outputs() {
        let (mut queued, enter, seen) = gated();
        enter.send(()).expect("open");
        queued.report(&report(0)).expect("taken");
        assert_eq!(seen.recv(), Ok(0));
        // The sink holds one report and `QUEUE` reports wait, so all further reports are lost. The thread may take the
        // first report before or after the others are queued. The test accepts either number of lost reports.
        let sent = 2 * QUEUE as u64;
        (1..=sent).for_each(|at| queued.report(&report(at)).expect("taken"));
        let lost = queued.losses.all()["test"].clone();
        assert_eq!(lost.reason.as_deref(), Some(TOO_SLOW));
        (0..sent).for_each(|_| enter.send(()).expect("open"));
        queued.finish(None).expect("it ends");
        let taken: Vec<u64> = seen.iter().collect();
        assert_eq!(taken.len() as u64 + lost.reports, sent);
        assert!(taken.is_sorted() && taken[0] == 1 && taken.len() >= QUEUE, "{taken:?}");
    }

    #[test]
    fn error_of_an_output_is_returned_with_the_next_report_once() {
        let (mut queued, enter, _seen) = gated();
        drop(enter);
        let error = (0..).find_map(|at| {
            thread::yield_now();
            queued.report(&report(at)).err()
        });
        assert!(error.is_some_and(|error| error.is::<mpsc::RecvError>()));
        queued.finish(None).expect("that was all");
    }

    #[test]
    fn finish_waits_for_the_output_while_it_takes_reports() {
        let (mut queued, _enter, _seen) = gated();
        queued.report(&report(0)).expect("taken");
        let error = queued.finish(Some(Duration::from_millis(1))).expect_err("not taken");
        assert!(error.to_string().contains("did not take its last reports"), "{error}");

        // The output takes a report in the first wait, and the last one in the second. It takes both early in their wait, so
        // that the result does not depend on who has the CPU.
        const WAIT: Duration = Duration::from_secs(5);
        let (mut queued, enter, seen) = gated();
        (0..3).for_each(|at| queued.report(&report(at)).expect("taken"));
        let reader = thread::spawn(move || {
            for time in [WAIT / 5, WAIT / 10, WAIT * 4 / 5] {
                thread::sleep(time); // exact: the time that the output takes for a report
                enter.send(()).expect("open");
            }
        });
        queued.finish(Some(WAIT)).expect("all are taken");
        reader.join().expect("no panic");
        assert_eq!(seen.iter().collect::<Vec<_>>(), [0, 1, 2]);
    }
}
