//! Formats reports as tables of text.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use millrace_cost::interval::SampledFigure;
use millrace_cost::report::{
    CgroupCost, CpuCost, Energy, Event, EventCost, ProcessCost, Report, ReportMethod, ReportMode, TaskCost,
};

use super::table::{TableCell, TextTable, estimate};

/// Largest number of rows of each table in a text report, except for the CPUs.
const TOP: usize = 20;

/// Formats a whole report. Lines with command lines are cut at `width` characters.
pub fn report(report: &Report, width: usize) -> String {
    let mut text = String::new();
    for line in head(report) {
        let _ = writeln!(text, "{line}");
    }
    let tables = tables(report, report.has_arguments());
    for table in tables.iter().filter(|table| !table.rows.is_empty()) {
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
    let mut notes = notes(report);
    if is_poor(report) {
        notes.push(NOTE_ON_POOR.to_owned());
    }
    if !notes.is_empty() {
        let _ = writeln!(text);
    }
    for line in notes {
        let _ = writeln!(text, "{line}");
    }
    text
}

pub const NOTE_ON_POOR: &str = "~: a figure that rests on fewer than 4 samples";

/// Reports whether a figure of the report rests on few samples and is marked with `~`, which [`NOTE_ON_POOR`] explains.
pub fn is_poor(report: &Report) -> bool {
    tables(report, false).iter().any(TextTable::is_poor)
}

pub fn cut(line: &str, width: usize) -> String {
    line.chars().take(width).collect()
}

/// Returns the first lines of a report: the observed host, how CPU time was measured, and the sums over all CPUs.
pub fn head(report: &Report) -> Vec<String> {
    let how = match (report.mode, report.method) {
        (ReportMode::Sampling, _) => "sampling only".to_owned(),
        (ReportMode::Events, Some(ReportMethod::SystemCalls)) => "calls timed at system calls".to_owned(),
        (ReportMode::Events, _) => "calls timed at functions".to_owned(),
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
    let timing = match auto.filter(|_| report.mode == ReportMode::Events) {
        Some(auto) => format!(", timing events {:.2} %", auto.timing_share * 100.0),
        None => String::new(),
    };
    let networking = report.cpus.iter().map(cpu_estimate).fold(SampledFigure::default(), SampledFigure::and);
    let local = report.cpus.iter().flat_map(|cpu| &cpu.events).filter(|cost| cost.event == Event::Local);
    let local = local.map(event_estimate).fold(SampledFigure::default(), SampledFigure::and);
    let local = match local.share > 0.0 {
        true => format!("; AF_UNIX and netlink, not in it, {}", estimate(&local, true)),
        false => String::new(),
    };
    let busy: u64 = report.cpus.iter().map(|cpu| cpu.procstat.busy_ns()).sum();
    let mut lines = vec![
        format!(
            "{}, Linux {}: {:.2} s, {frequency}, {how}",
            report.host.name,
            report.host.kernel,
            report.period_ns as f64 / 1e9,
        ),
        format!(
            "networking {} of one CPU ({}, {:.2} % busy){local}; observer {:.2} %{timing}",
            if networking.share == 0.0 { "0.00 %".to_owned() } else { estimate(&networking, true) },
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

fn event_estimate(cost: &EventCost) -> SampledFigure {
    SampledFigure::new(cost.share, cost.samples, cost.interval)
}

fn cpu_estimate(cpu: &CpuCost) -> SampledFigure {
    let networking = cpu.events.iter().filter(|cost| cost.event.is_networking());
    let samples = networking.map(|cost| cost.samples).sum();
    SampledFigure::new(cpu.networking_share, samples, cpu.networking_interval)
}

fn count_of_cpus(report: &Report) -> String {
    match report.cpus.len() {
        1 => "1 CPU".to_owned(),
        cpus => format!("{cpus} CPUs"),
    }
}

/// Returns a line that explains why events of the kernel, such as system calls and softirqs, were sampled and not
/// timed, in the report's whole period or in a part of it.
fn mode(report: &Report) -> Option<String> {
    let seconds = |ns: u64| ns as f64 / 1e9;
    match report.auto.as_ref() {
        Some(auto) if report.mode == ReportMode::Sampling => Some(format!(
            "timing events would take {:.2} % of one CPU and may take {:.2} %: they are only sampled; next trial in {:.0} s",
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

/// Returns notes about observations that were lost and figures that could not be measured.
pub fn notes(report: &Report) -> Vec<String> {
    let mut notes: Vec<String> = lost(report).into_iter().collect();
    for missing in &report.missing {
        let event = missing.event.map_or(String::new(), |event| format!("{event}: "));
        let size = missing.ns.map_or(String::new(), |ns| {
            format!(", {:.2} % of one CPU", ns as f64 * 100.0 / report.period_ns.max(1) as f64)
        });
        notes.push(format!("missing: {event}{}{size} ({})", missing.what, missing.reason));
    }
    notes
}

/// Returns a line with the numbers of lost observations, or `None` if nothing was lost.
pub fn lost(report: &Report) -> Option<String> {
    let lost = &report.lost;
    (!lost.is_nothing()).then(|| {
        format!(
            "lost: {} samples, {} stacks, {} process charges, {} task switches in calls, {} program runs",
            lost.samples, lost.stacks, lost.processes, lost.tasks, lost.skipped_runs
        )
    })
}

const CPUS: &str = "CPUs";
const PROCESSES: &str = "processes";
const COMMAND_LINE: &str = "command line";

/// Returns all tables of a report, most important first. Tables of values that were not measured are empty. With
/// `arguments`, processes are shown with their command lines.
pub fn tables(report: &Report, arguments: bool) -> Vec<TextTable> {
    vec![
        cpus(report),
        parts(report),
        if arguments { command_lines(report) } else { processes(report) },
        profiles(report),
        cgroups(report),
        programs(report),
        other_functions_table(report),
    ]
}

/// Returns the kernel's events, such as softirqs, that have a column in the table of CPUs. These are all events that
/// BPF programs time. An event that is only sampled has a column if it occurred.
fn columns(report: &Report) -> Vec<Event> {
    let occurred = |event: &Event| report.share_of(*event) > 0.0;
    Event::ALL
        .into_iter()
        .filter(|event| event.index() <= Event::IoUring.index() || occurred(event))
        .collect()
}

fn cpus(report: &Report) -> TextTable {
    let events = columns(report);
    let busy = |ns: u64| TableCell::Share(ns as f64 / report.period_ns.max(1) as f64);
    let row = |cpu: &CpuCost| {
        let mut row =
            vec![TableCell::Text(format!("{:>4}", cpu.cpu)), TableCell::Estimate(cpu_estimate(cpu))];
        row.extend(events.iter().map(|event| {
            let cost = cpu.events.iter().find(|cost| cost.event == *event);
            cost.map_or(TableCell::Unknown, |cost| TableCell::Estimate(event_estimate(cost)))
        }));
        row.push(TableCell::estimate(cpu.observer_share, cpu.observer_samples, cpu.observer_interval));
        row.extend(report.modes(cpu).map(|(_, ns)| ns.map_or(TableCell::Unknown, busy)));
        row
    };
    let mut columns = vec!["CPU", "networking"];
    columns.extend(events.iter().map(|event| event.name()));
    columns.extend(["observer", "user", "system", "softirq", "irq", "steal", "idle"]);
    TextTable { title: CPUS, columns, rows: report.cpus.iter().map(row).collect() }
}

fn parts(report: &Report) -> TextTable {
    let events = columns(report);
    let mut sums: BTreeMap<&str, [SampledFigure; Event::ALL.len()]> = BTreeMap::new();
    for cost in report.cpus.iter().flat_map(|cpu| &cpu.events) {
        for part in &cost.parts {
            if let Some(sum) = sums.entry(&part.name).or_default().get_mut(cost.event.index()) {
                *sum = sum.and(SampledFigure::new(part.share, part.samples, part.interval));
            }
        }
    }
    let row = |(name, of_events): (&str, [SampledFigure; Event::ALL.len()])| {
        let networking =
            of_events.into_iter().take(Event::NETWORKING).fold(SampledFigure::default(), SampledFigure::and);
        let mut row = vec![TableCell::Text(name.to_owned()), TableCell::Estimate(networking)];
        let of = |event: Event| of_events.get(event.index()).copied().unwrap_or_default();
        let measured =
            |event| if report.measures(event) { TableCell::Estimate(of(event)) } else { TableCell::Unknown };
        row.extend(events.iter().copied().map(measured));
        row.push(TableCell::Number(networking.samples));
        row
    };
    let mut columns = vec!["part", "networking"];
    columns.extend(events.iter().map(|event| event.name()));
    columns.push("samples");
    let mut table = TextTable { title: "parts", columns, rows: sums.into_iter().map(row).collect() };
    table.sort(1, false);
    table
}

/// Headings of the columns for the first five cells that [`task`] returns.
const EVENTS_OF_TASKS: [&str; 5] = ["send", "receive", "io_uring", "other", "local"];

/// Returns the cells of a process or cgroup. They are its shares of CPU time for sends, receives, io_uring, other
/// socket calls and local sockets, and its numbers of sends and receives per second.
fn task(cost: &TaskCost, report: &Report) -> impl Iterator<Item = TableCell> {
    let period = report.period_ns.max(1) as f64;
    let shares = cost.times().map(|ns| ns as f64 / period).into_iter();
    let shares = shares.zip(cost.figure_samples).zip(cost.figure_intervals);
    let events = [Event::Send, Event::Receive, Event::IoUring, Event::Sockets, Event::Local];
    let figures = shares.zip(events).map(|(((share, samples), interval), event)| {
        (report.measures(event), TableCell::estimate(share, samples, interval))
    });
    let rates = [(Event::Send, cost.send_calls), (Event::Receive, cost.receive_calls)];
    let rates = rates.map(|(event, calls)| {
        (report.counts(event), TableCell::Number((calls as f64 * 1e9 / period) as u64))
    });
    figures.chain(rates).map(|(known, cell)| if known { cell } else { TableCell::Unknown })
}

fn process_cell(process: &ProcessCost) -> TableCell {
    TableCell::estimate(process.share, process.cost.samples, process.interval)
}

fn processes(report: &Report) -> TextTable {
    let row = |process: &ProcessCost| {
        let mut row = vec![
            TableCell::Text(process.name.clone()),
            TableCell::Number(process.pid.into()),
            process_cell(process),
        ];
        row.extend(task(&process.cost, report));
        row.push(TableCell::Text(process.cgroup.clone().unwrap_or_default()));
        row
    };
    TextTable {
        title: PROCESSES,
        columns: [&["process", "PID", "share"], &EVENTS_OF_TASKS[..], &["sends/s", "receives/s", "cgroup"]]
            .concat(),
        rows: report.processes.iter().map(row).collect(),
    }
}

/// Returns the table of processes with command lines in place of the widest columns, which are cgroups and names. Most
/// command lines begin with the name anyway.
fn command_lines(report: &Report) -> TextTable {
    let row = |process: &ProcessCost| {
        let mut row = vec![TableCell::Number(process.pid.into()), process_cell(process)];
        row.extend(task(&process.cost, report).take(EVENTS_OF_TASKS.len()));
        row.push(TableCell::Text(process.arguments.as_ref().unwrap_or(&process.name).clone()));
        row
    };
    TextTable {
        title: PROCESSES,
        columns: [&["PID", "share"], &EVENTS_OF_TASKS[..], &[COMMAND_LINE]].concat(),
        rows: report.processes.iter().map(row).collect(),
    }
}

fn profiles(report: &Report) -> TextTable {
    let mut rows = Vec::new();
    for process in &report.processes {
        for part in process.profile.iter().flat_map(|profile| &profile.parts) {
            rows.push(vec![
                TableCell::Text(process.name.clone()),
                TableCell::Number(process.pid.into()),
                TableCell::Text(part.name.clone()),
                TableCell::estimate(part.share, part.samples, part.interval),
                TableCell::Number(part.samples),
            ]);
        }
    }
    TextTable {
        title: "profiles",
        columns: vec!["process", "PID", "all its CPU time", "share", "samples"],
        rows,
    }
}

fn cgroups(report: &Report) -> TextTable {
    let share_of =
        |cgroup: &CgroupCost| TableCell::estimate(cgroup.share, cgroup.cost.samples, cgroup.interval);
    let row = |cgroup: &CgroupCost| {
        let name = cgroup.path.clone().unwrap_or_else(|| format!("({})", cgroup.id));
        let mut row =
            vec![TableCell::Text(name), TableCell::Number(cgroup.processes.into()), share_of(cgroup)];
        row.extend(task(&cgroup.cost, report));
        row
    };
    TextTable {
        title: "cgroups",
        columns: [&["cgroup", "processes", "share"], &EVENTS_OF_TASKS[..], &["sends/s", "receives/s"]]
            .concat(),
        rows: report.cgroups.iter().map(row).collect(),
    }
}

fn programs(report: &Report) -> TextTable {
    let row = |program: &millrace_cost::report::ProgramCost| {
        let own = if program.own { "observer" } else { "" };
        vec![
            TableCell::Text(program.name.clone()),
            TableCell::Number(program.id.into()),
            TableCell::Text(program.kind.clone()),
            TableCell::Share(program.share),
            TableCell::Number(program.runs),
            TableCell::Microseconds(program.run_ns.checked_div(program.runs).unwrap_or(0)),
            TableCell::Text(own.to_owned()),
        ]
    };
    TextTable {
        title: "BPF programs",
        columns: vec!["BPF program", "ID", "type", "share", "runs", "each", "of"],
        rows: report.programs.iter().flatten().map(row).collect(),
    }
}

fn other_functions_table(report: &Report) -> TextTable {
    let mut rows = Vec::new();
    for other in &report.other {
        for function in &other.functions {
            rows.push(vec![
                TableCell::Text(function.name.clone()),
                TableCell::Text(other.event.to_string()),
                TableCell::estimate(
                    function.ns as f64 / report.period_ns.max(1) as f64,
                    function.samples,
                    function.interval,
                ),
                TableCell::Number(function.samples),
            ]);
        }
    }
    let mut table = TextTable {
        title: "other functions",
        columns: vec!["function of the part other", "event", "share", "samples"],
        rows,
    };
    table.sort(2, false);
    table
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use millrace_cost::report::{
        Auto, EventCost, EventPart, LostObservations, MissingMeasurement, ObserverCost, ReportHost, VERSION,
    };

    pub fn example() -> Report {
        let part = |name: &str, share: f64| EventPart {
            name: name.to_owned(),
            ns: 1,
            share,
            samples: 1,
            interval: None,
        };
        let receive = EventCost {
            event: Event::NetRx,
            ns: 250_000_000,
            share: 0.25,
            calls: Some(7),
            observer_ns: 20_000_000,
            samples: 2,
            sampled: 0,
            interval: None,
            parts: vec![part("UDP", 0.15), part("other", 0.1)],
        };
        let cpu = |cpu| CpuCost {
            cpu,
            networking_share: 0.25,
            observer_share: 0.02,
            events: vec![receive.clone()],
            ..CpuCost::default()
        };
        Report {
            version: VERSION,
            sequence: 0,
            time_unix_ms: 0,
            period_ns: 1_000_000_000,
            mode: ReportMode::Events,
            sampled_ns: 0,
            auto: None,
            method: Some(ReportMethod::Functions),
            frequency_hz: 1000,
            host: ReportHost { name: "host".to_owned(), kernel: "6.1".to_owned() },
            cpus: vec![cpu(0), cpu(1)],
            other: Vec::new(),
            processes: vec![ProcessCost {
                pid: 7,
                name: "server".to_owned(),
                arguments: None,
                cgroup: Some("/system.slice".to_owned()),
                share: 0.3,
                interval: None,
                cost: TaskCost { send_ns: 300_000_000, send_calls: 1000, ..TaskCost::default() },
                profile: None,
            }],
            cgroups: Vec::new(),
            programs: None,
            energy: Energy::Absent { reason: "no RAPL".to_owned() },
            observer: ObserverCost { share: 0.01, ..ObserverCost::default() },
            lost: LostObservations { samples: 3, ..LostObservations::default() },
            missing: vec![MissingMeasurement {
                event: Some(Event::Send),
                what: "sendfile".to_owned(),
                reason: "no function".to_owned(),
                ns: Some(20_000_000),
            }],
            stacks: None,
        }
    }

    #[test]
    fn cost_report_is_rendered_as_text() {
        let text = report(&example(), usize::MAX);
        for want in [
            "host, Linux 6.1: 1.00 s, 1000 Hz, calls timed at functions",
            "networking 50.00 % of one CPU (2 CPUs, 0.00 % busy); observer 1.00 %\n",
            "energy: no RAPL",
            "UDP       30.00 %  30.00 %",
            "server     7  30.00 %     ?        ?         ?      ?      ?",
            "lost: 3 samples",
            "missing: send: sendfile, 2.00 % of one CPU (no function)",
        ] {
            assert!(text.contains(want), "{want} in\n{text}");
        }
    }

    /// The margin of error is shown in every table with sampled figures, and in the first lines of a report.
    #[test]
    fn sampled_figures_show_their_uncertainty() {
        let mut example = example();
        let interval = Some([0.2, 0.35]);
        for cpu in &mut example.cpus {
            cpu.networking_interval = interval;
            cpu.events[0].interval = interval;
            cpu.events[0].parts[0].interval = Some([0.05, 0.25]);
        }
        example.processes[0].interval = Some([0.1, 0.6]);
        example.processes[0].cost.samples = 3;
        let text = report(&example, usize::MAX);
        for want in [
            "networking 50.00\u{b1}14.14 % of one CPU",
            "25.00\u{b1}10.00 %",
            "UDP    ~30.00\u{b1}14.14 %",
            "~30.00\u{b1}30.00 %",
            NOTE_ON_POOR,
        ] {
            assert!(text.contains(want), "{want} in\n{text}");
        }
        assert!(!report(&super::tests::example(), usize::MAX).contains('~'), "exact");
    }

    /// Sampled figures of processes, cgroups, the observer and AF_UNIX sockets show their margin of error. A leading
    /// `~` shows that a figure rests on few samples.
    #[test]
    fn sampled_columns_show_their_uncertainty() {
        let mut example = example();
        example.processes[0].cost = TaskCost {
            send_ns: 300_000_000,
            other_ns: 2_000_000,
            local_ns: 40_000_000,
            figure_samples: [0, 0, 0, 2, 40],
            figure_intervals: [None, None, None, Some([0.0003, 0.0072]), Some([0.03, 0.055])],
            ..TaskCost::default()
        };
        for event in [Event::Send, Event::Sockets, Event::Local] {
            let local = EventCost {
                event,
                share: 0.04,
                samples: 40,
                interval: Some([0.03, 0.055]),
                parts: Vec::new(),
                ..example.cpus[0].events[0].clone()
            };
            example.cpus[0].events.push(local);
        }
        let process = &example.processes[0];
        example.cgroups = vec![CgroupCost {
            id: 1,
            path: Some("/a".to_owned()),
            share: process.share,
            interval: None,
            processes: 1,
            cost: process.cost,
        }];
        example.cpus[0].observer_samples = 3;
        example.cpus[0].observer_interval = Some([0.01, 0.05]);
        let text = report(&example, usize::MAX);
        let columns = |row: &str| {
            let line = text.lines().find(|line| line.starts_with(row)).expect("a row");
            line.split("  ")
                .map(str::trim)
                .filter(|cell| !cell.is_empty())
                .skip(2)
                .take(6)
                .collect::<Vec<_>>()
        };
        let want = ["30.00 %", "30.00 %", "?", "?", "~0.20\u{b1}0.52 %", "4.00\u{b1}1.50 %"];
        assert_eq!([columns("server"), columns("/a")], [want, want], "{text}");
        for want in ["AF_UNIX and netlink, not in it, 4.00\u{b1}1.50 %;", " ~2.00\u{b1}3.00 %", NOTE_ON_POOR]
        {
            assert!(text.contains(want), "{want} in\n{text}");
        }
    }

    /// A kernel that does not measure the time of hard interrupts shows it as unknown, not as 0.
    #[test]
    fn unmeasured_time_of_hard_interrupts_is_unknown() {
        let irq = |ns| {
            let mut example = example();
            example.missing[0] = MissingMeasurement {
                event: None,
                what: "hard interrupts".to_owned(),
                reason: "why".to_owned(),
                ns,
            };
            let table = cpus(&example);
            let column = table.columns.iter().position(|column| *column == "irq").expect("a column");
            (table.rows[0][column].clone(), notes(&example).pop().expect("a note"))
        };
        assert_eq!(irq(None), (TableCell::Unknown, "missing: hard interrupts (why)".to_owned()));
        let measured = "missing: hard interrupts, 3.00 % of one CPU (why)".to_owned();
        assert_eq!(irq(Some(30_000_000)), (TableCell::Share(0.0), measured));
    }

    #[test]
    fn measuring_mode_chosen_by_cpu_budget_is_explained() {
        let auto = Auto {
            budget_share: 0.01,
            timing_share: 0.142,
            retry_ms: Some(9000),
            changes: 1,
            interrupt_ns: Some(15_600),
            lowered_from_hz: Some(1000),
        };
        let sampled = Report {
            mode: ReportMode::Sampling,
            sampled_ns: 1_000_000_000,
            auto: Some(auto),
            frequency_hz: 250,
            ..example()
        };
        let text = report(&sampled, usize::MAX);
        for want in [
            "250 Hz (not 1000: an interrupt takes 15.6 us here), sampling only",
            "timing events would take 14.20 % of one CPU and may take 1.00 %: they are only sampled; next trial in 9 s",
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
    fn command_lines_are_shown_on_request_without_control_characters() {
        let mut example = example();
        let hidden = report(&example, usize::MAX);
        assert!(hidden.contains("server") && !hidden.contains("command line"), "{hidden}");
        example.processes[0].arguments = Some(format!("server --token x\x1b[2J {}", "y".repeat(300)));
        example.processes[0].cgroup = Some("/\x1b[31m\n".to_owned());
        let shown = report(&example, usize::MAX);
        assert!(shown.contains("local  command line\n"), "{shown}");
        assert!(shown.contains("?  server --token x?[2J yyy"), "{shown}");
        assert!(shown.contains("y".repeat(300).as_str()));
        let narrow = report(&example, 80);
        let line = narrow.lines().find(|line| line.contains("--token")).expect("a line");
        assert_eq!(line.chars().count(), 80);
        for text in [shown, narrow, tables(&example, false)[2].lines().join("\n")] {
            assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        }
    }

    /// A value that was not measured is shown as `?`, not as 0.
    #[test]
    fn event_that_was_not_measured_is_shown_as_unknown() {
        let table = cpus(&example());
        assert_eq!(table.rows[0][2], TableCell::estimate(0.25, 2, None));
        assert_eq!(table.rows[0][4], TableCell::Unknown);
        assert_eq!((table.columns[7], &table.rows[0][7]), ("observer", &TableCell::estimate(0.02, 0, None)));
        let of_parts = parts(&example());
        assert_eq!(
            of_parts.rows[0][2..5],
            [TableCell::estimate(0.3, 2, None), TableCell::Unknown, TableCell::Unknown]
        );
        let of_processes = processes(&example());
        assert_eq!(of_processes.rows[0][3..10], [const { TableCell::Unknown }; 7]);
    }

    /// CPU time of AF_UNIX sockets and of kernel work that is not networking has its own columns in the table of CPUs.
    /// The sum of networking's CPU time does not include it.
    #[test]
    fn cpu_table_has_a_column_for_each_kernel_event_that_occurred() {
        let mut example = example();
        let with = |event, share| {
            let part = EventPart { name: "part".to_owned(), ns: 1, share, samples: 1, interval: None };
            EventCost {
                event,
                ns: 1,
                share,
                calls: None,
                observer_ns: 0,
                samples: 1,
                sampled: 1,
                interval: Some([share / 2.0, share * 2.0]),
                parts: vec![part],
            }
        };
        example.cpus[0].events.extend([
            with(Event::Timers, 0.125),
            with(Event::Poll, 0.0),
            with(Event::Local, 0.5),
        ]);
        example.cpus[1].procstat.irq_ns = 30_000_000;
        let table = cpus(&example);
        let column = |name| table.columns.iter().position(|column| *column == name);
        let timers = TableCell::estimate(0.125, 1, Some([0.0625, 0.25]));
        assert_eq!(table.rows[0][column("timers").expect("it occurred")], timers);
        assert_eq!(table.rows[0][1], TableCell::estimate(0.25, 4, None), "samples of networking alone");
        assert_eq!(table.rows[1][column("local").expect("it occurred")], TableCell::Unknown);
        assert_eq!(column("poll"), None);
        assert_eq!(table.rows[1][column("irq").expect("always there")], TableCell::Share(0.03));
        assert!(column("steal").is_some());
        let text = report(&example, usize::MAX);
        assert!(
            text.contains("% busy); AF_UNIX and netlink, not in it, ~50.00\u{b1}50.00 %; observer"),
            "{text}"
        );
        let of_parts = parts(&example);
        let row =
            of_parts.rows.iter().find(|row| row[0] == TableCell::Text("part".to_owned())).expect("a row");
        assert_eq!(row[1], TableCell::estimate(0.125, 2, None));
        assert_eq!(row.last(), Some(&TableCell::Number(2)));
    }

    #[test]
    fn times_of_network_stack_parts_are_summed_over_cpus() {
        let table = parts(&example());
        assert_eq!(
            table.rows[0][..2],
            [TableCell::Text("UDP".to_owned()), TableCell::estimate(0.3, 2, None)]
        );
        assert_eq!(
            table.rows[1][..2],
            [TableCell::Text("other".to_owned()), TableCell::estimate(0.2, 2, None)]
        );
    }
}
