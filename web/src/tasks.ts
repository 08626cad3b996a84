import { type Column, Table } from "./table";
import { basis, duration, estimate, figure, h, percent, whole } from "./dom";
import { type Cgroup, type Energy, Estimate, type EventName, type Part, type Process, type Program, type Report, type TaskCost, counts, measures } from "./model";

/** The times of a process or cgroup, in the order of `TaskCost.figure_samples`. */
const FIGURES = ["send", "receive", "io_uring", "other", "local"] as const;

function costs<Row extends TaskCost>(report: () => Report | undefined): Column<Row>[] {
  const period = () => report()?.period_ns ?? 1;
  const known = (event: EventName, by: typeof counts) => {
    const of = report();
    return of !== undefined && by(of, event);
  };
  const share = (event: (typeof FIGURES)[number], at: number): Column<Row> => {
    const of = (row: Row) => new Estimate().add(row[`${event}_ns`] / period(), row.figure_samples?.[at] ?? 0, row.figure_intervals?.[at]);
    return {
      title: event,
      value: (row) => of(row).share,
      text: (row) => (known(event === "other" ? "sockets" : event, measures) ? estimate(of(row), false) : "?"),
      basis: (row) => basis(of(row)),
    };
  };
  const rate = (event: "send" | "receive"): Column<Row> => ({
    title: `${event}s/s`,
    value: (row) => (row[`${event}_calls`] * 1e9) / period(),
    text: (row) => (known(event, counts) ? whole((row[`${event}_calls`] * 1e9) / period()) : "?"),
  });
  return [
    { title: "share", value: (row) => row.share, text: (row) => estimate(ofTask(row)), basis: (row) => basis(ofTask(row)), share: true },
    ...FIGURES.map(share),
    rate("send"),
    rate("receive"),
  ];
}

/** Returns a process's or cgroup's share. The share has no error if all calls were timed. */
function ofTask(row: TaskCost): Estimate {
  return new Estimate().add(row.share, row.samples ?? 0, row.interval);
}

/** The view of processes, with the breakdown of all CPU time of each process of --profile. */
export class Processes {
  readonly element: HTMLElement;
  private report?: Report;
  private readonly profiles = h("div", {});
  private withArguments = true;
  /** The button that shows or hides command lines, which may contain secrets. */
  private readonly toggle = h("button", { type: "button", id: "arguments", onclick: () => this.showArguments(!this.withArguments) }, "Arguments");
  private readonly table = new Table<Process>(
    "Processes, in their own socket calls",
    [
      { title: "process", value: (row) => row.name },
      { title: "PID", value: (row) => row.pid },
      ...costs<Process>(() => this.report),
      { title: "cgroup", value: (row) => row.cgroup ?? "" },
      { title: "command line", value: (row) => row.arguments ?? "", long: true, when: () => this.withArguments && this.hasArguments() },
    ],
    "No process was in a socket call in this time.",
    true,
  );

  constructor() {
    this.element = h("div", {}, this.profiles, this.table.element);
    this.table.bar.append(this.toggle);
    this.showArguments(true);
  }

  private showArguments(shown: boolean): void {
    this.withArguments = shown;
    this.toggle.setAttribute("aria-pressed", String(shown));
    this.table.renew();
  }

  private hasArguments(): boolean {
    return this.report?.processes.some((process) => process.arguments !== undefined) ?? false;
  }

  show(report: Report): void {
    this.report = report;
    this.toggle.hidden = !this.hasArguments();
    this.table.show(report.processes);
    const chosen = report.processes.filter((process) => process.profile);
    this.profiles.replaceChildren(...chosen.map((process) => profile(process, report)));
  }
}

function ofPart(part: Part): Estimate {
  return new Estimate().add(part.share, part.samples, part.interval);
}

function profile(process: Process, report: Report): HTMLElement {
  const parts = process.profile?.parts ?? [];
  const all = parts.reduce((sum, part) => sum + part.ns, 0);
  const bar = h("span", { class: "stack" });
  parts.forEach((part, at) => {
    const segment = h("span", { class: `part-${at % 6}`, title: `${part.name} ${percent(part.ns / report.period_ns)}` });
    segment.style.width = `${(part.ns / Math.max(1, all)) * 100}%`;
    bar.append(segment);
  });
  const names = parts.map((part, at) =>
    h("span", { title: basis(ofPart(part)) }, h("i", { class: `part-${at % 6}` }), `${part.name} ${estimate(ofPart(part))}`),
  );
  const functions = (process.profile?.functions ?? []).slice(0, 8).map((of) => `${of.name} ${of.samples}`);
  return h(
    "div",
    { class: "profile" },
    h("h2", {}, `All CPU time of ${process.name} (${process.pid}): ${percent(all / report.period_ns)} of one CPU`),
    bar,
    h("div", { class: "legend" }, ...names),
    functions.length > 0 ? h("p", { class: "note" }, `Samples by innermost function: ${functions.join(", ")}`) : null,
  );
}

export class Cgroups {
  private report?: Report;
  private readonly table = new Table<Cgroup>(
    "Cgroups (v2)",
    [
      { title: "cgroup", value: (row) => row.path ?? `(${row.id}, gone)` },
      { title: "processes", value: (row) => row.processes },
      ...costs<Cgroup>(() => this.report),
    ],
    "No process was in a socket call in this time.",
    true,
  );
  readonly element = this.table.element;

