"""The compute statement: exact integers from the ledgers, and text that is safe to paste."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.cli import main
from analysis.statement import latex, markdown, state
from tests.test_analysis_load import lines, write

BIG = 10**20 + 7  # beyond 64 bits and beyond a float's integers


def row(step: int, phase: str, model: int, *, seconds: float = 1.0, **tokens: int) -> dict[str, Any]:
    every = {"prompt": 0, "completion": 0, "cached": 0, "trained": 0, "modelled": 0}
    return {
        "v": 1, "step": step, "phase": phase, "model_flops": model, "executed_flops": 2 * model,
        "paper_flops": model // 2, "tokens": {**every, **tokens}, "rows": 1, "seconds": seconds, "attempt": 1,
    }  # fmt: skip


def resume(step: int) -> dict[str, Any]:
    return {"v": 1, "step": step, "phase": "resume", "attempt": 2}


RUN = [
    row(0, "eval", 50, prompt=3, completion=4),
    row(1, "search", 300, prompt=10, completion=20, cached=5),
    row(1, "learning", 600, trained=25),
    row(1, "reward", 100),
    row(2, "search", 900, prompt=1000, completion=1000),  # superseded: the restart kept step 1
    row(2, "eval", 40),
    resume(1),
    row(2, "search", 200, prompt=6, completion=8),
    row(2, "learning", BIG, trained=9),
]
MODEL = {
    "search": 500, "learning": 600 + BIG, "reward": 100, "total": 1200 + BIG, "eval": 50, "lost": 900, "lost_eval": 40,
}  # fmt: skip


def sweep(folder: Path, name: str = "a_b", simulated: bool = False) -> Path:
    root = folder / name
    for point in ("p1", "p2", "p3", "p4"):
        (root / "points" / point).mkdir(parents=True)
    lines(root / "points/p1/ledger.jsonl", RUN)
    axes = {"model": "m$1|<b>", "reward": "sparse", "update_fraction": "rho70", "seed": 0}
    write(root / "points/p1/result.json", {"point": "p1", **axes, "simulated": simulated, "flops": MODEL})
    lines(root / "points/p2/ledger.jsonl", [row(1, "search", 1), row(1, "learning", 3, seconds=0.5)])
    (root / "points/p3/ledger.jsonl").write_text("not json\n{}\n")
    write(root / "sweep.json", {
        "v": 1, "sweep": name, "command": ["x"], "git": {"revision": "abc", "dirty": False},
        "versions": {"trl": "1.16.0"}, "simulated": simulated,
        "points": [{"id": p, **axes} for p in ("p1", "p2", "p3", "p4")],
    })  # fmt: skip
    return root


def test_exact_sums_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = sweep(tmp_path) / "points" / "p1"
    assert main(["statement", str(run), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    total = told["total"]
    assert told["name"] == "p1"
    assert total["flops"]["model"] == MODEL
    assert total["flops"]["executed"] == {name: 2 * value for name, value in MODEL.items()}
    assert total["flops"]["paper"]["learning"] == 300 + BIG // 2
    assert total["tokens"] == {"prompt": 16, "completion": 28, "cached": 5, "trained": 34, "eval": 7}
    assert total["seconds"] == {"search": 2.0, "learning": 2.0, "reward": 1.0, "eval": 1.0, "lost": 2.0}
    assert total["shares"]["model"]["rho"] == (600 + BIG) / (1200 + BIG)
    assert total["attempts"] == 2
    assert told["provenance"]["versions"] == {"trl": "1.16.0"}
    assert told["notes"] == []


def test_a_sweep_counts_what_never_finished(tmp_path: Path) -> None:
    told = state(str(sweep(tmp_path)))
    assert (told.total["runs"], told.total["unfinished"]) == (2, 1)
    assert told.total["flops"]["model"]["total"] == 1204 + BIG
    assert told.total["flops"]["model"]["total"] == sum(run["flops"]["model"]["total"] for run in told.runs)
    assert told.runs[1]["shares"]["model"] == {"rho": 0.75, "sigma": 0.25, "phi": 0.0}
    assert [item["point"] for item in told.left_out] == ["p3", "p4"]
    assert told.left_out[0]["reason"].startswith("points/p3/ledger.jsonl: line 1 is damaged")


def test_a_result_that_disagrees_is_pointed_out(tmp_path: Path) -> None:
    root = sweep(tmp_path)
    write(root / "points/p1/result.json", {"point": "p1", "flops": {**MODEL, "total": 1}})
    told = state(str(root))
    assert told.notes == ["p1: result.json and the ledger disagree about C_total; the ledger's is used"]
    assert told.runs[0]["flops"]["model"] == MODEL


def test_text_is_escaped_and_says_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sweep(tmp_path, simulated=True)
    assert main(["statement", str(root), "--format", "latex", "--runs"]) == 0
    tex = capsys.readouterr().out
    assert r"SIMULATED: Compute statement of a\_b" in tex
    assert r"m\$1|\textless{}b\textgreater{}" in tex
    assert r"C\_search & $5.010 \times 10^{2}$ & $1.002 \times 10^{3}$ & $2.500 \times 10^{2}$ \\" in tex
    assert tex.count("{") == tex.count("}")
    assert main(["statement", str(root), "--runs"]) == 0
    text = capsys.readouterr().out
    assert r"m$1\|\<b\>" in text
    assert "| lost to restarts (outside C_total) | 9.000e+02 | 1.800e+03 | 4.500e+02 |" in text
    assert "- runs: 2, of which 1 unfinished and counted" in text


def test_escapes() -> None:
    assert latex("a_b\\{}%&#$~^<\n") == (
        r"a\_b\textbackslash{}\{\}\%\&\#\$\textasciitilde{}\textasciicircum{}\textless{} "
    )
    assert markdown("<img|x>`") == r"\<img\|x\>\`"


@pytest.mark.parametrize("words", [["nowhere"], ["a_b", "--format", "docx"]])
def test_mistakes_are_one_line(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sweep(tmp_path)
    assert main(["statement", str(tmp_path / words[0]), *words[1:]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words[-1] in error
