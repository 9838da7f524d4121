// The report: its state, the controls, the tables, and the updates of a page that `ds-pretrain report --watch` serves.

const HIDDEN_KINDS = new Set(["start", "verify", "snapshot", "hashed", "data_hashed", "init", "prune"]);
const OVERVIEW = [  // [label, text of the value, small text below it]
  ["Steps", (o) => plain(o.step), (o) => (isNumber(o.train_steps) ? `of ${plain(o.train_steps)}` : "")],
  ["Training loss", (o) => plain(o.loss), (o) => (o.not_finite ? `${plain(o.not_finite)} rows not finite` : "")],
  ["Expected loss", (o) => plain(o.expected_loss), (o) => o.expected_text],
  ["Validation loss", (o) => plain(o.valid_loss),
   (o) => (isNumber(o.best_valid_loss) ? `best ${plain(o.best_valid_loss)} at step ${plain(o.best_valid_step)}` : "")],
  ["Tokens", (o) => compact(o.tokens), () => ""],
  ["Parameters", (o) => compact(o.parameters), () => ""],
  ["Throughput", (o) => (isNumber(o.tokens_per_second) ? `${compact(o.tokens_per_second)}/s` : "–"), () => "tokens, newest 50 rows"],
  ["MFU", (o) => percent(o.mfu), (o) => (isNumber(o.mfu_exact) ? `exact ${percent(o.mfu_exact)}` : "")],
  ["Goodput", (o) => percent(o.goodput), () => ""],
  ["Peak memory", (o) => gibibytes(o.peak_memory_bytes), () => ""],
  ["Duration", (o) => duration(o.seconds), (o) => `${plain(o.starts)} start${o.starts === 1 ? "" : "s"}`],
  ["Bad steps", (o) => plain(o.skips + o.spikes), (o) => `${o.skips} skips, ${o.spikes} spikes, ${o.rollbacks} rollbacks`],
  ["Status", (o) => o.status || "no end reported", () => ""],
];
const byId = (id) => document.getElementById(id);
const settingName = (section, key) => (key ? `${section}: ${key}` : section);
const orNotSet = (value) => value ?? "(not set)";

