"""`FlopsCallback` in plain TRL scripts, against torch's count of what they ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from race_sweeps import ledger
from race_sweeps.errors import UserError
from tests.flops_cases import eager_tiny
from tests.flops_counting import counted

pytestmark = pytest.mark.slow
STEPS = 3


def make_trainer(kind: str, parent: Path, *, adapter: bool = True, reward: Any = None, **settings: Any) -> Any:
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer

    arguments = {
        "output_dir": str(parent / "run"), "max_steps": STEPS, "per_device_train_batch_size": 4, "num_generations": 4,
        "gradient_accumulation_steps": 2, "max_completion_length": 12, "report_to": [], "logging_steps": 1,
        "use_cpu": True, "bf16": False, "dataloader_pin_memory": False, "disable_tqdm": True, "save_strategy": "no",
        "gradient_checkpointing": False, **settings,
    }  # fmt: skip
    folder = eager_tiny(parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    questions = ["7+3*8=", "1+2=", "5*5-1+2=", "9-4="] * 4
    return getattr(trl, f"{kind}Trainer")(
        model=str(folder),
        args=getattr(trl, f"{kind}Config")(**arguments),
        reward_funcs=[lambda completions, **_: [float(len(c) % 3) for c in completions], *([reward] if reward else [])],
        reward_processing_classes=[None, *([tokenizer] if reward else [])],
        train_dataset=Dataset.from_dict({"prompt": questions}),
        eval_dataset=Dataset.from_dict({"prompt": questions[:4]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if adapter else None,
    )


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("GRPO", {}),  # generation and step aligned: no old log-probs
        ("GRPO", {"num_iterations": 2, "beta": 0.05, "steps_per_generation": 4, "max_steps": 5}),
        ("GRPO", {"adapter": False, "gradient_checkpointing": True, "pad_to_multiple_of": 8}),
        ("GRPO", {"adapter": False, "beta": 0.05, "loss_type": "grpo", "entropy_coef": 0.01}),
        ("GRPO", {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}),
        ("RLOO", {}),  # always old log-probs
        ("RLOO", {"num_iterations": 2, "beta": 0.05, "gradient_checkpointing": True}),
    ],
)
def test_the_ledger_is_what_ran(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    from race_sweeps.flops.callback import FlopsCallback

    trainer = make_trainer(kind, tmp_path, **settings)
    trainer.add_callback(FlopsCallback(trainer))
    found = counted(trainer.train)

    totals = ledger.read(tmp_path / "run" / "ledger.jsonl").totals
    assert found == sum(flops.executed for flops in totals.flops.values())
    assert 0 < totals.model("learning") < totals.flops["learning"].executed
    logged = [row for row in trainer.state.log_history if "flops/rho" in row]
    assert len(logged) == trainer.state.max_steps
    assert logged[-1]["flops/total"] == totals.total
    assert logged[-1]["flops/rho"] == totals.rho
    assert (totals.model("eval") > 0) == ("eval_steps" in settings)


def test_the_formulas_are_those_of_our_accounting(tmp_path: Path) -> None:
    from race_sweeps.flops.callback import FlopsCallback

    lengths: list[tuple[list[int], list[int]]] = []
    trainer = make_trainer("GRPO", tmp_path, beta=0.05)
    generate = trainer._generate

    def remember(prompts: list[Any]) -> Any:
        result = generate(prompts)
        lengths.append(([len(ids) for ids in result[0]], [len(ids) for ids in result[1]]))
        return result

    trainer._generate = remember
    callback = FlopsCallback(trainer)
    trainer.add_callback(callback)
    trainer.train()
    book, policy = ledger.read(tmp_path / "run" / "ledger.jsonl"), callback.policy
    assert len(lengths) == STEPS
    assert trainer._generate is remember  # everything is put back
    assert "_get_per_token_logps_and_entropies" not in vars(trainer)
    for step, (prompts, completions) in enumerate(lengths, 1):
        pairs = list(zip(prompts, completions, strict=True))
        rows = {row.phase: row for row in book.rows if row.step == step}
        assert rows["search"].flops.model == sum(policy.search(p, t) for p, t in pairs)
        reference = sum(policy.score(p, t, adapter=False) for p, t in pairs)
        assert rows["learning"].flops.model == reference + sum(policy.train(p, t) for p, t in pairs)
        tokens = sum(prompts) + sum(completions)
        assert rows["search"].flops.paper == policy.paper_search(tokens)
        assert rows["learning"].flops.paper == policy.paper_learning(tokens)
        assert vars(rows["search"].tokens) == {
            "prompt": sum(prompts), "completion": sum(completions), "cached": 0, "trained": 0, "modelled": 0
        }  # fmt: skip
        assert rows["learning"].tokens.trained == tokens


def test_a_reward_model_is_charged(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from race_sweeps.flops.callback import FlopsCallback

    config = AutoConfig.from_pretrained(eager_tiny(tmp_path), num_labels=1)
    reward = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    trainer = make_trainer("GRPO", tmp_path, reward=reward)
    trainer.add_callback(FlopsCallback(trainer))
    found = counted(trainer.train)
    totals = ledger.read(tmp_path / "run" / "ledger.jsonl").totals
    assert totals.model("reward") > 0
    assert totals.rows["reward"] == totals.rows["search"] == STEPS * 8
    assert found == sum(flops.executed for flops in totals.flops.values())


def test_a_resumed_run_continues_its_ledger(tmp_path: Path) -> None:
    from race_sweeps.flops.callback import FlopsCallback

    run, path = tmp_path / "run", tmp_path / "run" / "ledger.jsonl"
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer("GRPO", tmp_path, **saving)  # saves step 2, ends after 3
    trainer.add_callback(FlopsCallback(trainer))
    trainer.train()
    whole = ledger.read(path)
    lost = sum(row.flops.model for row in whole.rows if row.step == 3)

    again = make_trainer("GRPO", tmp_path, **{**saving, "max_steps": 4})
    again.add_callback(FlopsCallback(again))
    again.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    book = ledger.read(path)
    assert sorted({row.step for row in book.rows}) == [1, 2, 3, 4]
    assert [row for row in book.rows if row.step <= 2] == [row for row in whole.rows if row.step <= 2]
    assert book.lost_flops == lost > 0
    logged = [row for row in again.state.log_history if "flops/total" in row]
    assert logged[-1]["flops/total"] == book.totals.total


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    from race_sweeps.flops.callback import FlopsCallback

    trainer = make_trainer("GRPO", tmp_path, adapter=False)
    next(trainer.model.parameters()).requires_grad = False
    with pytest.raises(UserError, match="trainable parameters"):
        FlopsCallback(trainer)
    with pytest.raises(UserError, match="has no _generate"):
        FlopsCallback(object())
