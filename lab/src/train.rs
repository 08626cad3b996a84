//! `millrace-lab train`: grows a decision tree from measured transfers, and scores it on networks that it was not
//! trained with.
//!
//! | module | contents |
//! | --- | --- |
//! | [`runs`] | measured transfers, as lines of a file |
//! | [`cases`] | training cases: questions with the right answers, computed from the transfers |
//! | [`grow`] | grows and prunes a tree (gain ratio, C4.5) |
//! | [`judge`] | scores a tree's decisions |

pub mod cases;
pub mod grow;
pub mod judge;
pub mod runs;

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use millrace_daemon::{
    file,
    render::{
        Fit::{self, Name, Text, Whole},
        line, print, table, width,
    },
};
use millrace_graft_proto::select::{model::Model, tree::DEPTH_MAX};

use self::{
    cases::Cases,
    judge::{FOLDS, JudgeReport, Score},
};
use crate::beside::{self, Panel};

#[derive(Debug, clap::Args)]
pub struct TrainArgs {
    /// CSV file with transfers that `millrace-lab bench graft select` has measured
    csv: PathBuf,
    /// Write the model to this file
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Train only these candidates (congestion controls or tunnels), such as those that share a bottleneck fairly; may
    /// be repeated
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    candidates: Vec<String>,
    /// Smallest number of training networks that at least two branches of a decision must each have
    #[arg(long, default_value_t = 2.0, value_name = "NETWORKS")]
    least: f64,
    /// Confidence for pruning branches, in standard deviations of their numbers of errors; below 0 nothing is pruned
    #[arg(long, default_value_t = 0.3, value_name = "NUMBER", allow_negative_numbers = true)]
    doubt: f64,
    /// Largest number of decisions between the root of the tree and a leaf
    #[arg(long, default_value_t = 16, value_name = "NUMBER")]
    depth: usize,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// Draw the result to this file, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

pub fn run(args: &TrainArgs) -> anyhow::Result<()> {
    ensure!(
        args.least > 0.0 && args.least.is_finite() && args.doubt.is_finite(),
        "--least must be above 0, and --doubt a finite number"
    );
    ensure!((1..=DEPTH_MAX).contains(&args.depth), "--depth must be from 1 to {DEPTH_MAX}");
    let name = || args.csv.display().to_string();
    let text = file::text(&args.csv, runs::BYTES_MAX).with_context(name)?;
    let mut runs = runs::parse(&text).with_context(name)?;
    if let Some(unknown) =
        args.candidates.iter().find(|candidate| runs.iter().all(|run| run.candidate != **candidate))
    {
        bail!("{}: it has no transfer with the candidate {unknown}", name());
    }
    runs.retain(|run| args.candidates.is_empty() || args.candidates.contains(&run.candidate));
    let cases = Cases::from_runs(&runs);
    let networks = cases.networks().len();
    ensure!(
        networks >= FOLDS,
        "{}: {networks} networks have transfers with all candidates ({} lack some), but at least {FOLDS} are needed",
        name(),
        cases.incomplete
    );
    let settings = args.settings(&cases, networks);
    let mut report = judge::judge(&cases, settings);
    report.scores.extend(judge::again(&runs));
    let model = Model::new(about(&report), cases.candidates.clone(), judge::train(&cases, settings));
    fs::write(&args.out, model.text()?).with_context(|| args.out.display().to_string())?;
    args.plot.as_deref().map_or(Ok(()), |path| draw(&report, path))?;
    let tree = format!(
        "{}: {} leaves, {} deep\n",
        args.out.display(),
        model.tree.leaves().len(),
        model.tree.depth()
    );
    print(&if args.json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        told(&report, width()) + &tree
    })
}

impl TrainArgs {
    /// Returns the settings for growing the tree. All training cases of a network are alike, so together they count as
    /// one example.
    fn settings(&self, cases: &Cases, networks: usize) -> grow::Settings {
        let alike = cases.cases.len() as f64 / networks as f64;
        grow::Settings { least: self.least, doubt: self.doubt, alike, depth: self.depth }
    }
}

/// Draws two panels: the share of right decisions with its 95 % interval, and the regret in percent of the utility.
fn draw(report: &JudgeReport, path: &Path) -> anyhow::Result<()> {
    let panel = |title, figure: fn(&Score) -> [f64; 3]| {
        let percent = |score| figure(score).map(|share| share * 100.0);
        Panel::from_figures(title, report.scores.iter().map(|score| (score.by.clone(), Some(percent(score)))))
    };
    let panels = [
        panel("right within ties, % (95 % interval)", |it| [it.right, it.right_low, it.right_high]),
        panel("regret, % of utility", |it| [it.regret; 3]),
    ];
    beside::draw(&panels, &["by"], 2, path)
}

fn about(report: &JudgeReport) -> String {
    let right = report.scores.first().map_or(0.0, |tree| tree.right * 100.0);
    format!("{} networks; on those it had not seen {right:.1} % right", report.networks)
}

fn told(report: &JudgeReport, width: usize) -> String {
    let mut out = String::new();
    let left_out = match report.incomplete {
        0 => String::new(),
        count => format!(", {count} skipped because they lack a candidate"),
    };
    let cases = report.scores.first().map_or(0, |score| score.cases);
    let networks = report.networks;
    line(
        &mut out,
        width,
        &format!(
            "{networks} networks{left_out}, {cases} cases, each judged by a tree that did not see its network"
        ),
    );
    let percent = |share: f64| format!("{:.1}", share * 100.0);
    let row = |score: &Score| {
        let mut row = vec![score.by.clone(), percent(score.right)];
        row.push(format!("{} to {}", percent(score.right_low), percent(score.right_high)));
        row.push(percent(score.regret));
        row.extend(score.slower_than.iter().map(|(_, share)| percent(*share)));
        row
    };
    const SCORES: [(&str, Fit); 6] = [
        ("BY", Name),
        ("RIGHT %", Whole),
        ("95 %", Whole),
        ("REGRET %", Whole),
        ("SLOWER THAN CUBIC %", Whole),
        ("THAN BBR %", Whole),
    ];
    table(&mut out, width, &SCORES, report.scores.iter().map(row));
    let perhaps = |share: Option<f64>| share.map_or("-".to_owned(), percent);
    let classes = report.classes.iter().zip(&report.confusion).map(|(class, row)| {
        let others: Vec<String> = row
            .iter()
            .zip(&report.classes)
            .filter(|(count, _)| **count > 0)
            .map(|(count, class)| format!("{} {count}", class.candidate))
            .collect();
        vec![class.candidate.clone(), perhaps(class.precision), perhaps(class.recall), others.join(", ")]
    });
    const CLASSES: [(&str, Fit); 4] = [
        ("CANDIDATE", Name),
        ("PRECISION %", Whole),
        ("RECALL %", Whole),
        ("WHERE IT WAS WANTED, CHOSEN", Text),
    ];
    let mut matrix = String::new();
    table(&mut matrix, width, &CLASSES, classes);
    let _ = write!(out, "{matrix}");
    out
}
