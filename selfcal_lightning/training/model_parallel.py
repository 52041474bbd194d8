"""Fully sharded training (FSDP2) of adapters and of whole models, as a strategy of Lightning's Trainer."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.models.sharded_loading import load_sharded_causal_lm
from selfcal_lightning.training.checkpoints import is_address
from selfcal_lightning.training.settings import check_positive


def trainer_of(module: LightningModule) -> Trainer | None:
    """Return the trainer of a module, or None; the public attribute would raise."""
    trainer: Trainer | None = module._trainer
    return trainer


def callbacks_of(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]  # set by a connector of the Trainer


def data_module_of(trainer: Trainer) -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]  # set by a connector of the Trainer


def forget_sigterm(trainer: Trainer) -> None:
    """Clear the SIGTERM flag of Lightning's own handler, which would end the run without a checkpoint."""
    trainer._signal_connector.received_sigterm = False


def deals_rows_anew(trainer: Trainer) -> bool:
    """Return whether Lightning would insert a distributed sampler into every loader."""
    connector = trainer._accelerator_connector
    return bool(connector.use_distributed_sampler and (connector.is_distributed or trainer.world_size > 1))


def build_validation_loaders(trainer: Trainer) -> None:
    """Build the validation loaders during training, before Lightning does."""
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.setup_data()
    trainer.training = True


def decides_at_epoch_end(trainer: Trainer, callback: EarlyStopping | Timer) -> bool:
    """Return whether a callback decides at the end of an epoch whether to stop."""
    if isinstance(callback, Timer):
        return bool(callback._interval == "epoch")
    late = callback._check_on_train_epoch_end
    if late is None:  # what Lightning's own `setup` takes it for; it may come later
        return trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
    return bool(late)


def begin_epoch_after_whole_one(trainer: Trainer) -> None:
    """Let Lightning count the epoch that follows a checkpoint of the last batch of an epoch.

    Its batches are counted as so many micro-batches as this run has, or Lightning would train the missing ones.
    """
    loop = trainer.fit_loop
    epoch: Any = loop.epoch_progress.current
    batches = loop.epoch_loop.batch_progress
    if loop.restarted_mid_epoch and batches.is_last_batch:
        counts = vars(batches.current)
        missing = trainer.num_training_batches - counts["processed"]
        counts.update({name: count + missing for name, count in counts.items()})
    if loop.restarted_mid_epoch and epoch.ready == epoch.processed:
        loop.reset_restart_stage()


