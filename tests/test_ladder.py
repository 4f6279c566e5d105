"""The embedded policies: config without weights, tokenizer, cache, and the build (slow, with a tiny token budget)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from race_sweeps.data import chain
from race_sweeps.errors import UserError
from race_sweeps.flops import ModelShape
from race_sweeps.models import ladder
from race_sweeps.models.cache import cache_folder

SMALL = ladder.Rung(64, 2, 2, 1, 64, ladder.WarmStart(tokens=4_000, batch=16, rise=5))
IN_A_PROCESS = """
import sys
from race_sweeps.models.ladder import Rung, WarmStart, build
words = []
def report(share, said):
    words.append(said)
    print(said, file=sys.stderr, flush=True)
rung = Rung(64, 2, 2, 1, 64, WarmStart(tokens=int(sys.argv[1]), batch=16, rise=5))
print(build("tiny-s", report, rung), words.count("measuring"))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RACE_SWEEPS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- names, shapes, cache ----------------------------------------------------------------------------------------


def test_another_name_is_refused() -> None:
    for call in (ladder.rung_of, ladder.config_dict, ladder.ladder_path, ladder.build):
        with pytest.raises(UserError, match="did you mean 'tiny-s'"):
            call("tiny-xs")


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys\nfrom race_sweeps.models import ladder\n"
        "ladder.config_dict('tiny-m'); ladder.ladder_path('tiny-m')\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_ladder_climbs() -> None:
    shapes = [ModelShape.from_config(ladder.config_dict(name), name) for name in ("tiny-s", "tiny-m", "tiny-l")]
    sizes = [shape.linear for shape in shapes]
    assert all(2 <= larger / smaller <= 4 for smaller, larger in pairwise(sizes))
    assert {shape.head_dim for shape in shapes} == {32}


@pytest.mark.parametrize("name", ladder.LADDER)
def test_config_dict_is_what_transformers_saves(name: str, tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**ladder.config_dict(name))
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    # save_pretrained leaves the class name to the model that is saved, and drops what is None.
    expected = {k: v for k, v in ladder.config_dict(name).items() if v is not None}
    assert {k: saved.get(k, expected[k] if k == "architectures" else None) for k in expected} == expected
    shape = ModelShape.from_config(ladder.config_dict(name), name)
    assert shape == ModelShape.from_path(tmp_path)
    assert shape.parameters == sum(p.numel() for p in Qwen2ForCausalLM(config).parameters())


