"""LoRA adapters: merged into their base model, and extracted from a tuned model, a band of rows at a time."""
