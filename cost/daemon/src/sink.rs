//! The interface of outputs.

use std::sync::Arc;
use std::time::Instant;

use millrace_cost::report::Report;

/// An output of reports. Reports are shared, since some outputs keep them.
pub trait ReportSink {
    /// Takes a report.
    ///
    /// # Errors
    /// The output is gone, and takes no more.
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()>;

    /// Ends the output after the last report. Data not written by the deadline, if there is one, may be dropped.
    fn finish(&mut self, _deadline: Option<Instant>) -> anyhow::Result<()> {
        Ok(())
    }
}
