//! Defines the trait of all outputs of reports.

use std::sync::Arc;
use std::time::Instant;

use millrace_cost::report::Report;

/// An output of reports. Reports are shared, since some outputs keep them.
pub trait ReportSink {
    /// Writes a report.
    ///
    /// # Errors
    /// Fails if the output was closed and accepts no more reports.
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()>;

    /// Ends the output after the last report. Data not written by the deadline, if there is one, may be dropped.
    fn finish(&mut self, _deadline: Option<Instant>) -> anyhow::Result<()> {
        Ok(())
    }
}
