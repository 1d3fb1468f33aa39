// Draws the charts of the pages that bench/analysis/page.py writes, again whenever a switch or the theme changes.
"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shown = (what, value) => document.querySelector(`input[data-${what}="${value}"]`)?.checked ?? true;
const ticked = id => document.getElementById(id).checked;
const touch = matchMedia("(pointer: coarse)").matches;  // there, a finger on a chart scrolls the page
const buttons = [touch ? ["toImage"] : ["toImage", "zoom2d", "pan2d", "resetScale2d"]];
function draw() {
  for (const [id, figure] of Object.entries(charts)) {
    const axis = id === "loss" ? document.querySelector("input[name=axis]:checked").value : "steps";
    const data = figure.data.map(trace => {
      const {run, colour, kind, x} = trace.meta;
      const color = css(colour);
      const part = name => trace[name] && {[name]: {...trace[name], color}};
      return {...trace, x: x[axis], visible: shown("run", run) && shown("kind", kind),
        line: {...trace.line, color}, fillcolor: color + "2a", ...part("marker"), ...part("error_y")};
    });
    const layout = structuredClone(figure.layout);
    Object.assign(layout, {paper_bgcolor: css("--back"), plot_bgcolor: css("--back"), uirevision: axis,
      font: {color: css("--text"), family: "system-ui, sans-serif"}, dragmode: touch ? false : "zoom"});
    layout.hoverlabel = {bgcolor: css("--panel"), bordercolor: css("--line"), font: {color: css("--text")}};
    for (const ofAxis of [layout.xaxis, layout.yaxis])
      Object.assign(ofAxis, {gridcolor: css("--line"), linecolor: css("--line")});
    if (id === "loss") {
      const {axes, notes} = figure.layout.meta;
      layout.uirevision += ticked("log-x") + " " + ticked("log-y");
      layout.xaxis.title.text = axes[axis];
      layout.xaxis.exponentformat = axis === "FLOPs" ? "power" : "B";
      if (ticked("log-x")) layout.xaxis.type = "log";
      if (ticked("log-y")) layout.yaxis.type = "log";
      document.getElementById("loss-note").textContent = notes[axis];
    }
    Plotly.react(id, data, layout, {responsive: true, displaylogo: false, modeBarButtons: buttons});
  }
}
document.addEventListener("change", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
