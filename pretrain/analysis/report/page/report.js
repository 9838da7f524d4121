// The report: its state, the controls, and the updates of a run that trains. The other files define what it uses.

const HIDDEN_KINDS = new Set(["start", "verify", "snapshot", "hashed", "data_hashed", "init"]);

class Report {
  constructor(data) {
    this.data = data;
    const smoothing = data.runs.some((run) => run.rows >= 100) ? 0.6 : 0;  // it would distort a short curve
    this.view = {axis: "step", logX: false, smoothing, raw: true, clip: false, abandoned: true, zoom: null, cursor: null,
                 cursorChart: null, runs: new Set(data.runs), hidden: new Set(HIDDEN_KINDS), timeUnit: timeUnit(data.runs)};
    this.charts = [];
    this.applyTheme("auto");
    this.build();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.applyTheme(this.theme));
    new ResizeObserver(() => this.schedule()).observe(document.getElementById("curves"));
  }

  /** Fill the page. Called again when an update brings new panels, events or settings. */
  build() {
    const {runs} = this.data;
    document.getElementById("title").textContent = runs.length === 1 ? runs[0].name : `${runs.length} runs`;
    this.showProgress();
    const notices = runs.filter((run) => run.problem).map((run) => `${run.name}: ${run.problem}`);
    document.getElementById("notices").replaceChildren(...notices.map((text) => make("p", {class: "notice"}, text)));
    this.buildControls();
    this.buildCharts();
    const differences = document.getElementById("differences");
    differences.hidden = runs.length < 2;
    if (runs.length > 1) differences.replaceChildren(...differencesElements(runs, this.data.differences));
    document.getElementById("configuration").replaceChildren(...configurationElements(runs));
    this.schedule();
  }

  showProgress() {
    const {runs} = this.data, total = runs.reduce((sum, run) => sum + run.rows, 0);
    const reduced = runs.some((run) => run.reduced) ? "; reduced: a line is the mean of several rows, its band their range" : "";
    const old = runs.reduce((sum, run) => sum + run.abandoned_rows, 0);
    document.getElementById("subtitle").textContent = `${plain(total, 9)} logged steps${reduced}`
      + (old ? `; ${plain(old, 9)} of them abandoned after a resume or a rollback (dotted)` : "")
      + `; read ${dateTime(this.data.time)}`;
    document.getElementById("overview").replaceChildren(overviewElement(runs));
  }

  buildCharts() {
    const [panels, constants] = usedPanels(this.data.runs);
    const ids = panels.map((panel) => panel.id).join("\n");
    if (ids !== this.panelIds) {
      const before = new Map(this.charts.map((chart) => [chart.panel.id, chart]));
      this.charts = panels.map((panel) => {
        const chart = before.get(panel.id) || new Chart(panel, this);
        chart.panel = panel;
        return chart;
      });
      const empty = make("p", {class: "empty"}, "There are no logged steps yet.");
      document.getElementById("curves").replaceChildren(...(this.charts.length ? this.charts.map((chart) => chart.element) : [empty]));
      this.panelIds = ids;
    }
    for (const chart of this.charts) chart.panel = panels.find((panel) => panel.id === chart.panel.id);
    document.getElementById("constants").textContent = constants.length
      ? `The same in all rows: ${constants.map(([title, value]) => `${title.toLowerCase()} ${value}`).join(", ")}.` : "";
  }

  buildControls() {
    const {view} = this;
    const toggle = (text, name) => make("label", {}, make("input", {type: "checkbox", checked: view[name], onchange: (event) => {
      view[name] = event.target.checked;
      if (name === "logX") view.zoom = null;
      this.schedule();
    }}), text);
    const value = make("output", {}, view.smoothing.toFixed(2));
    const slider = make("input", {type: "range", min: 0, max: 0.99, step: 0.01, value: view.smoothing, id: "smoothing",
      oninput: (event) => {
        view.smoothing = Number(event.target.value);
        value.textContent = view.smoothing.toFixed(2);
        this.schedule();
      }});
    const themes = make("select", {"aria-label": "Colours of the page", onchange: (event) => this.applyTheme(event.target.value)},
      ...["auto", "light", "dark"].map((name) => make("option", {value: name, selected: name === this.theme}, name)));
    this.resetZoom = make("button", {type: "button", onclick: () => this.setZoom(null)}, "Whole range");
    document.getElementById("controls").replaceChildren(
      this.axisControl(), toggle("log x", "logX"), make("label", {}, "Smoothing", slider, value), toggle("unsmoothed", "raw"),
      toggle("without outliers", "clip"), ...(this.data.runs.some((run) => run.abandoned_rows) ? [toggle("abandoned", "abandoned")] : []),
      this.resetZoom, make("label", {}, "Theme", themes), ...this.chipRows());
  }

  axisControl() {
    return make("fieldset", {}, make("legend", {}, "By"), ...Object.keys(AXES).map((axis) => make("label", {},
      make("input", {type: "radio", name: "axis", value: axis, checked: axis === this.view.axis, onchange: () => {
        Object.assign(this.view, {axis, zoom: null, cursor: null});
        this.schedule();
      }}), axis)));
  }

  /** Buttons that show or hide runs and kinds of events. */
  chipRows() {
    const {runs} = this.data, {view} = this, counts = new Map();
    for (const run of runs) {
      for (const [kind, count] of Object.entries(run.event_counts)) counts.set(kind, (counts.get(kind) || 0) + count);
    }
    const chip = (picture, text, shown, change) => make("button", {type: "button", class: "chip", title: text,
      "aria-pressed": String(shown), onclick: (event) => {
        event.currentTarget.setAttribute("aria-pressed", String(change()));
        this.schedule();
      }}, picture, make("span", {}, text));
    const flip = (set, item) => (set.delete(item) ? false : Boolean(set.add(item)));
    const runChips = runs.map((run, index) => chip(swatch(`var(--c${index % COLORS})`, DASHES[Math.floor(index / COLORS) % 4]), run.name,
      view.runs.has(run), () => flip(view.runs, run)));
    const kindChips = [...counts].map(([kind, count]) => chip(shapePicture(kind), `${kind} (${plain(count)})`, !view.hidden.has(kind),
      () => !flip(view.hidden, kind)));
    const row = (label, chips) => make("div", {class: "row", role: "group", "aria-label": label}, make("span", {class: "quiet"}, label), ...chips);
    return [...(runs.length > 1 ? [row("Runs", runChips)] : []), ...(kindChips.length ? [row("Events", kindChips)] : [])];
  }

  applyTheme(theme) {
    this.theme = theme;
    const dark = theme === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : theme === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    this.schedule();
  }

  schedule() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.view.timeUnit = timeUnit(this.data.runs);
      this.resetZoom.disabled = this.view.zoom === null;
      for (const chart of this.charts) chart.draw();
      this.showEvents();
    });
  }

  showEvents() {
    const shown = this.shownEvents(), events = document.getElementById("events");
    events.hidden = this.data.runs.every((run) => run.events.length === 0);
    const key = `${shown.length} ${this.data.runs.map((run) => `${run.event_lines} ${this.view.runs.has(run)}`)} ${[...this.view.hidden]}`;
    if (!events.hidden && key !== this.eventsKey) events.replaceChildren(...eventsElements(this.data.runs, shown));
    this.eventsKey = key;
  }

  /** [run, event] of the kinds and runs that are not hidden. */
  shownEvents(only) {
    return this.data.runs.filter((run) => this.view.runs.has(run) && (!only || only === run)).flatMap((run) => run.events
      .filter((event) => !this.view.hidden.has(event[2])).map((event) => [run, event]));
  }

  setCursor(position, chart = null) {
    Object.assign(this.view, {cursor: position ?? null, cursorChart: chart});
    this.cursorFrame ??= requestAnimationFrame(() => {
      this.cursorFrame = null;
      for (const each of this.charts) each.showCursor();
    });
  }

  setZoom(range) {
    this.view.zoom = range;
    this.schedule();
  }

  /** The range of the x axis: the zoomed one, or that of all runs; null without rows. */
  xRange() {
    if (this.view.zoom) return this.view.zoom;
    let low = Infinity, high = -Infinity;
    for (const run of this.view.runs) {
      for (const part of [run.training, ...Object.values(run.evaluations)]) {
        for (const x of positions(run, part.values, this.view)) {
          if (!isNumber(x) || (this.view.logX && x <= 0)) continue;
          if (x < low) low = x;
          if (x > high) high = x;
        }
      }
    }
    return low <= high ? [low, high] : null;
  }

  axisLabel() {
    const {axis, timeUnit: [unit]} = this.view;
    if (axis !== "time") return axis;
    return `${unit} ${this.data.runs.every((run) => run.time_is_estimated) ? "of training" : "since the first start"}`;
  }

  axisText(value) {
    if (this.view.axis === "step") return `step ${plain(Math.round(value), 12)}`;
    return this.view.axis === "tokens" ? `${compact(value)} tokens` : `${plain(value, 4)} ${this.view.timeUnit[0]}`;
  }
}

function shapePicture(kind) {
  const [color, shape] = EVENT_KINDS.get(kind) || OTHER_KIND;
  const text = {triangle: "▼", diamond: "◆", square: "■", circle: "●", tick: "|"}[shape];
  const element = make("span", {"aria-hidden": "true"}, text);
  element.style.color = `var(${color})`;
  return element;
}

const report = new Report(parseData(document.getElementById("data").textContent));
window.report = report;
if (report.data.watch) watch(report);
