// The panels of the page, the kinds of events, and the series of points that each one draws.

const COLORS = 8;
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
const number = plain;

// kind: [colour, shape, whether a line crosses the plot]
const EVENT_KINDS = new Map(Object.entries({
  skip: ["--bad", "triangle", true], spike: ["--bad", "triangle", true], rollback: ["--bad", "triangle", true],
  corruption: ["--bad", "triangle", true], hang: ["--bad", "triangle", true], data_changed: ["--bad", "triangle", true],
  data_replaced: ["--bad", "triangle", true], resume: ["--accent", "circle", true], start: ["--accent", "circle", false],
  init: ["--accent", "circle", false], override: ["--change", "diamond", true], branch: ["--change", "diamond", true],
  batch: ["--change", "diamond", true], other_data: ["--change", "diamond", true], stop: ["--end", "square", true],
  finished: ["--accent", "square", true],
  early_stop: ["--end", "square", true], signal: ["--end", "square", true], save: ["--neutral", "tick", false],
}));
const OTHER_KIND = ["--neutral", "circle", false];
const EVENT_SHAPES = {triangle: "▼", diamond: "◆", square: "■", circle: "●", tick: "|"};

// metrics: [key of metrics.jsonl, label]; smooth: noisy values; stacked: areas on top of each other, one panel per run
const PANELS = [
  {id: "loss", title: "Training loss", unit: "nats per token", wide: true, smooth: true, format: number,
   metrics: [["loss", "loss"]]},
  {id: "evaluation", title: "Evaluation loss", unit: "nats per token", evaluation: true, format: number, metrics: []},
  {id: "loss_max", title: "Highest loss of a rank", unit: "since the row before", smooth: true, format: number,
   metrics: [["loss_max", "highest loss"]]},
  {id: "lr", title: "Learning rate", format: number, metrics: [["lr", "learning rate"]]},
  {id: "grad_norm", title: "Gradient norm", smooth: true, format: number,
   metrics: [["grad_norm", "logged step"], ["grad_norm_max", "highest since the row before"], ["clip_norm", "limit"]]},
  {id: "clip_rate", title: "Clipped steps", unit: "fraction", format: percent, metrics: [["clip_rate", "clipped"]]},
  {id: "param_norm", title: "Parameter norm", format: number, metrics: [["param_norm", "norm"]]},
  {id: "update_ratio", title: "Update / parameter norm", smooth: true, format: number,
   metrics: [["update_ratio", "ratio"]]},
  {id: "noise_scale", title: "Gradient noise scale", unit: "samples", smooth: true, format: compact,
   metrics: [["noise_scale", "noise scale"]]},
  {id: "tokens_per_second", title: "Throughput", unit: "tokens/s", smooth: true, format: compact,
   metrics: [["tokens_per_second", "tokens/s"]]},
  {id: "tflops", title: "TFLOP/s per device", smooth: true, format: number,
   metrics: [["tflops_per_device", "6N + 12Lhs"], ["tflops_exact_per_device", "exact matrix products"]]},
  {id: "mfu", title: "Model FLOPs utilization", smooth: true, format: percent,
   metrics: [["mfu", "6N + 12Lhs"], ["mfu_exact", "exact matrix products"]]},
  {id: "phases", title: "Time of a step by phase", stacked: true, smooth: true, format: milliseconds,
   total: "step_time_ms",
   metrics: [["data_time_ms", "data"], ["forward_time_ms", "forward"], ["backward_time_ms", "backward"],
             ["reduce_time_ms", "reduce"], ["optimizer_time_ms", "optimizer"]]},
  {id: "step_time", title: "Step time", smooth: true, format: milliseconds,
   metrics: [["step_time_ms", "step"], ["data_time_ms", "waiting for data"]]},
  {id: "pauses", title: "Saves and evaluations", unit: "since the row before", format: milliseconds,
   metrics: [["save_time_ms", "save"], ["eval_time_ms", "evaluation"]]},
  {id: "memory", title: "Memory", format: gibibytes, tickUnit: 2 ** 30,
   metrics: [["memory_bytes", "now"], ["peak_memory_bytes", "peak"], ["host_memory_bytes", "host"]]},
  {id: "goodput", title: "Goodput", unit: "time in kept steps", format: percent, metrics: [["goodput", "goodput"]]},
  {id: "bubble", title: "Pipeline bubble", unit: "fraction of the step", format: percent,
   metrics: [["pipeline_bubble", "bubble"]]},
  {id: "power", title: "Power per device", smooth: true, format: watts, metrics: [["power_watts", "power"]]},
  {id: "loss_scale", title: "Loss scale", format: number, metrics: [["loss_scale", "loss scale"]]},
  {id: "skipped_steps", title: "Skipped steps", unit: "in total", format: number,
   metrics: [["skipped_steps", "skipped"]]},
  {id: "batch", title: "Global batch", unit: "samples", format: number, metrics: [["global_batch_size", "batch"]]},
  {id: "seq_length", title: "Sequence length", unit: "tokens", format: number, metrics: [["seq_length", "length"]]},
];
const POSITIONS = new Set(["step", "elapsed", "time", "line", "consumed_tokens", "consumed_samples"]);
const AXES = {step: "step", tokens: "consumed_tokens", time: "elapsed"};

