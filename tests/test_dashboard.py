"""`python -m analysis sync` and `dashboard`, offline and against a local stand-in of the W&B API."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb")
pytest.importorskip("wandb_workspaces")

from analysis.cli import main
from race_sweeps import config as configuration
from race_sweeps.folder import RunFolder, append_rows, write_atomic, write_json
from race_sweeps.tracking.sinks import offline_file
from tests.conftest import compose_one
from tests.test_tracking import assert_equals_the_ledger, write_steps
from tests.wandb_server import Server, serving


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two finished points that nobody tracked, and one that is not done. No key."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    folder = tmp_path / "mine"
    for number, name in enumerate(("aaaaaaaaaa", "bbbbbbbbbb", "cccccccccc")):
        point = RunFolder(folder / "points" / name)
        write_atomic(point.config, configuration.save(compose_one("model=tiny-s", f"seed={number}", "sweep=mine")))
        write_steps(point, 0, 20)
        if number < 2:
            write_json(point.result, {"v": 1, "point": name})
    return folder


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving() as running:
        yield running


def log_in(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)


def test_sync_says_what_is_missing(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["sync", str(sweep)]) == 2
    assert capsys.readouterr().err == (
        "analysis: no W&B key: run wandb login, or set WANDB_API_KEY, then the same command; "
        "2 runs stay to be uploaded\n"
    )
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert main(["sync", str(sweep)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("analysis: http://127.0.0.1:9 does not answer (")
    assert not list(sweep.glob("points/*/wandb/*"))


def test_sync_uploads_each_finished_run_once(
    sweep: Path, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(server, monkeypatch)
    assert main(["sync", str(sweep)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1].endswith(f"2 of 2 runs uploaded to {server.url}; 1 unfinished, to be uploaded once they are done")
    assert sorted(server.runs) == ["aaaaaaaaaa", "bbbbbbbbbb"]
    for name in server.runs:
        assert_equals_the_ledger(RunFolder(sweep / "points" / name), server.history(name))
        assert server.run(name)["complete"] == (True, 0)
    before = len(server.requests)
    assert main(["sync", str(sweep)]) == 0
    assert "nothing to upload: 2 finished runs are there already" in capsys.readouterr().out
    assert len(server.requests) == before
    # The mark lost, in a copy elsewhere: uploaded again over the same run, still once.
    moved = sweep.with_name("moved")
    shutil.move(sweep, moved)
    (moved / "points" / "aaaaaaaaaa" / "wandb" / "uploaded").unlink()
    assert main(["sync", str(moved)]) == 0
    assert_equals_the_ledger(RunFolder(moved / "points" / "aaaaaaaaaa"), server.history("aaaaaaaaaa"))


def test_an_offline_run_that_is_not_the_ledgers_is_built_again(
    sweep: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(server, monkeypatch)
    point = RunFolder(sweep / "points" / "aaaaaaaaaa")
    folder = point.path / "wandb" / "offline-run-20260101_000000-aaaaaaaaaa"
    folder.mkdir(parents=True)
    (folder / "run-aaaaaaaaaa.wandb").write_bytes(b":W&B\xe1\xbe\x00")  # killed at once
    assert main(["sync", str(sweep)]) == 0
    assert_equals_the_ledger(point, server.history("aaaaaaaaaa"))
    file = offline_file(point)
    assert file is not None
    assert file.parent.name != folder.name


def plain(metric: Any) -> str:
    """A logged metric's name: as the library reads it back it is a string or a `Metric`."""
    return str(getattr(metric, "name", metric))


def test_the_dashboard_is_what_wandb_workspaces_accepts(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.reports.v2 import internal as report_models
    from wandb_workspaces.workspaces import internal as view_models

    evals = sweep / "points" / "aaaaaaaaaa" / "evals.jsonl"
    append_rows(evals, [{"step": 20, "rung": 2, "set": "gsm8k", "pass@1": 0.5, "judge": 0.4, "rho": 0.5,
                         "flops": {"total": 1}}])  # fmt: skip
    assert main(["dashboard", str(sweep)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("no W&B key: specifications only")
    files = {name: json.loads((sweep / "dashboard" / f"{name}.json").read_text()) for name in ("workspace", "report")}
    view = view_models.View.model_validate(files["workspace"])
    report = report_models.ReportViewspec.model_validate(files["report"])
    assert json.loads(view.model_dump_json(by_alias=True, exclude_none=True)) == files["workspace"]
    titles = {
        heading.children[0].text: [p.config.chart_title for p in grid.metadata.panel_bank_section_config.panels]
        for heading, grid in pairwise(report.spec.blocks)
        if grid.type == "panel-grid"
    }
    found = ws.Workspace._from_model(view)
    assert found.settings.x_axis == "flops/total"
    assert found.name == "Sweep mine"
    assert "mine" in str(found.runset_settings.filters)
    shown = {panel.title: panel for section in found.sections for panel in section.panels}
    assert [section.name for section in found.sections] == ["Compute", "Value", "Update fraction", "IsoFLOP", "Judge"]
    assert titles == {section.name: [panel.title for panel in section.panels] for section in found.sections}
    split = shown["Compute by component"]
    assert (plain(split.x), split.plot_type) == ("flops/total", "stacked-area")
    assert [plain(y) for y in split.y] == ["flops/search", "flops/learning", "flops/reward"]
    assert [plain(y) for y in shown["pass@1 on gsm8k"].y] == ["eval/gsm8k/pass@1"]
    achieved = shown["Achieved against planned"]
    assert (str(achieved.x), str(achieved.y)) == ("Config(name='planned.rho')", "SummaryMetric(name='flops/rho')")
    isoflop = shown["pass@1 on heldout against rho, rung 2"]
    assert str(isoflop.y) == "SummaryMetric(name='rung/2/heldout/pass@1')"
    assert str(shown["Common judge against pass@1 on gsm8k"].y) == "SummaryMetric(name='rung/2/gsm8k/judge')"


def test_every_metric_of_the_dashboard_is_one_that_runs_log(sweep: Path) -> None:
    from analysis.dashboard import PLANNED_RHO, contents, panels
    from race_sweeps.tracking.rows import identity, load_config, rows

    point = RunFolder(sweep / "points" / "aaaaaaaaaa")
    logged = {key for row in rows(point, -1) for key in row.values}
    for found in panels(contents(sweep)).values():
        for panel in found:
            axes = [panel.x, *(panel.y if isinstance(panel.y, list) else [panel.y])]
            names = {axis if isinstance(axis, str) else axis.name for axis in axes}
            assert names - {PLANNED_RHO} <= logged, panel.title
    first, second = PLANNED_RHO.split(".")
    assert second in identity(point, load_config(point)).config[first]


def test_the_dashboard_is_saved_where_there_is_a_key(
    sweep: Path, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(server, monkeypatch)
    assert main(["dashboard", str(sweep)]) == 0
    saved = [r["variables"] for r in server.requests if "upsertView" in r["query"]]
    assert [(v["type"], v["entityName"], v["projectName"]) for v in saved] == [
        ("project-view", "team", "race-sweeps"),
        ("runs", "team", "race-sweeps"),
    ]
    assert "flops/total" in saved[0]["spec"]
    assert "stacked-area" in saved[1]["spec"]
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_dashboard_needs_an_evaluation(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for evals in sweep.glob("points/*/evals.jsonl"):
        evals.unlink()
    assert main(["dashboard", str(sweep)]) == 2
    assert "no point was evaluated yet" in capsys.readouterr().err
