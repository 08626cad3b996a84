//! Reports that are missing in outputs.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// Reports that outputs did not get, and why.
#[derive(Debug, Default)]
pub struct ReportLosses {
    outputs: Mutex<BTreeMap<&'static str, ReportLoss>>,
    /// Losses are not printed: standard error would spoil the live view, which shows them itself.
    silent: bool,
}

/// Reports that an output did not get.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReportLoss {
    /// Reports that are not in the output.
    pub reports: u64,
    /// `None`: it goes on.
    pub reason: Option<String>,
}

impl ReportLosses {
    /// Makes the counts of outputs that have lost nothing. `silent`: losses are not logged.
    pub fn new(silent: bool) -> Self {
        Self { outputs: Mutex::default(), silent }
    }

    /// Adds an output to [`all`](Self::all), with nothing lost so far.
    pub fn register(&self, output: &'static str) {
        self.outputs.lock().entry(output).or_default();
    }

    /// Counts `reports` more as lost. Reports a reason once, until it changes or is over.
    pub fn add(&self, output: &'static str, reports: u64, reason: &str) {
        let mut outputs = self.outputs.lock();
        let loss = outputs.entry(output).or_default();
        loss.reports += reports;
        if loss.reason.as_deref() != Some(reason) {
            loss.reason = Some(reason.to_owned());
            self.say(output, reason);
        }
    }

    /// The output goes on.
    pub fn mark_over(&self, output: &'static str) {
        if let Some(loss) = self.outputs.lock().get_mut(output)
            && loss.reason.take().is_some()
        {
            self.say(output, &format!("goes on; {} reports are not in it", loss.reports));
        }
    }

    /// Returns the losses of every output.
    pub fn all(&self) -> BTreeMap<&'static str, ReportLoss> {
        self.outputs.lock().clone()
    }

    /// Reports all losses, at the end.
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
