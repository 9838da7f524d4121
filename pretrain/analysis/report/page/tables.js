// The parts of the page below and above the curves: overview, differences, events and configuration.

const OVERVIEW = [  // [label, text of the value, small text below it]
  ["Steps", (o) => plain(o.step), (o) => (isNumber(o.train_steps) ? `of ${plain(o.train_steps)}` : "")],
  ["Training loss", (o) => plain(o.loss), (o) => (o.not_finite ? `${plain(o.not_finite)} rows not finite` : "")],
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

/** Tiles for one run, a table for several. Values that no run has are left out. */
function overviewElement(runs) {
  const used = OVERVIEW.filter(([, value]) => runs.some((run) => value(run.overview) !== "–"));
  if (runs.length === 1) {
    return make("dl", {class: "tiles"}, ...used.map(([label, value, note]) => make("div", {class: "tile"},
      make("dt", {}, label), make("dd", {}, value(runs[0].overview), make("small", {}, note(runs[0].overview))))));
  }
  const rows = runs.map((run) => [run.name, ...used.map(([, value]) => value(run.overview))]);
  return make("div", {class: "scroll"}, makeTable([["run"], ...used.map(([label]) => [label, label !== "Status"])], rows));
}

function settingName(section, key) {
  return key ? `${section}: ${key}` : section;
}

function differencesElements(runs, differences) {
  const rows = differences.map(([section, key, ...values]) => [settingName(section, key), ...values.map((value) => value ?? "(not set)")]);
  return [make("h2", {}, "Differences between the runs"),
          rows.length ? make("div", {class: "scroll"}, makeTable([["setting"], ...runs.map((run) => [run.name])], rows, "settings"))
                      : make("p", {class: "quiet"}, "The records of the newest starts are the same.")];
}

function eventsElements(runs, shown) {
  const rows = shown.map(([run, [elapsed, step, kind, text]]) => [plain(step), duration(elapsed), kind, text,
                                                                 ...(runs.length > 1 ? [run.name] : [])]);
  const columns = [["step", true], ["time since the start", true], ["event"], ["text"], ["run"]].slice(0, runs.length > 1 ? 5 : 4);
  return [make("h2", {}, "Events"), make("div", {class: "scroll", tabindex: 0}, makeTable(columns, rows))];
}

/** The record of the newest start by section, and what changed at each start. */
function configurationElements(runs) {
  return [make("h2", {}, "Configuration"), ...runs.map((run) => make("details", {open: runs.length === 1},
    make("summary", {}, runs.length === 1 ? `run.json of ${run.path}: the newest start` : run.name),
    ...settingsElements(run), startsElement(run)))];
}

function settingsElements(run) {
  const sections = new Map();
  for (const [section, key, value] of run.settings) {
    if (!sections.has(section)) sections.set(section, []);
    sections.get(section).push([key || section, value]);
  }
  const single = [...sections].filter(([, rows]) => rows.length === 1 && rows[0][0]);
  const large = [...sections].filter((entry) => !single.includes(entry));
  const table = (rows) => make("div", {class: "scroll"}, makeTable([["setting"], ["value"]], rows, "settings"));
  return [
    ...large.map(([section, rows]) => make("details", {}, make("summary", {}, `${section} (${rows.length})`), table(rows))),
    single.length ? make("details", {}, make("summary", {}, `other values (${single.length})`),
      table(single.map(([section, [[key, value]]]) => [key === section ? section : settingName(section, key), value]))) : null,
  ].filter(Boolean);
}

function startsElement(run) {
  const rows = run.starts.map((start, index) => [String(index + 1), dateTime(start.time),
    start.changes.map(([section, key, before, after]) => `${settingName(section, key)}: ${before ?? "(not set)"} → ${after ?? "(not set)"}`)
      .join("\n") || (index === 0 ? "" : "no change")]);
  return make("details", {}, make("summary", {}, `starts (${run.overview.starts})`),
    make("div", {class: "scroll"}, makeTable([["start"], ["time"], ["changes since the start before"]], rows, "settings")));
}
