//! Defines the trait of all outputs of reports.

use std::sync::Arc;
use std::time::Duration;

use millrace_cost::report::Report;

/// An output of reports. Reports are shared, since some outputs keep them.
pub trait ReportSink {
    /// Writes a report.
    ///
    /// # Errors
    /// Fails if the output was closed and accepts no more reports.
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()>;

    /// Ends the output after the last report. With `patience`, the rest may be dropped if nothing is written for so long.
    fn finish(&mut self, _patience: Option<Duration>) -> anyhow::Result<()> {
        Ok(())
    }
}
