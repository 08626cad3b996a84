//! Counts the reports that an output (log file, dashboard, export) could not write.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// Losses by output (log file, dashboard, export): the number of reports that it could not write, and why.
#[derive(Debug, Default)]
pub struct ReportLosses {
    outputs: Mutex<BTreeMap<&'static str, ReportLoss>>,
    /// True if lost reports are not announced on standard error. That would disturb the live view, which shows the
    /// number of lost reports itself.
    silent: bool,
}

/// The reports that one output could not write.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReportLoss {
    /// Number of reports that the output could not write.
    pub reports: u64,
    /// The reason why the output cannot write at present; `None` while it works.
    pub reason: Option<String>,
}

impl ReportLosses {
    /// Creates an empty list of outputs. With `silent`, no message is printed when an output cannot write a report.
    pub fn new(silent: bool) -> Self {
        Self { outputs: Mutex::default(), silent }
    }

    /// Adds an output to the list that [`all`](Self::all) returns, with a loss of 0 reports.
    pub fn register(&self, output: &'static str) {
        self.outputs.lock().entry(output).or_default();
    }

    /// Adds `reports` to the number of reports that the output lost. Prints the reason once, until the reason changes
    /// or the output works again.
    pub fn add(&self, output: &'static str, reports: u64, reason: &str) {
        let mut outputs = self.outputs.lock();
        let loss = outputs.entry(output).or_default();
        loss.reports += reports;
        if loss.reason.as_deref() != Some(reason) {
            loss.reason = Some(reason.to_owned());
            self.say(output, reason);
        }
    }

    /// Records that an output can write reports again, after it could not write some.
    pub fn mark_over(&self, output: &'static str) {
        if let Some(loss) = self.outputs.lock().get_mut(output)
            && loss.reason.take().is_some()
        {
            self.say(output, &format!("works again; {} reports are not in it", loss.reports));
        }
    }

    /// Returns how many reports each output (log, HTTP, terminal) has lost.
    pub fn all(&self) -> BTreeMap<&'static str, ReportLoss> {
        self.outputs.lock().clone()
    }

    /// Prints how many reports each output could not write. Called at the end of the program.
    pub fn tell(&self) {
        for (output, loss) in self.all().into_iter().filter(|(_, loss)| loss.reports > 0) {
            eprintln!("millrace: {output}: {} reports are not in it", loss.reports);
        }
    }

    fn say(&self, output: &str, what: &str) {
        if !self.silent {
            eprintln!("millrace: {output}: {what}");
        }
    }
}
