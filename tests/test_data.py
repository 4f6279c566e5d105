"""Problems from files, and the order in which they are drawn."""

from __future__ import annotations

import csv
import json
import socket
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from race_sweeps import config as configuration
from race_sweeps import data
from race_sweeps.config import RunConfig
from race_sweeps.data import PromptStream
from race_sweeps.data.contamination import find
from race_sweeps.data.text import normalised
from race_sweeps.errors import UserError
from tests.conftest import compose_one, shared


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def gsm8k_rows(n: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {i} + {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(n)]


def file_config(path: Path, *overrides: str) -> RunConfig:
    return compose_one("model=smollm2-135m", f"data.path={path}", "eval.problems=20", *overrides)


def test_file_rows_become_prompts_in_disjoint_sets(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", gsm8k_rows(400))
    config = compose_one("model=smollm2-135m", f"data.path={path}", "eval.problems=20")
    problems = data.load(config, chat=True)
    assert len(problems.heldout) == 20
    assert 340 <= len(problems.train) <= 380
    assert not {p["question"] for p in problems.train} & {p["question"] for p in problems.heldout}
    first = problems.train[0]
    assert first["prompt"][0]["content"].startswith(first["question"])
    assert first["prompt"][0]["content"].endswith("Answer with the number only.")
    assert int(first["answer"]) % 2 == 0
    assert data.load(config, chat=False).train[0]["prompt"] == first["prompt"][0]["content"]


def test_the_embedded_data_trains_and_reports_on_disjoint_problems() -> None:
    problems = data.load(compose_one("model=tiny-s"), chat=False)
    assert len(problems.train) == 4096
    assert len(problems.heldout) == 1024
    assert not {p["question"] for p in problems.train} & {p["question"] for p in problems.heldout}


QUESTION_MISSING = "field 'question' must be text"
NO_MARK = "field 'answer': no final answer after '####'"
BAD_ROWS = [
    ({"question": "q"}, "field 'answer' must be text"),
    ({"question": "", "answer": "#### 1"}, QUESTION_MISSING),
    ({"question": "q", "answer": "42"}, NO_MARK),
    ({"question": "q", "answer": "a ####  "}, NO_MARK),
    ({"question": "q\0", "answer": "#### 1"}, "field 'question' has characters that are no text"),
]


def write_as(suffix: str, path: Path, rows: list[dict[str, Any]]) -> Path:
    file = path / f"rows{suffix}"
    if suffix == ".jsonl":
        return write(file, rows)
    if suffix == ".json":
        file.write_text(json.dumps(rows), encoding="utf-8")
    elif suffix == ".parquet":
        names = ["question", "answer"]
        table = arrow.table({name: [row.get(name) for row in rows] for name in names})
        parquet.write_table(table, file)
    else:
        with file.open("w", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, ["question", "answer"], delimiter="\t" if suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return file


FORMATS = [(".jsonl", "line 3"), (".json", "row 3"), (".csv", "row 3"), (".tsv", "row 3"), (".parquet", "row 3")]


@pytest.mark.parametrize(("suffix", "place"), FORMATS)
@pytest.mark.parametrize(("row", "says"), BAD_ROWS)
def test_a_bad_row_is_named_in_every_format(
    tmp_path: Path, suffix: str, place: str, row: dict[str, str], says: str
) -> None:
    path = write_as(suffix, tmp_path, [*gsm8k_rows(2), row, *gsm8k_rows(400)])
    with pytest.raises(UserError) as caught:
        data.load(file_config(path), chat=True)
    assert str(caught.value).startswith(f"{path}: {place}: {says}")
    assert "\n" not in str(caught.value)
    problems = data.load(file_config(path, "data.bad_rows=skip", "data.contamination=report"), chat=True)
    read = problems.report["sets"]["train"]
    assert (read["rows"], read["skipped"], len(read["bad"])) == (403, 1, 1)
    assert read["bad"][0].startswith(f"{path}: {place}: {says}")


@pytest.mark.parametrize("suffix", [suffix for suffix, _ in FORMATS])
def test_every_format_gives_the_same_problems(tmp_path: Path, suffix: str) -> None:
    rows = [{"question": f'Say "{i}",\nthen {i} + é?', "answer": f"#### {i}"} for i in range(400)]
    found = data.load(file_config(write_as(suffix, tmp_path, rows)), chat=False)
    expected = data.load(file_config(write_as(".jsonl", tmp_path, rows)), chat=False)
    assert (found.train, found.evals) == (expected.train, expected.evals)
    assert len(found.train) > 300


def test_numbers_are_answers_too(tmp_path: Path) -> None:
    rows = [{"question": f"What is {i}?", "answer": i} for i in range(400)]
    for suffix in (".jsonl", ".parquet"):
        problems = data.load(file_config(write_as(suffix, tmp_path, rows), "data.reference=math"), chat=False)
        assert {p["answer"] for p in problems.train} <= {str(i) for i in range(400)}
    path = write(tmp_path / "rows.jsonl", [{"question": "q", "answer": True}])
    with pytest.raises(UserError, match=r"line 1: field 'answer' must be text \(it is True\)"):
        data.load(file_config(path, "data.reference=math"), chat=False)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.jsonl", b"", "the file is empty"),
        ("rows.jsonl", b"\n\n", "there is no row in it"),
        ("rows.jsonl", b"[1, 2]\n", "line 1: not an object but a list"),
        ("rows.jsonl", b'{"question": "q"', "line 1: not JSON"),
        ("rows.jsonl", b"[" * 100_000, "line 1: not JSON"),
        ("rows.jsonl", b"\xff\xfe\x00", "cannot be read as text"),
        ("rows.jsonl", b'{"question": "\\ud800", "answer": "#### 1"}', "line 1: field 'question' has characters"),
        ("rows.json", b'[{"question": "q"}, 3', "not JSON (Expecting"),
        ("rows.json", b'[{"question": "q", "answer": "#### 1"}, 3]', "row 2: not an object but a int"),
        ("rows.json", b'{"question": "q", "answer": "#### 1"}\n3', "line 2: not an object but a int"),
        ("rows.json", b"[]", "there is no row in it"),
        ("rows.csv", b"question,answer\nq\n", "row 1: 1 fields, the header has 2"),
        ("rows.csv", b"question,answer\nq,#### 1\nq,#### 1,x\n", "row 2: 3 fields, the header has 2"),
        ("rows.csv", b'question,answer\nq,"#### 1\n', "row 1: not CSV"),
        ("rows.csv", b"problem,answer\nq,#### 1\n", "this row has the fields 'problem', 'answer'"),
        ("rows.csv", b"question,answer\n", "there is no row in it"),
        ("rows.parquet", b"PAR1 or not", "row 1: cannot be read as Parquet"),
        ("rows.txt", b"hello", "the name must end in one of .jsonl, .json, .csv, .tsv, .parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        data.load(file_config(path), chat=True)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_hub_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for name in ("datasets.config.HF_HUB_OFFLINE", "huggingface_hub.constants.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, False)  # and restored after the test
    with pytest.raises(UserError) as caught:
        data.load(compose_one("model=smollm2-135m"), chat=True)
    assert "data.hub=openai/gsm8k: split 'train' cannot be loaded from the Hub (" in str(caught.value)
    assert "set data.path=<a local JSONL, JSON, CSV or Parquet file>" in str(caught.value)


def test_a_hub_data_set_is_read_like_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_dataset` takes a folder where it takes an id: the same library, without the network."""
    folder = tmp_path / "hub"
    folder.mkdir()
    write(folder / "train.jsonl", gsm8k_rows(400))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    config = compose_one("model=smollm2-135m", f"data.hub={folder}", "data.subset=null", "eval.problems=20")
    found = data.load(config, chat=True)
    expected = data.load(file_config(folder / "train.jsonl"), chat=True)
    assert (found.train, found.evals) == (expected.train, expected.evals)


# --- what is the same problem ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is $x+1$?", "what is  $x + 1$"),
        ("Find \\dfrac{1}{2}, exactly.", "Find\\, \\frac{1}{2} exactly"),
        ("It costs $1,000!", "It costs 1000."),
        ("Well-known\tfact\n", "well known fact"),
        ("\\left( 1, 2 \\right)", "(1,\\! 2)"),
        ("Evaluate \\text{lcm}(4, 6)", "evaluate \\mathrm{lcm}(4,6)"),
    ],
)
def test_the_same_problem(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 7+3?", "What is 7-3?"),
        ("What is 1.5?", "What is 15?"),
        ("What is 1.5?", "What is 1 5?"),
        ("\\frac{11}{2}", "\\frac{1}{12}"),
        ("x^2", "x^3"),
        ("7+3*8-2=", "7+3*8*2="),
    ],
)
def test_another_problem(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


def test_variants_of_a_problem_stay_on_one_side(tmp_path: Path) -> None:
    rows = [
        {"question": form.format(i), "answer": f"#### {i}"}
        for i in range(300)
        for form in ("What is {} + 1?", "what is  {}+1", "WHAT IS ${}  + 1$!")
    ]
    problems = data.load(file_config(write(tmp_path / "rows.jsonl", rows)), chat=False)
    assert len({p["id"] for p in problems.train}) * 3 == len(problems.train) > 700
    assert not {p["id"] for p in problems.train} & {p["id"] for p in problems.heldout}


# --- evaluation sets and contamination ----------------------------------------------------------------------------


LONG = "A train leaves the station at noon with {} people on board and travels to the sea at 60 miles an hour, how far?"


def contaminated(tmp_path: Path) -> tuple[Path, Path]:
    train = [*gsm8k_rows(400), {"question": LONG.format(12), "answer": "#### 1"}]
    evaluation = [
        {"question": "what is 7+7", "answer": "#### 14"},  # in the training set, written otherwise
        {"question": "Now think. " + LONG.format(12) + " Answer in miles.", "answer": "#### 1"},  # nearly
        {"question": "What is 7 - 7?", "answer": "#### 0"},
        {"question": LONG.format(99), "answer": "#### 2"},  # half of its runs hold the other number
    ]
    return write(tmp_path / "train.jsonl", train), write(tmp_path / "test.jsonl", evaluation)


def with_set(train: Path, evaluation: Path, *overrides: str) -> RunConfig:
    return file_config(train, "eval_sets=gsm8k", f"eval.sets.gsm8k.path={evaluation}", *overrides)


def test_training_problems_of_an_evaluation_set_are_removed_and_told(tmp_path: Path) -> None:
    train, evaluation = contaminated(tmp_path)
    clean = data.load(file_config(train), chat=False)
    problems = data.load(with_set(train, evaluation, "data.overlap=0.7"), chat=False)
    assert list(problems.evals) == ["heldout", "gsm8k"]
    assert [p["answer"] for p in problems.evals["gsm8k"]] == ["14", "1", "0", "2"]
    removed = {p["question"] for p in clean.train} - {p["question"] for p in problems.train}
    assert removed == {"What is 7 + 7?", LONG.format(12)}
    report = problems.report["contamination"]
    assert report["heldout"] == {"action": "remove", "equal": 0, "overlapping": 0, "train": 0, "examples": []}
    assert {k: v for k, v in report["gsm8k"].items() if k != "examples"} == {
        "action": "remove", "equal": 1, "overlapping": 1, "train": 2,
    }  # fmt: skip
    assert report["gsm8k"]["examples"][0] == ["What is 7 + 7?", "what is 7+7"]
    assert problems.report["sets"]["gsm8k"] == {"rows": 4, "skipped": 0, "bad": [], "problems": 4}
    assert problems.report["sets"]["train"]["problems"] == len(problems.train)
    json.dumps(problems.report)


def test_contamination_can_be_reported_or_refused(tmp_path: Path) -> None:
    train, evaluation = contaminated(tmp_path)
    reported = data.load(with_set(train, evaluation, "data.contamination=report", "data.overlap=0.7"), chat=False)
    assert "What is 7 + 7?" in {p["question"] for p in reported.train}
    assert reported.report["contamination"]["gsm8k"]["train"] == 2
    with pytest.raises(
        UserError, match=r"data.contamination=refuse: 2 training problems stand in evaluation set 'gsm8k'"
    ):
        data.load(with_set(train, evaluation, "data.contamination=refuse", "data.overlap=0.7"), chat=False)


@given(st.lists(st.sampled_from([f"w{i}" for i in range(30)]), min_size=3, max_size=30), st.integers(1, 5))
def test_overlap_is_the_share_of_the_evaluation_questions_runs(words: list[str], n: int) -> None:
    text = " ".join(words)
    runs = {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
    half = words[: len(words) // 2]
    kept = {tuple(half[i : i + n]) for i in range(len(half) - n + 1)}
    share = len(kept) / len(runs) if runs else 0
    for overlap in (0.2, 0.5, 1.0):
        found = find([" ".join(half)], [text], n, overlap)
        assert found.overlapping == int(bool(kept) and share >= overlap)
        assert found.equal == 0
    assert find([text], [text], n, 1.0).equal == 1


def test_a_limit_takes_the_same_problems_whatever_their_order(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", gsm8k_rows(400))
    rows = [{"question": f"How much is {i} and {i}?", "answer": f"#### {2 * i}"} for i in range(50)]
    taken = []
    for order in (rows, rows[::-1]):
        evaluation = write(tmp_path / "test.jsonl", order)
        problems = data.load(with_set(train, evaluation, "eval.sets.gsm8k.limit=10"), chat=False)
        taken.append({p["id"] for p in problems.evals["gsm8k"]})
    assert len(taken[0]) == 10
    assert taken[0] == taken[1]


def test_sets_are_composed_from_presets_and_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.jsonl", gsm8k_rows(3))
    monkeypatch.chdir(tmp_path)
    config = file_config(
        path, "eval_sets=[gsm8k,math500]", "+data@eval.sets.mine=file",
        *(f"eval.sets.{name}.path=rows.jsonl" for name in ("gsm8k", "math500", "mine")),
    )  # fmt: skip
    assert list(config.eval.sets) == ["gsm8k", "math500", "mine"]
    assert {source.path for source in config.eval.sets.values()} == {str(path)}  # absolute: workers run elsewhere
    assert config.eval.sets["gsm8k"].split == "test"
    assert (config.eval.sets["math500"].question, config.eval.sets["gsm8k"].reference) == ("problem", "hashes")
    assert configuration.load(configuration.save(config)) == config
    assert configuration.point_id(config) != configuration.point_id(file_config(path))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["eval_sets=gsm8k", "eval.sets.gsm8k.path=/no/such/file"], "eval.sets.gsm8k.path=/no/such/file: no such file"),
        (["eval_sets=gsm8k", "eval.sets.gsm8k.pth=x"], "did you mean 'eval.sets.gsm8k.path'?"),
        (["eval_sets=gsm9k"], "eval_sets=gsm9k: did you mean 'gsm8k'? valid: gsm8k, math500"),
        (
            ["eval_sets=math500", "eval.sets.math500.extract=maths"],
            "eval.sets.math500.extract=maths: did you mean 'math'?",
        ),
        (["eval_sets=math500", "eval.sets.math500.limit=0"], "eval.sets.math500.limit=0: must be at least 1"),
        (["+data@eval.sets.heldout=math500"], "eval.sets.heldout: use letters"),
        (["data.overlap=0"], "data.overlap=0.0: must lie in (0, 1]"),
        (["data.bad_rows=drop"], "data.bad_rows=drop: valid: error, skip"),
        (
            ["model=tiny-s", "data=gsm8k"],
            "data=gsm8k: the embedded tiny policies (tiny-s) read only digits and + - * =",
        ),
        (["model=tiny-s", "eval_sets=gsm8k"], "eval.sets.gsm8k=gsm8k: the embedded tiny policies"),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_one("model=smollm2-135m", *overrides) if "model=tiny-s" not in overrides else compose_one(*overrides)
    assert says in str(caught.value)


# --- real files -----------------------------------------------------------------------------------------------------


def test_real_sets() -> None:
    sets = [f"eval.sets.{name}.path={shared(f'{name}/test.jsonl')}" for name in ("gsm8k", "math500")]
    config = file_config(shared("gsm8k/train.jsonl"), "eval_sets=[gsm8k,math500]", *sets)
    problems = data.load(config, chat=True)
    assert {name: len(rows) for name, rows in problems.evals.items()} == {"heldout": 20, "gsm8k": 1319, "math500": 500}
    found = problems.report["contamination"]
    assert (found["gsm8k"]["equal"], found["gsm8k"]["overlapping"], found["math500"]["train"]) == (0, 1, 0)
    assert "additional hours would it take" in found["gsm8k"]["examples"][0][0]


def test_a_real_file_of_the_polaris_fields() -> None:
    path = shared("train/deepscaler_math.json")
    base = ["model=smollm2-135m", "data=polaris", f"data.path={path}", "eval.problems=50"]
    with pytest.raises(UserError, match=r"deepscaler_math.json: row 887: field 'answer' must be text \(it is None\)"):
        data.load(compose_one(*base), chat=True)
    problems = data.load(compose_one(*base, "data.bad_rows=skip"), chat=True)
    assert problems.report["sets"]["train"]["skipped"] == 4
    texts = {normalised(p["question"]) for p in problems.heldout}
    assert not texts & {normalised(p["question"]) for p in problems.train}


# --- order ----------------------------------------------------------------------------------------------------------


def test_a_last_line_needs_no_newline(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", gsm8k_rows(600))
    path.write_text(path.read_text().rstrip("\n"))
    config = compose_one("model=smollm2-135m", f"data.path={path}")
    problems = data.load(config, chat=True)
    assert len(problems.train) + len(problems.heldout) >= 560


def test_too_few_held_out_problems_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", gsm8k_rows(30))
    with pytest.raises(UserError, match=r"eval.problems=32: .* leaves \d held-out problems"):
        data.load(compose_one("model=smollm2-135m", f"data.path={path}"), chat=True)


def test_a_file_is_needed() -> None:
    config = compose_one("model=smollm2-135m", "data=file")
    with pytest.raises(UserError, match=r"data\.path: data set file reads a file; set data.path="):
        data.load(config, chat=True)


def test_prompt_stream_is_an_endless_seeded_permutation() -> None:
    stream = PromptStream(10, seed=3)
    order = [stream[k] for k in range(30)]
    assert all(sorted(order[e : e + 10]) == list(range(10)) for e in (0, 10, 20))
    assert order[:10] != order[10:20]
    assert PromptStream(10, seed=3)[25] == order[25]
    assert [PromptStream(10, seed=4)[k] for k in range(10)] != order[:10]
