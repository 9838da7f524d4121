// A panel: a chart of uPlot with the series, bands and events of the runs, and its read-out by mouse, touch or keyboard.

class Chart {
  constructor(panel, report) {
    Object.assign(this, {panel, report, logY: false, series: [], events: [], plot: null});
    this.box = make("div", {class: "plot", tabindex: 0, role: "img", onkeydown: (event) => this.onKey(event),
                            onblur: () => report.setCursor(null)});
    this.tip = make("div", {class: "tip", hidden: true, "aria-live": "polite"});
    this.legend = make("div", {class: "legend"});
    const logY = make("button", {type: "button", "aria-pressed": "false", onclick: () => {
      this.logY = !this.logY;
      logY.setAttribute("aria-pressed", String(this.logY));
      this.draw();
    }}, "log y");
    this.element = make("article", {class: panel.wide ? "panel wide" : "panel", "data-panel": panel.id},
      make("header", {}, make("h3", {}, panel.title, " ", make("span", {class: "unit"}, panel.unit || "")),
        make("span", {class: "tools"}, logY)), this.legend, this.box);
  }

  draw() {
    const {view, data} = this.report, width = this.box.clientWidth, height = this.box.clientHeight;
    if (width === 0) return;
    this.plot?.destroy();
    this.plot = null;
    this.series = panelSeries(this.panel, data.runs, view);
    this.drawLegend();
    this.box.setAttribute("aria-label", `${this.panel.title} by ${this.report.axisLabel()}. Arrow keys read the values.`);
    const [x, y] = this.ranges();
    if (!x || !y) {
      this.box.replaceChildren(make("p", {class: "empty"}, "no values in this range"));
      return;
    }
    const drawn = this.series.flatMap((one) => this.layers(one));
    this.box.replaceChildren(this.tip);
    this.plot = new uPlot({
      width, height, legend: {show: false}, padding: [14, 30, 0, 0],
      scales: {x: this.scale(x, view.logX), y: this.scale(y, this.logY)},
      axes: [{...this.axis(x, view.logX, compact), label: this.report.axisLabel(), labelSize: 16, size: 26, space: 90},
             {...this.axis(y, this.logY, this.panel.format, this.panel.tickUnit), size: textWidth, space: 42}],
      // each series draws its own points: the series of several runs have no common positions
      series: [{}, ...drawn], focus: {alpha: 1},
      cursor: {y: false, points: {show: false}, drag: {x: true, y: false, setScale: false, dist: 6},
               bind: {dblclick: () => () => this.report.setZoom(null)}},
      hooks: {draw: [() => this.drawEvents()], setCursor: [(plot) => this.onCursor(plot)], setSelect: [(plot) => this.onSelect(plot)]},
    }, [x, ...drawn.map(() => [null, null])], this.box);
    this.showCursor();
  }

  /** A scale of uPlot. Below one decade, its logarithmic ticks would be too few: then the ticks are linear. */
  scale([low, high], log) {
    const distribution = !log ? {distr: 1} : high / low >= 10 ? {distr: 3} : {distr: 100, fwd: Math.log10, bwd: (value) => 10 ** value};
    return {time: false, range: () => [low, high], ...distribution};
  }

  axis([low, high], log, format, unit = 1) {
    const steps = [1, 2, 5].flatMap((factor) => [...Array(40).keys()].map((power) => unit * factor * 10 ** (power - 20)));
    return {stroke: cssValue("--quiet"), font: "11.5px system-ui, sans-serif", labelFont: "11.5px system-ui, sans-serif", gap: 5,
            grid: {stroke: cssValue("--grid"), width: 1}, ticks: {show: false}, border: {show: true, stroke: cssValue("--line"), width: 1},
            incrs: steps.sort((a, b) => a - b), ...(log && high / low < 10 ? {filter: (plot, splits) => splits} : {}),
            values: (plot, splits) => {
              const texts = differentTexts(splits.filter((split) => split !== null), format);
              return splits.map((split) => (split === null ? "" : texts.shift()));
            }};
  }

