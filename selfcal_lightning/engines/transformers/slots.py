"""The sampling state of the transformers engine: a slot for each request, a row of a few tensors for each slot.

Prompts, prefixes and queries are read into the slots' cache, each distinct one once.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.activated_probe import Table, check_equals_module
from selfcal_lightning.engines.transformers.model import CachedModel, load_network
from selfcal_lightning.engines.transformers.prefixes import chunks_of, padded
from selfcal_lightning.records import ConfidenceQuery, Request

_GREEDY_BELOW = 1e-5


def dynamic_temperature(
    logits: Tensor, *, base: float | Tensor = 0.8, scale: float | Tensor = 0.8, theta: float | Tensor = 1.0
) -> Tensor:
    """Return the entropy-based dynamic temperature (EDT) of each next-token distribution."""
    log_p = _at_least_float32(logits).log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p.clamp_min(torch.finfo(p.dtype).min)).sum(-1)
    log_scale = torch.as_tensor(scale, dtype=p.dtype, device=p.device).log()
    exponent = theta * log_scale / entropy.clamp_min(torch.finfo(p.dtype).tiny)
    return torch.where(entropy > 0.0, base * exponent.exp(), 0.0)


def tempered_probabilities(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Return ``softmax(logits / temperature)``; below 1e-5 all mass lies on the first of the largest logits."""
    logits = _at_least_float32(logits)
    temperature = torch.as_tensor(temperature, dtype=logits.dtype, device=logits.device)
    greedy = (temperature < _GREEDY_BELOW).expand(logits.shape[:-1])
    shifted = logits - logits.amax(-1, keepdim=True)
    p = (shifted / temperature.clamp_min(_GREEDY_BELOW).unsqueeze(-1)).softmax(-1)
    one_hot = torch.zeros_like(p).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy.unsqueeze(-1), one_hot, p)


def nucleus(probabilities: Tensor, top_p: float | Tensor) -> Tensor:
    """Return the probabilities restricted to the smallest set of most probable tokens whose mass reaches ``top_p``."""
    top_p = torch.as_tensor(top_p, dtype=probabilities.dtype, device=probabilities.device)
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked.cumsum(-1) - ranked
    dropped = (mass_before >= top_p.unsqueeze(-1)) & (top_p < 1.0).unsqueeze(-1)
    kept = torch.zeros_like(probabilities).scatter_(-1, order, ranked.masked_fill(dropped, 0.0))
    return kept / kept.sum(-1, keepdim=True)