/** The panels that have values, and [title, value] of the metrics that are the same in all rows of all runs. */
function usedPanels(runs) {
  const known = new Set(PANELS.flatMap((panel) => [...panel.metrics.map(([key]) => key), panel.total]));
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.training.values)))];
  const others = keys.filter((key) => !known.has(key) && !POSITIONS.has(key) && key !== "eta_seconds")
    .map((key) => ({id: `other ${key}`, title: key, format: number, metrics: [[key, key]]}));
  const used = [], constants = [];
  for (const panel of [...PANELS, ...others]) {
    if (panel.evaluation) {
      if (runs.some((run) => Object.keys(run.evaluations).length > 0)) used.push(panel);
    } else if (panel.stacked) {
      const shown = runs.filter((run) => panel.metrics.some(([key]) => run.training.values[key]));
      used.push(...shown.map((run) => ({...panel, id: `${panel.id} ${runs.indexOf(run)}`, run,
                                        unit: runs.length > 1 ? run.name : ""})));
    } else {
      const values = constantValues(panel, runs);
      if (values.size === 1) constants.push([panel.title, panel.format([...values][0])]);
      else if (values.size > 1) used.push(panel);
    }
  }
  return [used, constants];
}

/** The different values of a panel; at most two of them are of interest. Loss curves are always shown. */
function constantValues(panel, runs) {
  const values = new Set();
  for (const run of runs) {
    for (const [key] of panel.metrics) {
      for (const value of run.training.values[key] || []) {
        if (isNumber(value)) values.add(value);
        if (values.size > 1) return values;
      }
    }
  }
  return panel.id === "loss" && values.size ? new Set([0, 1]) : values;
}

/** Positions of points or events on the x axis. */
function positions(values, view) {
  const xs = values[AXES[view.axis]] || (values.step || []).map(() => null);
  return view.axis === "time" ? xs.map((x) => (isNumber(x) ? x / view.timeUnit[1] : null)) : xs;
}

/** Unit of the time axis: [name, seconds]. */
function timeUnit(runs) {
  const longest = Math.max(0, ...runs.map((run) => (run.training.values.elapsed || []).at(-1) || 0));
  if (longest < 120) return ["seconds", 1];
  if (longest < 7200) return ["minutes", 60];
  return longest < 172800 ? ["hours", 3600] : ["days", 86400];
}

/**
 * The series of a panel. Each has label, color, dash, x and y; optionally low and high (the range of the values that a
 * point represents), faint (unsmoothed or abandoned values, which have no read-out), points, base (lower edge of an area).
 */
