"""Two layers on top of the generator, and lessons in judging its own responses.

Verdicts alone teach next to nothing. With marks where a step goes wrong, the upper layers learn to see a wrong digit,
and the verdict follows. Linear read-outs carry the marks' loss and are dropped afterwards.
"""

import copy
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from bundled_model_data import FULL, cut_batches, encode_parts, mark_wrong_characters, write_problem_parts
from bundled_model_measuring import SAMPLING, draw_responses
from bundled_model_training import PROGRESS_EVERY, attend_plainly, build_optimizers, step_optimizers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM, PreTrainedModel

from selfcal_lightning.data.tasks.word_problems import Problem, sample_problem
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Message, Sample

IGNORED, REHEARSED, YES, NO = range(4)
UNMARKED = -1
SAMPLES_OF_EACH_KIND = 2


@dataclass(frozen=True, slots=True)
class Turn:
    token_ids: list[int]
    kinds: list[int]
    marks: list[tuple[int, int]]


def draw_turns(model: PreTrainedModel, chat: ChatFormat, *, problems: int, seed: str) -> list[Turn]:
    """Draw the model's responses to fresh problems, half at temperature 1 and half by EDT, and judge them by truth."""
    rng = random.Random(f"turns/{seed}")
    asked = [sample_problem(rng, "pretrain", difficulty=FULL) for _ in range(problems)]
    turns = []
    for sampling in SAMPLING.values():
        drawn = draw_responses(
            model, chat, asked, samples=SAMPLES_OF_EACH_KIND, sampling=sampling, seed=rng.getrandbits(31), ask=False
        )
        turns += [
            write_turn(chat, problem, sample)
            for problem, entry in zip(asked, drawn, strict=True)
            for sample in entry.samples
            if sample.answer is not None
        ]
    return turns


def write_turn(chat: ChatFormat, problem: Problem, sample: Sample) -> Turn:
    """Write the prompt, an own response, the query and the verdict; only the verdict is learnt, and the marks."""
    prompt = chat.prompt_ids([Message("user", problem.question)])
    verdict = (chat.response_ids("Yes"), chat.response_ids("No"))[not sample.correct]
    tail = [*chat.query.suffix_ids, *verdict]
    wrong = mark_wrong_characters(problem, sample.text)
    so_far = np.logical_or.accumulate(wrong)
    last_characters = np.cumsum([len(chat.decode([token])) for token in sample.token_ids]) - 1
    token_ids = [*prompt, *sample.token_ids, *tail]
    marks = [(UNMARKED, UNMARKED)] * len(token_ids)
    marks[len(prompt) : -len(tail)] = [(int(wrong[place]), int(so_far[place])) for place in last_characters]
    return Turn(token_ids, [IGNORED] * (len(token_ids) - 1) + [YES if sample.correct else NO], marks)


def write_rehearsals(chat: ChatFormat, *, number: int, seed: str) -> list[Turn]:
    """Write fresh problems with pupils' solutions, so that answering is not unlearnt."""
    rng = random.Random(f"rehearsals/{seed}")
    turns = []
    for _ in range(number):
        token_ids, learnt = encode_parts(chat.tokenizer, write_problem_parts(rng, FULL))
        kinds = [REHEARSED if flag else IGNORED for flag in learnt]
        turns.append(Turn(token_ids, kinds, [(UNMARKED, UNMARKED)] * len(token_ids)))
    return turns


UPPER_LAYERS = 2
MARKS = 2


@dataclass(frozen=True, slots=True)
class Lesson:
    name: str
    problems: int
    steps: int
    muon_lr: float = 0.01
    adam_lr: float = 3e-3
    lower_share: float = 0.2
    warmup: float = 0.02
    decay_from: float = 0.5
    verdict_weight: float = 0.5
    mark_weight: float = 1.0
    yes_weight: float = 1.0
    rehearsals: float = 0.5
    batch_tokens: int = 2_500


VERIFYING = Lesson("verifying", problems=5_000, steps=1_500)
BELIEVING = Lesson(
    "believing", problems=2_100, steps=300, muon_lr=0.003, adam_lr=1e-3, warmup=0.06, decay_from=0.3,
    mark_weight=0.0, yes_weight=16.0,
)  # fmt: skip


