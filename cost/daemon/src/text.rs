//! Reports as tables of text.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use millrace_cost::report::{Cpu, Energy, Event, Method, Mode, Process, Report, TaskCost};

use super::table::{Cell, Table};

/// Rows of a table when it is one of several.
const TOP: usize = 20;

/// All of a report; command lines are cut at `width`.
pub fn report(report: &Report, width: usize) -> String {
    let mut text = String::new();
    for line in head(report) {
        let _ = writeln!(text, "{line}");
    }
    for table in tables(report, report.has_arguments()).into_iter().filter(|table| !table.rows.is_empty()) {
        let _ = writeln!(text);
        let rows = if table.title == CPUS { table.rows.len() } else { TOP };
        let width = if table.columns.contains(&COMMAND_LINE) { width } else { usize::MAX };
        for line in table.lines().iter().take(rows + 1) {
            let _ = writeln!(text, "{}", cut(line, width));
        }
        if let Some(more) = table.rows.len().checked_sub(rows).filter(|more| *more > 0) {
            let _ = writeln!(text, "... {more} more");
        }
    }
    let notes = notes(report);
    if !notes.is_empty() {
        let _ = writeln!(text);
    }
    for line in notes {
        let _ = writeln!(text, "{line}");
    }
    text
}

pub fn cut(line: &str, width: usize) -> String {
    line.chars().take(width).collect()
}

/// What the figures are of, and their sum.
pub fn head(report: &Report) -> Vec<String> {
    let how = match (report.mode, report.method) {
        (Mode::Sampling, _) => "sampling only".to_owned(),
        (Mode::Events, Some(Method::SystemCalls)) => "calls timed at system calls".to_owned(),
        (Mode::Events, _) => "calls timed at functions".to_owned(),
    };
    let auto = report.auto.as_ref();
    let lowered = auto.and_then(|auto| Some((auto.lowered_from_hz?, auto.interrupt_ns?)));
    let frequency = match lowered {
        Some((from, ns)) => {
            let us = ns as f64 / 1e3;
            format!("{} Hz (not {from}: an interrupt takes {us:.1} us here)", report.frequency_hz)
        }
        None => format!("{} Hz", report.frequency_hz),
    };
    let timing = match auto.filter(|_| report.mode == Mode::Events) {
        Some(auto) => format!(", timing events {:.2} %", auto.timing_share * 100.0),
        None => String::new(),
    };
    let networking: f64 = report.cpus.iter().map(|cpu| cpu.networking_share).sum();
    let busy: u64 = report.cpus.iter().map(|cpu| cpu.procstat.busy_ns()).sum();
    let mut lines = vec![
        format!(
            "{}, Linux {}: {:.2} s, {frequency}, {how}",
            report.host.name,
            report.host.kernel,
            report.period_ns as f64 / 1e9,
        ),
        format!(
            "networking {:.2} % of one CPU ({}, {:.2} % busy); observer {:.2} %{timing}",
            networking * 100.0,
            count_of_cpus(report),
            busy as f64 * 100.0 / report.period_ns.max(1) as f64,
            report.observer.share * 100.0
        ),
    ];
    lines.extend(mode(report));
    match &report.energy {
        Energy::Absent { reason } => lines.push(format!("energy: {reason}")),
        Energy::Measured {
            source, total_joules, active_joules, networking_joules, networking_watts, ..
        } => {
            let of = match active_joules {
                Some(active) => format!("{active:.2} J above idle"),
                None => format!("{total_joules:.2} J in total, idle power included"),
            };
            lines.push(format!(
                "energy ({source}): networking {networking_watts:.2} W, {networking_joules:.2} of {of}"
            ));
        }
    }
    lines
}

fn count_of_cpus(report: &Report) -> String {
    match report.cpus.len() {
        1 => "1 CPU".to_owned(),
        cpus => format!("{cpus} CPUs"),
    }
}

/// That not all of the time is timed, and why.
fn mode(report: &Report) -> Option<String> {
    let seconds = |ns: u64| ns as f64 / 1e9;
    match report.auto.as_ref() {
        Some(auto) if report.mode == Mode::Sampling => Some(format!(
            "timing events would take {:.2} % of one CPU and may take {:.2} %: they are sampled; tried again in {:.0} s",
            auto.timing_share * 100.0,
            auto.budget_share * 100.0,
            auto.retry_ms.unwrap_or(0) as f64 / 1e3
        )),
        _ if (1..report.period_ns).contains(&report.sampled_ns) => Some(format!(
            "in {:.2} of {:.2} s events were sampled, without numbers of calls",
            seconds(report.sampled_ns),
            seconds(report.period_ns)
        )),
        _ => None,
    }
}

