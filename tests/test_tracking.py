"""Tracking: what a tracker holds after kills and restarts is what the ledger says, row by row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from race_sweeps import config as configuration
from race_sweeps import ledger, tracking
from race_sweeps.config import TrackingConfig, point_id
from race_sweeps.flops import Flops
from race_sweeps.folder import RunFolder, append_rows, rewrite_rows, write_atomic, write_json
from race_sweeps.ledger import LedgerWriter, Row, Tokens
from race_sweeps.tracking import sinks, wandb_file
from race_sweeps.tracking.follow import follow
from race_sweeps.tracking.rows import StepRow, identity, load_config, rows
from tests.conftest import MakePoint, compose_one
from tests.wandb_server import Server, serving

BIG = 2**53  # beyond it, floats lose integers


class Memory:
    """A sink that remembers."""

    def __init__(self, after: int = -1, total: str | None = None) -> None:
        self.after, self.total = after, total
        self.rows: list[StepRow] = []
        self.complete: bool | None = None

    def write(self, row: StepRow) -> None:
        self.rows.append(row)

    def finish(self, complete: bool) -> None:
        self.complete = complete


def write_steps(folder: RunFolder, start: int, stop: int) -> None:
    """One attempt: steps start+1..stop with integers that no float holds, an evaluation at each tenth."""
    for path in (folder.metrics, folder.evals):
        rewrite_rows(path, lambda row: row["step"] <= start)
    writer = LedgerWriter(folder.ledger, resume_step=start)
    for step in range(start + 1 if start else 0, stop + 1):
        work = [
            Row(step, "search", Flops(BIG + 2 * step + 1, BIG + 5, 7), Tokens(prompt=3, completion=9), 2, 0.25),
            Row(step, "learning", Flops(3 * BIG + step, 4 * BIG + 1, 9), Tokens(trained=12), 2, 0.5),
        ]
        evaluation = Row(step, "eval", Flops(BIG + step, BIG + 3, 0), Tokens(prompt=1, completion=1), 4, 0.1)
        if step % 10 == 0:
            rung = {"v": 1, "step": step, "rung": step // 10, "set": "heldout", "pass@1": step / 100, "budget": 1,
                    "flops": {"total": 5}, "rho": 0.5 if step else None}  # fmt: skip
            append_rows(folder.evals, [rung])
        made = (work if step else []) + ([evaluation] if step % 10 == 0 else [])
        writer.write([replace(row, attempt=writer.attempt) for row in made])
        if step:
            append_rows(folder.metrics, [{"v": 1, "step": step, "reward": step / 50, "loss": None, "flops_total": 1}])


def shown(history: Iterable[dict[str, Any]]) -> dict[tuple[int, str], dict[str, Any]]:
    """The ledger rows in a tracker's history, by (step, phase). Fails on a row shown twice."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for row in history:
        for phase, values in json.loads(row["ledger/rows"]).items():
            key = (row["ledger/step"], phase)
            assert key not in found, key
            found[key] = values
    return found


def assert_equals_the_ledger(folder: RunFolder, history: list[dict[str, Any]]) -> None:
    book = ledger.read(folder.ledger)
    expected = {
        (row.step, row.phase): {**row.flops._asdict(), "tokens": vars(row.tokens), "rows": row.rows}
        for row in book.rows
    }
    assert shown(history) == expected
    assert int(history[-1]["ledger/total"]) == book.totals.total
    for phase in ledger.PHASES:
        parts = [v["model"] for (_, p), v in shown(history).items() if p == phase]
        assert sum(parts) == book.totals.model(phase)
    assert history[-1]["flops/lost"] == pytest.approx(book.lost_flops)
    assert history[-1]["flops/total"] == pytest.approx(book.totals.total)


@pytest.fixture
def point(make_point: MakePoint) -> RunFolder:
    folder = make_point(["model=tiny-s", "tracking=wandb", "tracking.mode=offline"])
    write_json(folder.plan, {"v": 1, "rho": 0.7, "rungs": [5, 10]})
    return folder


def offline_files(folder: RunFolder) -> list[Path]:
    return sorted(folder.path.glob("wandb/offline-run-*/*.wandb"))


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


def test_the_view_is_no_part_of_a_points_identity() -> None:
    assert point_id(compose_one("model=tiny-s")) == point_id(
        compose_one("model=tiny-s", "tracking=wandb", "tracking.mode=offline", "tracking.project=x")
    )


