"""Entropy-based dynamic temperature as a vLLM logits processor, for Model Runner V1 and V2. Imports vLLM."""

import math
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, process_dict_updates
from vllm.v1.sample.logits_processor import LogitsProcessor as ProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorV2

from selfcal_lightning.core.errors import InputError

EXTRA_ARG = "edt"
_COLDEST = 1e-5
_MASKED = -1e4
_LEAST_ENTROPY = 1e-9
_NEUTRAL = (1.0, 1.0, 0.0)  # a temperature of 1
Setting = float | torch.Tensor  # for all rows, or [rows, 1]
_CHUNK_ELEMENTS = 2**25  # 128 MiB a temporary: vLLM has not set memory aside for more of them


def sharpen_logits_(logits: torch.Tensor, base: Setting, scale: Setting, theta: Setting) -> torch.Tensor:
    """Divide each row of ``logits`` in place by its temperature ``T = base * scale ** (theta / H)``."""
    size = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    if len(logits) > size:
        for start in range(0, len(logits), size):
            rows = slice(start, start + size)
            own = (value[rows] if isinstance(value, torch.Tensor) else value for value in (base, scale, theta))
            sharpen_logits_(logits[rows], *own)
        return logits
    logits.sub_(logits.amax(-1, keepdim=True))  # the largest is exactly 0, so that a tiny temperature overflows nothing
    weights = logits.exp()
    total = weights.sum(-1, keepdim=True)
    weights.mul_(logits.clamp_min(_MASKED))  # 0 * -inf of a masked token would be nan
    entropy = total.log() - weights.sum(-1, keepdim=True) / total
    entropy.clamp_min_(_LEAST_ENTROPY)  # it may come out as -0.0, and 1 / -0.0 turns the sign of the exponent
    log_scale = torch.log(scale) if isinstance(scale, torch.Tensor) else math.log(scale)
    temperature = (base * torch.exp(theta * log_scale / entropy)).clamp_(min=_COLDEST)
    return logits.div_(temperature)


def _edt_parameters(sampling_params: SamplingParams) -> tuple[float, ...] | None:
    values = (sampling_params.extra_args or {}).get(EXTRA_ARG)
    return None if values is None else tuple(map(float, values))


class DynamicTemperature(ProcessorV1, ProcessorV2):
    """EDT for the requests that ask for it by ``extra_args={"edt": [base, scale, theta]}`` and ``temperature=1``."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        values = (sampling_params.extra_args or {}).get(EXTRA_ARG)
        if values is None:
            return
        if len(values) != 3 or not (values[0] > 0 and 0 < values[1] <= 1 and values[2] >= 0):
            raise InputError(f"Expected `{EXTRA_ARG}` to be [base > 0, 0 < scale <= 1, theta >= 0], but got {values}.")
        if sampling_params.temperature != 1.0 or sampling_params.min_p:
            wanted = f"`temperature` to be 1.0 and `min_p` to be 0 with `{EXTRA_ARG}`, which replaces them"
            raise InputError(f"Expected {wanted}, but got {sampling_params.temperature} and {sampling_params.min_p}.")

    def __init__(self, vllm_config: VllmConfig, device_or_states: Any, is_pin_memory: bool | None = None) -> None:
        self._by_slot = is_pin_memory is None  # V2 passes (config, request states), V1 (config, device, pin memory)
        if self._by_slot:
            self._device, num_slots = device_or_states.device, device_or_states.max_num_reqs
            self._slot_on = np.zeros(num_slots, dtype=bool)
            self._slot_staged = torch.tensor(_NEUTRAL).repeat(num_slots, 1)
            self._slot_parameters = self._slot_staged.to(self._device)
            self._slots_stale = False
        else:
            self._device = torch.device(device_or_states)
            self._row_requests: dict[int, tuple[float, ...]] = {}
            self._rows = torch.empty(0, dtype=torch.long)
            self._row_parameters: tuple[Any, ...] = _NEUTRAL

    def is_argmax_invariant(self) -> bool:
        """Return True: dividing by a positive temperature keeps the best token (V1)."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch (V1)."""
        if not process_dict_updates(self._row_requests, batch_update, lambda params, *_: _edt_parameters(params)):
            return
        rows = sorted(self._row_requests)
        self._rows = torch.tensor(rows, dtype=torch.long).to(self._device, non_blocking=True)
        if len(set(self._row_requests.values())) == 1:
            self._row_parameters = self._row_requests[rows[0]]
        else:
            table = torch.tensor([self._row_requests[row] for row in rows]).reshape(-1, 3)
            self._row_parameters = table.to(self._device, non_blocking=True).split(1, dim=1)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Take a request into its slot and return whether it wants EDT (V2)."""
        parameters = _edt_parameters(sampling_params)
        wanted = parameters is not None
        if wanted or self._slot_on[req_idx]:
            self._slot_staged[req_idx] = torch.tensor(parameters or _NEUTRAL)
            self._slots_stale = True
        self._slot_on[req_idx] = wanted
        return wanted

    def apply_staged_writes(self) -> None:
        """Copy new parameters to the device (V2)."""
        if self._slots_stale:
            staged = self._slot_staged
            if self._device.type == "cuda":  # a copy of its own, which the next request does not change on the way
                staged = staged.pin_memory()
            self._slot_parameters.copy_(staged, non_blocking=True)
            self._slots_stale = False

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Sharpen the rows of the requests that ask for it; V2 passes ``ctx``."""
        if ctx is not None:
            if not self._slot_on[ctx.idx_mapping_np].any():
                return logits
            # Nearly every step holds both queries and samples. Rows without EDT are divided by 1, which only shifts
            # them: a mask would cost a copy that waits for the device, and the asynchronous scheduling with it.
            parameters = self._slot_parameters[ctx.expanded_idx_mapping.long()].split(1, dim=1)
            return sharpen_logits_(logits, *parameters)
        if not self._row_requests:
            return logits
        if len(self._row_requests) == logits.shape[0]:
            return sharpen_logits_(logits, *self._row_parameters)
        logits[self._rows] = sharpen_logits_(logits[self._rows], *self._row_parameters)
        return logits
