// Results of `ds-pretrain replay`, and the flight records that were kept for it, in the page of a run.

SECTIONS.replay = {
  label: "Replays",
  before: () => "notices",
  elements: replaysElements,
  results: ({replays}, {begin, end}) => replays.filter(({step}) => isNumber(step) && step >= begin[1] && step <= end[1]).map((replay) => ({
    step: replay.step,
    elements: [make("div", {class: "answer"}, `Replay: ${replay.what} (${replay.certainty})${placesText(replay)}`), ...samplesElements(replay, 4),
      replay.remedy && !replay.command ? make("div", {class: "advice"}, "→ ", replay.remedy) : null]})),
};

function replaysElements(shown) {
  const replays = shown.flatMap(([, name, data]) => data.replays.map((replay) => [name, replay])), kept = shown.flatMap(([run, , data]) => data.kept_records.map((record) => [run, record]));
  const cards = replays.map(([name, replay]) => make("article", {class: "panel"},
    make("h3", {}, `${name}${isNumber(replay.step) ? `step ${plain(replay.step)}: ` : ""}${replay.what}`),
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

const placesText = ({places}) => places.map(([label, value]) => `; ${label} ${value}`).join("");

/** What the replay says about the samples of the step, and the command that leaves them out. */
const samplesElements = ({samples, command}, most) => [samples.length ? make("div", {class: "note"}, samples.slice(0, most).join("\n")) : null,
  command ? make("details", {class: "advice"}, make("summary", {}, "train a branch without these samples"), make("code", {}, command)) : null];
