"""Formats of reward models: how a response is written, where its score is read, and by which head."""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.plugins import Registry

Judged = Literal["steps", "response"]
Layout = Literal["marked", "pieces", "turns", "chat", "continued"]
Link = Literal["softmax", "sigmoid", "quantiles", "none"]
OUTPUT_LAYER = ("lm_head",)


class Score(NamedTuple):
    """A model's score at one position: ``low <= mean <= high``; all equal where it has no quantiles."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFormat:
    r"""How a family of reward models is written to and read. Weights have the names of the public models.

    Layouts:

    - ``marked``: one text, every step followed by ``separator``; read at the separators.
    - ``pieces``: question and steps encoded one by one, with ``separator`` after each step if there is one; read at
      the last token of each.
    - ``turns``: every step is a user turn, the first one after the question, answered by ``reply``; read at the token
      that predicts the reply.
    - ``chat``: question and response are a chat; read at its last token.
    - ``continued``: the response follows its policy's own chat, token for token; read at the last token of each step.

    Attributes:
        name: Name to choose it by.
        judges: "steps", one score a step, or "response", one score in all.
        layout: One of the layouts above.
        layers: Names of the head's linear layers in the weights, with ReLU between them; ``("lm_head",)`` reads the
            rows of ``output_tokens`` in the output layer.
        num_outputs: Outputs of the head.
        link: Turns outputs into scores; "none" keeps the one output, which is no probability. "quantiles" gives a mean,
            a lower and an upper quantile (``monotone_quantiles``); of more than three outputs all but the last two are
            rows of the mean (``folded_outputs``).
        right: The outputs that mean right; their probabilities are added.
        bias: Whether the layers have a bias; None takes it if it is stored.
        output_tokens: With ``lm_head``: the tokens whose logits are the outputs.
        question: Template of the text before the first step, with ``{question}``.
        step: Template of a step in the layout "marked", with ``{step}`` and ``{separator}``.
        joiner: Text between two of those.
        separator: One token after each step.
        uses_chat: Whether "marked" uses the chat template, with the steps as the assistant's turn.
        system: The system turn of a chat; None has none.
        reply: The assistant's turn in the layout "turns".

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
        judges, outputs, right, tokens = self.judges, self.num_outputs, self.right, self.output_tokens
        demands: list[tuple[bool, str, object]] = [
            (self.judges in get_args(Judged), f"`judges` to be one of {', '.join(get_args(Judged))}", self.judges),
            (self.layout in get_args(Layout), f"`layout` to be one of {', '.join(get_args(Layout))}", self.layout),
            (self.link in get_args(Link), f"`link` to be one of {', '.join(get_args(Link))}", self.link),
            (bool(self.name), "`name` to be some text", self.name),
            (self.layout != "marked" or bool(self.separator), '`separator` to be given with "marked"', self.separator),
            (self.layout != "chat" or judges == "response", '`judges` to be "response" with "chat"', judges),
            (self.layout != "continued" or judges == "steps", '`judges` to be "steps" with "continued"', judges),
            ("{question}" in self.question, "`question` to hold {question}", self.question),
            ("{step}" in self.step and "{separator}" in self.step, "`step` to hold {step} and {separator}", self.step),
            (bool(self.layers) and outputs >= 1, "at least one of `layers` and `num_outputs`", (self.layers, outputs)),
            (bool(right) and set(right) <= set(range(outputs)), f"`right` to be among the {outputs} outputs", right),
            (self.link != "none" or outputs == 1, 'one output with the link "none"', outputs),
            (not self.has_quantiles or outputs >= 3, 'at least three outputs with the link "quantiles"', outputs),
            (self.is_output_layer == bool(tokens), "`output_tokens` with the layer lm_head alone", tokens),
            (not tokens or len(tokens) == outputs, f"{outputs} `output_tokens`", tokens),
        ]
        for is_met, expected, got in demands:
            if not is_met:
                raise InputError(f"Expected {expected} in the reward format {self.name!r}, but got {got!r}.")

    @property
    def is_probability(self) -> bool:
        return self.link != "none"

    @property
    def is_output_layer(self) -> bool:
        return self.layers == OUTPUT_LAYER

    @property
    def has_quantiles(self) -> bool:
        return self.link == "quantiles"