def test_rows_that_a_restart_could_take_back_are_not_shown(point: RunFolder) -> None:
    write_steps(point, 0, 17)
    sink = Memory()
    follow(point, sink, ["permanent 3", "permanent 12"])
    assert [row.step for row in sink.rows] == list(range(13))
    assert sink.complete is False


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), max_size=4))
def test_attempts_show_every_row_that_counts_once(tmp_path_factory: Any, cuts: list[tuple[int, int]]) -> None:
    """However often a run is killed some steps after its last checkpoint: the rows sent over all attempts are the
    ledger's, when each attempt goes on after what was sent."""
    folder = RunFolder(tmp_path_factory.mktemp("point"))
    sent: list[StepRow] = []
    start = 0
    for more, beyond in cuts:
        saved = start + more
        write_steps(folder, start, saved + beyond)
        sink = Memory(sent[-1].step if sent else -1, str(sent[-1].values["ledger/total"]) if sent else None)
        follow(folder, sink, [f"permanent {start}"] * bool(start) + [f"permanent {saved}"])
        sent += sink.rows
        start = saved
    write_steps(folder, start, start + 3)
    sink = Memory(sent[-1].step if sent else -1)
    follow(folder, sink, ["done"])
    assert sink.complete is True
    assert_equals_the_ledger(folder, [row.values for row in [*sent, *sink.rows]])


def test_a_view_whose_work_was_redone_from_an_older_checkpoint_is_refused(point: RunFolder) -> None:
    write_steps(point, 0, 12)
    sink = Memory(after=12, total="12345")
    with pytest.raises(configuration.UserError, match=r"holds 12345 FLOPs at step 12, the ledger [0-9]+: .* delete"):
        follow(point, sink, ["done"])
    assert sink.rows == []


def test_values_are_numbers_and_complete(point: RunFolder) -> None:
    write_steps(point, 0, 10)
    first, *_, last = rows(point, -1)
    assert first.values["eval/heldout/pass@1"] == 0.0
    assert "rung/0/rho" not in first.values
    assert "flops/rho" not in first.values
    assert last.values["rung/1/heldout/pass@1"] == last.values["eval/heldout/pass@1"] == 0.1
    assert last.values["reward/mean"] == 0.2
    assert "train/loss" not in last.values
    assert last.values["tokens/search_completion"] == 9
    assert last.values["seconds/learning"] == 0.5
    assert last.values["flops/eval"] == 2 * BIG + 10
    assert last.values["executed/total"] == 10 * (5 * BIG + 6)
    assert last.values["flops/rho"] == pytest.approx(0.75)


def test_identity_has_the_whole_configuration(point: RunFolder) -> None:
    config = load_config(point)
    run = identity(point, config)
    assert (run.id, run.group, run.job_type) == (point.point_id, "A", "A")
    assert run.tags == ["tiny-s", "sparse", "rho70"]
    assert run.config["planned"] == {"v": 1, "rho": 0.7, "rungs": [5, 10]}
    assert configuration.to_dict(config).items() <= run.config.items()
    write_json(point.result, {"simulated": True})
    assert identity(point, config).tags[-1] == "simulated"


