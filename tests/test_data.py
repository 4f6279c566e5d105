"""Problems from files, and the order in which they are drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from race_sweeps import data
from race_sweeps.data import PromptStream
from race_sweeps.errors import UserError
from tests.conftest import compose_one


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def gsm8k_rows(n: int) -> list[dict[str, str]]:
    return [{"question": f"What is {i} + {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(n)]


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


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "q"}, "line 3: field 'answer' must be text; this row has the fields 'question'"),
        ({"question": "", "answer": "#### 1"}, "line 3: field 'question' must be text"),
        ({"question": "q", "answer": "42"}, "line 3: field 'answer': no final answer after '####'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, str], says: str) -> None:
    path = write(tmp_path / "rows.jsonl", [*gsm8k_rows(2), row, *gsm8k_rows(30)])
    with pytest.raises(UserError) as caught:
        data.load(compose_one("model=smollm2-135m", f"data.path={path}"), chat=True)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "the file is empty"),
        (b"[1, 2]\n", "line 1: not an object but a list"),
        (b'{"question": "q"', "line 1: not JSON"),
        (b"\xff\xfe\x00", "cannot be read as text"),
    ],
)
def test_a_file_that_is_not_jsonl_is_refused(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text)
    with pytest.raises(UserError) as caught:
        data.load(compose_one("model=smollm2-135m", f"data.path={path}"), chat=True)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


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
    config = compose_one("model=smollm2-135m")
    with pytest.raises(UserError, match=r"data\.path"):
        data.load(replace(config), chat=True)


def test_prompt_stream_is_an_endless_seeded_permutation() -> None:
    stream = PromptStream(10, seed=3)
    order = [stream[k] for k in range(30)]
    assert all(sorted(order[e : e + 10]) == list(range(10)) for e in (0, 10, 20))
    assert order[:10] != order[10:20]
    assert PromptStream(10, seed=3)[25] == order[25]
    assert [PromptStream(10, seed=4)[k] for k in range(10)] != order[:10]
