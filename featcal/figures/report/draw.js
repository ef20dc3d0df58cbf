"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const places = Object.keys(figures).map((name) => document.getElementById(name));
const drawn = places.map((place) =>
  Plotly.newPlot(place, figures[place.id].data, figures[place.id].layout, {
    displaylogo: false,
    responsive: true,
    modeBarButtons: [["toImage"]],
    toImageButtonOptions: { format: "svg", filename: place.id },
  }),
);
Promise.all(drawn).then(() => document.body.setAttribute("data-drawn", String(drawn.length)));
addEventListener("beforeprint", () => places.forEach((place) => Plotly.relayout(place, { width: 680 })));
addEventListener("afterprint", () => places.forEach((place) => Plotly.relayout(place, { width: null, autosize: true })));
