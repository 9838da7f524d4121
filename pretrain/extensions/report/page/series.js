// The panels of the page, the kinds of events, and the series of points that each one draws.

const COLORS = 8;
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];

// [colour, shape, whether a line crosses the plot, kinds of events]
const EVENT_STYLES = [
  ["--bad", "▼", true, ["skip", "spike", "rollback", "corruption", "hang", "crash", "silent", "guard",
                         "not_finite", "not_started", "rejected", "save_failed", "data_changed", "data_replaced"]],
  ["--end", "▼", false, ["store_wait", "after_save_failed"]],
  ["--accent", "●", true, ["resume", "finished"]],
  ["--accent", "●", false, ["start", "init"]],
  ["--change", "◆", true, ["override", "branch", "batch", "other_data"]],
  ["--end", "■", true, ["stop", "early_stop", "signal"]],
  ["--neutral", "|", false, ["save"]],
];
const extensionEvents = {};  // kind -> index of EVENT_STYLES: `extension_events` of the data
const eventStyle = (kind) => EVENT_STYLES[extensionEvents[kind]] || EVENT_STYLES.find((style) => style[3].includes(kind))
  || ["--neutral", "●", false];

// metrics: [key of metrics.jsonl, label], by default only the panel's id; smooth: noisy values
const PANELS = [
  {id: "loss", title: "Training loss", unit: "nats per token", wide: true, smooth: true},
  {id: "evaluation", title: "Evaluation loss", unit: "nats per token", evaluation: true, metrics: []},
  {id: "tasks", title: "Scores of tasks", tasks: true, metrics: []},
  {id: "loss_max", title: "Highest loss of a rank", unit: "since the row before", smooth: true},
  {id: "lr", title: "Learning rate"},
  {id: "grad_norm", title: "Gradient norm", smooth: true,
   metrics: [["grad_norm", "logged step"], ["grad_norm_max", "highest since the row before"], ["clip_norm", "limit"]]},
  {id: "clip_rate", title: "Clipped steps", unit: "fraction", format: percent},
  {id: "param_norm", title: "Parameter norm"},
  {id: "update_ratio", title: "Update / parameter norm", smooth: true},
  {id: "noise_scale", title: "Gradient noise scale", unit: "samples", smooth: true, format: compact},
  {id: "tokens_per_second", title: "Throughput", unit: "tokens/s", smooth: true, format: compact},
  {id: "tflops", title: "TFLOP/s per device", smooth: true,
   metrics: [["tflops_per_device", "6N + 12Lhs"], ["tflops_exact_per_device", "exact matrix products"]]},
  {id: "mfu", title: "Model FLOPs utilization", smooth: true, format: percent,
   metrics: [["mfu", "6N + 12Lhs"], ["mfu_exact", "exact matrix products"]]},
  {id: "step_time", title: "Time of a step, and of its phases", smooth: true, format: milliseconds,
   metrics: [["step_time_ms", "step"], ["data_time_ms", "waiting for data"], ["forward_time_ms", "forward"], ["backward_time_ms", "backward"],
             ["reduce_time_ms", "reduce"], ["optimizer_time_ms", "optimizer"]]},
  {id: "pauses", title: "Saves and evaluations", unit: "since the row before", format: milliseconds,
   metrics: [["save_time_ms", "save"], ["eval_time_ms", "evaluation"]]},
  {id: "memory", title: "Memory", format: gibibytes, tickUnit: 2 ** 30,
   metrics: [["memory_bytes", "now"], ["peak_memory_bytes", "peak"], ["host_memory_bytes", "host"]]},
  {id: "goodput", title: "Goodput", unit: "time in kept steps", format: percent},
  {id: "pipeline_bubble", title: "Pipeline bubble", unit: "fraction of the step", format: percent},
  {id: "power_watts", title: "Power per device", smooth: true, format: watts},
  {id: "loss_scale", title: "Loss scale"},
  {id: "skipped_steps", title: "Skipped steps", unit: "in total"},
  {id: "global_batch_size", title: "Global batch", unit: "samples"},
  {id: "seq_length", title: "Sequence length", unit: "tokens"},
];
const POSITIONS = ["step", "elapsed", "time", "line", "consumed_tokens", "consumed_samples", "eta_seconds"];  // no curves of their own
const TASKS = "tasks/";  // splits of evaluations that are scores of tasks
const AXES = {step: "step", tokens: "consumed_tokens", time: "elapsed"};

