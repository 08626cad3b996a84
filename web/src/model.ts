// What the server sends: see cost/src/report.rs, which says what each field means.

export const EVENTS = ["net_rx", "net_tx", "send", "receive", "io_uring"] as const;
export type EventName = (typeof EVENTS)[number];

export interface Part {
  name: string;
  ns: number;
  share: number;
  samples: number;
}

export interface EventCost {
  event: EventName;
  ns: number;
  share: number;
  calls?: number;
  observer_ns: number;
  samples: number;
  parts: Part[];
}

export interface Cpu {
  cpu: number;
  networking_share: number;
  observer_share: number;
  events: EventCost[];
  procstat: Record<"user_ns" | "system_ns" | "softirq_ns" | "irq_ns" | "steal_ns" | "idle_ns", number>;
  samples: number;
}

export interface TaskCost {
  share: number;
  send_ns: number;
  receive_ns: number;
  io_uring_ns: number;
  send_calls: number;
  receive_calls: number;
}

export interface FunctionCost {
  name: string;
  ns: number;
  samples: number;
}

export interface Process extends TaskCost {
  pid: number;
  name: string;
  /** Its command line, where that was asked for. */
  arguments?: string;
  cgroup?: string;
  profile?: { samples: number; user_samples: number; unknown_samples: number; parts: Part[]; functions: FunctionCost[] };
}

export interface Cgroup extends TaskCost {
  id: number;
  path?: string;
  processes: number;
}

export interface Program {
  id: number;
  name: string;
  kind: string;
  run_ns: number;
  runs: number;
  skipped: number;
  share: number;
  own: boolean;
}

export type Energy =
  | { status: "absent"; reason: string }
  | {
      status: "measured";
      source: string;
      domains: { name: string; joules: number; watts: number }[];
      total_joules: number;
      active_joules?: number;
      networking_joules: number;
      networking_watts: number;
      idle_watts?: number;
    };

export interface Report {
  sequence: number;
  time_unix_ms: number;
  period_ns: number;
  mode: "events" | "sampling";
  sampled_ns: number;
  auto?: {
    budget_share: number;
    timing_share: number;
    retry_ms?: number;
    changes: number;
    interrupt_ns?: number;
    lowered_from_hz?: number;
  };
  method?: "functions" | "system_calls";
  frequency_hz: number;
  host: { name: string; kernel: string };
  cpus: Cpu[];
  other: { event: EventName; functions: FunctionCost[] }[];
  processes: Process[];
  cgroups: Cgroup[];
  programs?: Program[];
  energy: Energy;
  observer: { user_ns: number; system_ns: number; events_ns: number; program_ns?: number; share: number };
  lost: Record<"samples" | "stacks" | "processes" | "tasks" | "skipped_runs", number>;
  missing: { event?: EventName; what: string; reason: string }[];
}

export interface Point {
  time_unix_ms: number;
  period_ns: number;
  events: (number | null)[];
  cpus: number[];
}

export interface History {
  live: boolean;
  cpus: number[];
  points: Point[];
  whole_since_unix_ms: number | null;
}

export interface Stacks {
  time_unix_ms: number;
  period_ns: number;
  frequency_hz: number;
  functions: string[];
  stacks: { event?: EventName; pid?: number; frames: number[]; samples: number; ns: number }[];
}

export interface Range {
  from: number;
  to: number;
}

/** A report, summed up, as the server does it for its history. */
export function point(report: Report): Point {
  const events: (number | null)[] = EVENTS.map(() => null);
  for (const cpu of report.cpus) {
    for (const cost of cpu.events) {
      const at = EVENTS.indexOf(cost.event);
      events[at] = (events[at] ?? 0) + cost.share;
    }
  }
  return {
    time_unix_ms: report.time_unix_ms,
    period_ns: report.period_ns,
    events,
    cpus: report.cpus.map((cpu) => cpu.networking_share),
  };
}

/** Whether any way of an event is measured. */
export function measures(report: Report, event: EventName): boolean {
  return report.cpus.some((cpu) => cpu.events.some((of) => of.event === event));
}

/** Whether its calls are counted, in all of the period. */
export function counts(report: Report, event: EventName): boolean {
  return report.mode === "events" && report.sampled_ns === 0 && measures(report, event);
}

export function networking(report: Report): number {
  return report.cpus.reduce((sum, cpu) => sum + cpu.networking_share, 0);
}

export function busy(cpu: Cpu, report: Report): number {
  const { user_ns, system_ns, softirq_ns, irq_ns } = cpu.procstat;
  return (user_ns + system_ns + softirq_ns + irq_ns) / report.period_ns;
}
