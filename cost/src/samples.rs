//! Makes reports and stacks for tests.

use crate::report::{
    CgroupCost, CpuCost, Energy, Event, EventCost, EventPart, LostObservations, MissingMeasurement,
    ObserverCost, ProcStat, ProcessCost, ProfiledStack, Report, ReportHost, ReportMode, Stacks, TaskCost,
    VERSION,
};

/// Returns a report of a period of one second. Reports differ only in their number and time.
pub fn report(sequence: u64) -> Report {
    let mut report = bare(sequence);
    crate::interval::fill(&mut report);
    report
}

fn bare(sequence: u64) -> Report {
    Report {
        version: VERSION,
        sequence,
        time_unix_ms: 1_700_000_000_000 + 1000 * sequence,
        period_ns: 1_000_000_000,
        mode: ReportMode::Events,
        sampled_ns: 0,
        auto: None,
        method: None,
        frequency_hz: 1000,
        host: ReportHost { name: "host".to_owned(), kernel: "6.1.0".to_owned() },
        cpus: vec![cpu(0), cpu(1)],
        other: Vec::new(),
        processes: vec![process()],
        cgroups: vec![CgroupCost {
            id: 77,
            path: Some("/server".to_owned()),
            share: 0.25,
            interval: None,
            processes: 1,
            cost: process().cost,
        }],
        programs: None,
        energy: Energy::Absent { reason: "no RAPL".to_owned() },
        observer: ObserverCost {
            user_ns: 1_000_000,
            system_ns: 2_000_000,
            events_ns: 40_000_000,
            share: 0.043,
            ..ObserverCost::default()
        },
        lost: LostObservations { samples: 3, ..LostObservations::default() },
        missing: vec![MissingMeasurement {
            event: Some(Event::Send),
            what: "sendfile".to_owned(),
            reason: "no function".to_owned(),
            ns: None,
        }],
        stacks: None,
    }
}

fn cpu(cpu: u32) -> CpuCost {
    let part = |name: &str, share: f64, samples| EventPart {
        name: name.to_owned(),
        ns: (share * 1e9) as u64,
        share,
        samples,
        interval: None,
    };
    CpuCost {
        cpu,
        networking_share: 0.25,
        networking_interval: None,
        observer_share: 0.02,
        observer_samples: 20,
        observer_interval: None,
        events: vec![EventCost {
            event: Event::NetRx,
            ns: 250_000_000,
            share: 0.25,
            calls: Some(1000),
            observer_ns: 20_000_000,
            samples: 250,
            sampled: 0,
            interval: None,
            parts: vec![part("UDP", 0.15, 150), part("bpf:relay_ingress", 0.1, 100)],
        }],
        procstat: ProcStat { user_ns: 500_000_000, softirq_ns: 250_000_000, ..ProcStat::default() },
        samples: 1000,
        lost_samples: 0,
    }
}

fn process() -> ProcessCost {
    ProcessCost {
        pid: 7,
        name: "server".to_owned(),
        arguments: None,
        cgroup: Some("/server".to_owned()),
        share: 0.25,
        interval: None,
        cost: TaskCost { send_ns: 250_000_000, send_calls: 1000, ..TaskCost::default() },
        profile: None,
    }
}

/// Returns stacks made from `("outer;inner", cpu, samples)`, in the NET_RX softirq, with 1 ms for each sample.
pub fn stacks(of: &[(&str, u32, u64)]) -> Stacks {
    let mut functions: Vec<String> = Vec::new();
    let stacks = of
        .iter()
        .map(|(frames, cpu, samples)| {
            let mut number = |name: &str| {
                let at = functions.iter().position(|known| known == name).unwrap_or_else(|| {
                    functions.push(name.to_owned());
                    functions.len() - 1
                });
                u32::try_from(at).expect("few functions")
            };
            ProfiledStack {
                cpu: *cpu,
                event: Some(Event::NetRx),
                pid: None,
                frames: frames.split(';').map(&mut number).collect(),
                samples: *samples,
                ns: samples * 1_000_000,
            }
        })
        .collect();
    Stacks { functions, stacks }
}
