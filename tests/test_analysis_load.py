"""Reading a sweep's folder: tables, and what is damaged or unfinished."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from analysis.load import RUN_COLUMNS, Unfinished, find_sweep, load_sweep
from race_sweeps.errors import UserError

RHO = {"rho45": 0.45, "rho55": 0.55, "rho70": 0.70, "rho80": 0.80, "rho90": 0.90}
RUNGS = (100_000_000_000, 200_000_000_000, 400_000_000_000)
START = {"tiny-s": 0.19, "tiny-m": 0.26, "tiny-l": 0.31}
Value = Callable[[str, str, int, int], float]  # (model, update fraction, seed, rung number) -> pass@1


def flat(model: str, fraction: str, seed: int, rung: int) -> float:
    return START.get(model, 0.2) + 0.05 * rung + 0.001 * seed


def split(total: int, rho: float, reward: float = 0.0) -> dict[str, int]:
    learning, scored = round(total * rho), round(total * reward)
    return {"search": total - learning - scored, "learning": learning, "reward": scored, "total": total}


def write_sweep(
    folder: Path,
    *,
    models: Iterable[str] = ("tiny-s", "tiny-m"),
    fractions: Iterable[str] = ("rho45", "rho70", "rho90"),
    seeds: Iterable[int] = (0, 1),
    value: Value = flat,
    simulated: bool = False,
    overrides: Callable[[str, str, int], list[str]] = lambda model, fraction, seed: [],
    reward: str = "sparse",
    over: float = 0.01,
) -> dict[tuple[str, str, int], Path]:
    """A sweep as the documented files describe it, every point finished; point folders by (model, fraction, seed).

    Rungs overshoot by the share `over`; achieved rho is 0.01 above the plan.
    """
    points: list[dict[str, Any]] = []
    folders: dict[tuple[str, str, int], Path] = {}
    for model in models:
        for fraction in fractions:
            for seed in seeds:
                point = f"{len(points):010x}"
                path = folder / "points" / point
                path.mkdir(parents=True)
                folders[model, fraction, seed] = path
                axes = {"model": model, "reward": reward, "update_fraction": fraction, "seed": seed}
                points.append({"id": point, **axes, "overrides": overrides(model, fraction, seed)})
                rho = RHO[fraction]
                write(path / "plan.json", {
                    "v": 1, "budget": RUNGS[-1], "rungs": list(RUNGS), "rho": rho, "kappa": 1.0, "kept": 8.0, "mu": 1.0,
                    "flops": split(RUNGS[-1], rho), "generations": 40, "completions": 5120, "optimizer_steps": 80,
                })  # fmt: skip
                common = {"v": 1, "set": "heldout", "problems": 500, "samples": 4, "temperature": 1.0}
                rows = [{
                    **common, "step": 0, "rung": 0, "budget": 0, "pass@1": START.get(model, 0.2), "pass@1_se": 0.017,
                    "native_reward": 0.2, "truncated": 0.1, "mean_length": 11.5, "flops": split(0, 0), "rho": None,
                    "seconds": 0.0, "time": "2025-01-01T00:00:00+00:00",
                }]  # fmt: skip
                for number, rung in enumerate(RUNGS, 1):
                    total = round(rung * (1 + over))
                    rows.append({
                        **common, "step": 20 * number, "rung": number, "budget": rung,
                        "pass@1": value(model, fraction, seed, number), "pass@1_se": 0.02, "native_reward": 0.3,
                        "truncated": 0.0, "mean_length": 12.25, "flops": split(total, rho + 0.01), "rho": rho + 0.01,
                        "seconds": 10.0 * number, "time": "2025-01-01T00:01:00+00:00",
                    })  # fmt: skip
                lines(path / "evals.jsonl", rows)
                lines(path / "metrics.jsonl", [{"v": 1, "step": s, "flops_total": s * 5 * 10**9} for s in range(1, 81)])
                total = round(RUNGS[-1] * (1 + over))
                write(path / "result.json", {
                    "v": 1, "point": point, "status": "done", **axes, "simulated": simulated,
                    "planned": {"rho": rho, "flops": RUNGS[-1]},
                    "flops": {**split(total, rho + 0.01), "eval": 7 * 10**9, "lost": 3 * 10**9},
                    "executed_flops": split(2 * total, 0.6), "paper_flops": split(total, 0.72), "rho": rho + 0.01,
                    "steps": 80, "generations": 40, "completions": 5120, "attempts": 1,
                    "seconds": {"search": 12.0, "learning": 16.0, "reward": 0.5, "eval": 4.0},
                })  # fmt: skip
    write(folder / "sweep.json", {
        "v": 1, "sweep": folder.name, "command": ["python", "-m", "race_sweeps", "-m", "scale=tiny"],
        "created": "2025-01-01T00:00:00+00:00", "git": {"revision": "abc123", "dirty": True},
        "versions": {"python": "3.11.7"}, "simulated": simulated, "points": points,
    })  # fmt: skip
    return folders


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit(path: Path, **changes: Any) -> None:
    write(path, {**json.loads(path.read_text()), **changes})


def test_whole_sweep(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s")
    sweep = load_sweep(tmp_path / "s")
    assert (sweep.name, sweep.simulated, sweep.points) == ("s", False, 12)
    assert (sweep.skipped, sweep.unfinished, sweep.notes) == ([], [], [])
    assert tuple(sweep.runs.columns) == RUN_COLUMNS
    assert len(sweep.runs) == 12 * 4
    assert len(sweep.results) == 12
    first = sweep.runs[sweep.runs["point"] == "0000000000"].to_dict("records")
    start, last = first[0], first[3]
    assert (start["rung"], start["budget"], start["c_total"], start["gain"]) == (0, 0, 0, 0)
    assert math.isnan(start["rho"])
    assert math.isnan(start["c_error"])
    assert math.isnan(start["executed_total"])
    assert (last["model"], last["reward"], last["allocation"], last["seed"]) == ("tiny-s", "sparse", "rho45", 0)
    assert (last["setting"], last["rung"], last["budget"], last["step"]) == ("sparse", 3, 4e11, 60)
    assert last["c_total"] == 4.04e11
    assert last["c_search"] + last["c_learning"] + last["c_reward"] == last["c_total"]
    assert last["c_error"] == pytest.approx(0.01, abs=1e-12)
    assert last["rho_planned"] == 0.45
    assert last["rho_error"] == pytest.approx(0.01, abs=1e-12)
    assert last["gain"] == pytest.approx(0.15, abs=1e-12)
    assert (last["executed_total"], last["paper_total"]) == (8.08e11, 4.04e11)
    assert (last["lost_flops"], last["eval_flops"], last["seconds_learning"]) == (3e9, 7e9, 16.0)
    assert sweep.runs["last"].sum() == 12
    assert sweep.runs.loc[~sweep.runs["last"], "lost_flops"].isna().all()


def test_unfinished_points_tell_how_far_they_are(tmp_path: Path) -> None:
    folders = list(write_sweep(tmp_path / "s").values())
    for path in folders[:4]:
        (path / "result.json").unlink()
    lines(folders[0] / "metrics.jsonl", [{"step": 1, "flops_total": 10**9}, {"step": 7, "flops_total": 10**11}])
    (folders[1] / "metrics.jsonl").write_text("")
    for file in list(folders[2].iterdir()):
        file.unlink()
    folders[2].rmdir()
    (folders[3] / "metrics.jsonl").write_text("broken\n" + '{"step": 1, "flops_total": 5}\n')
    sweep = load_sweep(tmp_path / "s")
    assert sweep.unfinished == [
        Unfinished("0000000000", 0.25, "stopped or running at step 7"),
        Unfinished("0000000001", 0.0, "begun, no optimizer step yet"),
        Unfinished("0000000002", 0.0, "not started"),
    ]
    assert [s.point for s in sweep.skipped] == ["0000000003"]
    assert sweep.skipped[0].reason.startswith("points/0000000003/metrics.jsonl: line 1 is damaged")
    assert len(sweep.results) == 8
    assert sweep.points == 12
    assert "no finished run yet for: tiny-s rho45, tiny-s rho70" in sweep.notes


def test_no_finished_point_is_no_error_of_loading(tmp_path: Path) -> None:
    for path in write_sweep(tmp_path / "s").values():
        (path / "result.json").unlink()
    sweep = load_sweep(tmp_path / "s")
    assert sweep.runs.empty
    assert [u.fraction for u in sweep.unfinished] == [1.0] * 12
    assert not sweep.simulated


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: (p / "result.json").write_text('{"v": 1, "poi'), "points/0000000000/result.json is damaged"),
        (lambda p: (p / "result.json").write_bytes(b"\xff\xfe\x00"), "points/0000000000/result.json is damaged"),
        (lambda p: (p / "result.json").write_text("[1]"), "points/0000000000/result.json is damaged (not a JSON"),
        (lambda p: edit(p / "result.json", model=None), "points/0000000000/result.json: model is None, not a name"),
        (lambda p: edit(p / "result.json", point="ffff"), "points/0000000000/result.json: belongs to point 'ffff'"),
        (lambda p: edit(p / "result.json", planned=3), "points/0000000000/result.json: planned is missing"),
        (lambda p: edit(p / "result.json", flops={"search": 1, "learning": 1, "reward": 0, "total": 3}),
         "points/0000000000/result.json: flops.total is not search + learning + reward"),
        (lambda p: (p / "evals.jsonl").unlink(), "points/0000000000/evals.jsonl is missing"),
        (lambda p: (p / "evals.jsonl").write_text(""), "points/0000000000/evals.jsonl has no evaluation after"),
        (lambda p: (p / "evals.jsonl").write_text("x\n" + (p / "evals.jsonl").read_text()),
         "points/0000000000/evals.jsonl: line 1 is damaged"),
        (lambda p: (p / "evals.jsonl").write_text((p / "evals.jsonl").read_text().replace("0.2,", "NaN,", 1)),
         "points/0000000000/evals.jsonl: line 1: native_reward is nan, not a number"),
        (lambda p: (p / "evals.jsonl").write_text((p / "evals.jsonl").read_text().replace('"pass@1"', '"pass"')),
         "points/0000000000/evals.jsonl: line 1: pass@1 is None, not a number"),
    ],
)  # fmt: skip
def test_damaged_point_is_reported_and_left_out(tmp_path: Path, damage: Callable[[Path], Any], reason: str) -> None:
    folders = list(write_sweep(tmp_path / "s").values())
    damage(folders[0])
    sweep = load_sweep(tmp_path / "s")
    assert [s.point for s in sweep.skipped] == ["0000000000"]
    assert sweep.skipped[0].reason.startswith(reason)
    assert "\n" not in sweep.skipped[0].reason
    assert "0000000000" not in set(sweep.runs["point"])
    assert len(sweep.results) == 11


def test_torn_last_evaluation_leaves_the_rungs_before_it(tmp_path: Path) -> None:
    path = next(iter(write_sweep(tmp_path / "s").values()))
    text = (path / "evals.jsonl").read_text()
    (path / "evals.jsonl").write_text(text[:-40])
    sweep = load_sweep(tmp_path / "s")
    assert list(sweep.runs.loc[sweep.runs["point"] == path.name, "rung"]) == [0, 1, 2]
    assert sweep.notes == [
        "point 0000000000: evals.jsonl ends in a torn line, which is left out",
        "point 0000000000 (tiny-s, rho45, seed 0) has no evaluation at rung 3",
    ]
    # Totals of the run must not stand at a rung that is not the last.
    assert sweep.runs.loc[sweep.runs["point"] == path.name, "executed_total"].isna().all()
    assert sweep.results.loc[sweep.results["point"] == path.name, "executed_total"].item() == 8.08e11


def test_missing_rung_of_one_run(tmp_path: Path) -> None:
    path = next(iter(write_sweep(tmp_path / "s").values()))
    rows = [json.loads(line) for line in (path / "evals.jsonl").read_text().splitlines()]
    lines(path / "evals.jsonl", [row for row in rows if row["rung"] != 2])
    sweep = load_sweep(tmp_path / "s")
    assert list(sweep.runs.loc[sweep.runs["point"] == path.name, "rung"]) == [0, 1, 3]
    assert sweep.notes == ["point 0000000000 (tiny-s, rho45, seed 0) has no evaluation at rung 2"]


def test_rung_evaluated_again_counts_once(tmp_path: Path) -> None:
    path = next(iter(write_sweep(tmp_path / "s").values()))
    rows = [json.loads(line) for line in (path / "evals.jsonl").read_text().splitlines()]
    lines(path / "evals.jsonl", [*rows, {**rows[2], "pass@1": 0.5}])
    sweep = load_sweep(tmp_path / "s")
    mine = sweep.runs[sweep.runs["point"] == path.name]
    assert list(mine["rung"]) == [0, 1, 2, 3]
    assert list(mine["pass@1"])[2] == 0.5


def test_several_evaluation_sets(tmp_path: Path) -> None:
    path = next(iter(write_sweep(tmp_path / "s").values()))
    rows = [json.loads(line) for line in (path / "evals.jsonl").read_text().splitlines()]
    lines(path / "evals.jsonl", [*rows, *({**row, "set": "hard", "pass@1": row["pass@1"] / 2} for row in rows[1:])])
    sweep = load_sweep(tmp_path / "s")
    hard = sweep.runs[sweep.runs["set"] == "hard"]
    assert len(hard) == 3
    assert hard["gain"].isna().all()  # no start on that set: no gain is made up from the other


def test_result_that_is_not_done_is_unfinished(tmp_path: Path) -> None:
    path = next(iter(write_sweep(tmp_path / "s").values()))
    edit(path / "result.json", status="failed")
    sweep = load_sweep(tmp_path / "s")
    assert sweep.unfinished == [Unfinished("0000000000", None, "status is 'failed'")]
    assert len(sweep.results) == 11


def test_manifest_missing_or_damaged(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s")
    (tmp_path / "s" / "sweep.json").write_text("{")
    sweep = load_sweep(tmp_path / "s")
    assert len(sweep.results) == 12
    assert sweep.name == "s"
    assert sweep.notes[0].startswith("sweep.json is damaged")
    (tmp_path / "s" / "sweep.json").unlink()
    assert load_sweep(tmp_path / "s").notes == [
        "sweep.json is missing: the command and the planned points are not known"
    ]


def test_manifest_cannot_lead_out_of_the_sweep(tmp_path: Path) -> None:
    write_sweep(tmp_path / "other", models=["tiny-l"])
    write_sweep(tmp_path / "s")
    manifest = json.loads((tmp_path / "s" / "sweep.json").read_text())
    odd = [{"id": "../../other/points/0000000000"}, {"id": 3}, "text", {}]
    edit(tmp_path / "s" / "sweep.json", points=[*manifest["points"], *odd])
    sweep = load_sweep(tmp_path / "s")
    assert set(sweep.runs["model"]) == {"tiny-s", "tiny-m"}
    assert len([n for n in sweep.notes if "without a usable point id" in n]) == 4


def test_point_that_the_manifest_lacks_is_included_and_said(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s")
    manifest = json.loads((tmp_path / "s" / "sweep.json").read_text())
    edit(tmp_path / "s" / "sweep.json", points=manifest["points"][:-1])
    sweep = load_sweep(tmp_path / "s")
    assert len(sweep.results) == 12
    assert sweep.notes == ["1 point folder(s) are not in sweep.json and are included: 000000000b"]


def test_one_name_for_several_targets_is_told_apart_by_planned_rho(tmp_path: Path) -> None:
    folders = write_sweep(tmp_path / "s")
    for (_, fraction, _), path in folders.items():
        if fraction == "rho45":
            edit(path / "result.json", update_fraction="rho70")
    sweep = load_sweep(tmp_path / "s")
    assert set(sweep.runs["allocation"]) == {"rho70 at 0.45", "rho70 at 0.70", "rho90"}


def test_varying_overrides_split_settings(tmp_path: Path) -> None:
    def overrides(model: str, fraction: str, seed: int) -> list[str]:
        return ["scale=tiny", f"model={model}", f"seed={seed}", f"+train.learning_rate={0.001 * (1 + seed)}"]

    write_sweep(tmp_path / "s", overrides=overrides)
    runs = load_sweep(tmp_path / "s").runs
    assert set(runs["setting"]) == {"sparse, train.learning_rate=0.001", "sparse, train.learning_rate=0.002"}


def test_simulated_by_manifest_or_by_one_result(tmp_path: Path) -> None:
    write_sweep(tmp_path / "a", simulated=True)
    assert load_sweep(tmp_path / "a").simulated
    path = next(iter(write_sweep(tmp_path / "b").values()))
    edit(path / "result.json", simulated=True)
    sweep = load_sweep(tmp_path / "b")
    assert sweep.simulated
    assert sweep.results["simulated"].sum() == 1


def test_find_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sweep(tmp_path / "runs" / "pilot", seeds=[0])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pilot").mkdir()  # a folder of the same name that is no sweep does not hide it
    assert find_sweep("pilot") == Path("runs/pilot")
    assert find_sweep(str(tmp_path / "runs" / "pilot")) == tmp_path / "runs" / "pilot"
    with pytest.raises(
        UserError, match=r"^'pilto' is not a sweep; sweeps in runs/: did you mean 'pilot'\? valid: pilot$"
    ):
        find_sweep("pilto")
    with pytest.raises(UserError, match="sweeps in runs/: valid: pilot"):
        find_sweep("runs")
    with pytest.raises(UserError, match="'elsewhere/x' is not a sweep; sweeps in runs/"):
        find_sweep("elsewhere/x")


def test_missing_and_empty_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is none in runs/"):
        find_sweep("anything")
    with pytest.raises(UserError):
        find_sweep("")
    (tmp_path / "runs" / "new" / "points").mkdir(parents=True)
    with pytest.raises(UserError, match=r"runs/new has no points yet"):
        load_sweep(Path("runs/new"))
