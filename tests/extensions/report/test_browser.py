"""Pages of `ds-pretrain report` in a real browser: curves are those of metrics.jsonl, untrusted text is inert."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain import active_extensions
from pretrain.analysis.summary import save_loss_plot
from pretrain.extension import Extension
from pretrain.monitor.curve import Expectation, Expected
from pretrain.monitor.read_run_folder import newest_path, read_metrics
from tests.extensions.report.runs import DRAWN, open_report, watching
from tests.support.browser import Browser, Page
from tests.support.run_folders import (
    FEW_KEYS,
    START,
    append_rows,
    event,
    rank_rows,
    record,
    rows_of,
    write_run,
)

STEPS = [*range(1, 61), *range(41, 101)]  # steps 41 to 60 were trained twice
EVENTS = [event("start", 0), event("save", 40, path="c/global_step40", bytes=9), event("skip", 50, "loss is NaN"),
          event("rollback", 60, "3 bad steps in a row", to_step=40), event("resume", 40), event("override", 70, "lr"),
          event("stop", 100, "finished")]
KINDS = [*(one["event"] for one in EVENTS[1:-1]), "finished"]  # shown by default


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run with a rollback, a NaN and a truncated last line."""
    rows = rows_of(STEPS)
    next(row for row in rows if row["step"] == 80 and "loss" in row)["loss"] = None
    folder = write_run(tmp_path_factory.mktemp("runs") / "with rollback", rows, EVENTS, [record(), record(hosts=["b"])])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 101, "lo')
    return folder


def drawn(page: Page, panel: str) -> list[dict[str, Any]]:
    """Return the series that a panel draws, without smoothing: label, faint, x and y."""
    return page.run(f"""(() => {{
        Object.assign(report.view, {{smoothing: 0, axis: "step"}});
        const panel = report.charts.find((chart) => chart.panel.id === {json.dumps(panel)}).panel;
        return panelSeries(panel, report.data.runs, report.view).map(
            ({{label, faint, x, y}}) => ({{label, faint: Boolean(faint), x, y}}));
    }})()""")


def test_every_curve_has_the_values_of_the_rows(browser: Browser, run: Path, tmp_path: Path) -> None:
    page = open_report(browser, tmp_path, run)
    kept = newest_path([row for row in read_metrics(run) if "loss" in row])
    assert [row["step"] for row in kept] == list(range(1, 101))
    specs = page.run("report.charts.map((chart) => [chart.panel.id, chart.panel.metrics])")
    compared = 0
    for panel, metrics in specs:
        if panel == "evaluation":
            continue
        present = [key for key, _ in metrics if any(row.get(key) is not None for row in kept)]
        series = [one for one in drawn(page, panel) if not one["faint"]]
        for key, one in zip(present, series, strict=True):
            assert one["x"] == [row["step"] for row in kept]
            assert one["y"] == [row[key] for row in kept], key
            compared += 1
    assert compared >= 24, "every metric of the rows but the constant ones"
    assert "loss scale 1" in page.run("document.getElementById('constants').textContent")
    assert page.errors() == []
    assert all(url.startswith("file:") for url in page.requests())


def test_abandoned_rows_evaluations_and_events(browser: Browser, run: Path, tmp_path: Path) -> None:
    page = open_report(browser, tmp_path, run)
    faint = next(one for one in drawn(page, "loss") if one["faint"])
    first = [row for row in read_metrics(run) if "loss" in row][40:60]
    assert (faint["x"], faint["y"]) == ([*range(41, 61), None], [*(row["loss"] for row in first), None])
    rows = [row for row in read_metrics(run) if row.get("split") == "valid"]
    line = next(one for one in drawn(page, "evaluation") if one["label"] == "valid" and not one["faint"])
    assert (line["x"], line["y"]) == ([row["step"] for row in newest_path(rows)],
                                      [row["eval_loss"] for row in newest_path(rows)])
    cells = page.run("[...document.querySelectorAll('#events tbody tr')]"
                     ".map((row) => [...row.cells].map((cell) => cell.textContent))")
    assert [cell[0] for cell in cells] == [str(one["step"]) for one in EVENTS[1:]]
    assert [cell[2] for cell in cells] == KINDS
    assert "loss is NaN" in [cell[3] for cell in cells]
    marked = page.run("report.charts[0].events.map(([x, run, event]) => event[3])")
    assert marked == KINDS
    assert "hosts: [\"vm\"] → [\"b\"]" in page.run("document.getElementById('configuration').textContent")


