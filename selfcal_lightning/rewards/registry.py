"""Reward formats by name: those of public models, and what plug-ins register."""

from __future__ import annotations

from dataclasses import replace

from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.rewards.formats import OUTPUT_LAYER, RewardFormat

QUANTILE_PRM = "quantile-prm"
QUANTILES_OF = "quantiles-of-"  # before the name of the public format that a training began with
_MATH_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
_OWN = (
    # Qwen2.5-Math-PRM-7B and -72B, Qwen2.5-Math-7B-PRM800K, ReasonFlux-PRM
    RewardFormat(
        name="qwen2.5-math-prm",
        judges="steps",
        layout="marked",
        layers=("score.0", "score.2"),
        num_outputs=2,
        link="softmax",
        right=(1,),
        bias=True,
        separator="<extra_0>",
        uses_chat=True,
        system=_MATH_SYSTEM,
    ),
    # peiyi9979/math-shepherd-mistral-7b-prm
    RewardFormat(
        name="math-shepherd",
        judges="steps",
        layout="marked",
        layers=OUTPUT_LAYER,
        num_outputs=2,
        link="softmax",
        output_tokens=("+", "-"),
        question="{question} ",
        step="{step} {separator}",
        joiner="\n",
        separator="ки",
    ),
    # RLHFlow/Llama3.1-8B-PRM-Deepseek-Data and -Mistral-Data
    RewardFormat(
        name="rlhflow-prm",
        judges="steps",
        layout="turns",
        layers=OUTPUT_LAYER,
        num_outputs=2,
        link="softmax",
        output_tokens=("+", "-"),
        question="{question} ",
    ),
    # GAIR/ReasonEval-7B and -34B: the probability of a valid step, redundant or not
    RewardFormat(
        name="reasoneval",
        judges="steps",
        layout="pieces",
        layers=("score_head",),
        num_outputs=3,
        link="softmax",
        right=(1, 2),
        question="Question:\n{question}\nAnswer:\nLet's think step by step.\n",
    ),
    # Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B and -7B
    RewardFormat(
        name="skywork-o1-prm",
        judges="steps",
        layout="pieces",
        layers=("v_head.summary",),
        num_outputs=1,
        link="sigmoid",
        bias=True,
        question="{question}\n",
        separator="\n",
    ),
    # What TRL's PRMTrainer saves
    RewardFormat(
        name="trl-prm",
        judges="steps",
        layout="pieces",
        layers=("score",),
        num_outputs=2,
        link="softmax",
        right=(1,),
        bias=True,
        separator="\n",
    ),
    # What QuantileRewardModule exports
    RewardFormat(
        name=QUANTILE_PRM,
        judges="steps",
        layout="continued",
        layers=("score",),
        num_outputs=3,
        link="quantiles",
        bias=True,
    ),
    # Skywork-Reward and other sequence classifiers with one output
    RewardFormat(
        name="sequence-classifier",
        judges="response",
        layout="chat",
        layers=("score",),
        num_outputs=1,
        link="none",
    ),
    # RLHFlow/Llama3.1-8B-ORM-Deepseek-Data and -Mistral-Data
    RewardFormat(
        name="rlhflow-orm",
        judges="response",
        layout="turns",
        layers=OUTPUT_LAYER,
        num_outputs=2,
        link="softmax",
        output_tokens=("+", "-"),
        question="{question} ",
    ),
    # Qwen/Qwen2.5-Math-RM-72B
    RewardFormat(
        name="qwen2.5-math-rm",
        judges="response",
        layout="chat",
        layers=("score.0", "score.2"),
        num_outputs=1,
        link="none",
        bias=True,
        system=_MATH_SYSTEM,
    ),
)
REWARD_FORMATS: dict[str, RewardFormat] = {one.name: one for one in _OWN}


def register_reward_format(format: RewardFormat) -> RewardFormat:
    """Add a format under its name, and return it.

    Raises:
        InputError: It is no ``RewardFormat``, or its name is taken.
    """
    if not isinstance(format, RewardFormat):
        raise InputError(f"Expected a `RewardFormat` to register, but got {format!r}.")
    if format.name in REWARD_FORMATS:
        raise InputError(f"Expected the reward format's `name` to be new, but {format.name!r} is taken already.")
    REWARD_FORMATS[format.name] = format
    return format


def reward_format(name: str) -> RewardFormat:
    """Return the format ``name``.

    Raises:
        InputError: There is none of that name; the message says which there are.

    Example:
        >>> reward_format("reasoneval").right
        (1, 2)
    """
    if name.startswith(QUANTILES_OF) and name.removeprefix(QUANTILES_OF) in REWARD_FORMATS:
        return quantiles_of(REWARD_FORMATS[name.removeprefix(QUANTILES_OF)])
    if name not in REWARD_FORMATS:
        raise unknown_name("reward.format", name, REWARD_FORMATS)
    return REWARD_FORMATS[name]


def quantiles_of(format: RewardFormat) -> RewardFormat:
    """Return the format of a model of ``format`` that was trained on: written and read alike, with quantiles.

    Its score starts as what it was: outputs that mean right stay rows of the mean, held against the one that does not.

    Raises:
        InputError: Models of ``format`` are no start: they judge whole responses, or give no probability of one kind.

    Example:
        >>> quantiles_of(reward_format("reasoneval")).num_outputs
        4
    """
    if format.judges != "steps" or format.link not in ("softmax", "sigmoid"):
        raise InputError(
            f"Expected a reward format whose models judge steps by a probability, to train one on, but got "
            f"{format.name!r}. Start from another model, or leave `format` out and start from the policy."
        )
    if len(format.right) != format.num_outputs - (format.link == "softmax") or (
        format.link == "sigmoid" and format.num_outputs != 1
    ):
        raise InputError(
            f"Expected a reward format with one output that does not mean right, or a single one in all, to train its "
            f"model on, but got {format.name!r} with {format.num_outputs} outputs of which {format.right} do."
        )
    depth = len(format.layers)
    return replace(
        format,
        name=f"{QUANTILES_OF}{format.name}",
        layers=("score",) if depth == 1 else tuple(f"score.{2 * number}" for number in range(depth)),
        num_outputs=len(format.right) + 2,
        link="quantiles",
        right=(0,),
        bias=True,
        output_tokens=(),
    )
