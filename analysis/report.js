"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-label", `sort by ${head.textContent}`);
    head.append(button); // lies over the heading: printed pages repeat headings, but not what a button holds
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const keyed = [...body.rows].map((row) => {
        const cell = row.cells[column];
        const numeric = cell.dataset.v !== undefined;
        return { row, key: numeric ? Number(cell.dataset.v) : cell.textContent, blank: cell.dataset.blank !== undefined };
      });
      keyed.sort((a, b) => {
        if (a.blank || b.blank) return a.blank - b.blank; // empty cells last, either way
        const order = typeof a.key === "number" && typeof b.key === "number" ? a.key - b.key
          : String(a.key).localeCompare(String(b.key), "en", { numeric: true });
        return down ? -order : order;
      });
      body.append(...keyed.map((item) => item.row));
    });
  });
}
