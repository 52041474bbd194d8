"""Scores of recorded responses by a reward model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.files import read_json_object
from selfcal_lightning.data.step_settings import RewardSettings, Steps, check_steps
from selfcal_lightning.data.steps import check_marker, step_prefixes
from selfcal_lightning.models.chat_format import load_tokenizer
from selfcal_lightning.models.folders import check_files, check_model_folder, config_path, files_sha256, weights_sha256
from selfcal_lightning.records import Question, QuestionSamples, Sample
from selfcal_lightning.rewards.formats import REWARD_FORMATS, RewardFormat, Score, reward_format
from selfcal_lightning.rewards.layouts import RewardEncoder, RewardInput, bare_question, batches, runs_that_fit

if TYPE_CHECKING:
    from selfcal_lightning.rewards.model import RewardModel, VLLMRewardModel

REWARD_FILE = "reward.json"
_CLASSIFIER = "ForTokenClassification"


@dataclass(frozen=True)
class RewardFile:
    format: str
    steps: Steps
    levels: tuple[float, float]
    target: str

    def write(self, folder: Path) -> None:
        (folder / REWARD_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_reward_file(folder: Path) -> RewardFile | None:
    path = folder / REWARD_FILE
    if not path.is_file():
        return None
    content = read_json_object(path)
    wanted = {"format", "steps", "levels", "target"}
    if not wanted <= content.keys() or len(content["levels"]) != 2:
        raise InputError(f"{path} must hold {', '.join(sorted(wanted))}, but got {content}. Export the model again.")
    check_steps(f"steps of {path}", str(content["steps"]))
    low, high = (float(level) for level in content["levels"])
    if not 0.0 < low < high < 1.0:
        raise InputError(f"Expected `levels` in {path} to rise within (0, 1), but got {low} and {high}.")
    return RewardFile(str(content["format"]), str(content["steps"]), (low, high), str(content["target"]))


FORWARD_TOKENS = 8192
VLLM_TOKENS = 1 << 18  # which it batches itself
Scale = Callable[[Sequence[Score]], list[Score]]


class RewardReader:
    """Reads the scores of recorded responses.

    The scores of a call are cached for the next, so that several confidences of one model cost one forward pass.
    """

    def __init__(
        self,
        model: RewardModel | VLLMRewardModel,
        encoder: RewardEncoder,
        *,
        format: RewardFormat,
        steps: Steps = "auto",
        forward_tokens: int = FORWARD_TOKENS,
        scale: Scale | None = None,
    ) -> None:
        self.format = format
        self._scale = scale
        self._model, self._encoder, self._steps, self._forward_tokens = model, encoder, steps, forward_tokens
        self._known: dict[RewardInput, list[Score]] = {}

    def read(self, pool: Sequence[QuestionSamples]) -> list[list[list[float] | None]]:
        """Return the scores of every sample, [question][sample][step]; one for formats that score whole responses.

        None for a response without steps, with the separator or a special token in it, or too long for the context.
        """
        rows = self.read_scores(pool)
        return [[None if one is None else [score.mean for score in one] for one in row] for row in rows]

    def read_scores(self, pool: Sequence[QuestionSamples]) -> list[list[list[Score] | None]]:
        """Return the scores with their quantiles, [question][sample][step]; None as in ``read``."""
        inputs = [[self._input(entry, sample) for sample in entry.samples] for entry in pool]
        known = self._look_up(inputs)
        return [[None if one is None else known[one] for one in row] for row in inputs]

    def score_paths(self, question: Question, paths: Sequence[tuple[int, ...]]) -> list[Score]:
        """Return the scores of beginnings of responses, given as token ids, by a model of the layout "continued"."""
        if self.format.layout != "continued":
            raise InputError(f"Expected a reward model that reads its policy's tokens, but got {self.format.name!r}.")
        inputs = [self._fitting(self._encoder.asked(question, path)) for path in paths]
        if any(one is None for one in inputs):
            most = f"the reward model's {self._model.max_context} tokens"
            raise InputError(f"A response to {question.id!r} exceeds {most}: lower `sampling.max_new_tokens`.")
        found = self._look_up([inputs])
        return [found[one][0] for one in inputs if one is not None]

    def close(self) -> None:
        self._model.close()

    def _look_up(self, rows: Sequence[Sequence[RewardInput | None]]) -> dict[RewardInput, list[Score]]:
        """Return the scores of all inputs, given by question; each is read once."""
        wanted = {one for row in rows for one in row if one is not None}
        known = {one: self._known[one] for one in wanted & self._known.keys()}
        missing = wanted - known.keys()
        groups: list[list[RewardInput]] = []
        for row in rows:
            groups.append([one for one in dict.fromkeys(row) if one is not None and one in missing])
            missing.difference_update(groups[-1])
        for batch in self._batches(groups):
            known |= zip(chain.from_iterable(batch), self._scores(batch), strict=True)
        self._known = known
        return known

    def _input(self, entry: QuestionSamples, sample: Sample) -> RewardInput | None:
        if self.format.layout == "continued":
            return self._fitting(self._encoder.continued(entry, sample, self._steps))
        steps = [step for step, _ in step_prefixes(sample.text, self._steps)]
        if self.format.judges == "response":
            steps = [sample.text.strip()] if sample.text.strip() else []
        return self._fitting(self._encoder.encode(bare_question(entry.question), steps)) if steps else None

    def _fitting(self, found: RewardInput | None) -> RewardInput | None:
        room = self._model.max_context
        return None if found is None or (room is not None and len(found.ids) > room) else found

    def _scores(self, batch: Sequence[Sequence[RewardInput]]) -> list[list[Score]]:
        scores = self._model.scores(batch)
        if not all(math.isfinite(value) for row in scores for score in row for value in score):
            raise RunError("Expected finite scores of the reward model, but got others. Use `--engine.dtype float32`.")
        return scores if self._scale is None else [self._scale(row) for row in scores]

    def _batches(self, groups: Sequence[Sequence[RewardInput]]) -> Iterator[list[list[RewardInput]]]:
        """Return batches within the limit on tokens: questions if the model packs, else inputs by rising length."""
        if self._model.packs:
            return batches(groups, limit=self._forward_tokens)
        rising = sorted(chain.from_iterable(groups), key=lambda one: (len(one.ids), one.ids))
        rows = runs_that_fit(rising, lambda batch: len(batch) * len(batch[-1].ids) <= self._forward_tokens)
        return ([batch] for batch in rows)


def completed(settings: RewardSettings) -> RewardSettings:
    """Return the settings with format and steps as the folder of the model states them."""
    stated = None if settings.model is None else read_reward_file(Path(settings.model))
    if stated is None:
        return settings
    for name, own, default in (("format", stated.format, None), ("steps", stated.steps, "auto")):
        if (given := getattr(settings, name)) not in (default, own):
            raise InputError(f"Expected `reward.{name}` {own!r}, as {settings.model} says, but got {given!r}.")
    return replace(settings, format=stated.format, steps=stated.steps)


def check_rewards(settings: RewardSettings) -> RewardFormat:
    """Check the reward model of ``settings`` without loading it, and return its format."""
    settings = completed(settings)
    if settings.model is None:
        config = config_path("rewards/demo.yaml")
        raise InputError(f"Expected `reward.model`; `selfcal fit --config {config}` trains one.")
    if settings.format is None:
        raise InputError(f"Expected `reward.format` with {settings.model!r}: one of {', '.join(REWARD_FORMATS)}.")
    format, scaler = reward_format(settings.format), settings.scaler
    if scaler is not None and not Path(scaler).is_file():
        raise InputError(f"Expected `reward.scaler` to be a file of `selfcal fit-step-scaler`, but got {scaler!r}.")
    if scaler is not None and format.judges != "steps":
        raise InputError(f"Expected no `reward.scaler` with {format.name!r}, which judges whole responses.")
    if not Path(settings.model).is_dir():
        raise InputError(f"Expected `reward.model` to be a local folder, but got {settings.model!r}.")
    check_model_folder(settings.model, option="reward.model")
    check_files(Path(settings.model))
    if settings.engine == "vllm":
        check_vllm_reads(Path(settings.model), format)
    return format


def check_vllm_reads(folder: Path, format: RewardFormat) -> None:
    """Raise InputError unless vLLM can run a reward model: a stock token classifier with one linear layer."""
    config = read_json_object(folder / "config.json", what="the configuration of a model")
    architecture = next(iter(config.get("architectures") or ()), "")
    reason = None
    if format.is_output_layer:
        reason = "its scores are rows of an output layer"
    elif len(format.layers) > 1:
        reason = f"its head has {len(format.layers)} layers, and vLLM builds one"
    elif format.layers != ("score",):
        reason = f"its head is called {format.layers[0]!r}, and vLLM reads 'score'"
    elif format.judges != "steps" or not architecture.endswith(_CLASSIFIER):
        reason = f"its class is {architecture!r}, and vLLM reads tokens of a `...{_CLASSIFIER}`"
    if reason is not None:
        raise InputError(f"vLLM cannot run {folder} ({format.name!r}): {reason}. Use `reward.engine: transformers`.")


def reward_identity(settings: RewardSettings) -> dict[str, Any]:
    """Return what the scores of a reward model depend on, JSON-able."""
    format = check_rewards(settings)
    settings = completed(settings)
    folder = str(settings.model)
    tokenizer = load_tokenizer(folder)
    # Another template or vocabulary is another input.
    words = repr((sorted(tokenizer.get_vocab().items()), tokenizer.chat_template))
    return {
        "weights_sha256": weights_sha256(folder),
        "tokenizer_sha256": hashlib.sha256(words.encode()).hexdigest(),
        "format": asdict(format),
        "steps": settings.steps if format.judges == "steps" else None,
        **({} if settings.scaler is None else {"scaler_sha256": files_sha256([Path(settings.scaler)])[0]}),
    }


def open_rewards(settings: RewardSettings, *, dtype: str = "auto", scale: Scale | None = None) -> RewardReader:
    """Load the reward model of ``settings``, without the scaler that they may name."""
    from selfcal_lightning.rewards.model import VLLMRewardModel, load_reward_model

    format = check_rewards(settings)
    steps = completed(settings).steps
    tokenizer = load_tokenizer(str(settings.model))
    if format.layout == "continued":
        check_marker(tokenizer, steps)
    encoder = RewardEncoder(format, tokenizer)
    folder = Path(str(settings.model))
    model: RewardModel | VLLMRewardModel
    if settings.engine == "vllm":
        model, at_once = VLLMRewardModel(folder, format, dtype=dtype), VLLM_TOKENS
    else:
        model, at_once = load_reward_model(folder, format, encoder.output_ids, dtype=dtype), FORWARD_TOKENS
    encoder.check_fits(model.num_tokens, of=str(settings.model))
    return RewardReader(model, encoder, format=format, steps=steps, forward_tokens=at_once, scale=scale)
