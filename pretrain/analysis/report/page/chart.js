// A panel with axes, curves and events on a canvas, and its read-out by mouse, touch or keyboard.

const MARGIN = {left: 62, right: 14, top: 14, bottom: 34};

class Chart {
  constructor(panel, report) {
    this.panel = panel;
    this.report = report;
    this.logY = false;
    this.series = [];
    this.canvas = make("canvas", {tabindex: 0, role: "img", "aria-label": panel.title});
    this.cursor = make("div", {class: "cursor", hidden: true});
    this.range = make("div", {class: "range", hidden: true});
    this.tip = make("div", {class: "tip", hidden: true, "aria-live": "polite"});
    this.legend = make("div", {class: "legend"});
    const logY = make("button", {type: "button", "aria-pressed": "false", onclick: () => {
      this.logY = !this.logY;
      logY.setAttribute("aria-pressed", String(this.logY));
      this.draw();
    }}, "log y");
    this.element = make("article", {class: panel.wide ? "panel wide" : "panel", "data-panel": panel.id},
      make("header", {}, make("h3", {}, panel.title, " ", make("span", {class: "unit"}, panel.unit || "")),
        make("span", {class: "tools"}, logY)), this.legend,
      make("div", {class: "plot"}, this.canvas, this.range, this.cursor, this.tip));
    this.listen();
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerleave", () => this.dragFrom === undefined && this.report.setCursor(null));
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch") return;
      this.dragFrom = event.offsetX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", (event) => this.onRelease(event));
    canvas.addEventListener("pointercancel", () => this.endDrag());
    canvas.addEventListener("dblclick", () => this.report.setZoom(null));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    canvas.addEventListener("blur", () => this.report.setCursor(null));
  }

  onMove(event) {
    if (!this.x) return;
    if (this.dragFrom !== undefined) {
      const [from, to] = [this.dragFrom, event.offsetX].map((x) => this.inside(x)).sort((a, b) => a - b);
      Object.assign(this.range.style, {left: `${from}px`, width: `${to - from}px`, top: `${MARGIN.top}px`,
                                       bottom: `${MARGIN.bottom}px`});
      this.range.hidden = false;
    }
    this.report.setCursor(this.x.value(this.inside(event.offsetX)), this);
  }

  onRelease(event) {
    const from = this.dragFrom;
    this.endDrag();
    if (from === undefined || !this.x || Math.abs(event.offsetX - from) < 6) return;
    this.report.setZoom([from, event.offsetX].map((x) => this.x.value(this.inside(x))).sort((a, b) => a - b));
  }

  endDrag() {
    this.dragFrom = undefined;
    this.range.hidden = true;
  }

  inside(x) {
    return Math.min(Math.max(x, MARGIN.left), this.canvas.clientWidth - MARGIN.right);
  }

  /** Arrows move the read-out from point to point, + and - zoom around it, 0 and Escape reset. */
  onKey(event) {
    const main = this.series.find((series) => !series.faint);
    if (!main || !this.x || event.ctrlKey || event.metaKey || event.altKey) return;
    const xs = main.x, last = xs.length - 1, now = this.report.view.cursor;
    const index = now === null ? last : nearest(xs, now), jump = event.shiftKey ? 10 : 1;
    const targets = {ArrowLeft: now === null ? last : index - jump, ArrowRight: now === null ? 0 : index + jump,
                     Home: 0, End: last};
    if (event.key in targets) this.report.setCursor(xs[Math.min(Math.max(targets[event.key], 0), last)], this);
    else if (event.key === "+" || event.key === "-") this.zoomAround(now, event.key === "+" ? 0.5 : 2);
    else if (event.key === "0") this.report.setZoom(null);
    else if (event.key === "Escape") this.report.setCursor(null);
    else return;
    event.preventDefault();
  }

