"""Which strategy, device and precision supports which feature: one table and its check."""

from collections.abc import Mapping, Sequence
from typing import Literal

from lightning.pytorch import Trainer, strategies

from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.models.quantization import CLASSES
from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy
from selfcal_lightning.training.settings import MemorySettings

Way = Literal["one process", "DDP", "FSDP2"]
Support = Literal["yes", "not run", "no"]
WAYS: tuple[Way, ...] = ("one process", "DDP", "FSDP2")
STRATEGY = "selfcal_lightning.training.model_parallel.AdapterModelParallelStrategy"

# "yes": a test of this project runs it on a CPU. "not run": nothing forbids it, no test of ours does it. "no": refused.
# A GPU has no test: benchmarks/real/report_real.py trained by 32-true on an H200, benchmarks/gpu.sh in bfloat16.
SUPPORT: dict[str, dict[Way, Support]] = {
    "LoRA": {"one process": "yes", "DDP": "yes", "FSDP2": "yes"},
    "full fine-tuning": {"one process": "yes", "DDP": "yes", "FSDP2": "yes"},
    "QLoRA (nf4)": {"one process": "yes", "DDP": "yes", "FSDP2": "no"},
    "8-bit and paged optimisers": {"one process": "yes", "DDP": "yes", "FSDP2": "no"},
    "gradient checkpointing": {"one process": "yes", "DDP": "yes", "FSDP2": "yes"},
    "auxiliary adapters": {"one process": "yes", "DDP": "not run", "FSDP2": "no"},
    "CPU": {"one process": "yes", "DDP": "yes", "FSDP2": "yes"},
    "GPU": {"one process": "yes", "DDP": "not run", "FSDP2": "not run"},
    "precision 32-true": {"one process": "yes", "DDP": "yes", "FSDP2": "yes"},
    "precision bf16-mixed": {"one process": "yes", "DDP": "yes", "FSDP2": "yes"},
    "precision bf16-true": {"one process": "yes", "DDP": "yes", "FSDP2": "yes"},
    "precision 16-mixed": {"one process": "not run", "DDP": "not run", "FSDP2": "no"},
}
REASONS: dict[tuple[str, Way], str] = {
    ("QLoRA (nf4)", "FSDP2"): "4-bit weights cannot be cut by rows. Use `trainer.strategy: ddp`, or no `quantization`",
    ("8-bit and paged optimisers", "FSDP2"): (
        "bitsandbytes blocks cannot follow sharded parameters. Use `trainer.strategy: ddp`, or `optimizer: adamw`"
    ),
    ("auxiliary adapters", "FSDP2"): (
        "sharding several adapters is untested. Use `trainer.strategy: ddp`, or leave `auxiliary` out"
    ),
    ("precision 16-mixed", "FSDP2"): "the float16 gradient scaler would decide in each process. Use bf16-mixed",
}
PRECISIONS = tuple(name.removeprefix("precision ") for name in SUPPORT if name.startswith("precision "))


def check_support(trainer: Trainer, memory: MemorySettings, *, lora: bool, auxiliary: bool = False) -> None:
    asked = ["LoRA" if lora else "full fine-tuning"]
    asked += ["QLoRA (nf4)"] if memory.quantization is not None else []
    asked += ["8-bit and paged optimisers"] if memory.optimizer in CLASSES else []
    asked += ["gradient checkpointing"] if memory.gradient_checkpointing else []
    asked += ["auxiliary adapters"] if auxiliary else []
    check_features(trainer, asked)


def check_features(
    trainer: Trainer,
    features: Sequence[str],
    *,
    rows: Mapping[str, Mapping[Way, Support]] | None = None,
    reasons: Mapping[tuple[str, Way], str] | None = None,
) -> None:
    table, why = {**SUPPORT, **(rows or {})}, {**REASONS, **(reasons or {})}
    if unknown := [name for name in features if name not in table]:
        raise unknown_name("features", unknown[0], list(table))
    way = way_of(trainer.strategy)
    precision = str(trainer.precision)
    if precision not in PRECISIONS:
        raise InputError(f"`trainer.precision` must be one of {PRECISIONS}, but got {precision!r}.")
    device = "CPU" if trainer.strategy.root_device.type == "cpu" else "GPU"
    for feature in (*features, device, f"precision {precision}"):
        if table[feature][way] == "no":
            raise InputError(f"{way} does not support {feature}: {why[feature, way]}.")


def way_of(strategy: strategies.Strategy) -> Way:
    if isinstance(strategy, AdapterModelParallelStrategy):
        return "FSDP2"
    # DeepSpeed's and XLA's strategies are kinds of DDPStrategy to Lightning.
    others = (strategies.DeepSpeedStrategy, strategies.XLAStrategy, strategies.SingleDeviceXLAStrategy)
    if isinstance(strategy, strategies.SingleDeviceStrategy) and not isinstance(strategy, others):
        return "one process"
    if isinstance(strategy, strategies.DDPStrategy) and not isinstance(strategy, others):
        return "DDP"
    reasons = {
        strategies.FSDPStrategy: "which is FSDP1",
        strategies.ModelParallelStrategy: "which cannot resume from checkpoints of an adapter",
        strategies.DeepSpeedStrategy: "which is DeepSpeed",
    }
    reason = next((why for kind, why in reasons.items() if isinstance(strategy, kind)), "which was never tried here")
    raise InputError(
        f"`trainer.strategy` must be one process, DDP or FSDP2, but got {type(strategy).__name__}, {reason}. "
        f"Use `ddp`, or for sharded weights `class_path: {STRATEGY}`."
    )


def support_table() -> str:
    lines = [f"| | {' | '.join(WAYS)} |", "|---|" + "---|" * len(WAYS)]
    lines += [f"| {feature} | {' | '.join(row[way] for way in WAYS)} |" for feature, row in SUPPORT.items()]
    return "\n".join(lines)