@pytest.mark.parametrize("sizes", [(64, 2, 4, 2, 64), (96, 2, 2, 3, 64), (100, 2, 3, 1, 64)])
def test_unusable_heads_are_refused(sizes: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(UserError, match="parts of at least 32"):
        ladder.Rung(*sizes, warm_start=ladder.WarmStart(tokens=1))


@pytest.mark.parametrize("bad", [{"tokens": 0}, {"batch": 0}, {"rise": 0}, {"fall": 0.0}, {"fall": 1.5}])
def test_unusable_warm_starts_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="warm start"):
        ladder.WarmStart(**{"tokens": 1, **bad})


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("RACE_SWEEPS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "race_sweeps"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / "home" / ".cache" / "race_sweeps"


def test_any_change_of_recipe_changes_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    rung = ladder.rung_of("tiny-s")
    assert ladder.ladder_path("tiny-s") == ladder.ladder_path("tiny-s", rung)
    others = [
        replace(rung, ffn=rung.ffn * 2),
        replace(rung, spread=0.1),
        replace(rung, warm_start=replace(rung.warm_start, tokens=1)),
        replace(rung, warm_start=replace(rung.warm_start, noise=chain.Noise(0.1, 0.1, 0.1))),
    ]
    paths = {ladder.ladder_path("tiny-s", other) for other in (rung, *others)}
    monkeypatch.setattr(ladder, "FORMAT", 1_000)
    paths.add(ladder.ladder_path("tiny-s"))
    monkeypatch.setattr(ladder, "version", lambda name: "0.0")
    paths.add(ladder.ladder_path("tiny-s"))
    assert len(paths) == 7
    assert all(re.fullmatch(r"tiny-s-[0-9a-f]{10}", path.name) for path in paths)


def test_an_unwritable_cache_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RACE_SWEEPS_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set RACE_SWEEPS_CACHE to a writable folder"):
        ladder.build("tiny-s", rung=SMALL)


# --- tokenizer and measurement -----------------------------------------------------------------------------------


def test_tokenizer_round_trip_and_padding(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ladder.make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.is_fast
    assert tokenizer.chat_template is None
    for row in chain.problems("tune", 20, seed=0):
        text = row["question"] + row["solution"]
        ids = tokenizer(text)["input_ids"]
        assert ids == [ladder.VOCABULARY.index(c) for c in text]
        assert tokenizer.decode(ids) == text
    both = tokenizer(["1+2=", "1+2*3="], padding=True)
    assert both["input_ids"][0][:2] == [tokenizer.pad_token_id] * 2
    assert both["attention_mask"] == [[0, 0, 1, 1, 1, 1], [1] * 6]
    assert (tokenizer.pad_token, tokenizer.eos_token, len(tokenizer)) == ("<pad>", "<eos>", len(ladder.VOCABULARY))
    assert tokenizer("1\n é")["input_ids"][1:] == [tokenizer.unk_token_id] * 3
    assert tokenizer.decode([ladder.VOCABULARY.index("7"), tokenizer.eos_token_id], skip_special_tokens=True) == "7"


def test_the_longest_solution_fits() -> None:
    longest = chain.problem("9*9*9*9*9=")
    assert len(longest["solution"]) + 1 == ladder.MAX_NEW_TOKENS
    assert len(longest["question"]) + ladder.MAX_NEW_TOKENS <= ladder.MAX_POSITIONS


class Scripted:
    """Answers in turn with the given texts; `!` stands for the end of sequence."""

    def __init__(self, sampled: Sequence[str], greedy: Sequence[str]) -> None:
        self.answers = {True: sampled, False: greedy}

    def generate(self, input_ids: Any, do_sample: bool, **_: Any) -> Any:
        import torch

        texts = self.answers[do_sample]
        assert len(texts) == len(input_ids)
        rows = [[ladder.VOCABULARY.index("<eos>" if c == "!" else c) for c in text] for text in texts]
        return torch.cat([input_ids, torch.tensor([row + [0] * (6 - len(row)) for row in rows])], dim=1)


def test_measure_counts_right_answers_that_ended() -> None:
    rows = [chain.problem("1+2="), chain.problem("2*4=")]
    model = Scripted(sampled=["1+2=3!", "1+2=4!", "2*4=8", "2*4=7!"], greedy=["3!", "8"])
    assert ladder.measure(model, ladder.make_tokenizer(), rows, samples=2) == {  # type: ignore[arg-type]
        "problems": 2,
        "pass@1": 0.25,
        "pass@1_greedy": 0.5,
        "pass@2": 0.5,
    }


def test_warm_start_batches_hold_train_questions_and_score_solutions_only() -> None:
    import random

    inputs, labels, read = ladder._batch(random.Random(0), ladder.WarmStart(tokens=1, batch=64))
    assert inputs.shape == labels.shape == (64, 10 + 17 + 1)
    assert read == int((inputs != ladder.VOCABULARY.index("<pad>")).sum())
    lengths = []
    for row, label in zip(inputs.tolist(), labels.tolist(), strict=True):
        text = "".join(ladder.VOCABULARY[i] for i in row)
        question, _, solution = text.partition("=")
        assert chain.split_of(question + "=") == "train"
        assert "".join(ladder.VOCABULARY[i] for i in label if i != -100) == solution.replace("<pad>", "")
        assert label[: len(question) + 1] == [-100] * (len(question) + 1)
        lengths.append(len(chain.steps(solution, question + "=")))
    assert lengths == [1, 2, 3, 4] * 16


# --- builds ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_build_loads_and_generates_and_is_not_repeated() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    seen: list[tuple[float, str]] = []
    folder = ladder.build("tiny-s", lambda share, words: seen.append((share, words)), SMALL)
    assert folder == ladder.ladder_path("tiny-s", SMALL)
    assert [share for share, _ in seen] == sorted(share for share, _ in seen)
    assert seen[-1] == (1.0, "ready")
    assert "measuring" in {words for _, words in seen}

    figures = json.loads((folder / "warm_start.json").read_text())
    assert 4_000 <= figures["tokens"] < 4_000 + 16 * 28
    assert figures["recipe"]["warm_start"]["tokens"] == 4_000
    assert figures["torch"] == torch.__version__
    assert all(0 <= figures[key] <= 1 for key in ("pass@1", "pass@1_greedy", "pass@8"))
    assert figures["pass@1"] <= figures["pass@8"]

    saved = json.loads((folder / "config.json").read_text())
    expected = ladder.config_dict("tiny-s", SMALL)
    assert {key: saved.get(key) for key in expected} == expected
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    out = model.generate(**tokenizer("1+2=", return_tensors="pt", return_token_type_ids=False), max_new_tokens=5)
    assert 5 <= out.shape[1] <= 9

    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert ladder.build("tiny-s", rung=SMALL) == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


@pytest.mark.slow
def test_twice_the_same_bytes_and_the_callers_torch_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    builds = []
    for turn in (1, 2):
        monkeypatch.setenv("RACE_SWEEPS_CACHE", str(tmp_path / str(turn)))
        torch.manual_seed(turn)
        torch.set_num_threads(turn)
        stream = torch.get_rng_state()
        folder = ladder.build("tiny-s", rung=SMALL)
        assert torch.get_num_threads() == turn
        assert torch.equal(torch.get_rng_state(), stream)
        builds.append({f.name: f.read_bytes() for f in folder.iterdir() if f.name != "warm_start.json"})
    assert builds[0] == builds[1]
    assert builds[0].keys() == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.slow
def test_two_processes_build_once(cache: Path) -> None:
    command = [sys.executable, "-c", IN_A_PROCESS, "4000"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [path for path, _ in said] == [str(ladder.ladder_path("tiny-s", SMALL))] * 2
    assert sum(int(builds) for _, builds in said) == 1


@pytest.mark.slow
def test_a_killed_build_leaves_nothing_built_and_the_next_cleans_up(cache: Path) -> None:
    long = replace(SMALL, warm_start=replace(SMALL.warm_start, tokens=10**9))
    process = subprocess.Popen([sys.executable, "-c", IN_A_PROCESS, str(10**9)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "warm start" not in (line := process.stderr.readline()):
        assert line, "the build ended early"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    folder = ladder.ladder_path("tiny-s", long)
    assert not folder.exists()
    assert list(cache.glob(f".{folder.name}.building-*"))

    # The same folder once more, this time with a budget that ends: the hash is pinned, the work is not.
    short = replace(SMALL, warm_start=replace(SMALL.warm_start, tokens=2_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "_digest", lambda name, rung: folder.name.removeprefix(f"{name}-"))
        assert ladder.build("tiny-s", rung=short) == folder
    assert (folder / "model.safetensors").exists()
    assert not list(cache.glob(".*.building-*"))


@pytest.mark.slow
def test_command_line_builds_prints_and_returns_at_once_the_second_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ladder.LADDER, "tiny-s", SMALL)
    ladder.build("tiny-s")
    monkeypatch.setattr(ladder, "build", None)  # nothing may be built any more
    assert ladder.main(["tiny-s", "tiny-s"]) == 0
    out = capsys.readouterr().out
    assert "pass@8" in out
    assert str(ladder.ladder_path("tiny-s")) in out


@pytest.mark.slow
def test_parallel_builds_show_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Workers are fresh processes, so this builds the real smallest policy."""
    assert ladder.main(["tiny-s"]) == 0
    figures = json.loads((ladder.ladder_path("tiny-s") / "warm_start.json").read_text())
    assert 0.1 < figures["pass@1"] < 0.4
    assert figures["pass@8"] > 0.5
    assert "ready" in capsys.readouterr().err


def test_command_line_names_a_wrong_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert ladder.main(["tiny-q"]) == 2
    assert "valid: tiny-s, tiny-m, tiny-l" in capsys.readouterr().err