/// What the figures do not contain.
pub fn notes(report: &Report) -> Vec<String> {
    let mut notes: Vec<String> = lost(report).into_iter().collect();
    for missing in &report.missing {
        let event = missing.event.map_or(String::new(), |event| format!("{event}: "));
        notes.push(format!("missing: {event}{} ({})", missing.what, missing.reason));
    }
    notes
}

/// What was seen and is not in the figures, if anything.
pub fn lost(report: &Report) -> Option<String> {
    let lost = &report.lost;
    (!lost.is_nothing()).then(|| {
        format!(
            "lost: {} samples, {} stacks, {} process sums, {} places of tasks, {} runs",
            lost.samples, lost.stacks, lost.processes, lost.tasks, lost.skipped_runs
        )
    })
}

const CPUS: &str = "CPUs";
const PROCESSES: &str = "processes";
const COMMAND_LINE: &str = "command line";

/// Every view of a report, most important first. Tables of what was not measured are empty. With `arguments`, processes are
/// shown by their command lines.
pub fn tables(report: &Report, arguments: bool) -> Vec<Table> {
    vec![
        cpus(report),
        parts(report),
        if arguments { command_lines(report) } else { processes(report) },
        profiles(report),
        cgroups(report),
        programs(report),
        others(report),
    ]
}

fn cpus(report: &Report) -> Table {
    let busy = |ns: u64| Cell::Share(ns as f64 / report.period_ns.max(1) as f64);
    let row = |cpu: &Cpu| {
        let mut row = vec![Cell::Text(format!("{:>4}", cpu.cpu)), Cell::Share(cpu.networking_share)];
        row.extend(Event::ALL.map(|event| {
            let cost = cpu.events.iter().find(|cost| cost.event == event);
            cost.map_or(Cell::Unknown, |cost| Cell::Share(cost.share))
        }));
        row.push(Cell::Share(cpu.observer_share));
        let stat = &cpu.procstat;
        row.extend([stat.user_ns, stat.system_ns, stat.softirq_ns, stat.idle_ns].map(busy));
        row
    };
    Table {
        title: CPUS,
        columns: vec![
            "CPU",
            "networking",
            "net_rx",
            "net_tx",
            "send",
            "receive",
            "io_uring",
            "observer",
            "user",
            "system",
            "softirq",
            "idle",
        ],
        rows: report.cpus.iter().map(row).collect(),
    }
}

fn parts(report: &Report) -> Table {
    let mut sums: BTreeMap<&str, [f64; Event::ALL.len()]> = BTreeMap::new();
    for cost in report.cpus.iter().flat_map(|cpu| &cpu.events) {
        for part in &cost.parts {
            if let Some(sum) = sums.entry(&part.name).or_default().get_mut(cost.event.index()) {
                *sum += part.share;
            }
        }
    }
    let row = |(name, shares): (&str, [f64; Event::ALL.len()])| {
        let mut row = vec![Cell::Text(name.to_owned()), Cell::Share(shares.iter().sum())];
        let measured = |event, share| if report.measures(event) { Cell::Share(share) } else { Cell::Unknown };
        row.extend(Event::ALL.into_iter().zip(shares).map(|(event, share)| measured(event, share)));
        row
    };
    let mut table = Table {
        title: "parts",
        columns: vec!["part", "all", "net_rx", "net_tx", "send", "receive", "io_uring"],
        rows: sums.into_iter().map(row).collect(),
    };
    table.sort(1, false);
    table
}

/// The first columns of [`task`].
const EVENTS_OF_TASKS: usize = 3;

/// Shares of `send`, `receive` and `io_uring`, then calls a second.
fn task(cost: &TaskCost, report: &Report) -> impl Iterator<Item = Cell> {
    let share = |ns: u64| Cell::Share(ns as f64 / report.period_ns.max(1) as f64);
    let per_second = |calls: u64| Cell::Number((calls as f64 * 1e9 / report.period_ns.max(1) as f64) as u64);
    let cells = [
        (report.measures(Event::Send), share(cost.send_ns)),
        (report.measures(Event::Receive), share(cost.receive_ns)),
        (report.measures(Event::IoUring), share(cost.io_uring_ns)),
        (report.counts(Event::Send), per_second(cost.send_calls)),
        (report.counts(Event::Receive), per_second(cost.receive_calls)),
    ];
    cells.into_iter().map(|(known, cell)| if known { cell } else { Cell::Unknown })
}

