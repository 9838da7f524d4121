// The heat map of ranks by time: a row is a place on a host, a column some steps, the colour the own time of the slowest
// rank in the cell relative to the median of all ranks.

const HEAT_STOPS = [[1, "--heat-1"], [1.3, "--heat-2"], [2, "--heat-3"], [8, "--heat-4"]];  // ratio, colour
const HEAT_LEGEND = [1, 1.3, 2, 4];

SECTIONS.slow_ranks = {
  label: "Ranks by time",
  maps: [],
  // a run with slow ranks shows them before its curves
  before: (runs) => (runs.some((run) => run.incidents.some(({kind}) => kind === "slow_rank")) ? "controls" : "constants"),
  elements(shown, report) {
    this.maps = shown.map(([run, name, map]) => new HeatMap(map, `Ranks${name ? ` of ${run.name}` : ""}`, report));
    return this.maps.map((map) => map.element);
  },
  draw() {
    for (const map of this.maps) map.draw();
  },
};

class HeatMap {
  constructor(map, title, report) {
    Object.assign(this, {map, title, report, at: null});
    for (const name of ["ratio", "highest", "phase", "member"]) this[name] = map[name] === null ? null : bytesOf(map[name]);
    this.canvas = make("canvas", {});
    this.mark = make("div", {class: "heat-mark", hidden: true});
    this.tip = make("div", {class: "tip", hidden: true, "aria-live": "polite"});
    this.box = make("div", {class: "heat", tabindex: 0, role: "img", onkeydown: (event) => this.onKey(event), onblur: () => this.show(null),
      "aria-label": "Own time of each rank by step, relative to the median. Arrow keys read the values.",
      onpointermove: (event) => this.show(this.cellAt(event)), onpointerdown: (event) => this.show(this.cellAt(event)),
      onpointerleave: () => this.show(null), ondblclick: (event) => this.zoomTo(this.cellAt(event))}, this.canvas, this.mark, this.tip);
    const slowest = map.slowest.map(([rank, host, ratio, phase]) => make("li", {}, make("b", {}, `rank ${rank} on ${host}`),
      ` ${plain(ratio, 2)} × the median, mostly in ${phase}`));
    this.element = make("article", {class: "panel wide"}, make("header", {}, make("h3", {}, title, " ",
      make("span", {class: "unit"}, "own time relative to the median")), make("span", {class: "tools"}, heatLegend())),
      slowest.length ? make("div", {class: "slowest"}, "Slowest in the newest steps:", make("ul", {}, ...slowest)) : null, this.box);
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  /** Sizes in CSS pixels: the names of the hosts are on the left, the steps below. */
  layout() {
    const {rows} = this.map, width = this.box.clientWidth, rowHeight = Math.min(Math.max(Math.floor(400 / rows.length), 2), 18);
    const gutter = Math.round(Math.min(width * 0.27, 150));
    return {width, rowHeight, gutter, plotWidth: width - gutter, plotHeight: rowHeight * rows.length, height: rowHeight * rows.length + 22};
  }

  draw() {
    const {columns, rows} = this.map, size = this.layout(), ratio = devicePixelRatio || 1;
    if (size.width <= 0) return;
    Object.assign(this.canvas, {width: Math.round(size.width * ratio), height: Math.round(size.height * ratio)});
    Object.assign(this.canvas.style, {width: `${size.width}px`, height: `${size.height}px`});
    const ctx = this.canvas.getContext("2d"), left = Math.round(size.gutter * ratio), rowPixels = Math.round(size.rowHeight * ratio);
    const pixels = this.canvas.width - left, colors = heatColors(this.map);
    for (let x = 0; x < pixels; x += 1) {  // a pixel that stands for several columns shows the slowest of them
      const first = Math.floor(x * columns.length / pixels), end = Math.max(Math.floor((x + 1) * columns.length / pixels), first + 1);
      rows.forEach((row, index) => {
        let code = 0;
        for (let column = first; column < end; column += 1) code = Math.max(code, this.ratio[index * columns.length + column]);
        if (code === 0) return;  // no rank of this start was here
        ctx.fillStyle = colors[code];
        ctx.fillRect(left + x, index * rowPixels, 1, rowPixels);
      });
    }
    this.drawLabels(ctx, size, ratio);
    this.show(this.at);
  }

  drawLabels(ctx, size, ratio) {
    const {columns, rows} = this.map;
    ctx.scale(ratio, ratio);
    ctx.font = "11px system-ui, sans-serif";
    Object.assign(ctx, {fillStyle: cssValue("--quiet"), strokeStyle: cssValue("--surface"), textBaseline: "middle", textAlign: "left"});
    let free = 0;  // where the next name has space
    for (let begin = 0, end; begin < rows.length; begin = end) {
      for (end = begin + 1; end < rows.length && rows[end][2] === rows[begin][2]; end += 1);
      const top = begin * size.rowHeight, middle = (begin + end) / 2 * size.rowHeight;
      if (begin > 0 && size.rowHeight * (end - begin) > 3) ctx.fillRect(size.gutter - 6, top, size.plotWidth + 6, 0.6);
      if (middle - 6 < free) continue;
      ctx.fillText(fitted(ctx, rows[begin][2], size.gutter - 8), 0, Math.max(middle, 6));
      free = Math.max(middle, 6) + 7;
    }
    ctx.textAlign = "center";
    let right = -Infinity;
    columns.forEach(([first, , , isStart], index) => {
      const x = size.gutter + index / columns.length * size.plotWidth, text = plain(first, 9), width = ctx.measureText(text).width;
      if (isStart && index > 0) ctx.fillRect(x, 0, 1, size.plotHeight + 5);
      if (x - width / 2 < right + 24 || x + width / 2 > size.width) return;
      ctx.fillText(text, x, size.plotHeight + 14);
      right = x + width / 2;
    });
    ctx.textAlign = "left";
    ctx.fillText("step", 0, size.plotHeight + 14);
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect(), size = this.layout();
    const row = Math.floor((event.clientY - box.top) / size.rowHeight);
    const column = Math.floor((event.clientX - box.left - size.gutter) / size.plotWidth * this.map.columns.length);
    return row >= 0 && row < this.map.rows.length && column >= 0 && column < this.map.columns.length ? {row, column} : null;
  }

  /** What is known of a cell: rank, host, steps, ratios and the slowest phase; null for an empty cell. */
  cell({row, column}) {
    const {columns, rows, layouts, phases} = this.map, index = row * columns.length + column;
    const [first, last, layout] = columns[column], [begin, , host] = rows[row];
    if (this.ratio[index] === 0) return null;
    const ratioOf = (code) => this.map.low * (this.map.high / this.map.low) ** ((code - 1) / 254);
    return {rank: layouts[layout][begin + (this.member === null ? 0 : this.member[index])], host, first, last, phase: phases[this.phase[index]],
            ratio: ratioOf(this.ratio[index]), highest: ratioOf(this.highest[index])};
  }

  show(at) {
    this.at = at;
    const cell = at && this.cell(at);
    this.mark.hidden = this.tip.hidden = !at;
    if (!at) return;
    const size = this.layout(), width = size.plotWidth / this.map.columns.length, left = size.gutter + at.column * width;
    const top = at.row * size.rowHeight;
    Object.assign(this.mark.style, {left: `${left}px`, top: `${top}px`, width: `${Math.max(width, 2)}px`, height: `${size.rowHeight}px`});
    this.tip.replaceChildren(...(cell ? [
      make("b", {}, `rank ${cell.rank} on ${cell.host}`),
      make("span", {}, cell.first === cell.last ? `step ${plain(cell.first, 12)}` : `steps ${plain(cell.first, 12)} to ${plain(cell.last, 12)}`),
      make("div", {}, `${plain(cell.ratio, 2)} × the median${cell.highest > cell.ratio * 1.05 ? `, at most ${plain(cell.highest, 2)} ×` : ""}`),
      ...(cell.ratio > 1.1 || cell.highest > 1.5 ? [make("div", {}, `above the median mostly in: ${cell.phase}`)] : [])]
      : [make("b", {}, this.map.rows[at.row][2]), "no rank in this start"]));
    const isRight = left > size.width / 2;
    Object.assign(this.tip.style, {left: isRight ? "" : `${left + width + 8}px`, right: isRight ? `${size.width - left + 8}px` : "",
                                   top: `${top + size.rowHeight + 6}px`});
  }

  onKey(event) {
    const {columns, rows} = this.map, {row, column} = this.at ?? {row: 0, column: columns.length - 1};
    const moves = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}, move = this.at ? moves[event.key] : moves[event.key] && [0, 0];
    if (event.key === "Enter") this.zoomTo(this.at);
    else if (event.key === "Escape") this.show(null);
    else if (move) this.show({row: clamp(row + move[0], rows.length), column: clamp(column + move[1], columns.length)});
    else return;
    event.preventDefault();
  }

