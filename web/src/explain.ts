import { h } from "./dom";

/** What figures are of, for those who meet them here first. */
const TERMS: Record<string, string> = {
  networking: "The sum of net_rx, net_tx, send, receive and io_uring.",
  net_rx: "Packets that arrive: the softirq NET_RX, wherever it runs, and kernel threads that poll a network card. It belongs to no process.",
  net_tx: "The softirq NET_TX: packets that had to wait in a queue, and memory of those that were sent. It belongs to no process.",
  send: "Calls that send, of whatever socket, AF_UNIX too: write, send, sendfile, splice, aio, io_uring. Waiting costs nothing.",
  receive: "Calls that receive, of whatever socket, AF_UNIX too: read, recv, splice, aio, io_uring. Waiting costs nothing.",
  io_uring: "io_uring's own threads outside of socket calls: also what they do on disk.",
  observer: "What millrace cost itself took inside of these events. It is in none of the other figures.",
  "other work": "What else the CPU did, by the kernel's own accounting (/proc/stat).",
  user: "Programs, by the kernel's own accounting (/proc/stat), in clock ticks: for comparison.",
  system: "System calls and kernel threads of all kinds, by the kernel's own accounting (/proc/stat), in clock ticks: for comparison.",
  softirq: "Softirqs of all kinds, by the kernel's own accounting (/proc/stat), in clock ticks: for comparison.",
  idle: "Nothing to do, by the kernel's own accounting (/proc/stat), in clock ticks.",
  share: "Of one CPU: 100 % is one CPU all of the time, and several CPUs can take more.",
  self: "Time in the function itself, without what it calls.",
  "with callees": "Time in the function and in all that it calls.",
  "sends/s": "Calls that send, a second.",
  "receives/s": "Calls that receive, a second.",
  part: "Parts of the kernel's network stack, by the functions in sampled stacks; “other” is what no rule knows.",
  cgroup: "A group of processes (cgroup v2): a service, a container.",
  each: "The mean of a run.",
  "command line": "What the process was started with. It may hold secrets: that is why it is shown only where millrace cost --arguments asks for it.",
};

const id = (term: string) => `term-${term.replace(/\W/g, "-")}`;

/** Has the explanation of `term`, if there is one, where it is pointed at or has the focus; screen readers read it. */
export function explained<E extends HTMLElement>(element: E, term: string): E {
  if (term in TERMS) {
    element.dataset["term"] = term;
    element.setAttribute("aria-describedby", id(term));
  }
  return element;
}

/** Shows explanations, for the whole page: elements come and go. */
export class Explanations {
  private readonly tip = h("div", { id: "explanation", class: "tip", role: "tooltip" });
  private of: Element | null = null;

  constructor() {
    const all = Object.entries(TERMS).map(([term, text]) => h("p", { id: id(term) }, text));
    document.body.append(h("div", { hidden: true }, ...all), this.tip);
    document.addEventListener("pointerover", (event) => {
      const element = termAt(event.target);
      if (element) this.show(element);
    });
    document.addEventListener("pointerout", (event) => {
      const to = event.relatedTarget;
      // Way to the text itself included, which can be read at leisure.
      const stays = to instanceof Node && (this.of?.contains(to) || this.tip.contains(to));
      if (!stays) this.show(termAt(document.activeElement));
    });
    // A finger leaves what it has touched.
    for (const type of ["focusin", "click"]) document.addEventListener(type, (event) => this.show(termAt(event.target)));
    document.addEventListener("focusout", () => this.show(null));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.show(null);
    });
    window.addEventListener("scroll", () => this.place(), true);
  }

  private show(element: HTMLElement | null): void {
    this.of = element;
    this.tip.textContent = TERMS[element?.dataset["term"] ?? ""] ?? "";
    this.tip.classList.toggle("shown", element !== null);
    this.place();
  }

  /** Below its element, or above it at the end of the page. */
  private place(): void {
    if (!this.of) return;
    const { left, bottom, top } = this.of.getBoundingClientRect();
    const { offsetWidth, offsetHeight } = this.tip;
    const below = bottom + offsetHeight <= innerHeight;
    this.tip.style.left = `${Math.max(4, Math.min(left, innerWidth - offsetWidth - 4))}px`;
    this.tip.style.top = `${below ? bottom : Math.max(0, top - offsetHeight)}px`;
  }
}

function termAt(target: EventTarget | null): HTMLElement | null {
  return target instanceof Element ? target.closest<HTMLElement>("[data-term]") : null;
}