def sampling_probabilities(
    logits: Tensor,
    *,
    temperature: float | Tensor,
    edt_scale: float | Tensor | None,
    edt_theta: float | Tensor = 1.0,
    top_p: float | Tensor = 1.0,
) -> Tensor:
    """Return the distribution that a token is drawn from: temperature, fixed or dynamic, then the nucleus.

    Settings are numbers, or [...] with one value a row. The names are those of ``records.SamplingSettings``.
    """
    if edt_scale is not None:
        temperature = dynamic_temperature(logits, base=temperature, scale=edt_scale, theta=edt_theta)
    p = tempered_probabilities(logits, temperature)
    if isinstance(top_p, Tensor) or top_p < 1.0:
        p = nucleus(p, top_p)
    return p


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token where the cumulative probability first exceeds ``uniforms``, in float64.

    Engines whose probabilities agree to 1e-7 draw different tokens from the same number with a chance of that order.
    """
    cumulative = probabilities.double().cumsum(-1)
    threshold = uniforms.double().unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _widened(x: Tensor, width: int, *, value: float = 0) -> Tensor:
    """Return ``x`` with at least ``width`` columns."""
    return x if x.shape[1] >= width else torch.nn.functional.pad(x, (0, width - x.shape[1]), value=value)


class SlotRows:
    """Which request holds which slot, and how far each has come.

    A row's ``pending`` token is the last one known; it is to be fed at ``position``, which is also the number of the
    row's tokens in the cache. A row that is done stands still: feeding it again rewrites the same column.
    """

    def __init__(self, num_slots: int, end_ids: Tensor) -> None:
        def zeros(*width: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(num_slots, *width, dtype=dtype, device=end_ids.device)

        self.requests: list[Request | None] = [None] * num_slots
        self.prompts: list[tuple[int, ...] | None] = [None] * num_slots
        self._end_ids = end_ids
        self.pending, self.position, self.count, self._limit = (zeros() for _ in range(4))
        self.tokens, self._step_ids = zeros(1), zeros(1) - 1
        self.stopped, self.stepped, self.done = (zeros(dtype=torch.bool) for _ in range(3))
        self.done[:] = True
        self.logprob, self._uniforms = zeros(dtype=torch.float64), zeros(1, dtype=torch.float64)
        self._settings = zeros(4, dtype=torch.float32)
        self._any_edt = self._any_top_p = self._any_step = False

    def live(self) -> list[int]:
        return [slot for slot, request in enumerate(self.requests) if request is not None]

    def held(self, slot: int) -> Request:
        return cast(Request, self.requests[slot])

    def choose(self, requests: Sequence[Request]) -> list[int]:
        """Return a free slot for each request, one that holds its prompt if there is one, else the lowest."""
        free = [slot for slot, request in enumerate(self.requests) if request is None]
        holding = {self.prompts[slot]: slot for slot in reversed(free)}
        chosen = {i: holding.pop(r.prompt_ids) for i, r in enumerate(requests) if r.prompt_ids in holding}
        taken = set(chosen.values())
        rest = iter([slot for slot in free if slot not in taken])
        return [chosen[i] if i in chosen else next(rest) for i in range(len(requests))]

    def admit(self, slots: Sequence[int], requests: Sequence[Request], limits: Sequence[int]) -> None:
        """Start ``requests`` in ``slots``, each with its limit of tokens.

        Token i of a response, counted from the beginning of its prefix, is drawn with its uniform number i.
        """
        longest = max(limits)
        uniforms = torch.zeros(len(slots), longest + 1, dtype=torch.float64)
        for row, (request, limit) in enumerate(zip(requests, limits, strict=True)):
            stream = torch.Generator().manual_seed(request.seed)
            uniforms[row, :limit] = torch.rand(limit, generator=stream, dtype=torch.float64)
        self.tokens, self._uniforms = _widened(self.tokens, longest + 1), _widened(self._uniforms, longest + 1)
        settings = [
            (s.temperature, 1.0 if s.edt_scale is None else s.edt_scale, s.edt_theta, s.top_p)
            for s in (request.sampling for request in requests)
        ]
        device = self.done.device
        where = torch.tensor(slots, device=device)
        contexts = [request.context_ids for request in requests]
        self.pending[where] = torch.tensor([ids[-1] for ids in contexts], device=device)
        self.position[where] = torch.tensor([len(ids) - 1 for ids in contexts], device=device)
        self._limit[where] = torch.tensor(limits, device=device)
        self._settings[where] = torch.tensor(settings, device=device)
        self._uniforms[where, : longest + 1] = uniforms.to(device)
        prefixes = padded([request.prefix_ids for request in requests], device)
        self.count[where] = torch.tensor([len(request.prefix_ids) for request in requests], device=device)
        self.tokens[where, : prefixes.shape[1]] = prefixes
        step_ids = padded([request.step_ids for request in requests], device, value=-1)
        self._step_ids = _widened(self._step_ids, step_ids.shape[1], value=-1)
        self._step_ids[where] = -1
        self._step_ids[where, : step_ids.shape[1]] = step_ids
        self.logprob[where] = 0.0
        self.stopped[where] = self.stepped[where] = False
        self.done[where] = False
        for slot, request in zip(slots, requests, strict=True):
            self.requests[slot], self.prompts[slot] = request, request.prompt_ids
        sampling = [request.sampling for request in self.requests if request is not None]
        self._any_edt = any(s.edt_scale is not None for s in sampling)
        self._any_top_p = any(s.top_p < 1.0 for s in sampling)
        self._any_step = any(request.step_ids for request in self.requests if request is not None)

    def drawn(self, slots: Sequence[int]) -> list[int]:
        """Return how many tokens were drawn for the requests in ``slots``, without their prefixes."""
        counts = self.count[list(slots)].tolist() if slots else []
        return [count - len(self.held(slot).prefix_ids) for slot, count in zip(slots, counts, strict=True)]

    def release(self, slots: Sequence[int]) -> None:
        """Free slots. The prompts that they hold stay readable until other requests overwrite them."""
        for slot in slots:
            self.requests[slot] = None
        where = torch.tensor(slots, dtype=torch.long, device=self.done.device)
        self.done[where] = True
        # A free row is still fed along with the others: it now writes just right of its prompt.
        ends = [max(len(self.prompts[slot] or ()) - 1, 0) for slot in slots]
        self.position[where] = torch.tensor(ends, dtype=torch.long, device=self.done.device)

    def gather(self, sources: Sequence[int]) -> None:
        """Move the rows ``sources``, in ascending order and all that are live, to the slots 0, 1, 2, ...."""
        num = len(sources)
        read = torch.tensor(sources, device=self.done.device)
        progress = (self.pending, self.position, self.count, self.tokens, self.stopped, self.stepped, self.done)
        for tensor in (*progress, self.logprob, self._limit, self._uniforms, self._settings, self._step_ids):
            tensor[:num] = tensor[read]
        self.requests[:num] = [self.requests[slot] for slot in sources]
        self.prompts[:num] = [self.prompts[slot] for slot in sources]
        self.release(range(num, len(self.requests)))

    def advance(self, logits: Tensor) -> None:
        """Draw a token for each of the first slots from ``logits`` [slots in use, vocabulary]."""
        n = len(logits)
        logits = logits.float()
        temperature, edt_scale, edt_theta, top_p = self._settings[:n].unbind(1)
        probabilities = sampling_probabilities(
            logits,
            temperature=temperature,
            edt_scale=edt_scale if self._any_edt else None,
            edt_theta=edt_theta,
            top_p=top_p if self._any_top_p else 1.0,
        )
        count = self.count[:n]
        token = draw(probabilities, self._uniforms[:n].gather(1, count[:, None]).squeeze(1))
        running = ~self.done[:n]
        ended = torch.isin(token, self._end_ids) & running
        grows = running & ~ended
        gain = logits.gather(1, token[:, None]).squeeze(1) - logits.logsumexp(1)
        self.logprob[:n] += gain.double().masked_fill(~grows, 0.0)
        self.tokens[:n].scatter_(1, count[:, None], token[:, None])
        self.pending[:n] = torch.where(running, token, self.pending[:n])
        self.position[:n] += running
        self.stopped[:n] |= ended
        count += grows
        cut = count >= self._limit[:n]
        if self._any_step:
            ends_step = (token[:, None] == self._step_ids[:n]).any(1) & grows & ~cut
            self.stepped[:n] |= ends_step
            cut = cut | ends_step
        self.done[:n] |= ended | cut


def encode_contexts(model: CachedModel, rows: SlotRows, requests: Mapping[int, Request], *, most: int) -> None:
    """Bring all but the last token of each request's prompt and prefix into its slot."""
    model.cache.reserve(max(requests) + 1, max(len(request.context_ids) for request in requests.values()))
    holders = {rows.held(slot).prompt_ids: slot for slot in rows.live()}
    kept = {slot: request.prompt_ids for slot, request in requests.items()}
    holders |= {prompt: slot for slot, prompt in kept.items() if rows.prompts[slot] == prompt}
    new = {prompt: slot for slot, prompt in kept.items() if prompt not in holders and len(prompt) > 1}
    for chunk in chunks_of(new, len, most):
        where = torch.tensor([new[prompt] for prompt in chunk], device=model.device)
        model.extend(where, torch.zeros_like(where), padded([prompt[:-1] for prompt in chunk], model.device))
    holders |= new
    _copy(model, requests, {slot: holders[p] for slot, p in kept.items() if len(p) > 1}, part="prompt_ids")
    continued = {slot: request.context_ids for slot, request in requests.items() if request.prefix_ids}
    readers: dict[tuple[int, ...], int] = {}
    for slot, ids in continued.items():
        readers.setdefault(ids, slot)
    for slots in chunks_of(readers.values(), lambda slot: len(requests[slot].prefix_ids), most):
        # All but the last token of the prompt is there, and the last one of the context is still to come.
        starts = [len(requests[slot].prompt_ids) - 1 for slot in slots]
        tails = [requests[slot].context_ids[start:-1] for slot, start in zip(slots, starts, strict=True)]
        device = model.device
        model.extend(torch.tensor(slots, device=device), torch.tensor(starts, device=device), padded(tails, device))
    _copy(model, requests, {slot: readers[ids] for slot, ids in continued.items()}, part="context_ids")


