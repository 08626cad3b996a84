//! Runs `millrace-lab train` and `millrace graft why --what-if` as users do. The model must report what the file of
//! transfers shows.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use millrace_graft_proto::select::profile::ByteArrivals;
use millrace_lab::train::runs::{MeasuredPath, TrainingNetwork, TrainingRun, head};
use serde_json::Value;

/// Runs `millrace-lab train`, or another command of `millrace`, with the arguments in `line`.
fn run(directory: &Path, line: &str) -> Output {
    let lab = Path::new(env!("CARGO_BIN_EXE_millrace-lab"));
    let program = if line.starts_with("train") { lab.to_owned() } else { lab.with_file_name("millrace") };
    let mut command = Command::new(program);
    command.current_dir(directory).args(line.split_whitespace()).output().expect("it runs")
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("text")
}

fn error(output: &Output) -> String {
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr.clone()).expect("text")
}

/// Builds a file of transfers. With losses BBR is three times as fast as CUBIC, and without losses CUBIC is three times
/// as fast as BBR. A tunnel that is already open is twice as fast as the better of these two congestion controls.
fn transfers() -> String {
    let mut text = head() + "\n";
    for network in 0..40 {
        let loss = if network % 2 == 0 { 0.0 } else { 1.0 };
        let slow = if loss > 0.0 { [3.0, 1.0] } else { [1.0, 3.0] };
        for (candidate, times) in [("cubic", slow[0]), ("bbr", slow[1]), ("carried-warm", 0.5)] {
            let rung = |at: usize| Some(f64::from(network + 10) * times * (at + 1) as f64);
            let seen = MeasuredPath {
                loss_percent: Some(loss),
                rtt_ms: Some(f64::from(network)),
                paths: 1,
                ..MeasuredPath::default()
            };
            let came = ByteArrivals { rungs_ms: std::array::from_fn(rung), bytes: 32 << 20, over_ms: 1000.0 };
            let candidate = candidate.to_owned();
            let truth = TrainingNetwork::default();
            text += &(TrainingRun { network: network as u32, candidate, seed: 1, truth, seen, came }.line()
                + "\n");
        }
    }
    text
}

#[test]
fn model_trained_on_measured_transfers_chooses_the_fastest_candidate() {
    let directory = tempfile::tempdir().expect("a directory");
    let here = directory.path();
    fs::write(here.join("runs.csv"), transfers()).expect("a file");
    let trained = said(&run(here, "train runs.csv --out model.json"));
    assert!(trained.contains("40 networks") && trained.contains("the seed's tree"), "{trained}");
    let judged: Value =
        serde_json::from_str(&said(&run(here, "train runs.csv --out model.json --json"))).expect("JSON");
    let right = |at: usize| judged["scores"][at]["right"].as_f64().expect("a share");
    assert!(right(0) > 0.999, "{judged}");
    assert!(right(1) < 0.9 && right(2) < 0.7, "majority and BBR cannot know: {judged}");

    let ask = |what: &str| said(&run(here, &format!("graft why --model model.json --what-if {what}")));
    for (what, candidate) in [
        ("loss=1,offer=nothing,profile=loss", "bbr: right for 100 %"),
        ("loss=0,offer=nothing,profile=loss", "cubic: right for 100 %"),
        ("loss=1,offer=carrier,warmth=warm,profile=loss", "carried-warm: right for 100 %"),
    ] {
        let answer = ask(what);
        assert!(answer.starts_with(candidate), "{what}: {answer}");
    }
    said(&run(here, "train runs.csv --out few.json --candidates cubic,carried-warm"));
    let few = said(&run(here, "graft why --model few.json --what-if loss=1,offer=nothing,profile=loss"));
    assert!(few.starts_with("cubic:"), "only what it was trained with: {few}");
    let unknown = error(&run(here, "train runs.csv --out few.json --candidates cubic,vegas"));
    assert!(unknown.contains("it has no transfer with the candidate vegas"), "{unknown}");
    let answer = ask("loss=1,offer=nothing,profile=loss");
    assert!(answer.contains("loss is 1 %: more than 0.5 %"), "the way in words: {answer}");
    let data = said(&run(here, "graft why --json --model model.json --what-if loss=1,profile=loss"));
    let data: Value = serde_json::from_str(&data).expect("JSON");
    assert_eq!(data["candidate"], "bbr", "of the peer nothing is known, so there is no carrier: {data}");
}

#[test]
fn error_names_the_wrong_training_or_model_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let here = directory.path();
    let good = transfers();
    let write = |name: &str, text: &str| fs::write(here.join(name), text).expect("a file");
    let table = [
        (good.replacen(",bbr,", ",b/r,", 1), "line 3: candidate \"b/r\""),
        (good[..good.len() - 9].to_owned(), "it does not end with a line break"),
        (good.lines().take(10).map(|line| format!("{line}\n")).collect(), "at least 5 are needed"),
        (
            "network,candidate\n".to_owned(),
            "first line is not the one that `millrace-lab bench graft select` writes",
        ),
    ];
    for (text, wanted) in table {
        write("wrong.csv", &text);
        let error = error(&run(here, "train wrong.csv --out model.json"));
        assert!(error.contains("wrong.csv") && error.contains(wanted), "{wanted}: {error}");
        assert!(!here.join("model.json").exists(), "nothing is written then");
    }
    write("wrong.json", "{\"version\": 1}");
    let error = |line: &str| error(&run(here, line));
    let model = error("graft why --model wrong.json --what-if loss=1");
    assert!(model.contains("wrong.json") && model.contains("missing field"), "{model}");
    assert!(error("graft why --model none.json --what-if loss=1").contains("none.json"));
    assert!(error("graft why --model wrong.json --what-if lost=1").contains("there are: rtt, rate, loss"));
    assert!(error("graft why --what-if loss=1").contains("--model"));
    assert!(error("graft why").contains("PEER"));
}