class Report {
  constructor(data) {
    this.data = data;
    const smoothing = data.runs.some((run) => run.rows >= 100) ? 0.6 : 0;  // it would distort a short curve
    this.view = {axis: "step", logX: false, smoothing, raw: true, clip: false, abandoned: true, zoom: null, cursor: null, cursorChart: null,
                 runs: new Set(data.runs.map((run) => run.name)), hidden: new Set(HIDDEN_KINDS), timeUnit: timeUnit(data.runs)};
    Object.assign(this, {charts: [], pollMs: 2000});
    this.filled = {};  // id of an element -> what it shows
    this.bindControls();
    this.build();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.schedule());
    new ResizeObserver(() => this.schedule()).observe(byId("curves"));
  }

  /** Fill an element, unless it shows this content: an update must not close details or move the text that is read. */
  fill(id, content, elements) {
    const key = JSON.stringify(content);
    if (this.filled[id] !== key) byId(id).replaceChildren(...elements());
    this.filled[id] = key;
  }

  /** Fill the page. Called again when an update brings new rows, events or settings. */
  build() {
    Object.assign(extensionEvents, this.data.extension_events);
    const {runs, differences} = this.data, total = runs.reduce((sum, run) => sum + run.rows, 0);
    const old = runs.reduce((sum, run) => sum + run.abandoned_rows, 0);
    const reduced = runs.some((run) => run.reduced) ? "; reduced: a line is the mean of several rows, its band their range" : "";
    byId("title").textContent = runs.length === 1 ? runs[0].name : `${runs.length} runs`;
    byId("subtitle").textContent = `${runs.length === 1 ? progressText(runs[0].overview, this.data.time) : ""}${plain(total, 9)} logged steps${reduced}`
      + (old ? `; ${plain(old, 9)} of them abandoned after a resume or a rollback (dotted)` : "") + `; read ${dateTime(this.data.time)}`;
    byId("notes").replaceChildren(...runs.filter((run) => run.note).map((run) => make("p", {class: "note"},
      runs.length > 1 ? `${run.name}: ${run.note}` : run.note)));
    byId("notices").replaceChildren(...runs.flatMap((run) => [...(run.problem ? [run.problem] : []), ...run.hints.map((hint) => `hint: ${hint}`)]
      .map((text) => make("p", {class: "notice"}, `${run.name}: ${text}`))));
    // the ages of the incidents are of the time of the newest rows
    byId("incidents").replaceChildren(...incidentsElements(runs, this));
    byId("overview").replaceChildren(overviewElement(runs));
    this.fill("chips", runs.map((run) => run.event_counts), () => this.chipRows());
    this.buildCharts();
    this.buildSections();
    byId("differences").hidden = runs.length < 2;
    this.fill("differences", differences, () => [make("h2", {}, "Differences between the runs"), differences.length
      ? makeTable([["setting"], ...runs.map((run) => [run.name])],
                  differences.map(([section, key, ...values]) => [settingName(section, key), ...values.map(orNotSet)]), "settings")
      : make("p", {class: "quiet"}, "The records of the newest starts are the same.")]);
    this.fill("configuration", runs.map((run) => [run.settings, run.starts]), () => [make("h2", {}, "Configuration"),
      ...runs.map((run) => configurationElement(run, runs.length === 1))]);
    this.schedule();
  }

  /** The parts that extensions bring: see SECTIONS. */
  buildSections() {
    const {runs} = this.data;
    for (const [name, section] of Object.entries(SECTIONS)) {
      const shown = runs.filter((run) => run.sections[name]), id = `section-${name}`;
      const element = byId(id) ?? make("section", {id, "aria-label": section.label});
      element.hidden = shown.length === 0;
      const next = byId(section.before(runs));
      if (next.previousElementSibling !== element) next.before(element);  // one that moves loses the focus
      this.fill(id, shown.map((run) => [run.name, run.sections[name]]), () => section.elements(
        shown.map((run) => [run, runs.length > 1 ? `${run.name}: ` : "", run.sections[name]]), this));
    }
  }

  buildCharts() {
    const [panels, constants] = usedPanels(this.data.runs), before = new Map(this.charts.map((chart) => [chart.panel.id, chart]));
    const ids = panels.map((panel) => panel.id).join("\n");
    this.charts = panels.map((panel) => Object.assign(before.get(panel.id) || new Chart(panel, this), {panel}));
    if (ids !== this.panelIds) {
      const empty = make("p", {class: "empty"}, "There are no logged steps yet.");
      byId("curves").replaceChildren(...(this.charts.length ? this.charts.map((chart) => chart.element) : [empty]));
    }
    this.panelIds = ids;
    byId("constants").textContent = constants.length
      ? `The same in all rows: ${constants.map(([title, value]) => `${title.toLowerCase()} ${value}`).join(", ")}.` : "";
  }

  /** Let the controls show the view, and change it. */
  bindControls() {
    const {view} = this;
    for (const input of document.querySelectorAll("#controls input")) {
      const {name, type} = input;
      if (type === "range") input.value = view[name];
      else input.checked = type === "radio" ? input.value === view[name] : view[name];
      input.addEventListener("input", () => {
        view[name] = {checkbox: input.checked, range: Number(input.value), radio: input.value}[type];
        if (name === "axis" || name === "logX") Object.assign(view, {zoom: null, cursor: null});
        this.schedule();
      });
    }
    byId("whole").addEventListener("click", () => this.setZoom(null));
  }

  /** Buttons that show or hide runs and kinds of events. */
  chipRows() {
    const {runs} = this.data, {view} = this, counts = new Map();
    for (const run of runs) {
      for (const [kind, count] of Object.entries(run.event_counts)) counts.set(kind, (counts.get(kind) || 0) + count);
    }
    const chip = (picture, text, set, item, isShown) => make("button", {type: "button", class: "chip", title: text,
      "aria-pressed": String(isShown()), onclick: (event) => {
        if (!set.delete(item)) set.add(item);
        event.currentTarget.setAttribute("aria-pressed", String(isShown()));
        this.schedule();
      }}, picture, make("span", {}, text));
    const runChips = runs.map((run, index) => chip(swatch(`var(--c${index % COLORS})`, DASHES[Math.floor(index / COLORS) % 4]), run.name,
      view.runs, run.name, () => view.runs.has(run.name)));
    const kindChips = [...counts].map(([kind, count]) => chip(shapePicture(kind), `${kind} (${plain(count)})`, view.hidden, kind,
      () => !view.hidden.has(kind)));
    const row = (label, chips) => make("div", {class: "row", role: "group", "aria-label": label}, make("span", {class: "quiet"}, label), ...chips);
    return [...(runs.length > 1 ? [row("Runs", runChips)] : []), ...(kindChips.length ? [row("Events", kindChips)] : [])];
  }

  schedule() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.view.timeUnit = timeUnit(this.data.runs);
      byId("whole").disabled = this.view.zoom === null;
      byId("smoothing").textContent = this.view.smoothing.toFixed(2);
      for (const part of [...this.charts, ...Object.values(SECTIONS)]) part.draw?.();
      this.showEvents();
    });
  }

  showEvents() {
    const {runs} = this.data, rows = this.shownEvents().map(([run, [elapsed, step, , kind, text]]) =>
      [plain(step), duration(elapsed), kind, text, ...(runs.length > 1 ? [run.name] : [])]);
    const columns = [["step", true], ["time since the start", true], ["event"], ["text"], ...(runs.length > 1 ? [["run"]] : [])];
    byId("events").hidden = runs.every((run) => run.events.length === 0);
    this.fill("events", rows, () => [make("h2", {}, "Events"), makeTable(columns, rows)]);
  }

  /** [run, event] of the kinds and runs that are not hidden. */
  shownEvents() {
    return this.data.runs.filter((run) => this.view.runs.has(run.name)).flatMap((run) => run.events
      .filter((event) => !this.view.hidden.has(event[3])).map((event) => [run, event]));
  }

  setCursor(position, chart = null) {
    Object.assign(this.view, {cursor: position ?? null, cursorChart: chart});
    this.cursorFrame ??= requestAnimationFrame(() => {
      this.cursorFrame = null;
      for (const each of this.charts) each.showCursor();
    });
  }

  setZoom(zoom) {
    this.view.zoom = zoom && zoom[1] > zoom[0] ? zoom : null;
    this.schedule();
  }

  /** Zoom the curves to a place between [elapsed, step, tokens] and another, with some space around it, and go there. */
  showPlace(begin, end) {
    if (!this.charts.length) return;
    this.setZoom(null);
    const [low, high] = positions({elapsed: [begin[0], end[0]], step: [begin[1], end[1]], consumed_tokens: [begin[2], end[2]]}, this.view);
    const range = this.xRange();
    if (isNumber(low) && isNumber(high) && range) {
      const space = Math.max((high - low) * 0.5, (range[1] - range[0]) * 0.04);
      this.setZoom([Math.max(low - space, range[0]), Math.min(high + space, range[1])]);
      this.setCursor(low, this.charts[0]);
    }
    this.charts[0].element.scrollIntoView({block: "center"});
  }

  /** The same for steps, for which the curves are by step. */
  showSteps(first, last) {
    document.querySelector("#controls input[value=step]").click();
    this.showPlace([null, first, null], [null, last, null]);
  }

  /** The range of the x axis: the zoomed one, or the range of all runs; null without rows. */
  xRange() {
    if (this.view.zoom) return this.view.zoom;
    let low = Infinity, high = -Infinity;
    for (const run of this.data.runs.filter((run) => this.view.runs.has(run.name))) {
      for (const part of [run.training, ...Object.values(run.evaluations)]) {
        for (const x of positions(part.values, this.view)) {
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
    return `${unit} since the first start`;
  }

  axisText(value) {
    if (this.view.axis === "step") return `step ${plain(Math.round(value), 12)}`;
    return this.view.axis === "tokens" ? `${compact(value)} tokens` : `${plain(value, 4)} ${this.view.timeUnit[0]}`;
  }

  /** Ask the server for the data of runs that have changed, again and again. */
  async watch() {
    const live = byId("live");
    Object.assign(live, {hidden: false, textContent: "live"});
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, this.pollMs));
      try {
        const answer = await fetch(`update?known=${this.data.state}`, {cache: "no-store"});
        if (!answer.ok) throw new Error(`status ${answer.status}`);
        const data = parseData(await answer.text());
        if (data.runs) {
          this.data = data;
          this.build();
        }
        Object.assign(live, {className: "", textContent: `live, updated ${new Date().toLocaleTimeString("en-GB")}`});
      } catch (error) {
        Object.assign(live, {className: "lost", textContent: `no answer from ds-pretrain report (${error.message}); trying again`});
      }
    }
  }
}

