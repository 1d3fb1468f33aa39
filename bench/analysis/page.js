// Draws the charts of the pages that bench/analysis/page.py writes, again whenever a switch or the theme changes. A live
// page asks its server for them, and for all other parts.
"use strict";
const byId = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shown = (what, value) => document.querySelector(`input[data-${what}="${value}"]`)?.checked ?? true;
const ticked = id => byId(id).checked;
const touch = matchMedia("(pointer: coarse)").matches;  // there, a finger on a chart scrolls the page
const buttons = [touch ? ["toImage"] : ["toImage", "zoom2d", "pan2d", "resetScale2d"]];
let charts = JSON.parse(byId("charts").textContent);
function makePlaces() {
  for (const [id, {title}] of Object.entries(charts)) {
    if (byId(id)) continue;
    const figure = document.createElement("figure");
    const switches = id === "loss" ? byId("switches").innerHTML : "";
    figure.className = id === "loss" ? "loss" : "";
    figure.innerHTML = `<h3></h3>${switches}<div class="plot" role="img"></div><p class="note" role="status"></p>`;
    figure.querySelector("h3").textContent = title;
    figure.querySelector(".plot").id = id;
    figure.querySelector(".plot").ariaLabel = title;
    figure.querySelector(".note").id = id + "-note";
    document.querySelector("section").append(figure);
  }
}
function draw() {
  makePlaces();
  for (const place of document.querySelectorAll(".plot")) {
    place.closest("figure").hidden = !(place.id in charts);
    if (place.id in charts) drawChart(place, charts[place.id]);
  }
}
function drawChart(place, {figure, note}) {
  const isLoss = place.id === "loss";
  const axis = isLoss ? axisOf(figure.layout.meta) : "steps";
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
  if (isLoss) {
    const {axes, notes, limits} = figure.layout.meta;
    layout.uirevision += `${ticked("log-x")} ${ticked("log-y")}`;
    layout.xaxis.title.text = axes[axis];
    layout.xaxis.exponentformat = axis === "FLOPs" ? "power" : "B";
    if (ticked("log-x")) layout.xaxis.type = "log";
    if (ticked("log-y")) layout.yaxis.type = "log";
    else if (limits) layout.yaxis.range = limits;
    note = notes[axis];
  }
  byId(place.id + "-note").textContent = note;
  Plotly.react(place, data, layout, {responsive: true, displaylogo: false, modeBarButtons: buttons});
}
// The axis that is chosen; those that no run knows cannot be.
function axisOf({notes}) {
  for (const radio of document.querySelectorAll("input[name=axis]")) {
    radio.parentElement.hidden = !(radio.value in notes);
    if (radio.checked && radio.parentElement.hidden) document.querySelector("input[value=steps]").checked = true;
  }
  return document.querySelector("input[name=axis]:checked").value;
}
let version = "";
const parts = {};
async function follow() {
  let got = null;
  try {
    if (!document.hidden) got = await (await fetch("data?have=" + version)).json();
    document.body.classList.remove("lost");
  } catch {
    document.body.classList.add("lost");
  }
  setTimeout(follow, got?.wait_ms ?? 2000);
  if (!got) return;
  version = got.version;
  for (const [name, html] of Object.entries(got.parts)) {
    if (parts[name] !== html) byId("part-" + name).innerHTML = parts[name] = html;
  }
  if (got.charts) {
    charts = got.charts;
    draw();
  }
}
document.addEventListener("change", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
if (charts === "live") {
  charts = {};
  follow();
} else draw();
