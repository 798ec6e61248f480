// Step and medians under the pointer. The page says all it has to say without this.
for (const figure of document.querySelectorAll("[data-drawing]")) {
  const { step, place, arms } = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector(":scope > svg");
  const readout = figure.querySelector(".readout");
  const cursor = document.createElementNS(svg.namespaceURI, "line");
  const { width, height } = svg.viewBox.baseVal;
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", 0.04 * height);
  cursor.setAttribute("y2", 0.85 * height);
  svg.append(cursor);
  const invite = "Point at a step to read its medians.";
  readout.textContent = invite;

  const say = (text) => {
    const part = document.createElement("span");
    part.textContent = text;
    readout.append(part, " ");
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * width;
    let nearest = 0;
    place.forEach((p, i) => { if (Math.abs(p - x) < Math.abs(place[nearest] - x)) nearest = i; });
    cursor.setAttribute("x1", place[nearest]);
    cursor.setAttribute("x2", place[nearest]);
    cursor.style.visibility = "visible";
    readout.textContent = "";
    say(`step ${step[nearest]}`);
    for (const box of figure.querySelectorAll(".legend input:checked")) {
      say(`${box.value} ${arms[box.value][nearest] ?? "—"}`);
    }
  });
  svg.addEventListener("pointerleave", () => {
    cursor.style.visibility = "hidden";
    readout.textContent = invite;
  });
}
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
