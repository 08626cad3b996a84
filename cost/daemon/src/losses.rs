//! Reports that are missing in outputs.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// What outputs did not get, and why.
#[derive(Debug, Default)]
pub struct Losses {
    outputs: Mutex<BTreeMap<&'static str, Loss>>,
    /// Told by the live view, which standard error would spoil.
    silent: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Loss {
    /// Reports that are not in the output.
    pub reports: u64,
    /// `None`: it goes on.
    pub reason: Option<String>,
}

impl Losses {
    pub fn new(silent: bool) -> Self {
        Self { outputs: Mutex::default(), silent }
    }

    /// It will be in [`all`](Self::all), with nothing lost so far.
    pub fn register(&self, output: &'static str) {
        self.outputs.lock().entry(output).or_default();
    }

    /// `reports` more are lost. Says so the first time in a row.
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
    pub fn over(&self, output: &'static str) {
        if let Some(loss) = self.outputs.lock().get_mut(output)
            && loss.reason.take().is_some()
        {
            self.say(output, &format!("goes on; {} reports are not in it", loss.reports));
        }
    }

    pub fn all(&self) -> BTreeMap<&'static str, Loss> {
        self.outputs.lock().clone()
    }

    /// What was lost, at the end.
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
