import { h } from "./dom";
import { explained } from "./explain";

export interface Column<Row> {
  title: string;
  /** The value to sort by. Numbers sort descending, text ascending. */
  value: (row: Row) => number | string;
  text?: (row: Row) => string;
  /** The cell's tooltip. */
  basis?: (row: Row) => string;
  /** Whether to draw a bar behind the figure. */
  share?: boolean;
  /** Whether to cut the text where the table ends. The tooltip has the whole text. */
  long?: boolean;
  /** Whether the column is shown. */
  when?: () => boolean;
}

/** Largest number of rows that are shown; the rest is counted, and can be searched. */
const ROWS = 200;

/** A table that can be sorted and searched. Its head, and so the focus on it, stays while rows change. */
export class Table<Row> {
  readonly element: HTMLElement;
  /** The bar above the table. */
  readonly bar = h("div", { class: "bar" });
  private readonly body = h("tbody");
  private readonly heads: HTMLTableCellElement[] = [];
  private readonly rest = h("p", { class: "note" });
  private rows: Row[] = [];
  private sorted = -1;
  private reverse = false;
  private pattern = "";

  constructor(
    caption: string,
    private readonly columns: Column<Row>[],
    private readonly empty: string,
    search = false,
    private readonly most = ROWS,
  ) {
    const head = h("tr");
    columns.forEach((column, at) => {
      const button = explained(h("button", { type: "button", onclick: () => this.sort(at) }, column.title), column.title);
      const cell = h("th", { scope: "col" }, button);
      this.heads.push(cell);
      head.append(cell);
    });
    const input = h("input", {
      type: "search",
      placeholder: "Search",
      "aria-label": `Search ${caption}`,
      oninput: (event: Event) => {
        this.pattern = (event.target as HTMLInputElement).value.toLowerCase();
        this.draw();
      },
    });
    const unit = columns.some((column) => column.share) ? h("span", { class: "note" }, "shares are of one CPU") : "";
    this.bar.append(h("h2", {}, caption), search ? input : "", unit);
    this.element = h(
      "div",
      { class: "table" },
      this.bar,
      h("table", { "aria-label": caption }, h("thead", {}, head), this.body),
      this.rest,
    );
  }

  show(rows: Row[]): void {
    this.rows = rows;
    this.draw();
  }

  /** Draws the table again, after its visible columns have changed. */
  renew(): void {
    this.draw();
  }

  private sort(at: number): void {
    this.reverse = this.sorted === at && !this.reverse;
    this.sorted = at;
    this.draw();
  }

  private draw(): void {
    let rows = this.rows;
    if (this.pattern) rows = rows.filter((row) => this.columns.filter(shown).some((column) => this.text(column, row).toLowerCase().includes(this.pattern)));
    const column = this.columns[this.sorted];
    if (column) {
      const order = (a: Row, b: Row) => compare(column.value(a), column.value(b)) * (this.reverse ? -1 : 1);
      rows = [...rows].sort(order);
    }
    const [first] = rows;
    this.heads.forEach((head, at) => {
      head.hidden = !shown(this.columns[at]);
      const down = first !== undefined && (typeof this.columns[at]?.value(first) === "number") !== this.reverse;
      if (at === this.sorted) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
      head.classList.toggle("number", first !== undefined && typeof this.columns[at]?.value(first) === "number");
    });
    this.body.replaceChildren(...rows.slice(0, this.most).map((row) => this.row(row)));
    this.rest.textContent = rows.length === 0 ? this.empty : rows.length > this.most ? `and ${rows.length - this.most} more` : "";
  }

  private row(row: Row): HTMLTableRowElement {
    const cells = this.columns.filter(shown).map((column) => {
      const value = column.value(row);
      const cell = h("td", { class: typeof value === "number" ? "number" : "" }, this.text(column, row));
      if (column.long) {
        cell.classList.add("long");
        cell.title = this.text(column, row);
      }
      const title = column.basis?.(row);
      if (title) cell.title = title;
      if (column.share && typeof value === "number" && value > 0) {
        cell.classList.add("share");
        cell.style.setProperty("--share", `${Math.min(100, value * 100)}%`);
      }
      return cell;
    });
    return h("tr", {}, ...cells);
  }

  private text(column: Column<Row>, row: Row): string {
    return column.text ? column.text(row) : String(column.value(row));
  }
}

function shown<Row>(column: Column<Row> | undefined): boolean {
  return column?.when?.() ?? true;
}

function compare(a: number | string, b: number | string): number {
  if (typeof a === "number" && typeof b === "number") return b - a;
  return String(a).localeCompare(String(b));
}