  show(report: Report): void {
    this.report = report;
    this.table.show(report.cgroups);
  }
}

export class Programs {
  private readonly table = new Table<Program>(
    "BPF programs that ran",
    [
      { title: "program", value: (row) => row.name },
      { title: "ID", value: (row) => row.id },
      { title: "type", value: (row) => row.kind },
      { title: "share", value: (row) => row.share, text: (row) => figure(row.share), share: true },
      { title: "runs", value: (row) => row.runs, text: (row) => whole(row.runs) },
      { title: "each", value: (row) => row.run_ns / Math.max(1, row.runs), text: (row) => duration(row.run_ns / Math.max(1, row.runs)) },
      { title: "of", value: (row) => (row.own ? "observer" : "") },
    ],
    "none",
    true,
  );
  private readonly absent = h("p", { class: "note" }, "Run times of BPF programs are measured only with millrace cost --programs");
  readonly element = h("div", {}, this.absent, this.table.element);

  show(report: Report): void {
    this.absent.hidden = report.programs !== undefined;
    this.table.element.hidden = report.programs === undefined;
    this.table.show(report.programs ?? []);
  }
}

function joules({ active_joules: active, total_joules: total }: Extract<Energy, { status: "measured" }>): string {
  return active === undefined ? `${total.toFixed(2)} J in total, idle power included` : `${active.toFixed(2)} J above idle`;
}

/** Describes in lines how events were measured, and why in this way. */
function mode(report: Report): string[] {
  const { auto, sampled_ns, period_ns } = report;
  const lines = [
    report.mode === "sampling" ? "stacks only, no event is timed" : `events timed at ${report.method === "system_calls" ? "system calls" : "functions"}`,
  ];
  if (sampled_ns > 0 && sampled_ns < period_ns)
    lines.push(`in ${duration(sampled_ns)} of ${duration(period_ns)} events were sampled, without numbers of calls`);
  if (auto) {
    const retry = auto.retry_ms === undefined ? "" : `; tried again in ${duration(auto.retry_ms * 1e6)}`;
    lines.push(`timing events ${report.mode === "sampling" ? "would take" : "takes"} ${percent(auto.timing_share)} of one CPU and may take ${percent(auto.budget_share)}${retry}`);
    lines.push(`changes between timing and sampling: ${auto.changes}`);
    if (auto.interrupt_ns !== undefined) lines.push(`the interrupt of a sample takes ${duration(auto.interrupt_ns)}`);
    if (auto.lowered_from_hz !== undefined) lines.push(`sampled less often than ${auto.lowered_from_hz} times a second, since interrupts take so much`);
  }
  return lines;
}

/** The view of notes: data missing from the figures, energy, and the way of measuring. */
export class About {
  readonly element = h("div", { class: "about" });

  /** Returns the number of notes about missing and lost data. */
  static notes(report: Report, dropped: number): number {
    return report.missing.length + Object.values(report.lost).filter((lost) => lost > 0).length + (dropped > 0 ? 1 : 0);
  }

  show(report: Report, dropped: number): void {
    const { energy, observer, lost } = report;
    const list = (...items: string[]) => h("ul", {}, ...items.map((item) => h("li", {}, item)));
    const size = (ns?: number) => (ns === undefined ? "" : `, ${percent(ns / report.period_ns)} of one CPU`);
    const missing = report.missing.map(({ event, what, reason, ns }) => `${event ? `${event}: ` : ""}${what}${size(ns)} (${reason})`);
    const losses = Object.entries(lost).filter(([, count]) => count > 0).map(([what, count]) => `${what.replace("_", " ")}: ${count}`);
    if (dropped > 0) losses.push(`reports that this page was too slow for: ${dropped}`);
    this.element.replaceChildren(
      h("h2", {}, "Missing from the figures: cannot be measured here"),
      missing.length > 0 ? list(...missing) : h("p", { class: "note" }, "nothing"),
      h("h2", {}, "Missing from the figures: lost data"),
      losses.length > 0 ? list(...losses) : h("p", { class: "note" }, "nothing"),
      h("h2", {}, "Energy"),
      energy.status === "absent"
        ? h("p", { class: "note" }, energy.reason)
        : list(
            `networking: ${energy.networking_watts.toFixed(2)} W, ${energy.networking_joules.toFixed(2)} of ${joules(energy)}`,
            ...energy.domains.map(({ name, watts }) => `${name}: ${watts.toFixed(2)} W (${energy.source})`),
          ),
      h("h2", {}, "How it was measured"),
      list(
        ...mode(report),
        report.frequency_hz > 0 ? `${report.frequency_hz} stacks a second and CPU` : "no stacks: events have no parts",
        `the observer took ${duration(observer.user_ns)} in user mode, ${duration(observer.system_ns)} in the kernel, ${duration(observer.events_ns)} inside of events` +
          (observer.program_ns === undefined ? "" : `, ${duration(observer.program_ns)} in its BPF programs altogether`),
      ),
    );
  }
}