/** How far a run is, and since when there is no newer row. */
function progressText({step, train_steps: last, newest_time: time, status}, now) {
  if (!isNumber(step)) return "";
  const age = status ? `; ${status}` : isNumber(time) ? `; newest row ${duration(now - time)} before this page` : "";
  return `Step ${plain(step, 12)}${isNumber(last) ? ` of ${plain(last, 12)}` : ""}${age}; `;
}

/** Tiles for one run, a table for several. Values that no run has are left out. */
function overviewElement(runs) {
  const used = OVERVIEW.filter(([, value]) => runs.some((run) => value(run.overview) !== "–"));
  if (runs.length === 1) {
    return make("dl", {class: "tiles"}, ...used.map(([label, value, note]) => make("div", {class: "tile"},
      make("dt", {}, label), make("dd", {}, value(runs[0].overview), make("small", {}, note(runs[0].overview))))));
  }
  return makeTable([["run"], ...used.map(([label]) => [label, label !== "Status"])],
                   runs.map((run) => [run.name, ...used.map(([, value]) => value(run.overview))]));
}

/** The record of the newest start by section, and what changed at each start. */
function configurationElement(run, isOnly) {
  const sections = new Map(), part = (title, columns, rows) => make("details", {}, make("summary", {}, title), makeTable(columns, rows, "settings"));
  for (const [section, key, value] of run.settings) sections.set(section, [...(sections.get(section) || []), [key || section, value]]);
  const starts = run.starts.map((start, index) => [String(index + 1), dateTime(start.time), start.changes.map(([section, key, before, after]) =>
    `${settingName(section, key)}: ${orNotSet(before)} → ${orNotSet(after)}`).join("\n") || (index === 0 ? "" : "no change")]);
  return make("details", {open: isOnly}, make("summary", {}, isOnly ? `run.json of ${run.path}: the newest start` : run.name),
    ...[...sections].map(([section, rows]) => part(`${section} (${rows.length})`, [["setting"], ["value"]], rows)),
    part(`starts (${run.overview.starts})`, [["start"], ["time"], ["changes since the start before"]], starts));
}

function shapePicture(kind) {
  const [color, shape] = eventStyle(kind), element = make("span", {"aria-hidden": "true"}, shape);
  element.style.color = `var(${color})`;
  return element;
}

const report = new Report(parseData(byId("data").textContent));
window.report = report;
if (report.data.watch) report.watch();