  zoomAround(center, factor) {
    const [left, right] = [MARGIN.left, this.canvas.clientWidth - MARGIN.right];
    const middle = center === null ? (left + right) / 2 : this.x.pixel(center);
    const edges = [left, right].map((edge) => this.x.value(middle + (edge - middle) * factor));
    this.report.setZoom(edges[1] > edges[0] ? edges : null);
  }

  draw() {
    const {canvas} = this, width = canvas.clientWidth, height = canvas.clientHeight;
    if (width === 0) return;
    const ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d");
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.scale(ratio, ratio);
    this.series = panelSeries(this.panel, this.report.data.runs, this.report.view);
    this.drawLegend();
    const [xRange, yRange] = this.ranges();
    this.x = this.y = null;
    context.font = "11.5px system-ui, sans-serif";
    context.fillStyle = cssValue("--quiet");
    if (!xRange || !yRange) {
      context.fillText("no values in this range", MARGIN.left, height / 2);
      return;
    }
    this.x = new Scale(...xRange, MARGIN.left, width - MARGIN.right, this.report.view.logX);
    this.y = new Scale(...yRange, height - MARGIN.bottom, MARGIN.top, this.logY);
    this.drawAxes(context, width, height);
    context.save();
    context.beginPath();
    context.rect(MARGIN.left, MARGIN.top - 2, width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom + 4);
    context.clip();
    for (const series of this.series) if (series.low && !series.faint) this.drawBand(context, series);
    for (const series of this.series) (series.area ? this.drawArea : this.drawLine).call(this, context, series);
    context.restore();
    this.drawEvents(context, width, height);
    this.describe();
    this.showCursor();
  }