def _copy(model: CachedModel, requests: Mapping[int, Request], sources: Mapping[int, int], *, part: str) -> None:
    copies = {slot: source for slot, source in sources.items() if slot != source}
    if copies:
        longest = max(len(getattr(requests[slot], part)) for slot in copies)
        model.cache.copy_slots(list(copies.values()), list(copies), longest - 1)


def read_queries(
    model: CachedModel, rows: SlotRows, slots: Sequence[int], *, awake: bool
) -> dict[int, tuple[float, float]]:
    """Return the Yes and No masses after the query of each slot, in one forward pass over the slots' own caches."""
    if not slots:
        return {}
    where = torch.tensor(slots, device=model.device)
    pending, stopped = rows.pending[where].tolist(), rows.stopped[where].tolist()
    queries = [cast(ConfidenceQuery, rows.held(slot).query) for slot in slots]
    if awake:
        # The base model reads the last tokens of responses that were cut. They are not in the cache yet (those of a
        # response that ended are), and are no tokens of the query.
        cut = where[~rows.stopped[where]]
        if len(cut):
            model.extend(cut, rows.position[cut], rows.pending[cut][:, None])
        rows.position[cut] += 1
        stopped = [True] * len(slots)
    inputs = [
        query.suffix_ids if ended else (last, *query.suffix_ids)
        for query, last, ended in zip(queries, pending, stopped, strict=True)
    ]
    lasts, index = torch.tensor([len(ids) - 1 for ids in inputs], device=model.device).unique(return_inverse=True)
    ids = padded(inputs, model.device)
    logits = model.extend(where, rows.position[where], ids, keep=lasts, in_float32=True, awake=awake)
    p = logits[torch.arange(len(slots), device=model.device), index].double().softmax(-1)
    masses: dict[int, tuple[float, float]] = {}
    for query in dict.fromkeys(queries):
        members = [i for i, other in enumerate(queries) if other == query]
        of_members = p[members]
        yes, no = (of_members[:, list(ids)].sum(1).clamp(max=1.0).tolist() for ids in (query.yes_ids, query.no_ids))
        masses |= {slots[i]: pair for i, pair in zip(members, zip(yes, no, strict=True), strict=True)}
    return masses