  /** The ranges of both axes: [[low, high], [low, high]], with null for an axis without values. */
  ranges() {
    const {view} = this.report, [from, to] = this.report.xRange() || [Infinity, -Infinity], values = [];
    for (const series of this.series.filter((one) => !(one.abandoned && view.clip))) {
      series.x.forEach((x, index) => {
        if (!isNumber(x) || x < from || x > to) return;
        const ends = series.faint ? [series.y[index]] : [series.y[index], series.low?.[index], series.high?.[index]];
        values.push(...ends.filter((y) => isNumber(y) && !(this.logY && y <= 0)));
      });
    }
    if (from > to || values.length === 0) return [from > to ? null : [from, to], null];
    const sorted = Float64Array.from(values).sort(), last = sorted.length - 1, cut = view.clip ? 0.02 : 0;
    const low = sorted[Math.round(cut * last)], high = sorted[Math.round((1 - cut) * last)];
    if (this.logY) return [widened(from, to, view.logX), widened(low / (high / low) ** 0.04, high * (high / low) ** 0.04, true)];
    const margin = (high - low) * 0.05;
    return [widened(from, to, view.logX), widened(low - margin, high + margin)];
  }

  /** The series of uPlot that draw one series: the band of its range, and its line. */
  layers(one) {
    const layer = (alpha, style, paths) => ({alpha, ...style, auto: false, points: {show: false}, paths});
    const fill = (low, high, alpha) => layer(alpha, {width: 0, fill: one.color}, (plot) => ({fill: this.between(plot, one.x, low, high)}));
    const line = layer(one.abandoned ? 0.75 : one.faint ? 0.3 : 1, {width: one.faint ? 1.2 : 1.8, stroke: one.color, dash: one.dash},
                       (plot) => ({stroke: this.line(plot, one)}));
    if (!one.low || one.faint) return [line];
    return [fill(one.low.map((value, index) => value ?? one.y[index]), one.high.map((value, index) => value ?? one.y[index]), 0.2), line];
  }

  /** Whether a point can be drawn: on a logarithmic axis, only positive values can. */
  isDrawn(x, y) {
    return isNumber(x) && isNumber(y) && !(this.logY && y <= 0) && !(this.report.view.logX && x <= 0);
  }

  /** A line with gaps where values are missing, and dots for points that have no neighbours, or for all. */
  line(plot, {x, y, points}) {
    const path = new Path2D(), drawn = x.map((_, index) => this.isDrawn(x[index], y[index]));
    const dots = points && x.length <= 400;
    drawn.forEach((isDrawn, index) => {
      if (!isDrawn) return;
      const at = [plot.valToPos(x[index], "x", true), plot.valToPos(y[index], "y", true)];
      if (drawn[index - 1]) path.lineTo(...at);
      else path.moveTo(...at);
      if (dots || !(drawn[index - 1] || drawn[index + 1])) {
        path.arc(...at, 1.5 * uPlot.pxRatio, 0, 7);
        path.moveTo(...at);
      }
    });
    return path;
  }

  between(plot, x, low, high) {
    const path = new Path2D(), bottom = plot.bbox.top + plot.bbox.height;
    const points = [...x.keys()].filter((index) => isNumber(low[index]) && this.isDrawn(x[index], high[index]));
    const add = (index, y) => path.lineTo(plot.valToPos(x[index], "x", true), this.logY && y <= 0 ? bottom : plot.valToPos(y, "y", true));
    for (const index of points) add(index, high[index]);
    for (const index of points.reverse()) add(index, low[index]);
    return path;
  }

  drawEvents() {
    const {ctx, bbox} = this.plot ?? {}, ratio = uPlot.pxRatio;
    this.events = [];
    if (!ctx) return;
    ctx.save();
    for (const [run, event] of this.report.shownEvents()) {
      const [elapsed, step, tokens, kind] = event;
      const [position] = positions({elapsed: [elapsed], step: [step], consumed_tokens: [tokens]}, this.report.view);
      const at = this.isDrawn(position, 1) ? this.plot.valToPos(position, "x", true) : NaN;
      if (!(at >= bbox.left - 1 && at <= bbox.left + bbox.width + 1)) continue;
      const [color, shape, line] = eventStyle(kind);
      this.events.push([(at - bbox.left) / ratio, run, event]);
      ctx.fillStyle = cssValue(color);
      ctx.globalAlpha = 0.45;
      for (let y = bbox.top; line && y < bbox.top + bbox.height; y += 6 * ratio) ctx.fillRect(at, y, ratio, 3 * ratio);
      ctx.globalAlpha = 1;
      ctx.font = `${10 * ratio}px system-ui, sans-serif`;
      ctx.textAlign = "center";
      ctx.fillText(shape, at, shape === "|" ? bbox.top + bbox.height : bbox.top - 2 * ratio);
    }
    ctx.restore();
  }

  /** Names of the series. Of several runs, the colours are next to the runs' names; here are the dashes. */
  drawLegend() {
    const main = this.series.filter((series) => !series.faint), single = this.report.data.runs.length === 1;
    const entries = new Map(main.map((series) => [series.metric, series]));
    this.legend.replaceChildren(...(entries.size < 2 ? [] : [...entries.values()]).slice(0, 12).map((series) => make("span", {},
      swatch(single ? series.color : cssValue("--quiet"), series.dash), series.metric)));
  }

