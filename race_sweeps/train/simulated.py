"""`trainer=simulated`: a grid point without a model. Plan, allocation, ledger, rungs, checkpoints and files are those
of a real run; lengths are drawn around the planned ones, values come from a known response surface. No torch.

Whatever is random is drawn from the run's own settings and the number of the generation, so an attempt that continues
draws what the one before would have.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
import zlib
from typing import Any

from race_sweeps import tracking
from race_sweeps.allocate import minibatches
from race_sweeps.config import DEVICES, RunConfig
from race_sweeps.errors import Stopped
from race_sweeps.evaluate import pass_rates
from race_sweeps.flops import Flops
from race_sweeps.folder import RunFolder, append_rows, json_line, mark_simulated, write_json
from race_sweeps.ledger import Row, Tokens
from race_sweeps.train import checkpoints
from race_sweeps.train.attempt import PHASES, Attempt, run
from race_sweeps.train.response import Response

LENGTH_SPREAD = 0.05
"""Standard deviation of a generation's mean length, as a share of the planned one: the allocator has to steer."""


def run_point(path: str) -> None:
    """Simulate the grid point whose `config.yaml` is in the folder `path`, as `attempt.run` says."""
    run(path, SimulatedRun)


class SimulatedRun(Attempt):
    """State of one attempt at a simulated point."""

    weights = "simulated"

    def __init__(self, config: RunConfig, folder: RunFolder, tracker: tracking.Tracker | None = None) -> None:
        super().__init__(config, folder, tracker)
        mark_simulated(folder.path)
        response, parameters = config.trainer.response, self.policy.shape.parameters
        self.response = Response(response, parameters)
        self.judge = Response(response, parameters, response.judge_shift)
        self.own = self._draw("run").gauss(0.0, response.spread)
        self.step = self.start
        self.saved_at = time.monotonic()

    def execute(self) -> None:
        """Spend the budget and write `result.json`; raises `Stopped` after a checkpoint when told to stop."""
        signal.signal(signal.SIGTERM, self.request_stop)
        if 0 not in self.evaluated:
            self._evaluate([0])
        while not self.allocator.finished:
            time.sleep(self.config.trainer.pace)
            self._generation()
            if reached := self.rungs_reached():
                self._evaluate(reached)
            stop = self.stop_requested and not self.allocator.finished
            if stop or time.monotonic() - self.saved_at >= self.config.train.checkpoint_seconds:
                self._save()
            if stop:
                raise Stopped(f"{self.folder.path}: checkpointed at step {self.step}")
        self.write_result()

    def _draw(self, *what: object) -> random.Random:
        """A random stream for `what`, of this run's settings alone: the same on any machine and after any restart."""
        config = self.config
        names = (config.model.name, config.reward.name, config.update_fraction.name, config.budget.flops)
        return random.Random(" ".join(map(str, (config.trainer.response.noise_seed, config.seed, *names, *what))))

    def _seconds(self, flops: float) -> float:
        """What `flops` would take on the device of the plan; 0 where it names none."""
        device = self.config.plan.device
        return flops / (DEVICES[device].flops * self.config.plan.utilisation) if device else 0.0

    def _generation(self) -> None:
        config, policy, allocator = self.config, self.policy, self.allocator
        index, first = allocator.generations, self.step + 1
        rows = allocator.next_groups() * config.train.group
        prompt = config.rollout.expected_prompt
        factor = self._draw("lengths", index).gauss(1.0, LENGTH_SPREAD)
        length = min(config.rollout.max_completion, max(1, round(config.rollout.expected_completion * factor)))
        search = self._flops(policy.search(prompt, length) * rows)._replace(
            paper=policy.paper_search(rows * (prompt + length))
        )
        reward = self._flops(rows * allocator.costs.reward)
        sampled, read = Tokens(rows * prompt, rows * length), Tokens()
        self.record(
            Row(first, "search", search, sampled, rows, self._seconds(search.model)),
            Row(first, "reward", reward, read, rows, self._seconds(reward.model)),
        )
        train = policy.train(prompt, length)
        old = policy.score(prompt, length) if config.train.old_logprobs == "trainer" else 0
        reference = rows * policy.score(prompt, length, adapter=False) if config.train.beta > 0 else 0
        passes = allocator.row_passes([train] * rows, [old] * rows, reference)
        extra = min(passes, rows) * old + reference
        paper = policy.paper_learning(rows * (prompt + length))
        steps, written = [], []
        for part in minibatches(range(passes), config.train.minibatch):
            self.step += 1
            trained, attempt = len(part), self.writer.attempt
            learning = self._flops(trained * train + extra)._replace(paper=paper)
            tokens, seconds = Tokens(trained=trained * (prompt + length)), self._seconds(learning.model)
            steps.append(Row(self.step, "learning", learning, tokens, trained, seconds, attempt))
            allocator.record(steps[-1])
            written.append(self._metrics(index, trained, length))
            extra = paper = 0
        self.writer.write(steps)  # at once: a thousand points would wait for the disk most of all
        with self.folder.metrics.open("a", encoding="utf-8") as file:
            file.write("".join(map(json_line, written)))

    @staticmethod
    def _flops(model: int) -> Flops:
        """Nothing is executed and no batch is padded: the executed FLOPs of a simulation are the model's."""
        return Flops(model, model, 0)

    def _metrics(self, generation: int, rows: int, length: int) -> dict[str, Any]:
        spent = self.allocator.spent
        return {
            "v": 1,
            "step": self.step,
            "generation": generation,
            "completions": spent.rows["search"],
            "rows": rows,
            **{f"flops_{p}": spent.model(p) for p in PHASES},
            "flops_total": spent.total,
            "rho": spent.rho,
            "reward": self._value(self.response),
            "completion_length": length,
            "simulated": True,
        }

    def _value(self, response: Response) -> float:
        """The surface where the run is now, with the run's own deviation (none before training)."""
        spent = self.allocator.spent
        if not spent.rho:
            return response.value(0, None)
        return min(1.0, max(0.0, response.value(spent.total, spent.rho) + self.own))

    def _evaluate(self, rungs: list[int]) -> None:
        """As the real evaluation, every problem as hard as any other; one random stream for all runs' sampling noise
        would tie them together, so each has its own."""
        import numpy as np

        config, step = self.config, self.step if rungs != [0] else 0
        samples, problems = config.eval.samples, config.eval.problems
        prompt, length = config.rollout.expected_prompt, config.rollout.expected_completion
        cost = Row(step, "eval", Flops(), Tokens(), 0, 0.0)
        written = []
        for name, count in (("heldout", problems), *((n, d.limit or problems) for n, d in config.eval.sets.items())):
            seed = zlib.crc32(str(self._draw("evaluation", name, rungs).random()).encode())
            hits = np.random.default_rng(seed).binomial(samples, self._value(self.response), count)
            correct = [i < hit for hit in hits.tolist() for i in range(samples)]
            rates = pass_rates(correct, samples, config.eval.pass_at)
            metrics = {
                "set": name,
                "problems": count,
                "samples": samples,
                "temperature": config.eval.temperature,
                **rates,
                "native_reward": rates["pass@1"],
                "native_reward_se": rates["pass@1_se"],
                "true": self.response.value(self.allocator.spent.total if step else 0, self.allocator.spent.rho),
                **(self._judged(name, rungs, len(correct)) if config.judge.name else {}),
                "judge_identity": "simulated" if config.judge.name else None,
                "truncated": 0.0,
                "format": 1.0,
                "mean_length": float(length),
            }
            rows = count * samples
            flops = self._flops(rows * self.policy.search(prompt, length))
            cost = cost.plus(flops, Tokens(rows * prompt, rows * length), rows, self._seconds(flops.model))
            written += [self.eval_row(step, rung, metrics) for rung in rungs]
        self.record(cost)
        append_rows(self.folder.evals, written)
        self.evaluated.update(rungs)

    def _judged(self, name: str, rungs: list[int], texts: int) -> dict[str, float]:
        """The judge's mean score, as uncertain as that of as many yes-or-no verdicts."""
        value = self._value(self.judge)
        error = (value * (1 - value) / texts) ** 0.5
        drawn = self._draw("judge", name, rungs).gauss(value, error)
        return {"judge": min(1.0, max(0.0, drawn)), "judge_se": error}

    def _save(self) -> None:
        """A checkpoint: all there is to keep is where the run was. The newest two stay."""
        self.writer.sync()
        path = self.folder.checkpoints / f"checkpoint-{self.step}"
        write_json(path / "state.json", {"step": self.step, "simulated": True})
        checkpoints.seal(path, self.allocator.spent.total)
        for old in sorted(self.folder.checkpoints.glob("checkpoint-*"), key=checkpoints.step_of)[:-2]:
            shutil.rmtree(old)
        self.saved_at = time.monotonic()
        self.tracker.permanent(self.step)
