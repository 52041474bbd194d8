"""Networks: loading, LoRA, packed rows, activated adapters, quantisation."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "activated": ["ask", "check_two_passes", "read_contexts"],
        "activation": ["adapter_asleep", "load_sleeping_adapter"],
        "adapter_files": ["adapter_identity", "read_invocation_ids"],
        "causal_lm": [
            "Confidence",
            "confidence_from_logits",
            "load_causal_lm",
            "load_config",
            "logits_at",
            "recompute_layers",
            "register_segment_attention",
        ],
        "lora": [
            "LoraSettings",
            "adapter_difference",
            "adapter_state",
            "attach_lora",
            "load_adapter",
            "merge_adapter",
            "read_adapter_state",
            "save_adapter",
            "set_adapter_state",
        ],
        "memory_needs": ["adapter_numbers", "all_numbers", "files_on_this_disk", "frozen_bytes"],
        "meta_models": ["check_architecture"],
        "model_outputs": ["ModelOutputs", "read_outputs"],
        "packing_support": [
            "check_packed_equals_separate",
            "check_shared_prefix",
            "runs_packed_rows",
            "shared_prefix_problem",
        ],
        "quantization": [
            "OptimizerName",
            "Quantization",
            "build_optimizer",
            "check_installed",
            "check_settings",
            "keep_quantized_gradients",
            "load_nf4_causal_lm",
        ],
        "segment_attention": ["TreeMasks", "check_attention"],
        "sharded_loading": ["load_sharded_causal_lm"],
        "weight_files": ["WeightFiles"],
    },
)