def add_upper_layers(model: LlamaForCausalLM, *, seed: int) -> LlamaForCausalLM:
    """Return the model with ``UPPER_LAYERS`` more, which change nothing as yet: their output projections are zero."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers += UPPER_LAYERS
    torch.manual_seed(seed)
    deeper = LlamaForCausalLM(config)
    deeper.load_state_dict(model.state_dict(), strict=False)
    for layer in deeper.model.layers[-UPPER_LAYERS:]:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return deeper


class MarkReadOuts(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(hidden_size, MARKS) for _ in range(UPPER_LAYERS))

    def loss(self, states: tuple[Tensor, ...], marks: Tensor) -> Tensor:
        marked = marks[..., 0] != UNMARKED
        losses = [
            functional.binary_cross_entropy_with_logits(head(state[marked].float()), marks[marked])
            for head, state in zip(self.heads, states[-UPPER_LAYERS:], strict=True)
            if marked.any()
        ]
        return torch.stack(losses).sum() if losses else marks.new_zeros(())


def give_lesson(model: LlamaForCausalLM, chat: ChatFormat, lesson: Lesson, *, seed: int) -> LlamaForCausalLM:
    model.set_attn_implementation("sdpa")
    turns = draw_turns(model.eval(), chat, problems=lesson.problems, seed=f"{lesson.name}/{seed}")
    if not turns:
        raise ValueError("Expected the model to write readable answers, but got none. Train the generator for longer.")
    attend_plainly(model.train())
    torch.manual_seed(seed)
    read_outs = MarkReadOuts(model.config.hidden_size)
    layers = model.model.layers
    optimizers = build_optimizers(
        matrices=[
            (layers[:-UPPER_LAYERS], lesson.muon_lr * lesson.lower_share),
            (layers[-UPPER_LAYERS:], lesson.muon_lr),
        ],
        others=[(model, lesson.adam_lr * lesson.lower_share), (read_outs, lesson.adam_lr)],
    )
    recent = []
    for step, batch in enumerate(_stream(turns, chat, lesson, seed)):
        if step == lesson.steps:
            break
        losses = _losses(model, read_outs, batch, lesson.yes_weight)
        weights = torch.tensor([1.0, lesson.verdict_weight, lesson.mark_weight])
        (losses @ weights).backward()
        step_optimizers(optimizers, step, lesson)
        recent.append(losses.detach())
        if (step + 1) % PROGRESS_EVERY == 0 or step + 1 == lesson.steps:
            answers, verdicts, marks = torch.stack(recent).mean(0).tolist()
            print(
                f"{lesson.name} {step + 1}/{lesson.steps}  answers {answers:.4f}  verdicts {verdicts:.4f}  "
                f"marks {marks:.4f}",
                flush=True,
            )
            recent = []
    return model


def _stream(turns: list[Turn], chat: ChatFormat, lesson: Lesson, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield batches without end: own responses again and again, each time with fresh rehearsals.

    Rows are padded on the right: token ids [B, T], kinds [B, T] (``IGNORED``) and marks [B, T, 2] (``UNMARKED``).
    """
    rng = random.Random(f"{lesson.name}/{seed}")
    for epoch in itertools.count():
        rehearsed = write_rehearsals(
            chat, number=round(lesson.rehearsals * len(turns)), seed=f"{lesson.name}/{seed}/{epoch}"
        )
        batches = list(cut_batches([*turns, *rehearsed], lesson.batch_tokens, lambda turn: len(turn.token_ids)))
        rng.shuffle(batches)
        for batch in batches:
            yield (
                pad_sequence([torch.tensor(turn.token_ids) for turn in batch], batch_first=True),
                pad_sequence([torch.tensor(turn.kinds) for turn in batch], batch_first=True, padding_value=IGNORED),
                pad_sequence([torch.tensor(turn.marks).float() for turn in batch], True, padding_value=UNMARKED),
            )


def _losses(
    model: LlamaForCausalLM, read_outs: MarkReadOuts, batch: tuple[Tensor, Tensor, Tensor], yes_weight: float
) -> Tensor:
    """Return the mean losses of rehearsed tokens, verdicts and marks [3]; 0 where a batch has none."""
    token_ids, kinds, marks = batch
    with torch.autocast("cpu", torch.bfloat16):
        output = model.model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
        learnt = kinds[:, 1:] > 0
        logits = model.lm_head(output.last_hidden_state[:, :-1][learnt])
    kinds = kinds[:, 1:][learnt]
    losses = functional.cross_entropy(logits.float(), token_ids[:, 1:][learnt], reduction="none")
    answers = _weighted_mean(losses, (kinds == REHEARSED).float())
    verdicts = _weighted_mean(losses, (kinds == YES) * yes_weight + (kinds == NO).float())
    return torch.stack([answers, verdicts, read_outs.loss(output.hidden_states, marks)])


def _weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum().clamp_min(1.0)
