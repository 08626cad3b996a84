// The data that the server sends: cost/src/report.rs describes each field.

/** Events that are part of networking. */
export const EVENTS = ["net_rx", "net_tx", "send", "receive", "io_uring", "timers", "sockets", "poll", "devices", "workers"] as const;
/** Events that are not part of networking. */
export const OTHERS = ["local", "kernel"] as const;
export type EventName = (typeof EVENTS)[number] | (typeof OTHERS)[number];

/** The lowest and the highest share of a figure with 95 % confidence, estimated from its samples. */
export type Interval = [number, number];

export interface Part {
  name: string;
  ns: number;
  share: number;
  samples: number;
  interval?: Interval;
}

export interface EventCost {
  event: EventName;
  ns: number;
  share: number;
  calls?: number;
  observer_ns: number;
  samples: number;
  /** Number of samples in calls that no BPF program timed. */
  sampled: number;
  interval?: Interval;
  parts: Part[];
}

export interface Cpu {
  cpu: number;
  networking_share: number;
  networking_interval?: Interval;
  observer_share: number;
  /** Absent in logs of older releases. */
  observer_samples?: number;
  observer_interval?: Interval;
  events: EventCost[];
  procstat: Record<"user_ns" | "system_ns" | "softirq_ns" | "irq_ns" | "steal_ns" | "idle_ns", number>;
  samples: number;
}

export interface TaskCost {
  share: number;
  send_ns: number;
  receive_ns: number;
  io_uring_ns: number;
  other_ns: number;
  local_ns: number;
  send_calls: number;
  receive_calls: number;
  /** Number of samples. Absent if BPF programs timed all calls. */
  samples?: number;
  interval?: Interval;
  /** Samples and intervals of `send_ns`, `receive_ns`, `io_uring_ns`, `other_ns` and `local_ns`. Absent if all of them are exact. */
  figure_samples?: number[];
  figure_intervals?: (Interval | null)[];
}

export interface FunctionCost {
  name: string;
  ns: number;
  samples: number;
  interval?: Interval;
}

export interface Process extends TaskCost {
  pid: number;
  name: string;
  /** The command line, with --arguments. */
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
  missing: { event?: EventName; what: string; reason: string; ns?: number }[];
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
  /** Number of reports that each point is the mean of. */
  point_reports: number;
  whole_since_unix_ms: number | null;
  /** Number of reports in a step of a time range. */
  whole_reports: number;
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

/** A sum of figures. The errors of sampled figures are independent, so their squares are added. */
export class Estimate {
  share = 0;
  samples = 0;
  sampled = false;
  private below = 0;
  private above = 0;

  add(share: number, samples: number, interval?: Interval | null): this {
    this.share += share;
    this.samples += samples;
    if (interval) {
      this.sampled = true;
      this.below += (share - interval[0]) ** 2;
      this.above += (interval[1] - share) ** 2;
    }
    return this;
  }

  get interval(): Interval {
    return [Math.max(0, this.share - Math.sqrt(this.below)), this.share + Math.sqrt(this.above)];
  }

  /** The distance from the share to the farther end of the interval. */
  get error(): number {
    return Math.sqrt(Math.max(this.below, this.above));
  }
}

/** Summarises a report the way the server does for its history. */
export function point(report: Report): Point {
  const events: (number | null)[] = EVENTS.map(() => null);
  for (const cpu of report.cpus) {
    for (const cost of cpu.events) {
      const at = (EVENTS as readonly string[]).indexOf(cost.event);
      if (at >= 0) events[at] = (events[at] ?? 0) + cost.share;
    }
  }
  return {
    time_unix_ms: report.time_unix_ms,
    period_ns: report.period_ns,
    events,
    cpus: report.cpus.map((cpu) => cpu.networking_share),
  };
}

/** Reports whether an event was measured, by timing or by samples. */
export function measures(report: Report, event: EventName): boolean {
  return report.cpus.some((cpu) => cpu.events.some((of) => of.event === event));
}

/** Reports whether an event's calls were counted during the whole period. */
export function counts(report: Report, event: EventName): boolean {
  return report.sampled_ns === 0 && report.cpus.some((cpu) => cpu.events.some((of) => of.event === event && of.calls !== undefined));
}

/** Reports whether the kernel measures the time of hard interrupts. */
export function measuresInterrupts(report: Report): boolean {
  return !report.missing.some(({ what, ns }) => what === "hard interrupts" && ns === undefined);
}

export function busy(cpu: Cpu, report: Report): number {
  const { user_ns, system_ns, softirq_ns, irq_ns } = cpu.procstat;
  return (user_ns + system_ns + softirq_ns + irq_ns) / report.period_ns;
}