fn processes(report: &Report) -> Table {
    let row = |process: &Process| {
        let mut row = vec![
            Cell::Text(process.name.clone()),
            Cell::Number(process.pid.into()),
            Cell::Share(process.share),
        ];
        row.extend(task(&process.cost, report));
        row.push(Cell::Text(process.cgroup.clone().unwrap_or_default()));
        row
    };
    Table {
        title: PROCESSES,
        columns: vec![
            "process",
            "PID",
            "share",
            "send",
            "receive",
            "io_uring",
            "sends/s",
            "receives/s",
            "cgroup",
        ],
        rows: report.processes.iter().map(row).collect(),
    }
}

/// In place of what takes most room: cgroups, and names, with which most command lines begin.
fn command_lines(report: &Report) -> Table {
    let row = |process: &Process| {
        let mut row = vec![Cell::Number(process.pid.into()), Cell::Share(process.share)];
        row.extend(task(&process.cost, report).take(EVENTS_OF_TASKS));
        row.push(Cell::Text(process.arguments.as_ref().unwrap_or(&process.name).clone()));
        row
    };
    Table {
        title: PROCESSES,
        columns: vec!["PID", "share", "send", "receive", "io_uring", COMMAND_LINE],
        rows: report.processes.iter().map(row).collect(),
    }
}

fn profiles(report: &Report) -> Table {
    let mut rows = Vec::new();
    for process in &report.processes {
        for part in process.profile.iter().flat_map(|profile| &profile.parts) {
            rows.push(vec![
                Cell::Text(process.name.clone()),
                Cell::Number(process.pid.into()),
                Cell::Text(part.name.clone()),
                Cell::Share(part.share),
            ]);
        }
    }
    Table { title: "profiles", columns: vec!["process", "PID", "all its CPU time", "share"], rows }
}

fn cgroups(report: &Report) -> Table {
    let row = |cgroup: &millrace_cost::report::Cgroup| {
        let name = cgroup.path.clone().unwrap_or_else(|| format!("({})", cgroup.id));
        let mut row =
            vec![Cell::Text(name), Cell::Number(cgroup.processes.into()), Cell::Share(cgroup.share)];
        row.extend(task(&cgroup.cost, report));
        row
    };
    Table {
        title: "cgroups",
        columns: vec!["cgroup", "processes", "share", "send", "receive", "io_uring", "sends/s", "receives/s"],
        rows: report.cgroups.iter().map(row).collect(),
    }
}

fn programs(report: &Report) -> Table {
    let row = |program: &millrace_cost::report::Program| {
        let own = if program.own { "observer" } else { "" };
        vec![
            Cell::Text(program.name.clone()),
            Cell::Number(program.id.into()),
            Cell::Text(program.kind.clone()),
            Cell::Share(program.share),
            Cell::Number(program.runs),
            Cell::Microseconds(program.run_ns.checked_div(program.runs).unwrap_or(0)),
            Cell::Text(own.to_owned()),
        ]
    };
    Table {
        title: "BPF programs",
        columns: vec!["BPF program", "ID", "type", "share", "runs", "each", "of"],
        rows: report.programs.iter().flatten().map(row).collect(),
    }
}

