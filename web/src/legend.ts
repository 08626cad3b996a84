import { h } from "./dom";
import { explained } from "./explain";

/** A legend: names of events with their colours and latest values. */
export class Legend {
  readonly element = h("div", { class: "legend" });
  private readonly values = new Map<string, HTMLElement>();

  constructor(names: readonly string[]) {
    for (const name of names) {
      const value = h("b", {});
      this.values.set(name, value);
      const swatch = h("i", { class: name.replace(" ", "-"), "aria-hidden": "true" });
      this.element.append(explained(h("button", { type: "button", class: "term" }, swatch, name, " ", value), name));
    }
  }

  show(name: string, value: string): void {
    const element = this.values.get(name);
    if (element && element.textContent !== value) element.textContent = value;
  }
}
