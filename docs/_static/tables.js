// Marks the tables and their figures for site.css. On a phone, a table of sentences is shown as one block per row, with
// the heading of the column before each cell. Dotted names may be broken after a dot or an underscore.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    const cells = [...table.querySelectorAll("tbody td")];
    const isFigure = (cell) => cell.cellIndex > 0 && /^[\d.,:%()e+\- to]*$/.test(cell.textContent.trim());
    for (const cell of cells) {
      cell.dataset.heading = headings[cell.cellIndex] || "";
      cell.classList.toggle("figure", isFigure(cell));
    }
    const figures = cells.filter(isFigure);
    table.classList.add(figures.length > cells.length / 2 ? "figures" : "sentences");
    table.classList.toggle("many-columns", headings.length > 7);
    for (const name of table.querySelectorAll("td:not(:first-child) code .pre")) {
      const parts = name.textContent.split(/(?<=[._])(?=[^._])/);
      name.replaceChildren(...parts.flatMap((part) => [part, document.createElement("wbr")]));
    }
  }
});
