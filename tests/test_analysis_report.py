"""The report's files, its page and the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from analysis import figures
from analysis.cli import main
from analysis.compare import compare_runs
from analysis.findings import find, summary
from analysis.load import RUN_COLUMNS, load_sweep
from analysis.page import html_page
from analysis.units import fixed, flops_text, p_text, percent, printable, seconds_text, signed
from race_sweeps.errors import UserError
from tests.test_analysis_load import RHO, edit, lines, write_sweep

# Two models that differ clearly, an optimum inside the range for one and at its edge for the other; seed 1 is better.
TABLE = {
    "tiny-s": {"rho45": 0.40, "rho70": 0.36, "rho90": 0.30},
    "tiny-m": {"rho45": 0.45, "rho70": 0.55, "rho90": 0.42},
}


def value(model: str, fraction: str, seed: int, rung: int) -> float:
    return TABLE.get(model, TABLE["tiny-s"])[fraction] * rung / 3 + 0.004 * seed


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, content) for name, content in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (0, "0 FLOP"), (999, "999 FLOP"), (4e11, "400 GFLOP"), (4.04e11, "404 GFLOP"), (1.5e12, "1.5 TFLOP"),
        (999.9e9, "1 TFLOP"), (3e18, "3 EFLOP"), (2.5e21, "2.5 ZFLOP"), (10**19, "10 EFLOP"), (float("nan"), "–"),
    ],
)  # fmt: skip
def test_flops_text(flops: float, text: str) -> None:
    assert flops_text(flops) == text


def test_other_numbers() -> None:
    assert (fixed(0.12345), fixed(-0.5, 1), fixed(None), fixed(float("nan"))) == ("0.123", "−0.5", "–", "–")
    assert (signed(0.1), signed(-0.1), percent(0.0123), percent(None)) == ("+0.100", "−0.100", "+1.2%", "–")
    assert (p_text(0.0001), p_text(0.04), p_text(None)) == ("< 0.001", "0.040", "–")
    assert (seconds_text(12.34), seconds_text(180), seconds_text(36000)) == ("12.3 s", "3 min", "10 h")
    assert printable("a\x1b[31mb\n") == "a�[31mb�"


def test_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path / "runs" / "pilot", value=value)
    assert main(["report", "pilot"]) == 0
    out = capsys.readouterr().out.splitlines()
    folder = Path("runs/pilot/report")
    assert out[0] == str(folder / "report.html")
    assert out[1] == (
        "At 400 GFLOP, tiny-m at rho70 (achieved rho 0.710) has the highest pass@1, 0.552: 0.150 above tiny-s at rho45 "
        "(achieved rho 0.460; exceeds seed spread) and 0.100 above its own rho45 (achieved rho 0.460; exceeds seed "
        "spread)."
    )
    assert sorted(p.name for p in folder.iterdir()) == [
        "compute_performance.png", "compute_split.png", "isoflop.png", "report.html", "runs.csv", "runs.parquet",
        "summary.json",
    ]  # fmt: skip
    for name in ("isoflop", "compute_split", "compute_performance"):
        data = (folder / f"{name}.png").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert b"pHYs" in data
        dots = int.from_bytes(data[data.index(b"pHYs") + 4 :][:4])
        assert dots >= 150 / 0.0254  # per metre
    csv, parquet = pd.read_csv(folder / "runs.csv"), pd.read_parquet(folder / "runs.parquet")
    assert tuple(csv.columns) == tuple(parquet.columns) == RUN_COLUMNS
    assert len(csv) == len(parquet) == 48
    content = json.loads((folder / "summary.json").read_text())
    assert content["sentences"] == [out[1]]
    assert content["points"] == {"finished": 12, "unfinished": 0, "skipped": 0}
    last = content["rungs"][-1]
    assert (last["winner"]["model"], last["winner"]["allocation"], last["df"]) == ("tiny-m", "rho70", 6)
    assert last["best"]["tiny-s"]["edge"] == "low"
    assert last["best"]["tiny-m"]["edge"] == ""
    assert content["compute"]["c_total"] == 12 * 4.04e11
    assert (content["compute"]["lost"], content["compute"]["eval"]) == (12 * 3e9, 12 * 7e9)


def test_out_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path / "s", seeds=[0], value=value)
    assert main(["report", str(tmp_path / "s"), "--out", str(tmp_path / "a" / "b")]) == 0
    assert (tmp_path / "a" / "b" / "report.html").is_file()
    assert not (tmp_path / "s" / "report").exists()
    (tmp_path / "file").write_text("")
    assert main(["report", str(tmp_path / "s"), "--out", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("analysis: cannot write the report into")
    assert error.count("\n") == 1


def test_page_holds_everything_and_asks_no_network(tmp_path: Path) -> None:
    folders = write_sweep(tmp_path / "s", value=value)
    (folders["tiny-m", "rho90", 1] / "result.json").unlink()
    (folders["tiny-s", "rho90", 0] / "result.json").write_text("{")
    text = html_page(find(load_sweep(tmp_path / "s")))
    page = Page(text)
    assert page.tags["svg"] == 3 + 2
    assert page.tags["script"] == 1
    assert page.tags["table"] == 3 * 2 + 3
    for tag in ("link", "img", "iframe", "object", "embed", "base", "form"):
        assert page.tags[tag] == 0
    for tag, name, content in page.attributes:
        assert name not in ("src", "srcset", "action") or tag == "never"
        assert not name.startswith("on")
        if name in ("href", "xlink:href"):
            assert content is not None
            assert content.startswith("#")
    assert not re.search(r"url\((?!#)|@import", text)
    ids = [content for _, name, content in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {content[1:] for _, name, content in page.attributes if name == "href" and content}
    used |= set(re.findall(r"url\(#([^)]+)\)", text))
    assert used <= set(ids)
    body = page.text
    assert "Only 10 of 12 points are finished." in body
    assert "stopped or running at step 80" in body
    assert "points/" in body
    assert "result.json is damaged" in body
    assert "pooled over the rung" in body
    assert "SIMULATED" not in body
    # The sentence comes before any figure.
    assert text.index("has the highest pass@1") < text.index("<svg")


HOSTILE = "<img src=x onerror=alert(1)>\"'&$\\frac{</script><script>alert(2)</script>"


def test_hostile_names_are_escaped_everywhere(tmp_path: Path) -> None:
    folders = write_sweep(tmp_path / "s", models=[HOSTILE, "tiny-m"], value=value)
    path = next(iter(folders.values()))
    manifest = json.loads((tmp_path / "s" / "sweep.json").read_text())
    edit(
        tmp_path / "s" / "sweep.json", sweep=HOSTILE, command=["python", HOSTILE], created=HOSTILE,
        git={"revision": HOSTILE}, versions={HOSTILE: HOSTILE}, points=manifest["points"],
    )  # fmt: skip
    for (_, fraction, _), folder in folders.items():
        edit(folder / "result.json", reward=HOSTILE, update_fraction=f"{HOSTILE}{fraction}")
        rows = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
        lines(folder / "evals.jsonl", [{**row, "set": HOSTILE} for row in rows])
    (path / "result.json").write_text("{")
    text = html_page(find(load_sweep(tmp_path / "s")))
    page = Page(text)
    assert page.tags["script"] == 1
    assert page.tags["img"] == 0
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert "<img" not in text
    assert text.count("</script>") == 1
    assert f"sweep {HOSTILE}" in " ".join(page.text.split())
    assert page.text.count(HOSTILE) > 20


def test_script_is_the_one_that_the_policy_allows(tmp_path: Path) -> None:
    import base64
    import hashlib

    write_sweep(tmp_path / "s", seeds=[0], value=value)
    text = html_page(find(load_sweep(tmp_path / "s")))
    script = text[text.index("<script>") + len("<script>") : text.index("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "default-src 'none'" in text


def test_simulated_is_said_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next(iter(write_sweep(tmp_path / "s", value=value).values()))
    edit(path / "result.json", simulated=True)  # one point is enough
    findings = find(load_sweep(tmp_path / "s"))
    text = html_page(findings)
    assert '<h1>Report of sweep s <span class="badge">SIMULATED</span></h1>' in text
    assert "<title>SIMULATED: s: report</title>" in text
    svgs = re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL)
    assert len(svgs) == 5
    assert all(">SIMULATED · " in svg for svg in svgs)
    assert findings.sentences[0].startswith("SIMULATED: ")
    assert text.count("<td>SIMULATED</td>") == 4 + 3 * 1 + 3  # the point's runs, its cell, its model's best
    assert summary(findings)["simulated"] is True
    assert main(["table", str(tmp_path / "s")]) == 0
    assert capsys.readouterr().out.count("SIMULATED · ") == 3
    titles = [
        figures.isoflop(findings.rungs, simulated=True).get_suptitle(),
        figures.compute_split(findings.sweep.results, ["tiny-s"], simulated=True).axes[0].get_title(loc="left"),
        figures.compute_performance(findings.rungs, simulated=True).axes[0].get_title(),
    ]
    assert all(title.startswith("SIMULATED · ") for title in titles)


def test_one_seed_report_claims_nothing(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", seeds=[0], value=value)
    findings = find(load_sweep(tmp_path / "s"))
    text = html_page(findings)
    body = text[: text.index("<h2>How this was computed")]
    assert "undetermined: one seed" in body
    assert "exceeds seed spread" not in body
    assert "within seed spread" not in body
    assert "pooled standard deviation" not in body  # no bars are drawn, so none are explained
    assert "One seed per cell: there is no seed spread" in body


def test_several_settings_get_figures_of_their_own(tmp_path: Path) -> None:
    folders = write_sweep(tmp_path / "s", value=value)
    for (_, fraction, _), folder in folders.items():
        if fraction != "rho45":
            edit(folder / "result.json", reward="dense")
    assert main(["report", str(tmp_path / "s")]) == 0
    names = {p.name for p in (tmp_path / "s" / "report").glob("*.png")}
    assert names == {
        f"{figure}-{setting}.png"
        for figure in ("isoflop", "compute_split", "compute_performance") for setting in ("1-sparse", "2-dense")
    }  # fmt: skip
    findings = find(load_sweep(tmp_path / "s"))
    assert [s.split("]")[0] for s in findings.sentences] == ["[sparse", "[dense"]


def test_uneven_compute_is_pointed_out(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", models=["tiny-s"], fractions=["rho45", "rho70"], value=value, over=0.23)
    notes = find(load_sweep(tmp_path / "s")).notes
    assert notes == [
        f"at {rung} GFLOP, achieved compute is off the rung by more than 5% in 2 of 2 cells, most in: "
        "tiny-s rho45 +23%, tiny-s rho70 +23%"
        for rung in (100, 200, 400)
    ]


def test_figures_show_what_was_measured(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", value=value)
    sweep = load_sweep(tmp_path / "s")
    rungs = compare_runs(sweep.runs)
    axes = figures.isoflop(rungs).axes
    assert [a.get_title() for a in axes] == ["C_total = 100 GFLOP", "C_total = 200 GFLOP", "C_total = 400 GFLOP"]
    last = axes[2]
    bars = {c.get_label(): c for c in last.containers}
    assert set(bars) == {"tiny-s", "tiny-m"}
    line = bars["tiny-m"].lines[0]
    assert list(line.get_xdata()) == pytest.approx([0.46, 0.71, 0.91])
    assert list(line.get_ydata()) == pytest.approx([0.452, 0.552, 0.422])
    ends = bars["tiny-m"].lines[2][0].get_segments()[0][:, 1]
    assert ends[1] - ends[0] == pytest.approx(2 * 0.004 / 2**0.5)  # plus and minus the pooled deviation
    dotted = [artist.get_ydata()[0] for artist in last.lines if artist.get_linestyle() == ":"]
    assert dotted == pytest.approx([0.19, 0.26])
    assert len({a.get_ylim() for a in axes}) == 1
    split = figures.compute_split(sweep.results, ["tiny-s", "tiny-m"]).axes[0]
    lengths = [patch.get_width() for patch in split.patches]
    assert sum(lengths) == pytest.approx(6)
    assert lengths[0:18:3] == pytest.approx([r + 0.01 for r in RHO.values() if r in (0.45, 0.7, 0.9)] * 2)
    assert [t.get_text() for t in split.get_yticklabels()] == ["rho45", "rho70", "rho90"] * 2
    performance = figures.compute_performance(rungs).axes[0]
    best = {c.get_label(): c.lines[0] for c in performance.containers}["tiny-m"]
    assert list(best.get_xdata()) == pytest.approx([1.01e11, 2.02e11, 4.04e11])
    assert list(best.get_ydata()) == pytest.approx([0.55 / 3 + 0.002, 1.1 / 3 + 0.002, 0.552])
    assert performance.get_xscale() == "log"


def test_same_files_give_the_same_page(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", models=["tiny-s"], seeds=[0], value=value)
    assert html_page(find(load_sweep(tmp_path / "s"))) == html_page(find(load_sweep(tmp_path / "s")))


def test_table_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    folders = write_sweep(tmp_path / "s", models=["[red]\x1b[31mx", "tiny-m"], value=value)
    (folders["tiny-m", "rho90", 1] / "result.json").unlink()
    assert main(["table", str(tmp_path / "s")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[red]" in out  # shown as it is, not taken for markup
    assert "best (low)" in out
    assert re.search(r"tiny-m +rho70 +0\.710 +0\.552 +0\.003 +2 ", out)
    assert "best (low) = at the low edge of the tested rho range: only a bound" in out
    assert "Only 11 of 12 points are finished." in out
    assert f"unfinished: {folders['tiny-m', 'rho90', 1].name}: stopped or running at step 80" in " ".join(out.split())


def test_table_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path / "s", seeds=[0], value=value)
    assert main(["table", str(tmp_path / "s"), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == summary(find(load_sweep(tmp_path / "s")))
    assert content["rungs"][0]["pooled_sd"] is None
    assert {d["verdict"] for r in content["rungs"] for d in r["allocations"]} == {"undetermined: one seed"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a command: report, table"),
        (["reprot", "x"], "command 'reprot': did you mean 'report'? valid: report, table"),
        (["report"], "the following arguments are required: SWEEP"),
        (["report", "nowhere"], "'nowhere' is not a sweep; sweeps in runs/: valid: pilot"),
        (["table", "pilot", "--set", "math"], "evaluation set 'math': valid: heldout"),
        (["table", "pilot", "--value", "reward"], "value 'reward': did you mean 'native_reward'?"),
        (["table", "pilot", "--jsno"], "unrecognized arguments: --jsno"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path / "runs" / "pilot", models=["tiny-s"], seeds=[0], value=value)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_nothing_finished_is_a_user_error(tmp_path: Path) -> None:
    folders = list(write_sweep(tmp_path / "s", models=["tiny-s"], seeds=[0], value=value).values())
    (folders[0] / "result.json").write_text("{")
    for path in folders[1:]:
        (path / "result.json").unlink()
    with pytest.raises(UserError, match=r"no finished point yet \(2 unfinished, 1 damaged\); first damaged point: "):
        find(load_sweep(tmp_path / "s"))


def test_a_copied_folder_is_enough(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", seeds=[0], value=value)
    shutil.move(tmp_path / "s", tmp_path / "moved")
    assert find(load_sweep(tmp_path / "moved")).sentences


def test_help_loads_no_heavy_library() -> None:
    code = (
        "import sys; from analysis.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "print(sorted({'pandas', 'numpy', 'scipy', 'matplotlib', 'rich', 'torch'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root, env={**os.environ}
    )
    assert "report" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_analysis_never_loads_torch(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", models=["tiny-s"], seeds=[0], value=value)
    code = (
        "import sys; from analysis.cli import main\n"
        f"assert main(['report', {str(tmp_path / 's')!r}]) == 0\n"
        "assert not {'torch', 'transformers', 'trl'} & set(sys.modules)\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[1])
