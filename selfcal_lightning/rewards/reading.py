"""Scores of recorded responses by a reward model: every response once, in batches of similar length."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfcal_lightning.errors import InputError, RunError
from selfcal_lightning.functional.steps import step_spans
from selfcal_lightning.model_files.fingerprints import weights_sha256
from selfcal_lightning.model_files.folders import check_model_folder
from selfcal_lightning.model_files.manifests import check_files
from selfcal_lightning.prompts.chat_format import load_tokenizer
from selfcal_lightning.records import Question, QuestionSamples, Sample
from selfcal_lightning.rewards.folders import read_reward_file
from selfcal_lightning.rewards.formats import RewardFormat, Score
from selfcal_lightning.rewards.layouts import RewardEncoder, RewardInput
from selfcal_lightning.rewards.registry import reward_format
from selfcal_lightning.rewards.settings import RewardSettings, Steps
from selfcal_lightning.rewards.steps import rule_for

if TYPE_CHECKING:
    from selfcal_lightning.rewards.model import RewardModel

FORWARD_TOKENS = 8192


class RewardReader:
    """Reads the scores of recorded responses.

    What one call has read is there for the next, so that several confidences of one model cost one forward pass.

    Args:
        model: The loaded model.
        encoder: Writes for it.
        format: Its format.
        steps: Where steps end.
        forward_tokens: Tokens of a forward pass, padding included; one response may be longer.
    """

    def __init__(
        self,
        model: RewardModel,
        encoder: RewardEncoder,
        *,
        format: RewardFormat,
        steps: Steps = "auto",
        forward_tokens: int = FORWARD_TOKENS,
    ) -> None:
        self.format = format
        self._model, self._encoder, self._steps, self._forward_tokens = model, encoder, steps, forward_tokens
        self._known: dict[RewardInput, list[Score]] = {}

    def read(self, pool: Sequence[QuestionSamples]) -> list[list[list[float] | None]]:
        """Return the scores of every sample, [question][sample][step]; of the whole response where that is judged.

        None stands for a response without text or steps, one that holds the separator or a special token, and one that
        has no room in the model's context: none is cut.

        Raises:
            RunError: A score is not finite.
        """
        return [
            [None if one is None else [score.mean for score in one] for one in row] for row in self.read_scores(pool)
        ]

    def read_lower(self, pool: Sequence[QuestionSamples]) -> list[list[list[float] | None]]:
        """Return the lower quantiles in the place of the scores, of a model that has them; else see ``read``.

        Raises:
            InputError: It has none.
            RunError: A score is not finite.
        """
        if not self.format.has_quantiles:
            raise InputError(
                f"Expected a reward model with quantiles, but got one of the format {self.format.name!r}. Train one "
                "with `QuantileRewardModule`, or read its scores."
            )
        return [
            [None if one is None else [score.low for score in one] for one in row] for row in self.read_scores(pool)
        ]

    def read_scores(self, pool: Sequence[QuestionSamples]) -> list[list[list[Score] | None]]:
        """Return the scores with their quantiles, [question][sample][step]; see ``read`` for what is None."""
        inputs = [[self._input(entry, sample) for sample in entry.samples] for entry in pool]
        known = self._look_up([one for row in inputs for one in row])
        return [[None if one is None else known[one] for one in row] for row in inputs]

    def score_paths(self, question: Question, paths: Sequence[tuple[int, ...]]) -> list[Score]:
        """Return what a model of the layout "continued" says of beginnings of responses, by their token ids.

        Args:
            question: The question.
            paths: Tokens of the policy that stand already, up to the end of a step; none is the question itself.

        Raises:
            InputError: It is a model of another layout, or a path does not fit into its context.
            RunError: A score is not finite.
        """
        if self.format.layout != "continued":
            raise InputError(
                "Expected a reward model that reads the tokens of its policy, as `selfcal fit` trains one, but got one "
                f"of the format {self.format.name!r}. Score whole responses by `selfcal score` instead."
            )
        inputs = [self._fitting(self._encoder.asked(question, path)) for path in paths]
        if any(one is None for one in inputs):
            raise InputError(
                f"Expected responses to question {question.id!r} that fit into the reward model's context of "
                f"{self._model.max_context} tokens, but got a longer one. Lower `sampling.max_new_tokens`."
            )
        found = self._look_up(inputs)
        return [found[one][0] for one in inputs if one is not None]

    def _look_up(self, inputs: Iterable[RewardInput | None]) -> dict[RewardInput, list[Score]]:
        wanted = {one for one in inputs if one is not None}
        known = {one: self._known[one] for one in wanted & self._known.keys()}
        for batch in self._batches(wanted - known.keys()):
            known |= zip(batch, self._scores(batch), strict=True)
        self._known = known
        return known

    def _input(self, entry: QuestionSamples, sample: Sample) -> RewardInput | None:
        if self.format.layout == "continued":
            return self._fitting(self._encoder.continued(entry, sample, self._steps))
        steps = self._steps_of(sample.text)
        return self._fitting(self._encoder.encode(_text_of(entry.question), steps)) if steps else None

    def _fitting(self, found: RewardInput | None) -> RewardInput | None:
        room = self._model.max_context
        return None if found is None or (room is not None and len(found.ids) > room) else found

    def _steps_of(self, text: str) -> list[str]:
        if self.format.judges == "response":
            return [text.strip()] if text.strip() else []
        return [text[start:end] for start, end in step_spans(text, rule_for(text, self._steps))]

    def _scores(self, batch: Sequence[RewardInput]) -> list[list[Score]]:
        scores = self._model.scores(batch)
        if not all(math.isfinite(value) for row in scores for score in row for value in score):
            raise RunError(
                "Expected finite scores of the reward model, but got nan or infinity. Its weights are damaged, or the "
                "numbers leave the range of its dtype: use `--engine.dtype float32`. Nothing of this batch was kept."
            )
        return scores

    def _batches(self, inputs: Iterable[RewardInput]) -> Iterator[list[RewardInput]]:
        """Yield the inputs by rising length, in batches within the limit on tokens."""
        batch: list[RewardInput] = []
        for one in sorted(inputs, key=lambda one: (len(one.ids), one.ids)):
            if batch and (len(batch) + 1) * len(one.ids) > self._forward_tokens:
                yield batch
                batch = []
            batch.append(one)
        if batch:
            yield batch


def completed(settings: RewardSettings) -> RewardSettings:
    """Return the settings with the format and the rule for steps that the folder of the model states itself.

    Raises:
        InputError: The folder states others than were asked for.
    """
    stated = None if settings.model is None else read_reward_file(Path(settings.model))
    if stated is None:
        return settings
    if settings.format not in (None, stated.format):
        raise InputError(
            f"Expected `reward.format` to be {stated.format!r}, as {settings.model} says, but got {settings.format!r}. "
            "Leave it out."
        )
    if settings.steps not in ("auto", stated.steps):
        raise InputError(
            f"Expected `reward.steps` to be {stated.steps!r}, where the steps of {settings.model} ended in training, "
            f"but got {settings.steps!r}. Leave it out."
        )
    return replace(settings, format=stated.format, steps=stated.steps)


def check_rewards(settings: RewardSettings) -> RewardFormat:
    """Return the format of the reward model in ``settings``; nothing is loaded.

    Raises:
        InputError: The model or the format is not named, or not there.
    """
    settings = completed(settings)
    if settings.model is None or settings.format is None:
        raise InputError(
            f"Expected `reward.model` and `reward.format`, the folder of a reward model and its format, but got "
            f"{settings.model!r} and {settings.format!r}."
        )
    format = reward_format(settings.format)
    if not Path(settings.model).is_dir():
        raise InputError(f"Expected `reward.model` to be a local folder, but got {settings.model!r}.")
    check_model_folder(settings.model, option="reward.model")
    check_files(Path(settings.model))
    return format


def reward_identity(settings: RewardSettings) -> dict[str, Any]:
    """Return what the scores of a reward model depend on, JSON-able: its weights, its format, its tokens, the steps."""
    format = check_rewards(settings)
    settings = completed(settings)
    folder = str(settings.model)
    tokenizer = load_tokenizer(folder)
    # The words are part of the identity as the weights are: another template or vocabulary is another input.
    words = repr((sorted(tokenizer.get_vocab().items()), tokenizer.chat_template))
    return {
        "weights_sha256": weights_sha256(folder),
        "tokenizer_sha256": hashlib.sha256(words.encode()).hexdigest(),
        "format": asdict(format),
        "steps": settings.steps if format.judges == "steps" else None,
    }


def open_rewards(settings: RewardSettings, *, dtype: str = "auto") -> RewardReader:
    """Load the reward model of ``settings``.

    Raises:
        InputError: It is not there, or is not of the format that was named.
    """
    from selfcal_lightning.rewards.model import load_reward_model

    format = check_rewards(settings)
    tokenizer = load_tokenizer(str(settings.model))
    encoder = RewardEncoder(format, tokenizer)
    model = load_reward_model(Path(str(settings.model)), format, encoder.output_ids, dtype=dtype)
    if len(tokenizer) > model.num_tokens:
        raise InputError(
            f"Expected the reward model to come with the tokenizer of its weights, but {settings.model} has "
            f"{len(tokenizer):,} tokens for {model.num_tokens:,} embeddings. Fetch both again."
        )
    return RewardReader(model, encoder, format=format, steps=completed(settings).steps)


def _text_of(question: Question) -> str:
    """Return the bare question; where only the chat is known, what its user says last."""
    if question.text:
        return question.text
    return next((turn.content for turn in reversed(question.messages) if turn.role == "user"), "")