  /** The ranges of both axes: [[low, high], [low, high]], with null for an axis without values. */
  ranges() {
    const {view} = this.report, [from, to] = this.report.xRange() || [Infinity, -Infinity], values = [];
    let low = Infinity, high = -Infinity;
    for (const series of this.series) {
      if (series.abandoned && view.clip) continue;
      series.x.forEach((x, index) => {
        if (!isNumber(x) || x < from || x > to) return;
        const ends = series.faint ? [series.y[index]] : [series.y[index], series.low?.[index], series.high?.[index]];
        for (const y of ends) {
          if (!isNumber(y) || (this.logY && y <= 0)) continue;
          if (y < low) low = y;
          if (y > high) high = y;
          if (view.clip) values.push(y);
        }
      });
    }
    if (from > to || low > high) return [from > to ? null : [from, to], null];
    if (view.clip) [low, high] = quantiles(values, 0.02, 0.98);
    if (this.panel.stacked && !this.logY) low = 0;
    if (this.logY) return [[from, to], low === high ? [low, high] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04]];
    const margin = (high - low) * 0.05;
    return [[from, to], [low === 0 ? 0 : low - margin, high + margin]];
  }

  drawAxes(context, width, height) {
    const bottom = height - MARGIN.bottom, {x, y, panel} = this;
    context.lineWidth = 1;
    context.strokeStyle = cssValue("--grid");
    context.textAlign = "right";
    context.textBaseline = "middle";
    const yTicks = y.ticks(Math.max(height / 42, 3), panel.tickUnit), yTexts = differentTexts(yTicks, panel.format);
    for (const [index, tick] of yTicks.entries()) {
      const at = Math.round(y.pixel(tick)) + 0.5;
      context.beginPath();
      context.moveTo(MARGIN.left, at);
      context.lineTo(width - MARGIN.right, at);
      context.stroke();
      context.fillText(yTexts[index], MARGIN.left - 7, at, MARGIN.left - 9);
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    const xTicks = x.ticks(Math.max(width / 95, 2)), xTexts = differentTexts(xTicks, compact);
    for (const [index, tick] of xTicks.entries()) {
      const at = Math.round(x.pixel(tick)) + 0.5;
      context.beginPath();
      context.moveTo(at, MARGIN.top);
      context.lineTo(at, bottom);
      context.stroke();
      const half = context.measureText(xTexts[index]).width / 2;
      context.fillText(xTexts[index], Math.max(half, Math.min(at, width - half - 1)), bottom + 5);
    }
    context.textAlign = "right";
    context.fillText(this.report.axisLabel(), width - MARGIN.right, bottom + 19);
    context.strokeStyle = cssValue("--line");
    context.strokeRect(MARGIN.left + 0.5, MARGIN.top + 0.5, width - MARGIN.left - MARGIN.right - 1, bottom - MARGIN.top - 1);
  }

  drawLine(context, series) {
    context.strokeStyle = context.fillStyle = series.color;
    context.globalAlpha = series.abandoned ? 0.75 : series.faint ? 0.3 : 1;
    context.lineWidth = series.faint ? 1.2 : 1.8;
    context.lineJoin = "round";
    context.setLineDash(series.dash);
    context.beginPath();
    const dots = [];
    let open = false;
    series.y.forEach((value, index) => {
      const drawn = isNumber(value) && isNumber(series.x[index]) && !(this.logY && value <= 0)
        && !(this.x.log && series.x[index] <= 0);
      if (drawn) {
        const x = this.x.pixel(series.x[index]), y = this.y.pixel(value), alone = !open && !isNumber(series.y[index + 1]);
        if (open) context.lineTo(x, y);
        else context.moveTo(x, y);
        if (series.points || alone) dots.push([x, y]);
      }
      open = drawn;
    });
    context.stroke();
    context.setLineDash([]);
    for (const [x, y] of dots.length > 400 ? [] : dots) {
      context.beginPath();
      context.arc(x, y, 2.6, 0, 7);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  drawBand(context, series) {
    const {low, high, y} = series;
    this.fillBetween(context, series, low.map((value, index) => value ?? y[index]),
                     high.map((value, index) => value ?? y[index]), 0.2);
  }

  drawArea(context, series) {
    this.fillBetween(context, series, series.base, series.y, 0.72);
  }

  fillBetween(context, series, low, high, alpha) {
    const bottom = this.canvas.clientHeight - MARGIN.bottom;
    const edge = (value) => (this.logY && value <= 0 ? bottom : this.y.pixel(value));
    const points = [...low.keys()].filter((index) => isNumber(low[index]) && isNumber(high[index])
      && isNumber(series.x[index]) && !(this.x.log && series.x[index] <= 0));
    context.fillStyle = series.color;
    context.globalAlpha = alpha;
    context.beginPath();
    for (const index of points) context.lineTo(this.x.pixel(series.x[index]), edge(high[index]));
    for (const index of points.reverse()) context.lineTo(this.x.pixel(series.x[index]), edge(low[index]));
    context.fill();
    context.globalAlpha = 1;
  }

  drawEvents(context, width, height) {
    this.events = [];
    for (const [run, event] of this.report.shownEvents(this.panel.run)) {
      const position = eventPosition(run, event, this.report.view);
      const at = isNumber(position) && !(this.x.log && position <= 0) ? this.x.pixel(position) : NaN;
      if (!(at >= MARGIN.left - 1 && at <= width - MARGIN.right + 1)) continue;
      const [color, shape, line] = EVENT_KINDS.get(event[2]) || OTHER_KIND;
      this.events.push([at, run, event]);
      context.strokeStyle = context.fillStyle = cssValue(color);
      if (line) {
        context.globalAlpha = 0.45;
        context.setLineDash([3, 3]);
        context.beginPath();
        context.moveTo(at, MARGIN.top);
        context.lineTo(at, height - MARGIN.bottom);
        context.stroke();
        context.setLineDash([]);
        context.globalAlpha = 1;
      }
      drawShape(context, shape, at, shape === "tick" ? height - MARGIN.bottom : MARGIN.top - 5);
    }
  }

  /** Names of the series. Of several runs, the colours are next to the runs' names; here are the dashes. */
  drawLegend() {
    const main = this.series.filter((series) => !series.faint), single = this.report.data.runs.length === 1;
    const entries = new Map(main.map((series) => [series.metric, series]));
    const shown = entries.size < 2 ? [] : [...entries.values()];
    this.legend.replaceChildren(...shown.slice(0, 12).map((series) => make("span", {},
      swatch(single || series.area ? series.color : cssValue("--quiet"), series.dash, series.area), series.metric)));
  }

  describe() {
    const text = this.series.filter((series) => !series.faint && !series.area).slice(0, 8).map((series) => {
      const values = series.y.filter(isNumber);
      return values.length ? `${series.label}: first ${this.panel.format(values[0])}, last ${this.panel.format(values.at(-1))}` : "";
    });
    this.canvas.setAttribute("aria-label", [`${this.panel.title} by ${this.report.axisLabel()}`, ...text,
      "Arrow keys read the values."].filter(Boolean).join(". "));
  }

  /** Move the vertical line, and show the values in the panel that has the pointer or the focus. */
  showCursor() {
    const {view} = this.report, at = this.x && view.cursor !== null ? this.x.pixel(view.cursor) : NaN;
    const shown = at >= MARGIN.left - 1 && at <= this.canvas.clientWidth - MARGIN.right + 1;
    this.cursor.hidden = !shown;
    this.tip.hidden = !shown || view.cursorChart !== this;
    if (!shown) return;
    Object.assign(this.cursor.style, {left: `${at}px`, top: `${MARGIN.top}px`, bottom: `${MARGIN.bottom}px`});
    if (this.tip.hidden) return;
    this.tip.replaceChildren(...this.readOut(view.cursor, at));
    const right = at > this.canvas.clientWidth / 2;
    Object.assign(this.tip.style, {left: right ? "" : `${at + 12}px`, top: "18px",
                                   right: right ? `${this.canvas.clientWidth - at + 12}px` : ""});
  }

  readOut(position, at) {
    const lines = [], heads = new Set();
    for (const series of this.series) {
      const index = series.faint ? -1 : nearest(series.x, position);
      if (index < 0 || Math.abs(this.x.pixel(series.x[index]) - at) > 40) continue;
      heads.add(this.report.axisText(series.x[index]));
      const {format} = this.panel, value = series.area ? series.raw[index] : series.y[index];
      let text = isNumber(value) ? format(value) : "no finite value";
      if (!series.area && series.raw) text += ` (${isNumber(series.raw[index]) ? format(series.raw[index]) : "not finite"})`;
      else if (isNumber(series.low?.[index])) text += ` (${format(series.low[index])} to ${format(series.high[index])})`;
      lines.push(make("div", {}, swatch(series.color, series.dash, series.area), make("span", {}, series.label),
                      make("span", {}, text)));
    }
    const near = this.events.filter(([x]) => Math.abs(x - at) < 6).slice(0, 5).map(([, run, event]) => make("span",
      {class: "event"}, `${event[2]} at step ${plain(event[1])}${event[3] ? `: ${event[3].slice(0, 160)}` : ""}`
        + (this.report.data.runs.length > 1 ? ` (${run.name})` : "")));
    return [make("b", {}, [...heads].slice(0, 3).join(" / ") || this.report.axisText(position)), ...lines, ...near];
  }
}

function drawShape(context, shape, x, y) {
  context.beginPath();
  if (shape === "triangle") [[-4.5, -4], [4.5, -4], [0, 4.5]].forEach(([dx, dy]) => context.lineTo(x + dx, y + dy));
  else if (shape === "diamond") [[0, -5], [5, 0], [0, 5], [-5, 0]].forEach(([dx, dy]) => context.lineTo(x + dx, y + dy));
  else if (shape === "square") context.rect(x - 3.5, y - 3.5, 7, 7);
  else if (shape === "tick") context.rect(x - 1, y - 6, 2, 6);
  else context.arc(x, y, 3.8, 0, 7);
  context.fill();
}