def test_expected_losses_are_a_band_in_the_charts_of_the_losses(browser: Browser, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """From step 3 on, by step, tokens and time; of each run of which an extension expects losses."""
    def at(tokens: float) -> Expected | None:
        step = tokens / 16384
        return Expected(9 - step / 20, 8.5 - step / 20, 9.5 - step / 20) if 3 <= step <= 100 else None

    expecting = Extension("expecting", "Expects losses.", expectation=lambda start, events: (
        Expectation(at, "too high") if start.get("expects") else None))
    monkeypatch.setitem(active_extensions._found, "expecting", expecting)
    folder = write_run(tmp_path / "expected", rows_of([*range(1, 61)]),
                       [event("off_curve", 40, "the loss is above", side="above")], [record(expects=True)])
    plain = write_run(tmp_path / "plain", rows_of([1, 2, 3]))
    page = open_report(browser, tmp_path, folder)
    for panel in ("loss", "evaluation"):
        (one,) = (one for one in drawn(page, panel) if one["label"] == "expected, with its interval")
        assert one["x"] == [*range(3, 61)]
        assert one["y"][0] == 9 - 3 / 20
    for axis, first in (("tokens", 3 * 16384), ("time", 3 * 0.4)):
        x, low, high = page.run(f"""(() => {{
            report.view.axis = {json.dumps(axis)};
            const series = panelSeries(report.charts[0].panel, report.data.runs, report.view).at(-1);
            return [series.x[0], series.low, series.high];
        }})()""")
        assert x == pytest.approx(first, abs=0.2)
        assert (low[0], high[0]) == (8.5 - 3 / 20, 9.5 - 3 / 20)
    assert "expected, with its interval" in page.run("report.charts[0].legend.textContent")
    assert "; training loss " in page.run("document.getElementById('overview').textContent")
    assert page.run("eventStyle('off_curve')[0]") == "--bad"
    assert page.errors() == []
    labels = [one["label"] for one in drawn(open_report(browser, tmp_path, folder, plain), "loss")]
    assert labels == ["expected", "expected: expected, with its interval", "plain"]
    save_loss_plot(folder, tmp_path / "loss.svg")
    assert "expected, with its interval" in (tmp_path / "loss.svg").read_text()


def test_axes_zoom_keyboard_and_pointer(browser: Browser, run: Path, tmp_path: Path) -> None:
    page = open_report(browser, tmp_path, run)
    assert page.run("document.querySelector('input[value=tokens]').click(), report.xRange()") == [16384, 100 * 16384]
    low, high = page.run("document.querySelector('input[value=time]').click(), report.xRange()")
    assert 0.3 < low < 1
    assert 39 < high < 41
    page.run("document.querySelector('input[value=step]').click(), report.charts[0].box.focus()")
    page.run(DRAWN)
    page.press("End")
    page.press("ArrowLeft")
    page.wait_for("report.charts[0].tip.textContent.startsWith('step 99')")
    assert page.run("report.charts[0].tip.hidden") is False
    left, top, width, height = page.run("(({x, y, width, height}) => [x, y, width, height])"
                                        "(report.charts[0].plot.over.getBoundingClientRect())")
    for kind, part in (("mousePressed", 0.4), ("mouseMoved", 0.6), ("mouseReleased", 0.6)):
        page.mouse(kind, left + width * part, top + height / 2, button="left", buttons=1, clickCount=1)
    low, high = page.run("report.xRange()")
    assert 30 < low < 45 < 55 < high < 70
    page.press("0")
    assert page.run("report.xRange()") == [1, 100]
    page.run("report.view.logX = true, report.charts.forEach((c) => { c.logY = true; }), report.schedule()")
    page.run(DRAWN)
    assert page.errors() == []


def test_labels_of_axes_are_complete_and_different(browser: Browser, tmp_path: Path) -> None:
    """A loss that hardly changes, and token counts of five digits, of which the last one is at the end of the axis."""
    rows = [{**row, "loss": 10.82 + row["step"] * 1e-9, "consumed_tokens": 1_000_000 + 125 * row["step"]}
            for row in rows_of(list(range(1, 9))) if "loss" in row]
    page = open_report(browser, tmp_path, write_run(tmp_path / "narrow", rows, EVENTS[:1], [record()]))
    texts = page.run("""(() => {
        const texts = [], write = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
            const width = this.measureText(text).width, start = {right: width, center: width / 2}[this.textAlign] || 0;
            texts.push([text, this.textAlign, x - start, x - start + width, this.canvas.clientWidth]);
            write.apply(this, arguments);
        };
        report.view.axis = "tokens";
        report.charts[0].draw();
        return new Promise((done) => requestAnimationFrame(() => {
            CanvasRenderingContext2D.prototype.fillText = write;
            done(texts);
        }));
    })()""")
    on_y = [text for text, align, *_ in texts if align == "right" and text]
    on_x = [text for text, align, *_ in texts if align == "center" and text != "tokens"]
    for labels in (on_x, on_y):
        assert len(set(labels)) == len(labels) > 2
    assert all(0 <= left <= right <= width for _, _, left, right, width in texts)


def test_several_runs_are_overlaid_and_their_differences_listed(browser: Browser, run: Path, tmp_path: Path) -> None:
    old = [{key: row[key] for key in FEW_KEYS} for row in rows_of(list(range(1, 31)), seed=1) if "loss" in row]
    other = write_run(tmp_path / "old", old, [], [record(lr=6e-4)])
    empty = write_run(tmp_path / "empty", [], [], [])
    page = open_report(browser, tmp_path, run, other, empty)
    series = [one for one in drawn(page, "loss") if not one["faint"]]
    assert [one["label"] for one in series] == ["with rollback", "old"], "only the loss itself"
    assert series[1]["y"] == [row["loss"] for row in old]
    table = page.run("document.getElementById('differences').textContent")
    assert "optimizer.params.lr" in table
    assert "0.0006" in table
    assert "n_layer" in table, "the empty run has no configuration"
    assert page.run("document.getElementById('notices').textContent") == ""
    assert page.errors() == []


ATTACKS = ("</script><script>window.hit = 1</script>", "<img src=x onerror='window.hit = 1'>", "<!--<script>",
           "javascript:window.hit=1", "'\"><svg onload=window.hit=1>", "$data ${data} $$", "__proto__", "constructor",
           "\ud800 \u2028")


def test_text_of_a_run_folder_cannot_inject_anything(browser: Browser, tmp_path: Path) -> None:
    """Names, keys, values and events that are HTML or JavaScript appear as text."""
    rows = [{**row, **dict.fromkeys(ATTACKS, float(row["step"]))} for row in rows_of([1, 2, 3])]
    rows += [{"step": 3, "split": attack, "eval_loss": 1.5} for attack in ATTACKS]
    rows += [{"step": 3, "split": f"tasks/{attack}", attack: 1.5} for attack in ATTACKS]
    rows += [{"step": "4", "loss": 1}, {"step": 5, "loss": "<b>", "lr": [1], "mfu": 10**400}, {"loss": 1}]
    events = [event(attack, 2, attack, **{attack: attack}) for attack in ATTACKS]
    starts = [record(**{attack: {attack: attack} for attack in ATTACKS}, flags={"note": "\n".join(ATTACKS)})]
    evil = write_run(tmp_path / "<img src=x onerror=window.hit=1>", rows, events, starts)
    append_rows(evil / "events.jsonl", [
        event("slow_rank", 2, attack) | {"kind": attack, "ranks": [attack], "hosts": [attack]} for attack in ATTACKS])
    append_rows(evil / "rank_times.jsonl", [{"start": 0, "hosts": list(ATTACKS)}, *(
        {"step": step, "ms": {"own": [*[1.0] * (len(ATTACKS) - 1), 3.0]}} for step in (1, 2, 3))])
    append_rows(evil / "restarts.jsonl", [{"start": 1, "time": START + number, "wall_seconds": 1, "exit_code": 1,
                                           "reason": attack} for number, attack in enumerate(ATTACKS)])
    for number, attack in enumerate(ATTACKS):
        (evil / "replays" / str(number)).mkdir(parents=True)
        verdict = dict.fromkeys(("kind", "certainty", "layer", "remedy", "text"), attack)
        (evil / "replays" / str(number) / "verdict.json").write_text(json.dumps(
            {"step": 2, "verdict": verdict | {"evidence": [attack], "hosts": [attack], "reasons": [attack]},
             "samples": {"lines": [attack], "command": attack}}))
    (evil / "replays" / "damaged").mkdir()
    (evil / "replays" / "damaged" / "verdict.json").write_text('{"kind": ')
    (evil / "flight" / "kept" / "step_2_<img src=x>").mkdir(parents=True)
    append_rows(evil / "predictions.jsonl", [
        *(prediction(2, number, attack) for number, attack in enumerate(ATTACKS)), {"sequence": 0}, {"step": 1},
        {"step": 10**400, "sequence": 0}, {"step": 1, "sequence": 0, "prompt": 1, "prompt_tokens": 1}])
    page = open_report(browser, tmp_path, evil, write_run(tmp_path / "plain", rows_of([1, 2, 3])))
    page.run("report.setCursor(2, report.charts[0])")
    page.run("SECTIONS.slow_ranks.maps[0].show({row: 1, column: 0})")
    assert page.run("SECTIONS.slow_ranks.maps[0].tip.textContent").startswith(f"rank 1 on {ATTACKS[1]}")
    for name in ("incidents", "section-replay"):
        shown = page.run(f"document.getElementById('{name}').textContent")
        assert all(attack in shown for attack in ATTACKS[:-1])
    page.run("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    assert page.run("window.hit === undefined && ({}).hit === undefined && Array.isArray(({}).__proto__) === false")
    assert page.run("document.querySelectorAll('img, #curves script, #events script, table script, b b').length") == 0
    assert page.run("document.querySelectorAll('script').length") == 2
    text = page.run("document.body.textContent")
    note = page.run("document.getElementById('notes').textContent")
    assert all(attack in note for attack in ATTACKS[:-1])
    assert r"\ud800 \u2028" in note
    assert page.run("document.querySelectorAll('#notes *').length") == 1
    assert all(attack in text for attack in ATTACKS[:-1])
    assert page.errors() == []


def test_a_person_on_call_finds_the_machine_and_the_place_in_the_curve(browser: Browser, tmp_path: Path) -> None:
    """Present problems are on top, with the answer of a replay; the heat map reads the slow rank; also on a phone."""
    slow = {"ranks": [3], "hosts": ["node-b"], "kind": "compute", "ratio": 2.2, "since": 70}
    run = write_run(tmp_path / "run", rows_of(list(range(1, 101))), [
        event("start", 0), event("spike", 20, "a spike of the loss"), event("slow_rank", 80) | slow])
    append_rows(run / "rank_times.jsonl", rank_rows(["node-a", "node-a", "node-b", "node-b"], range(1, 101), {3: 3.0}))
    (run / "replays" / "step_20").mkdir(parents=True)
    (run / "replays" / "step_20" / "verdict.json").write_text(json.dumps(
        {"step": 20, "unknown": {}, "samples": {"lines": ["1 of 16 samples stands out"], "command": "--skip_samples 7"},
         "verdict": {"text": "it is the data or the recipe", "certainty": "sure",
                     "step": None, "evidence": ["all keys are equal"]}}))
    (run / "flight" / "kept" / "step_20_spike").mkdir(parents=True)
    page = open_report(browser, tmp_path, run)
    items = page.run("[...document.querySelectorAll('.incident')].map((item) => [item.className, item.textContent])")
    assert [name for name, _ in items] == ["incident open", "incident open", "incident"]
    assert "no row for" in items[0][1]
    assert "rank 3 on node-b is slow: 2.2 times the others" in items[1][1]
    (spike,) = (text for _, text in items if "a spike of the loss" in text)
    assert "Replay: it is the data or the recipe (sure)1 of 16 samples stands out" in spike
    assert spike.endswith("--skip_samples 7")  # instead of the advice to replay the step
    assert f"ds-pretrain replay {run}@20" in page.run("document.getElementById('section-replay').textContent")
    page.run("document.querySelectorAll('.incident.open button')[1].click()")
    low, high = page.run("report.xRange()")
    assert 60 < low < 70 < 80 < high < 90
    page.run("SECTIONS.slow_ranks.maps[0].box.focus()")
    for key in ("ArrowUp", "ArrowDown", "ArrowDown", "ArrowDown", "Home"):
        page.press(key)
    tip = page.run("SECTIONS.slow_ranks.maps[0].tip.textContent")
    assert tip == "rank 3 on node-bstep 1002.2 \u00d7 the medianabove the median mostly in: backward"
    red, green, _ = page.run("""(() => {
        const [heat] = SECTIONS.slow_ranks.maps, {canvas} = heat, size = heat.layout();
        const ratio = canvas.width / size.width;
        const at = [size.gutter + size.plotWidth / 2, 3.5 * size.rowHeight].map((value) => Math.round(value * ratio));
        return [...canvas.getContext("2d").getImageData(...at, 1, 1).data].slice(0, 3);
    })()""")
    assert red > 2 * green, "the row of the slow rank is red"
    page.press("Enter")
    assert page.run("report.xRange()") == pytest.approx([96, 100], abs=0.1)
    for width in (390, 1280):
        browser.send("Emulation.setDeviceMetricsOverride",
                     {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 400}, page.session)
        page.run(DRAWN)
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run("SECTIONS.slow_ranks.maps[0].canvas.clientWidth") <= width
    assert page.errors() == []


def prediction(step: int, sequence: int, text: str | None) -> dict[str, Any]:
    """Return a row of predictions.jsonl; without a text, as of a run without a tokenizer."""
    tokens = {f"{name}_tokens": [step, sequence] for name in ("prompt", "predicted", "actual")}
    return {"step": step, "sequence": sequence, "prompt": text, "predicted": text and f"{text}\n{step}", "actual": text,
            **tokens}


def test_predictions_and_scores_of_tasks(browser: Browser, tmp_path: Path) -> None:
    """The tables have the newest evaluation first, and a repeated one once. Each metric of a task has a curve."""
    scores = [{"step": step, "time": START + step, "split": "tasks/quiz", "acc": step / 100, "acc_stderr": 0.1,
               "questions": 8} for step in (10, 20)]
    run = write_run(tmp_path / "run", [*rows_of(list(range(1, 21))), *scores])
    rows = [prediction(step, sequence, "some  text" if sequence else None) for step in (10, 20, 10, 20, 30)
            for sequence in (0, 1)]
    append_rows(run / "predictions.jsonl", rows)
    page = open_report(browser, tmp_path, run)
    cells = page.run("""[...document.querySelectorAll('#section-tasks details')].map((details) =>
        [...details.querySelectorAll('tbody tr')].map((row) => [...row.children].map((cell) => cell.textContent)))""")
    steps = [30, 20, 10]
    text = "some  text"
    assert cells == [
        [["prompt", "30 0"], ["actual", "30 0"], *([f"step {step}", f"{step} 0"] for step in steps)],
        [["prompt", text], ["actual", text], *([f"step {step}", f"{text}\n{step}"] for step in steps)]]
    (series,) = drawn(page, "tasks")
    assert (series["label"], series["x"], series["y"]) == ("quiz acc", [10, 20], [0.1, 0.2])
    assert {one["label"] for one in drawn(page, "evaluation")} == {"valid", "valid/code"}
    assert page.errors() == []
    page = open_report(browser, tmp_path, write_run(tmp_path / "plain", rows_of([1, 2])))
    assert page.run("document.getElementById('section-tasks').hidden")
    assert "tasks" not in page.run("report.charts.map((chart) => chart.panel.id)")


def test_a_page_without_rows_and_one_with_a_damaged_record(browser: Browser, tmp_path: Path) -> None:
    page = open_report(browser, tmp_path, write_run(tmp_path / "empty", [], []))
    assert "There are no logged steps yet." in page.run("document.getElementById('curves').textContent")
    damaged = write_run(tmp_path / "damaged", rows_of([1, 2]))
    (damaged / "run.json").write_text("[{")
    page = open_report(browser, tmp_path, damaged)
    assert "cannot read the record" in page.run("document.getElementById('notices').textContent")
    assert drawn(page, "loss")[0]["x"] == [1, 2]
    assert page.errors() == []


def test_a_watched_page_follows_the_run_without_a_reload(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows_of(list(range(1, 21))))
    with watching(run) as (process, url):
        page = browser.page(url)
        page.run("window.first = true, report.pollMs = 200")  # a reload would lose it
        page.run("document.querySelector('#configuration details details').open = true")
        append_rows(run / "metrics.jsonl", rows_of([21, 22]))
        append_rows(run / "events.jsonl", [event("save", 22)])
        page.wait_for("report.data.runs[0].rows === 22 && report.data.runs[0].events.length === 2")
        assert page.run("document.querySelector('#configuration details details').open") is True
        assert [one["x"][-1] for one in drawn(page, "loss")] == [22]
        append_rows(run / "metrics.jsonl", rows_of([11, 12], seed=5))  # after a rollback
        page.wait_for("report.data.runs[0].abandoned_rows === 12")
        expected = newest_path([row for row in read_metrics(run) if "loss" in row])
        line = next(one for one in drawn(page, "loss") if not one["faint"])
        assert (line["x"], line["y"]) == ([row["step"] for row in expected], [row["loss"] for row in expected])
        (run / "run.json").write_text(json.dumps([record(), record(time=START + 9)]))
        page.wait_for("report.data.runs[0].starts.length === 2")
        assert page.run("window.first") is True
        assert page.errors() == []
        assert all(address.startswith(url) for address in page.requests())
        process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.communicate()[1]) == (0, "")
    page.wait_for("document.getElementById('live').className === 'lost'")
