// Updates of a page that tools/report.py --watch serves: it asks the server for the rows after those that it has.

const POLL_MS = 2000;

async function watch(report) {
  const live = document.getElementById("live");
  live.hidden = false;
  live.textContent = "live";
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    try {
      const known = report.data.runs.map((run) => [run.generation, run.base, run.lines, run.event_lines].join(".")).join(",");
      const answer = await fetch(`update?known=${known}`, {cache: "no-store"});
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      applyUpdate(report, parseData(await answer.text()));
      live.className = "";
      live.textContent = `live, updated ${new Date().toLocaleTimeString("en-GB")}`;
    } catch (error) {
      live.className = "lost";
      live.textContent = `no answer from tools/report.py (${error.message}); trying again`;
    }
  }
}

/** Apply one update: for each run its new rows and events, all of its data, or nothing. */
function applyUpdate(report, update) {
  const {data, view} = report;
  let changed = false, rebuilt = false;
  update.runs.forEach((change, index) => {
    const run = data.runs[index];
    if (change.all) {
      Object.assign(run, change.all);
      rebuilt = true;
    } else if (change.new) {
      const {training, evaluations, events, ...values} = change.new;
      appendCurves(run.training, training);
      for (const [split, curves] of Object.entries(evaluations)) {
        run.evaluations[split] ??= parseData('{"values":{},"low":{},"high":{}}');
        appendCurves(run.evaluations[split], curves);
      }
      run.events.push(...events);
      rebuilt ||= events.length > 0;
      Object.assign(run, values);
    }
    changed ||= Boolean(change.all || change.new);
  });
  if (update.differences) data.differences = update.differences;
  data.time = update.time;
  if (!changed) return;
  if (rebuilt) {
    report.build();
  } else {
    report.showProgress();
    report.buildCharts();
    report.schedule();
  }
  if (view.zoom === null) view.cursor = null;
}

/** Append points to curves. All keys keep the same length: a key without values gets null. */
function appendCurves(curves, added) {
  const length = (values) => Math.max(0, ...Object.values(values).map((column) => column.length));
  const before = length(curves.values), count = length(added.values);
  for (const key of new Set([...Object.keys(curves.values), ...Object.keys(added.values)])) {
    const column = curves.values[key] ??= new Array(before).fill(null);
    column.push(...(added.values[key] || new Array(count).fill(null)));
  }
}
