"""Step labels: each format's indexing by hand, and what the embedded process reward models make of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from race_sweeps.errors import UserError
from race_sweeps.process_labels import Labelled, agreement, auc, first_error, read
from tests.conftest import shared

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(*rows: object) -> Path:
        file = tmp_path / "labels.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    return make


def test_processbench_counts_from_0_and_minus_1_is_all_right(write: Write) -> None:
    rows = [{"problem": "p", "steps": ["a", "b", "c"], "label": label} for label in (-1, 0, 1, 2)]
    found = read(write(*rows), "processbench")
    assert [one.first_error for one in found] == [-1, 0, 1, 2]
    assert found[2].right == (True, False, None)
    assert found[0] == Labelled("p", ("a", "b", "c"), (True, True, True))


def test_mr_gsm8k_counts_from_1(write: Write) -> None:
    row = {"question": "q", "model_output_steps": ["a", "b"], "model_output_solution_correctness": "wrong",
           "model_output_solution_first_error_step": 2}  # fmt: skip
    right = {**row, "model_output_solution_correctness": "correct", "model_output_solution_first_error_step": "N/A"}
    assert [one.first_error for one in read(write(row, right), "mr_gsm8k")] == [1, -1]


def test_math_shepherd_marks_stand_at_the_steps_ends(write: Write) -> None:
    text = "Q? Step 1: one +\nStep 2: two -\nStep 3: three +"
    (found,) = read(write({"input": "", "label": text}), "math_shepherd")
    assert found == Labelled("Q?", ("Step 1: one", "Step 2: two", "Step 3: three"), (True, False, True))


def test_prm800k_follows_the_path_taken_and_keeps_the_others_as_ends(write: Write) -> None:
    def step(chosen: int | None, *rated: tuple[str, int]) -> dict[str, object]:
        completions = [{"text": text, "rating": rating} for text, rating in rated]
        return {"completions": completions, "chosen_completion": chosen, "human_completion": None}

    steps = [step(0, ("a", 1), ("b", -1)), step(None, ("c", -1))]
    found = read(write({"question": {"problem": "q"}, "label": {"steps": steps}}), "prm800k")
    assert found == [Labelled("q", ("b",), (False,)), Labelled("q", ("a", "c"), (True, False))]


@pytest.mark.parametrize(
    ("kind", "row", "says"),
    [
        ("processbench", {"problem": "p", "steps": ["a"], "label": 1}, "row 1: label=1 of 1 steps"),
        ("processbench", {"problem": "p", "label": 0}, "row 1: not a row of processbench: no field 'steps'"),
        ("processbench", {"problem": "p", "steps": ["a"], "label": True}, "row 1: label=True"),
        ("mr_gsm8k", {"question": "q", "model_output_steps": ["a"], "model_output_solution_correctness": "wrong",
                      "model_output_solution_first_error_step": 0}, "they count from 1"),
        ("bigbench_mistake", {"input": "q", "steps": ["a"], "mistake_index": 3}, "mistake_index=3 of 1 steps"),
        ("math_shepherd", {"label": "no steps"}, "label: 'Step 1:'"),
        ("processbnch", {}, "did you mean 'processbench'?"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(write: Write, kind: str, row: object, says: str) -> None:
    with pytest.raises(UserError, match=says.replace("(", r"\(")):
        read(write(row), kind)


@pytest.mark.parametrize(
    ("file", "kind", "solutions", "errors"),
    [
        ("bigbench_mistake/multistep_arithmetic.jsonl", "bigbench_mistake", 300, {-1: 62}),
        ("mr_gsm8k/GPT3_5_eval_results.json", "mr_gsm8k", 173, {}),
    ],
)
def test_published_labels_are_read_whole(file: str, kind: str, solutions: int, errors: dict[int, int]) -> None:
    found = read(shared(f"process_labels/{file}"), kind)
    assert len(found) == solutions
    for label, times in errors.items():
        assert sum(one.first_error == label for one in found) == times
    for one in found:
        assert len(one.steps) == len(one.right)
        assert all(mark is True for mark in one.right[: max(one.first_error, 0)])


def test_the_first_published_rows_by_hand() -> None:
    chain, whole = read(shared("process_labels/bigbench_mistake/multistep_arithmetic.jsonl"), "bigbench_mistake")[:2]
    assert chain.first_error == 3  # "C = ... (7 - 28)" where 7 - -7 * 4 = 35
    assert "(7 - 28)" in chain.steps[3]
    assert whole.first_error == -1
    bob = read(shared("process_labels/mr_gsm8k/GPT3_5_eval_results.json"), "mr_gsm8k")[0]
    assert bob.first_error == 0  # "first_error_step": 1
    raw = shared("process_labels/prm_samples")
    for name, kind in (("math-shepherd", "math_shepherd"), ("prm800k", "prm800k"), ("math-aps", "math_aps"),
                       ("math-aps-tree", "math_aps")):  # fmt: skip
        found = read(raw / f"samples_{name}.jsonl", kind)
        assert found
        assert all(one.steps and len(one.steps) == len(one.right) for one in found)
    janet = read(raw / "samples_math-shepherd.jsonl", "math_shepherd")[0]
    assert [step[:7] for step in janet.steps] == [f"Step {n}:" for n in range(1, 6)]


def test_scores_give_processbenchs_label_and_f1() -> None:
    assert first_error([0.9, 0.5, 0.49]) == 2
    assert first_error([0.9, 0.5]) == -1
    solutions = [
        Labelled("q", ("a", "b"), (True, True)),
        Labelled("q", ("a", "b"), (True, False)),
        Labelled("q", ("a", "b"), (False, None)),
    ]
    found = agreement(solutions, [[0.9, 0.8], [0.7, 0.2], [0.6, 0.1]])
    assert (found.right_accuracy, found.wrong_accuracy, found.steps) == (1.0, 0.5, 5)
    assert found.f1 == pytest.approx(2 / 3)
    assert found.auc == 1.0


def test_auc_counts_ties_half() -> None:
    rng = random.Random(0)
    scores = [rng.randrange(5) / 4 for _ in range(60)]
    right = [rng.random() < 0.4 for _ in scores]
    pairs = [
        (a, b) for a, r in zip(scores, right, strict=True) if r for b, s in zip(scores, right, strict=True) if not s
    ]
    assert auc(scores, right) == pytest.approx(sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs))


@pytest.mark.slow
@pytest.mark.parametrize("size", ["s", "m", "l"])
def test_the_embedded_models_tell_right_from_wrong_steps_of_unseen_problems(size: str) -> None:
    """Held-out problems, solutions of the ladder's noise; the labels are the arithmetic itself."""
    from race_sweeps.data import chain
    from race_sweeps.models import ladder, tiny_prm
    from race_sweeps.rewards.prm import StepScorer
    from tests.conftest import compose_one

    scorer = StepScorer(compose_one("model=tiny-s", f"reward=prm-tiny-{size}").reward.scorer)
    rng, solutions = random.Random(f"held out {size}"), []
    for row in chain.problems("report", 512, seed=1):
        steps = tiny_prm.text_steps(chain.unreliable_solution(rng, row["question"], ladder.NOISE))
        marks = tiny_prm.labels(row["question"], steps, True)
        solutions.append(Labelled(row["question"], tuple(steps), tuple(marks)))
    read_ = scorer.score_steps([s.question for s in solutions], [list(s.steps) for s in solutions], [True] * 512)
    found = agreement(solutions, read_.steps)
    assert found.auc is not None
    # Chance is 1/2 with a standard error below 0.02 at this many steps of either kind.
    print(f"prm-tiny-{size}: AUC {found.auc:.4f}, F1 {found.f1:.4f}, {found.steps} steps, {found.solutions} solutions")
    assert min(sum(m is kind for s in solutions for m in s.right) for kind in (True, False)) > 300
    assert found.auc > 0.6
