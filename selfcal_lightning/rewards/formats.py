"""What a family of reward models is: how a response is written for it, where its score is read, and by which head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from selfcal_lightning.core.errors import InputError, unknown_name

Judged = Literal["steps", "response"]
Layout = Literal["marked", "pieces", "turns", "chat", "continued"]
Link = Literal["softmax", "sigmoid", "quantiles", "none"]
OUTPUT_LAYER = ("lm_head",)


class Score(NamedTuple):
    """What a model says at one place: ``low <= mean <= high``; all the same where it has no quantiles."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFormat:
    r"""How a family of reward models is written to and read. The weights lie under the names of the public ones.

    Layouts:

    - ``marked``: one text, every step followed by ``separator``; read at the separators.
    - ``pieces``: question and steps encoded one by one, each step with ``separator`` behind it where there is one; read
      at the last token of each.
    - ``turns``: every step is a turn of the user, the first one with the question before it, answered by ``reply``;
      read at the token that predicts the reply.
    - ``chat``: question and response are a chat; read at its last token.
    - ``continued``: the response stands behind the chat that its policy was asked by, token for token, with nothing in
      between; read at the last token of each step.

    Attributes:
        name: Name to choose it by.
        judges: "steps", one score a step, or "response", one score in all.
        layout: One of the layouts above.
        layers: Names of the head's linear layers in the weights, with ReLU between them; ``("lm_head",)`` reads the
            rows of ``output_tokens`` in the output layer.
        num_outputs: Outputs of the head.
        link: What makes scores of the outputs; "none" leaves the one output as it is, which is no probability.
            "quantiles" makes a mean, a lower and an upper quantile of three (``monotone_quantiles``), or of
            more, all but the last two of which are rows of the mean (``folded_outputs``).
        right: The outputs that mean right; their probabilities are added.
        bias: Whether the layers have a bias; None takes one where it is stored.
        output_tokens: With ``lm_head``: the tokens whose logits are the outputs, in their order.
        question: Template of what stands before the first step, with ``{question}``.
        step: Template of a step in the layout "marked", with ``{step}`` and ``{separator}``.
        joiner: What stands between two of those.
        separator: What follows a step; one token.
        uses_chat: Whether "marked" is rendered by the chat template, the steps being the assistant's turn.
        system: The system turn of a chat; None has none.
        reply: The assistant's turn in the layout "turns".

    Raises:
        InputError: The parts do not belong together.

    Example:
        >>> RewardFormat(name="mine", judges="steps", layout="marked", layers=("score",), num_outputs=2,
        ...              link="softmax", right=(1,), separator="<step>").is_probability
        True
    """

    name: str
    judges: Judged
    layout: Layout
    layers: tuple[str, ...]
    num_outputs: int
    link: Link
    right: tuple[int, ...] = (0,)
    bias: bool | None = None
    output_tokens: tuple[str, ...] = ()
    question: str = "{question}"
    step: str = "{step}{separator}"
    joiner: str = ""
    separator: str = ""
    uses_chat: bool = False
    system: str | None = None
    reply: str = "+"

    def __post_init__(self) -> None:
        for option, value, choices in (
            ("judges", self.judges, Judged),
            ("layout", self.layout, Layout),
            ("link", self.link, Link),
        ):
            if value not in get_args(choices):
                raise self._refusal(f"`{option}` to be one of {', '.join(get_args(choices))}", value)
        self._check_texts()
        self._check_head()

    @property
    def is_probability(self) -> bool:
        """Whether its scores lie in [0, 1]."""
        return self.link != "none"

    @property
    def is_output_layer(self) -> bool:
        """Whether its head is rows of a causal model's output layer."""
        return self.layers == OUTPUT_LAYER

    @property
    def renders_chat(self) -> bool:
        """Whether it needs the model's chat template."""
        return self.uses_chat or self.layout in ("turns", "chat", "continued")

    @property
    def has_quantiles(self) -> bool:
        """Whether a lower and an upper quantile stand beside its score."""
        return self.link == "quantiles"

    def _check_texts(self) -> None:
        if not self.name:
            raise self._refusal("`name` to be some text", self.name)
        if (self.layout == "marked") and not self.separator:
            raise self._refusal('`separator` to be given with the layout "marked"', self.separator)
        for layout, judged in (("chat", "response"), ("continued", "steps")):
            if self.layout == layout and self.judges != judged:
                raise self._refusal(f'`judges` to be "{judged}" with the layout "{layout}"', self.judges)
        if "{question}" not in self.question:
            raise self._refusal("`question` to hold {question}", self.question)
        if "{step}" not in self.step or "{separator}" not in self.step:
            raise self._refusal("`step` to hold {step} and {separator}", self.step)

    def _check_head(self) -> None:
        if not self.layers or self.num_outputs < 1:
            raise self._refusal(
                "`layers` and `num_outputs` to be at least one layer and one output", (self.layers, self.num_outputs)
            )
        if not self.right or not set(self.right) <= set(range(self.num_outputs)):
            raise self._refusal(f"`right` to be among the {self.num_outputs} outputs", self.right)
        if self.link == "none" and self.num_outputs != 1:
            raise self._refusal('one output with the link "none"', self.num_outputs)
        if self.has_quantiles and self.num_outputs < 3:
            raise self._refusal('at least three outputs with the link "quantiles"', self.num_outputs)
        if self.is_output_layer != bool(self.output_tokens):
            raise self._refusal("`output_tokens` with the layer lm_head alone", self.output_tokens)
        if self.output_tokens and len(self.output_tokens) != self.num_outputs:
            raise self._refusal(f"{self.num_outputs} `output_tokens`", self.output_tokens)

    def _refusal(self, expected: str, got: object) -> InputError:
        return InputError(f"Expected {expected} in the reward format {self.name!r}, but got {got!r}.")


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
    """Return the format ``name``."""
    if name.startswith(QUANTILES_OF) and name.removeprefix(QUANTILES_OF) in REWARD_FORMATS:
        return quantiles_of(REWARD_FORMATS[name.removeprefix(QUANTILES_OF)])
    if name not in REWARD_FORMATS:
        raise unknown_name("reward.format", name, REWARD_FORMATS)
    return REWARD_FORMATS[name]


def quantiles_of(format: RewardFormat) -> RewardFormat:
    """Return the format of a model of ``format`` that was trained on: written and read alike, with quantiles.

    Its score starts as what it was: outputs that mean right stay rows of the mean, held against the one that does not.
    """
    if format.judges != "steps" or format.link not in ("softmax", "sigmoid"):
        raise InputError(
            f"`format` {format.name!r} cannot be trained on: its models do not judge steps by a probability."
        )
    if len(format.right) != format.num_outputs - (format.link == "softmax") or (
        format.link == "sigmoid" and format.num_outputs != 1
    ):
        raise InputError(
            f"`format` {format.name!r} cannot be trained on: {format.right} of {format.num_outputs} outputs mean right."
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