function panelSeries(panel, runs, view) {
  if (panel.stacked) return stackedSeries(panel, view);
  const shown = runs.filter((run) => view.runs.has(run.name));
  const series = [], single = runs.length === 1;
  for (const run of shown) {
    const metrics = panel.evaluation ? evaluationMetrics(panel, run, runs) : trainingMetrics(panel, run);
    for (const [metric, {label, curve, old}] of metrics) {
      const color = cssValue(`--c${(single ? metric : runs.indexOf(run)) % COLORS}`);
      const style = {color, dash: single ? DASHES[0] : DASHES[(metric + Math.floor(runs.indexOf(run) / COLORS)) % DASHES.length]};
      const name = single ? label : metrics.length > 1 || panel.evaluation ? `${run.name}: ${label}` : run.name;
      series.push(...curveSeries({...style, label: name, metric: label}, run, curve, old, panel, view));
    }
  }
  return series;
}

function trainingMetrics(panel, run) {
  return panel.metrics.map(([key, label], index) => [index, {
    label, curve: pick(run.training, key), old: pick(run.abandoned, key)}]).filter(([, metric]) => metric.curve);
}

function evaluationMetrics(panel, run, runs) {
  const splits = [...new Set(runs.flatMap((other) => Object.keys(other.evaluations)))];
  return splits.map((split, index) => [index, {
    label: split, curve: pick(run.evaluations[split], "eval_loss"),
    old: pick(run.abandoned_evaluations[split], "eval_loss")}]).filter(([, metric]) => metric.curve);
}

/** One key of curves: {values, y, low, high}, or null if it has no value. */
function pick(curves, key) {
  const y = curves && curves.values[key];
  return y ? {values: curves.values, y, low: curves.low[key], high: curves.high[key]} : null;
}

function curveSeries(style, run, curve, old, panel, view) {
  const x = positions(curve.values, view), series = [];
  if (old && view.abandoned) {
    series.push({...style, x: positions(old.values, view), y: old.y, faint: true, abandoned: true,
                 points: panel.evaluation, dash: [1, 3]});
  }
  const isSmoothed = panel.smooth && view.smoothing > 0;
  const main = {...style, x, y: curve.y, low: curve.low, high: curve.high, points: panel.evaluation};
  if (!isSmoothed) return [...series, main];
  if (view.raw) series.push({...main, faint: true});
  return [...series, {...main, y: smooth(curve.y, view.smoothing), raw: curve.y}];
}

/** The phases of a step on top of each other; the rest of the step time is the uppermost area. */
function stackedSeries(panel, view) {
  const values = panel.run.training.values, x = positions(values, view), weight = view.smoothing;
  if (!view.runs.has(panel.run.name)) return [];
  const phases = panel.metrics.filter(([key]) => values[key]).map(([key, label]) => [label, values[key]]);
  const total = values[panel.total];
  if (total) {
    const rest = total.map((time, index) => (isNumber(time)
      ? Math.max(0, time - phases.reduce((sum, [, ys]) => sum + (ys[index] || 0), 0)) : null));
    phases.push(["other", rest]);
  }
  let base = x.map(() => 0);
  return phases.map(([label, ys], index) => {
    const smoothed = weight > 0 ? smooth(ys, weight) : ys;
    const top = base.map((below, point) => below + (smoothed[point] || 0));
    const color = label === "other" ? cssValue("--neutral") : cssValue(`--c${index % COLORS}`);
    const series = {label, metric: label, color, dash: [], x, y: top, base, raw: ys, area: true};
    base = top;
    return series;
  });
}

/** Exponential moving average without the bias of its start; missing values are left out. */
function smooth(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

/** Index of the point whose x is nearest to `x`; `xs` increases, and may contain null. -1 if there is none. */
function nearest(xs, x) {
  let low = 0, high = xs.length - 1, best = -1;
  while (low <= high) {
    const probe = (low + high) >> 1;
    let middle = probe;
    while (middle <= high && !isNumber(xs[middle])) middle++;
    if (middle <= high && (best < 0 || Math.abs(xs[middle] - x) < Math.abs(xs[best] - x))) best = middle;
    if (middle <= high && xs[middle] < x) low = middle + 1;
    else high = probe - 1;
  }
  return best;
}
