// Marks each table as one of figures or one of sentences, for site.css. On a phone, a table of sentences is shown as one
// block per row, with the heading of the column before each cell.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    const cells = [...table.querySelectorAll("tbody td")];
    const figures = cells.filter((cell) => cell.cellIndex > 0 && /^[\d.,:%()e+\- ]*$/.test(cell.textContent.trim()));
    table.classList.add(figures.length > cells.length / 2 ? "figures" : "sentences");
    table.classList.toggle("many-columns", headings.length > 7);
    for (const cell of cells) cell.dataset.heading = headings[cell.cellIndex] || "";
  }
});
