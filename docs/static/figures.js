"use strict";
// Draws the figures that stand in the page as JSON, with words in the colour of the page, in either theme.
document.addEventListener("DOMContentLoaded", () => {
  const places = [...document.querySelectorAll(".plotly-figure")];
  const words = () => getComputedStyle(document.body).color;
  for (const place of places) {
    const figure = JSON.parse(place.firstElementChild.textContent);
    figure.layout.font = { ...figure.layout.font, color: words(), family: getComputedStyle(document.body).fontFamily };
    Plotly.newPlot(place, figure.data, figure.layout, { displayModeBar: false, responsive: true });
  }
  new MutationObserver(() => places.forEach((place) => Plotly.relayout(place, { "font.color": words() }))).observe(
    document.documentElement,
    { attributeFilter: ["data-theme"] },
  );
});
