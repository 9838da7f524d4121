// What went wrong, the newest first, and what examinations of its steps say about it.

const MOST_SHOWN = 12;  // further ones are in a part that opens

/** The list of a page: what is wrong now, then what went wrong before; nothing to read for a healthy run. */
function incidentsElements(runs, report) {
  const all = runs.flatMap((run) => run.incidents.map((one) => [run, one])), newestFirst = ([, a], [, b]) => (b.times[1] ?? 0) - (a.times[1] ?? 0);
  const open = all.filter(([, one]) => one.open).sort(newestFirst), past = all.filter(([, one]) => !one.open).sort(newestFirst);
  const list = (items) => make("ul", {class: "incidents"}, ...items.map(([run, one]) => incidentElement(run, one, runs.length > 1, report)));
  if (all.length === 0) return [make("p", {class: "fine"}, runs.length > 1 ? "No run has reported that anything went wrong." : "Nothing went wrong, as far as the run has reported.")];
  return [
    ...(open.length ? [make("h2", {class: "alarm"}, `Wrong now (${plain(open.length)})`), list(open)]
      : [make("p", {class: "fine"}, "Nothing is wrong now, as far as the run has reported.")]),
    ...(past.length ? [make("h2", {}, open.length ? "Earlier" : "What went wrong"), list(past.slice(0, MOST_SHOWN))] : []),
    ...(past.length > MOST_SHOWN ? [make("details", {}, make("summary", {}, `${plain(past.length - MOST_SHOWN)} more`), list(past.slice(MOST_SHOWN)))] : [])];
}

function incidentElement(run, one, isNamed, report) {
  const [from, to] = one.times, now = report.data.time, words = [one.machine, one.steps];
  if (isNumber(from)) words.push(`${one.open && !one.steps ? "since " : ""}${dateTime(from)}${isNumber(to) && to - from >= 60 ? ` to ${clockTime(from, to)}` : ""}`, `${duration(now - to)} ago`);
  const results = Object.entries(SECTIONS).flatMap(([name, section]) => (run.sections[name] ? section.results?.(run.sections[name], one) ?? [] : []));
  const button = isNumber(one.begin[1]) ? make("button", {type: "button", onclick: () => report.showPlace(one.begin, one.end)}, "show") : null;
  return make("li", {class: one.open ? "incident open" : "incident"},
    make("div", {class: "what"}, make("span", {class: "kind"}, shapePicture(one.kind), ` ${one.kind.replaceAll("_", " ")}`),
      make("b", {}, `${isNamed ? `${run.name}: ` : ""}${one.text}`), button),
    make("div", {class: "quiet"}, words.filter((word) => word).join(" · ")),
    one.detail && one.open ? make("div", {class: "quiet"}, one.detail) : null,
    ...results.flatMap(({elements}) => elements),
    one.advice && !results.some(({step}) => step === one.end[1]) ? make("div", {class: "advice"}, "→ ", ...withCode(one.advice)) : null);
}

/** The later time without the day, if it is the same day. */
function clockTime(from, to) {
  const [first, last] = [dateTime(from), dateTime(to)], day = first.split(",")[0];
  return last.startsWith(day) ? last.slice(day.length + 1).trim() : last;
}

/** Text with its parts between backquotes as code. */
const withCode = (text) => text.split("`").map((part, index) => (index % 2 ? make("code", {}, part) : part));
