// What went wrong, the newest first, and what replays and kept flight records say about it.

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
  const answers = run.replays.filter((replay) => isNumber(replay.step) && replay.step >= one.begin[1] && replay.step <= one.end[1]);
  const button = isNumber(one.begin[1]) ? make("button", {type: "button", onclick: () => report.showPlace(one.begin, one.end)}, "show") : null;
  return make("li", {class: one.open ? "incident open" : "incident"},
    make("div", {class: "what"}, make("span", {class: "kind"}, shapePicture(one.kind), ` ${one.kind.replaceAll("_", " ")}`),
      make("b", {}, `${isNamed ? `${run.name}: ` : ""}${one.text}`), button),
    make("div", {class: "quiet"}, words.filter((word) => word).join(" · ")),
    one.detail && one.open ? make("div", {class: "quiet"}, one.detail) : null,
    ...answers.flatMap((replay) => [make("div", {class: "answer"}, `Replay: ${replay.what} (${replay.certainty})${placesText(replay)}`), ...samplesElements(replay, 4),
      replay.remedy && !replay.command ? make("div", {class: "advice"}, "→ ", replay.remedy) : null]),
    one.advice && !answers.some((replay) => replay.step === one.end[1]) ? make("div", {class: "advice"}, "→ ", ...withCode(one.advice)) : null);
}

const placesText = ({places}) => places.map(([label, value]) => `; ${label} ${value}`).join("");

/** What the replay says about the samples of the step, and the command that leaves them out. */
const samplesElements = ({samples, command}, most) => [samples.length ? make("div", {class: "note"}, samples.slice(0, most).join("\n")) : null,
  command ? make("details", {class: "advice"}, make("summary", {}, "train a branch without these samples"), make("code", {}, command)) : null];

/** The later time without the day, if it is the same day. */
function clockTime(from, to) {
  const [first, last] = [dateTime(from), dateTime(to)], day = first.split(",")[0];
  return last.startsWith(day) ? last.slice(day.length + 1).trim() : last;
}

/** Text with its parts between backquotes as code. */
const withCode = (text) => text.split("`").map((part, index) => (index % 2 ? make("code", {}, part) : part));

/** Results of `ds-pretrain replay`, and the flight records that were kept for it. */
function replaysElements(runs) {
  const replays = runs.flatMap((run) => run.replays.map((replay) => [run, replay])), kept = runs.flatMap((run) => run.kept_records.map((record) => [run, record]));
  const cards = replays.map(([run, replay]) => make("article", {class: "panel"},
    make("h3", {}, `${runs.length > 1 ? `${run.name}: ` : ""}${isNumber(replay.step) ? `step ${plain(replay.step)}: ` : ""}${replay.what}`),
    make("p", {class: replay.certainty === "sure" ? "sure" : "unsure"}, `${replay.certainty}${replay.reason ? `: ${replay.reason}` : ""}`),
    make("p", {}, replay.places.map(([label, value]) => `${label} ${value}`).join(" · ")),
    replay.evidence.length ? make("ul", {}, ...replay.evidence.map((line) => make("li", {}, line))) : null,
    ...samplesElements(replay),
    replay.remedy ? make("p", {class: "advice"}, "→ ", replay.remedy) : null, make("p", {class: "quiet"}, `replays/${replay.folder}`)));
  const rows = kept.map(([run, {step, reason, files, folder}]) => [plain(step), reason, plain(files), folder, `ds-pretrain replay ${run.path}@${step}`]);
  return [
    ...(cards.length ? [make("h2", {}, "Replays"), make("div", {class: "cards"}, ...cards)] : []),
    ...(rows.length ? [make("h2", {}, "Kept flight records"), makeTable([["step", true], ["reason"], ["files", true], ["folder"], ["question it"]], rows)] : [])];
}
