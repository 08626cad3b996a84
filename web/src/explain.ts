import { h } from "./dom";

/** The explanation of each term on the page. */
const TERMS: Record<string, string> = {
  networking: "The sum of net_rx, net_tx, send, receive, io_uring, timers, sockets, poll, devices and workers.",
  net_rx: "Packets that arrive: the softirq NET_RX, wherever it runs, and kernel threads that poll a network card. It belongs to no process.",
  net_tx: "The softirq NET_TX: packets that had to wait in a queue, and memory of those that were sent. It belongs to no process.",
  send: "Calls that send on sockets of a network: write, send, sendfile, splice, aio, io_uring. Time spent waiting is not counted.",
  receive: "Calls that receive from sockets of a network: read, recv, splice, aio, io_uring. Time spent waiting is not counted.",
  io_uring: "io_uring's own threads outside of socket calls: also what they do on disk.",
  timers: "Other softirqs while they run networking: pacing, retransmission, delayed freeing of memory. Estimated from samples.",
  sockets: "connect, accept, close, setsockopt and all other calls while they run networking. Estimated from samples.",
  poll: "poll, select and epoll_wait while they ask sockets or poll a network card. Estimated from samples.",
  devices: "Reads and writes of TUN and TAP devices, and vhost's threads. Estimated from samples.",
  workers: "Other kernel threads while they run networking: WireGuard, MPTCP, XDP's cpumap. Estimated from samples.",
  local: "Calls on AF_UNIX and netlink sockets. They reach no network, and are not part of networking.",
  other: "Work on sockets that neither sends nor receives, polling, TUN devices and kernel threads. Estimated from samples.",
  observer: "Time that millrace cost itself used inside of these events. The other figures do not include it.",
  "other work": "Other work of the CPU, by the kernel's own accounting (/proc/stat).",
  user: "Programs, by the kernel's own accounting (/proc/stat), in clock ticks: for comparison.",
  system: "System calls and kernel threads of all kinds, by the kernel's own accounting (/proc/stat), in clock ticks: for comparison.",
  softirq: "Softirqs of all kinds, by the kernel's own accounting (/proc/stat), in clock ticks: for comparison.",
  irq: "Hardware interrupts, by the kernel's own accounting (/proc/stat), in clock ticks. They are in none of the events. “?”: this kernel does not measure them.",
  steal: "Time that the hypervisor gave to other machines, by the kernel's own accounting (/proc/stat), in clock ticks.",
  idle: "Time without work, by the kernel's own accounting (/proc/stat), in clock ticks.",
  share: "Share of one CPU: 100 % is one CPU all of the time. Several CPUs can use more.",
  self: "Time in the function itself, without what it calls.",
  "with callees": "Time in the function and in all that it calls.",
  "sends/s": "Number of calls that send, per second.",
  "receives/s": "Number of calls that receive, per second.",
  part: "Parts of the kernel's network stack, by the functions in sampled stacks; “other” are functions that no rule names.",
  cgroup: "A group of processes (cgroup v2): a service, a container.",
  each: "Mean time of a run.",
  "command line": "The command line of the process. It may contain secrets, so it is shown only with millrace cost --arguments.",
};

const id = (term: string) => `term-${term.replace(/\W/g, "-")}`;

/** Attaches the explanation of `term`, if there is one, to an element. The page shows it when the pointer is over the
    element or the element has the focus. Screen readers read it. */
export function explained<E extends HTMLElement>(element: E, term: string): E {
  if (term in TERMS) {
    element.dataset["term"] = term;
    element.setAttribute("aria-describedby", id(term));
  }
  return element;
}

/** Shows the explanations of the page's elements, including elements that are added later. */
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
      // The text stays while the pointer is over it, as WCAG 1.4.13 requires.
      const stays = to instanceof Node && (this.of?.contains(to) || this.tip.contains(to));
      if (!stays) this.show(termAt(document.activeElement));
    });
    // On a touch screen, lifting the finger causes `pointerout`. The click that follows shows the text again.
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

  /** Places the text below its element, or above it at the end of the page. */
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