class AdapterModelParallelStrategy(ModelParallelStrategy):
    """FSDP2: every process holds and reads only its shard of the weights, gradients and optimiser states.

    Checkpoints are single files in the format of one process and DDP: the trained weights and their optimiser states,
    unsharded, without the frozen base weights. A run can resume with another number of processes or another strategy.

    Lightning's own strategy (2.6.6) stores the frozen weights or fails to resume without them, reads a sharded
    checkpoint only if it holds every weight, and takes "auto" to mean one process per node.

    Args:
        data_parallel_size: Number of neighbouring ranks that share one copy of the weights; None is all. With the
            number of a node's GPUs, each node holds the whole weights, gathers them within the node, and only gradients
            of trained weights cross the network. Check with `--check` that this fits.
        tensor_parallel_size: Only 1 is supported.
        process_group_backend: "nccl" or "gloo"; None is NCCL on GPUs and gloo on CPUs.
        gather_bfloat16: Gather float32 weights in bfloat16: half the traffic. Gradients are still summed in float32.
            Needs the Trainer's precision "bf16-mixed".
        timeout_minutes: Timeout of collectives.
    """

    restore_checkpoint_after_setup = False  # at the same time as DDP: the weights are in place after `configure_model`
    lightning_restore_optimizer = True  # once the optimisers exist

    def __init__(
        self,
        data_parallel_size: int | None = None,
        tensor_parallel_size: int = 1,
        *,
        process_group_backend: Literal["nccl", "gloo"] | None = None,
        gather_bfloat16: bool = False,
        timeout_minutes: float = 30.0,
    ) -> None:
        if tensor_parallel_size != 1:
            raise InputError(f"`tensor_parallel_size` must be 1 (FSDP2 shards), but got {tensor_parallel_size}.")
        check_positive(timeout_minutes=timeout_minutes)
        check_at_least(1, data_parallel_size=data_parallel_size)
        super().__init__(
            data_parallel_size="auto",
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timedelta(minutes=timeout_minutes),
        )
        self.gather_bfloat16 = gather_bfloat16
        self._group_size = data_parallel_size
        self._weights_mesh: DeviceMesh | None = None

    @property
    def shards(self) -> int:
        return self._group_size or self.num_nodes * self.num_processes

    def setup_environment(self) -> None:
        """Start the process group and two meshes: all processes, and those that share one copy of the weights."""
        world_size, size = self.num_nodes * self.num_processes, self.shards
        if world_size % size:
            raise InputError(f"`data_parallel_size` {size} must divide the number of processes, {world_size}.")
        self._data_parallel_size = world_size
        super().setup_environment()
        self._weights_mesh = self.device_mesh["data_parallel"]
        if size < world_size:
            self._weights_mesh = init_device_mesh(
                self.root_device.type, (world_size // size, size), mesh_dim_names=("replicate", "shard")
            )

    def setup(self, trainer: Trainer) -> None:
        """Set up as Lightning does, with evaluation under ``no_grad``.

        After a forward pass under ``inference_mode`` the weights never get gradients again (torch 2.13). Lightning
        avoids this only for FSDP1 and gloo (2.6.6, ``loops/utilities.py``).
        """
        loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        for loop in loops:
            loop.inference_mode = False
        super().setup(trainer)

    def load_model(self, base_model: str, **settings: Any) -> nn.Module:
        policy, precision = None, self.precision_plugin.precision
        if self.gather_bfloat16:
            if precision != "bf16-mixed":
                raise InputError(f"`gather_bfloat16` needs `trainer.precision` bf16-mixed, but got {precision}.")
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model, files = load_sharded_causal_lm(
            base_model, mesh=cast("DeviceMesh", self._weights_mesh), device=self.root_device, policy=policy, **settings
        )
        read, stored = files.bytes_read / 2**20, files.total_bytes / 2**20
        rank_zero_info(
            f"FSDP2: each of {self.world_size} processes loads its rows; the first loaded {read:,.1f} MiB of "
            f"{stored:,.1f} MiB."
        )
        return model

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return gather_trained(cast("LightningModule", self.lightning_module))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this process's shard of an unsharded checkpoint, which the module has checked for completeness."""
        with torch.no_grad():
            for name, parameter in cast("LightningModule", self.lightning_module).named_parameters():
                if name in checkpoint["state_dict"]:
                    parameter.copy_(shard_like(checkpoint["state_dict"][name], parameter))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the unsharded states of ``optimizer`` on the first process. A collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        state = optimizer.state_dict()
        full = {
            index: {
                name: _gather(value, keep=self.is_global_zero) if isinstance(value, Tensor) else value
                for name, value in entry.items()
            }
            for index, entry in state["state"].items()
        }
        return {**state, "state": full} if self.is_global_zero else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this process's shard of the unsharded optimiser states of a checkpoint."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            cut = {
                index: {
                    name: shard_like(value, parameters[index])
                    if isinstance(value, Tensor) and value.shape == parameters[index].shape
                    else value
                    for name, value in entry.items()
                }
                for index, entry in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": cut})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        _check_is_on_disk(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the checkpoint that the first process chose, without running code from it."""
        _check_is_on_disk(checkpoint_path)
        path = Path(self.broadcast(str(checkpoint_path)))
        if path.is_dir():
            raise InputError(f"`ckpt_path` must be a single file, as this strategy writes, but got the folder {path}.")
        return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only is not False)


def _check_is_on_disk(path: str | Path) -> None:
    if is_address(path):
        raise InputError(
            f"FSDP2 checkpoints must lie on a disk that all processes see, but got {str(path)!r}. Set `dirpath` of "
            "ModelCheckpoint to a folder."
        )


def is_sharded(module: nn.Module) -> bool:
    """Return whether the weights of ``module`` are sharded, so that every forward pass is a collective."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def gather_trained(module: nn.Module) -> dict[str, Tensor]:
    """Return the unsharded trained parameters, on the CPU of the first process only. A collective if sharded."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    first = not distributed or torch.distributed.get_rank() == 0
    gathered = {
        name: _gather(parameter.detach(), keep=first)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    return {name: value for name, value in gathered.items() if value is not None}


def join_forward(model: nn.Module, device: torch.device, *, passes: int = 1) -> None:
    """Join forward passes for which this process has no row, with a dummy token: under FSDP2 all processes must."""
    if not is_sharded(model):
        return
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    with torch.no_grad():
        for _ in range(passes):
            model(input_ids=token, attention_mask=torch.ones_like(token), use_cache=False)


def _gather(value: Tensor, *, keep: bool) -> Tensor | None:
    """Return an unsharded copy of ``value`` on the CPU, one tensor at a time, or None without ``keep``."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return whole.cpu() if keep else None


def shard_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this process's shard of ``whole``, which every process has; no communication."""
    if not isinstance(parameter, DTensor):
        return whole.to(parameter)
    moved = whole.to(device=parameter.device, dtype=parameter.dtype)
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)