  /** Show the steps of a cell in the curves. */
  zoomTo(at) {
    const cell = at && this.cell(at);
    if (cell) this.report.showSteps(cell.first, cell.last);
  }
}

const clamp = (index, count) => Math.min(Math.max(index, 0), count - 1);
const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

/** The text, cut so that it fits. The end remains: it tells hosts apart. */
function fitted(ctx, text, width) {
  if (ctx.measureText(text).width <= width) return text;
  let cut = text;
  while (cut.length > 1 && ctx.measureText(`…${cut}`).width > width) cut = cut.slice(1);
  return `…${cut}`;
}

/** The colour of each code, for 0 to 255. */
function heatColors({low, high}) {
  const stops = HEAT_STOPS.map(([ratio, name]) => [Math.log(ratio), rgbOf(cssValue(name))]);
  return [...Array(256).keys()].map((code) => {
    const at = Math.log(low) + Math.log(high / low) * Math.max(code - 1, 0) / 254;
    const next = stops.findIndex(([stop]) => stop >= at);
    if (next <= 0) return `rgb(${(next === 0 ? stops[0] : stops.at(-1))[1].join(",")})`;
    const [[begin, from], [end, to]] = stops.slice(next - 1, next + 1), part = (at - begin) / (end - begin);
    return `rgb(${from.map((value, index) => Math.round(value + (to[index] - value) * part)).join(",")})`;
  });
}

const rgbOf = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function heatLegend() {
  const colors = heatColors({low: 0.5, high: 8}), codeOf = (ratio) => Math.round(1 + 254 * Math.log(ratio / 0.5) / Math.log(16));
  return make("span", {class: "heat-legend"}, ...HEAT_LEGEND.map((ratio) => {
    const box = make("i", {});
    box.style.background = colors[codeOf(ratio)];
    return make("span", {}, box, `${ratio} ×`);
  }));
}