QUANTILE_PRM = "quantile-prm"
QUANTILES_OF = "quantiles-of-"  # before the name of the public format that a training began with
_MATH_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
_TWO_TOKENS: dict[str, Any] = {
    "layers": OUTPUT_LAYER, "num_outputs": 2, "link": "softmax", "output_tokens": ("+", "-"), "question": "{question} ",
}  # fmt: skip
_TWO_LAYERS: dict[str, Any] = {"layers": ("score.0", "score.2"), "bias": True, "system": _MATH_SYSTEM}
_OWN = (
    # Qwen2.5-Math-PRM-7B and -72B, Qwen2.5-Math-7B-PRM800K, ReasonFlux-PRM
    RewardFormat(
        name="qwen2.5-math-prm", judges="steps", layout="marked", num_outputs=2, link="softmax", right=(1,),
        separator="<extra_0>", uses_chat=True, **_TWO_LAYERS,
    ),
    # peiyi9979/math-shepherd-mistral-7b-prm
    RewardFormat(
        name="math-shepherd", judges="steps", layout="marked", step="{step} {separator}", joiner="\n", separator="ки",
        **_TWO_TOKENS,
    ),
    # RLHFlow/Llama3.1-8B-PRM-Deepseek-Data and -Mistral-Data
    RewardFormat(name="rlhflow-prm", judges="steps", layout="turns", **_TWO_TOKENS),
    # GAIR/ReasonEval-7B and -34B: the probability of a valid step, redundant or not
    RewardFormat(
        name="reasoneval", judges="steps", layout="pieces", layers=("score_head",), num_outputs=3, link="softmax",
        right=(1, 2), question="Question:\n{question}\nAnswer:\nLet's think step by step.\n",
    ),
    # Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B and -7B
    RewardFormat(
        name="skywork-o1-prm", judges="steps", layout="pieces", layers=("v_head.summary",), num_outputs=1,
        link="sigmoid", bias=True, question="{question}\n", separator="\n",
    ),
    # What TRL's PRMTrainer saves
    RewardFormat(
        name="trl-prm", judges="steps", layout="pieces", layers=("score",), num_outputs=2, link="softmax", right=(1,),
        bias=True, separator="\n",
    ),
    # What QuantileRewardModule exports
    RewardFormat(
        name=QUANTILE_PRM, judges="steps", layout="continued", layers=("score",), num_outputs=3, link="quantiles",
        bias=True,
    ),
    # Skywork-Reward and other sequence classifiers with one output
    RewardFormat(
        name="sequence-classifier", judges="response", layout="chat", layers=("score",), num_outputs=1, link="none"
    ),
    # RLHFlow/Llama3.1-8B-ORM-Deepseek-Data and -Mistral-Data
    RewardFormat(name="rlhflow-orm", judges="response", layout="turns", **_TWO_TOKENS),
    # Qwen/Qwen2.5-Math-RM-72B
    RewardFormat(
        name="qwen2.5-math-rm", judges="response", layout="chat", num_outputs=1, link="none", **_TWO_LAYERS
    ),
)  # fmt: skip
REWARD_FORMATS: Registry[RewardFormat] = Registry("reward.format", _OWN)


def register_reward_format(format: RewardFormat) -> RewardFormat:
    return REWARD_FORMATS.register(format)


def reward_format(name: str) -> RewardFormat:
    if name.startswith(QUANTILES_OF) and name.removeprefix(QUANTILES_OF) in REWARD_FORMATS:
        return quantiles_of(REWARD_FORMATS[name.removeprefix(QUANTILES_OF)])
    return REWARD_FORMATS[name]


def quantiles_of(format: RewardFormat) -> RewardFormat:
    """Return the format of a model whose training was continued from ``format``, with quantiles."""
    if format.judges != "steps" or format.link not in ("softmax", "sigmoid"):
        raise InputError(f"`format` {format.name!r} cannot be trained on: it judges no steps by a probability.")
    num_wrong = format.num_outputs - len(format.right)
    if num_wrong != (format.link == "softmax") or (format.link == "sigmoid" and format.num_outputs != 1):
        outputs = f"{format.right} of {format.num_outputs} outputs mean right"
        raise InputError(f"`format` {format.name!r} cannot be trained on: {outputs}.")
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
