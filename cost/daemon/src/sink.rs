//! What makes something of reports.

use std::sync::Arc;
use std::time::Instant;

use millrace_cost::report::Report;

/// Something that reports go to. They are shared, since some are looked at later.
pub trait Sink {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()>;

    /// There are no more. What is not written by the deadline, if there is one, need not be.
    fn finish(&mut self, _deadline: Option<Instant>) -> anyhow::Result<()> {
        Ok(())
    }
}