fn others(report: &Report) -> Table {
    let mut rows = Vec::new();
    for other in &report.other {
        for function in &other.functions {
            rows.push(vec![
                Cell::Text(function.name.clone()),
                Cell::Text(other.event.to_string()),
                Cell::Share(function.ns as f64 / report.period_ns.max(1) as f64),
            ]);
        }
    }
    let mut table = Table {
        title: "other functions",
        columns: vec!["function of the part other", "event", "share"],
        rows,
    };
    table.sort(2, false);
    table
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use millrace_cost::report::{Auto, EventCost, Host, Lost, Missing, Observer, Part, VERSION};

    pub fn example() -> Report {
        let part = |name: &str, share: f64| Part { name: name.to_owned(), ns: 1, share, samples: 1 };
        let receive = EventCost {
            event: Event::NetRx,
            ns: 250_000_000,
            share: 0.25,
            calls: Some(7),
            observer_ns: 20_000_000,
            samples: 2,
            parts: vec![part("UDP", 0.15), part("other", 0.1)],
        };
        let cpu = |cpu| Cpu {
            cpu,
            networking_share: 0.25,
            observer_share: 0.02,
            events: vec![receive.clone()],
            ..Cpu::default()
        };
        Report {
            version: VERSION,
            sequence: 0,
            time_unix_ms: 0,
            period_ns: 1_000_000_000,
            mode: Mode::Events,
            sampled_ns: 0,
            auto: None,
            method: Some(Method::Functions),
            frequency_hz: 1000,
            host: Host { name: "host".to_owned(), kernel: "6.1".to_owned() },
            cpus: vec![cpu(0), cpu(1)],
            other: Vec::new(),
            processes: vec![Process {
                pid: 7,
                name: "server".to_owned(),
                arguments: None,
                cgroup: Some("/system.slice".to_owned()),
                share: 0.3,
                cost: TaskCost { send_ns: 300_000_000, send_calls: 1000, ..TaskCost::default() },
                profile: None,
            }],
            cgroups: Vec::new(),
            programs: None,
            energy: Energy::Absent { reason: "no RAPL".to_owned() },
            observer: Observer { share: 0.01, ..Observer::default() },
            lost: Lost { samples: 3, ..Lost::default() },
            missing: vec![Missing {
                event: Some(Event::Send),
                what: "sendfile".to_owned(),
                reason: "no function".to_owned(),
            }],
            stacks: None,
        }
    }

    #[test]
    fn a_report_reads_as_text() {
        let text = report(&example(), usize::MAX);
        for want in [
            "host, Linux 6.1: 1.00 s, 1000 Hz, calls timed at functions",
            "networking 50.00 % of one CPU (2 CPUs, 0.00 % busy); observer 1.00 %\n",
            "energy: no RAPL",
            "UDP    30.00 %  30.00 %",
            "server     7  30.00 %     ?        ?",
            "lost: 3 samples",
            "missing: send: sendfile (no function)",
        ] {
            assert!(text.contains(want), "{want} in\n{text}");
        }
    }

    #[test]
    fn a_change_of_mode_is_said() {
        let auto = Auto {
            budget_share: 0.01,
            timing_share: 0.142,
            retry_ms: Some(9000),
            changes: 1,
            interrupt_ns: Some(15_600),
            lowered_from_hz: Some(1000),
        };
        let sampled = Report {
            mode: Mode::Sampling,
            sampled_ns: 1_000_000_000,
            auto: Some(auto),
            frequency_hz: 250,
            ..example()
        };
        let text = report(&sampled, usize::MAX);
        for want in [
            "250 Hz (not 1000: an interrupt takes 15.6 us here), sampling only",
            "timing events would take 14.20 % of one CPU and may take 1.00 %: they are sampled; tried again in 9 s",
        ] {
            assert!(text.contains(want), "{want} in\n{text}");
        }
        let timed = Report { auto: Some(Auto { timing_share: 0.004, retry_ms: None, ..auto }), ..example() };
        assert!(report(&timed, usize::MAX).contains("observer 1.00 %, timing events 0.40 %\n"));
        let both = Report { sampled_ns: 250_000_000, ..timed };
        let text = report(&both, usize::MAX);
        assert!(text.contains("in 0.25 of 1.00 s events were sampled"), "{text}");
    }

    #[test]
    fn command_lines_are_shown_if_asked_for_and_control_nothing() {
        let mut example = example();
        let hidden = report(&example, usize::MAX);
        assert!(hidden.contains("server") && !hidden.contains("command line"), "{hidden}");
        example.processes[0].arguments = Some(format!("server --token x\x1b[2J {}", "y".repeat(300)));
        example.processes[0].cgroup = Some("/\x1b[31m\n".to_owned());
        let shown = report(&example, usize::MAX);
        assert!(shown.contains("io_uring  command line\n"), "{shown}");
        assert!(shown.contains("?  server --token x?[2J yyy"), "{shown}");
        assert!(shown.contains("y".repeat(300).as_str()));
        let narrow = report(&example, 80);
        let line = narrow.lines().find(|line| line.contains("--token")).expect("a line");
        assert_eq!(line.chars().count(), 80);
        for text in [shown, narrow, tables(&example, false)[2].lines().join("\n")] {
            assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        }
    }

    /// What is not measured is not 0.
    #[test]
    fn an_event_that_is_not_there_is_a_question() {
        let table = cpus(&example());
        assert_eq!(table.rows[0][2], Cell::Share(0.25));
        assert_eq!(table.rows[0][4], Cell::Unknown);
        assert_eq!((table.columns[7], &table.rows[0][7]), ("observer", &Cell::Share(0.02)));
        let of_parts = parts(&example());
        assert_eq!(of_parts.rows[0][2..5], [Cell::Share(0.3), Cell::Unknown, Cell::Unknown]);
        let of_processes = processes(&example());
        assert_eq!(of_processes.rows[0][3..8], [const { Cell::Unknown }; 5]);
    }

    #[test]
    fn parts_add_up_over_cpus() {
        let table = parts(&example());
        assert_eq!(table.rows[0][..2], [Cell::Text("UDP".to_owned()), Cell::Share(0.3)]);
        assert_eq!(table.rows[1][..2], [Cell::Text("other".to_owned()), Cell::Share(0.2)]);
    }
}
