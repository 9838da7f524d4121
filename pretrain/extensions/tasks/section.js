// How the model continues validation samples, in the page of a run.

SECTIONS.tasks = {
  label: "Predictions",
  before: () => "differences",
  elements: (shown) => [make("h2", {}, "Predictions"),
    make("p", {class: "quiet"}, "How the model continues validation samples, always with the most likely token, at each evaluation."),
    ...shown.flatMap(([, name, samples], index) => samples.map((sample, number) => predictionElement(
      `${name}sample ${number + 1}`, sample, index === 0 && number === 0)))],
};

/** The prompt and the actual text of a validation sample, and what the model predicted, the newest evaluation first. */
function predictionElement(title, {prompt, actual, predicted}, isOpen) {
  const rows = [["prompt", prompt], ["actual", actual], ...predicted.map(([step, text]) => [`step ${plain(step)}`, text])];
  return make("details", {open: isOpen}, make("summary", {}, title), makeTable([["evaluation"], ["text"]], rows, "texts settings"));
}
