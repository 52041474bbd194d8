"""Linear probes of the hidden states of a response: rivals of the adapter with its own targets, without training it."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GroupKFold
from transformers import AutoModelForCausalLM

from selfcal_lightning.engines.opening import load_chat
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, Prompt
from selfcal_lightning.records import QuestionSamples

# The last layer's state at the response's last token, at the confidence query's, and its mean over the response.
RESPONSE, QUERY, MEAN = "state_response", "state_query", "state_mean"
STATES = (RESPONSE, QUERY, MEAN)
BATCH_TOKENS = 8_192
PENALTIES = np.logspace(1, 6, 11)
FOLDS = 5
Pool = Sequence[QuestionSamples]


def agreement(entry: QuestionSamples) -> list[float]:
    """Return for each response the share of the others with its answer; an unreadable one agrees with none."""
    votes = Counter(sample.answer for sample in entry.samples if sample.answer is not None)
    return [max(votes[sample.answer] - 1, 0) / (len(entry.samples) - 1) for sample in entry.samples]


@torch.inference_mode()
def read_states(
    model: Path, prompt: Prompt | None, pool: Pool, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Floats]:
    """Return the states [N, D] of all responses of a pool, in its order, by the base model."""
    chat = load_chat(EngineOptions(), str(model), query=DEFAULT_QUERY, prompt=prompt)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, trust_remote_code=False, use_safetensors=True)
    network = network.to(device)  # in evaluation mode
    rows = []
    for entry in pool:
        asked = chat.prompt_ids(entry.question.messages)
        rows += [(len(asked), len(sample.token_ids), (*asked, *sample.token_ids, *chat.query.suffix_ids))
                 for sample in entry.samples]  # fmt: skip
    found = {name: np.zeros((len(rows), network.config.hidden_size), np.float32) for name in STATES}
    order = sorted(range(len(rows)), key=lambda at: -len(rows[at][2]))
    while order:
        width = len(rows[order[0]][2])
        batch, order = order[: max(BATCH_TOKENS // width, 1)], order[max(BATCH_TOKENS // width, 1) :]
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        for line, at in enumerate(batch):
            ids[line, : len(rows[at][2])] = torch.tensor(rows[at][2])
        seen = network.base_model(input_ids=ids.to(device), use_cache=False)  # causal: padding is never seen
        states = seen.last_hidden_state.float().cpu().numpy()
        for line, at in enumerate(batch):
            start, length, whole = rows[at]
            end = start + max(length, 1)
            found[RESPONSE][at], found[QUERY][at] = states[line, end - 1], states[line, len(whole) - 1]
            found[MEAN][at] = states[line, start:end].mean(axis=0)
    return found


def labels(entry: QuestionSamples) -> list[float]:
    return [float(bool(sample.correct)) for sample in entry.samples]


def fit_probes(
    training: Pool,
    files: dict[str, Path],
    validation: Pool,
    target: Callable[[QuestionSamples], list[float]] = agreement,
) -> dict[str, dict[str, Floats]]:
    """Fit a ridge regression of each state to a target of the training responses; return [N] by split and state.

    The penalty is chosen by folds of the training questions. The mean state's values are made monotone by isotonic
    regression on the target of the validation responses (arXiv 2604.19444 does so with embeddings).
    """
    targets = np.array([value for entry in training for value in target(entry)])
    groups = np.repeat(np.arange(len(training)), [len(entry.samples) for entry in training])
    states = {split: np.load(file) for split, file in files.items()}
    found: dict[str, dict[str, Floats]] = {split: {} for split in files if split != "train"}
    for name in STATES:
        centre, scale = states["train"][name].mean(axis=0), states["train"][name].std(axis=0) + 1e-6
        read = {split: (arrays[name] - centre) / scale for split, arrays in states.items()}
        folds = list(GroupKFold(FOLDS, shuffle=True, random_state=0).split(read["train"], targets, groups))
        ridge = RidgeCV(alphas=PENALTIES, cv=folds).fit(read["train"], targets)
        values = {split: ridge.predict(read[split]) for split in found}
        if name == MEAN:
            checked = np.array([value for entry in validation for value in target(entry)])
            isotonic = IsotonicRegression(out_of_bounds="clip").fit(values["validation"], checked)
            values = {split: isotonic.predict(one) for split, one in values.items()}
        for split, one in values.items():
            found[split][name] = np.clip(one, 0.0, 1.0)
    return found
