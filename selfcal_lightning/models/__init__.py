"""Loading models and adapters, chat formats, packing."""
