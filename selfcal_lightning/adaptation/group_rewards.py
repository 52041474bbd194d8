"""Rewards of the responses to a question, by name, computed from a store when they are needed."""

from collections.abc import Sequence

from selfcal_lightning.adaptation.equations import arithmetic_value, equation_validity
from selfcal_lightning.adaptation.picking import without_references
from selfcal_lightning.confidence.base import P_TRUE, check_confidence, confidence_of
from selfcal_lightning.confidence.fusion import Fusion
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.group_rewards import GroupReward, majority, share, soft_share
from selfcal_lightning.records import QuestionSamples, Sample

Rewards = list[float | None]
REFERENCE: GroupReward = "reference"
_ABSENT = {
    "equations": "no response has an equation that can be checked. Take another reward, such as `majority`",
    REFERENCE: "no response was judged. Sample questions with references, or take a reward that needs none",
}
# Need the model's distributions: computed by `selfcal score` and stored as annotations.
ANNOTATIONS: dict[str, str] = {"self_certainty": "self_certainty", "entropy": "token_entropy"}
# Every sampled response has these, so later rounds need no scoring.
FUSED_FROM = ("mean_logprob", "logit:p_true")


def group_rewards(
    name: GroupReward, entries: Sequence[QuestionSamples], *, fusion: Fusion | None = None
) -> list[Rewards]:
    """Return one reward per response, [question][sample]; higher is better."""
    seen = entries if name == REFERENCE else [without_references(entry) for entry in entries]
    if name in ANNOTATIONS:
        check_confidence(seen, ANNOTATIONS[name])
    rewards = [_of_group(name, entry.samples, fusion) for entry in seen]
    if not any(reward is not None for group in rewards for reward in group):
        reason = _ABSENT.get(name, "no response can be read. Does `max_new_tokens` cut the answers off?")
        raise InputError(f"None of {len(rewards):,} questions has a reward {name!r}: {reason}.")
    return rewards


def _of_group(name: GroupReward, samples: Sequence[Sample], fusion: Fusion | None) -> Rewards:
    answers = [sample.answer for sample in samples]
    if name == "majority":
        return majority(answers)
    if name == "vote_share":
        return share(answers)
    if name == "ssc":
        return soft_share(answers, [confidence_of(sample, P_TRUE) for sample in samples])
    if name in ANNOTATIONS:
        return [confidence_of(sample, ANNOTATIONS[name]) for sample in samples]
    if name == "equations":
        numbers = [arithmetic_value(answer) if answer else None for answer in answers]
        checked = equation_validity([sample.text for sample in samples], numbers)
        is_known = any(reward is not None for reward in checked)
        return [0.0 if is_known and not answer else reward for reward, answer in zip(checked, answers, strict=True)]
    if name == REFERENCE:
        verdicts = [sample.correct for sample in samples]
        if all(verdict is None for verdict in verdicts):
            return [None] * len(samples)
        judged = zip(verdicts, answers, strict=True)
        return [None if verdict is None and answer else float(bool(verdict)) for verdict, answer in judged]
    if fusion is None:
        raise InputError(f"Expected `fusion` with the reward {name!r}, but got None.")
    return [fusion.score_sample(sample) if sample.answer else 0.0 for sample in samples]
