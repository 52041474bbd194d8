"""Loading models and adapters, chat formats, packing."""

import lazy_loader

_NAMES = {
    "activated": "adapter_asleep ask check_two_passes load_sleeping_adapter read_contexts",
    "causal_lm": "Confidence WeightFiles confidence_from_logits load_causal_lm logits_at recompute_layers",
    "chat_format": "ChatFormat DEFAULT_QUERY NO_TEXTS YES_TEXTS generation_end_ids load_tokenizer vocabulary_size",
    "folders": "adapter_identity load_config read_invocation_ids",
    "lora": """
        LoraSettings adapter_difference adapter_state attach_lora load_adapter merge_adapter read_adapter_state
        save_adapter set_adapter_state
    """,
    "outputs": "ModelOutputs read_outputs",
    "packing": """
        TreeMasks check_attention check_packed_equals_separate check_shared_prefix register_segment_attention
        runs_packed_rows shared_prefix_problem
    """,
    "quantization": """
        OptimizerName Quantization build_optimizer check_installed keep_quantized_gradients load_nf4_causal_lm
    """,
    "sharded_loading": """
        adapter_numbers all_numbers check_architecture files_on_this_disk frozen_bytes load_sharded_causal_lm
    """,
}

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={module: names.split() for module, names in _NAMES.items()}
)