def test_off_costs_nothing(point: RunFolder) -> None:
    code = (
        "import sys; from race_sweeps import tracking; from race_sweeps.config import TrackingConfig\n"
        "from race_sweeps.folder import RunFolder; from pathlib import Path\n"
        "with tracking.tracker(TrackingConfig(), RunFolder(Path(sys.argv[1]))) as t: t.permanent(1); t.done()\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('wandb', 'tensorboard') or m.endswith('sinks')])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(point.path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert not (point.path / tracking.LOG).exists()


# --- real W&B -----------------------------------------------------------------------------------------------------


def test_offline_wandb_after_a_kill_holds_the_ledger(point: RunFolder, no_credentials: None) -> None:
    pytest.importorskip("wandb")
    config = load_config(point)
    write_steps(point, 0, 15)
    with tracking.tracker(config.tracking, point) as first:
        first.permanent(10)
        wait_for(lambda: offline_files(point))
    assert isinstance(first, tracking._Follower)
    first.process.wait(60)
    write_steps(point, 10, 25)  # 11 to 15 are lost and done again
    with tracking.tracker(config.tracking, point) as second:
        second.permanent(10)
        second.permanent(20)
        second.done()
    (file,) = offline_files(point)
    run = wandb_file.read(file)
    assert_equals_the_ledger(point, run.history)
    assert run.finished
    assert (run.run_id, run.group, run.job_type) == (point.point_id, "A", "A")
    assert run.tags == ["tiny-s", "sparse", "rho70"]
    assert run.metrics == {"flops/total": "", "*": "flops/total"}
    expected = json.loads(json.dumps(identity(point, config).config))
    assert {k: v for k, v in run.config.items() if k != "_wandb"} == expected
    assert [row["_step"] for row in run.history] == [row["ledger/step"] for row in run.history] == list(range(26))


def test_a_file_cut_anywhere_reads_up_to_the_cut(point: RunFolder, no_credentials: None, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    write_steps(point, 0, 40)  # several blocks of 32 KiB
    with tracking.tracker(load_config(point).tracking, point) as tracker:
        tracker.done()
    (file,) = offline_files(point)
    content = file.read_bytes()
    assert len(content) > 2 * wandb_file.BLOCK
    whole = wandb_file.read(file).history
    torn = tmp_path / "torn.wandb"
    for size in range(7, len(content), 4001):
        torn.write_bytes(content[:size])
        part = wandb_file.read(torn).history
        assert part == whole[: len(part)]
    torn.write_bytes(b"something else")
    with pytest.raises(configuration.UserError, match=r"not a \.wandb file"):
        wandb_file.read(torn)


def test_no_secret_reaches_the_folder(point: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    secret = "5ec2e7" * 7
    monkeypatch.setenv("WANDB_API_KEY", secret[:40])
    monkeypatch.setenv("HF_TOKEN", "hf_" + secret)
    write_steps(point, 0, 3)
    with tracking.tracker(load_config(point).tracking, point) as tracker:
        tracker.done()
    assert offline_files(point)
    for path in point.path.rglob("*"):
        if path.is_file():
            assert b"5ec2e7" not in path.read_bytes(), path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("wandb")
    with serving() as running:
        monkeypatch.setenv("WANDB_BASE_URL", running.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield running


def test_online_wandb_goes_on_where_the_server_is(server: Server, make_point: MakePoint) -> None:
    """The second attempt sends what the server lacks; its run goes on under the same id."""
    folder = make_point(["model=tiny-s", "tracking=wandb"])
    name, config = folder.point_id, load_config(folder)
    write_steps(folder, 0, 15)
    with tracking.tracker(config.tracking, folder) as first:
        first.permanent(10)
    assert isinstance(first, tracking._Follower)
    assert first.process.wait(60) == 0
    assert [row["ledger/step"] for row in server.history(name)] == list(range(11))
    assert server.run(name)["complete"] == (True, 1)
    write_steps(folder, 10, 25)
    write_json(folder.result, {"v": 1})
    with tracking.tracker(config.tracking, folder) as second:
        second.permanent(10)
        second.done()
    assert_equals_the_ledger(folder, server.history(name))
    assert server.run(name)["complete"] == (True, 0)
    assert "less than the current step" not in (folder.path / tracking.LOG).read_text()
    assert server.run(name)["bucket"]["groupName"] == "A"
    assert sinks.is_uploaded(folder)
    write_json(folder.result, {"v": 2})
    assert not sinks.is_uploaded(folder)


def test_an_online_run_with_other_work_is_not_gone_on_with(
    server: Server, make_point: MakePoint, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_point(["model=tiny-s", "tracking=wandb"])
    write_steps(folder, 0, 3)
    with tracking.tracker(load_config(folder).tracking, folder) as tracker:
        tracker.permanent(3)
    assert isinstance(tracker, tracking._Follower)
    assert tracker.process.wait(60) == 0
    sent = server.history(folder.point_id)
    changed = folder.ledger.read_text().replace(str(BIG + 7), str(BIG + 9))
    folder.ledger.write_text(changed)
    with tracking.tracker(load_config(folder).tracking, folder) as tracker:
        tracker.done()
    assert "its work was redone from an older checkpoint; delete that run" in caplog.text
    assert server.history(folder.point_id) == sent


# --- a tracker that fails -----------------------------------------------------------------------------------------


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def broken(point: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the wandb package by other code, for the follower."""

    def make(code: str, timeout: float = 60) -> TrackingConfig:
        (tmp_path / "fake" / "wandb").mkdir(parents=True)
        (tmp_path / "fake" / "wandb" / "__init__.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
        config = load_config(point)
        config.tracking.timeout = timeout
        write_atomic(point.config, configuration.save(config))
        write_steps(point, 0, 3)
        return config.tracking

    return make


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import time; time.sleep(1000)",
            "wandb did not end within 0.5 s (tracking.timeout); training is not affected",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "wandb failed; training is not affected"),
        ("raise ImportError('gone')", 'wandb failed (wandb is not installed; pip install "race-sweeps[wandb]")'),
        ("def init(**_): raise OSError('no space')\nTable = Settings = dict", "wandb failed (OSError: no space)"),
    ],
    ids=["hangs", "dies", "absent", "raises"],
)
def test_a_failing_tracker_is_one_line(
    code: str, said: str, broken: Any, point: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    config = broken(code, timeout=0.5 if "within 0.5" in said else 60)
    with tracking.tracker(config, point) as tracker:
        tracker.permanent(2)
        tracker.done()
    assert isinstance(tracker, tracking._Follower)
    assert tracker.process.returncode != 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert said in line


def test_a_tracker_that_never_reads_is_abandoned_without_waiting(
    point: RunFolder, broken: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = broken("import time; time.sleep(1000)")
    with tracking.tracker(config, point) as tracker:
        assert isinstance(tracker, tracking._Follower)
        os.kill(tracker.process.pid, signal.SIGSTOP)
        for step in range(10_000):  # more than a pipe holds
            tracker.permanent(step)
        tracker.done()
    assert [record.getMessage() for record in caplog.records] == [
        "tracking: wandb does not answer; training is not affected"
    ]


def test_a_follower_whose_trainer_was_killed_ends_by_itself(point: RunFolder, broken: Any) -> None:
    config = broken("import time; time.sleep(1000)", timeout=0.5)
    with tracking.tracker(config, point) as tracker:
        pass
    assert isinstance(tracker, tracking._Follower)
    assert tracker.process.wait(60) == -signal.SIGKILL


# --- TensorBoard --------------------------------------------------------------------------------------------------


def test_tensorboard_holds_the_ledger(make_point: MakePoint) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    folder = make_point(["model=tiny-s", "tracking=tensorboard"])
    config = load_config(folder)
    write_steps(folder, 0, 14)
    with tracking.tracker(config.tracking, folder) as first:
        first.permanent(9)
    assert isinstance(first, tracking._Follower)
    first.process.wait(60)
    write_steps(folder, 9, 20)
    with tracking.tracker(config.tracking, folder) as second:
        second.done()
    events = EventAccumulator(str(folder.path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    texts = events.Tensors("ledger/rows")
    history = [
        {"ledger/step": event.step, "ledger/rows": make_ndarray(event.tensor_proto).item().decode()} for event in texts
    ]
    totals = [make_ndarray(event.tensor_proto).item() for event in events.Tensors("flops/total")]
    book = ledger.read(folder.ledger)
    assert set(shown(history)) == {(row.step, row.phase) for row in book.rows}
    assert totals[-1] == pytest.approx(book.totals.total)
    assert len(totals) == 21


# --- real training ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_killed_and_resumed_is_tracked_exactly(make_point: MakePoint, no_credentials: None) -> None:
    """Killed after a checkpoint with steps beyond it; the offline run read back from its own file."""
    pytest.importorskip("wandb")
    from tests.test_training import SMALL, attempt, start

    folder = make_point([*SMALL, "tracking=wandb"])
    process = start(folder)
    wait_for(lambda: len(list(folder.checkpoints.glob("checkpoint-*/complete"))) >= 1 and offline_files(folder), 300)
    seen = len(folder.metrics.read_text().splitlines())
    wait_for(lambda: len(folder.metrics.read_text().splitlines()) > seen + 1, 300)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not folder.done
    assert attempt(folder) == 0
    book = ledger.read(folder.ledger)
    assert book.attempts == 2
    (file,) = offline_files(folder)
    run = wandb_file.read(file)
    assert run.finished
    assert_equals_the_ledger(folder, run.history)
    done = json.loads(folder.result.read_text())
    assert int(run.history[-1]["ledger/total"]) == done["flops"]["total"]
    assert run.metrics["*"] == "flops/total"
    assert {f"rung/{rung}/heldout/pass@1" for rung in (0, 1, 2, 3)} <= {key for row in run.history for key in row}
    assert any(key.startswith("rollouts") for row in run.history for key in row)
