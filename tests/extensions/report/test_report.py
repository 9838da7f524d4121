"""`ds-pretrain report`: comparisons, the script that repeats a run, the server of --watch, and its errors."""

import http.client
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pretrain.analysis.summary import summarize, summary_lines
from pretrain.extensions.report.compare import compare_runs, comparison_lines
from pretrain.extensions.report.main import json_for_html, page_html
from pretrain.extensions.report.page_data import ShownRun, page_data
from tests.extensions.report.runs import watching
from tests.support.launch import PROGRAM
from tests.support.run_folders import append_rows, event, rank_rows, record, rows_of, write_run


def report(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROGRAM, "report", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Write two runs whose losses differ from step 21 on."""
    rows = rows_of(list(range(1, 31)))
    other = [{**row, "loss": row["loss"] + (row["step"] - 20) * 0.01} if row["step"] > 20 and "loss" in row else row
             for row in rows]
    next(row for row in other if row["step"] == 25)["loss"] = None
    long = "/data/" + "a/very/long/path/" * 10
    return (write_run(tmp_path / "a", rows),
            write_run(tmp_path / "b", other, starts=[record(lr=6e-4, seed=5, time=9, extra={"path": long})]))


def test_the_comparison_names_only_what_differs(runs: tuple[Path, Path]) -> None:
    comparison = compare_runs(runs)
    assert {(row.section, row.key, *row.values) for row in comparison.settings} == {
        ("flags", "seed", "1234", "5"), ("deepspeed_config", "optimizer.params.lr", "0.001", "0.0006"),
        ("extra", "path", None, "/data/" + "a/very/long/path/" * 10)}
    lines = comparison_lines(comparison)
    assert all(len(line) <= 80 for line in lines)
    assert "  seed                            A 1234  B 5" in lines


def test_the_comparison_reports_where_the_losses_diverge(runs: tuple[Path, Path]) -> None:
    losses = compare_runs(runs).losses[0]
    assert (losses.num_steps, losses.first_step, losses.largest_step, losses.last_step) == (30, 21, 30, 30)
    assert losses.largest == pytest.approx(0.1)
    append_rows(runs[1] / "metrics.jsonl", rows_of(list(range(5, 31)), seed=3))  # trained again
    assert compare_runs(runs).losses[0].first_step == 5
    same = compare_runs([runs[0], runs[0]])
    assert (same.settings, same.losses[0].first_step) == ([], None)
    assert any("equal at all 30 steps" in line for line in comparison_lines(same))
    text, values = report("--compare", *runs), report("--compare", "--json", *runs)
    assert (text.returncode, text.stderr, values.returncode) == (0, "", 0)
    assert "first differ at step 5" in text.stdout
    assert json.loads(values.stdout)["losses"][0]["first_step"] == 5


def test_the_page_is_written_in_the_run_folder_or_elsewhere(runs: tuple[Path, Path], tmp_path: Path) -> None:
    done = report(runs[0])
    assert re.fullmatch(rf"wrote {runs[0]}/report.html \(0\.\d MB, 30 rows, .* s\)\n", done.stdout), done.stderr
    done = report(*runs, "--output", tmp_path / "both.html")
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "both.html").read_text()
    links = set(re.findall("https?://[^\"' ]*", text))
    assert links == {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}, "a namespace, and a comment"
    assert "Permission is hereby granted" in text, "the licence of the library"
    assert not list(tmp_path.rglob(".tmp-*"))


def test_data_and_title_cannot_be_code_and_scripts_are_named_by_their_hash(tmp_path: Path) -> None:
    text = json_for_html({"</script>": "<!--", "&": "\u2028\ud800"})
    assert not set("<>&\u2028\ud800") & set(text)
    assert json.loads(text) == {"</script>": "<!--", "&": "\u2028\ud800"}
    page = page_html(page_data([ShownRun(write_run(tmp_path / "<b>", []))], watch=False))
    assert "<title>&lt;b&gt;" in page
    assert re.search(r"default-src 'none'; script-src 'sha256-[\w+/=]+'; style-src 'sha256-[\w+/=]+'; img-src data:; "
                     "base-uri", page)


@pytest.mark.parametrize(("words", "problem"), [
    (["--port", "9000"], "no effect without --watch"), (["--json"], "no effect without --compare"),
    (["--compare"], "at least two run folders"), (["--compare", "--watch"], "cannot be combined"),
    (["--output", "x.svg"], "ends with .html"), (["--watch", "--output", "x.html"], "no effect with --watch"),
    (["--output", "missing/x.html"], "there is no folder"), (["--command"], "lacks what a repetition needs"),
    (["nowhere"], "this is not a run folder"),
])
def test_flags_without_effect_are_rejected(runs: tuple[Path, Path], words: list[str], problem: str) -> None:
    done = report(runs[0], *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert problem in done.stderr


def _get(url: str, path: str, host: str | None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=60)
    connection.putrequest("GET", path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_server_answers_to_its_own_names_only(runs: tuple[Path, Path]) -> None:
    with watching(runs[0]) as (process, url):
        port = urlsplit(url).port
        for host in (f"127.0.0.1:{port}", "localhost:9", "localhost", "[::1]:1"):
            status, text = _get(url, "/", host)
            assert (status, "<title>a - training report" in text) == (200, True)
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "127.0.0.1:1:2", "", None):
            status, text = _get(url, "/update", host)
            assert (status, "runs" in text) == (403, False), host
        for path in ("/run.json", "/../run.json", "/metrics.jsonl", "//etc/passwd", "/report.html"):
            assert _get(url, path, "localhost")[0] == 404
        for known in ("", "x", "0.0.0.0", "9.9.9.9", "0.0.999999999999.0", "1.2.3", "1.2.3.4,1.2.3.4,1.2.3.4"):
            status, text = _get(url, f"/update?known={known}", "localhost")
            assert status == 200
            assert len(json.loads(text)["runs"]) == 1
        second = report(runs[0], "--watch", "--port", port)
        assert (second.returncode, "Address already in use" in second.stderr) == (2, True)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output.strip(), errors) == (0, "", "")


def test_the_page_of_a_healthy_run_stays_small(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows_of([1, 2, 3]), [event("start", 0), event("stop", 3, "finished")], [record()])
    append_rows(run / "rank_times.jsonl", rank_rows(["a"] * 4, range(1, 200), {}))
    text = page_html(page_data([ShownRun(run)], watch=False))
    assert len(text) < 150_000
    assert "what went wrong" not in "\n".join(summary_lines(summarize(run)))