def check_sleep(model: CachedModel, query_ids: Sequence[int]) -> None:
    """Compare the engine's own two passes; loading has compared the adapter asleep with the base model."""
    vocabulary = model.network.config.get_text_config().vocab_size
    context = [i % vocabulary for i in range(1, 9)]
    asleep = model.next_token_logits([context])
    never = torch.equal(model.query_logits([context], query_ids), model.query_logits([context], query_ids, awake=False))
    if never or not torch.equal(model.next_token_logits([context]), asleep):
        wanted = "an adapter that is awake for its query and asleep before and after it"
        found = "never wakes" if never else "stays awake"
        way_out = "Was it exported by `selfcal fit`, and are its weights not all zero?"
        raise InputError(f"Expected {wanted}, but got one that {found}. {way_out}")


def hold_against_module(
    awake: Table, contexts: Sequence[Sequence[int]], activated: Mapping[str, Sequence[int]], *, model: str,
    revision: str | None, adapter: str, engine: str,
) -> None:  # fmt: skip
    """Compare an engine's probabilities with those of the training module on the CPU, both in float32."""
    cached = CachedModel(load_network(model, revision=revision, adapter=adapter, dtype="float32", device="cpu"))
    with torch.no_grad():
        logits = torch.cat([cached.query_logits([context], activated["query"]) for context in contexts])
    module = logits.double().softmax(-1)[:, list(activated["token_ids"])].tolist()
    check_equals_module(awake, module, engine=engine)