/** The panels that have values, and [title, value] of the metrics that are the same in all rows of all runs. */
function usedPanels(runs) {
  const complete = (panel) => ({format: plain, metrics: [[panel.id, panel.title.toLowerCase()]], ...panel}), panels = PANELS.map(complete);
  const known = new Set([...POSITIONS, ...panels.flatMap((panel) => panel.metrics.map(([key]) => key))]);
  const others = new Set(runs.flatMap((run) => Object.keys(run.training.values)).filter((key) => !known.has(key)));
  const used = [], constants = [];
  for (const panel of [...panels, ...[...others].map((key) => complete({id: key, title: key}))]) {
    const values = constantValues(panel, runs), isEvaluated = (panel.evaluation || panel.tasks)
      && runs.some((run) => metricsOf(panel, run, runs).length > 0);
    if (isEvaluated || values.size > 1) used.push(panel);
    else if (values.size === 1) constants.push([panel.title, panel.format([...values][0])]);
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
 * point represents), faint (unsmoothed or abandoned values, which have no read-out), points.
 */
function panelSeries(panel, runs, view) {
  const shown = runs.filter((run) => view.runs.has(run.name));
  const series = [], single = runs.length === 1;
  for (const run of shown) {
    const metrics = metricsOf(panel, run, runs);
    for (const [metric, {label, curve, old}] of metrics) {
      const color = cssValue(`--c${(single ? metric : runs.indexOf(run)) % COLORS}`);
      const style = {color, dash: single ? DASHES[0] : DASHES[(metric + Math.floor(runs.indexOf(run) / COLORS)) % DASHES.length]};
      const name = single ? label : metrics.length > 1 || panel.evaluation || panel.tasks ? `${run.name}: ${label}` : run.name;
      series.push(...curveSeries({...style, label: name, metric: label}, curve, old, panel, view));
    }
    if (metrics.length && (panel.id === "loss" || panel.evaluation)) series.push(...expectedSeries(run, runs, view));
  }
  return series;
}

/** The expected loss of a run (--expected_curve) with its interval, which is a band. */
function expectedSeries(run, runs, view) {
  const curve = run.expected && pick(run.expected, "loss"), index = runs.indexOf(run), label = "expected, with its interval";
  if (!curve) return [];
  return [{label: runs.length > 1 ? `${run.name}: ${label}` : label, metric: label, dash: [2, 4],
           color: runs.length > 1 ? cssValue(`--c${index % COLORS}`) : cssValue("--quiet"),
           x: positions(curve.values, view), y: curve.y, low: curve.low, high: curve.high}];
}

/** [number, {label, curve, old}] of the metrics of a panel that a run has. */
function metricsOf(panel, run, runs) {
  const splits = [...new Set(runs.flatMap((other) => Object.keys(other.evaluations)))];
  const ofSplits = (keysOf) => splits.flatMap((split) => keysOf(split).map(([label, key]) =>
    [label, key, run.evaluations[split], run.abandoned_evaluations[split]]));
  const sources = panel.evaluation ? ofSplits((split) => [[split, "eval_loss"]])
    : panel.tasks ? ofSplits((split) => taskMetrics(split, runs).map((key) => [`${split.slice(TASKS.length)} ${key}`, key]))
    : panel.metrics.map(([key, label]) => [label, key, run.training, run.abandoned]);
  return sources.map(([label, key, kept, old], index) => [index, {label, curve: pick(kept, key), old: pick(old, key)}])
    .filter(([, metric]) => metric.curve);
}

/** The metrics of a task, without standard errors; none for another split. */
function taskMetrics(split, runs) {
  const keys = runs.flatMap((run) => Object.keys(run.evaluations[split]?.values || {}));
  return split.startsWith(TASKS) ? [...new Set(keys)].filter((key) => ![...POSITIONS, "questions"].includes(key) && !key.endsWith("_stderr")) : [];
}

/** One key of curves: {values, y, low, high}, or null if it has no value. */
function pick(curves, key) {
  const y = curves && curves.values[key];
  return y ? {values: curves.values, y, low: curves.low[key], high: curves.high[key]} : null;
}

function curveSeries(style, curve, old, panel, view) {
  const x = positions(curve.values, view), series = [];
  if (old && view.abandoned) {
    series.push({...style, x: positions(old.values, view), y: old.y, faint: true, abandoned: true,
                 points: panel.evaluation || panel.tasks, dash: [1, 3]});
  }
  const isSmoothed = panel.smooth && view.smoothing > 0;
  const main = {...style, x, y: curve.y, low: curve.low, high: curve.high, points: panel.evaluation || panel.tasks};
  if (!isSmoothed) return [...series, main];
  if (view.raw) series.push({...main, faint: true});
  return [...series, {...main, y: smooth(curve.y, view.smoothing), raw: curve.y}];
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

/** Index of the point whose x is nearest to `x`; `xs` may contain null. -1 if there is none. */
function nearest(xs, x) {
  let best = -1;
  xs.forEach((at, index) => {
    if (isNumber(at) && (best < 0 || Math.abs(at - x) < Math.abs(xs[best] - x))) best = index;
  });
  return best;
}