  /** uPlot calls this when its cursor moves; `showCursor` moves it without a call. */
  onCursor(plot) {
    if (plot.cursor.event) this.report.setCursor(plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null, this);
  }

  onSelect(plot) {
    const {left, width} = plot.select;
    if (width < 6) return;
    this.report.setZoom([left, left + width].map((at) => plot.posToVal(at, "x")));
  }

  /** Arrows move the read-out from point to point, + and - zoom around it, 0 and Escape reset. */
  onKey(event) {
    const main = this.series.find((series) => !series.faint);
    if (!main || !this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const xs = main.x, last = xs.length - 1, now = this.report.view.cursor;
    const index = now === null ? last : nearest(xs, now), jump = event.shiftKey ? 10 : 1;
    const targets = {ArrowLeft: now === null ? last : index - jump, ArrowRight: now === null ? 0 : index + jump, Home: 0, End: last};
    if (event.key in targets) this.report.setCursor(xs[Math.min(Math.max(targets[event.key], 0), last)], this);
    else if (event.key === "+" || event.key === "-") this.zoomAround(now, event.key === "+" ? 0.5 : 2);
    else if (event.key === "0") this.report.setZoom(null);
    else if (event.key === "Escape") this.report.setCursor(null);
    else return;
    event.preventDefault();
  }

  zoomAround(center, factor) {
    const right = this.plot.over.clientWidth, middle = center === null ? right / 2 : this.plot.valToPos(center, "x");
    this.report.setZoom([0, right].map((edge) => this.plot.posToVal(middle + (edge - middle) * factor, "x")));
  }

  /** Move the vertical line, and show the values in the panel that has the pointer or the focus. */
  showCursor() {
    const {view} = this.report, at = this.plot && view.cursor !== null ? this.plot.valToPos(view.cursor, "x") : -10;
    const shown = at >= -1 && at <= (this.plot?.over.clientWidth ?? -10) + 1;
    this.plot?.setCursor({left: shown ? at : -10, top: shown ? 0 : -10}, false);
    this.tip.hidden = !shown || view.cursorChart !== this;
    if (this.tip.hidden) return;
    this.tip.replaceChildren(...this.readOut(view.cursor, at));
    const left = this.plot.bbox.left / uPlot.pxRatio + at, width = this.box.clientWidth, right = left > width / 2;
    Object.assign(this.tip.style, {left: right ? "" : `${left + 12}px`, top: "18px", right: right ? `${width - left + 12}px` : ""});
  }

  readOut(position, at) {
    const lines = [], heads = new Set(), {format} = this.panel;
    for (const series of this.series) {
      const index = series.faint ? -1 : nearest(series.x, position);
      if (index < 0 || Math.abs(this.plot.valToPos(series.x[index], "x") - at) > 40) continue;
      heads.add(this.report.axisText(series.x[index]));
      let text = isNumber(series.y[index]) ? format(series.y[index]) : "no finite value";
      if (series.raw) text += ` (${isNumber(series.raw[index]) ? format(series.raw[index]) : "not finite"})`;
      else if (isNumber(series.low?.[index])) text += ` (${format(series.low[index])} to ${format(series.high[index])})`;
      lines.push(make("div", {}, swatch(series.color, series.dash), make("span", {}, series.label), make("span", {}, text)));
    }
    const near = this.events.filter(([x]) => Math.abs(x - at) < 6).slice(0, 5).map(([, run, event]) => make("span",
      {class: "event"}, `${event[3]} at step ${plain(event[1])}${event[4] ? `: ${event[4].slice(0, 160)}` : ""}`
        + (this.report.data.runs.length > 1 ? ` (${run.name})` : "")));
    return [make("b", {}, [...heads].slice(0, 3).join(" / ") || this.report.axisText(position)), ...lines, ...near];
  }
}

/** A range that is not empty. */
function widened(low, high, log = false) {
  if (low < high) return [low, high];
  if (log) return [low * 0.8, high * 1.25];
  const margin = Math.abs(low) * 0.05 || 0.5;
  return [low - margin, high + margin];
}

/** Width of an axis whose longest text is not cut off. */
function textWidth(plot, texts) {
  plot.ctx.font = `${11.5 * uPlot.pxRatio}px system-ui, sans-serif`;
  return 12 + Math.max(44, ...(texts || []).map((text) => plot.ctx.measureText(text).width / uPlot.pxRatio));
}
